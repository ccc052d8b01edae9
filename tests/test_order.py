"""The frames of a turn are exactly the expected sequence, however the bytes of HTTP, SSE and socket are cut.

Generated scripts run through client, turn, store and connection; the model in `tests/order.py` says each frame, and
how far the log must be when it is read. Bytes are cut into HTTP chunks, TCP writes, lines and characters of SSE,
and the reads of a channel that may be slow. The failing example is printed so that it can be replayed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import pytest
import trio
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from boxmaker.proto.tools import Denied, Failed, PendingApproval, Result, ToolRequest, ToolResponse
from boxmaker.session.disk import InlineDisk
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.port import Response, ScriptedPort, public
from boxmaker.testing.server import (
    LOADING,
    STREAM_HEAD,
    Hang,
    Pause,
    Reset,
    Script,
    ScriptedServer,
    Send,
    Step,
    Until,
    delta,
    ending,
    error_response,
    http_response,
    scripted_server,
)
from tests.order import (
    BUDGET,
    CONFIG,
    FLOOD,
    LAST,
    SLOW_ANSWER,
    UNPARSED,
    Cost,
    Done,
    Finish,
    Flood,
    Json,
    Life,
    Model,
    Nothing,
    Op,
    Piece,
    Read,
    Reading,
    Refusal,
    Say,
    Stream,
    Think,
    ThinkAndSay,
    TooLong,
    Try,
    Turn,
    Wire,
    Wrong,
)

T = TypeVar("T")


# -- the bytes: a stream as its wire wants it --------------------------------------------------------


def chunk_of(op: Op) -> Json | None:
    """The JSON of an event; None when it is no such chunk."""
    change: Json = {}
    reason = None
    match op:
        case Think(text=text, key=key):
            change = {key: text}
        case Say(text=text):
            change = {"content": text}
        case ThinkAndSay(thought=thought, text=text):
            change = {"content": text, "reasoning_content": thought}
        case Piece():
            function = {"name": op.name, "arguments": op.arguments}
            call = {"index": op.index, "id": op.id, "function": {k: v for k, v in function.items() if v is not None}}
            change = {"tool_calls": [{k: v for k, v in call.items() if v is not None}]}
        case Read():
            read = {"total": op.total, "cache": op.cache, "processed": op.processed, "time_ms": 1}
            change = {"role": "assistant", "content": None}
            return {"choices": [{"index": 0, "finish_reason": None, "delta": change}], "prompt_progress": read}
        case Nothing(chunk=text):
            nothing: Json = json.loads(text)
            return nothing
        case Finish():
            reason = op.reason
        case Cost(key="timings"):
            figures = {"cache_n": op.cache_n, "prompt_n": op.prompt_n, "predicted_n": op.predicted_n}
            return {"choices": [], "timings": {k: v for k, v in figures.items() if v is not None}}
        case Cost(key="usage", cache_n=int(cache), prompt_n=int(read_n)):
            prompt = {"prompt_tokens": cache + read_n, "prompt_tokens_details": {"cached_tokens": cache}}
            return {"choices": [], "usage": {**prompt, "completion_tokens": op.predicted_n}}
        case _:
            return None
    return {"choices": [{"index": 0, "finish_reason": reason, "delta": change}], "model": "scripted"}


def events_of(stream: Stream) -> list[bytes]:
    """Each event with the blank line that ends it."""
    wire = stream.wire
    ends, between = cycle(wire.line_ends), cycle(wire.between)
    found = []
    for op in stream.ops:
        chunk = chunk_of(op)
        if isinstance(op, Done):
            lines = [b"data:" + wire.space.encode() + b"[DONE]"]
        elif isinstance(op, Wrong):
            lines = op.data.split(b"\n")
        elif isinstance(op, TooLong):
            lines = [b'data: {"choices":[],"filler":"' + b"x" * 9000 + b'"}']
        else:
            text = json.dumps(chunk, ensure_ascii=wire.ascii, indent=1 if wire.lines else None)
            lines = [f"data:{wire.space}{line}".encode() for line in text.split("\n")]
            lines[:0] = [line.encode() for line in next(between).split("\n") if line]
        found.append(b"".join(line + next(ends) for line in [*lines, b""]))
    return found


def cut(data: bytes, sizes: Sequence[int], skip: int = 0, most: int = 100_000) -> list[bytes]:
    """Cut bytes into pieces: one of `skip`, then at most `most` of these sizes in turn, then the rest."""
    pieces = [data[:skip]]
    at = skip
    size = cycle(sizes)
    while at < len(data) and len(pieces) <= most:
        pieces.append(data[at : (at := at + next(size))])
    return [piece for piece in [*pieces, data[at:]] if piece]


def steps_of(stream: Stream) -> list[Step]:
    """The raw response, each piece written by itself: the pause lets the client read it first."""
    wire = stream.wire
    events = events_of(stream)
    body = wire.mark + b"".join(events[: stream.whole])
    if stream.half is not None and stream.whole < len(events):
        # at least one byte of the JSON is missing, so nothing of that event has been said
        event = events[stream.whole].rstrip()
        body += event[: stream.half % len(event)]
    elif stream.end == "end" and wire.open_end:
        body = body.rstrip(b"\r\n")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    if wire.framing == "chunked":
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut(body, wire.chunks, wire.skip, 200))
        raw = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + (b"0\r\n\r\n" if stream.end == "end" else b"")
    elif wire.framing == "length":
        raw = head + b"Content-Length: %d\r\n\r\n" % (len(body) + (stream.end != "end")) + body
    else:
        raw = head + b"Connection: close\r\n\r\n" + body
    steps: list[Step] = []
    for piece in cut(raw, wire.writes, wire.skip, wire.most_writes):
        steps += [Send(piece), Pause(0.0001)]
    if stream.end == "reset":
        steps.append(Reset())
    elif stream.end == "hang":
        steps.append(Hang())
    return steps


# -- both against each other -------------------------------------------------------------------------


class SlowDisk:
    """A disk that takes a while before it writes, so that whoever does not wait for it is seen."""

    def __init__(self) -> None:
        self._disk = InlineDisk()

    async def run(self, work: Callable[[], T]) -> T:
        await trio.sleep(0.01)
        return await self._disk.run(work)


async def slow_tool(_: ToolRequest) -> ToolResponse:
    await trio.sleep(1)
    return public(SLOW_ANSWER)


Told: TypeAlias = list[tuple[int, bytes]]
"""Payloads of frames, each with the number of records that the log had when it was read."""


@define
class Stage:
    """One session with its server; runs turns and keeps what was told."""

    server: ScriptedServer
    daemon: Daemon
    port: ScriptedPort
    looks: list[Any] = field(factory=list)
    _counted: tuple[int, int] = (0, 0)

    @property
    def log(self) -> Path:
        return self.daemon.store.directory / "s" / "0.jsonl"

    def lines(self) -> int:
        size = self.log.stat().st_size
        if size != self._counted[0]:
            self._counted = size, self.log.read_bytes().count(b"\n")
        return self._counted[1]

    async def next_look(self, path: str) -> None:
        if path == "/slots" and self.looks:  # after a turn the daemon may ask once more, for the cause of a loss
            self.server.slots = self.looks.pop(0)

    async def turn(self, turn: Turn, first: bool) -> Told:
        await trio.sleep(60)  # what the daemon still asks about the turn before must not take a look of this one
        tries = [*turn.tries, LAST]
        idle, busy = ([{"id": 0, "n_ctx": 4096, "is_processing": now}] for now in (False, True))
        self.looks = []
        scripts: list[Script] = []
        for attempt in tries:
            answer = attempt.answer
            refused_look = isinstance(answer, Refusal) and answer.at_look
            self.looks += [busy] * attempt.busy
            self.looks.append(answer.response if isinstance(answer, Refusal) and refused_look else idle)
            if isinstance(answer, Stream):
                scripts.append(steps_of(answer))
            elif not refused_look:
                scripts.append(answer.response)
        self.port.responses = list(turn.tools)
        self.server.on_probe = self.next_look
        self.server.scripts = scripts
        async with trio.open_nursery() as nursery:
            queued = trio.Event()
            if turn.queued:
                self.looks.insert(0, idle)
                self.server.scripts.insert(
                    0, [Send(STREAM_HEAD + delta(content="Mine.")), Until(queued), Send(ending())]
                )
                asked = len(self.server.completions)
                nursery.start_soon(self.other_turn, f"other-{asked}")
                await self.server.wait_for_completions(asked + 1)
            stream = await self.daemon.connect(send_buffer_bytes=1 if turn.reading.small_buffer else None)
            body = {"session": "s", "content": turn.text, "resume": not first}
            payload = json.dumps({"v": 1, "kind": "turn", "final": True, "body": body}).encode()
            await stream.send_all(len(payload).to_bytes(4, "big") + payload)
            async with stream:
                return await self.read(stream, turn.reading, queued)

    async def other_turn(self, session: str) -> None:
        await self.daemon.ask(session, "Me first.", resume=False)

    async def read(self, stream: trio.SocketStream, reading: Reading, queued: trio.Event) -> Told:
        """Read to the end of the stream: after its final frame loopd closes."""
        raw = bytearray()
        told: Told = []
        sizes = cycle(reading.sizes)
        for number in count():
            size = reading.skip if number == 0 and reading.skip else next(sizes)
            if number < len(reading.pauses):
                await trio.sleep(reading.pauses[number])
            data = await stream.receive_some(size if number < reading.most_reads else 65536)
            if not data:
                break
            raw += data
            while len(raw) >= 4 and len(raw) >= (end := 4 + int.from_bytes(raw[:4], "big")):
                told.append((self.lines(), bytes(raw[4:end])))
                del raw[:end]
                if b'"queued"' in told[-1][1]:
                    queued.set()
        assert not raw
        return told


def read_log(log: Path) -> list[Json]:
    """The records without what the model does not know: times, and the ids of the first line."""
    found = []
    for line in log.read_bytes().decode("utf-8").split("\n")[:-1]:
        record = json.loads(line)
        if record["type"] == "session_start":
            record = {"type": "session_start"}
        record.pop("time", None)
        if record["type"] == "tool_result" and record["content"].startswith(UNPARSED):
            record["content"] = UNPARSED
        found.append(record)
    return found


def said(payload: bytes) -> Json:
    """What a payload says, without wordings, which are free."""
    frame: Json = json.loads(payload)
    assert json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode() == payload
    body = frame["body"]
    if frame["kind"] == "error":
        drop_wording(body, "message")
    elif frame["kind"] == "turn_event" and body["event"]["type"] == "retrying":
        drop_wording(body["event"], "error")
    return frame


def drop_wording(says: Json, key: str) -> None:
    assert says[key]
    assert "\n" not in says[key]
    says[key] = None


def check_told(got: Told, expected: Sequence[tuple[int, Json]]) -> None:
    for place, ((lines, payload), (least, frame)) in enumerate(zip(got, expected, strict=False)):
        assert said(payload) == frame, f"frame {place}: {said(payload)} where {frame} was expected"
        assert lines >= least, f"frame {place} came before what it tells of was in the log"
    assert len(got) == len(expected)


async def play(directory: Path, lives: Sequence[Life], check: bool = True) -> list[Told]:
    """Run a session, and hold every turn of it against the model."""
    model = Model()
    told = []
    first = True
    with trio.fail_after(100_000):
        async with scripted_server() as server:
            for life in lives:
                port = ScriptedPort()
                async with running_daemon(directory, server.url, CONFIG, port=port, disk=SlowDisk()) as daemon:
                    stage = Stage(server, daemon, port)
                    for turn in life.turns:
                        got = await stage.turn(turn, first)
                        first = False
                        told.append(got)
                        if check:
                            expected = model.turn(turn)
                            check_told(got, expected)
                            assert read_log(stage.log) == model.records
                if life.left is not None:
                    left = model.kill(life.left)
                    lines_left = stage.log.read_bytes().split(b"\n")[:left]
                    stage.log.write_bytes(b"".join(line + b"\n" for line in lines_left))
    return told


# -- the scripts that are tried ----------------------------------------------------------------------

any_text = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=6)
piece_of_text = any_text | st.sampled_from(["", "\x00", "\u2028", "\r\n", "🙂é", "a\n\n", "data: x", "[DONE]"])
tokens = st.sampled_from([0, 5, 10, 14])  # few, so that a cache that is hit exactly is seen
broken_text = st.sampled_from([
    Wrong(b'data: {"error": {"code": 503, "message": "overloaded", "type": "server_error"}}\n', 503),
    Wrong(b'data: {"error": {"code": 400, "message": "wrong", "type": "invalid_request_error"}}\n', 400),
    Wrong(b'event: error\ndata: {"message": "slot lost"}\n', 500),
    Wrong(b"error: out of memory\n", 500),
    Wrong(b'data: {"error": "in words"}\n', 500),
    Wrong(b'data: {"choices": [\n', None),
    ThinkAndSay("a", "x" * 4100),
    TooLong(),
])  # fmt: skip
budget = st.sampled_from([BUDGET, BUDGET[:20], BUDGET[20:], BUDGET[:-1], BUDGET[-1:]])
text_op: st.SearchStrategy[Op] = st.one_of(
    st.builds(Think, piece_of_text | budget, st.sampled_from(["reasoning_content", "reasoning"])),
    st.builds(Say, piece_of_text),
    st.builds(ThinkAndSay, piece_of_text | budget, piece_of_text),
    st.builds(Read, tokens, tokens, tokens),
    st.sampled_from([
        Nothing('{"choices": [{"index": 0, "finish_reason": null, "delta": {"role": "assistant", "content": null}}]}'),
        Nothing('{"choices": []}'),
        Nothing("{}"),
    ]),
)  # fmt: skip
cost: st.SearchStrategy[Op] = st.one_of(
    st.builds(Cost, st.just("timings"), st.none() | tokens, st.none() | tokens, st.none() | tokens),
    st.builds(Cost, st.sampled_from(["timings", "usage"]), tokens, tokens, tokens),
)
some_call = st.tuples(
    st.sampled_from([None, "", "a", "a", "b"]),
    st.sampled_from(["clock", " clock\n", "clock", "find_tool", "call_tool", "rm", "", "r\x00m"]),
    st.sampled_from([
        None, "", "{}", '{"n": 1}', "{", "[1]", "null", '{"query": "ech"}', '{"query": "none"}', '{"query": 5}',
        '{"name": "echo", "arguments": {"text": "é"}}', '{"name": "clock"}', '{"name": "rm"}', '{"name": 5}',
        '{"name": "echo", "arguments": "{"}',
    ]),
)  # fmt: skip


@st.composite
def pieces_of_calls(draw: st.DrawFn) -> list[Op]:
    """Calls in pieces: one after the other or in turns, on their own indexes or all on the first."""
    on_first = draw(st.booleans())
    in_turns = not on_first and draw(st.booleans())
    calls: list[list[Op]] = []
    for number, (call_id, name, arguments) in enumerate(draw(st.lists(some_call, min_size=1, max_size=3))):
        if on_first:
            call_id = f"only{number}"  # without an id of its own such a call could not be told from the one before
        index = 0 if on_first else number
        cut_name = draw(st.integers(0, len(name)))
        pieces: list[Op] = [Piece(number, index, call_id, name[:cut_name], None)]
        if cut_name < len(name):
            pieces.append(Piece(number, index, None, name[cut_name:], None))
        at = 0
        while arguments is not None and at < len(arguments):
            size = draw(st.integers(1, 20))
            pieces.append(Piece(number, index, None, None, arguments[at : at + size]))
            at += size
        calls.append(pieces)
    if not in_turns:
        return [piece for pieces in calls for piece in pieces]
    longest = max(map(len, calls))
    return [pieces[at] for at in range(longest) for pieces in calls if at < len(pieces)]


sizes = st.lists(st.sampled_from([1, 1, 2, 3, 7, 50, 1000]), min_size=1, max_size=3).map(tuple)
wires = st.builds(
    Wire,
    framing=st.sampled_from(["close", "chunked", "length"]),
    line_ends=st.sampled_from([(b"\n",), (b"\r\n",), (b"\r",), (b"\r\n", b"\n")]),
    between=st.lists(st.sampled_from(["", ":", ": alive é", "id: 7", "event: message", "retry: 5\n:"]), min_size=1).map(
        tuple
    ),
    space=st.sampled_from([" ", ""]),
    ascii=st.booleans(),
    lines=st.booleans(),
    mark=st.sampled_from([b"", b"", b"\xef\xbb\xbf"]),
    chunks=sizes,
    skip=st.integers(0, 800),
    writes=sizes,
    open_end=st.booleans(),
)


ends_of_streams: st.SearchStrategy[Literal["end", "broken", "reset", "hang"]] = st.sampled_from(
    ["end", "end", "broken", "reset", "hang"]
)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    ops = draw(st.lists(text_op, max_size=5))
    if draw(st.sampled_from([False, False, False, True])):
        ops += [Think(BUDGET[:9]), *draw(st.lists(st.just(Say("")), max_size=1)), Think(BUDGET[9:]), Think("more")]
    wire = draw(wires)
    kind = draw(st.sampled_from(["text", "text", "text", "calls", "calls", "calls", "flood"]))
    if kind == "calls":
        ops += draw(pieces_of_calls())
        ops += draw(st.lists(text_op, max_size=1))
    elif kind == "flood":
        ops.append(Flood(draw(st.sampled_from([FLOOD - 6, FLOOD, FLOOD + 3]))))
        ops += draw(st.lists(text_op, max_size=1))
    ending = draw(st.sampled_from(["whole", "whole", "whole", "whole", "length", "done", "wrong", "cut"]))
    if ending == "wrong":
        ops.append(draw(broken_text))
    elif ending != "done":
        ops += draw(st.lists(cost, max_size=1))
        ops.append(Finish("length" if ending == "length" else "tool_calls" if kind == "calls" else "stop"))
    ops += draw(st.lists(cost | broken_text if ending == "length" else cost, max_size=2))
    ops.append(Done())
    stream = Stream(script=tuple(ops), wire=wire, end=draw(ends_of_streams))
    if ending == "cut":
        ops = stream.ops
        whole = draw(st.integers(0, len(ops)))
        at_json = whole < len(ops) and chunk_of(ops[whole]) is not None
        return evolve(stream, whole=whole, half=draw(st.none() | st.integers(0, 200)) if at_json else None)
    return stream


refusals = st.sampled_from([
    Refusal(response=error_response(503, "overloaded"), status=503, again="always"),
    Refusal(response=error_response(429, "slower", headers="Retry-After: 3\r\n"), status=429, again="always",
            after_ms=3000),
    Refusal(response=error_response(502, "away", headers="Retry-After: 99\r\n"), status=502, again="always",
            after_ms=10_000),
    Refusal(response=error_response(500, "oops"), status=500, again="500"),
    Refusal(response=error_response(400, "wrong"), status=400, again="never"),
    Refusal(response=error_response(400, "too long", "exceed_context_size_error"), status=400, again="never",
            full=True),
    Refusal(response=http_response(200, b"<html>", "text/html"), status=None, again="never"),
    Refusal(response=b"", status=None, again="always"),
    Refusal(response=LOADING, status=503, again="loading"),
    Refusal(response=LOADING, status=503, again="loading", at_look=True),
    Refusal(response=error_response(502, "away"), status=502, again="always", at_look=True),
])  # fmt: skip
one_try = st.builds(
    Try,
    answer=st.one_of(streams(), streams(), streams(), refusals),
    busy=st.sampled_from([0, 0, 0, 0, 1, 4]),
)
again = st.tuples(one_try, st.sampled_from([1, 1, 1, 1, 2, 3, 4]))
"""A try and how often: what comes once may be well where the second or the fourth is not."""
tries = st.lists(again, max_size=3).map(lambda pairs: tuple(one for one, times in pairs for _ in range(times)))
responses: st.SearchStrategy[Response] = st.one_of(
    st.builds(
        Result,
        content=piece_of_text | st.sampled_from(["é" * 150, "é" * 151, "x" + "é" * 200]),
        class_=st.sampled_from(["public", "private", "secret"]),
        untrusted=st.booleans(),
        truncated=st.booleans(),
    ),
    st.builds(Failed, message=any_text),
    st.builds(Denied, reason=any_text),
    st.sampled_from([PendingApproval(id="p"), OSError("gone"), slow_tool]),
)
readings = st.builds(
    Reading,
    skip=st.integers(0, 600),
    sizes=st.lists(st.sampled_from([1, 2, 3, 5, 100, 65536]), min_size=1, max_size=3).map(tuple),
    pauses=st.lists(st.sampled_from([0, 0.001, 0.3, 4]), max_size=5).map(tuple),
    small_buffer=st.booleans(),
)
turns = st.builds(
    Turn,
    text=any_text,
    tries=tries,
    tools=st.lists(responses, max_size=3).map(tuple),
    queued=st.sampled_from([False, False, False, True]),
    reading=readings,
)
sessions = st.lists(
    st.builds(Life, turns=st.lists(turns, min_size=1, max_size=2).map(tuple), left=st.none() | st.integers(0, 20)),
    min_size=1,
    max_size=2,
)


def run(lives: Sequence[Life], check: bool = True) -> list[Told]:
    with tempfile.TemporaryDirectory() as name:
        return trio.run(play, Path(name), lives, check, clock=MockClock(autojump_threshold=0))


@settings(max_examples=max(1, settings().max_examples // 3))  # an example is a whole session, in many pieces
@given(sessions)
def test_the_frames_are_exactly_the_expected_ones_and_the_log_is_never_behind_them(lives: list[Life]) -> None:
    run(lives)


def short(*ops: Op, **more: Any) -> Try:
    return Try(answer=Stream(script=ops, **more))


def called(arguments: str, reason: str = "tool_calls", name: str = "clock") -> Try:
    return short(Piece(0, 0, "a", name, arguments), Finish(reason), Cost("timings", 14, 0, 1), Done())


CALLS = [
    *(called(f'{{"n": {n}}}') for n in range(5)),
    *(called("{}"), called("{}"), called("{}", "length"), called("{}", "length"), called("{}", name="rm")),
    short(Piece(0, 0, "", "clock", "{}"), Piece(1, 1, "", "rm", "{}"), Piece(2, 2, "", "find_tool", ""), Finish("x")),
]
ANSWERS = [
    *(short(Say("a"), Finish("stop"), Cost("timings", n, 10, 5)) for n in (0, 13, 14, 15, 29)),
    *(short(Say("a"), Finish("stop"), whole=1, wire=Wire(open_end=True)), short(Say("a"), Done()), short(end="hang")),
]
FAILURES = [
    *(Try(answer=Refusal(response=LOADING, status=503, again="loading", at_look=look)) for look in (False, True)),
    Try(answer=Refusal(response=error_response(503, "overloaded"), status=503, again="always"), busy=2),
    Try(answer=Refusal(response=error_response(500, "oops"), status=500, again="500")),
    *(short(Think("a"), Wrong(b"error: no\n", 500)), short(Say("a"), end="hang"), short(Say("a"), end="hang")),
]
short_turns = st.builds(
    Turn,
    text=st.just("?"),
    tries=st.one_of(
        st.lists(st.sampled_from(CALLS + ANSWERS + FAILURES), min_size=2, max_size=6).map(tuple),
        st.lists(st.sampled_from(FAILURES), min_size=2, max_size=4).map(tuple),
        st.lists(st.sampled_from(CALLS), min_size=4, max_size=6).map(tuple),
    ),
    tools=st.just((public("noon"),) * 8),
)
"""Tries of a few bytes, to go through their orders instead of their cuts."""


@settings(max_examples=max(1, settings().max_examples // 2))
@given(
    st.lists(st.builds(Life, turns=st.tuples(short_turns), left=st.none() | st.integers(0, 9)), min_size=2, max_size=3)
)
def test_tries_and_rounds_of_calls_in_any_order_give_the_expected_frames(lives: list[Life]) -> None:
    run(lives)


OVERLOADED = b'data: {"error": {"code": 503, "message": "overloaded"}}\n'
EVERYTHING = (
    Stream(script=(Read(20, 0, 10), Think("Hm."), Say("Just"), Wrong(OVERLOADED, 503))),
    Refusal(response=LOADING, status=503, again="loading"),
    Stream(
        script=(
            *(Think("é🙂"), Think(""), Think(BUDGET), Say("I\u2028look.\n")),
            *(Piece(0, 0, "a", "cl", None), Piece(0, 0, None, "ock", "{"), Piece(1, 1, None, " rm", None)),
            *(Piece(0, 0, None, None, "}"), Finish("tool_calls"), Cost("timings", 0, 20, 10), Done()),
        )
    ),
    Stream(script=(Say("Noon, "), Say("é"), Finish("length"), Cost("usage", 5, 28, 7), Done())),
)
TOLD = """
{"type":"waiting","slot_busy":true}
{"type":"progress","total":20,"cache":0,"processed":10}
{"type":"reasoning","text":"Hm."}
{"type":"content","text":"Just"}
{"type":"retrying","attempt":2,"after_ms":500,"error":"the server answered 503: overloaded"}
{"type":"waiting","slot_busy":false}
{"type":"reasoning","text":"é🙂"}
{"type":"reasoning","text":"[The thinking budget is used up. I answer now.]"}
{"type":"thinking_capped","tokens":2}
{"type":"content","text":"I\u2028look.\\n"}
{"type":"tool_call_started","name":"clock"}
{"type":"tool_result","name":"clock","class":"private","truncated":true}
{"type":"tool_call_started","name":"rm"}
{"type":"tool_result","name":"rm","class":"public","truncated":false}
{"type":"content","text":"Noon, "}
{"type":"content","text":"é"}
{"type":"cut","reason":"length"}
{"type":"cache_loss","expected":29,"got":5}
"""
ANSWER = (
    '{"v":1,"kind":"turn_done","final":true,"body":{"content":"Noon, é","usage":{"cache_n":5,"prompt_n":28,'
    '"predicted_n":7,"reasoning_tokens":0,"thinking_capped":false}}}'
)


@pytest.mark.parametrize(
    ("framing", "size", "line_end"),
    [
        *(("close", 100_000, b"\n"), ("chunked", 100_000, b"\r\n"), ("length", 100_000, b"\r")),
        *(("close", 1, b"\r\n"), ("chunked", 3, b"\n"), ("length", 7, b"\r")),
    ],
)
def test_one_turn_of_everything_gives_these_bytes_wherever_it_is_cut(
    framing: Literal["close", "chunked", "length"], size: int, line_end: bytes
) -> None:
    small = (min(size, 5),)
    wire = Wire(framing=framing, line_ends=(line_end,), chunks=small, writes=(size,), most_writes=100_000)
    tries = [Try(answer=evolve(one, wire=wire) if isinstance(one, Stream) else one) for one in EVERYTHING]
    tries[0] = evolve(tries[0], busy=2)
    result = Result(content="é" * 151, class_="private", untrusted=False, truncated=False)
    reading = Reading(sizes=(size,), most_reads=100_000, small_buffer=size == 1)
    (told,) = run([Life(turns=(Turn(text="Now?", tries=tuple(tries), tools=(result,), reading=reading),))])
    events = [f'{{"v":1,"kind":"turn_event","final":false,"body":{{"event":{one}}}}}' for one in TOLD[1:-1].split("\n")]
    assert [payload.decode() for _, payload in told] == [*events, ANSWER]


@pytest.mark.parametrize("writes", [1, 100_000])
@pytest.mark.parametrize("end", ["end", "reset", "hang"])
@pytest.mark.parametrize("wrong", [ThinkAndSay("a", "x" * 4100), TooLong(), Wrong(b"error: no\n", 500)])
def test_what_comes_before_a_fault_of_the_stream_is_told_also_when_both_are_read_at_once(
    wrong: Op, end: Literal["end", "reset", "hang"], writes: int
) -> None:
    stream = Stream(script=(Think("So"), Say("it is"), wrong), end=end, wire=Wire(writes=(writes,), most_writes=400))
    (told,) = run([Life(turns=(Turn(text="?", tries=(Try(answer=stream),)),))])
    kinds = [json.loads(payload)["body"].get("event", {}).get("type") for _, payload in told]
    again = ["retrying", "content"] if isinstance(wrong, Wrong) else []
    assert kinds == ["reasoning", "content", *again, None]


@pytest.mark.parametrize("writes", [1000, 1_000_000])
def test_of_more_events_than_a_slow_channel_holds_none_is_lost_or_overtaken(writes: int) -> None:
    ops = (*(Say(f"{n}") for n in range(900)), Piece(0, 0, "a", "clock", "{}"), Finish("tool_calls"), Done())
    stream = Stream(script=ops, wire=Wire(writes=(writes,)))
    reading = Reading(sizes=(3000,), pauses=(4,) * 5, small_buffer=True)
    run([Life(turns=(Turn(text="Count.", tries=(Try(answer=stream),), tools=(public("noon"),), reading=reading),))])


@pytest.mark.parametrize("writes", [1000, 1_000_000])
@pytest.mark.parametrize("pieces", [FLOOD - 1, FLOOD, FLOOD + 3])
def test_a_flood_of_reasoning_is_left_at_its_limit_and_no_piece_later(pieces: int, writes: int) -> None:
    script = (Flood(pieces), Say("a"), Piece(0, 0, "a", "clock", "{}"), Finish("tool_calls"), Done())
    stream = Stream(script=script, wire=Wire(writes=(writes,)))
    (told,) = run([Life(turns=(Turn(text="?", tries=(Try(answer=stream),), tools=(public("noon"),)),))])
    kinds = [json.loads(payload)["body"].get("event", {}).get("type") for _, payload in told]
    if pieces < FLOOD:
        assert kinds == ["reasoning"] * 257 + ["content", "tool_call_started", "tool_result", "content", None]
    else:
        assert kinds == ["reasoning"] * 258 + ["thinking_capped", "cut", None]
