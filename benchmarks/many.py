"""Many turns at once: how many events a second go through, how late they are, and what one core can carry.

`loopd serve` has a slot of the server for each turn (`[slots] main` is a list). The replies begin together and come at
the pace of a fast model, a piece each EVERY_US in each; an event is late by what lies between its write at the server
and its arrival here. The daemon is one process with one loop, so it is full where CPU an event times events a second
comes to one core. That product holds on a machine that others use too; what arrives in a second does not.
"""

from __future__ import annotations

import re
import selectors
import socket
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

from attrs import define, field, frozen
from tests.loopd.daemon_process import open_files

from benchmarks.bench import QUICK_ROUNDS, Row, ratios, row
from benchmarks.client import READ_BYTES, open_turn, run_turn
from benchmarks.processes import cpu_s, home, loopd, many_slots, raise_file_limit, stamp_server

TURNS = (1, 10, 100, 500)
QUICK_TURNS = (1, 10, 50)
EVERY_US = 20_000
"""50 tokens a second in each turn."""
PIECES, QUICK_PIECES = 200, 50
"""Of each reply."""
EVENTS = 20_000
"""Of all replies together at most: where more comes than can be carried, a longer run is a longer queue."""
LIMIT_S = 120.0
"""For one run; half of it goes to beginning 500 sessions."""
ROUNDS = QUICK_ROUNDS
EVENT = re.compile(rb'"text":"(?:r\d+,\d+;)?w(\d+)#(\d+);"')
PERCENT = 99


@define
class _Reader:
    """One turn's frames: what came of a frame that is not whole yet, and the next number that must come."""

    rest: bytes = b""
    next_number: int = 0


@frozen(kw_only=True)
class Measured:
    """One run of so many turns at once."""

    turns: int
    events: int
    wall_s: float
    """From the first event's write to the last event's arrival."""
    late_s: float
    """The 99th percentile."""
    middle_s: float
    loopd_s: float
    """Seconds of CPU, from the first arrival to the last."""
    server_s: float
    client_s: float

    @property
    def per_second(self) -> float:
        """Events that arrived in a second."""
        return self.events / self.wall_s


@define
class _Arrivals:
    """What came, in all turns."""

    late_ns: list[int] = field(factory=list)
    first_written_ns: int = 0
    last_ns: int = 0

    def take(self, reader: _Reader, data: bytes, now_ns: int) -> None:
        """Take what came of one turn; raises AssertionError for an event out of its order."""
        data = reader.rest + data
        end = 0
        for found in EVENT.finditer(data):
            written_ns, number = int(found[1]), int(found[2])
            assert number == reader.next_number, f"event {number} came where {reader.next_number} should have"
            reader.next_number += 1
            self.late_ns.append(now_ns - written_ns)
            if self.first_written_ns == 0 or written_ns < self.first_written_ns:
                self.first_written_ns = written_ns
            self.last_ns = now_ns
            end = found.end()
        reader.rest = data[end:][-512:]


def run_many(socket_path: Path, loopd_pid: int, server_pid: int, turns: int, prefix: str, pieces: int) -> Measured:
    """Run so many turns at once, each of a new session, until all pieces have come; then hang up.

    What the end of a turn costs is no part of it.

    Raises:
        AssertionError: a turn's events came in another order than they were written, or not all of them.
    """
    say = f"bench:{pieces}:{EVERY_US}:hold:barrier{turns}"
    arrivals = _Arrivals()
    with ExitStack() as held, selectors.DefaultSelector() as selector:
        readers = []
        for number in range(turns):
            stream = held.enter_context(open_turn(socket_path, f"{prefix}-{number}", say))
            readers.append(_Reader())
            selector.register(stream, selectors.EVENT_READ, readers[-1])
        open_turns = turns
        loopd_s = server_s = client_s = 0.0
        deadline = time.monotonic() + LIMIT_S
        while open_turns:
            assert time.monotonic() < deadline, f"{open_turns} of {turns} turns did not end within {LIMIT_S} s"
            for key, _ in selector.select(1.0):
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(READ_BYTES)
                if not arrivals.late_ns:
                    loopd_s, server_s, client_s = cpu_s(loopd_pid), cpu_s(server_pid), time.process_time()
                assert data, f"a turn ended before its last piece: {key.data.rest!r}"
                arrivals.take(key.data, data, time.monotonic_ns())
                if key.data.next_number == pieces:
                    selector.unregister(key.fileobj)
                    open_turns -= 1
        loopd_s, server_s, client_s = (
            cpu_s(loopd_pid) - loopd_s, cpu_s(server_pid) - server_s, time.process_time() - client_s
        )  # fmt: skip
    assert [reader.next_number for reader in readers] == [pieces] * turns
    late = sorted(arrivals.late_ns)
    return Measured(
        turns=turns,
        events=len(late),
        wall_s=(arrivals.last_ns - arrivals.first_written_ns) / 1e9,
        late_s=late[min(len(late) - 1, len(late) * PERCENT // 100)] / 1e9,
        middle_s=late[len(late) // 2] / 1e9,
        loopd_s=loopd_s,
        server_s=server_s,
        client_s=client_s,
    )


def measure(counts: tuple[int, ...], most_pieces: int, rounds: int = ROUNDS) -> dict[int, list[Measured]]:
    """Run each number of turns once a round; what each gave."""
    raise_file_limit()
    found: dict[int, list[Measured]] = {count: [] for count in counts}
    with home(in_memory=True) as directory, stamp_server(max(counts)) as server:
        with loopd(directory, server.url, many_slots(max(counts))) as daemon:
            run_turn(daemon.socket, "warm", "bench:3:1000", resume=False)
            idle_files = open_files(daemon.process.pid)
            for number in range(rounds):
                for count in counts:
                    pids = (daemon.process.pid, server.process.pid)
                    pieces = min(most_pieces, EVENTS // count)
                    found[count].append(run_many(daemon.socket, *pids, count, f"n{number}-{count}", pieces))
                    _wait_left(daemon.process.pid, idle_files)
    return found


def _wait_left(pid: int, files: int) -> None:
    """Wait until a daemon has let go of what the turns of a run held: their ends are no part of the next one."""
    deadline = time.monotonic() + LIMIT_S
    while open_files(pid) > files:
        assert time.monotonic() < deadline, "turns whose clients have left are still running"
        time.sleep(0.05)


def rows(quick: bool) -> list[Row]:
    """Measure, and say it in rows."""
    found = measure(QUICK_TURNS if quick else TURNS, QUICK_PIECES if quick else PIECES)
    alone = [run.late_s for run in next(iter(found.values()))]
    made: list[Row] = []
    for count, runs in found.items():
        name = f"{count} turn{'' if count == 1 else 's'} at once"
        shares = [
            statistics.median(part / run.wall_s for run, part in zip(runs, parts, strict=True))
            for parts in ([run.loopd_s for run in runs], [run.server_s for run in runs], [run.client_s for run in runs])
        ]
        used = "loopd {:.2f} of a core, the server {:.2f}, the client {:.2f}".format(*shares)
        note = f"{count * 1e6 / EVERY_US:,.0f} offered; {used}; order kept in each turn"
        made.append(row(name, "events/s", [run.per_second for run in runs], note=note))
        late = statistics.median(run.late_s for run in runs) * 1000
        middle = statistics.median(run.middle_s for run in runs) * 1000
        note = f"{late:.1f} ms; half of the events within {middle:.1f} ms"
        values = ratios([run.late_s for run in runs], alone)
        made.append(row(f"{name}, 99th percentile late", "that of one turn", values, note=note))
        cost_us = statistics.median(run.loopd_s / run.events for run in runs) * 1e6
        carried = [run.events / run.loopd_s * EVERY_US / 1e6 for run in runs]
        note = f"{cost_us:.0f} µs of CPU an event: {1e6 / cost_us:,.0f} events a second fill a core"
        made.append(row(f"{name}, one core carries", "turns at this pace", carried, note=note))
    return made
