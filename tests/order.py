"""What the server says in a turn, and a model of what the channel is told then.

The model is written from docs/protocol.md and docs/design.md and shares no code with `turn` and `inference`. It
does not see where bytes are cut, nor how a stream is written: that is `Wire` and `Reading`, which it never reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from attrs import define, field, frozen

from boxmaker.proto.tools import Denied, Failed, PendingApproval, Result
from boxmaker.testing.port import Response

Json: TypeAlias = dict[str, Any]

CONFIG = """
[loop]
tool_iterations = 3
tool_result_cap = 300
[thinking]
cap = 2
[retry]
attempts = 3
[inference]
reply_max_bytes = 4000
event_max_bytes = 8000
"""
FLOOD = 2 + 256
"""Pieces of reasoning at which loopd hangs up: the cap, and the margin of design.md section 7."""
BUDGET = "[The thinking budget is used up. I answer now.]"
ECHO_FOUND = (
    '[{"name":"echo","description":"Returns the text that it is given.","parameters":{"type":"object","properties":'
    '{"text":{"type":"string","description":"The text to return"}},"required":["text"]}}]\nCall it with call_tool.'
)
SLOW_ANSWER = "after a while"
"""What a response that is a function gives."""
UNPARSED = "The arguments did not parse: "
"""The reason behind it is free, so only this much of such a result is compared."""


# -- a script: what the server says ----------------------------------------------------------------


class Op:
    """One event of a stream."""


@frozen
class Think(Op):
    text: str
    key: str = "reasoning_content"


@frozen
class Say(Op):
    text: str


@frozen
class ThinkAndSay(Op):
    thought: str
    text: str


@frozen
class Piece(Op):
    """A piece of a call: `call` counts those of the reply, `index` is what the server says."""

    call: int
    index: int
    id: str | None
    name: str | None
    arguments: str | None


@frozen
class Read(Op):
    """Progress: tokens in all, from the cache, read."""

    total: int
    cache: int
    processed: int


@frozen
class Nothing(Op):
    """A chunk that says nothing: the role, or no choice at all."""

    chunk: str


@frozen
class Finish(Op):
    reason: str


@frozen
class Cost(Op):
    """Figures, as llama-server sends them or as the standard does."""

    key: Literal["timings", "usage"]
    cache_n: int | None
    prompt_n: int | None
    predicted_n: int | None


@frozen
class Done(Op):
    pass


@frozen
class Wrong(Op):
    """An error inside the stream; `status` is what it counts as, None for a stream that is not understood."""

    data: bytes
    status: int | None


@frozen
class Flood(Op):
    """So many pieces of reasoning, one event each."""

    pieces: int


@frozen
class TooLong(Op):
    """An event over `event_max_bytes`."""


@frozen(kw_only=True)
class Wire:
    """How a stream is written and where it is cut. Nothing here may change what the channel is told."""

    framing: Literal["close", "chunked", "length"] = "close"
    line_ends: tuple[bytes, ...] = (b"\n",)
    between: tuple[str, ...] = ("",)
    space: str = " "
    ascii: bool = False
    lines: bool = False
    """JSON over several data lines."""
    mark: bytes = b""
    chunks: tuple[int, ...] = (100_000,)
    skip: int = 0
    writes: tuple[int, ...] = (100_000,)
    most_writes: int = 60
    open_end: bool = False
    """A clean end leaves the last event without its blank line."""


@frozen(kw_only=True)
class Stream:
    """A reply. After `whole` events there is half an event or none, then it ends."""

    script: tuple[Op, ...]
    whole: int = 1000
    half: int | None = None
    end: Literal["end", "broken", "reset", "hang"] = "end"
    wire: Wire = Wire()

    @property
    def ops(self) -> list[Op]:
        """One for each event."""
        expanded: list[Op] = []
        for op in self.script:
            expanded += [Think("ab")] * op.pieces if isinstance(op, Flood) else [op]
        return expanded

    @property
    def heard(self) -> list[Op]:
        return self.ops[: self.whole]


@frozen(kw_only=True)
class Refusal:
    """A whole response that is no stream; `at_look`: it answers `/slots`, and nothing more is asked."""

    response: bytes
    status: int | None
    again: Literal["always", "500", "loading", "never"]
    after_ms: int | None = None
    full: bool = False
    at_look: bool = False


@frozen(kw_only=True)
class Try:
    """One try: how often its slot is found busy, and what answers it."""

    answer: Stream | Refusal
    busy: int = 0


LAST = Try(answer=Stream(script=(Say("The end."), Finish("stop"))))
"""What is said when the script is over."""


@frozen(kw_only=True)
class Reading:
    """How a channel reads: by how many bytes, with which pauses first, and what the kernel holds for it."""

    skip: int = 0
    sizes: tuple[int, ...] = (65536,)
    most_reads: int = 100
    pauses: tuple[float, ...] = ()
    small_buffer: bool = False


@frozen(kw_only=True)
class Turn:
    text: str
    tries: tuple[Try, ...]
    tools: tuple[Response, ...] = ()
    queued: bool = False
    """Another session has the slot when it comes."""
    reading: Reading = Reading()


@frozen(kw_only=True)
class Life:
    """Turns of one daemon. Then it is killed; `left` chooses how many records of its log are left, None for all."""

    turns: tuple[Turn, ...]
    left: int | None = None


# -- the model: what the channel is told -------------------------------------------------------------


class Ended(Exception):
    """The turn has no answer: code and detail."""


@define
class Failure:
    """A try that failed."""

    again: Literal["always", "500", "stall", "loading", "never"]
    detail: Json = field(factory=dict)
    after_ms: int | None = None
    full: bool = False


@define
class Reply:
    """What one stream has said so far."""

    content: str | None = None
    reasoning: str | None = None
    pieces: int = 0
    calls: dict[int, list[str]] = field(factory=dict)
    begun: bool = False
    capped: bool = False
    told: bool = False
    over: bool = False
    finished: bool = False
    reason: str = ""
    costs: dict[str, Cost] = field(factory=dict)

    def figure(self, name: str) -> int | None:
        found = [getattr(self.costs[key], name) for key in ("timings", "usage") if key in self.costs]
        return next((n for n in found if n is not None), None)


def clean(text: str) -> str:
    return text.replace("\x00", "\ufffd")


@define
class Model:
    """The session so far: its records, and the frames of the turn with the records that stand before each."""

    records: list[Json] = field(factory=lambda: [{"type": "session_start"}])
    frames: list[tuple[int, Json]] = field(factory=list)

    def tell(self, kind: str, **fields: Any) -> None:
        body = {"event": {"type": kind, **fields}}
        self._frame("turn_event", body)

    def _frame(self, kind: str, body: Json) -> None:
        self.frames.append((len(self.records), {"v": 1, "kind": kind, "final": kind != "turn_event", "body": body}))

    def turn(self, turn: Turn) -> list[tuple[int, Json]]:
        self.frames = []
        try:
            self._frame("turn_done", self._run(turn, iter([*turn.tries, LAST]), iter(turn.tools)))
        except Ended as exc:
            code, detail = exc.args
            self._frame("error", {"code": code, "message": None, "detail": detail})
        return self.frames

    def kill(self, left: int) -> int:
        """Keep the beginning of the log, one with calls that are open if there is any; give its records."""
        whole = self.records
        choices = []
        for count in range(1, len(whole) + 1):
            self.records = whole[:count]
            if self._open_calls():
                choices.append(count)
        choices = choices or list(range(1, len(whole) + 1))
        self.records = whole[: choices[left % len(choices)]]
        return len(self.records)

    def _run(self, turn: Turn, tries: Iterator[Try], tools: Iterator[Response]) -> Json:
        for place, call in enumerate(self._open_calls()):  # a kill left them
            text = "Not run: boxmaker was stopped before this call."
            if place == 0:
                text = "Interrupted: boxmaker failed while the call may have been running; its outcome is unknown."
            self._result(call, text)
        self.records.append({"type": "user", "content": turn.text})
        if turn.queued:
            self.tell("queued", ahead=1)
        made: list[tuple[str, str]] = []
        repeats = rounds = 0
        while True:
            reply = self._complete(tries)
            calls = self._open_calls()
            if not calls:
                usage = {key: value for key, value in self._last("usage").items() if key != "type"}
                return {"content": reply.content or "", "usage": usage}
            rounds += 1
            if rounds > 3:
                for call in calls:
                    self._result(call, "Not run: the turn's limit of tool calls was reached.")
                raise Ended("turn_limit", {"limit": "tool_iterations", "value": 3})
            if reply.reason == "length":
                for call in calls:
                    text = "Not run: the reply was cut at its length limit. Ask again in smaller pieces."
                    self._result(call, text)
                continue
            for place, call in enumerate(calls):
                key = call["name"].strip(), call["arguments"]
                self.tell("tool_call_started", name=key[0])
                if key not in made:
                    made.append(key)
                    self._work(call, tools)
                    continue
                repeats += 1
                if repeats == 1:
                    text = "this call was already made with these arguments in this turn. Its result is above."
                    self._result(call, f"Not run: {text}")
                    continue
                self._result(call, "Not run: the same call was repeated again, so the turn was ended.")
                for later in calls[place + 1 :]:
                    self._result(later, "Not run: the turn was ended before this call.")
                raise Ended("turn_limit", {"limit": "repeat_detection", "value": 2})

    # the log

    def _last(self, kind: str) -> Json:
        return [record for record in self.records if record["type"] == kind][-1]

    def _open_calls(self) -> list[Json]:
        """The calls of the last reply that have no result yet."""
        results = 0
        for record in reversed(self.records):
            results += record["type"] == "tool_result"
            if record["type"] == "assistant":
                calls: list[Json] = record["tool_calls"]
                return calls[results:]
        return []

    def _held(self) -> int | None:
        """The tokens that the server should have in its cache; None when its figures do not say."""
        for place in range(len(self.records) - 1, -1, -1):
            if self.records[place]["type"] == "assistant":
                after = self.records[place + 1] if place + 1 < len(self.records) else {}
                figures = [after.get("cache_n"), after.get("prompt_n"), after.get("predicted_n")]
                return None if None in figures else sum(figures) - 1  # type: ignore[arg-type]  # None is not in it
        return None

    def _result(
        self, call: Json, text: str, kind: str = "public", untrusted: bool = False, truncated: bool = False
    ) -> None:
        text = clean(text)
        kept, size = "", 0
        for char in text:
            size += len(char.encode())
            if size > 300:
                kept, truncated = kept + "[truncated]", True
                break
            kept += char
        self.records.append({
            "type": "tool_result",
            "call": sum(record["type"] == "tool_result" for record in self.records),
            "tool_call_id": call["id"],
            "content": kept,
            "class": kind,
            "untrusted": untrusted,
            "truncated": truncated,
        })  # fmt: skip
        mark = {"untrusted": True} if untrusted else {}
        self.tell("tool_result", **{"name": call["name"].strip(), "class": kind, "truncated": truncated}, **mark)

    def _work(self, call: Json, tools: Iterator[Response]) -> None:
        text = answered_here(call["name"].strip(), call["arguments"])
        if text is not None:
            self._result(call, text)
            return
        match next(tools, Failed(message="the script has no response left")):
            case Result() as result:
                self._result(call, result.content, result.class_, result.untrusted, result.truncated)
            case Failed(message=message):
                self._result(call, f"The tool failed: {message}")
            case Denied(reason=reason):
                self._result(call, f"The call was denied: {reason}")
            case PendingApproval():
                self._result(call, "The call needs the owner's approval, and this version cannot wait for it.")
            case Exception():
                self._result(call, "The tool failed: an error inside the tool port; the daemon's log has it")
            case _:
                self._result(call, SLOW_ANSWER)

    # the completion

    def _complete(self, tries: Iterator[Try]) -> Reply:
        failed = 0
        once: list[str] = []
        loading = False
        while True:
            attempt = next(tries)
            if attempt.busy:
                self.tell("waiting", slot_busy=True)
            outcome = self._stream(attempt.answer) if isinstance(attempt.answer, Stream) else refused(attempt.answer)
            if isinstance(outcome, Reply):
                self._append(outcome)
                return outcome
            if outcome.again == "loading":
                if not loading:
                    self.tell("waiting", slot_busy=False)
                loading = True
                continue
            loading = False
            failed += 1
            if failed == 3 or outcome.again == "never" or outcome.again in once:
                if outcome.full:
                    raise Ended("session_full", {})
                raise Ended("inference", outcome.detail | ({"attempts": failed} if failed > 1 else {}))
            if outcome.again in ("500", "stall"):
                once.append(outcome.again)
            after_ms = 500 * 2 ** (failed - 1) if outcome.after_ms is None else outcome.after_ms
            self.tell("retrying", attempt=failed + 1, after_ms=after_ms, error=None)

    def _append(self, reply: Reply) -> None:
        calls = [{"id": c[0], "name": c[1], "arguments": c[2]} for c in reply.calls.values()]
        names = ("cache_n", "prompt_n", "predicted_n")
        figures = {name: None if reply.over else reply.figure(name) for name in names}
        held = self._held()
        self.records.append({
            "type": "assistant",
            "content": reply.content,
            "reasoning_content": reply.reasoning,
            "tool_calls": [] if reply.over else calls,
        })  # fmt: skip
        figures_of_reply = {"reasoning_tokens": reply.pieces, "thinking_capped": reply.capped}
        self.records.append({"type": "usage", **figures, **figures_of_reply})
        got = figures["cache_n"]
        loss = held is not None and got is not None and got < held
        if loss:
            self.records.append({"type": "cache_loss", "expected": held, "got": got})
        if reply.over or reply.reason == "length":
            self.tell("cut", reason="thinking_cap" if reply.over else "length")
        if loss:
            self.tell("cache_loss", expected=held, got=got)

    def _stream(self, stream: Stream) -> Reply | Failure:
        reply = Reply()
        for op in stream.heard:
            failure = self._hear(reply, op)
            if failure is not None:
                return failure
            if reply.over or (reply.finished and isinstance(op, Done | TooLong)):
                return reply
            if isinstance(op, Done):  # before anything was said
                return Failure("always")
        if reply.finished:
            return reply
        if stream.end != "hang":
            return Failure("always")
        if reply.begun:
            return Failure("stall", {"limit": "stall_s"})
        return Failure("never", {"limit": "prefill_s"})

    def _hear(self, reply: Reply, op: Op) -> Failure | None:
        if isinstance(op, Cost):
            reply.costs[op.key] = op
        if reply.finished:
            return None
        match op:
            case Think(text=text):
                self._think(reply, text)
            case Say(text=text):
                self._say(reply, text)
            case ThinkAndSay(thought=thought, text=text):
                if len(thought.encode()) + len(text.encode()) > 4000:
                    return Failure("never", {"limit": "reply_max_bytes"})
                self._think(reply, thought)
                if not reply.over:
                    self._say(reply, text)
            case Piece():
                reply.begun = True
                self._thought(reply)
                call = reply.calls.setdefault(op.call, ["", "", ""])
                for place, more in enumerate((op.id, op.name, op.arguments)):
                    call[place] += clean(more or "")
            case Read(total=total, cache=cache, processed=processed):
                self.tell("progress", total=total, cache=cache, processed=processed)
            case Finish(reason=reason):
                reply.finished = True
                reply.reason = reason
                self._thought(reply)
            case Done():
                reply.finished = reply.begun
                self._thought(reply)
            case Wrong(status=None):
                return Failure("always")
            case Wrong(status=status):
                again: Literal["500", "always", "never"] = "500" if status == 500 else "always"
                return Failure("never" if status == 400 else again, {"status": status})
            case TooLong():
                return Failure("never", {"limit": "event_max_bytes"})
        return None

    def _think(self, reply: Reply, text: str) -> None:
        reply.reasoning = (reply.reasoning or "") + clean(text)
        if text:
            reply.begun = True
            reply.pieces += 1
            self.tell("reasoning", text=clean(text))
        reply.over = reply.pieces == FLOOD
        reply.capped = reply.over or BUDGET in reply.reasoning
        if reply.over:
            self._thought(reply)

    def _say(self, reply: Reply, text: str) -> None:
        if text:
            reply.begun = True
            self._thought(reply)
            self.tell("content", text=clean(text))
        reply.content = (reply.content or "") + clean(text)

    def _thought(self, reply: Reply) -> None:
        """Its reasoning has ended."""
        if reply.capped and not reply.told:
            reply.told = True
            self.tell("thinking_capped", tokens=reply.pieces)


def refused(refusal: Refusal) -> Failure:
    detail = {} if refusal.status is None else {"status": refusal.status}
    return Failure(refusal.again, detail, refusal.after_ms, refusal.full)


def answered_here(name: str, arguments: str) -> str | None:
    """The answer to a call that no tool runs for; None when one does."""
    if name not in ("clock", "find_tool", "call_tool"):
        tools = "The tools are clock, find_tool, call_tool; find_tool finds more, call_tool calls them."
        return f"Unknown tool '{name}'. {tools}"
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return UNPARSED
    if not isinstance(value, dict):
        return UNPARSED
    if name == "find_tool":
        query = value.get("query") or ""
        if not isinstance(query, str):
            return UNPARSED
        return ECHO_FOUND if query in "echo" else "No tool matches."
    if name == "clock":
        return None
    inner, more = value.get("name"), value.get("arguments")
    if not isinstance(inner, str):
        return UNPARSED
    if inner == "clock":
        return "Unknown to call_tool: the tool 'clock' is called by its own name."
    if inner != "echo":
        return f"Unknown tool '{inner}' for call_tool. find_tool with an empty query lists them all."
    return None if more is None or isinstance(more, dict) else UNPARSED
