"""Points in time as the log writes them: `2026-11-30T14:15:30.123Z`."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NewType

from boxmaker.errors import ValueRefused

Timestamp = NewType("Timestamp", str)

_SHAPE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)


def timestamp(seconds: float) -> Timestamp:
    """Write seconds since the epoch as UTC with milliseconds, cut, never rounded up."""
    milliseconds = int(seconds * 1000)
    moment = datetime.fromtimestamp(milliseconds // 1000, UTC)
    return Timestamp(f"{moment:%Y-%m-%dT%H:%M:%S}.{milliseconds % 1000:03d}Z")


def parse_timestamp(text: object) -> Timestamp:
    """Check a time of the log.

    Raises:
        ValueRefused: not of the one form, or no such day or hour.
    """
    if type(text) is str and _SHAPE.fullmatch(text):
        try:
            datetime.fromisoformat(text[:-1])
        except ValueError:
            pass
        else:
            return Timestamp(text)
    raise ValueRefused(path="$.time", problem="expected a time like 2026-11-30T14:15:30.123Z")
