"""What a benchmark says: a figure as medians of interleaved pairs, its goal, and the table of all.

Laws:
* A time stands beside another of the same run: a figure with a goal is a ratio, taken pair by pair.
* What is printed is all that was measured: every value stands beside its median.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import asdict, frozen

ROUNDS = 7
QUICK_ROUNDS = 5
"""The least that a median is taken of."""


@frozen(kw_only=True)
class Row:
    """One figure; `value` is the median of `values`, `goal` the most that it should be."""

    name: str
    unit: str
    value: float
    goal: float | None = None
    values: tuple[float, ...]
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Is the goal met? None where there is none."""
        return None if self.goal is None else self.value <= self.goal


def row(name: str, unit: str, values: Iterable[float], *, goal: float | None = None, note: str = "") -> Row:
    """Make a row of what was measured, round by round."""
    measured = tuple(values)
    return Row(name=name, unit=unit, value=statistics.median(measured), goal=goal, values=measured, note=note)


def ratios(ours: Sequence[float], floor: Sequence[float]) -> list[float]:
    """Each of ours in units of the one measured beside it."""
    return [a / b for a, b in zip(ours, floor, strict=True)]


def timed(work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def interleaved(rounds: int, *works: Callable[[], float]) -> list[list[float]]:
    """Measure each work once a round; give the values of each.

    Every other round goes backwards: what drifts, drifts against none of them.
    """
    values: list[list[float]] = [[] for _ in works]
    for number in range(rounds):
        order = list(enumerate(works))
        for at, work in order if number % 2 == 0 else reversed(order):
            values[at].append(work())
    return values


def milliseconds(values: Iterable[float]) -> str:
    """The median of some seconds, for a note."""
    return f"{statistics.median(values) * 1000:.2f} ms"


def figure(value: float) -> str:
    """A number in three or four digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(rows: Sequence[Row]) -> str:
    """The rows for people, a line each; a note stands under its row."""
    heads = ("figure", "unit", "goal", "median", "met", "all values")
    lines = [
        (
            one.name,
            one.unit,
            "–" if one.goal is None else f"≤ {one.goal:g}",
            figure(one.value),
            {None: "–", True: "yes", False: "NO"}[one.met],
            " ".join(figure(value) for value in one.values),
        )
        for one in rows
    ]
    widths = [max(len(cells[at]) for cells in [heads, *lines]) for at in range(len(heads))]
    rule = tuple("-" * width for width in widths)
    written = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
               for cells in [heads, rule, *lines]]  # fmt: skip
    found = written[:2]
    for one, line in zip(rows, written[2:], strict=True):
        found.append(line)
        if one.note:
            found.append(f"    {one.note}")
    return "\n".join(found)


def as_json(rows: Sequence[Row]) -> str:
    """The rows for programs: an array of objects, `met` among their keys."""
    values: list[dict[str, Any]] = [{**asdict(one), "met": one.met} for one in rows]
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"
