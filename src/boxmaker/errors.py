"""Every error that boxmaker raises on purpose.

    BoxmakerError                 exit 1
    ├─ ConfigError                exit 2   the owner mends config.toml
    ├─ ValueRefused                        a codec met a value that may not cross its boundary
    ├─ StartError                          the daemon cannot start: home, socket, self-test
    ├─ ChannelClosed                       client half: loopd went away in mid-answer
    ├─ NobodyListens                       client half: no daemon behind the socket path
    └─ WireableError                       has an ErrorCode and a detail for the channel
       ├─ BadFrame  BadRequest  UnsupportedVersion
       ├─ InternalError  ShuttingDown
       ├─ NoSuchSession  SessionExists  SessionBusy
       ├─ SessionDamaged                   a log or baseline cannot be read; nothing was changed
       ├─ StorageError                     the disk said no; the file is as it was before
       ├─ InferenceError                   the server failed, after the retries the policy allows
       ├─ SessionFull                      the prompt no longer fits the slot's context
       ├─ TurnLimit                        a runaway was stopped; the session stays usable
       ├─ TurnCancelled                    the owner stopped the turn, or a newer message took its place
       └─ NoTurn                           there is no turn (any more) that could be steered

A family answers what the caller may do. An error carries fields; its text is made from them.
Errors of httpx, os and json stop at the module that wraps the foreign thing.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import ClassVar, Literal

from attrs import define, field


def printable(text: str) -> str:
    """A text as one line of printable characters: a path may hold line ends, escapes, bytes that are no UTF-8."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shell_word(path: Path) -> str:
    """A path as a word that can be pasted into a shell, whatever it holds."""
    if str(path).isprintable():
        return shlex.quote(str(path))
    shown = "".join(
        chr(byte) if 0x20 <= byte < 0x7F and byte not in b"\\'" else f"\\x{byte:02x}" for byte in os.fsencode(path)
    )
    return f"$'{shown}'"


class BoxmakerError(Exception):
    """Root of the tree; `exit_code` is the status of a command that ends with it, `code` its name."""

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "error"


@define(kw_only=True)
class ConfigError(BoxmakerError):
    """A configuration that cannot be used; one line a problem, nothing was created."""

    exit_code: ClassVar[int] = 2
    code: ClassVar[str] = "config"
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.problems)


@define(kw_only=True)
class ValueRefused(BoxmakerError):
    """A value that its boundary does not allow; `path` is where it stands (`$.calls[0].id`)."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@define(kw_only=True)
class StartError(BoxmakerError):
    """The daemon cannot start; says what was tried and what to do, in one line, and what a program said in more."""

    message: str
    more: str = ""

    def __str__(self) -> str:
        return printable(self.message) + (f"\n{self.more}" if self.more else "")


@define(kw_only=True)
class NobodyListens(BoxmakerError):
    """No daemon answers on the socket path that was tried."""

    code: ClassVar[str] = "nobody_listens"
    path: Path
    reason: str
    remedy: str = "start it with `loopd serve`, or name its socket with --socket"

    def __str__(self) -> str:
        return printable(f"no loopd answers on {self.path} ({self.reason}); {self.remedy}")


@define(kw_only=True)
class ChannelClosed(BoxmakerError):
    """loopd closed the connection before its final frame; the turn was cancelled or lost."""

    code: ClassVar[str] = "channel_closed"

    def __str__(self) -> str:
        return "loopd closed the connection before the answer was complete; its log on stderr says why"


class WireableError(BoxmakerError):
    """An error that a channel is told; `code` is one of proto.channel.ErrorCode."""

    def detail(self) -> dict[str, object]:
        """What a program needs to know besides the code; always a JSON object."""
        return {}


@define(kw_only=True)
class BadFrame(WireableError):
    """Bytes that are no frame; the connection that sent them closes."""

    code: ClassVar[str] = "bad_frame"
    problem: str

    def __str__(self) -> str:
        return self.problem


@define(kw_only=True)
class UnsupportedVersion(WireableError):
    """A readable frame whose `v` is not the integer 1."""

    code: ClassVar[str] = "unsupported_version"
    found: str

    def __str__(self) -> str:
        return f"protocol version 1 is spoken here, the frame says v = {self.found}; use one release on both ends"

    def detail(self) -> dict[str, object]:
        return {"supported": [1]}


@define(kw_only=True)
class BadRequest(WireableError):
    """A readable frame that asks for nothing this daemon knows."""

    code: ClassVar[str] = "bad_request"
    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"

    def detail(self) -> dict[str, object]:
        return {"path": self.path}


@define(kw_only=True)
class InternalError(WireableError):
    """A fault of boxmaker itself; what was acknowledged is in the log."""

    code: ClassVar[str] = "internal"
    message: str

    def __str__(self) -> str:
        return self.message


class ShuttingDown(WireableError):
    """The daemon ends; the turn was cancelled, or not begun."""

    code: ClassVar[str] = "shutting_down"

    def __str__(self) -> str:
        return "loopd is shutting down; send the turn again when it is back"


@define(kw_only=True)
class NoSuchSession(WireableError):
    """`resume: true` for a session that does not exist."""

    code: ClassVar[str] = "no_such_session"
    session: str
    directory: Path | None = None
    """Where it was looked for, by a command that reads logs."""

    def __str__(self) -> str:
        if self.directory is not None:
            where = printable(f"{self.session} in {self.directory}")
            return f"there is no session {where}; name the daemon's home with --home or BOXMAKER_HOME"
        return f"there is no session {self.session}; a turn with resume: false begins it"

    def detail(self) -> dict[str, object]:
        return {"session": self.session}


@define(kw_only=True)
class SessionExists(WireableError):
    """`resume: false` for a session that exists."""

    code: ClassVar[str] = "session_exists"
    session: str

    def __str__(self) -> str:
        return f"session {self.session} exists already; resume it, or choose another id"

    def detail(self) -> dict[str, object]:
        return {"session": self.session}


@define(kw_only=True)
class SessionBusy(WireableError):
    """Another turn (or a command that mends the log) has the session."""

    code: ClassVar[str] = "session_busy"
    session: str

    def __str__(self) -> str:
        return f"session {self.session} is busy with another turn; try again when that has ended"

    def detail(self) -> dict[str, object]:
        return {"session": self.session}


@define(kw_only=True)
class SessionDamaged(WireableError):
    """A log or baseline that cannot be read; `line` counts from 1, 0 is the file as a whole."""

    code: ClassVar[str] = "session_damaged"
    file: Path
    line: int
    problem: str
    torn: bool = False
    """The last line has no end: the one kind of damage that can be mended without losing a record."""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else str(self.file)
        return printable(f"{where}: {self.problem}; {self.remedy()}")

    def remedy(self) -> str:
        """What the owner can type: the file stands in `<home>/sessions/<id>/`."""
        directory = self.file.parent
        arguments = f"{directory.name} --home {shell_word(directory.parent.parent)}"
        if not self.torn:
            return f"`bxctl session check {arguments}` lists all damage; mend the file by hand, or begin a new session"
        if self.line == 1:
            return f"it has no whole line: remove {directory}"
        return f"`bxctl session repair {arguments}` cuts the torn end off and keeps a copy"

    def detail(self) -> dict[str, object]:
        return {"file": str(self.file), "line": self.line}


@define(kw_only=True)
class StorageError(WireableError):
    """The disk said no; what was on it before is unchanged."""

    code: ClassVar[str] = "storage"
    action: str
    file: Path
    reason: str

    def __str__(self) -> str:
        return printable(f"cannot {self.action} {self.file}: {self.reason}")

    def detail(self) -> dict[str, object]:
        return {"file": str(self.file), "action": self.action}


InferenceKind = Literal[
    "connect",  # refused, reset or closed before the response headers
    "http",  # a status that is not 200, or an error object inside a 200
    "broken",  # the stream ended before its end
    "stall",  # no delta within stall_s after the first one
    "prefill",  # no first delta within prefill_s
    "foreign",  # JSON or HTML where a stream was expected
    "limit",  # a limit of ours: reply_max_bytes, event_max_bytes, busy_s
]


@define(kw_only=True)
class InferenceError(WireableError):
    """One try of a completion, or the completion as a whole, failed.

    `status` is the HTTP status, or the `code` of an error inside the stream. `error_type`,
    `error_code` and `server_message` are the server's own words. `retry_after` is the raw header.
    """

    code: ClassVar[str] = "inference"
    kind: InferenceKind
    message: str
    status: int | None = None
    server_message: str = ""
    error_type: str | None = None
    error_code: str | None = None
    retry_after: str | None = None
    limit: str | None = None
    attempts: int = field(default=1)

    def __str__(self) -> str:
        return self.message

    def detail(self) -> dict[str, object]:
        found: dict[str, object] = {}
        if self.status is not None:
            found["status"] = self.status
        if self.limit is not None:
            found["limit"] = self.limit
        if self.attempts > 1:
            found["attempts"] = self.attempts
        return found


@define(kw_only=True)
class SessionFull(WireableError):
    """The server says that the prompt does not fit; nothing was appended for that request."""

    code: ClassVar[str] = "session_full"
    message: str
    fork: str | None = None
    """The session's id when it has an answer that a fork can end with: the message that did not fit is left out."""
    at: int | None = None
    """The number of that answer when the last one would leave no room to go on."""

    def __str__(self) -> str:
        way = "in a new session"
        if self.fork is not None and self.at is not None:
            way = f"with what was said up to answer {self.at}: bxctl fork {self.fork} --at {self.at}, or {way}"
        elif self.fork is not None:
            way = f"without this message: bxctl fork {self.fork} (--at N keeps less), or {way}"
        return f"the session no longer fits the server's context: {self.message}; go on {way}"


@define(kw_only=True)
class TurnLimit(WireableError):
    """A limit ended the turn; what was appended stays and every call has a result."""

    code: ClassVar[str] = "turn_limit"
    limit: Literal["tool_iterations", "repeat_detection", "turn_s"]
    value: float

    def __str__(self) -> str:
        if self.limit == "turn_s":
            return f"the turn was ended after {self.value:g} s ([loop] turn_s)"
        if self.limit == "tool_iterations":
            return f"the turn was ended after {self.value} rounds of tool calls ([loop] tool_iterations)"
        return "the turn was ended because the model repeated the same tool calls ([loop] repeat_detection)"

    def detail(self) -> dict[str, object]:
        if self.limit == "turn_s":
            return {"limit": self.limit}
        return {"limit": self.limit, "value": self.value}


@define(kw_only=True)
class TurnCancelled(WireableError):
    """The turn was cancelled from outside its channel; what was appended stays and every call has a result."""

    code: ClassVar[str] = "cancelled"
    cause: str

    def __str__(self) -> str:
        if self.cause == "replaced":
            return "the turn was cancelled: a newer message took its place"
        return "the turn was cancelled by its owner"

    def detail(self) -> dict[str, object]:
        return {"cause": self.cause}


@define(kw_only=True)
class NoTurn(WireableError):
    """Nothing to steer: `ending` is `idle`, or how the turn ended before the text could join it."""

    code: ClassVar[str] = "no_turn"
    session: str
    ending: str

    def __str__(self) -> str:
        if self.ending == "idle":
            return f"no turn of session {self.session} runs; send the text as a turn"
        return f"the turn of session {self.session} ended first ({self.ending}); send the text as a turn"

    def detail(self) -> dict[str, object]:
        return {"ending": self.ending}
