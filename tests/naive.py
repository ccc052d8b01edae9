"""An independent reader: from a log's bytes to the body that its next request must have.

It mends histories by the design's six rules, each time from the whole list, and shares no code with what is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from boxmaker.proto.chat import Assistant, ChatMessage, System, Tool, ToolCall, User


def naive_body(baseline: bytes, log: bytes, tail: str, alternate: bool) -> bytes:
    """The whole body of the request that a log stands for; `tail` is what follows `tools`."""
    return b'{"messages":[' + naive_messages(naive_history(baseline, log), alternate) + naive_rest(baseline, tail)


def naive_rest(baseline: bytes, tail: str) -> bytes:
    """A body from the `]` that closes its messages."""
    tools = [{"type": "function", "function": tool} for tool in json.loads(baseline)["tools"]]
    return f'],"tools":{json.dumps(tools, ensure_ascii=False, separators=(",", ":"))},{tail}'.encode()


def naive_history(baseline: bytes, log: bytes) -> list[ChatMessage]:
    """The messages that a log stands for, as M2b's section "Replay" says."""
    history: list[ChatMessage] = [System(content=json.loads(baseline)["system"])]
    for record in naive_records(log):
        match record["type"]:
            case "user":
                history.append(User(content=record["content"]))
            case "assistant":
                calls = tuple(ToolCall(**call) for call in record["tool_calls"])
                thought = record["reasoning_content"]
                history.append(Assistant(content=record["content"], reasoning_content=thought, tool_calls=calls))
            case "tool_result":
                history.append(Tool(tool_call_id=record["tool_call_id"], content=record["content"]))
    return history


def naive_records(log: bytes) -> list[dict[str, Any]]:
    """The records of a log, each as its JSON object; the log ends with LF."""
    *lines, rest = log.split(b"\n")
    assert rest == b"", "the log ends with LF"
    return [json.loads(line.decode("utf-8")) for line in lines]


def naive_messages(messages: Sequence[ChatMessage], alternate: bool) -> bytes:
    """The messages of a body, without the brackets around them, from the whole list at once."""
    new_ids = naive_ids(messages)
    answered: dict[str, int] = {}
    made: list[dict[str, Any]] = []
    number = 0
    for place, message in enumerate(messages):
        if isinstance(message, System):
            made.append({"role": "system", "content": message.content})
        elif isinstance(message, User):
            before = messages[place - 1] if place else None
            if alternate and isinstance(before, User | Tool):  # rule 6
                made.append({"role": "assistant", "content": "[No answer was given.]"})
            made.append({"role": "user", "content": message.content})
        elif isinstance(message, Assistant):
            content = "" if message.content is None else message.content  # rule 5
            while message.tool_calls and content.endswith("\n"):  # rule 4
                content = content[:-1]
            entry: dict[str, Any] = {"role": "assistant", "content": content}
            if message.reasoning_content is not None:
                entry["reasoning_content"] = message.reasoning_content
            if message.tool_calls:
                entry["tool_calls"] = []
            for one in message.tool_calls:
                function = {"name": one.name.strip() or "unnamed", "arguments": naive_arguments(one.arguments)}
                entry["tool_calls"].append({"id": new_ids[number][1], "type": "function", "function": function})
                number += 1
            made.append(entry)
        else:
            old = message.tool_call_id
            k = answered.get(old, 0)
            answered[old] = k + 1
            new_id = [new for old_id, new in new_ids if old_id == old][k]  # rule 2
            made.append({"role": "tool", "tool_call_id": new_id, "content": message.content})
    return ",".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in made).encode()


def naive_ids(messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    """Rule 2: the old and the new id of every call of the session."""
    pairs: list[tuple[str, str]] = []
    renamed = 0
    for message in messages:
        for one in message.tool_calls if isinstance(message, Assistant) else ():
            used = [new for _, new in pairs]
            new_id = one.id
            if not one.id.strip() or one.id in used:
                renamed += 1
                number = renamed
                while f"c{number:08d}" in used:
                    number += 1
                new_id = f"c{number:08d}"
            pairs.append((one.id, new_id))
    return pairs


def naive_arguments(text: str) -> str:
    """Rules 1 and 3."""
    if text.strip() == "":
        return "{}"
    try:
        pairs = json.loads(
            text, object_pairs_hook=Pairs, parse_constant=no_number, parse_float=number, parse_int=number
        )
    except (ValueError, RecursionError):
        pairs = None
    if isinstance(pairs, Pairs) and depth(pairs) <= 100 and not lone_surrogate(pairs):
        return text
    return json.dumps({"raw": text}, ensure_ascii=False, separators=(",", ":"))


class Pairs(list[tuple[str, Any]]):
    """An object with all its keys, repeated ones too."""


def no_number(name: str) -> float:
    raise ValueError(name)


def number(text: str) -> float:
    if math.isinf(float(text)):
        raise ValueError(text)
    return float(text)


def depth(value: Any) -> int:
    if isinstance(value, Pairs):
        return 1 + max((depth(inner) for _, inner in value), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return any(0xD800 <= ord(char) <= 0xDFFF for char in value)
    if isinstance(value, Pairs):
        return any(lone_surrogate(key) or lone_surrogate(inner) for key, inner in value)
    return any(map(lone_surrogate, value)) if isinstance(value, list) else False
