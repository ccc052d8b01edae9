"""The time that a turn spends beside the server, in units of the least that it could be.

Before the server: from the `turn` frame leaving the client to the last byte of the request at the server. After it:
from a piece's write at the server to its frame at the client, the middle one of a turn. The unit is the sum of one
append of such a line with fdatasync, one `GET /slots` and one POST of that size, by a client of blocking sockets on the
same server; a second row has the last two by httpx on Trio. Sessions are warm: a turn has run in each before.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import httpx
import trio
from attrs import define, field

from benchmarks.bench import QUICK_ROUNDS, ROUNDS, Row, milliseconds, ratios, row, timed
from benchmarks.client import TurnTimes, bare_post_s, bare_slots_s, post_body, read_stamp, run_turn
from benchmarks.processes import file_system, home, loopd, stamp_server
from benchmarks.sessions import conversation, prepare_sessions, write_session
from boxmaker.proto.records import User, encode_line
from boxmaker.proto.time import timestamp
from boxmaker.testing.server import CHAT_PATH

MESSAGES = (10, 100, 1_000, 10_000)
QUICK_MESSAGES = (10, 1_000)
SAY = "bench:9:4000"
REPEATS = 5
"""Of each figure in a round, of which the middle one counts: they are of a millisecond, and machines are shared."""
LINE = encode_line(User(time=timestamp(1_796_048_130), content=SAY))
"""The line that a turn appends before its request."""


@define
class Measured:
    """What was measured at one length of history, in seconds, a value a round."""

    before_s: list[float] = field(factory=list)
    after_s: list[float] = field(factory=list)
    end_s: list[float] = field(factory=list)
    """From the last piece to the final frame: an append is in it."""
    append_s: list[float] = field(factory=list)
    slots_s: list[float] = field(factory=list)
    post_s: list[float] = field(factory=list)
    httpx_s: list[float] = field(factory=list)
    body_bytes: int = 0

    @property
    def added_s(self) -> list[float]:
        """Before and after the server."""
        return [before + after for before, after in zip(self.before_s, self.after_s, strict=True)]

    @property
    def unit_s(self) -> list[float]:
        """The least that it could be."""
        return [sum(parts) for parts in zip(self.append_s, self.slots_s, self.post_s, strict=True)]

    @property
    def httpx_unit_s(self) -> list[float]:
        """The same, by httpx on Trio."""
        return [sum(parts) for parts in zip(self.append_s, self.httpx_s, strict=True)]

    @property
    def beyond_post_s(self) -> list[float]:
        """What is added, without what the bytes of the request themselves take."""
        return [added - post for added, post in zip(self.added_s, self.post_s, strict=True)]

    def note(self) -> str:
        """Absolute times, for orientation."""
        ours = f"before {milliseconds(self.before_s)}, after {milliseconds(self.after_s)}"
        append, slots, post = (milliseconds(values) for values in (self.append_s, self.slots_s, self.post_s))
        unit = f"append {append}, GET {slots}, POST {post} ({self.body_bytes:,} bytes)"
        return f"{ours}; {unit}, GET and POST by httpx {milliseconds(self.httpx_s)}"


async def _httpx_s(port: int, size_bytes: int) -> float:
    """Seconds of one `GET /slots` and one POST of that size, up to its last byte at the server, by httpx on Trio."""
    url = f"http://127.0.0.1:{port}"
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(trust_env=False, timeout=None, limits=limits, verify=False) as client:
        await client.get(f"{url}/props")  # what httpx does once is no part of it
        body = post_body(size_bytes)
        began_ns = time.monotonic_ns()
        await client.get(f"{url}/slots")
        answer = await client.post(f"{url}{CHAT_PATH}", content=body)
        return (read_stamp(answer.content) - began_ns) / 1e9


def _append_s(fd: int) -> float:
    def append() -> None:
        os.write(fd, LINE)
        os.fdatasync(fd)

    return timed(append)


def measure(lengths: tuple[int, ...], rounds: int) -> tuple[dict[int, Measured], str]:
    """Measure at each length; also what the home's file system is."""
    found = {length: Measured() for length in lengths}
    with home() as directory, stamp_server() as server:
        sessions = prepare_sessions(directory)
        for length in lengths:
            for number in range(rounds):
                write_session(sessions, _session(length, number), conversation(length))
        fd = os.open(directory / "bare.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            with loopd(directory, server.url) as daemon:
                _append_s(fd)
                for number in range(rounds):
                    for length in lengths if number % 2 == 0 else reversed(lengths):
                        _round(found[length], daemon.socket, _session(length, number), server.port, fd)
        finally:
            os.close(fd)
        return found, file_system(directory)


def _session(length: int, number: int) -> str:
    """The session of a round: each has its own, so that a short one stays short."""
    return f"h{length}-{number}"


def _round(measured: Measured, socket: Path, session: str, port: int, fd: int) -> None:
    """Warm the session, take each figure REPEATS times in turn, and note the middle one of each."""
    run_turn(socket, session, SAY, resume=True)
    turns: list[TurnTimes] = []
    parts: list[tuple[float, ...]] = []
    for _ in range(REPEATS):
        turn = run_turn(socket, session, SAY, resume=True)
        turns.append(turn)
        parts.append((
            turn.before_s,
            turn.after_s,
            turn.end_s,
            _append_s(fd),
            bare_slots_s(port),
            bare_post_s(port, turn.body_bytes),
            trio.run(_httpx_s, port, turn.body_bytes),
        ))  # fmt: skip
    figures = (measured.before_s, measured.after_s, measured.end_s,
               measured.append_s, measured.slots_s, measured.post_s, measured.httpx_s)  # fmt: skip
    for values, taken in zip(figures, zip(*parts, strict=True), strict=True):
        values.append(statistics.median(taken))
    measured.body_bytes = turns[-1].body_bytes


def rows(quick: bool) -> list[Row]:
    """Measure, and say it in rows."""
    lengths = QUICK_MESSAGES if quick else MESSAGES
    found, kind = measure(lengths, QUICK_ROUNDS if quick else ROUNDS)
    made: list[Row] = []
    for length, measured in found.items():
        name = f"added time, {length:,} messages"
        bare = ratios(measured.added_s, measured.unit_s)
        made.append(row(name, "append + GET + POST", bare, goal=1.5, note=f"{measured.note()}; {kind}"))
        by_httpx = ratios(measured.added_s, measured.httpx_unit_s)
        made.append(row(name, "the same by httpx on Trio", by_httpx))
    least, most = found[lengths[0]], found[lengths[-1]]
    growth = ratios(most.beyond_post_s, least.beyond_post_s)
    note = f"without the POST itself: {milliseconds(most.beyond_post_s)} and {milliseconds(least.beyond_post_s)}"
    made.append(row(f"added time, {lengths[-1]:,} messages", f"that at {lengths[0]}", growth, goal=2, note=note))
    for length, measured in ((lengths[0], least), (lengths[-1], most)):
        ends = ratios(measured.end_s, measured.append_s)
        made.append(row(f"last piece to turn_done, {length:,}", "one append", ends, note=milliseconds(measured.end_s)))
    return made
