"""What a channel and loopd say to each other: one request, events, one final answer.

Source: M2b section 6.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from attrs import frozen

from boxmaker.errors import WireableError
from boxmaker.proto.chat import (
    Content,
    Figures,
    Progress,
    Queued,
    Reasoning,
    ResultClass,
    Retrying,
    ThinkingCapped,
    Waiting,
)
from boxmaker.proto.codec import (
    SURROGATE,
    Codec,
    Count,
    JsonObject,
    TaggedCodec,
    check_text,
    found,
    strict_converter,
)
from boxmaker.proto.ids import SessionId, parse_session_id

SOCKET_PATH_MAX_BYTES = 107
"""Of a unix socket's path on Linux; its closing NUL is the 108th."""


class ErrorCode(StrEnum):
    """Why a turn has no answer."""

    BAD_FRAME = "bad_frame"
    BAD_REQUEST = "bad_request"
    UNSUPPORTED_VERSION = "unsupported_version"
    INTERNAL = "internal"
    SHUTTING_DOWN = "shutting_down"
    STORAGE = "storage"
    SESSION_DAMAGED = "session_damaged"
    SESSION_FULL = "session_full"
    TURN_LIMIT = "turn_limit"
    SESSION_BUSY = "session_busy"
    NO_SUCH_SESSION = "no_such_session"
    SESSION_EXISTS = "session_exists"
    INFERENCE = "inference"


UserText = Annotated[str, "user text"]
"""What the owner said: text without NUL, which no server takes."""


@frozen(kw_only=True)
class Turn:
    """Run one turn; `resume` says whether the session must exist, or must not."""

    session: SessionId
    content: UserText
    resume: bool


@frozen(kw_only=True)
class ToolCallStarted:
    """A call is being worked on; `name` is trimmed."""

    name: str


@frozen(kw_only=True)
class ToolResult:
    """A call has its result in the log; text sent before this event stays."""

    name: str
    class_: ResultClass
    truncated: bool


@frozen(kw_only=True)
class CacheLoss:
    """The server had `got` tokens in its cache where `expected` could have been."""

    expected: Count
    got: Count


@frozen(kw_only=True)
class Cut:
    """The reply is final but was cut: by a limit of the server, or by our thinking cap."""

    reason: Literal["length", "thinking_cap"]


TurnEvent: TypeAlias = (
    Queued | Waiting | Progress | Reasoning | Content | ToolCallStarted | ToolResult
    | ThinkingCapped | Retrying | CacheLoss | Cut
)  # fmt: skip


@frozen(kw_only=True)
class TurnDone:
    """The answer: the last completion's content, and what that completion cost."""

    content: str
    usage: Figures


@frozen(kw_only=True)
class WireError:
    """Why there is no answer; `detail` has what a program needs."""

    code: ErrorCode
    message: str
    detail: JsonObject


def _code(value: object, _: object) -> ErrorCode:
    if type(value) is not str or value not in ErrorCode._value2member_map_:
        raise ValueError(f"unknown error code {found(value)}")
    return ErrorCode(value)


def _user_text(value: object, kind: object) -> str:
    text = check_text(value, kind)
    if "\x00" in text:
        raise ValueError("text with a NUL character")
    return text


_converter = strict_converter({
    SessionId: lambda value, _: parse_session_id(value),
    ErrorCode: _code,
    UserText: _user_text,
})  # fmt: skip
_converter.register_unstructure_hook(ErrorCode, lambda code: code.value)

TURN: Codec[Turn] = Codec(_converter, Turn)
TURN_DONE: Codec[TurnDone] = Codec(_converter, TurnDone)
WIRE_ERROR: Codec[WireError] = Codec(_converter, WireError)
TURN_EVENTS: TaggedCodec[TurnEvent] = TaggedCodec(
    _converter,
    {
        "queued": Queued,
        "waiting": Waiting,
        "progress": Progress,
        "reasoning": Reasoning,
        "content": Content,
        "tool_call_started": ToolCallStarted,
        "tool_result": ToolResult,
        "thinking_capped": ThinkingCapped,
        "retrying": Retrying,
        "cache_loss": CacheLoss,
        "cut": Cut,
    },
)


def wire_error(error: WireableError) -> WireError:
    """Say one of our errors to a channel.

    An error can always be said: a lone surrogate (the name of a file that is not UTF-8) becomes U+FFFD.
    """
    detail = {key: _sayable(value) if isinstance(value, str) else value for key, value in error.detail().items()}
    return WireError(code=ErrorCode(error.code), message=_sayable(str(error)), detail=detail)


def _sayable(text: str) -> str:
    return SURROGATE.sub("\ufffd", text)
