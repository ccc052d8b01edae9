"""Frames read by hand: no code of ours has a part in it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import trio


async def rest(stream: trio.SocketStream) -> bytes:
    """What comes until the connection ends."""
    raw = b""
    with suppress(trio.BrokenResourceError):  # a reset comes behind the answer to what was not read
        async for data in stream:
            raw += data
    return raw


def taken_apart(raw: bytes) -> list[Any]:
    """The frames of whole answers."""
    found = []
    while raw:
        length = int.from_bytes(raw[:4], "big")
        assert len(raw) >= 4 + length, "the connection ended between two frames"
        found.append(json.loads(raw[4 : 4 + length]))
        raw = raw[4 + length :]
    return found
