"""What a target of fuzzing is: a check of one input, and where inputs for it come from."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attrs import frozen
from hypothesis import strategies as st

from tests.inference.recordings import cut, in_steps
from tests.naive import no_number, number

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
CORPUS = FIXTURES / "fuzz"
MAX_INPUT_BYTES = 4096
"""Of an input that is made: a longer one finds no more and is slow."""


@frozen(kw_only=True)
class Target:
    """One decoder under test.

    `check` takes the bytes of an input, holds the decoder to its laws and to an independent one, and gives the
    kind of the input: a short name of what came of it. Whatever it raises is a find. `seeds` are inputs that
    there are anyway; those saved in `fixtures/fuzz/<name>/` come on top. `tokens` are words that the decoder
    knows. `grammar` makes inputs from nothing.
    """

    name: str
    suffix: str
    check: Callable[[bytes], str]
    seeds: Callable[[], list[bytes]]
    tokens: tuple[bytes, ...]
    grammar: st.SearchStrategy[bytes]

    def saved(self) -> dict[str, bytes]:
        """The saved inputs by name of file."""
        return {file.name: file.read_bytes() for file in sorted((CORPUS / self.name).glob(f"*{self.suffix}"))}

    def kind_of_file(self, name: str) -> str:
        """The kind that a saved input is named for: `<kind>.<suffix>` or `<kind>~<which>.<suffix>`."""
        return name.removesuffix(self.suffix).partition("~")[0]


def chunkings(raw: bytes) -> Iterator[list[bytes]]:
    """Ways to cut an input in pieces, the same ones for the same bytes: all at once comes first."""
    yield [raw]
    places = random.Random(raw)
    for count in (1, 4, 20):
        yield cut(raw, [places.randint(0, len(raw)) for _ in range(count)])
    if len(raw) <= 600:
        yield in_steps(raw, 1)


def strict_json(text: str) -> Any:
    """Read JSON as `docs/protocol.md` wants it; raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=no_number, parse_float=number, parse_int=integer)


def integer(text: str) -> int:
    """All digits of an integer up to the largest double; what would only be rounded down to it is over it."""
    if len(text) > 400 or abs(int(text)) > 2**1024 - 2**971:
        raise ValueError(text[:40])
    return int(text)


def deepest(text: str) -> int:
    """An upper bound of a text's nesting."""
    depth = found = 0
    for char in text:
        if char in "{[":
            depth += 1
            found = max(found, depth)
        elif char in "}]":
            depth -= 1
    return found


UNSURE_DEPTH = 150
"""Deeper JSON is read or refused as the stack allows: either is right, any other exception is not."""


def has_surrogate(value: Any) -> bool:
    """Is there a surrogate in any text of a JSON value?"""
    if isinstance(value, str):
        return any(0xD800 <= ord(char) <= 0xDFFF for char in value)
    if isinstance(value, dict):
        return any(has_surrogate(key) or has_surrogate(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(has_surrogate, value))


def exact(value: Any) -> str:
    """A JSON value as text that tells `true` from `1` and `1` from `1.0`, and knows no order of keys."""
    return json.dumps(value, sort_keys=True)


def assert_sayable(text: str, at_most: int = 400) -> None:
    """A refusal's text can be logged, sent and shown: short, one line, no control character, no surrogate."""
    assert text
    assert len(text) <= at_most, text
    assert text.isprintable(), ascii(text)


JSON_TOKENS = (
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b"null", b"true", b"false", b"0", b"-0", b"-1", b"1", b"1.0",
    b"1e3", b"1e999", b"-1e999", b"NaN", b"Infinity", b"9" * 40, b"9" * 310, b"1" + b"0" * 400, b'""', b'"x"', b"{}",
    b"[]", b"[{}]", b'"\\ud800"', b'"\\udc00"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\\u2028"', b"\xe2\x80\xa8",
    b"\xff", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b" ", b"\t", b"\r\n", b"[" * 200, b'{"a":' * 200,
    b"[" * 1200, b'"a":1,', b'"type":"x",', b"\xc3\xa9", b"\xf0\x9f\x99\x82",
)  # fmt: skip
