"""Messages to request bytes, one at a time; all mending of history is here.

Laws:
* A body, up to the `]` that closes its messages, is a byte prefix of the session's next body.
* What is added depends on the messages so far alone: a restart gives the same bytes.
* A strict server accepts what is sent, whatever a model once wrote.

Source: design.md section 7, "What is sent back"; `../shared/cases/01`, `03`, `06`, `48`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from json.encoder import encode_basestring
from typing import Any

from attrs import frozen

from boxmaker.config import Config
from boxmaker.errors import ValueRefused
from boxmaker.inference.completion import BUDGET_MESSAGE
from boxmaker.proto.arguments import parse_arguments
from boxmaker.proto.chat import Assistant, ChatMessage, System, Tool, ToolCall, ToolSchema, User
from boxmaker.proto.codec import dumps

ALTERNATION_NOTE = "[No answer was given.]"
"""Stands where a template demands an assistant message that there never was."""
UNNAMED = "unnamed"
"""Stands for a call's empty name: strict servers refuse a call without one."""


@frozen(kw_only=True)
class ChatRequest:
    """One completion to ask for: the slot that it is pinned to, the bytes to send, and whose it is."""

    slot: int
    body: bytes
    session: str = ""


def chat_template_kwargs(config: Config) -> dict[str, Any]:
    """What the template is told, the same in every request and in the self-test's."""
    own = {"enable_thinking": config.thinking.enabled, "preserve_reasoning": True}
    return {**own, **config.request.get("chat_template_kwargs", {})}


def fixed_fields(config: Config) -> dict[str, Any]:
    """Everything in a body but `messages` and `tools`; fixed for the process but for `id_slot`, a session's."""
    passed = {key: value for key, value in config.request.items() if key != "chat_template_kwargs"}
    return {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
        "id_slot": config.slots.listed[0],
        "cache_prompt": True,
        **passed,
        "chat_template_kwargs": chat_template_kwargs(config),
        "reasoning_budget_tokens": config.thinking.cap,
        "reasoning_budget_message": BUDGET_MESSAGE,
    }


def tool_objects(tools: Iterable[ToolSchema]) -> list[dict[str, Any]]:
    """The `tools` array of a request."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]


class HistoryMender:
    """Make each message acceptable to a strict server, given those before it.

    `alternate`: the template refuses `user` after `user` or after `tool`.
    """

    def __init__(self, alternate: bool) -> None:
        self._alternate = alternate
        self._last: type[ChatMessage] | None = None
        self._used_ids: set[str] = set()
        self._renamed = 0
        self._answers: defaultdict[str, deque[str]] = defaultdict(deque)

    def mend(self, message: ChatMessage) -> list[dict[str, Any]]:
        """Give the JSON objects that stand for a message: one, or two with the alternation note."""
        mended: list[dict[str, Any]] = []
        match message:
            case System(content=content):
                mended.append({"role": "system", "content": content})
            case User(content=content):
                if self._alternate and self._last in (User, Tool):
                    mended.append({"role": "assistant", "content": ALTERNATION_NOTE})
                mended.append({"role": "user", "content": content})
            case Assistant():
                mended.append(self._assistant(message))
            case _:
                answered = self._answer(message.tool_call_id)
                mended.append({"role": "tool", "tool_call_id": answered, "content": message.content})
        self._last = type(message)
        return mended

    def _assistant(self, message: Assistant) -> dict[str, Any]:
        content = message.content or ""
        if message.tool_calls:
            content = content.rstrip("\n")  # templates add their own: two would break the cache there
        mended: dict[str, Any] = {"role": "assistant", "content": content}
        if message.reasoning_content is not None:
            mended["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            mended["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return mended

    def _call(self, call: ToolCall) -> dict[str, Any]:
        new_id = call.id if call.id.strip() and call.id not in self._used_ids else self._fresh_id()
        self._used_ids.add(new_id)
        self._answers[call.id].append(new_id)
        return {
            "id": new_id,
            "type": "function",
            "function": {"name": call.name.strip() or UNNAMED, "arguments": _arguments(call.arguments)},
        }

    def _fresh_id(self) -> str:
        while True:
            self._renamed += 1
            fresh = f"c{self._renamed:08d}"
            if fresh not in self._used_ids:
                return fresh

    def _answer(self, old_id: str) -> str:
        """The k-th result with an old id answers the k-th call with it; replay refuses other results."""
        waiting = self._answers[old_id]
        answered = waiting.popleft()
        if not waiting:
            del self._answers[old_id]
        return answered


def _arguments(text: str) -> str:
    if not text.strip():
        return "{}"
    try:
        parse_arguments(text)
    except ValueRefused:
        return dumps({"raw": text})
    return text


def _message_bytes(mended: dict[str, Any]) -> bytes:
    """The compact JSON of a message that the mender made.

    Written by hand because a cold resume writes them all; a test holds it equal to `dumps`.
    """
    parts = [
        f'"{key}":{encode_basestring(value) if type(value) is str else _calls_text(value)}'
        for key, value in mended.items()
    ]
    try:
        return f"{{{','.join(parts)}}}".encode()
    except UnicodeEncodeError as exc:
        raise ValueRefused(path="$", problem="holds a lone surrogate") from exc


def _calls_text(calls: list[dict[str, Any]]) -> str:
    made = []
    for call in calls:
        function = call["function"]
        name, arguments = encode_basestring(function["name"]), encode_basestring(function["arguments"])
        made.append(
            f'{{"id":{encode_basestring(call["id"])},"type":"function","function":'
            f'{{"name":{name},"arguments":{arguments}}}}}'
        )
    return f"[{','.join(made)}]"


class RequestEncoder:
    """The growing body of one session's requests.

    `fixed` is what `fixed_fields` gave. Not safe to share between sessions.
    """

    def __init__(self, *, tools: Iterable[ToolSchema], fixed: dict[str, Any], alternate: bool) -> None:
        self.alternate = alternate
        self._mender = HistoryMender(alternate)
        self._messages = bytearray(b'{"messages":[')
        self._empty = True
        self._fixed = {"tools": tool_objects(tools), **fixed}
        self._write_rest()

    def add(self, message: ChatMessage) -> None:
        """Append one message; what stands before it is not touched.

        Raises:
            ValueRefused: text that JSON cannot hold; the body is as it was, the encoder of no more use.
        """
        texts = [_message_bytes(mended) for mended in self._mender.mend(message)]
        for text in texts:
            if not self._empty:
                self._messages += b","
            self._messages += text
            self._empty = False

    def pin(self, slot: int) -> None:
        """Ask for another slot, if the fixed fields name one; it stands behind the messages, so the prefix holds."""
        if self._fixed.get("id_slot", slot) != slot:
            self._fixed["id_slot"] = slot
            self._write_rest()

    def _write_rest(self) -> None:
        self._rest = b"]," + dumps(self._fixed).encode("utf-8")[1:]

    def body(self) -> bytes:
        """The whole request body, as it stands."""
        return bytes(self._messages) + self._rest

    @property
    def size_bytes(self) -> int:
        """About what the encoder holds in memory."""
        return len(self._messages) + len(self._rest)
