"""What a log means: the messages it stands for, and where the session stands; pure.

Source: M2b section 2 "Replay", section 4 (`call`), design.md section 8.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from attrs import define, field

from boxmaker.inference.cache import TokenFigures
from boxmaker.proto import chat
from boxmaker.proto.chat import ChatMessage, ToolCall
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import Assistant, LogRecord, SessionStart, ToolResult, Usage, User
from boxmaker.session.baseline import Baseline


class OutOfOrder(Exception):
    """A record that our writer never puts where it stands; the text says why."""


@define
class LogState:
    """Where a session stands after the records so far; `apply` takes the next.

    `open_calls` are calls without a result, in the model's order; `answers` counts the completions without calls.
    """

    session: SessionId
    start: SessionStart | None = None
    open_calls: list[ToolCall] = field(factory=list)
    next_call: int = 0
    completions: int = 0
    answers: int = 0
    _last_usage: Usage | None = None
    _awaits_usage: bool = False

    def copy(self) -> LogState:
        """An independent copy, to try records on."""
        other = copy.copy(self)
        other.open_calls = list(self.open_calls)
        return other

    def apply(self, record: LogRecord) -> ChatMessage | None:
        """Take one record; give the message that it stands for, if any.

        Raises:
            OutOfOrder: the record cannot follow those before it; the state is unchanged.
        """
        if (self.start is None) != isinstance(record, SessionStart):
            raise OutOfOrder("a log begins with session_start, and has one")
        # By class and not by pattern: a cold resume of 10,000 records passes here.
        kind = type(record)
        if kind is Usage:
            if not self._awaits_usage:
                raise OutOfOrder("usage does not follow its assistant record")
            self._last_usage = record  # type: ignore[assignment]  # it is one, as kind says
        elif kind is Assistant:
            self._no_open_calls("assistant")
            self.open_calls = list(record.tool_calls)  # type: ignore[union-attr]  # the same
            self._last_usage = None
            self.completions += 1
            self.answers += not self.open_calls
        elif kind is User:
            self._no_open_calls("user")
        elif isinstance(record, ToolResult):
            self._answered(record)
        elif isinstance(record, SessionStart):
            if record.session != self.session:
                raise OutOfOrder(f"the log is of session {record.session}")
            if record.epoch != 0:
                raise OutOfOrder(f"epoch {record.epoch} in the log of epoch 0")
            self.start = record
        self._awaits_usage = kind is Assistant
        return message_of(record)

    @property
    def last_figures(self) -> TokenFigures | None:
        """What the last completion cost: None before the first, all-None figures when its Usage is missing."""
        if not self.completions:
            return None
        usage = self._last_usage
        if usage is None:
            return TokenFigures(cache_n=None, prompt_n=None, predicted_n=None)
        return figures_of(usage)

    def _no_open_calls(self, what: str) -> None:
        if self.open_calls:
            raise OutOfOrder(f"{what} record while call {self.open_calls[0].id!r} has no result")

    def _answered(self, record: ToolResult) -> None:
        for call in self.open_calls:
            if call.id == record.tool_call_id:
                self.open_calls.remove(call)
                self.next_call = max(self.next_call, record.call + 1)
                return
        raise OutOfOrder(f"tool_result for {record.tool_call_id!r}, which no open call has")


def figures_of(usage: Usage) -> TokenFigures:
    """What the server said of a completion."""
    return TokenFigures(cache_n=usage.cache_n, prompt_n=usage.prompt_n, predicted_n=usage.predicted_n)


def message_of(record: LogRecord) -> ChatMessage | None:
    """The message that a record stands for; None for records that the model never sees."""
    if isinstance(record, Assistant):
        return chat.Assistant(
            content=record.content, reasoning_content=record.reasoning_content, tool_calls=record.tool_calls
        )
    if isinstance(record, User):
        return chat.User(content=record.content)
    if isinstance(record, ToolResult):
        return chat.Tool(tool_call_id=record.tool_call_id, content=record.content)
    return None


def messages(baseline: Baseline, records: Iterable[LogRecord]) -> list[ChatMessage]:
    """The messages of a session's next request: the system message, then what the log stands for."""
    found: list[ChatMessage] = [chat.System(content=baseline.system)]
    for record in records:
        message = message_of(record)
        if message is not None:
            found.append(message)
    return found
