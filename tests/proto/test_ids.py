"""Session ids: the one shape, and that nothing else can become part of a path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.errors import ValueRefused
from boxmaker.proto.ids import SUFFIX_ALPHABET, SUFFIX_LENGTH, make_session_id, parse_session_id

from .strategies import relaxed, session_ids, wild_texts


@pytest.mark.parametrize("text", ["a", "0", "Z", "a.b_c-d", "20261130-141530-x7k2qf", "a" * 64, "a..", "0.jsonl"])
def test_a_session_id_is_taken_as_it_is(text: str) -> None:
    assert parse_session_id(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "a" * 65, ".", "..", ".new-x", "-a", "_a", "a/b", "../a", "/a", "a b", " a", "a\n", "\na", "a\x00", "ä",
        "é", "a\u0301", "٣", "Ａ", "\ud800", "a\\b", "a:b", "a~", None, 5, True, b"a", ["a"],
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: object) -> None:
    with pytest.raises(ValueRefused) as caught:
        parse_session_id(text)
    assert str(caught.value) == (
        "$.session: a session id has 1 to 64 characters of A-Z a-z 0-9 . _ - and begins with a letter or digit"
    )


@given(text=wild_texts | session_ids | st.text("ab0._-/", max_size=70))
@relaxed
def test_the_shape_is_the_designs_and_stays_below_its_directory(text: str) -> None:
    allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    right = 1 <= len(text) <= 64 and text[0] in allowed and set(text) <= set(allowed + "._-")
    try:
        session = parse_session_id(text)
    except ValueRefused:
        assert not right
        return
    assert right
    assert (Path("/home/sessions") / session).parent == Path("/home/sessions")


def test_a_made_id_is_time_and_suffix() -> None:
    assert make_session_id("20261130-141530", "x7k2qf") == "20261130-141530-x7k2qf"
    assert SUFFIX_LENGTH == 6
    assert re.fullmatch("[a-z0-9]{36}", SUFFIX_ALPHABET)
    assert len(set(SUFFIX_ALPHABET)) == 36


def test_a_made_id_is_checked_like_any_other() -> None:
    with pytest.raises(ValueRefused):
        make_session_id("20261130-141530", "x/7")
