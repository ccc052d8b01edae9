"""What a channel and loopd say to each other: one request, events, one final answer.

Source: M2b section 6; docs/protocol.md for what controls a turn.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

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
    Positive,
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
    CANCELLED = "cancelled"
    NO_TURN = "no_turn"


UserText = Annotated[str, "user text"]
"""What the owner said: text without NUL, which no server takes."""


WhenBusy: TypeAlias = Literal["refuse", "wait", "replace"]
"""What a turn does when another one has its session: give up, wait in line, or end that turn and go first."""

CancelCause: TypeAlias = Literal["owner", "replaced", "disconnect", "stalled_channel", "shutdown"]
"""Why a turn was cancelled: a `cancel`, a `replace`, its channel left or takes nothing, the daemon ends."""


@frozen(kw_only=True)
class Turn:
    """Run one turn; `resume` says whether the session must exist, or must not."""

    session: SessionId
    content: UserText
    resume: bool
    when_busy: WhenBusy = "refuse"


@frozen(kw_only=True)
class Steer:
    """Say something to the turn that runs; it joins at the next boundary."""

    session: SessionId
    content: UserText


@frozen(kw_only=True)
class Cancel:
    """End the turn that runs, and say when it is over."""

    session: SessionId
    cause: Literal["owner"]


@frozen(kw_only=True)
class Fork:
    """Begin the session `new` with what `session` holds up to its answer number `from_`; None is the last one."""

    session: SessionId
    from_: Positive | None
    new: SessionId


@frozen(kw_only=True)
class Status:
    """Say what the daemon does now."""


Request: TypeAlias = Turn | Steer | Cancel | Fork | Status


@frozen(kw_only=True)
class ToolCallStarted:
    """A call is being worked on; `name` is trimmed."""

    name: str


@frozen(kw_only=True)
class ToolResult:
    """A call has its result in the log; text sent before this event stays.

    `untrusted` says that the result came from outside; it is left out of the frame when it is false.
    """

    name: str
    class_: ResultClass
    truncated: bool
    untrusted: bool = False


@frozen(kw_only=True)
class CacheLoss:
    """The server had `got` tokens in its cache where `expected` could have been."""

    expected: Count
    got: Count


@frozen(kw_only=True)
class Cut:
    """The reply is final but was cut: by a limit of the server, or by our thinking cap."""

    reason: Literal["length", "thinking_cap"]


@frozen(kw_only=True)
class Steered:
    """What another connection said has joined the turn and is in the log; text sent before this event stays."""

    content: UserText


@frozen(kw_only=True)
class Context:
    """The session has `used` tokens of the slot's `n_ctx`, and so little room left that its end should be planned."""

    used: Count
    n_ctx: Positive


TurnEvent: TypeAlias = (
    Queued | Waiting | Progress | Reasoning | Content | ToolCallStarted | ToolResult
    | ThinkingCapped | Retrying | CacheLoss | Cut | Steered | Context
)  # fmt: skip


@frozen(kw_only=True)
class TurnDone:
    """The answer: the last completion's content, and what that completion cost."""

    content: str
    usage: Figures


@frozen(kw_only=True)
class SteerDone:
    """The text is in the log; it is in the turn's next request."""


@frozen(kw_only=True)
class CancelDone:
    """The turn is over.

    `ending` is `idle` when none ran, `turn_done`, or the error that its channel was or would have been told; `cause`
    what cancelled it, None when it ended by itself. `slot_free`: the server does not show the slot as busy any more.
    """

    ending: str
    cause: CancelCause | None
    slot_free: bool


@frozen(kw_only=True)
class ForkDone:
    """The new session is there; it holds the old one up to its answer number `from_`."""

    session: SessionId
    from_: Positive


@frozen(kw_only=True)
class ServerStatus:
    """The model's server, as it answered just now."""

    url: str
    state: Literal["ready", "loading", "unreachable"]


@frozen(kw_only=True)
class SlotStatus:
    """One slot of the server; `ours` is the one that sessions are pinned to."""

    id: Count
    busy: bool
    ours: bool


Phase: TypeAlias = Literal["starting", "waiting", "model", "tools", "ending"]
"""Where a turn stands: its session is opened; slot, server or back-off; a reply comes; tools run; it was cancelled."""


@frozen(kw_only=True)
class SessionStatus:
    """A session that a turn has; `waiting` connections wait for the next one."""

    session: SessionId
    phase: Phase
    age_ms: Count
    waiting: Count


@frozen(kw_only=True)
class StatusDone:
    """What the daemon does; sessions that no turn has are not listed."""

    version: str
    pid: Count
    server: ServerStatus
    slots: tuple[SlotStatus, ...]
    sessions: tuple[SessionStatus, ...]


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

Final: TypeAlias = TurnDone | SteerDone | CancelDone | ForkDone | StatusDone
"""What ends a connection that got what it asked for."""

TURN: Codec[Turn] = Codec(_converter, Turn)
REQUESTS: dict[str, Codec[Any]] = {
    "turn": TURN,
    "steer": Codec(_converter, Steer),
    "cancel": Codec(_converter, Cancel),
    "fork": Codec(_converter, Fork),
    "status": Codec(_converter, Status),
}
"""Each kind of request."""
REQUEST_KIND: dict[type[Request], str] = {
    Turn: "turn",
    Steer: "steer",
    Cancel: "cancel",
    Fork: "fork",
    Status: "status",
}
TURN_DONE: Codec[TurnDone] = Codec(_converter, TurnDone)
FINALS: dict[str, Codec[Any]] = {
    "turn_done": TURN_DONE,
    "steered": Codec(_converter, SteerDone),
    "cancel_done": Codec(_converter, CancelDone),
    "fork_done": Codec(_converter, ForkDone),
    "status_done": Codec(_converter, StatusDone),
}
"""Each kind of final answer but `error`."""
FINAL_KIND: dict[type[Final], str] = {
    TurnDone: "turn_done",
    SteerDone: "steered",
    CancelDone: "cancel_done",
    ForkDone: "fork_done",
    StatusDone: "status_done",
}
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
        "steered": Steered,
        "context": Context,
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
