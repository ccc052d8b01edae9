"""The tool port: the seam behind which tools run.

The turn knows this Protocol alone. In M3 an implementation of it speaks to `brokerd`, and no tool
runs in this process any more. Source: M2b section 4.
"""

from __future__ import annotations

from typing import Protocol

from boxmaker.proto.tools import ToolRequest, ToolResponse


class ToolPort(Protocol):
    """Runs tools."""

    async def call(self, request: ToolRequest) -> ToolResponse:
        """Run one tool and give its response; a failure of the tool is a `Failed`, not an exception.

        Cancellation: the call stops at its next checkpoint; whether it took effect is not known.
        """
        ...
