"""The records of a session's log, and their lines.

A line is one JSON object with every key of its record in the order below, then LF.
Source: M2b section 2 "Log records".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast, get_args

from attrs import frozen

from boxmaker.proto.chat import ResultClass, ToolCall
from boxmaker.proto.codec import (
    CHECKED_COUNTS,
    MAX_INTEGER,
    Count,
    JsonObject,
    Sha256,
    TaggedCodec,
    strict_converter,
)
from boxmaker.proto.ids import SessionId, parse_session_id
from boxmaker.proto.time import Timestamp, is_timestamp, parse_timestamp

RESULT_CLASSES = frozenset(get_args(ResultClass))


@frozen(kw_only=True)
class SessionStart:
    """Written once, with the baseline's hash."""

    time: Timestamp
    session: SessionId
    epoch: Count
    slot: Count
    baseline: Sha256


@frozen(kw_only=True)
class User:
    """Written when the user's message arrives, before the request is sent."""

    time: Timestamp
    content: str


@frozen(kw_only=True)
class Assistant:
    """Written when a completion is final; the three fields exactly as the server returned them."""

    time: Timestamp
    content: str | None
    reasoning_content: str | None
    tool_calls: tuple[ToolCall, ...]


@frozen(kw_only=True)
class Usage:
    """Written right after each Assistant; figures in tokens, null when the server sent none."""

    time: Timestamp
    cache_n: Count | None
    prompt_n: Count | None
    predicted_n: Count | None
    reasoning_tokens: Count
    thinking_capped: bool


@frozen(kw_only=True)
class ToolResult:
    """Written after each call; `call` is the session's own number for it, from 0."""

    time: Timestamp
    call: Count
    tool_call_id: str
    content: str
    class_: ResultClass
    untrusted: bool
    truncated: bool


@frozen(kw_only=True)
class CacheLoss:
    """Written when the server had fewer tokens in its cache than it should have had."""

    time: Timestamp
    expected: Count
    got: Count


@frozen(kw_only=True)
class EpochEnd:
    """Ends an epoch; reserved, not written in M2b."""

    time: Timestamp


LogRecord: TypeAlias = SessionStart | User | Assistant | Usage | ToolResult | CacheLoss | EpochEnd

_converter = strict_converter({
    SessionId: lambda value, _: parse_session_id(value),
    Timestamp: lambda value, _: parse_timestamp(value),
})  # fmt: skip

RECORDS: TaggedCodec[LogRecord] = TaggedCodec(
    _converter,
    {
        "session_start": SessionStart,
        "user": User,
        "assistant": Assistant,
        "usage": Usage,
        "tool_result": ToolResult,
        "cache_loss": CacheLoss,
        "epoch_end": EpochEnd,
    },
    CHECKED_COUNTS,
)


def encode_line(record: LogRecord) -> bytes:
    """Write a record as its line, LF included; raises ValueRefused."""
    return RECORDS.encode(record).encode("utf-8") + b"\n"


def decode_line(line: bytes) -> LogRecord:
    """Read a record from its line, with or without the LF; raises ValueRefused.

    The records that a log consists of are taken by hand where nothing about them is unusual: the
    codec costs several times what reading the JSON does, and a session of 10,000 records is read at
    every cold resume. What is taken so, the codec takes too, with the same value; a test says so.
    """
    if b"\\u" not in line:  # an escape could be a lone surrogate
        try:
            text = line.decode("utf-8")
            value, end = _scan(text, 0)
            record = _QUICK[value["type"]](value) if end == len(text) or text[end:] == "\n" else None
        except (StopIteration, ValueError, LookupError, TypeError, RecursionError):
            record = None  # the codec says what is wrong with it
        if record is not None:
            return record
    return RECORDS.decode(line)


_scan = CHECKED_COUNTS.scan_once  # type: ignore[attr-defined]  # typeshed leaves it out; `raw_decode` calls it


def _quick_user(o: JsonObject) -> User | None:
    time, content = o["time"], o["content"]
    if len(o) == 3 and is_timestamp(time) and type(content) is str:
        return User(time=time, content=content)
    return None


def _quick_assistant(o: JsonObject) -> Assistant | None:
    time, content, reasoning, calls = o["time"], o["content"], o["reasoning_content"], o["tool_calls"]
    if not (len(o) == 5 and is_timestamp(time) and type(calls) is list):
        return None
    if not ((content is None or type(content) is str) and (reasoning is None or type(reasoning) is str)):
        return None
    made = []
    for call in calls:
        call_id, name, arguments = call["id"], call["name"], call["arguments"]
        if not (len(call) == 3 and type(call_id) is str and type(name) is str and type(arguments) is str):
            return None
        made.append(ToolCall(id=call_id, name=name, arguments=arguments))
    return Assistant(time=time, content=content, reasoning_content=reasoning, tool_calls=tuple(made))


def _quick_usage(o: JsonObject) -> Usage | None:
    time, cache_n, prompt_n, predicted_n = o["time"], o["cache_n"], o["prompt_n"], o["predicted_n"]
    reasoning_tokens, capped = o["reasoning_tokens"], o["thinking_capped"]
    if len(o) == 7 and is_timestamp(time) and type(capped) is bool:
        for n in (cache_n, prompt_n, predicted_n, reasoning_tokens):
            if type(n) is not int or not 0 <= n <= MAX_INTEGER:
                return None  # null among them: rare
        return Usage(
            time=time, cache_n=cache_n, prompt_n=prompt_n, predicted_n=predicted_n,
            reasoning_tokens=reasoning_tokens, thinking_capped=capped,
        )  # fmt: skip
    return None


def _quick_tool_result(o: JsonObject) -> ToolResult | None:
    time, call, call_id, content = o["time"], o["call"], o["tool_call_id"], o["content"]
    class_, untrusted, truncated = o["class"], o["untrusted"], o["truncated"]
    if (
        len(o) == 8 and is_timestamp(time) and type(call) is int and 0 <= call <= MAX_INTEGER
        and type(call_id) is str and type(content) is str and type(class_) is str and class_ in RESULT_CLASSES
        and type(untrusted) is bool and type(truncated) is bool
    ):  # fmt: skip
        return ToolResult(
            time=time, call=call, tool_call_id=call_id, content=content,
            class_=cast("ResultClass", class_), untrusted=untrusted, truncated=truncated,
        )  # fmt: skip
    return None


_QUICK: dict[str, Callable[[JsonObject], LogRecord | None]] = {
    "user": _quick_user,
    "assistant": _quick_assistant,
    "usage": _quick_usage,
    "tool_result": _quick_tool_result,
}
