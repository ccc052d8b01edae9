"""`cache.jsonl`, the side file of a session that says what each completion cost.

Laws:
* It is not durable: nothing is synced, and whatever is missing or damaged in it is left out when it is read.
* The log is the truth: a line counts only for the completion whose figures it repeats. Without it all is known but
  cause and times.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import evolve

from boxmaker.errors import ValueRefused
from boxmaker.inference.cache import TokenFigures, expected_tokens
from boxmaker.proto.arguments import MAX_DEPTH, depth_of
from boxmaker.proto.ledger import CACHE_LINE, CacheLine
from boxmaker.proto.records import Assistant, CacheLoss, LogRecord, SessionStart, Usage

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


def read_lines(directory: Path, tail_bytes: int = LEDGER_MAX_BYTES) -> dict[int, CacheLine]:
    """The lines of a session's side file by their completions, those in its last `tail_bytes`.

    What cannot be read is left out, the last one of a completion counts.
    """
    name = directory / LEDGER_NAME
    try:
        if not name.is_file() or name.is_symlink() or (size := name.stat().st_size) > LEDGER_MAX_BYTES:
            return {}
        with name.open("rb") as file:
            file.seek(max(size - tail_bytes, 0))
            raw = file.read(tail_bytes)
    except OSError:
        return {}
    found = {}
    for line in raw.split(b"\n"):
        try:
            value = CACHE_LINE.decode(line)
        except ValueRefused:
            continue
        if depth_of(line.decode("utf-8", "replace")) > MAX_DEPTH:  # ours are flat; one so deep could not be printed
            continue
        found[value.completion] = value
    return found


def figures_of(line: CacheLine) -> TokenFigures:
    """What the server said of a completion."""
    return TokenFigures(cache_n=line.cached, prompt_n=line.read, predicted_n=line.generated)


def completions_of(records: Iterable[LogRecord], side: Mapping[int, CacheLine]) -> list[CacheLine]:
    """What each completion of a log cost; cause and times are from the side file's lines where these fit.

    A loss that no line explains has the cause `unknown`. A completion whose usage is missing has no figures.
    """
    found: list[CacheLine] = []
    slot = 0
    before: TokenFigures | None = None
    for record in records:
        if isinstance(record, SessionStart):
            slot = record.slot
        elif isinstance(record, Assistant):
            if found:
                before = figures_of(found[-1])
            found.append(
                CacheLine(
                    time=record.time,
                    completion=len(found) + 1,
                    slot=slot,
                    cached=None,
                    read=None,
                    generated=None,
                    expected=expected_tokens(before) if before is not None else None,
                    lost=None,
                    prefill_ms=None,
                    cause=None,
                    detail={},
                )
            )
        elif isinstance(record, Usage) and found:
            told = len(found) == 1 or (record.cache_n is not None and found[-1].expected is not None)
            found[-1] = evolve(
                found[-1],
                cached=record.cache_n,
                read=record.prompt_n,
                generated=record.predicted_n,
                lost=0 if told else None,
            )
        elif isinstance(record, CacheLoss) and found:
            lost = record.expected - record.got
            found[-1] = evolve(found[-1], expected=record.expected, lost=lost, cause="unknown")
    return [_explained(one, side.get(one.completion)) for one in found]


def _explained(one: CacheLine, line: CacheLine | None) -> CacheLine:
    figures = (one.cached, one.read, one.generated, one.lost)
    if line is None or (line.cached, line.read, line.generated, line.lost) != figures:
        return one
    return evolve(
        one, slot=line.slot, prefill_ms=line.prefill_ms, cause=line.cause if one.lost else None, detail=line.detail
    )
