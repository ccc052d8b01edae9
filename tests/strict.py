"""What a strict server refuses in a history: our own reading of the fault reports.

Used on everything that is made to be sent, and by the scripted server on every request of a test that asks
for it, so that a session that would be dead on such a server fails the test at once.
"""

from __future__ import annotations

import json
from typing import Any

from boxmaker.testing.server import error_response


def refuse(messages: list[Any]) -> bytes | None:
    """The answer of a strict server to a bad history, None to a good one."""
    found = problems(messages)
    return error_response(500, f"strict: {found[0]}") if found else None


def _no_number(name: str) -> float:
    raise ValueError(name)


def problems(messages: list[Any], alternate: bool = False) -> list[str]:
    """What a strict template or server rejects in a history; `alternate`: also users in a row."""
    found: list[str] = []
    seen: set[str] = set()
    waiting: list[str] = []
    before = ""
    for place, message in enumerate(messages):
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if waiting and role != "tool":
            found.append(f"{place}: no result for {waiting}")
            waiting = []
        if not isinstance(content, str):
            found.append(f"{place}: content is no text")
        if role == "system" and place != 0:
            found.append(f"{place}: system message not first")
        elif role == "tool":
            if message.get("tool_call_id") in waiting:
                waiting.remove(message["tool_call_id"])
            else:
                found.append(f"{place}: answers no open call")
        elif role == "user" and alternate and before in ("user", "tool"):
            found.append(f"{place}: user after {before}")
        elif role == "assistant":
            if before == "assistant":
                found.append(f"{place}: assistant after assistant")
            if calls is not None and not calls:
                found.append(f"{place}: empty tool_calls")
            for made in calls or []:
                found += call_problems(place, made, seen)
                waiting.append(made.get("id"))
        elif role not in ("system", "user"):
            found.append(f"{place}: unknown role {role!r}")
        found += [f"{place}: unclean text" for unclean in strings(message) if not is_clean(unclean)]
        before = role
    if waiting:
        found.append(f"no result for {waiting}")
    return found


def call_problems(place: int, made: dict[str, Any], seen: set[str]) -> list[str]:
    found = []
    call_id, name, arguments = made.get("id"), made["function"].get("name"), made["function"].get("arguments")
    if not isinstance(call_id, str) or not call_id.strip():
        found.append(f"{place}: call without id")
    elif call_id in seen:
        found.append(f"{place}: id {call_id!r} used before")
    else:
        seen.add(call_id)
    if made.get("type") != "function":
        found.append(f"{place}: call without type")
    if not isinstance(name, str) or not name or name != name.strip():
        found.append(f"{place}: bad name {name!r}")
    try:
        if not isinstance(json.loads(arguments, parse_constant=_no_number), dict):
            found.append(f"{place}: arguments are no object")
    except (TypeError, ValueError):
        found.append(f"{place}: arguments do not parse")
    return found


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in (key, *strings(inner))]
    return [found for inner in value for found in strings(inner)] if isinstance(value, list) else []


def is_clean(value: str) -> bool:
    return "\x00" not in value and not any("\ud800" <= char <= "\udfff" for char in value)
