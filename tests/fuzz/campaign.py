"""One campaign of fuzzing: rounds over a pool of inputs that grows, until the time is up.

Two kinds of rounds take turns. Hypothesis makes inputs from a grammar and by changes, and most of its time goes into
the making. Then plain random changes are made to the same pool and to what Hypothesis has just made: several times as
many inputs a second.

Laws:
* What fails is saved before anything else happens to it, as its smallest form that was seen.
* An input is kept for the rounds that follow when its kind is new. The pool does not change within a round: Hypothesis
  must be able to make the same input again.
"""

from __future__ import annotations

import hashlib
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random

import hypothesis
from attrs import define, field
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning

from tests.fuzz.mutation import mutate, mutated, random_changes
from tests.fuzz.target import Target

ROUND = 200
"""Inputs of one round of Hypothesis: often enough for the clock and the pool, and the start costs little."""
PLAIN_ROUND = 2000
"""Inputs of one round of random changes."""
SHRINK_S = 20.0
"""How long a find may be made smaller; it is saved as it is then."""


@define
class Found:
    """What a campaign on one target came to."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    kinds: dict[str, bytes] = field(factory=dict)
    """For each kind that no input had at the start, the smallest input."""
    failing: bytes | None = None
    why: str = ""

    def line(self) -> str:
        """One line of the report."""
        rate = self.inputs / self.seconds if self.seconds else 0.0
        found = "FAILED" if self.failing is not None else "nothing found"
        return (
            f"{self.target:<11} {self.inputs:>9,} inputs {self.seconds:>7.1f} s {rate:>7,.0f}/s "
            f"{len(self.kinds):>4} new kinds  {found}"
        )


class _Watch:
    """The check of a target, with a count of its inputs and a memory for those that matter."""

    def __init__(self, target: Target, clock: Callable[[], float]) -> None:
        self.found = Found(target=target.name)
        self.known: set[str] = set()
        self.recent: list[bytes] = []
        """What passed since somebody emptied this."""
        self._target = target
        self._clock = clock
        self._first_failure: float | None = None

    def __call__(self, raw: bytes) -> None:
        if self._first_failure is not None and self._clock() > self._first_failure + SHRINK_S:
            return  # small enough: Hypothesis takes the rest for passing and ends
        self.found.inputs += 1
        try:
            kind = self._target.check(raw)
        except Exception:
            if self._first_failure is None:
                self._first_failure = self._clock()
            smallest = self.found.failing
            if smallest is None or (len(raw), raw) < (len(smallest), smallest):
                self.found.failing, self.found.why = raw, traceback.format_exc()
            raise
        self.recent.append(raw)
        if kind not in self.known:
            before = self.found.kinds.get(kind)
            if before is None or len(raw) < len(before):
                self.found.kinds[kind] = raw


def run(
    target: Target,
    seconds: float,
    seed: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    round_inputs: int = ROUND,
) -> Found:
    """Fuzz one target for a while, or until something is found; the same seed tries the same inputs in each round."""
    start = clock()
    watch = _Watch(target, clock)
    pool = [*target.saved().values(), *target.seeds()]
    try:
        for raw in pool:
            watch(raw)
        watch.known.update(watch.found.kinds)
        watch.found.kinds.clear()
        seeds = Random(seed)
        while clock() < start + seconds:
            inputs = [*pool, *watch.found.kinds.values()]
            watch.recent.clear()
            _round(mutated(inputs, target.tokens) | target.grammar, watch, seeds.getrandbits(32), round_inputs)
            inputs += watch.recent
            for _ in range(PLAIN_ROUND):
                if clock() >= start + seconds:
                    break
                watch(mutate(seeds.choice(inputs), random_changes(seeds), inputs, target.tokens))
    except Exception:
        if watch.found.failing is None:
            raise  # not of the target: of the campaign
        make_smaller(watch.found.failing, watch)
    watch.found.seconds = clock() - start
    return watch.found


def make_smaller(raw: bytes, check: Callable[[bytes], None]) -> bytes:
    """Drop ever smaller parts of an input as long as it fails; gives what is left."""
    size = len(raw) // 2
    while size:
        at = 0
        while at < len(raw):
            shorter = raw[:at] + raw[at + size :]
            try:
                check(shorter)
                at += size
            except Exception:
                raw = shorter
        size //= 2
    return raw


def _round(inputs: st.SearchStrategy[bytes], check: Callable[[bytes], None], seed: int, count: int) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        deadline=None,
        derandomize=False,  # the seed decides, whatever the profile is
        database=None,  # what is worth keeping is kept as a file
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(inputs)
    def tried(raw: bytes) -> None:
        check(raw)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisWarning)  # of the length of a strategy's text, which nobody reads
        tried()


def save(raw: bytes, directory: Path, name: str, suffix: str) -> Path:
    """Write an input to a file that is named for it; the same input has the same file."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{name}{suffix}"
    if file.exists() and file.read_bytes() != raw:
        file = directory / f"{name}~{hashlib.sha256(raw).hexdigest()[:8]}{suffix}"
    file.write_bytes(raw)
    return file


def save_failure(found: Found, target: Target, build: Path) -> Path:
    """Save what failed where nothing is committed; when it is mended, it belongs into the corpus."""
    assert found.failing is not None
    return save(found.failing, build / target.name, hashlib.sha256(found.failing).hexdigest()[:12], target.suffix)
