"""What we know of the server's model and template; asked again only when the model is seen to change.

`alternate`: the template refuses `user` after `user` or `user` after `tool`. It is fixed as long as
the model is, because it decides bytes that were already sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import trio

from boxmaker.config import Config
from boxmaker.errors import InferenceError
from boxmaker.inference.client import Answer, Client
from boxmaker.inference.completion import MAX_TOKENS
from boxmaker.inference.request import HistoryMender, chat_template_kwargs, tool_objects
from boxmaker.log import log_event
from boxmaker.proto.chat import Assistant, ChatMessage, System, Tool, ToolCall, ToolSchema, User

PROBE_S = 30.0
"""For one question; the answer takes milliseconds on an idle server."""

PROBE_SYSTEM = "Probe of a system message."
PROBE_RESULT = "Probe of a tool result."
_CALL = ToolCall(id="call00001", name="clock", arguments="{}")
_ASKED = (System(content=PROBE_SYSTEM), User(content="What time is it?"))
_RESULT = (
    Assistant(content=None, reasoning_content=None, tool_calls=(_CALL,)),
    Tool(tool_call_id=_CALL.id, content=PROBE_RESULT),
)
TOOL_TURN: tuple[ChatMessage, ...] = (*_ASKED, *_RESULT)
"""A conversation in mid-turn: the least that a template must be able to render."""
ANSWERED: tuple[ChatMessage, ...] = (
    *TOOL_TURN,
    Assistant(content="Noon.", reasoning_content=None, tool_calls=()),
    User(content="Thanks."),
)
USER_AFTER_USER: tuple[ChatMessage, ...] = (*_ASKED, User(content="Are you there?"))
USER_AFTER_TOOL: tuple[ChatMessage, ...] = (*TOOL_TURN, User(content="Are you there?"))


def render_body(
    config: Config, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], alternate: bool
) -> dict[str, Any]:
    """A body for `/apply-template` and the token counter, mended as a request would be."""
    mender = HistoryMender(alternate)
    return {
        "messages": [mended for message in messages for mended in mender.mend(message)],
        "tools": tool_objects(tools),
        "chat_template_kwargs": chat_template_kwargs(config),
    }


async def probe(client: Client, method: str, path: str, body: Any = None) -> Answer:
    """Ask the server something that it answers in no time.

    Raises:
        InferenceError: no answer within PROBE_S, or status 401: a key may be asked for some paths only.
    """
    answer = None
    with trio.move_on_after(PROBE_S):
        answer = await client.ask(method, path, body)
    if answer is None:
        raise InferenceError(kind="connect", message=f"no answer to {method} {path} within {PROBE_S:.0f} s")
    if answer.status == 401:
        raise answer.error()
    return answer


async def render(
    client: Client,
    config: Config,
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolSchema],
    alternate: bool = False,
) -> Answer:
    """Have the server render a conversation; raises as `probe`."""
    return await probe(client, "POST", "/apply-template", render_body(config, messages, tools, alternate))


def prompt_of(answer: Answer) -> str | None:
    """The rendered prompt, None when the answer has none."""
    if answer.status == 200 and isinstance(answer.value, dict) and isinstance(answer.value.get("prompt"), str):
        prompt: str = answer.value["prompt"]
        return prompt
    return None


async def find_alternate(client: Client, config: Config, tools: Sequence[ToolSchema]) -> bool:
    """Ask the template whether users must alternate; False where it cannot be asked.

    A refusal counts only when the same conversation with the note is accepted.

    Raises:
        InferenceError: the server could not be reached.
    """
    for messages in (USER_AFTER_USER, USER_AFTER_TOOL):
        plain = await render(client, config, messages, tools)
        if plain.status in (400, 500):
            noted = await render(client, config, messages, tools, alternate=True)
            if noted.status == 200:
                return True
    return False


def _log_limits(props: Answer, slot: int) -> None:
    """Tell the log what a server says of its limits; a slot that it does not have is said apart: it would wrap."""
    n_ctx, total = limits_of(props.value if props.status == 200 and isinstance(props.value, dict) else {})
    log_event("facts_refreshed", props=props.status, total_slots=total, n_ctx=n_ctx)
    if total is not None and slot >= total:
        log_event("slot_missing", slot=slot, total_slots=total)


def limits_of(props: dict[str, Any]) -> tuple[int | None, int | None]:
    """A slot's `n_ctx` in tokens and the number of slots, as `/props` has them; None for what it does not say."""
    settings = props.get("default_generation_settings")
    n_ctx = settings.get("n_ctx") if isinstance(settings, dict) else None
    return _limit(n_ctx), _limit(props.get("total_slots"))


def template_digest(props: Any) -> str | None:
    """The chat template of `/props`, as a digest to compare; None where it has none."""
    template = props.get("chat_template") if isinstance(props, dict) else None
    if not isinstance(template, str) or not template:
        return None
    return short_digest(template)


def short_digest(text: str) -> str:
    """A text, to compare and to show: the first digits of its SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _limit(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= MAX_TOKENS else None


class ServerFacts:
    """The facts in use, and whether they are still true."""

    def __init__(self, *, alternate: bool = False, model: str | None = None) -> None:
        self.alternate = alternate
        self.model = model
        self.template: str | None = None
        """The digest of its chat template, as `/props` was last seen to have it."""
        self.n_ctx: int | None = None
        """Tokens of a slot, the same way."""
        self._stale = False

    def saw_props(self, props: Any) -> None:
        """Note what `/props` says of template and limits."""
        self.template = template_digest(props)
        self.n_ctx = limits_of(props)[0] if isinstance(props, dict) else None

    def saw_model(self, model: str | None) -> None:
        """Note the `model` that a stream named; another than before makes the facts stale."""
        if model is None or model == self.model:
            return
        if self.model is not None:
            self._stale = True
            log_event("model_changed")
        self.model = model

    async def refresh(self, client: Client, config: Config, tools: Sequence[ToolSchema]) -> None:
        """Ask again if the facts are stale; keep them when the server does not answer.

        Cancellation: safe at any point; the facts stay stale.
        """
        if not self._stale:
            return
        try:
            props = await probe(client, "GET", "/props")
            alternate = await find_alternate(client, config, tools)
        except InferenceError as exc:
            log_event("facts_not_refreshed", reason=exc.kind)
            return
        self._stale = False
        client.look_again()
        if props.status == 200:
            self.saw_props(props.value)
        _log_limits(props, max(config.slots.listed))
        if alternate != self.alternate:
            log_event("alternate_changed", alternate=alternate)
            self.alternate = alternate
