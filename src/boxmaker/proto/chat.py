"""The model's side of a conversation: messages, tool schemas, and the events of one completion."""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

from boxmaker.proto.codec import Count, JsonObject, Positive

ResultClass: TypeAlias = Literal["public", "private", "secret"]
"""Whom the result of a tool is for."""


@frozen(kw_only=True)
class ToolCall:
    """A call as the server sent it; `arguments` is its text, parsed or not, `id` may be empty."""

    id: str
    name: str
    arguments: str


@frozen(kw_only=True)
class System:
    """The first message of every request."""

    content: str


@frozen(kw_only=True)
class User:
    """What the owner said."""

    content: str


@frozen(kw_only=True)
class Assistant:
    """One reply; a field is None when the server sent no text for it."""

    content: str | None
    reasoning_content: str | None
    tool_calls: tuple[ToolCall, ...]


@frozen(kw_only=True)
class Tool:
    """The result of one call; `tool_call_id` is the id as the log has it, before any mending."""

    tool_call_id: str
    content: str


ChatMessage: TypeAlias = System | User | Assistant | Tool


@frozen(kw_only=True)
class ToolSchema:
    """A tool as the model sees it; `parameters` is a JSON schema whose key order is kept."""

    name: str
    description: str
    parameters: JsonObject


@frozen(kw_only=True)
class Figures:
    """What one completion cost, in tokens; None where the server did not say."""

    cache_n: Count | None
    prompt_n: Count | None
    predicted_n: Count | None
    reasoning_tokens: Count
    thinking_capped: bool


@frozen(kw_only=True)
class Queued:
    """Others are in front at our own slot gate; sent on joining and on every change."""

    ahead: Positive


@frozen(kw_only=True)
class Waiting:
    """The server is not ready: somebody else has the slot (true), or the model loads (false)."""

    slot_busy: bool


@frozen(kw_only=True)
class Progress:
    """Prompt tokens: in all, from the cache, and read so far (those from the cache included)."""

    total: Count
    cache: Count
    processed: Count


@frozen(kw_only=True)
class Reasoning:
    """A piece of the model's thinking."""

    text: str


@frozen(kw_only=True)
class Content:
    """A piece of the answer."""

    text: str


@frozen(kw_only=True)
class ToolCallDelta:
    """A piece of a call; the turn drops it and reports whole calls."""

    index: Count
    id: str
    name: str
    arguments: str


@frozen(kw_only=True)
class ThinkingCapped:
    """The thinking cap fired after that many reasoning deltas."""

    tokens: Count


@frozen(kw_only=True)
class Retrying:
    """Try number `attempt` comes after a wait; voids text sent since the last tool result."""

    attempt: Positive
    after_ms: Count
    error: str


ChatEvent: TypeAlias = Queued | Waiting | Progress | Reasoning | Content | ToolCallDelta | ThinkingCapped | Retrying
