"""Chunks of one stream to ChatEvents and one Completion; sans-IO.

Laws:
* The Completion holds what the server sent: strings joined, a field None when no string came for
  it. Only lone surrogates and NUL become U+FFFD.
* `finish_reason` is the end; after it only figures are read. `[DONE]` after a delta is an end too.
* Whatever a chunk holds, the outcome is events, an end, or an InferenceError.

Source: design.md section 7; `../shared/cases/03`, `06`, `09`, `19`, `27`, `38`.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
from typing import Any, Literal

from attrs import define, field, frozen

from boxmaker.errors import InferenceError
from boxmaker.inference.sse import SseEvent
from boxmaker.proto.chat import ChatEvent, Content, Progress, Reasoning, ThinkingCapped, ToolCall, ToolCallDelta

BUDGET_MESSAGE = "[The thinking budget is used up. I answer now.]"
"""Forced by the server at the end of reasoning when the cap fires; finding it is how we know."""
CAP_MARGIN_TOKENS = 256
"""How far over the cap a server that ignores the budget may go before we hang up."""
CALL_BYTES = 64
"""What a call costs of `reply_max_bytes` besides its text: a stream of empty calls must end too."""
MAX_TOKENS = 2**53 - 1
"""A figure over this is none: no server counts so many tokens, and sums of figures must stay writable."""

_LENGTH_REASONS = frozenset({"length", "max_tokens", "model_length"})
_CALL_REASONS = frozenset({"tool_calls", "function_call"})
_FAILED_REASONS = frozenset({"error", "abort", "aborted", "cancelled", "canceled"})
"""Words of other servers for "this reply is no whole one"."""

_OPENING = frozenset('{["')
_SIGN = re.compile(r'\\.|[\\"{}\[\]]', re.DOTALL)
_DEEPER = {"{": 1, "[": 1, "}": -1, "]": -1}
_LONGEST_WORD = 400
"""A number or word as arguments is not asked for any more when it is longer."""

_SAID_BESIDES = frozenset({"error", "usage", "timings", "prompt_progress"})
"""Keys of a chunk that say something besides its choices."""
_PROBE = "?"
_VAIN_ENVELOPES = 8
"""How many envelopes in a row may serve no second chunk before none is looked for any more."""

_UNCLEAN = re.compile("[\ud800-\udfff\x00]")
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
REPLACEMENT = "\ufffd"


def clean_text(text: str) -> str:
    """Replace NUL and lone surrogates with U+FFFD; halves that make a pair become their character."""
    if not _UNCLEAN.search(text):
        return text
    paired = _PAIR.sub(lambda m: m[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)
    return _UNCLEAN.sub(REPLACEMENT, paired)


@define
class _Text:
    """One field of the reply: the pieces, and a high surrogate that waits for its other half."""

    pieces: list[str] = field(factory=list)
    waiting: str = ""

    def add(self, text: str) -> str:
        if self.waiting or _UNCLEAN.search(text):
            text = self.waiting + text
            self.waiting = ""
            if text and "\ud800" <= text[-1] <= "\udbff":
                self.waiting, text = text[-1], text[:-1]
            text = clean_text(text)
        if text or not self.pieces:  # "" is kept once: it tells a string from none
            self.pieces.append(text)
        return text

    def end(self) -> str:
        """Wait no longer; give what stands for the half that waited, if any."""
        if not self.waiting:
            return ""
        self.waiting = ""
        self.pieces.append(REPLACEMENT)
        return REPLACEMENT

    def joined(self) -> str | None:
        self.end()
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else None


@define
class _Arguments(_Text):
    """The arguments of a call, and whether they make a JSON text by now.

    That is asked for every piece when a server repeats the name with each. So all pieces must not be read each time:
    they are followed, once each, to the sign that closes what the first one opened, and parsed only then.
    """

    _followed: int = 0
    _first: str = ""
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False
    _closed: bool = False
    _never: bool = False

    def is_whole(self) -> bool:
        """Do the pieces make a JSON text?"""
        for piece in self.pieces[self._followed :]:
            self._follow(piece)
        self._followed = len(self.pieces)
        if self._never or not self._closed or self.waiting:
            return False
        try:
            json.loads("".join(self.pieces))
        except (ValueError, RecursionError):
            self._never = self._first in _OPENING  # nothing that follows the last sign makes it JSON
            return False
        return True

    def _follow(self, text: str) -> None:
        if not self._first:
            text = text.lstrip()
            self._first = text[:1]
            if not text:
                return
        if self._first not in _OPENING:
            self._closed = True  # a number or a word may be whole at any time, but not when it is long
            self._never = sum(map(len, self.pieces)) > _LONGEST_WORD
            return
        escaped, self._escaped = self._escaped, False
        for sign in _SIGN.findall(text, 1 if escaped else 0):
            self._never = self._never or self._closed
            if sign == '"':
                self._in_string = not self._in_string
            elif sign == "\\":
                self._escaped = True  # the last sign of the piece: what it escapes has not come yet
            elif not self._in_string:
                self._depth += _DEEPER.get(sign, 0)
            self._closed = self._depth == 0 and not self._in_string


@define
class _Call:
    """One call in the making."""

    id: str = ""
    name: _Text = field(factory=_Text)
    arguments: _Arguments = field(factory=_Arguments)


@frozen(kw_only=True)
class _Envelope:
    """What stands around the text of a chunk that says nothing but a text.

    A server writes the same around each token, for a second at a time, so it need not be read each time: whatever JSON
    string stands between, the chunk says that text under `key`, and nothing else.
    """

    key: str
    before: str
    after: str

    def text(self, data: str) -> str:
        """The text of a chunk in this envelope; `""` for any other chunk."""
        if not data.startswith(self.before):
            return ""
        try:
            text, end = scanstring(data, len(self.before))
        except ValueError:
            return ""
        return text if data[end:] == self.after else ""


def _envelope(data: str, chunk: dict[str, Any]) -> _Envelope | None:
    """Find the envelope of a chunk, when a text is all that it says."""
    if not _SAID_BESIDES.isdisjoint(chunk):
        return None
    choice = chunk["choices"][0]
    delta = choice.get("delta") or {}
    said = [key for key, value in delta.items() if value is not None]
    if len(chunk["choices"]) > 1 or said not in (["content"], ["reasoning_content"]):
        return None
    key = said[0]
    before, name, rest = data.partition(f'"{key}":"')
    if not name:
        return None
    _, end = scanstring(rest, 0)
    envelope = _Envelope(key=key, before=before + name, after=rest[end:])
    # proved, not believed: another text in its place makes the same chunk with that text (a key may come twice)
    probe = json.loads(f'{envelope.before}{_PROBE}"{envelope.after}')
    delta[key] = _PROBE
    return envelope if probe == chunk else None


@frozen(kw_only=True)
class Completion:
    """One whole reply.

    `cut` is `length` when the server stopped at a limit, `thinking_cap` when we closed the stream.
    Figures are tokens, None when the server sent none. `model` is the stream's own word.
    """

    content: str | None
    reasoning_content: str | None
    tool_calls: tuple[ToolCall, ...]
    cut: Literal["length", "thinking_cap"] | None
    cache_n: int | None
    prompt_n: int | None
    predicted_n: int | None
    reasoning_tokens: int
    thinking_capped: bool
    model: str | None
    prefill_ms: int | None = None
    """How long the server read the prompt, in whole milliseconds."""


class CompletionAssembler:
    """Assemble one completion from the events of its stream.

    `thinking_cap` is in tokens, `reply_max_bytes` counts the UTF-8 of all fields together, and
    CALL_BYTES for each call.
    """

    def __init__(self, *, thinking_cap: int, reply_max_bytes: int) -> None:
        self._hang_up_at = thinking_cap + CAP_MARGIN_TOKENS
        self._room_bytes = reply_max_bytes
        self._reply_max_bytes = reply_max_bytes
        self._content = _Text()
        self._reasoning = _Text()
        self._calls: list[_Call] = []
        self._by_index: dict[int, int] = {}
        self._reasoning_tokens = 0
        self._capped = False
        self._told_capped = False
        self._cap_window = ""
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}
        self._model: str | None = None
        self._envelope: _Envelope | None = None
        self._vain_envelopes = 0
        self.begun = False
        """A delta has come: the wait is for the next one (stall), no longer for the first (prefill)."""
        self.processed = -1
        """Prompt tokens read so far by the last progress report, at most the total of the first; -1 before it."""
        self._prompt_tokens: int | None = None
        self.finished = False
        """The reply is whole; only figures may still come."""
        self.done = False
        """Nothing more is wanted of the stream."""
        self.over_cap = False
        """The server ignores the thinking budget: the caller must close the connection now."""

    def feed(self, event: SseEvent) -> list[ChatEvent]:
        """Take one event, give what it says.

        Raises:
            InferenceError: an error in whatever form, a chunk that is no JSON object, or a reply
                over `reply_max_bytes`. What was given before is void.
        """
        if self.done or self.over_cap:
            return []
        data = event.data
        envelope = self._envelope
        if envelope is not None and not self.finished and event.name == "message" and (text := envelope.text(data)):
            self._vain_envelopes = 0
            events: list[ChatEvent] = []
            if envelope.key == "content":
                self._add_content(text, events)
            else:
                self._add_reasoning(text, events)
            return events
        if event.name == "error":
            if self.finished:
                return []
            raise error_of(200, _parsed(data))
        if data.strip() == "[DONE]":
            self.done = True
            return self._end() if self.begun and not self.finished else []
        if not data.strip():
            return []
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError) as exc:
            if self.finished or event.name != "message":
                return []  # the reply is whole, only figures are lost; or `event: ping` with a word as data
            raise InferenceError(kind="broken", message=f"the server sent a chunk that is not JSON: {exc}") from exc
        if isinstance(chunk, dict):
            events = self._chunk(chunk)
            if (
                self._vain_envelopes < _VAIN_ENVELOPES
                and len(events) == 1
                and isinstance(events[0], Content | Reasoning)
            ):
                self._vain_envelopes += 1
                self._envelope = _envelope(data, chunk)
            return events
        if self.finished:
            return []
        raise InferenceError(kind="broken", message="the server sent a chunk that is no JSON object")

    def _chunk(self, chunk: dict[str, Any]) -> list[ChatEvent]:
        if not self.finished:
            if chunk.get("error") not in (None, False):
                raise error_of(200, chunk["error"])
            if chunk.get("object") == "error":
                raise error_of(200, chunk)
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        if isinstance(chunk.get("timings"), dict):
            self._timings = chunk["timings"]
        if self._model is None and isinstance(chunk.get("model"), str):
            self._model = clean_text(chunk["model"])
        if self.finished:
            return []
        events: list[ChatEvent] = []
        if "prompt_progress" in chunk:
            self._progress(chunk["prompt_progress"], events)
        for choice in _array(chunk, "choices"):
            if not isinstance(choice, dict):
                raise _odd("choices")
            index = _index(choice.get("index"))
            if index is None or index == 0:  # we ask for one reply: another one's text is not ours
                self._choice(choice, events)
                break
        return events

    def _choice(self, choice: dict[str, Any], events: list[ChatEvent]) -> None:
        """Take our choice of one chunk: a delta, a message as a whole, or a bare text."""
        delta = choice.get("delta")
        if delta is None:
            delta = choice.get("message")
        if delta is None:
            delta = {"content": choice.get("text")}
        if not isinstance(delta, dict):
            raise _odd("delta")
        self._delta(delta, events)
        reason = choice.get("finish_reason")
        if not isinstance(reason, str) or not reason or self.over_cap:
            return
        if reason.lower() in _FAILED_REASONS:
            if choice.get("error"):
                raise error_of(200, choice["error"])
            raise InferenceError(kind="broken", message=f"the server gave up the reply: finish_reason {reason.lower()}")
        if reason.lower() in _CALL_REASONS and not self._calls and not "".join(self._content.pieces).strip():
            raise InferenceError(kind="broken", message="the reply ended with calls, and none had come")
        self._finish_reason = reason.lower()
        events += self._end()

    def _end(self) -> list[ChatEvent]:
        """Take the reply as whole; give what was still held back of it."""
        self.finished = not self.over_cap
        events: list[ChatEvent] = []
        if reasoning := self._reasoning.end():
            events.append(Reasoning(text=reasoning))
        if content := self._content.end():
            events.append(Content(text=content))
        return events + self._end_of_reasoning()

    def _progress(self, value: Any, events: list[ChatEvent]) -> None:
        if isinstance(value, dict):
            total, cache, processed = (_count(value.get(key)) for key in ("total", "cache", "processed"))
            if total is not None and cache is not None and processed is not None:
                if self._prompt_tokens is None:
                    self._prompt_tokens = total  # of this prompt: one that grows must not buy time for ever
                self.processed = min(processed, self._prompt_tokens)
                events.append(Progress(total=total, cache=cache, processed=processed))

    def _delta(self, delta: dict[str, Any], events: list[ChatEvent]) -> None:
        reasoning = _words(delta, "reasoning_content")
        if reasoning is None:
            reasoning = _words(delta, "reasoning")
        if reasoning is not None:
            self._add_reasoning(reasoning, events)
            if self.over_cap:
                return
        content = _words(delta, "content")
        if content is not None:
            self._add_content(content, events)
        calls = _array(delta, "tool_calls")
        if delta.get("function_call") is not None:  # the older form: one call, without an id
            calls = [*calls, {"function": delta["function_call"]}]
        for piece in calls:
            if not isinstance(piece, dict):
                raise _odd("tool_calls")
            self.begun = True
            events += self._end_of_reasoning()
            events.append(self._call_piece(piece))

    def _add_reasoning(self, reasoning: str, events: list[ChatEvent]) -> None:
        self._spend(reasoning)
        if reasoning:
            self.begun = True
            self._reasoning_tokens += 1
        text = self._reasoning.add(reasoning)
        if text:
            events.append(Reasoning(text=text))
            self._look_for_cap(text)
        if self._reasoning_tokens >= self._hang_up_at:
            self.over_cap = True
            self._capped = True
            events += self._end()

    def _add_content(self, content: str, events: list[ChatEvent]) -> None:
        self._spend(content)
        if content:
            self.begun = True
            if self._capped:
                events += self._end_of_reasoning()
        text = self._content.add(content)
        if text:
            events.append(Content(text=text))

    def _look_for_cap(self, text: str) -> None:
        window = self._cap_window + text
        if BUDGET_MESSAGE in window:
            self._capped = True
        self._cap_window = window[-len(BUDGET_MESSAGE) :]

    def _end_of_reasoning(self) -> list[ChatEvent]:
        """Say that the cap fired, once, after the last reasoning delta."""
        if not self._capped or self._told_capped:
            return []
        self._told_capped = True
        return [ThinkingCapped(tokens=self._reasoning_tokens)]

    def _call_piece(self, piece: dict[str, Any]) -> ToolCallDelta:
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}  # a call without a name is answered as such
        call_id, name, arguments = _as_text(piece.get("id")), _as_text(function.get("name")), function.get("arguments")
        arguments = _as_text(arguments)
        self._spend(call_id + name + arguments)
        index = _index(piece.get("index")) or 0
        at = self._by_index.get(index)
        if at is None or self._is_another(self._calls[at], call_id, name):
            self._spend_bytes(CALL_BYTES)
            at = self._by_index[index] = len(self._calls)
            self._calls.append(_Call())
        call = self._calls[at]
        if call_id and not call.id:
            call.id = clean_text(call_id)
        name = call.name.add(name) if name and not call.arguments.pieces else ""
        arguments = call.arguments.add(arguments) if arguments else ""
        return ToolCallDelta(index=at, id=clean_text(call_id), name=name, arguments=arguments)

    @staticmethod
    def _is_another(call: _Call, call_id: str, name: str) -> bool:
        """Does a piece with a known index begin another call? Some servers put all calls on index 0.

        Another id says so. Without ids, a name does when arguments have come since the last name:
        unless it is the same name again in the middle of the arguments, which some servers repeat.
        """
        if call_id and call.id:
            return clean_text(call_id) != call.id
        if not name or not call.arguments.pieces:
            return False
        return clean_text(name) != call.name.joined() or call.arguments.is_whole()

    def _spend(self, text: str) -> None:
        self._spend_bytes(len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")))

    def _spend_bytes(self, count: int) -> None:
        self._room_bytes -= count
        if self._room_bytes < 0:
            raise InferenceError(
                kind="limit",
                limit="reply_max_bytes",
                message=f"the reply is over {self._reply_max_bytes} bytes ([inference] reply_max_bytes)",
            )

    def eof(self) -> None:
        """Say that the stream ended.

        Raises:
            InferenceError: kind `broken`, when the reply is not whole.
        """
        if not self.finished and not self.over_cap:
            raise InferenceError(kind="broken", message="the stream ended before the reply was complete")

    def completion(self) -> Completion:
        """Give the reply; only when `finished` or `over_cap`."""
        calls = tuple(
            ToolCall(id=call.id, name=call.name.joined() or "", arguments=call.arguments.joined() or "")
            for call in self._calls
        )
        cut: Literal["length", "thinking_cap"] | None = None
        if self.over_cap:
            cut, calls = "thinking_cap", ()
        elif self._finish_reason in _LENGTH_REASONS:
            cut = "length"
        cache_n, prompt_n, predicted_n = (None, None, None) if self.over_cap else self._figures()
        return Completion(
            content=self._content.joined(),
            reasoning_content=self._reasoning.joined(),
            tool_calls=calls,
            cut=cut,
            cache_n=cache_n,
            prompt_n=prompt_n,
            predicted_n=predicted_n,
            reasoning_tokens=self._reasoning_tokens,
            thinking_capped=self._capped,
            model=self._model,
            prefill_ms=None if self.over_cap else _milliseconds(self._timings.get("prompt_ms")),
        )

    def _figures(self) -> tuple[int | None, int | None, int | None]:
        """Prefer `timings`; a figure that is missing there comes from `usage`."""
        timings, usage = self._timings, self._usage
        details = usage.get("prompt_tokens_details")
        cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
        prompt = _count(usage.get("prompt_tokens"))
        read = prompt - cached if prompt is not None and cached is not None and prompt >= cached else None

        def first(key: str, other: int | None) -> int | None:
            value = _count(timings.get(key))
            return other if value is None else value

        return (
            first("cache_n", cached),
            first("prompt_n", read),
            first("predicted_n", _count(usage.get("completion_tokens"))),
        )


def error_of(status: int, error: Any, retry_after: str | None = None) -> InferenceError:
    """Make an error of a server's error object or text, with the HTTP status it came with.

    Inside a 200 the object's own `code` is the status, or 500 when it has none.
    """
    message, kind, code = "", None, None
    if isinstance(error, dict) and isinstance(error.get("error"), dict | str):
        error = error["error"]
    if isinstance(error, dict):
        message = _as_text(error.get("message")) or _as_text(error.get("detail"))
        kind = error["type"] if isinstance(error.get("type"), str) else None
        code = error.get("code")
    elif isinstance(error, str):
        message = error
    if status == 200:
        status = code if type(code) is int and 400 <= code <= 599 else 500
    return InferenceError(
        kind="http",
        status=status,
        error_type=kind,
        error_code=code if isinstance(code, str) else None,
        message=f"the server answered {status}: {one_line(message) or 'without a message'}",
        server_message=clean_text(message),
        retry_after=retry_after,
    )


def one_line(text: str, limit: int = 300) -> str:
    """The first line of a foreign text, cleaned and cut to `limit` characters."""
    lines = clean_text(text).strip().splitlines()
    first = lines[0].strip() if lines else ""
    return first if len(first) <= limit else first[: limit - 1] + "…"


def _parsed(data: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def _milliseconds(value: Any) -> int | None:
    """A time as the server measured it, rounded; what is no time is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TOKENS:
        return None
    return round(value)


def _index(value: Any) -> int | None:
    """Which choice or call is meant; some servers send the number as text or with a fraction of 0."""
    if type(value) is str and re.fullmatch("[0-9]{1,9}", value):
        return int(value)
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def _odd(key: str) -> InferenceError:
    """What cannot be read may be the answer: left out, it would make an empty or a false one."""
    return InferenceError(kind="broken", message=f"the server sent {key} of a kind that cannot be read")


def _array(holder: dict[str, Any], key: str) -> list[Any]:
    value = holder.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _odd(key)
    return value


def _words(delta: dict[str, Any], key: str) -> str | None:
    """A text, or the texts of a list of parts; None when there is none."""
    value = delta.get(key)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _odd(key)
    texts: list[str] = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise _odd(key)
        texts.append(text)
    return "".join(texts)


def _as_text(value: Any) -> str:
    """Text as it is, nothing for null, another JSON value as its compact text."""
    if type(value) is str:
        return value
    try:
        return "" if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:  # what could just be read may be too deep to write: the stack is another
        return "(nested too deep)"
