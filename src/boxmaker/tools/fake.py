"""The fake port of M2b: two harmless tools, run in this process.

Limitation: it reads nothing and reaches nothing. M3 moves every tool out of process.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from boxmaker.errors import ValueRefused
from boxmaker.proto.arguments import parse_arguments
from boxmaker.proto.chat import ToolSchema
from boxmaker.proto.time import Timestamp
from boxmaker.proto.tools import Failed, Result, ToolRequest, ToolResponse
from boxmaker.tools.registry import RegisteredTool, Registry

_CLOCK = ToolSchema(
    name="clock",
    description="The current date and time, in UTC.",
    parameters={"type": "object", "properties": {}},
)
_ECHO = ToolSchema(
    name="echo",
    description="Returns the text that it is given.",
    parameters={
        "type": "object",
        "properties": {"text": {"type": "string", "description": "The text to return"}},
        "required": ["text"],
    },
)


def fake_registry() -> Registry:
    """`clock`, which every session has, and `echo`, which has to be found."""
    return Registry([RegisteredTool(schema=_CLOCK, core=True), RegisteredTool(schema=_ECHO, core=False)])


class FakeTools:
    """`clock` answers with `now()`, `echo` with its `text`."""

    def __init__(self, now: Callable[[], Timestamp]) -> None:
        self._now = now

    async def call(self, request: ToolRequest) -> ToolResponse:
        """Run one of the two tools.

        Cancellation: safe at any point; nothing outside has changed.
        """
        await trio.lowlevel.checkpoint()
        if request.tool == "clock":
            return _public(self._now())
        if request.tool == "echo":
            try:
                text = parse_arguments(request.arguments).get("text")
            except ValueRefused as exc:
                return Failed(message=f"the arguments did not parse: {exc.problem}")
            return _public(text) if isinstance(text, str) else Failed(message="echo needs a text")
        return Failed(message=f"there is no tool {request.tool!r}")


def _public(content: str) -> Result:
    return Result(content=content, class_="public", untrusted=False, truncated=False)
