"""A scripted tool port: answers from a list, keeps its requests, and can wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio
from attrs import define, field

from boxmaker.proto.tools import Failed, Result, ToolRequest, ToolResponse

Response: TypeAlias = ToolResponse | Exception | Callable[[ToolRequest], Awaitable[ToolResponse]]


def public(content: str) -> Result:
    """An ordinary result."""
    return Result(content=content, class_="public", untrusted=False, truncated=False)


@define
class ScriptedPort:
    """Gives its responses in order; an exception is raised, a function is awaited.

    Cancellation: safe at any point; `started` and `cancelled` count what happened to calls.
    """

    responses: list[Response] = field(factory=list)
    requests: list[ToolRequest] = field(factory=list)
    started: trio.Event = field(factory=trio.Event)
    cancelled: int = 0
    beside: Callable[[ToolRequest], bool] = field(default=lambda _: False)
    """Which calls are safe beside others."""

    def runs_beside(self, request: ToolRequest) -> bool:
        """Say what the test says."""
        return self.beside(request)

    async def call(self, request: ToolRequest) -> ToolResponse:
        """Answer the next call."""
        self.requests.append(request)
        self.started.set()
        try:
            await trio.lowlevel.checkpoint()
            if not self.responses:
                return Failed(message="the script has no response left")
            response = self.responses.pop(0)
            if isinstance(response, Exception):
                raise response
            if callable(response):
                return await response(request)
            return response
        except trio.Cancelled:
            self.cancelled += 1
            raise


async def hang(_: ToolRequest) -> ToolResponse:
    """A tool that never ends by itself."""
    await trio.sleep_forever()
    raise AssertionError("sleep_forever returned")
