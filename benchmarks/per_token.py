"""What a streamed token costs in CPU, in units of a bare reader of the same stream.

The floor is `floor.py`: httpx on Trio, `aiter_lines`, `json.loads` of each event. What is measured is the whole path:
server → `loopd` → socket → `bxctl --json`, each process by the kernel's count of its own CPU time. Start-up is
taken off: the same commands with a reply of one token. Floor and path take turns, so that a slow moment hits both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.bench import Row, ratios, row
from benchmarks.processes import child, home, loopd, program

HERE = Path(__file__).parent
TOKENS = 20_000
QUICK_TOKENS = 2_000
ROUNDS = 5
GOALS = {"burst": (1.5, 2.5), "paced": (1.8, 2.6)}
"""For `loopd`, and for both together."""
CONFIG = "[thinking]\ncap = 100000\n"


@contextmanager
def token_server() -> Iterator[str]:
    """Run `token_server.py`; its URL."""
    with child([sys.executable, "-m", "benchmarks.token_server"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"


def cpu_to_run(command: list[str]) -> float:
    """Seconds of CPU that a command uses from start to end."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with status {process.returncode}")
    return used.ru_utime + used.ru_stime


def measure(mode: str, tokens: int) -> list[tuple[float, float, float]]:
    """Seconds of CPU for all tokens, a triple a round: the floor, `loopd`, `bxctl`."""
    found = []
    with home() as directory, token_server() as url, loopd(directory, url, CONFIG) as daemon:

        def floor(count: int) -> float:
            return cpu_to_run([sys.executable, str(HERE / "floor.py"), url, f"{mode} {count}"])

        def path(count: int) -> tuple[float, float]:
            before = daemon.cpu_s()
            say = ["--json", "--say", f"{mode} {count}"]
            client = cpu_to_run([*program("bxctl.cli", "bxctl"), "chat", "--socket", str(daemon.socket), *say])
            return daemon.cpu_s() - before, client

        path(1)
        for _ in range(ROUNDS):
            floor_all, floor_one = floor(tokens), floor(1)
            loopd_all, bxctl_all = path(tokens)
            loopd_one, bxctl_one = path(1)
            found.append((floor_all - floor_one, loopd_all - loopd_one, bxctl_all - bxctl_one))
    return found


def rows(quick: bool) -> list[Row]:
    """Both ways in which tokens come."""
    tokens = QUICK_TOKENS if quick else TOKENS
    found = []
    for mode, (loopd_goal, both_goal) in GOALS.items():
        measured = measure(mode, tokens)
        floor = [a for a, _, _ in measured]
        note = f"floor {sorted(floor)[len(floor) // 2] / tokens * 1e6:.1f} µs a token"
        for name, ours, goal in (
            ("loopd", [b for _, b, _ in measured], loopd_goal),
            ("bxctl", [c for _, _, c in measured], None),
            ("both", [b + c for _, b, c in measured], both_goal),
        ):
            found.append(row(f"token, {mode}: {name}", "bare reader", ratios(ours, floor), goal=goal, note=note))
            note = ""
    return found
