"""Measures that each pure module is covered, lines and branches, by its own test module alone.

`python -m tests.own_coverage` (part of `make check`) runs the test modules of `OWN` once. What each of them reaches is
kept apart, so that a line that only some other test passes counts as missed; what a module does when it is imported
counts for all. Property tests are left out: what they reach must not depend on the examples of the day.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import coverage
import pytest

TESTS = Path(__file__).parent
IMPORTS = ""
"""The context of everything outside of the test modules."""

OWN = {
    "config": "test_config.py",
    "errors": "test_errors.py",
    "inference.cache": "inference/test_cache.py",
    "inference.cause": "inference/test_cause.py",
    "inference.completion": "inference/test_completion.py",
    "inference.families": "inference/test_families.py",
    "inference.request": "inference/test_request.py",
    "inference.retry": "inference/test_retry.py",
    "inference.sse": "inference/test_sse.py",
    "loopd.pins": "loopd/test_pins.py",
    "places": "test_places.py",
    "proto.arguments": "proto/test_arguments.py",
    "proto.channel": "proto/test_channel.py",
    "proto.chat": "proto/test_chat.py",
    "proto.codec": "proto/test_codec.py",
    "proto.frames": "proto/test_frames.py",
    "proto.ids": "proto/test_ids.py",
    "proto.ledger": "proto/test_ledger.py",
    "proto.records": "proto/test_records.py",
    "proto.saved": "proto/test_saved.py",
    "proto.time": "proto/test_time.py",
    "proto.tools": "proto/test_tools.py",
    "session.baseline": "session/test_baseline.py",
    "session.fork": "session/test_fork.py",
    "session.replay": "session/test_replay.py",
    "tools.dispatch": "tools/test_dispatch.py",
    "tools.endings": "tools/test_endings.py",
    "tools.fake": "tools/test_fake.py",
    "tools.port": "tools/test_port.py",
    "tools.registry": "tools/test_registry.py",
    "verify.judge": "verify/test_judge.py",
}
"""Each pure module, and the test module that is its own."""

QUICKLY = ["-q", "--no-header", "-m", "not hypothesis", "-p", "no:cacheprovider", "--assert=plain"]
WITHOUT_WATCHDOG = ["-o", "faulthandler_timeout=0"]
"""pytest's is a new thread for each test; `main` has one for the whole run."""
LONGEST_S = 300


class Apart:
    """A pytest plugin: what a test module reaches has the module's path below `root` as its context."""

    def __init__(self, measured: coverage.Coverage, root: Path) -> None:
        self._measured = measured
        self._root = root

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        with self._inside(collector):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with self._inside(item):
            return (yield)

    @contextlib.contextmanager
    def _inside(self, node: pytest.Item | pytest.Collector) -> Iterator[None]:
        context = node.path.relative_to(self._root).as_posix() if node.path.is_file() else IMPORTS
        self._measured.switch_context(context)
        yield
        self._measured.switch_context(IMPORTS)


def missed(own: Mapping[str, str], package: str, tests: Path) -> dict[str, list[str]]:
    """Run the test modules under `tests`, give what of each module of `package` its own does not reach.

    A line is `12`, a branch `12->14`; 0 as its second number is the end of the function.

    Raises:
        SystemExit: a test failed, so there is nothing to measure.
    """
    measured = coverage.Coverage(data_file=None, config_file=False, branch=True, source=[package], messages=False)
    measured.set_option("run:core", "ctrace")  # the one that has contexts and branches on every Python
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        measured.start()
        try:
            files = {module: importlib.import_module(f"{package}.{module}").__file__ for module in own}
            modules = [str(tests / file) for file in sorted(set(own.values()))]
            here = f"--basetemp={scratch}/tests"  # the usual one is cleaned by every pytest that runs meanwhile
            status = pytest.main([*QUICKLY, *WITHOUT_WATCHDOG, here, *modules], plugins=[Apart(measured, tests)])
        finally:
            measured.stop()
        if status != pytest.ExitCode.OK:
            raise SystemExit(f"own_coverage: the tests did not pass, pytest ended with {int(status)}")
        report = Path(scratch) / "report.json"
        for module, file in files.items():
            contexts = [f"^{re.escape(context)}$" for context in (IMPORTS, own[module])]
            measured.json_report(morfs=[str(file)], outfile=str(report), contexts=contexts)
            (figures,) = json.loads(report.read_text("utf-8"))["files"].values()
            branches = [f"{start}->{max(end, 0)}" for start, end in figures["missing_branches"]]
            found[module] = [*map(str, figures["missing_lines"]), *branches]
    return found


def main() -> None:
    """Say what is missed; exit status 1 when anything is."""
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    found = missed(OWN, "boxmaker", TESTS)
    for module, places in found.items():
        if places:
            print(f"boxmaker.{module}: tests/{OWN[module]} does not reach {', '.join(places)}")
    if any(found.values()):
        sys.exit("own_coverage: a pure module is reached whole by its own test module; add there what is missing")
    print(f"own_coverage: {len(found)} pure modules, each reached whole, lines and branches, by its own test module")


if __name__ == "__main__":
    main()
