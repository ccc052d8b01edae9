"""The tool port: the seam behind which tools run.

The turn knows this Protocol alone. In M3 an implementation of it speaks to `brokerd`, and no tool
runs in this process any more. Source: M2b section 4.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from boxmaker.proto.tools import ToolRequest, ToolResponse


class ToolPort(Protocol):
    """Runs tools."""

    async def call(self, request: ToolRequest) -> ToolResponse:
        """Run one tool and give its response; a failure of the tool is a `Failed`, not an exception.

        Cancellation: the call stops at its next checkpoint; whether it took effect is not known.
        """
        ...


@runtime_checkable
class ParallelPort(ToolPort, Protocol):
    """A port that knows which calls may run at the same time; any other runs one at a time."""

    def runs_beside(self, request: ToolRequest) -> bool:
        """Say whether the call, with these arguments, is safe beside other calls that are; asked before it starts.

        What depends on the other calls (the same file, say) cannot be told: then the answer is False.
        """
        ...
