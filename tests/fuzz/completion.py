"""The completion assembler against its rules written a second time, and what is made of a reply afterwards.

An input is the body of a stream. Its events come from the second decoder of `tests/fuzz/sse.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from attrs import define, field
from hypothesis import strategies as st

from boxmaker.errors import InferenceError
from boxmaker.inference.completion import CALL_BYTES, Completion
from boxmaker.inference.request import RequestEncoder
from boxmaker.inference.sse import SseEvent
from boxmaker.proto import records
from boxmaker.proto.channel import TurnDone, wire_error
from boxmaker.proto.chat import (
    Assistant,
    ChatEvent,
    ChatMessage,
    Content,
    Figures,
    Progress,
    Reasoning,
    System,
    ThinkingCapped,
    Tool,
    ToolCallDelta,
    User,
)
from boxmaker.proto.frames import decode_answer, encode_answer
from boxmaker.proto.time import Timestamp
from tests.fuzz.sse import with_extensions
from tests.fuzz.target import JSON_TOKENS, MAX_INPUT_BYTES, UNSURE_DEPTH, Target, assert_sayable, deepest
from tests.inference.recordings import STREAMS, Outcome, assemble, load
from tests.naive import naive_messages
from tests.strict import problems

BUDGET = "[The thinking budget is used up. I answer now.]"
MARGIN = 256
LENGTH = ("length", "max_tokens", "model_length")
LIMITS = ((4096, 1_000_000), (5 - MARGIN, 150))
"""Cap on thinking and bytes of a reply; the second cap is none that can be configured: five pieces are over it."""
NOW = Timestamp("2026-11-30T14:15:30.123Z")


# -- the rules, independently ------------------------------------------------------------------------


class Ended(Exception):
    """The reply ends with an error of this kind, status and server's text."""


@define
class Call:
    """A call in the making."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    """Both as they came: cleaned when they are whole."""


@define
class Reply:
    """What the chunks so far have said; texts as they came, None for no string."""

    hang_up_at: int
    room: int
    content: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(factory=list)
    by_index: dict[int, Call] = field(factory=dict)
    tokens: int = 0
    begun: bool = False
    finish: str | None = None
    finished: bool = False
    over_cap: bool = False
    usage: dict[str, Any] = field(factory=dict)
    timings: dict[str, Any] = field(factory=dict)
    model: str | None = None

    def spend(self, *texts: str) -> None:
        self.room -= sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if self.room < 0:
            raise Ended("limit", None, "")


def clean(text: str) -> str:
    """Lone surrogates and NUL become U+FFFD; a high one before a low one is their character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", "\ufffd")


def as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read(events: Sequence[SseEvent], cap: int, room: int) -> tuple[Reply, Ended | None]:
    """The reply that events stand for, or as much of it as came before the error."""
    reply = Reply(hang_up_at=cap + MARGIN, room=room)
    try:
        for event in events:
            if event.data.strip() == "[DONE]" and event.name != "error":
                reply.finished = reply.finished or reply.begun
                break
            take(reply, event)
            if reply.over_cap:
                break
        if not (reply.finished or reply.over_cap):
            raise Ended("broken", None, "")
    except Ended as ended:
        return reply, ended
    return reply, None


def take(reply: Reply, event: SseEvent) -> None:
    try:
        chunk = json.loads(event.data)
    except (ValueError, RecursionError):
        chunk = event.data
        if event.name != "error" and (not event.data.strip() or reply.finished or event.name != "message"):
            return
    if event.name == "error":
        if not reply.finished:
            raise failure(chunk)
    elif not isinstance(chunk, dict):
        if not reply.finished:
            raise Ended("broken", None, "")
    else:
        take_chunk(reply, chunk)


def failure(error: Any) -> Ended:
    if isinstance(error, dict) and isinstance(error.get("error"), dict | str):
        error = error["error"]
    code, message = None, error if isinstance(error, str) else ""
    if isinstance(error, dict):
        code = error.get("code")
        message = as_text(error.get("message")) or as_text(error.get("detail"))
    return Ended("http", code if type(code) is int and code in range(400, 600) else 500, clean(message))


def odd() -> Ended:
    """What cannot be read may be the answer."""
    return Ended("broken", None, "")


def take_chunk(reply: Reply, chunk: dict[str, Any]) -> None:
    error = chunk.get("error")
    if not reply.finished:
        if not (error is None or (isinstance(error, bool | int | float) and error == 0)):
            raise failure(error)
        if chunk.get("object") == "error":
            raise failure(chunk)
    for key in ("usage", "timings"):
        if isinstance(chunk.get(key), dict):
            setattr(reply, key, chunk[key])
    if reply.model is None and isinstance(chunk.get("model"), str):
        reply.model = chunk["model"]
    if reply.finished:
        return
    for choice in array(chunk.get("choices")):
        if not isinstance(choice, dict):
            raise odd()
        if (which(choice.get("index")) or 0) == 0:
            take_choice(reply, choice)
            return


def array(value: Any) -> list[Any]:
    if not isinstance(value, list | None):
        raise odd()
    return value or []


def which(value: Any) -> int | None:
    """A number of a choice or call, also as text or as a float without a fraction."""
    if isinstance(value, str) and 1 <= len(value) <= 9 and all(char in "0123456789" for char in value):
        return int(value)
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def take_choice(reply: Reply, choice: dict[str, Any]) -> None:
    given = [choice[key] for key in ("delta", "message") if choice.get(key) is not None]
    delta = given[0] if given else {"content": choice.get("text")}
    if not isinstance(delta, dict):
        raise odd()
    take_delta(reply, delta)
    reason = choice.get("finish_reason")
    if not isinstance(reason, str) or not reason or reply.over_cap:
        return
    reason = reason.lower()
    if reason in ("error", "abort", "aborted", "cancelled", "canceled"):
        raise failure(choice["error"]) if choice.get("error") else odd()
    said = re.sub("[\ud800-\udbff]$", "", reply.content or "")  # half a character is no answer
    if reason in ("tool_calls", "function_call") and not reply.calls and not said.strip():
        raise odd()
    reply.finish = reason
    reply.finished = True


def words(value: Any) -> str | None:
    """A text, or a list of texts and of objects with a text."""
    if isinstance(value, str | None):
        return value
    parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in array(value)]
    if any(not isinstance(part, str) for part in parts):
        raise odd()
    return "".join(parts)


def take_delta(reply: Reply, delta: dict[str, Any]) -> None:
    thought = words(delta.get("reasoning_content"))
    if thought is None:
        thought = words(delta.get("reasoning"))
    if thought is not None:
        reply.spend(thought)
        reply.reasoning = (reply.reasoning or "") + thought
        if thought:
            reply.tokens += 1
            reply.begun = True
        if reply.tokens >= reply.hang_up_at:
            reply.over_cap = True
            return
    content = words(delta.get("content"))
    if content is not None:
        reply.spend(content)
        reply.content = (reply.content or "") + content
        reply.begun = reply.begun or content != ""
    pieces = array(delta.get("tool_calls"))
    if delta.get("function_call") is not None:
        pieces = [*pieces, {"function": delta["function_call"]}]
    for piece in pieces:
        if not isinstance(piece, dict):
            raise odd()
        reply.begun = True
        take_piece(reply, piece)


def take_piece(reply: Reply, piece: dict[str, Any]) -> None:
    function = piece["function"] if isinstance(piece.get("function"), dict) else {}
    call_id, name = as_text(piece.get("id")), as_text(function.get("name"))
    arguments = as_text(function.get("arguments"))
    reply.spend(call_id, name, arguments)
    index = which(piece.get("index")) or 0
    call = reply.by_index.get(index)
    if call is None or begins_another(call, call_id, name):
        reply.spend("x" * CALL_BYTES)
        call = reply.by_index[index] = Call()
        reply.calls.append(call)
    call.id = call.id or clean(call_id)
    if not call.arguments:
        call.name += name
    call.arguments += arguments


def begins_another(call: Call, call_id: str, name: str) -> bool:
    """By its id; without ids, by a name after arguments that is another, or that comes when these are whole."""
    if call_id and call.id:
        return clean(call_id) != call.id
    if not name or not call.arguments:
        return False
    if clean(name) != clean(call.name):
        return True
    try:
        json.loads(clean(call.arguments))
    except (ValueError, RecursionError):
        return False
    return True


def count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def figures(reply: Reply) -> tuple[int | None, int | None, int | None]:
    """`timings` first; `usage` knows the prompt as a whole, and what of it was cached."""
    if reply.over_cap:
        return None, None, None
    details = reply.usage.get("prompt_tokens_details")
    cached = count(details.get("cached_tokens")) if isinstance(details, dict) else None
    prompt = count(reply.usage.get("prompt_tokens"))
    read_anew = None if prompt is None or cached is None or prompt < cached else prompt - cached
    others = (cached, read_anew, count(reply.usage.get("completion_tokens")))
    own = [count(reply.timings.get(key)) for key in ("cache_n", "prompt_n", "predicted_n")]
    cache_n, prompt_n, predicted_n = (o if o is not None else x for o, x in zip(own, others, strict=True))
    return cache_n, prompt_n, predicted_n


# -- the check ---------------------------------------------------------------------------------------


def check(raw: bytes) -> str:
    body = with_extensions(raw, MAX_INPUT_BYTES * 2)
    events = [SseEvent(name, data) for name, data in body.events]
    unsure = any(deepest(event.data) > UNSURE_DEPTH for event in events)
    kind = ""
    for cap, room in LIMITS:
        outcome = assemble(events, thinking_cap=cap, reply_max_bytes=room)
        for event in outcome.events:
            check_event(event)
        if not unsure:
            reply, ended = read(events, cap, room)
            if ended is None:
                check_reply(outcome, reply)
                check_size(outcome.reply(), room)
            else:
                check_failure(outcome, reply, ended)
        if outcome.completion is not None:
            check_use(outcome.completion)
        kind = kind or kind_of(outcome)
    return ("foreign-" if body.foreign is not None else "") + kind


def kind_of(outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"{outcome.error.kind}{'-after-text' if outcome.events else ''}"
    reply = outcome.reply()
    words = ["thinking"] if reply.reasoning_content else []
    words += ["text"] if reply.content else []
    words += ["call"] if len(reply.tool_calls) == 1 else ["calls"] if reply.tool_calls else []
    words += [reply.cut] if reply.cut else []
    words += ["capped"] if reply.thinking_capped else []
    words += ["figures"] if reply.prompt_n is not None else []
    words += ["replaced"] if "\ufffd" in str(reply) else []
    return "-".join(words) or "empty"


def check_event(event: ChatEvent) -> None:
    """It can be sent to a channel (pieces of calls are not), and says something."""
    if isinstance(event, ToolCallDelta):
        (event.id + event.name + event.arguments).encode("utf-8")
        return
    assert isinstance(event, Content | Reasoning | Progress | ThinkingCapped)
    assert not isinstance(event, Content | Reasoning) or event.text
    assert decode_answer(encode_answer(event)[4:]) == event


def joined(events: Sequence[ChatEvent], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def check_failure(outcome: Outcome, reply: Reply, ended: Ended) -> None:
    error = outcome.error
    assert error is not None, "an error was due"
    assert (error.kind, error.status, error.server_message) == ended.args
    assert (error.limit == "reply_max_bytes") is (error.kind == "limit")
    assert_sayable_error(error)
    assert clean(reply.content or "").startswith(joined(outcome.events, Content))
    assert clean(reply.reasoning or "").startswith(joined(outcome.events, Reasoning))


def assert_sayable_error(error: InferenceError) -> None:
    assert decode_answer(encode_answer(wire_error(error))[4:]) == wire_error(error)
    error.server_message.encode("utf-8")
    assert_sayable("".join(char if char.isprintable() else "?" for char in str(error)))  # it quotes the server
    assert len(str(error).splitlines()) == 1


def check_reply(outcome: Outcome, reply: Reply) -> None:
    made = outcome.reply()
    assert made.content == (None if reply.content is None else clean(reply.content))
    assert made.reasoning_content == (None if reply.reasoning is None else clean(reply.reasoning))
    assert made.cut == ("thinking_cap" if reply.over_cap else "length" if reply.finish in LENGTH else None)
    expected = [(c.id, clean(c.name), clean(c.arguments)) for c in reply.calls]
    assert [(c.id, c.name, c.arguments) for c in made.tool_calls] == ([] if reply.over_cap else expected)
    assert (made.cache_n, made.prompt_n, made.predicted_n) == figures(reply)
    assert made.reasoning_tokens == reply.tokens
    assert made.thinking_capped == (reply.over_cap or BUDGET in (reply.reasoning or ""))
    assert made.model == (None if reply.model is None else clean(reply.model))
    assert joined(outcome.events, Content) == (made.content or "")
    assert joined(outcome.events, Reasoning) == (made.reasoning_content or "")
    told = [event.tokens for event in outcome.events if isinstance(event, ThinkingCapped)]
    assert len(told) == made.thinking_capped
    texts: dict[int, str] = {}
    for event in outcome.events:
        if isinstance(event, ToolCallDelta):
            texts[event.index] = texts.get(event.index, "") + event.arguments
    for at, (_, _, arguments) in enumerate(expected):
        assert arguments in (texts[at], texts[at] + "\ufffd")  # half a character that waited to the end


def check_size(made: Completion, room: int) -> None:
    texts = [made.content or "", made.reasoning_content or ""]
    texts += [text for call in made.tool_calls for text in (call.id, call.name, call.arguments)]
    assert sum(len(text.replace("\ufffd", "?").encode()) for text in texts) <= room  # NUL was counted as one byte


def check_use(made: Completion) -> None:
    """The reply goes into the log and the final frame, and a strict server takes it back."""
    usage = Figures(
        cache_n=made.cache_n,
        prompt_n=made.prompt_n,
        predicted_n=made.predicted_n,
        reasoning_tokens=made.reasoning_tokens,
        thinking_capped=made.thinking_capped,
    )
    done = TurnDone(content=made.content or "", usage=usage)
    assert decode_answer(encode_answer(done)[4:]) == done
    said = Assistant(content=made.content, reasoning_content=made.reasoning_content, tool_calls=made.tool_calls)
    for record in (
        records.Assistant(
            time=NOW, content=said.content, reasoning_content=said.reasoning_content, tool_calls=said.tool_calls
        ),
        records.Usage(
            time=NOW,
            cache_n=made.cache_n,
            prompt_n=made.prompt_n,
            predicted_n=made.predicted_n,
            reasoning_tokens=made.reasoning_tokens,
            thinking_capped=made.thinking_capped,
        ),
    ):
        assert records.decode_line(records.encode_line(record)) == record
    results = [Tool(tool_call_id=call.id, content="ok") for call in made.tool_calls]
    turn: list[ChatMessage] = [User(content="hi"), said, *results]
    history: list[ChatMessage] = [System(content="s"), *turn, *turn, User(content="bye")]
    for alternate in (False, True):
        encoder = RequestEncoder(tools=(), fixed={"stream": True}, alternate=alternate)
        for message in history:
            encoder.add(message)
        sent = encoder.body()
        assert problems(json.loads(sent)["messages"], alternate) == []
        assert sent == b'{"messages":[' + naive_messages(history, alternate) + b'],"tools":[],"stream":true}'


# -- inputs ------------------------------------------------------------------------------------------


def seeds() -> list[bytes]:
    """The bodies of all recorded and reported replies."""
    return [body for name in STREAMS if len(body := load(name).body) <= MAX_INPUT_BYTES]


KEYS = (
    "choices", "delta", "content", "reasoning_content", "reasoning", "tool_calls", "index", "id", "function", "name",
    "arguments", "finish_reason", "usage", "timings", "model", "error", "code", "message", "type", "prompt_progress",
    "total", "cache", "processed",
    "detail", "object", "message", "text", "function_call", "cache_n", "prompt_n", "predicted_n",
    "prompt_tokens", "completion_tokens",
    "prompt_tokens_details", "cached_tokens",
)  # fmt: skip
TOKENS = (
    *JSON_TOKENS,
    *(f'"{key}":'.encode() for key in KEYS),
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', b"400",
    b'data: {"choices":[{"delta":{"reasoning_content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n', b"data: [DONE]\n\n", b"data: ", b"\n\n", b"\n",
    b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"a","arguments":"{"}}]}}]}\n\n',
    b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"}"}}]}}]}\n\n', b'"stop"', b'"length"',
    b"error: no\n", b"event: error\n", b"event: ping\n", b'"\\ud83d"', b'"\\ude42"', b'"a\\u0000"', b'"{\\"a\\":1}"',
    b'"{"', b'"}"', b'" {"', b'"null"', BUDGET.encode(), b'{"code":503,"message":"m"}', b"[DONE]",
    b'"error"', b'"tool_calls"', b'"MAX_TOKENS"',
    b'[{"type":"text","text":"a"}]', b"9" * 320,
)  # fmt: skip

odd_text = st.lists(
    st.sampled_from(
        ["a", "\x00", "\ud83d", "\ude42", "é", "🙂", "\n", " ", '"', "{", "}", "\u2028", "\\", "1", BUDGET]
    ),
    max_size=4,
).map("".join)
odd_value: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-2, 600) | st.floats() | odd_text | st.just([]) | st.just({})
)
counts = st.integers(-1, 9) | st.sampled_from([2**63, 10**30, 2**1024, 10**400]) | odd_value


def some(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


finishes = (
    st.sampled_from([None, "", "stop", "STOP", "length", "max_tokens", "tool_calls", "error", "Abort"]) | odd_value
)
piece = some(
    index=st.integers(0, 2) | odd_value,
    id=st.sampled_from(["", "a", "b"]) | odd_value,
    function=some(name=st.sampled_from(["", "f", "g", " f\n", "f\0"]) | odd_value, arguments=odd_text | odd_value)
    | odd_value,
)
delta = st.one_of(
    st.fixed_dictionaries({"content": odd_text}),
    st.fixed_dictionaries({"reasoning_content": odd_text}),
    st.fixed_dictionaries({"tool_calls": st.lists(piece, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"function_call": some(name=odd_text, arguments=odd_text)}),
    st.fixed_dictionaries({"content": st.lists(some(text=odd_text) | odd_text, max_size=2)}),
    some(
        content=odd_text | odd_value,
        reasoning_content=odd_text | odd_value,
        reasoning=odd_text,
        tool_calls=odd_value | st.just([5]),
    ),
)
choice = st.fixed_dictionaries({"delta": delta}, optional={"finish_reason": finishes, "index": st.just(0) | odd_value})
chunk = st.one_of(
    choice.map(lambda one: {"choices": [one]}),
    choice.map(lambda one: {"choices": [one]}),
    some(
        choices=odd_value | st.lists(odd_value, max_size=2),
        usage=some(prompt_tokens=counts, completion_tokens=counts, prompt_tokens_details=some(cached_tokens=counts)),
        timings=some(cache_n=counts, prompt_n=counts, predicted_n=counts) | odd_value,
        prompt_progress=some(total=counts, cache=counts, processed=counts) | odd_value,
        model=odd_value,
    ),
)
noise = st.one_of(
    odd_value.map(lambda value: {"error": value}),
    some(message=odd_value, code=counts, type=odd_value).map(lambda value: {"error": value}),
    odd_value,
)
fragment = st.sampled_from(
    [" ", "{", "}", '{"a":', '"', "\\", "[", "]", "{}", "1", "null", "x", "\n", ":", '"}"', "\ud83d"]
)
same_name = st.lists(fragment, min_size=2, max_size=8).map(
    lambda texts: [
        {"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": text}}]}}]} for text in texts
    ]
)
"""A server that sends the name with every piece, and no ids."""
END = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


TARGET = Target(
    name="completion",
    suffix=".sse",
    check=check,
    seeds=seeds,
    tokens=TOKENS,
    grammar=st.builds(
        lambda chunks, odd_ones, ends: b"".join([*map(event, chunks), *map(event, odd_ones), *ends]),
        st.lists(chunk, max_size=8) | same_name,
        st.lists(noise, max_size=1) | st.just([]),
        st.lists(
            st.sampled_from([END, END, END.replace(b"stop", b"length"), b"data: [DONE]\n\n", b"error: e\n"])
            | chunk.map(event),
            max_size=3,
        ),
    ),
)
