"""The verdict on the cache: worked-out examples, real figures, and the sequences from fault reports."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.inference.cache import CacheOutcome, Hit, Loss, TokenFigures, Unknown, cache_outcome
from tests.inference.recordings import STREAMS, read_fixture, unhurried


def figures(cache_n: int | None, prompt_n: int | None, predicted_n: int | None) -> TokenFigures:
    return TokenFigures(cache_n=cache_n, prompt_n=prompt_n, predicted_n=predicted_n)


def now(cache_n: int | None) -> TokenFigures:
    return figures(cache_n, 30, 40)


def test_everything_but_the_last_token_sampled_can_be_in_the_cache() -> None:
    previous = figures(6, 19, 7)  # 32 tokens, of which the last one was never decoded
    assert cache_outcome(previous, now(31)) == Hit()
    assert cache_outcome(previous, now(32)) == Hit()
    assert cache_outcome(previous, now(30)) == Loss(expected=31, got=30)
    assert cache_outcome(previous, now(0)) == Loss(expected=31, got=0)


def test_a_completion_without_any_token_expects_nothing() -> None:
    assert cache_outcome(figures(0, 0, 0), now(0)) == Hit()
    assert cache_outcome(figures(0, 1, 0), now(0)) == Hit()


@pytest.mark.parametrize("previous", [figures(None, 1, 1), figures(1, None, 1), figures(1, 1, None)])
def test_a_figure_missing_before_makes_it_unknown(previous: TokenFigures) -> None:
    assert cache_outcome(previous, now(0)) == Unknown()


def test_a_sum_that_no_record_could_hold_is_unknown() -> None:
    largest = int(sys.float_info.max)  # of what an older log may hold
    assert cache_outcome(figures(largest, 1, 0), now(0)) == Loss(expected=largest, got=0)
    assert cache_outcome(figures(largest, 1, 1), now(0)) == Unknown()
    assert cache_outcome(figures(largest, largest, largest), now(0)) == Unknown()


def test_only_the_cached_tokens_of_the_new_completion_are_needed() -> None:
    assert cache_outcome(figures(1, 1, 1), figures(2, None, None)) == Hit()
    assert cache_outcome(figures(1, 1, 1), figures(None, 1, 1)) == Unknown()


count = st.none() | st.integers(0, 5000)


@unhurried
@given(st.builds(figures, count, count, count), st.builds(figures, count, count, count))
def test_a_verdict_follows_from_the_figures_alone(previous: TokenFigures, current: TokenFigures) -> None:
    verdict = cache_outcome(previous, current)
    if None in (previous.cache_n, previous.prompt_n, previous.predicted_n, current.cache_n):
        assert verdict == Unknown()
    elif isinstance(verdict, Loss):
        assert verdict.got == current.cache_n
        assert verdict.expected == (previous.cache_n or 0) + (previous.prompt_n or 0) + (previous.predicted_n or 0) - 1
        assert verdict.got < verdict.expected
    else:
        assert verdict == Hit()


N = None
SEQUENCES: dict[str, list[tuple[tuple[int | None, int | None, int | None], CacheOutcome | None]]] = {
    # figures of each completion, and the verdict on it; the first has none
    "s00": [((0, 1000, 50), None), ((1050, 30, 40), Hit())],
    "s01": [((0, 1000, 50), None), ((0, 1080, 40), Loss(expected=1049, got=0))],
    "s02": [((0, 1000, 600), None), ((990, 120, 40), Loss(expected=1599, got=990))],
    "s03": [((0, 5000, 50), None), ((300, 4800, 40), Loss(expected=5049, got=300))],
    "s04": [((N, 1000, 50), None), ((N, 30, 40), Unknown())],
    "s05": [((N, 1000, 50), None), ((N, 1080, 40), Unknown())],
    # without timings, `usage` has the 12 tokens of the reply and no cached ones
    "s06": [((N, N, 12), None), ((N, N, 12), Unknown())],
    "s07": [((0, 1000, 50), None), ((N, N, 12), Unknown()), ((1150, 20, 10), Unknown())],
    "s08": [((0, 1000, 12), None), *[((N, N, 12), Unknown())] * 4],
    "s09": [
        ((0, 1000, 20), None),
        ((1015, 200, 20), Loss(expected=1019, got=1015)),
        ((1230, 150, 20), Loss(expected=1234, got=1230)),
    ],
}


def of_stream(name: str) -> TokenFigures:
    reply = read_fixture(name).reply()
    assert reply.content == "ok"
    return figures(reply.cache_n, reply.prompt_n, reply.predicted_n)


def test_every_sequence_among_the_fixtures_has_its_verdicts_written_out() -> None:
    names = [f"timings_{name}_turn{turn}" for name, turns in SEQUENCES.items() for turn in range(1, len(turns) + 1)]
    assert names == [name for name in STREAMS if name.startswith("timings_")]


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_of_streams_gives_its_verdicts(name: str) -> None:
    previous = None
    for turn, (expected, verdict) in enumerate(SEQUENCES[name], start=1):
        current = of_stream(f"timings_{name}_turn{turn}")
        assert current == figures(*expected)
        if previous is not None:
            assert cache_outcome(previous, current) == verdict
        previous = current


@pytest.mark.parametrize(
    ("cached", "read", "prompt"), [(4, 10, 14), (0, 10, 10), (4, 0, 4), (None, 10, None), (4, None, None)]
)
def test_a_prompt_is_what_was_cached_and_what_was_read(
    cached: int | None, read: int | None, prompt: int | None
) -> None:
    assert TokenFigures(cache_n=cached, prompt_n=read, predicted_n=None).prompt_tokens == prompt


@pytest.mark.parametrize(
    ("cached", "read", "generated", "used"),
    [(4, 10, 3, 17), (0, 0, 0, 0), (None, 10, 3, None), (4, None, 3, None), (4, 10, None, None)],
)
def test_what_is_used_of_the_context_is_prompt_and_reply(
    cached: int | None, read: int | None, generated: int | None, used: int | None
) -> None:
    assert figures(cached, read, generated).used == used
