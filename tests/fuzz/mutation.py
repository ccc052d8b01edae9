"""Inputs made of others: what a broken writer, a bad line or an attacker does to bytes.

A change is a small tuple of numbers, so that Hypothesis can make less of it; `mutate` is a pure function of both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import TypeAlias

from hypothesis import strategies as st

from tests.fuzz.target import MAX_INPUT_BYTES

Change: TypeAlias = tuple[str, int, int, int]
"""A way, two places and a number that chooses a token or another input; each is taken modulo what there is."""

WAYS = (
    "value", "value", "value", "token", "insert", "overwrite", "flip", "byte", "truncate", "behead", "drop", "repeat",
    "many", "splice", "graft", "swap", "lines", "again",
)  # fmt: skip
_VALUE = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null')
_WORD = re.compile(rb"[A-Za-z0-9_]+|[^A-Za-z0-9_]")

numbers = st.integers(0, 2**16)
changes: st.SearchStrategy[list[Change]] = st.lists(
    st.tuples(st.sampled_from(WAYS), numbers, numbers, numbers), min_size=1, max_size=5
)


def mutated(pool: Sequence[bytes], tokens: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """An input of the pool with a few changes; the pool must not change while the strategy is used."""
    return st.builds(
        lambda at, made: mutate(pool[at], made, pool, tokens), st.integers(0, len(pool) - 1), changes
    )  # fmt: skip


def random_changes(numbers: Random) -> list[Change]:
    """The same without Hypothesis, which takes longer to choose than a decoder to decode."""
    return [
        (numbers.choice(WAYS), numbers.getrandbits(16), numbers.getrandbits(16), numbers.getrandbits(16))
        for _ in range(numbers.randint(1, 5))
    ]


def mutate(raw: bytes, made: Sequence[Change], pool: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """Apply changes one after the other; the result is at most MAX_INPUT_BYTES long."""
    for change in made:
        raw = _changed(raw, change, pool, tokens)[:MAX_INPUT_BYTES]
    return raw


def _changed(raw: bytes, change: Change, pool: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    way, a, b, which = change
    token = tokens[which % len(tokens)]
    other = pool[which % len(pool)]
    first, second = sorted((a % (len(raw) + 1), b % (len(raw) + 1)))
    match way:
        case "value":  # a text, number or word of JSON or TOML becomes another
            found = list(_VALUE.finditer(raw))
            if not found:
                return raw + token
            place = found[a % len(found)]
            return raw[: place.start()] + token + raw[place.end() :]
        case "token":  # a word or sign becomes another
            words = list(_WORD.finditer(raw))
            if not words:
                return raw + token
            place = words[a % len(words)]
            return raw[: place.start()] + token + raw[place.end() :]
        case "insert":
            return raw[:first] + token + raw[first:]
        case "overwrite":
            return raw[:first] + token + raw[first + len(token) :]
        case "flip":
            return raw[:first] + bytes([raw[first] ^ 1 << which % 8]) + raw[first + 1 :] if first < len(raw) else raw
        case "byte":
            return raw[:first] + bytes([which % 256]) + raw[first:]
        case "truncate":
            return raw[:first]
        case "behead":
            return raw[first:]
        case "drop":
            return raw[:first] + raw[second:]
        case "repeat":
            return raw[:second] + raw[first:second] + raw[second:]
        case "many":
            piece = raw[first : first + 1 + which % 24]
            return raw[:first] + piece * (2 + b % 300) + raw[first:]
        case "splice":
            return raw[:first] + other[b % (len(other) + 1) :]
        case "graft":
            start = b % (len(other) + 1)
            return raw[:first] + other[start : start + 1 + which % 64] + raw[first:]
        case "swap":
            middle = first + which % (second - first + 1)
            return raw[:first] + raw[middle:second] + raw[first:middle] + raw[second:]
        case "lines":
            lines = raw.split(b"\n")
            one, two = a % len(lines), b % len(lines)
            lines[one], lines[two] = lines[two], lines[one]
            return b"\n".join(lines)
        case "again":
            lines = raw.split(b"\n")
            return b"\n".join([*lines[: a % len(lines)], lines[b % len(lines)], *lines[a % len(lines) :]])
    raise AssertionError(way)
