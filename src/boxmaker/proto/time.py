"""Points in time as the log writes them: `2026-11-30T14:15:30.123Z`."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from fractions import Fraction
from typing import NewType, TypeGuard

from boxmaker.errors import ValueRefused

Timestamp = NewType("Timestamp", str)

_SHAPE = re.compile(r"\d{4}-\d\d-\d\dT(?!24)\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)  # newer Pythons take hour 24


def timestamp(seconds: float) -> Timestamp:
    """Write seconds since the epoch as UTC with milliseconds, cut, never rounded up."""
    milliseconds = math.floor(Fraction(seconds) * 1000)  # a product of floats may round up
    moment = datetime.fromtimestamp(milliseconds // 1000, UTC)
    return Timestamp(f"{moment:%Y-%m-%dT%H:%M:%S}.{milliseconds % 1000:03d}Z")


def is_timestamp(text: object) -> TypeGuard[Timestamp]:
    """Is it a time of the log: of the one form, and of a day and hour that exist?"""
    if type(text) is not str or not _SHAPE.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text[:-1])
    except ValueError:
        return False
    return True


def parse_timestamp(text: object) -> Timestamp:
    """Check a time of the log.

    Raises:
        ValueRefused: not of the one form, or no such day or hour.
    """
    if is_timestamp(text):
        return text
    raise ValueRefused(path="$.time", problem="expected a time like 2026-11-30T14:15:30.123Z")
