"""The records of a session's log, and their lines.

A line is one JSON object with every key of its record in the order below, then LF.
Source: M2b section 2 "Log records".
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

from boxmaker.proto.chat import ToolCall
from boxmaker.proto.codec import Count, Sha256, TaggedCodec, strict_converter
from boxmaker.proto.ids import SessionId, parse_session_id
from boxmaker.proto.time import Timestamp, parse_timestamp

ResultClass: TypeAlias = Literal["public", "private", "secret"]


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
)


def encode_line(record: LogRecord) -> bytes:
    """Write a record as its line, LF included; raises ValueRefused."""
    return RECORDS.encode(record).encode("utf-8") + b"\n"


def decode_line(line: bytes) -> LogRecord:
    """Read a record from its line, with or without the LF; raises ValueRefused."""
    return RECORDS.decode(line)
