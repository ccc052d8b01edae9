"""What `loopd` holds of memory: at rest, for each thing that it has, and after many turns.

Resident memory (VmRSS) as the kernel counts it, taken in steps of many so that its pages of 4 KiB do not matter. Active
turns have a slot each (`[slots] main` is a list).
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from tests.loopd.daemon_process import LIMIT_S, open_files, resident_mib

from benchmarks.bench import QUICK_ROUNDS, Row, ratios, row
from benchmarks.client import connect, open_turn, read_until, run_turn
from benchmarks.processes import LoopdProcess, child, home, loopd, many_slots, raise_file_limit, stamp_server
from benchmarks.sessions import conversation, prepare_sessions, write_session
from boxmaker.proto.records import encode_line

STEPS = QUICK_ROUNDS
"""Measurements of each figure: memory is hardly noisy."""
STEP = 40
SESSIONS_A_STEP = 4
LOG_BYTES = 1_000_000
SESSIONS, TURNS = 1_000, 10_000
QUICK_SESSIONS, QUICK_TURNS = 100, 1_000
TURNS_LIMIT_S = 240.0
PATIENT = "[channel]\nrequest_s = 600\nwrite_timeout_s = 600\n"
KIB = 1024


def rows(quick: bool) -> list[Row]:
    """Measure, and say it in rows."""
    raise_file_limit()
    sessions, turns = (QUICK_SESSIONS, QUICK_TURNS) if quick else (SESSIONS, TURNS)
    return [
        *at_rest(),
        idle_connections(),
        queued_turns(),
        active_turns(),
        kept_sessions(),
        many_turns(sessions, turns),
    ]


@contextmanager
def _warm_daemon() -> Iterator[LoopdProcess]:
    """A daemon that has run turns: what is made once is there."""
    with home(in_memory=True) as directory, stamp_server() as server:
        with loopd(directory, server.url, PATIENT) as daemon:
            for number in range(10):
                run_turn(daemon.socket, f"warm{number}", "bench:3:1000", resume=False)
            yield daemon


def _steps(daemon: LoopdProcess, step: Callable[[int], None], count: int) -> list[float]:
    """KiB for each of `count` things that a step makes, step by step."""
    values = []
    before = daemon.resident_mib()
    for number in range(STEPS):
        step(number)
        now = daemon.resident_mib()
        values.append((now - before) * KIB / count)
        before = now
    return values


def at_rest() -> list[Row]:
    """A daemon that nobody has talked to, beside an interpreter that holds the same libraries."""
    ours, floor = [], []
    with stamp_server() as server:
        for _ in range(STEPS):
            with home(in_memory=True) as directory, loopd(directory, server.url) as daemon:
                ours.append(daemon.resident_mib())
            floor.append(_libraries_mib())
    return [
        row("memory at rest", "MiB", ours),
        row("memory at rest", "Python with trio, httpx, cattrs", ratios(ours, floor)),
    ]


def _libraries_mib() -> float:
    code = "import sys, trio, httpx, cattrs; print(flush=True); sys.stdin.read()"
    with child([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return resident_mib(process.pid)


def idle_connections() -> Row:
    """Connections that have sent nothing yet."""
    with _warm_daemon() as daemon, ExitStack() as held:

        def step(_: int) -> None:
            wanted = open_files(daemon.process.pid) + STEP
            for _ in range(STEP):
                held.enter_context(connect(daemon.socket))
            deadline = time.monotonic() + LIMIT_S
            while open_files(daemon.process.pid) < wanted and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)  # accepted is not yet served

        return row("an idle connection", "KiB", _steps(daemon, step, STEP))


def _turns(daemon: LoopdProcess, held: ExitStack, first: int, text: bytes) -> None:
    """Begin turns that do not end, and wait until each has come to where it says a text."""
    streams: list[socket.socket] = []
    for number in range(first, first + STEP):
        stream = held.enter_context(open_turn(daemon.socket, f"t{number}", "bench:1:0:hold"))
        streams.append(stream)
    for stream in streams:
        read_until(stream, text)


def queued_turns() -> Row:
    """Turns that wait for the one slot."""
    with _warm_daemon() as daemon, ExitStack() as held:
        first = held.enter_context(open_turn(daemon.socket, "first", "bench:1:0:hold"))
        read_until(first, b"w")

        def step(number: int) -> None:
            _turns(daemon, held, number * STEP, b'"queued"')

        return row("a turn in the queue", "KiB", _steps(daemon, step, STEP), note="of a new session")


def active_turns() -> Row:
    """Turns that have a slot each and whose replies have begun."""
    slots = STEP * STEPS + 1
    with home(in_memory=True) as directory, stamp_server(slots) as server:
        with loopd(directory, server.url, PATIENT + many_slots(slots)) as daemon, ExitStack() as held:
            for number in range(10):
                run_turn(daemon.socket, f"warm{number}", "bench:3:1000", resume=False)

            def step(number: int) -> None:
                _turns(daemon, held, number * STEP, b'#0;"')

            return row("an active turn", "KiB", _steps(daemon, step, STEP), note="a slot for each turn")


def kept_sessions() -> Row:
    """Sessions with a log of 1 MB between two turns, while `memory_mib` has room for them."""
    turn_bytes = sum(len(encode_line(record)) for record in conversation(4))
    records = conversation(4 * (LOG_BYTES // turn_bytes))
    with home(in_memory=True) as directory, stamp_server() as server:
        sessions = prepare_sessions(directory)
        for number in range(STEPS * SESSIONS_A_STEP + 1):
            write_session(sessions, f"k{number}", records)
        with loopd(directory, server.url) as daemon:

            def step(number: int) -> None:
                for at in range(number * SESSIONS_A_STEP, (number + 1) * SESSIONS_A_STEP):
                    run_turn(daemon.socket, f"k{at}", "bench:1:0", resume=True)

            run_turn(daemon.socket, f"k{STEPS * SESSIONS_A_STEP}", "bench:1:0", resume=True)
            values = [kib / KIB for kib in _steps(daemon, step, SESSIONS_A_STEP)]
            return row("an open session of 1 MB of log", "MiB", values)


def many_turns(sessions: int, turns: int) -> Row:
    """How memory has grown from when each session had one turn to the end, beyond what `memory_mib` counts."""
    with home(in_memory=True) as directory, stamp_server() as server, loopd(directory, server.url) as daemon:
        bodies: dict[int, int] = {}
        first_mib, first_bytes = 0.0, 0
        deadline = time.monotonic() + TURNS_LIMIT_S
        done = 0
        while done < turns and time.monotonic() < deadline:
            session = done % sessions
            times = run_turn(daemon.socket, f"m{session}", "bench:1:0", resume=done >= sessions)
            bodies[session] = times.body_bytes
            done += 1
            if done == sessions:
                first_mib, first_bytes = daemon.resident_mib(), sum(bodies.values())
        last_mib = daemon.resident_mib()
        counted_mib = (sum(bodies.values()) - first_bytes) / KIB / KIB
    note = f"{first_mib:.1f} MiB after {sessions:,} turns, {last_mib:.1f} after {done:,}"
    note += f"; request bytes grew by {counted_mib:.1f}"
    if done < turns:
        note += f"; ENDED EARLY, {turns:,} were to be"
    name = f"{turns:,} turns over {sessions:,} sessions"
    return row(name, "MiB beyond memory_mib's", [last_mib - first_mib - counted_mib], goal=5, note=note)
