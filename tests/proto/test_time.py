"""Times of the log: cut to milliseconds, never rounded up, one form and no other."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.errors import ValueRefused
from boxmaker.proto.time import parse_timestamp, timestamp

from .strategies import relaxed, times, wild_texts


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (0.0009999999999999999, "1970-01-01T00:00:00.000Z"),
        (0.9999999999999999, "1970-01-01T00:00:00.999Z"),
        (951782399.5, "2000-02-28T23:59:59.500Z"),
        (951782400, "2000-02-29T00:00:00.000Z"),
        (1796048130.125, "2026-11-30T14:15:30.125Z"),
        (1796048130.1259, "2026-11-30T14:15:30.125Z"),
        (4102444799.9999995, "2099-12-31T23:59:59.999Z"),
        (-0.0001, "1969-12-31T23:59:59.999Z"),
        (-1.5, "1969-12-31T23:59:58.500Z"),
    ],
)
def test_seconds_are_written_as_utc_with_milliseconds(seconds: float, text: str) -> None:
    assert timestamp(seconds) == text


def test_a_time_is_utc_in_every_zone(local_zone: str) -> None:
    assert timestamp(1796048130.125) == "2026-11-30T14:15:30.125Z"


@given(seconds=st.floats(0, 5e9) | st.floats(0, 1))
@relaxed
def test_a_time_is_the_last_whole_millisecond_before_it(seconds: float) -> None:
    moment = datetime.strptime(timestamp(seconds), "%Y-%m-%dT%H:%M:%S.%f%z")
    written = Fraction((moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1), 1000)
    assert written <= Fraction(seconds) < written + Fraction(1, 1000)


def test_the_product_of_floats_that_would_round_up_is_cut() -> None:
    assert 1796048130.4259999 * 1000 == 1796048130426.0
    assert timestamp(1796048130.4259999) == "2026-11-30T14:15:30.425Z"


@given(seconds=st.floats(0, 5e9))
@relaxed
def test_a_written_time_is_read(seconds: float) -> None:
    assert parse_timestamp(timestamp(seconds)) == timestamp(seconds)


@pytest.mark.parametrize(
    "text",
    ["2026-11-30T14:15:30.123Z", "0001-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z", "2028-02-29T12:00:00.000Z"],
)
def test_a_time_of_the_form_is_taken(text: str) -> None:
    assert parse_timestamp(text) == text


@given(time=times)
@relaxed
def test_every_time_of_the_form_is_taken_as_it_is(time: str) -> None:
    assert parse_timestamp(time) == time


@pytest.mark.parametrize(
    "text",
    [
        "", "2026-11-30T14:15:30Z", "2026-11-30T14:15:30.12Z", "2026-11-30T14:15:30.1234Z", "2026-11-30T14:15:30.123",
        "2026-11-30T14:15:30.123z", "2026-11-30t14:15:30.123Z", "2026-11-30 14:15:30.123Z", "2026-11-30T14:15:30,123Z",
        "2026-11-30T14:15:30.123+00:00", "2026-11-30T14:15:30.123Z\n", " 2026-11-30T14:15:30.123Z",
        "2026-02-29T00:00:00.000Z", "2026-13-01T00:00:00.000Z", "2026-00-01T00:00:00.000Z", "2026-11-31T00:00:00.000Z",
        "2026-11-30T24:00:00.000Z",
        "2026-11-30T25:00:00.000Z", "2026-11-30T23:60:00.000Z", "2026-11-30T23:59:60.000Z", "0000-01-01T00:00:00.000Z",
        "٢٠٢٦-11-30T14:15:30.123Z", "20261130T141530.123Z", None, 5, 1796048130.123, b"2026-11-30T14:15:30.123Z",
    ],
)  # fmt: skip
def test_any_other_form_and_any_time_that_never_was_is_refused(text: object) -> None:
    with pytest.raises(ValueRefused) as caught:
        parse_timestamp(text)
    assert str(caught.value) == "$.time: expected a time like 2026-11-30T14:15:30.123Z"


@given(text=wild_texts | st.from_regex(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"))
@relaxed
def test_any_text_is_a_time_or_refused(text: str) -> None:
    try:
        time = parse_timestamp(text)
    except ValueRefused:
        return
    datetime.strptime(time, "%Y-%m-%dT%H:%M:%S.%f%z")
