"""What a strict server refuses in a history: our own reading of the fault reports.

Used by the scripted server on every request of a test that asks for it, so that a session that
would be dead on such a server fails the test at once.
"""

from __future__ import annotations

import json
from typing import Any

from boxmaker.testing.server import error_response


def problems(messages: list[dict[str, Any]]) -> list[str]:
    """Everything that is wrong with a request's messages."""
    found: list[str] = []
    ids: set[str] = set()
    waiting: list[str] = []
    for at, message in enumerate(messages):
        role = message.get("role")
        where = f"message {at} ({role})"
        if waiting and role != "tool":
            found.append(f"{where}: calls {waiting} have no result")
            waiting = []
        if not isinstance(message.get("content"), str):
            found.append(f"{where}: content is not text")
        if (role == "system") != (at == 0):
            found.append(f"{where}: the system message is the first, and the only one")
        if role == "tool":
            if message.get("tool_call_id") in waiting:
                waiting.remove(message["tool_call_id"])
            else:
                found.append(f"{where}: answers no open call")
        elif role == "assistant":
            calls = message.get("tool_calls")
            if calls == []:
                found.append(f"{where}: an empty list of calls")
            for call in calls or []:
                call_id, function = call["id"], call["function"]
                if not call_id.strip() or call_id in ids:
                    found.append(f"{where}: call id {call_id!r} is blank or used before")
                ids.add(call_id)
                waiting.append(call_id)
                if not function["name"] or function["name"] != function["name"].strip():
                    found.append(f"{where}: tool name {function['name']!r}")
                try:
                    parsed = json.loads(function["arguments"], parse_constant=_refuse)
                except ValueError as exc:
                    found.append(f"{where}: arguments do not parse: {exc}")
                else:
                    if not isinstance(parsed, dict):
                        found.append(f"{where}: arguments are no object")
        elif role not in ("system", "user"):
            found.append(f"{where}: unknown role")
    if waiting:
        found.append(f"calls {waiting} have no result")
    text = json.dumps(messages, ensure_ascii=False)
    if any("\ud800" <= char <= "\udfff" for char in text) or "\\u0000" in text.replace("\\\\", ""):
        found.append("a lone surrogate or NUL")
    return found


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def refuse(messages: list[dict[str, Any]]) -> bytes | None:
    """The answer of a strict server to a bad history, None to a good one."""
    found = problems(messages)
    return error_response(500, f"strict: {found[0]}") if found else None
