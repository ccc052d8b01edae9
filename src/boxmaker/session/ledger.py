"""`cache.jsonl`, the side file of a session that says what each completion cost.

Laws:
* It is not durable: nothing is synced, and whatever is missing or damaged in it is left out when it is read.
* The log is the truth: a line counts only for the completion whose figures it repeats.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from boxmaker.errors import ValueRefused
from boxmaker.proto.ledger import CACHE_LINE, CacheLine

LEDGER_NAME = "cache.jsonl"
LEDGER_MAX_BYTES = 256 << 20
"""A longer one is not read, and grows no more: a line is a few hundred bytes, so none of ours gets there."""


def append_lines(directory: Path, lines: Iterable[CacheLine]) -> None:
    """Append lines to a session's side file, which is made if it is not there.

    Raises:
        OSError: the disk said no, or something else stands in its place.
    """
    text = "".join(f"{CACHE_LINE.encode(line)}\n" for line in lines).encode("utf-8")
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(directory / LEDGER_NAME, flags, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LEDGER_MAX_BYTES:
            raise OSError(f"{LEDGER_NAME} is no file of ours")
        if found.st_size and os.pread(fd, 1, found.st_size - 1) != b"\n":
            text = b"\n" + text  # a torn line must not take the next with it
        os.write(fd, text)
    finally:
        os.close(fd)


def read_lines(directory: Path) -> dict[int, CacheLine]:
    """The lines of a session's side file by their completions; what cannot be read is left out, the last one counts."""
    file = directory / LEDGER_NAME
    try:
        if not file.is_file() or file.is_symlink() or file.stat().st_size > LEDGER_MAX_BYTES:
            return {}
        raw = file.read_bytes()
    except OSError:
        return {}
    found = {}
    for line in raw.split(b"\n"):
        try:
            value = CACHE_LINE.decode(line)
        except ValueRefused:
            continue
        found[value.completion] = value
    return found
