"""What answers a call: this process with a text, or the port with a request; pure.

What the model sees: every text below, word for word. They are fixed, because they stay in the
session's prompt. Source: M2b section 5; design.md sections 7 and 8.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from boxmaker.errors import ValueRefused
from boxmaker.inference.completion import clean_text
from boxmaker.proto.arguments import object_text, parse_arguments
from boxmaker.tools.registry import CALL_TOOL, FIND_TOOL, Registry

ALREADY_CALLED = "Not run: this call was already made with these arguments in this turn. Its result is above."
REPEATED_AGAIN = "Not run: the same call was repeated again, so the turn was ended."
AFTER_REPEAT = "Not run: the turn was ended before this call."
OVER_ITERATIONS = "Not run: the turn's limit of tool calls was reached."
REPLY_CUT = "Not run: the reply was cut at its length limit. Ask again in smaller pieces."
INTERRUPTED = "Interrupted: the call was running when the turn ended; its outcome is unknown."
NOT_RUN = "Not run: the turn ended before this call."
NO_APPROVAL = "The call needs the owner's approval, and this version cannot wait for it."


def tool_failed(message: str) -> str:
    """The text for a tool that gave no result."""
    return f"The tool failed: {message}"


def call_denied(reason: str) -> str:
    """The text for a call that the owner's grants do not allow."""
    return f"The call was denied: {reason}"


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
    return Local(text=f"The arguments did not parse: {clean_text(reason)}")


def _unknown(registry: Registry, name: str) -> str:
    names = ", ".join(registry.core_names())
    return f"Unknown tool {name!r}. The tools are {names}; find_tool finds more, call_tool calls them."


def _unknown_inner(registry: Registry, name: str) -> str:
    if registry.is_core(name) or name in (FIND_TOOL, CALL_TOOL):
        return f"Unknown to call_tool: the tool {name!r} is called by its own name."
    return f"Unknown tool {name!r} for call_tool. find_tool with an empty query lists them all."


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
