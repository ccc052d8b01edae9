"""Says what came of `make mutants`, a line a module, from the files that mutmut leaves in `mutants/`.

A mutant is found when a test fails or hangs on it. One that no test reaches counts as missed, like a survivor.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from attrs import frozen

KILLED = {1, 3}
SURVIVED = {0}
TIMED_OUT = {24, -24, 36, 152, 255}
"""The statuses of a worker, as mutmut's own `stats` reads them; any other counts as not run."""


@frozen(kw_only=True)
class Score:
    """The mutants of one module, or of all."""

    killed: int
    timed_out: int
    survived: int
    not_run: int

    @property
    def total(self) -> int:
        """How many mutants there are."""
        return self.killed + self.timed_out + self.survived + self.not_run

    @property
    def percent(self) -> float:
        """How many of a hundred were found."""
        return 100 * (self.killed + self.timed_out) / self.total if self.total else 100.0


def kind(status: int | None) -> str:
    """What the status of a worker says, as a field of Score."""
    if status in KILLED:
        return "killed"
    if status in TIMED_OUT:
        return "timed_out"
    return "survived" if status in SURVIVED else "not_run"


def score(statuses: list[int | None]) -> Score:
    """Count the statuses of workers."""
    kinds = Counter(map(kind, statuses))
    return Score(**{name: kinds[name] for name in ("killed", "timed_out", "survived", "not_run")})


def report(directory: Path) -> str:
    """The table of a run in `directory`, and under it the names of what was missed (`mutmut show NAME` shows one)."""
    modules: dict[str, dict[str, int | None]] = {}
    for file in sorted(directory.rglob("*.py.meta")):
        statuses = json.loads(file.read_text("utf-8"))["exit_code_by_key"]
        if statuses:
            modules[file.relative_to(directory).as_posix().removesuffix(".meta")] = statuses
    scores = {module: score(list(statuses.values())) for module, statuses in modules.items()}
    scores["all"] = score([status for statuses in modules.values() for status in statuses.values()])
    lines = [f"{'':42} total killed timeout survived not run  found"]
    lines += [
        f"{module:42} {s.total:5} {s.killed:6} {s.timed_out:7} {s.survived:8} {s.not_run:7} {s.percent:5.1f}%"
        for module, s in scores.items()
    ]
    missed = [
        f"{kind(status).replace('_', ' ')}: {name}"
        for statuses in modules.values()
        for name, status in statuses.items()
        if kind(status) in ("survived", "not_run")
    ]
    return "\n".join([*lines, "", *missed])


if __name__ == "__main__":
    print(report(Path(sys.argv[1] if len(sys.argv) > 1 else "mutants")))
