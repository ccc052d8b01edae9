"""What starting costs, in units of `python -c "import trio"`.

`bxctl chat --say` is one turn of a new session with a running daemon; the time between the request's last byte at the
server and its reply is taken off. `loopd serve` is timed until it says READY, its self-test against the scripted server
included. Commands are run as their installed scripts run them. One run of each comes first, so that all files are read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.loopd.daemon_process import LIMIT_S, write_config

from benchmarks.bench import QUICK_ROUNDS, Row, interleaved, milliseconds, ratios, row, timed
from benchmarks.client import READ, WRITTEN
from benchmarks.processes import (
    LoopdProcess,
    child,
    home,
    loopd,
    program,
    ready_socket,
    serve_command,
    stamp_server,
    wait_ready,
)

SAY = "bench:1:0"
ROUNDS = 11


def run_s(command: list[str]) -> float:
    """Seconds from the start of a command to its end."""
    return timed(lambda: _run(command))


def _run(command: list[str]) -> bytes:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=True)
    return done.stdout


def say_s(daemon: LoopdProcess) -> float:
    """Seconds of one `bxctl chat --say`, without the server's."""
    command = [*program("bxctl.cli", "bxctl"), "chat", "--socket", os.fspath(daemon.socket), "--say", SAY]
    began = time.perf_counter()
    answer = _run(command).decode("utf-8")
    whole_s = time.perf_counter() - began
    read, written = READ.search(answer), WRITTEN.search(answer)
    assert read is not None
    assert written is not None
    return whole_s - (int(written[1]) - int(read[1])) / 1e9


def ready_s(directory: Path, url: str) -> float:
    """Seconds from the start of `loopd serve` until it says that it is ready."""
    config, log = write_config(directory, url), directory / "log"
    with ready_socket(directory) as (ready, env):
        began = time.perf_counter()
        with child(serve_command(config), log=log, env=env) as process:
            wait_ready(ready, process, log)
            return time.perf_counter() - began


def rows(quick: bool) -> list[Row]:
    """Measure, and say it in rows."""
    with home() as ours, home() as starting, stamp_server() as server, loopd(ours, server.url) as daemon:
        works = (
            lambda: run_s([sys.executable, "-c", "import trio"]),
            lambda: run_s([*program("bxctl.cli", "bxctl"), "--help"]),
            lambda: say_s(daemon),
            lambda: ready_s(starting, server.url),
        )
        for work in works:
            timed(work)
        unit, help_, say, ready = interleaved(QUICK_ROUNDS if quick else ROUNDS, *works)
    name = "import trio"
    return [
        row(
            "bxctl --help", name, ratios(help_, unit), goal=1, note=f"{milliseconds(help_)}; unit {milliseconds(unit)}"
        ),
        row("bxctl chat --say, a new session", name, ratios(say, unit), goal=1.5, note=milliseconds(say)),
        row("loopd serve to ready", name, ratios(ready, unit), goal=3, note=milliseconds(ready)),
    ]
