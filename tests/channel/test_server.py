"""Tests of one connection: a whole daemon in the test's loop, a scripted llama-server behind it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define
from trio.testing import MockClock, wait_all_tasks_blocked

from boxmaker.channel.client import TurnChannel
from boxmaker.channel.server import Answering, Closing, Emit, serve_connection
from boxmaker.config import Channel
from boxmaker.errors import SessionFull, StorageError
from boxmaker.log import KeyValueFormatter
from boxmaker.proto import records
from boxmaker.proto.channel import ErrorCode, Request, ToolCallStarted, ToolResult, Turn, TurnDone, WireError
from boxmaker.proto.chat import Content, Figures, Progress, Queued, Reasoning, Waiting
from boxmaker.proto.frames import Answer, encode_request
from boxmaker.proto.ids import parse_session_id
from boxmaker.proto.tools import ToolRequest, ToolResponse
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.port import ScriptedPort, hang
from boxmaker.testing.server import (
    STREAM_HEAD,
    Hang,
    Pause,
    Script,
    Send,
    Until,
    delta,
    ending,
    error_response,
    progress,
    reply,
    scripted_server,
)
from tests.frames import rest, taken_apart

LIMIT_S = 500
"""Virtual seconds: no test comes near it unless something hangs."""

GOOD_BODY = {"session": "s", "content": "hi", "resume": False}
CLOCK_CALL = reply(calls=[("a", "clock", "{}")])


def framed(payload: bytes) -> bytes:
    """A frame by hand."""
    return len(payload).to_bytes(4, "big") + payload


def request(**envelope: object) -> bytes:
    """A frame whose envelope is a good one but for the keys given; `...` leaves a key out."""
    value = {"v": 1, "kind": "turn", "final": True, "body": GOOD_BODY} | envelope
    return framed(json.dumps({k: v for k, v in value.items() if v is not ...}).encode())


def body(**keys: object) -> bytes:
    """A request whose body is a good one but for the keys given."""
    return request(body={k: v for k, v in (GOOD_BODY | keys).items() if v is not ...})


async def answers(stream: trio.SocketStream) -> list[Any]:
    """Every frame until the connection ends, taken apart by hand; closes our end then."""
    async with stream:
        return taken_apart(await rest(stream))


async def say(daemon: Daemon, raw: bytes) -> list[Any]:
    """Send bytes on a connection of their own; every frame until it ends."""
    stream = await daemon.connect()
    await stream.send_all(raw)
    return await answers(stream)


@define
class Peer:
    """A channel that has sent a turn."""

    stream: trio.SocketStream
    channel: TurnChannel

    async def next(self) -> Answer | None:
        """What the next frame says."""
        return (await self.channel.receive()).answer

    async def last(self) -> TurnDone | WireError:
        """The final frame, whatever comes before it; hangs up then."""
        async with self.stream:
            while True:
                frame = await self.channel.receive()
                if frame.final:
                    assert isinstance(frame.answer, TurnDone | WireError)
                    return frame.answer

    async def leave(self, how: str = "close") -> None:
        """Leave before the final frame."""
        if how == "half-close":
            await self.stream.send_eof()
        else:
            await self.stream.aclose()


async def begin(daemon: Daemon, session: str, content: str = "hi", *, resume: bool = False) -> Peer:
    """Send a turn and leave it running."""
    return Peer(*await daemon.open(session, content, resume=resume))


async def until_free(daemon: Daemon, session: str) -> None:
    """Wait until the session's turn has ended; the caller has the deadline."""
    while not daemon.is_free(session):  # noqa: ASYNC110  # a daemon has no event for a stranger to wait for
        await trio.sleep(0.001)


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str | None]]:
    """What the daemon logged: each event with its ending, and no fault of ours."""
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    return [(record.getMessage(), record.__dict__["fields"].get("ending")) for record in caplog.records]


# -- order -------------------------------------------------------------------------------------


async def test_events_come_in_order_and_one_final_frame_is_the_last(tmp_path: Path, autojump_clock: MockClock) -> None:
    first = STREAM_HEAD + progress(10, 0, 10) + delta(reasoning_content="hm") + delta(content="I ")
    first += delta(content="look.") + CLOCK_CALL.removeprefix(STREAM_HEAD)
    with trio.fail_after(LIMIT_S):
        # 0 + 10 + 5 - 1 = 14 tokens could be in the cache: no loss is reported
        async with scripted_server(first, reply("Noon.", cache_n=14)) as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                frames = await daemon.frames("s", "time?", resume=False)
    assert [frame.answer for frame in frames] == [
        Progress(total=10, cache=0, processed=10),
        Reasoning(text="hm"),
        Content(text="I "),
        Content(text="look."),
        ToolCallStarted(name="clock"),
        ToolResult(name="clock", class_="public", truncated=False),
        Content(text="Noon."),
        TurnDone(
            content="Noon.",
            usage=Figures(cache_n=14, prompt_n=10, predicted_n=5, reasoning_tokens=0, thinking_capped=False),
        ),
    ]
    assert [frame.final for frame in frames] == [False] * 7 + [True]


async def test_many_more_events_than_the_memory_channel_holds_all_arrive(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    pieces = [f"{number} " for number in range(3000)]
    script = STREAM_HEAD + b"".join(delta(content=piece) for piece in pieces) + ending()
    with trio.fail_after(LIMIT_S):
        async with scripted_server(script) as server, running_daemon(tmp_path, server.url) as daemon:
            said = await daemon.turn("s", "count", resume=False)
    assert [answer.text for answer in said if isinstance(answer, Content)] == pieces
    assert isinstance(said[-1], TurnDone)
    assert said[-1].content == "".join(pieces)


async def test_the_connection_ends_after_the_final_frame(tmp_path: Path, autojump_clock: MockClock) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server(reply("Hi.")) as server, running_daemon(tmp_path, server.url) as daemon:
            said = await say(daemon, request())
    assert [answer["kind"] for answer in said] == ["turn_event", "turn_done"]


# -- the first frame ---------------------------------------------------------------------------

BAD_FRAMES = {
    "length 0": b"\0\0\0\0",
    "over the limit by one": (1_048_577).to_bytes(4, "big") + b"{",
    "text where a length should be": b"GET / HTTP/1.1\r\n\r\n",
    "not UTF-8": framed(b'{"v":1,"kind":"\xff"}'),
    "not JSON": framed(b'{"v":1,'),
    "two objects": framed(b"{}{}"),
    "NaN": framed(b'{"v":NaN}'),
    "nested too deep": framed(b"[" * 100_000),
    "an array": framed(b"[1]"),
    "null": framed(b"null"),
}
UNSUPPORTED_VERSIONS = {
    "no version": request(v=...),
    "version as text": request(v="1"),
    "version 1.0": request(v=1.0),
    "version true": request(v=True),
    "version null": request(v=None),
    "a later version": request(v=2),
    "a later version with everything else wrong": request(v=2, kind=..., final="no", body=[], more=1),
}
BAD_REQUESTS = {
    "no kind": request(kind=...),
    "kind is no text": request(kind=1),
    "unknown kind": request(kind="turn_event"),
    "unknown kind and a bad body": request(kind="chat", body={"x": 1}),
    "no final": request(final=...),
    "final is 1": request(final=1),
    "final is false": request(final=False),
    "no body": request(body=...),
    "body is no object": request(body=[]),
    "an unknown key": request(more=None),
    "no session": body(session=...),
    "no content": body(content=...),
    "no resume": body(resume=...),
    "an unknown key in the body": body(model="x"),
    "content is no text": body(content=None),
    "resume is no flag": body(resume=0),
    "session is no text": body(session=7),
    "session is empty": body(session=""),
    "session is a path": body(session="../s"),
    "session begins with a dot": body(session=".new-1"),
    "session is too long": body(session="s" * 65),
    "session ends with LF": body(session="s\n"),
    "NUL in the text": body(content="a\0b"),
    "a lone surrogate in the text": body(content="a\ud800b"),
}
REFUSED = [
    *(pytest.param(raw, "bad_frame", id=name) for name, raw in BAD_FRAMES.items()),
    *(pytest.param(raw, "unsupported_version", id=name) for name, raw in UNSUPPORTED_VERSIONS.items()),
    *(pytest.param(raw, "bad_request", id=name) for name, raw in BAD_REQUESTS.items()),
]


@pytest.mark.parametrize(("raw", "code"), REFUSED)
async def test_a_bad_first_frame_is_answered_with_its_code_and_closes_that_connection_alone(
    tmp_path: Path, raw: bytes, code: str, autojump_clock: MockClock
) -> None:
    go = trio.Event()
    with trio.fail_after(LIMIT_S):
        async with scripted_server([Until(go), Send(reply("Still here."))]) as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                neighbour = await begin(daemon, "other")
                await server.wait_for_completions(1)
                (answer,) = await say(daemon, raw)
                go.set()
                done = await neighbour.last()
                made = sorted(path.name for path in daemon.store.directory.iterdir())
    assert list(answer) == ["v", "kind", "final", "body"]
    assert (answer["v"], answer["kind"], answer["final"]) == (1, "error", True)
    assert list(answer["body"]) == ["code", "message", "detail"]
    assert answer["body"]["code"] == code
    assert answer["body"]["message"]
    assert isinstance(answer["body"]["detail"], dict)
    assert isinstance(done, TurnDone)
    assert made == ["other"], "nothing was made for what was refused"


async def test_a_request_as_large_as_the_limit_is_taken_and_one_byte_more_is_not(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    # max_frame counts the payload: what an empty request has is known, the text fills the rest
    empty = len(body(content="")) - 4
    with trio.fail_after(LIMIT_S):
        async with scripted_server(reply("ok")) as server:
            async with running_daemon(tmp_path, server.url, "[channel]\nmax_frame = 4096") as daemon:
                (refused,) = await say(daemon, body(content="x" * (4097 - empty)))
                taken = await say(daemon, body(content="x" * (4096 - empty)))
    assert refused["body"]["code"] == "bad_frame"
    assert taken[-1]["kind"] == "turn_done"


async def test_a_request_may_come_byte_by_byte(tmp_path: Path, autojump_clock: MockClock) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server(reply("Hi.")) as server, running_daemon(tmp_path, server.url) as daemon:
            stream = await daemon.connect()
            for byte in request():
                await stream.send_all(bytes([byte]))
                await trio.sleep(0.01)
            said = await answers(stream)
    assert said[-1]["kind"] == "turn_done"


@pytest.mark.parametrize("sent", [b"\0", b"\0\0\0\x10", b'\0\0\0\x10{"v":1'])
async def test_eof_inside_a_frame_is_answered_bad_frame(tmp_path: Path, sent: bytes, autojump_clock: MockClock) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
            stream = await daemon.connect()
            await stream.send_all(sent)
            await stream.send_eof()
            (answer,) = await answers(stream)
    assert answer["body"]["code"] == "bad_frame"


async def test_a_peer_that_connects_and_leaves_gets_and_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "boxmaker")
    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
            polite, rude = await daemon.connect(), await daemon.connect()
            await polite.send_eof()
            assert await answers(polite) == []
            await rude.aclose()
            await wait_all_tasks_blocked()
    assert events(caplog) == []


@pytest.mark.parametrize("sent", [b"", b"\0\0", request()[:-1]])
async def test_a_request_that_is_not_whole_within_request_s_is_a_bad_frame(
    tmp_path: Path, sent: bytes, autojump_clock: MockClock
) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
            began = trio.current_time()
            (answer,) = await say(daemon, sent)
            assert trio.current_time() - began == pytest.approx(10)
    assert answer["body"]["code"] == "bad_frame"


async def test_a_byte_now_and_then_does_not_renew_request_s(tmp_path: Path, autojump_clock: MockClock) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server:
            async with running_daemon(tmp_path, server.url, "[channel]\nrequest_s = 2.5") as daemon:
                began = trio.current_time()
                stream = await daemon.connect()
                for byte in request()[:3]:
                    await stream.send_all(bytes([byte]))
                    await trio.sleep(0.8)
                (answer,) = await answers(stream)
                assert trio.current_time() - began == pytest.approx(2.5)
    assert answer["body"]["code"] == "bad_frame"


# -- a peer that leaves ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["half-close", "close"])
async def test_leaving_in_mid_stream_frees_server_and_session_and_keeps_the_user_message(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "boxmaker")
    stuck: Script = [Send(STREAM_HEAD + delta(content="Let me")), Hang()]
    with trio.fail_after(LIMIT_S):
        async with scripted_server(stuck, reply("Hi again.")) as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                peer = await begin(daemon, "s", "first")
                async with peer.stream:
                    assert await peer.next() == Content(text="Let me")
                    await peer.leave(how)
                    await server.completions[0].closed.wait()
                    await until_free(daemon, "s")
                assert server.completions[0].hung_up
                assert [type(record) for record in daemon.log("s")] == [records.SessionStart, records.User]
                done = await daemon.ask("s", "second", resume=True)
                log = daemon.log("s")
    assert done.content == "Hi again."
    assert [record.content for record in log if isinstance(record, records.User)] == ["first", "second"]
    assert events(caplog) == [("turn_end", "cancelled"), ("turn_end", "turn_done")]


async def test_a_peer_that_half_closed_gets_no_more_frames_and_its_connection_ends(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    stuck: Script = [Send(STREAM_HEAD + delta(content="Let me")), Hang()]
    with trio.fail_after(LIMIT_S):
        async with scripted_server(stuck) as server, running_daemon(tmp_path, server.url) as daemon:
            peer = await begin(daemon, "s")
            await peer.next()
            await peer.leave("half-close")
            assert await answers(peer.stream) == []


@pytest.mark.parametrize("how", ["half-close", "close"])
async def test_leaving_in_a_tool_call_gives_every_call_a_result(
    tmp_path: Path, how: str, autojump_clock: MockClock
) -> None:
    port = ScriptedPort([hang])
    calls = reply(calls=[("a", "clock", "{}"), ("b", "clock", '{"x":1}')])
    with trio.fail_after(LIMIT_S):
        async with scripted_server(calls, reply("Back.")) as server:
            async with running_daemon(tmp_path, server.url, port=port) as daemon:
                peer = await begin(daemon, "s")
                async with peer.stream:
                    await port.started.wait()
                    await peer.leave(how)
                    await until_free(daemon, "s")
                results = [record for record in daemon.log("s") if isinstance(record, records.ToolResult)]
                done = await daemon.ask("s", "again", resume=True)
    assert port.cancelled == 1
    assert [(result.tool_call_id, result.call) for result in results] == [("a", 0), ("b", 1)]
    assert "unknown" in results[0].content
    assert "not run" in results[1].content.lower()
    assert done.content == "Back."


@pytest.mark.parametrize("how", ["half-close", "close"])
@pytest.mark.parametrize(
    "script", [pytest.param([Hang()], id="silent"), pytest.param(error_response(503, "overloaded"), id="backing off")]
)
async def test_leaving_while_nothing_is_said_ends_the_turn_at_once(
    tmp_path: Path, how: str, script: Script, autojump_clock: MockClock
) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server(script) as server, running_daemon(tmp_path, server.url) as daemon:
            peer = await begin(daemon, "s")
            async with peer.stream:
                await server.wait_for_completions(1)
                await trio.sleep(0.1)  # the first back-off is 0.5 s
                began = trio.current_time()
                await peer.leave(how)
                await until_free(daemon, "s")
                assert trio.current_time() - began < 0.1
            assert len(server.completions) == 1
            assert daemon.client.hold(0).take_nowait(), "the slot's gate is free"


@pytest.mark.parametrize("how", ["half-close", "close"])
async def test_leaving_while_somebody_else_has_the_slot_ends_the_turn(
    tmp_path: Path, how: str, autojump_clock: MockClock
) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
            server.slots = [{"id": 0, "n_ctx": 4096, "is_processing": True}]
            peer = await begin(daemon, "s")
            async with peer.stream:
                assert await peer.next() == Waiting(slot_busy=True)
                await peer.leave(how)
                await until_free(daemon, "s")
            assert server.completions == []
            assert daemon.client.hold(0).take_nowait(), "the slot's gate is free"


@pytest.mark.parametrize("how", ["half-close", "close"])
async def test_leaving_the_queue_lets_the_others_move_up(tmp_path: Path, how: str, autojump_clock: MockClock) -> None:
    go = trio.Event()
    with trio.fail_after(LIMIT_S):
        async with scripted_server([Until(go), Send(reply("One."))], reply("Three.")) as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                first = await begin(daemon, "one")
                await server.wait_for_completions(1)
                second = await begin(daemon, "two")
                assert await second.next() == Queued(ahead=1)
                third = await begin(daemon, "three")
                assert await third.next() == Queued(ahead=2)
                async with second.stream:
                    await second.leave(how)
                    assert await third.next() == Queued(ahead=1)
                go.set()
                finals = [await first.last(), await third.last()]
    assert [final.content for final in finals if isinstance(final, TurnDone)] == ["One.", "Three."]


# -- what comes after the request --------------------------------------------------------------

AFTER = [
    pytest.param(1, id="with the request"),
    pytest.param(64, id="in pieces"),
]


@pytest.mark.parametrize("pieces", AFTER)
async def test_64_kib_after_the_request_are_dropped(tmp_path: Path, pieces: int, autojump_clock: MockClock) -> None:
    go = trio.Event()
    with trio.fail_after(LIMIT_S):
        async with scripted_server([Until(go), Send(reply("Hi."))]) as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                stream = await daemon.connect()
                for number in range(pieces):
                    await stream.send_all((b"" if number else request()) + b"x" * (65536 // pieces))
                await wait_all_tasks_blocked()
                go.set()
                said = await answers(stream)
    assert [answer["kind"] for answer in said] == ["turn_event", "turn_done"]


@pytest.mark.parametrize("pieces", AFTER)
async def test_one_byte_more_ends_the_turn_with_bad_frame(
    tmp_path: Path, pieces: int, autojump_clock: MockClock
) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server([Hang()]) as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                stream = await daemon.connect()
                for number in range(pieces):
                    await stream.send_all((b"" if number else request()) + b"x" * (65536 // pieces))
                await wait_all_tasks_blocked()
                running = not daemon.is_free("s")
                await stream.send_all(b"x")
                (answer,) = await answers(stream)
                assert daemon.is_free("s")
    assert running
    assert answer["body"]["code"] == "bad_frame"
    assert "65536" in answer["body"]["message"]


# -- a peer that does not read -----------------------------------------------------------------

STALL = STREAM_HEAD + delta(content="y" * 1200) * 300
"""More than a socket takes, and less than stops the scripted server: the daemon can hold the rest."""


async def test_a_reader_that_never_reads_is_cancelled_after_write_timeout_s_and_nobody_else_notices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "boxmaker")
    with trio.fail_after(LIMIT_S):
        async with scripted_server([Send(STALL), Hang()], reply("Hi."), reply("Back.")) as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                began = trio.current_time()
                deaf = await begin(daemon, "deaf")
                await server.wait_for_completions(1)
                other = await daemon.turn("other", "hi", resume=False)
                assert trio.current_time() - began == pytest.approx(30)
                assert server.completions[0].hung_up
                assert daemon.is_free("deaf")
                done = await daemon.ask("deaf", "are you there?", resume=True)
                await deaf.stream.aclose()
    assert other[0] == Queued(ahead=1)
    assert isinstance(other[-1], TurnDone)
    assert done.content == "Back."
    assert events(caplog) == [
        ("channel_stalled", None),
        ("turn_end", "cancelled"),
        ("turn_end", "turn_done"),
        ("turn_end", "turn_done"),
    ]


async def test_a_channel_that_stalls_in_tool_calls_leaves_every_call_with_a_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    # The text fills the socket's buffers, the events of the calls (two each) the memory channel: the
    # turn stands still in the middle of its calls until the write times out.
    caplog.set_level(logging.INFO, "boxmaker")
    calls = [(f"c{number}", "clock", f'{{"n":{number}}}') for number in range(150)]
    with trio.fail_after(LIMIT_S):
        async with scripted_server(reply("y" * 500_000, calls=calls)) as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                peer = await begin(daemon, "s")
                await trio.sleep(29)
                assert not daemon.is_free("s")
                await trio.sleep(2)
                assert daemon.is_free("s")
                log = daemon.log("s")
                await peer.stream.aclose()
    results = [record for record in log if isinstance(record, records.ToolResult)]
    assert [record.tool_call_id for record in results] == [call_id for call_id, _, _ in calls]
    assert "not run" in results[-1].content.lower()
    assert events(caplog) == [("channel_stalled", None), ("turn_end", "cancelled")]


async def talk_forever(turn: Request, emit: Emit, stop: object) -> TurnDone:
    """A turn that never stops talking."""
    while True:
        await emit([Content(text="y" * 1000)])
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("how", ["never reads", "closes", "half-closes"])
async def test_a_peer_that_goes_while_events_flow_is_no_fault_of_ours(
    caplog: pytest.LogCaptureFixture, how: str, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "boxmaker")
    ours, theirs = trio.socket.socketpair()
    with trio.fail_after(LIMIT_S):
        async with trio.SocketStream(ours) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(serve_connection, trio.SocketStream(theirs), Channel(), talk_forever, Closing())
            await stream.send_all(request())
            if how != "never reads":
                await stream.receive_some(300_000)
            if how == "closes":
                await stream.aclose()
            if how == "half-closes":
                await stream.send_eof()
    stalled = [("channel_stalled", None)] if how == "never reads" else []
    assert events(caplog) == [*stalled, ("turn_end", "cancelled")]


async def test_a_reader_that_is_only_slow_gets_everything(tmp_path: Path, autojump_clock: MockClock) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server(STALL + ending()) as server, running_daemon(tmp_path, server.url) as daemon:
            peer = await begin(daemon, "s")
            async with peer.stream:
                count = 0
                while not isinstance(answer := await peer.next(), TurnDone):
                    count += 1
                    if count % 100 == 0:
                        await trio.sleep(7)  # one write is at most 256 events: it is taken within 30 s
    assert count == 300
    assert answer.content == "y" * 1200 * 300


# -- one turn a session ------------------------------------------------------------------------


async def test_a_busy_session_is_answered_at_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    go = trio.Event()
    with trio.fail_after(LIMIT_S):
        async with scripted_server([Until(go), Send(reply("One."))]) as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                first = await begin(daemon, "s")
                await server.wait_for_completions(1)
                began = trio.current_time()
                busy = await daemon.fail("s", "me too", resume=True)
                exists = await daemon.fail("s", "me too", resume=False)
                assert trio.current_time() == began
                go.set()
                done = await first.last()
                users = [record.content for record in daemon.log("s") if isinstance(record, records.User)]
    assert (busy.code, busy.detail) == (ErrorCode.SESSION_BUSY, {"session": "s"})
    assert (exists.code, exists.detail) == (ErrorCode.SESSION_EXISTS, {"session": "s"})
    assert isinstance(done, TurnDone)
    assert users == ["hi"]


async def test_a_turn_waits_for_one_whose_channel_has_gone(tmp_path: Path, autojump_clock: MockClock) -> None:
    async def slow_to_stop(_: ToolRequest) -> ToolResponse:
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(10, shield=True):
                await trio.sleep(3)
        raise AssertionError("slept forever")

    port = ScriptedPort([slow_to_stop])
    with trio.fail_after(LIMIT_S):
        async with scripted_server(CLOCK_CALL, reply("Back.")) as server:
            async with running_daemon(tmp_path, server.url, port=port) as daemon:
                peer = await begin(daemon, "s")
                await port.started.wait()
                await peer.leave()
                await wait_all_tasks_blocked()
                assert not daemon.is_free("s")
                began = trio.current_time()
                done = await daemon.ask("s", "again", resume=True)
                assert trio.current_time() - began == pytest.approx(3)
    assert done.content == "Back."


async def test_a_turn_sent_in_the_moment_of_a_hang_up_is_never_busy(tmp_path: Path, autojump_clock: MockClock) -> None:
    # Tasks run in any order: in some rounds the new request is read before the watcher of the old
    # connection has seen its end.
    rounds = 30
    with trio.fail_after(LIMIT_S):
        async with scripted_server(*[[Hang()]] * rounds, reply("At last.")) as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                peer = await begin(daemon, "s", "0")
                for number in range(1, rounds + 1):
                    await server.wait_for_completions(number)
                    stream = await daemon.connect()
                    turn = Turn(session=parse_session_id("s"), content=str(number), resume=True)
                    await wait_all_tasks_blocked()
                    peer.stream.socket.close()  # no step of the loop between this and the request
                    await stream.send_all(encode_request(turn))
                    peer = Peer(stream, TurnChannel(stream))
                done = await peer.last()
    assert isinstance(done, TurnDone), done


async def test_fifty_turns_each_sent_right_after_a_final_frame_are_never_busy(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scripts: list[Script] = [reply("ok") if number % 2 else error_response(400, "no") for number in range(50)]
    finals = []
    with trio.fail_after(LIMIT_S):
        async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
            for number in range(50):
                peer = await begin(daemon, "s", str(number), resume=number > 0)
                while not (frame := await peer.channel.receive()).final:
                    pass
                assert daemon.is_free("s")
                hold = daemon.client.hold(0)
                assert hold.take_nowait(), "the slot's gate is free"
                hold.give_back()
                finals.append(type(frame.answer))
                await peer.stream.aclose()
    assert finals == [WireError, TurnDone] * 25


# -- the end of the daemon ---------------------------------------------------------------------


async def test_when_the_daemon_closes_requests_still_being_read_are_answered_shutting_down(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
            silent, half = await daemon.connect(), await daemon.connect()
            await half.send_all(request()[:20])
            await wait_all_tasks_blocked()
            began = trio.current_time()
            daemon.closing.begin()
            late = await daemon.connect()
            with suppress(trio.BrokenResourceError):  # answered before it was read
                await late.send_all(request())
            said = [await answers(stream) for stream in (silent, half, late)]
            await daemon.closing.wait_no_turns()
            assert trio.current_time() == began
            made = list(daemon.store.directory.iterdir())
    assert [[answer["body"]["code"] for answer in each] for each in said] == [["shutting_down"]] * 3
    assert made == []


async def test_a_turn_that_runs_when_the_daemon_closes_may_finish(tmp_path: Path, autojump_clock: MockClock) -> None:
    script: Script = [Send(STREAM_HEAD + delta(content="so")), Pause(5), Send(delta(content="on") + ending())]
    with trio.fail_after(LIMIT_S):
        async with scripted_server(script) as server, running_daemon(tmp_path, server.url) as daemon:
            peer = await begin(daemon, "s")
            await peer.next()
            daemon.closing.begin()
            began = trio.current_time()
            await daemon.closing.wait_no_turns()
            assert trio.current_time() - began == pytest.approx(5)
            done = await peer.last()
    assert isinstance(done, TurnDone)
    assert done.content == "soon"


async def test_a_turn_cancelled_at_the_end_of_the_grace_is_told_so_and_its_log_is_whole(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    port = ScriptedPort([hang])
    with trio.fail_after(LIMIT_S):
        async with scripted_server(CLOCK_CALL) as server:
            async with running_daemon(tmp_path, server.url, port=port) as daemon:
                peer = await begin(daemon, "s")
                await port.started.wait()
                daemon.closing.begin()
                daemon.closing.cancel_turns()
                await daemon.closing.wait_no_turns()
                final = await peer.last()
                log = daemon.log("s")
    assert isinstance(final, WireError)
    assert (final.code, final.detail) == (ErrorCode.SHUTTING_DOWN, {})
    assert isinstance(log[-1], records.ToolResult)
    assert log[-1].tool_call_id == "a"


# -- turns of the test's own -------------------------------------------------------------------


async def served(run_turn: Answering, closing: Closing | None = None) -> list[Any]:
    """Every frame of one connection that is served with a turn of the test."""
    ours, theirs = trio.socket.socketpair()
    found: list[Any] = []
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_connection, trio.SocketStream(theirs), Channel(), run_turn, closing or Closing())
            stream = trio.SocketStream(ours)
            await stream.send_all(body(content="my secret"))
            found += await answers(stream)
    return found


def raising(*errors: Exception) -> Answering:
    """A turn that says something, and then ends with an exception or a group of several."""

    async def run_turn(turn: Request, emit: Emit, stop: object) -> TurnDone:
        await emit([Content(text="so far")])
        if len(errors) == 1:
            raise errors[0]
        raise ExceptionGroup("several", errors)

    return run_turn


async def test_a_fault_inside_a_turn_is_answered_internal_and_logged_without_its_text(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    event, final = await served(raising(ValueError("invalid literal: 'my secret'")))
    assert event["body"] == {"event": {"type": "content", "text": "so far"}}
    assert final["body"]["code"] == "internal"
    assert "my secret" not in json.dumps(final), "a channel is not told of our insides"
    lines = [KeyValueFormatter().format(record) for record in caplog.records if record.levelno == logging.ERROR]
    (line,) = lines
    assert "event=internal_error" in line
    assert "ValueError" in line
    assert "test_server.py" in line, "the place is named"
    assert "my secret" not in line
    assert "so far" not in line


FULL = SessionFull(message="no room")


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([FULL], "session_full"),
        ([ExceptionGroup("inner", [FULL])], "session_full"),
        ([FULL, StorageError(action="write", file=Path("f"), reason="full")], "session_full"),
        ([FULL, ValueError("a bug")], "internal"),
    ],
)
async def test_errors_of_ours_in_a_group_are_answered_as_themselves_and_a_mixed_group_is_a_fault(
    errors: Sequence[Exception], code: str, autojump_clock: MockClock
) -> None:
    _, final = await served(raising(*errors))
    assert final["body"]["code"] == code


async def test_a_turn_that_ends_by_itself_while_it_is_cancelled_keeps_its_answer(autojump_clock: MockClock) -> None:
    closing = Closing()
    usage = Figures(cache_n=0, prompt_n=1, predicted_n=1, reasoning_tokens=0, thinking_capped=False)

    async def run_turn(turn: Request, emit: Emit, stop: object) -> TurnDone:
        closing.begin()
        closing.cancel_turns()
        return TurnDone(content="done all the same", usage=usage)

    (final,) = await served(run_turn, closing)
    assert final["kind"] == "turn_done"


@pytest.mark.parametrize("ours", [True, False])
async def test_a_peer_of_another_user_is_refused_before_it_is_read(
    caplog: pytest.LogCaptureFixture, ours: bool, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "boxmaker")
    asked = []

    async def run_turn(turn: Request, emit: Emit, stop: object) -> TurnDone:
        asked.append(turn)
        raise FULL

    here, there = trio.socket.socketpair()
    owner = os.geteuid() if ours else os.geteuid() + 1
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_connection, trio.SocketStream(there), Channel(), run_turn, Closing(), owner)
            stream = trio.SocketStream(here)
            await stream.send_all(request())
            (answer,) = await answers(stream)
    assert answer["body"]["code"] == ("session_full" if ours else "bad_request")
    assert len(asked) == ours
    if not ours:
        assert f"uid {owner}" in answer["body"]["message"]
        assert events(caplog) == [("peer_refused", None)]
