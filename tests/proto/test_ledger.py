"""The lines of `cache.jsonl`: one written out, and what is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from boxmaker.errors import ValueRefused
from boxmaker.proto.ledger import CACHE_LINE, REMEDY, CacheLine, CauseName
from boxmaker.proto.time import Timestamp

LINE = CacheLine(
    time=Timestamp("2026-11-30T14:15:30.123Z"),
    completion=3,
    slot=0,
    cached=12,
    read=88,
    generated=5,
    expected=64,
    lost=52,
    prefill_ms=1250,
    cause="evicted",
    detail={"session": "b"},
)
TEXT = (
    '{"time":"2026-11-30T14:15:30.123Z","completion":3,"slot":0,"cached":12,"read":88,"generated":5,"expected":64,'
    '"lost":52,"prefill_ms":1250,"cause":"evicted","detail":{"session":"b"}}'
)


def test_a_line_has_every_key_in_its_order() -> None:
    assert CACHE_LINE.encode(LINE) == TEXT
    assert CACHE_LINE.decode(TEXT) == LINE


@pytest.mark.parametrize(
    "change",
    [{"cause": "sunspots"}, {"completion": 0}, {"lost": -1}, {"lost": True}, {"time": "today"}, {"detail": None}],
)
def test_what_no_line_of_ours_holds_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueRefused):
        CACHE_LINE.from_object({**CACHE_LINE.to_object(LINE), **change})


def test_every_cause_has_its_remedy() -> None:
    assert set(REMEDY) == set(get_args(CauseName))
