"""stdout: what can be printed there, and does anybody still read it?"""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO


def can_print(text: str, out: TextIO) -> bool:
    """Can an output write a text in its own encoding, with nothing in its place?"""
    try:
        text.encode(out.encoding or "ascii")
    except UnicodeError:
        return False
    return True


def reader_watch(out: TextIO) -> Callable[[], bool]:
    """Give a question to ask now and then: has the reader of a pipe gone?

    A write would tell, but an answer that is held back, or a log that does not grow, writes nothing.
    For a terminal or a file the answer is always no.
    """
    poll = select.poll()
    with suppress(OSError):  # what has no descriptor is no pipe
        poll.register(out.fileno(), 0)  # errors are reported whatever is asked for
    return lambda: any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))
