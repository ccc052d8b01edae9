"""Session ids: the only text of a client that becomes part of a path."""

from __future__ import annotations

import re
from typing import NewType

from boxmaker.errors import ValueRefused

SessionId = NewType("SessionId", str)

_SHAPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SUFFIX_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
SUFFIX_LENGTH = 6


def parse_session_id(text: object) -> SessionId:
    """Check a session id: 1 to 64 of `A-Za-z0-9._-`, the first a letter or digit.

    Raises:
        ValueRefused: for anything else, before any file is touched.
    """
    if type(text) is not str or not _SHAPE.fullmatch(text):
        raise ValueRefused(
            path="$.session",
            problem="a session id has 1 to 64 characters of A-Z a-z 0-9 . _ - and begins with a letter or digit",
        )
    return SessionId(text)


def make_session_id(year_to_second: str, suffix: str) -> SessionId:
    """Make an id such as `20261130-141530-x7k2qf` from `%Y%m%d-%H%M%S` text and a random suffix."""
    return parse_session_id(f"{year_to_second}-{suffix}")
