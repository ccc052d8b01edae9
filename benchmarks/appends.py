"""What it costs to promise that a record is on the disk.

`Session.append` with the daemon's disk, one record a call, beside the least that the promise needs: one `write` and one
`fdatasync` of the same line. And the share of a turn: its two appends, beside the whole turn without what the server
takes to write its reply.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from pathlib import Path

import trio

from benchmarks.bench import QUICK_ROUNDS, ROUNDS, Row, interleaved, milliseconds, ratios, row
from benchmarks.client import run_turn
from benchmarks.processes import file_system, home, loopd, stamp_server
from benchmarks.sessions import TEXT, prepare_sessions
from boxmaker.proto.ids import parse_session_id
from boxmaker.proto.records import Assistant, LogRecord, Usage, User, encode_line
from boxmaker.proto.time import timestamp
from boxmaker.session.baseline import Baseline
from boxmaker.session.disk import ThreadDisk
from boxmaker.session.store import NewSession, Store

RECORDS = 200
"""Appends a round."""
SAY = "bench:2:1000"
MIB = 1 << 20
_NOW = timestamp(1_796_048_130)
USER: LogRecord = User(time=_NOW, content=TEXT)
REPLY: tuple[LogRecord, ...] = (
    Assistant(time=_NOW, content=TEXT, reasoning_content=None, tool_calls=()),
    Usage(time=_NOW, cache_n=9000, prompt_n=60, predicted_n=40, reasoning_tokens=12, thinking_capped=False),
)


async def append_s(directory: Path, number: int, *appends: tuple[LogRecord, ...]) -> float:
    """Seconds that RECORDS appends take, one after the other; `appends` are repeated, in a new session."""
    store = Store(directory, ThreadDisk(), memory_bytes=64 * MIB, fixed={}, now=lambda: _NOW)
    new = NewSession(slot=0, baseline=lambda: Baseline(system=TEXT, tools=()))
    session_id = parse_session_id(f"s{number}-{len(appends)}")
    async with store.turn(session_id, resume=False, new=new, alternate=False) as session:
        began = time.perf_counter()
        for at in range(RECORDS):
            await session.append(*appends[at % len(appends)])
        return time.perf_counter() - began


def bare_s(file: Path) -> float:
    """Seconds that RECORDS times `write` and `fdatasync` of the same line take."""
    line = encode_line(USER)
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        began = time.perf_counter()
        for _ in range(RECORDS):
            os.write(fd, line)
            os.fdatasync(fd)
        return time.perf_counter() - began
    finally:
        os.close(fd)


def rows(quick: bool) -> list[Row]:
    """Measure, and say it in rows."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with home() as directory, stamp_server() as server:
        prepare_sessions(directory)
        kind = file_system(directory)
        numbers = iter(range(1_000))

        def appends(*given: tuple[LogRecord, ...]) -> float:
            return trio.run(partial(append_s, directory / "home", next(numbers), *given))

        with loopd(directory, server.url) as daemon:
            run_turn(daemon.socket, "t", SAY, resume=False)

            def turn() -> float:
                # the pieces are a millisecond apart, which is the server's
                return statistics.median(
                    run_turn(daemon.socket, "t", SAY, resume=True).whole_s - 0.001 for _ in range(10)
                )

            bare, ours, in_turn, turn_s = interleaved(
                rounds,
                lambda: bare_s(directory / "bare.jsonl"),
                lambda: appends((USER,)),
                lambda: appends((USER,), REPLY),
                turn,
            )
    per_second = [RECORDS / seconds for seconds in ours]
    two_s = [2 * seconds / RECORDS for seconds in in_turn]
    each = milliseconds(seconds / RECORDS for seconds in ours)
    least = milliseconds(seconds / RECORDS for seconds in bare)
    return [
        row("an append of one record", "write + fdatasync", ratios(ours, bare), note=f"{each} and {least} on {kind}"),
        row("appends, one record each", "records/s", per_second, note="absolute: says something of this disk alone"),
        row("the two appends of a turn", "the turn beside the server", ratios(two_s, turn_s),
            note=f"{milliseconds(two_s)} of {milliseconds(turn_s)}; the first runs beside GET /slots"),
    ]  # fmt: skip
