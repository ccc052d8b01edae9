"""`python -m benchmarks [NAME…] [--json FILE] [--quick]`: run benchmarks and print their rows as one table.

A benchmark is a module here with `rows(quick) -> list[Row]`. stdout has the table alone; which one runs is said on
stderr. One that fails does not stop the others, and makes the status 1; a goal that is not met does not.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from benchmarks.bench import Row, as_json, table

NAMES = ("per_token", "added_time", "resume", "appends", "memory", "many", "startup", "cache", "restart")
"""In the order of their issues; `resume` belongs to the second of these."""
LIMIT_S = 600
"""For one benchmark; the longest, `cache`, takes somewhat more than half of it on a quiet machine."""
JSON_FILE = Path("build/bench.json")

Benchmark = Callable[[bool], list[Row]]


class TooLong(Exception):
    """A benchmark did not end within LIMIT_S."""


def benchmark(name: str) -> Benchmark:
    """Find a benchmark by its name, when it is about to run: one that cannot be imported fails alone."""

    def rows(quick: bool) -> list[Row]:
        found: list[Row] = import_module(f"benchmarks.{name}").rows(quick)
        return found

    return rows


def run(wanted: Mapping[str, Benchmark], quick: bool) -> tuple[list[Row], list[str]]:
    """Run benchmarks one after the other; their rows, and the names of those that failed."""
    rows: list[Row] = []
    failed: list[str] = []
    for name, measure in wanted.items():
        print(f"{name} …", end=" ", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            with _limited():
                rows += measure(quick)
        except Exception:
            failed.append(name)
            print("FAILED", file=sys.stderr)
            traceback.print_exc()
        else:
            print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return rows, failed


@contextmanager
def _limited() -> Iterator[None]:
    """Raise TooLong in what takes too long, SystemExit at SIGTERM: every block that holds a process is then left."""

    def too_long(*_: object) -> None:
        raise TooLong(f"not done within {LIMIT_S} s")

    def stop(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = {
        number: signal.signal(number, what) for number, what in ((signal.SIGALRM, too_long), (signal.SIGTERM, stop))
    }
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What boxmaker costs, as ratios.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} [default: all]")
    parser.add_argument("--json", type=Path, default=JSON_FILE, metavar="FILE", help=f"[default: {JSON_FILE}]")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes: does it run at all?")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    rows, failed = run({name: benchmark(name) for name in options.names or NAMES}, options.quick)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(as_json(rows), "utf-8")
    print(table(rows))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
