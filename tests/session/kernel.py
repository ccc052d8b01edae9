"""Watches which system calls are made through the modules `os` and `fcntl`, without replacing any."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SEEN = ("mkdir", "write", "pread", "fdatasync", "fsync", "link", "rename", "flock")


@contextmanager
def kernel_calls(before: Callable[[str], None] = lambda _: None) -> Iterator[list[str]]:
    """Give the names of the calls that this thread makes, in order.

    `before` is told each name when the call is about to be made. What it raises, the call raises: the kernel's
    part of a failing disk. After that no more calls are seen.
    """
    calls: list[str] = []

    def profile(_: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__module__ in ("posix", "fcntl") and called.__name__ in SEEN:
            calls.append(called.__name__)
            before(called.__name__)

    former = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(former)


def failing(name: str, error: int) -> Callable[[str], None]:
    """Let the next call of that name fail with an errno."""

    def before(called: str) -> None:
        if called == name:
            raise OSError(error, os.strerror(error))

    return before


def open_descriptors() -> set[str]:
    """The descriptors of this process that are open on a file, with what they are open on."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the one that listed them
            continue
        if target.startswith("/") and not target.startswith(("/proc", "/dev")):
            found.add(f"{number} {target}")
    return found
