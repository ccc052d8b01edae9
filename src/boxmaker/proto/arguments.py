"""Tool arguments: the text of a JSON object, or a reason why it is none.

The model writes them, so nothing about them is sure. The answer depends on the text alone: it
decides what is sent back for the rest of the session, so it must be the same after a restart.
"""

from __future__ import annotations

import re
from typing import Any

from boxmaker.errors import ValueRefused
from boxmaker.proto.codec import SURROGATE, JsonObject, dumps, found, loads

_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # two halves that make a character
    r"|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    r"|\\."
)
MAX_DEPTH = 100
"""Nesting that is taken; Python's own limit depends on the caller's stack, so it cannot decide."""


def parse_arguments(text: str) -> JsonObject:
    """Read the arguments of a call; blank text means no arguments.

    Raises:
        ValueRefused: the text is not one JSON object that a strict server would read again: NaN, a
            number out of range, a lone surrogate behind an escape, nesting over MAX_DEPTH.
    """
    if not text.strip():
        return {}
    if depth_of(text) > MAX_DEPTH:
        raise ValueRefused(path="$", problem=f"nested over {MAX_DEPTH} deep")
    value = loads(text)
    if type(value) is not dict:
        raise ValueRefused(path="$", problem=f"{found(value)} is not an object")
    if (not text.isascii() and SURROGATE.search(text)) or (
        "\\u" in text and any(escape["lone"] for escape in _ESCAPE.finditer(text))
    ):
        raise ValueRefused(path="$", problem="holds a lone surrogate")
    return value


def depth_of(text: str) -> int:
    """The nesting of a JSON text; an upper bound is enough when it is small."""
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return 0
    depth = deepest = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "}]":
            depth -= 1
    return deepest


def without_nul(value: Any) -> Any:
    """Replace NUL with U+FFFD in every text of a JSON value."""
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    if isinstance(value, list):
        return [without_nul(item) for item in value]
    if isinstance(value, dict):
        return {without_nul(key): without_nul(item) for key, item in value.items()}
    return value


def object_text(arguments: JsonObject) -> str:
    """The compact text of an arguments object, free of NUL."""
    return dumps(without_nul(arguments))
