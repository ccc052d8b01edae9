"""What answers a call: this process with a text, or the port with a request; pure.

What the model sees: the texts of `tools/endings.py`, `find_tool`'s answer, and what a tool failed with.
Source: M2b section 5; design.md sections 7 and 8.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from boxmaker.errors import ValueRefused
from boxmaker.inference.completion import clean_text
from boxmaker.proto.arguments import object_text, parse_arguments
from boxmaker.tools.endings import bad_arguments, unknown_to_call_tool, unknown_tool
from boxmaker.tools.registry import CALL_TOOL, FIND_TOOL, Registry


def tool_failed(message: str) -> str:
    """The text for a tool that gave no result."""
    return f"The tool failed: {message}"


@frozen(kw_only=True)
class Local:
    """The answer is this text; no tool runs."""

    text: str


@frozen(kw_only=True)
class Port:
    """The port is to run this tool; `arguments` is the text of a JSON object."""

    tool: str
    arguments: str


Dispatched: TypeAlias = Local | Port


def dispatch(registry: Registry, name: str, arguments: str) -> Dispatched:
    """Decide what answers a call; `name` is trimmed, `arguments` is the model's text."""
    if not (name in (FIND_TOOL, CALL_TOOL) or registry.is_core(name)):
        return Local(text=_unknown(registry, name))
    try:
        parsed = parse_arguments(arguments)
    except ValueRefused as exc:
        return _unparsed(exc.problem)
    if name == FIND_TOOL:
        query = parsed.get("query")
        if query is not None and type(query) is not str:
            return _unparsed("query is not text")
        return Local(text=registry.find(query or ""))
    if name == CALL_TOOL:
        return _call_tool(registry, parsed.get("name"), parsed.get("arguments"))
    return Port(tool=name, arguments=_for_port(arguments, parsed))


def _call_tool(registry: Registry, name: object, inner: object) -> Dispatched:
    if type(name) is not str:
        return _unparsed("name is not text")
    name = name.strip()
    if not registry.is_callable(name):
        return Local(text=_unknown_inner(registry, name))
    if inner is None:
        return Port(tool=name, arguments="{}")
    if type(inner) is dict:
        return Port(tool=name, arguments=object_text(inner))
    if type(inner) is str:
        try:
            return Port(tool=name, arguments=_for_port(inner, parse_arguments(inner)))
        except ValueRefused as exc:
            return _unparsed(exc.problem)
    return _unparsed("arguments is not an object")


def _for_port(text: str, parsed: dict[str, object]) -> str:
    """The model's own text where it is clean; blank is `{}`; NUL never reaches a tool."""
    if not text.strip():
        return "{}"
    return object_text(parsed) if "\\u0000" in text else text


def _unparsed(reason: str) -> Local:
    return Local(text=bad_arguments(clean_text(reason)))


def _unknown(registry: Registry, name: str) -> str:
    return unknown_tool(name, ", ".join(registry.core_names()))


def _unknown_inner(registry: Registry, name: str) -> str:
    return unknown_to_call_tool(name, core=registry.is_core(name) or name in (FIND_TOOL, CALL_TOOL))


def cap_result(text: str, cap_bytes: int) -> tuple[str, bool]:
    """Clean a result, and cut it to the longest prefix of whole characters within `cap_bytes` of UTF-8.

    `[truncated]` follows a cut with nothing between, outside the cap. Says whether it was cut.
    """
    # Only the front is worked on: a character has at least one byte, and each half of a pair two.
    text = clean_text(text[: cap_bytes + 1])
    raw = text.encode("utf-8")
    if len(raw) <= cap_bytes:
        return text, False
    return raw[:cap_bytes].decode("utf-8", "ignore") + "[truncated]", True
