"""The files of fixtures/proto: where they are, what their names mean, and readers that are not boxmaker's."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[2] / "fixtures" / "proto"


def files(pattern: str) -> dict[str, Path]:
    """Examples by the name before their suffix: `user`, `user.unusual`."""
    return {file.name.removesuffix(file.suffix): file for file in sorted(FIXTURES.glob(pattern))}


def tag(name: str) -> str:
    """What an example is of: the name up to its first dot."""
    return name.partition(".")[0]


def split_frame(raw: bytes) -> bytes:
    """The payload of a file that holds exactly one frame."""
    (length,) = struct.unpack(">I", raw[:4])
    assert length == len(raw) - 4
    return raw[4:]


def frame_object(file: Path) -> dict[str, Any]:
    """The JSON object in a frame's file."""
    value: dict[str, Any] = json.loads(split_frame(file.read_bytes()))
    return value


Place = tuple[str | int, ...]


def places(value: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every place of a value; what is below `detail` is free."""
    yield path, value
    if path == ("detail",):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def shown(path: Place) -> str:
    """A place as a refusal names it."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def put(value: Any, path: Place, new: Any) -> Any:
    """A copy of the value with another thing at a place."""
    if not path:
        return new
    changed = copy.deepcopy(value)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = new
    return changed
