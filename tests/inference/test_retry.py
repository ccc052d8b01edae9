"""Which failure is tried again, and when; what "context full" and "loading" look like; Retry-After."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.config import Retry
from boxmaker.errors import InferenceError, InferenceKind
from boxmaker.inference.completion import error_of
from boxmaker.inference.retry import Again, Decision, GiveUp, RetryPolicy, is_context_full, is_loading, retry_after_ms
from tests.inference.recordings import NAMES, STREAMS, read_fixture, refusal, unhurried

NOW_S = 1_796_048_130.0
"""2026-11-30T14:15:30Z."""


def failure(kind: InferenceKind, status: int | None = None, retry_after: str | None = None) -> InferenceError:
    return InferenceError(kind=kind, message="test", status=status, retry_after=retry_after)


def policy(attempts: int = 5, base_ms: float = 500, cap_ms: float = 10_000) -> RetryPolicy:
    """A policy whose jitter always takes the most."""
    config = Retry(attempts=attempts, base_ms=base_ms, cap_ms=cap_ms)
    return RetryPolicy(config, lambda low, high: high, lambda: NOW_S)


def decisions(*errors: InferenceError) -> list[Decision]:
    made = policy(attempts=100, base_ms=1, cap_ms=1)
    return [made.failed(error) for error in errors]


AGAIN = Again(1)
GIVE_UP = GiveUp()


# -- which ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [failure("connect"), failure("broken")])
def test_a_lost_connection_and_a_broken_stream_are_tried_again_and_again(error: InferenceError) -> None:
    assert decisions(error, error, error) == [AGAIN, AGAIN, AGAIN]


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_a_status_that_may_pass_is_tried_again_and_again(status: int) -> None:
    error = failure("http", status)
    assert decisions(error, error, error) == [AGAIN, AGAIN, AGAIN]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 410, 413, 422, 451, 501, 505, 599, 301, 204, None])
def test_any_other_status_is_final(status: int | None) -> None:
    assert decisions(failure("http", status)) == [GIVE_UP]


@pytest.mark.parametrize("kind", ["prefill", "foreign", "limit"])
def test_a_slow_prefill_a_foreign_body_and_a_limit_are_final(kind: InferenceKind) -> None:
    assert decisions(failure(kind)) == [GIVE_UP]


def test_a_stall_and_a_500_are_tried_again_once_each() -> None:
    stall, server_error, broken = failure("stall"), failure("http", 500), failure("broken")
    assert decisions(stall, stall) == [AGAIN, GIVE_UP]
    assert decisions(server_error, server_error) == [AGAIN, GIVE_UP]
    assert decisions(stall, server_error, broken, broken, stall) == [AGAIN, AGAIN, AGAIN, AGAIN, GIVE_UP]
    assert decisions(server_error, broken, stall, server_error) == [AGAIN, AGAIN, AGAIN, GIVE_UP]


def test_an_error_inside_a_stream_is_tried_again_like_its_status() -> None:
    error = read_fixture("midstream_error").failure()
    assert decisions(error, error) == [AGAIN, GIVE_UP]
    assert decisions(error_of(200, {"code": 429}), error_of(200, {"code": 403})) == [AGAIN, GIVE_UP]
    assert decisions(error_of(200, "only text"), error_of(200, "only text")) == [AGAIN, GIVE_UP]


FIRST = {
    "status_400_plain": GIVE_UP,
    "status_401": GIVE_UP,
    "status_404": GIVE_UP,
    "status_429_date_2099": Again(10_000),
    "status_429_date_past": Again(500),
    "status_429_float": Again(500),
    "status_429_huge": Again(10_000),
    "status_429_negative": Again(500),
    "status_429_none": Again(500),
    "status_429_seconds_1": Again(1000),
    "status_429_seconds_3600": Again(10_000),
    "status_429_word": Again(500),
    "status_500_history_arguments": Again(500),
    "status_500_load_failed": Again(500),
    "status_500_output_parse": Again(500),
    "status_500_plain": Again(500),
    "status_500_template": Again(500),
    "status_503_loading": Again(500),
    "broken_history_500": Again(500),
    "unauthorized": GIVE_UP,
    "foreign_html_502": Again(500),
    "foreign_empty_502": Again(500),
    "foreign_json_not_an_object_500": Again(500),
    "foreign_latin1_error_500": Again(500),
}
"""The decision after a first failure; the fixtures of a full context and of loading stand below."""


def test_every_refusal_among_the_fixtures_has_its_decision_written_out() -> None:
    refusals = [name for name in NAMES if name not in STREAMS]
    assert sorted([*FIRST, *(name for name in [*FULL, *NOT_FULL] if name not in STREAMS), "loading"]) == refusals


@pytest.mark.parametrize("name", FIRST)
def test_a_refusal_is_tried_again_or_not(name: str) -> None:
    assert policy().failed(refusal(name)) == FIRST[name]


@pytest.mark.parametrize("name", [name for name in FIRST if "_500" in name])
def test_a_500_is_not_tried_a_third_time_whatever_its_text(name: str) -> None:
    made = policy()
    made.failed(refusal(name))
    assert made.failed(refusal(name)) == GIVE_UP


# -- when -------------------------------------------------------------------------------------------


def test_the_back_off_doubles_up_to_its_cap_and_ends_with_the_attempts() -> None:
    made = policy(attempts=6, base_ms=500, cap_ms=3000)
    assert [made.failed(failure("connect")) for _ in range(6)] == [
        Again(500), Again(1000), Again(2000), Again(3000), Again(3000), GIVE_UP,
    ]  # fmt: skip
    assert made.tries == 6


def test_one_attempt_is_no_retry() -> None:
    assert policy(attempts=1).failed(failure("connect")) == GIVE_UP
    assert policy(attempts=1).failed(failure("http", 429, "1")) == GIVE_UP


def test_the_jitter_is_full_and_comes_from_its_source() -> None:
    asked: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        asked.append((low, high))
        return 12.9

    made = RetryPolicy(Retry(attempts=4, base_ms=100, cap_ms=250), uniform, lambda: NOW_S)
    assert [made.failed(failure("broken")) for _ in range(3)] == [Again(12)] * 3
    assert asked == [(0, 100), (0, 200), (0, 250)]


def test_retry_after_takes_the_place_of_the_back_off_up_to_the_cap() -> None:
    made = policy()
    assert made.failed(failure("http", 429, "2")) == Again(2000)
    assert made.failed(failure("http", 503, "3600")) == Again(10_000)
    assert made.failed(failure("http", 502, "0")) == Again(0)
    assert made.failed(failure("http", 504, "soon")) == Again(4000)


def test_retry_after_makes_nothing_pass_that_would_not() -> None:
    assert policy().failed(failure("http", 403, "1")) == GIVE_UP
    assert decisions(failure("http", 500, "1"), failure("http", 500, "1")) == [AGAIN, GIVE_UP]


some_failure = st.builds(
    failure,
    st.sampled_from(["connect", "http", "broken", "stall", "prefill", "foreign", "limit"]),
    st.none() | st.sampled_from([400, 429, 500, 502, 503]),
    st.none() | st.text(max_size=5) | st.integers(0, 10**9).map(str),
)


@unhurried
@given(
    st.integers(1, 6),
    st.floats(0.1, 1e6),
    st.floats(0.1, 1e6),
    st.floats(0, 1),
    st.lists(some_failure, min_size=6, max_size=6),
)
def test_a_completion_is_tried_at_most_so_often_and_never_waits_over_the_cap(
    attempts: int, base_ms: float, cap_ms: float, jitter: float, errors: list[InferenceError]
) -> None:
    made = RetryPolicy(
        Retry(attempts=attempts, base_ms=base_ms, cap_ms=cap_ms),
        lambda low, high: low + jitter * (high - low),
        lambda: NOW_S,
    )
    for number, error in zip(count(1), errors, strict=False):
        decision = made.failed(error)
        assert made.tries == number
        if isinstance(decision, GiveUp):
            return
        assert number < attempts
        assert 0 <= decision.after_ms <= cap_ms


def test_a_hundred_thousand_tries_overflow_nothing() -> None:
    made = policy(attempts=10**9, base_ms=0.5)
    made.tries = 10**5
    assert made.failed(failure("connect")) == Again(10_000)


def test_the_back_off_doubles_60_times_at_most() -> None:
    made = policy(attempts=10**9, base_ms=1, cap_ms=2.0**63)
    for tries, after_ms in ((59, 2**59), (60, 2**60), (61, 2**60), (1000, 2**60)):
        made.tries = tries
        assert made.failed(failure("connect")) == Again(after_ms)


# -- Retry-After ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "after_ms"),
    [
        ("0", 0),
        ("1", 1000),
        (" 7 ", 7000),
        ("0.5", 500),
        ("007", 7000),
        ("Mon, 30 Nov 2026 14:15:40 GMT", 10_000),
        ("Mon, 30 Nov 2026 14:15:30 GMT", None),  # not in the future
        ("Thu, 01 Jan 1970 00:00:00 GMT", None),
        ("Monday, 30-Nov-26 14:16:30 GMT", 60_000),  # RFC 850
        ("Mon Nov 30 14:15:31 2026", 1000),  # asctime: no zone, and yet UTC
        ("Mon, 30 Nov 2026 14:15:31 -0000", 1000),
        ("Mon, 30 Nov 2026 15:15:31 +0100", 1000),
        (None, None),
        ("", None),
        ("-5", None),
        ("+5", None),
        ("soon", None),
        ("1.", None),
        (".5", None),
        ("1e3", None),
        ("0x10", None),
        ("1,5", None),
        ("٣", None),  # a digit, but not one of HTTP's
        ("nan", None),
        ("inf", None),
        ("Mon, 30 Nov 2026", None),
        ("Mon, 99 Nov 2026 14:15:40 GMT", None),
        ("Mon, 30 Nov 99999 14:15:40 GMT", None),
        ("Mon, 30 Nov 2026 14:15:40 +999999", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_to_come(header: str | None, after_ms: float | None) -> None:
    assert retry_after_ms(header, NOW_S) == after_ms


def test_a_date_less_than_a_millisecond_ahead_is_still_to_come() -> None:
    after_ms = retry_after_ms("Mon, 30 Nov 2026 14:15:31 GMT", NOW_S + 1 - 1 / 2048)
    assert after_ms == 1000 / 2048


def test_a_number_of_any_length_is_no_exception() -> None:
    assert retry_after_ms("9" * 400, NOW_S) == float("inf")
    assert retry_after_ms("9" * 401, NOW_S) is None
    assert retry_after_ms("9" * 100_000, NOW_S) is None


@unhurried
@given(st.text(max_size=40))
def test_any_header_is_a_wait_or_none(header: str) -> None:
    after_ms = retry_after_ms(header, NOW_S)
    assert after_ms is None or after_ms >= 0


DATE_WORDS = [
    *("Fri,", "31", "Dec", "9999", "23:59:59", "-0000", "GMT", "EST", "+99999", "0", "1", "99", "100"),
    *("24:00", "::", "-", "a:b:c", "12:00:61", "(x)", ",", "9-Nov-94"),
]


@unhurried
@given(
    st.lists(
        st.sampled_from(DATE_WORDS),
        max_size=8,
    ).map(" ".join)
)
def test_what_looks_like_a_date_is_a_wait_or_none(header: str) -> None:
    after_ms = retry_after_ms(header, NOW_S)
    assert after_ms is None or after_ms >= 0


def test_a_date_means_the_same_in_every_zone(local_zone: str) -> None:
    moment = datetime.fromtimestamp(NOW_S + 90, UTC)
    for header in (format_datetime(moment, usegmt=True), moment.ctime(), format_datetime(moment.replace(tzinfo=None))):
        assert retry_after_ms(header, NOW_S) == 90_000


# -- context full -----------------------------------------------------------------------------------

FULL = [
    "context_full",
    "full_typed",
    "full_no_type",
    "full_2025_wording",
    "full_500_while_generating",
    "full_shift_disabled",
    "full_openai_code",
    "full_type_only",
    "full_in_stream_data",
    "full_in_stream_error_field",
    "full_mid_answer",
]
NOT_FULL = ["full_not_other_400", "full_not_number_of_images", "full_not_finish_length"]


def of_fixture(name: str) -> InferenceError:
    return read_fixture(name).failure() if name in STREAMS else refusal(name)


@pytest.mark.parametrize("name", FULL)
def test_every_wording_of_context_full_is_seen_and_never_tried_again(name: str) -> None:
    error = of_fixture(name)
    assert is_context_full(error)
    assert policy().failed(error) == GIVE_UP


def test_every_context_full_fixture_is_in_one_list() -> None:
    assert sorted([*FULL, *NOT_FULL]) == [name for name in NAMES if name.startswith(("full_", "context_full"))]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*STREAMS, *FULL}])
def test_no_other_refusal_is_context_full(name: str) -> None:
    assert not is_context_full(refusal(name))


def http_error(status: int, message: str, kind: str | None = None) -> InferenceError:
    return error_of(status, {"error": {"code": status, "message": message, "type": kind}})


@pytest.mark.parametrize("status", [400, 413, 500])
@pytest.mark.parametrize(
    "message",
    [
        "request (520 tokens) exceeds the available context size (256 tokens), try increasing it",
        "Context size has been exceeded.",
        "CONTEXT SHIFT IS DISABLED",
        "This model's maximum context length is 8192 tokens. However, you requested 9001 tokens",
        "the prompt exceeds the model's context window",
        "prompt exceeds context length",
        "first line\nexceeds the available context size",
    ],
)
def test_the_wording_counts_with_the_statuses_that_servers_send_it_with(status: int, message: str) -> None:
    assert is_context_full(http_error(status, message))


@pytest.mark.parametrize("status", [401, 404, 429, 502, 503])
def test_the_wording_with_another_status_is_not_context_full(status: int) -> None:
    assert not is_context_full(http_error(status, "exceeds the available context size"))


@pytest.mark.parametrize("message", ["", "context", "unknown variable 'context'", "limit exceeded", "size exceeded"])
def test_other_words_are_not_context_full(message: str) -> None:
    assert not is_context_full(http_error(400, message, "invalid_request_error"))


@pytest.mark.parametrize("status", [200, 400, 422, 500])
def test_the_type_and_the_code_count_without_words(status: int) -> None:
    assert is_context_full(error_of(status, {"type": "exceed_context_size_error", "message": "no"}))
    assert is_context_full(error_of(status, {"code": "context_length_exceeded", "message": "no"}))
    assert not is_context_full(error_of(status, {"code": "no", "type": "no", "message": "no"}))


@pytest.mark.parametrize("kind", ["connect", "broken", "stall", "prefill", "foreign", "limit"])
def test_only_what_the_server_says_is_context_full(kind: InferenceKind) -> None:
    error = InferenceError(
        kind=kind, message="m", server_message="Context size has been exceeded.", error_type="exceed_context_size_error"
    )
    assert not is_context_full(error)
    error.status = 400
    assert not is_context_full(error)


def test_an_answer_without_a_status_is_not_context_full() -> None:
    assert not is_context_full(InferenceError(kind="http", message="m", error_type="exceed_context_size_error"))


# -- loading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loading", "status_503_loading"])
def test_a_model_that_loads_is_told_from_other_failures(name: str) -> None:
    assert is_loading(refusal(name))


def test_either_word_of_a_503_says_that_the_model_loads() -> None:
    assert is_loading(http_error(503, "Loading model"))
    assert is_loading(http_error(503, "wait", "unavailable_error"))
    assert not is_loading(http_error(503, "overloaded", "server_error"))
    assert not is_loading(http_error(500, "Loading model", "unavailable_error"))
    assert not is_loading(failure("connect"))
    assert not is_loading(failure("http", 503))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*STREAMS, "loading", "status_503_loading"}])
def test_no_other_refusal_is_loading(name: str) -> None:
    assert not is_loading(refusal(name))
