"""Which tools there are, and which of them the model always sees.

What the model sees: the core schemas, fixed for an epoch. Others are found with `find_tool` and run
with `call_tool`, so that the `tools` array, and with it the prompt prefix, never changes.
Source: M2b section 5; design.md section 7.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from boxmaker.proto.chat import ToolSchema
from boxmaker.proto.codec import dumps

FIND_TOOL = "find_tool"
CALL_TOOL = "call_tool"

_FIND_TOOL = ToolSchema(
    name=FIND_TOOL,
    description="Find more tools. Searches their names and descriptions for the query and returns the schemas "
    "of those that match. An empty query matches all.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string", "description": "Text to look for"}},
        "required": ["query"],
    },
)
_CALL_TOOL = ToolSchema(
    name=CALL_TOOL,
    description="Call a tool that find_tool found.",
    parameters={
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "The tool's name"},
            "arguments": {"type": "object", "description": "The tool's arguments, as its schema says"},
        },
        "required": ["name", "arguments"],
    },
)


@frozen(kw_only=True)
class RegisteredTool:
    """A tool that the port can run; `core` tools are in every request."""

    schema: ToolSchema
    core: bool


class Registry:
    """The tools of one daemon; fixed while it runs."""

    def __init__(self, tools: Iterable[RegisteredTool]) -> None:
        self._tools = {tool.schema.name: tool for tool in tools}

    def core_schemas(self) -> tuple[ToolSchema, ...]:
        """The `tools` of a new baseline: the core tools, then the two that reach the others."""
        core = [tool.schema for tool in self._tools.values() if tool.core]
        return (*core, _FIND_TOOL, _CALL_TOOL)

    def core_names(self) -> tuple[str, ...]:
        """Names of the tools that the model can call by name."""
        return tuple(schema.name for schema in self.core_schemas())

    def is_core(self, name: str) -> bool:
        """Is it a tool of the port that the model calls by its own name?"""
        return name in self._tools and self._tools[name].core

    def is_callable(self, name: str) -> bool:
        """Is it a tool that `call_tool` runs? Core tools are called by name."""
        return name in self._tools and not self._tools[name].core

    def find(self, query: str) -> str:
        """Answer `find_tool`: the schemas whose name or description holds the query, as JSON text."""
        wanted = query.casefold()
        found = [
            {"name": s.name, "description": s.description, "parameters": s.parameters}
            for s in (tool.schema for tool in self._tools.values() if not tool.core)
            if wanted in s.name.casefold() or wanted in s.description.casefold()
        ]
        return f"{dumps(found)}\nCall it with call_tool." if found else "No tool matches."
