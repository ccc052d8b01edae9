"""Tests of the client half, against a loopd of bytes: what it reads, and how it ends."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from boxmaker.channel.client import Frame, open_turn
from boxmaker.errors import BadFrame, BadRequest, ChannelClosed, NobodyListens, UnsupportedVersion, ValueRefused
from boxmaker.proto.channel import ErrorCode, Turn, TurnDone, WireError
from boxmaker.proto.chat import Content, Figures
from boxmaker.proto.ids import SessionId

LIMIT_S = 60

TURN = Turn(session=SessionId("s"), content="hi ⏎", resume=False)
REQUEST = '{"v":1,"kind":"turn","final":true,"body":{"session":"s","content":"hi ⏎","resume":false}}'.encode()

CONTENT = b'{"v":1,"kind":"turn_event","final":false,"body":{"event":{"type":"content","text":"Hi."}}}'
UNKNOWN = b'{"v":1,"kind":"turn_event","final":false,"body":{"event":{"type":"mood","level":3,"of":{"x":[1]}}}}'
DONE = (
    b'{"v":1,"kind":"turn_done","final":true,"body":{"content":"Hi.","usage":{"cache_n":1,"prompt_n":2,'
    b'"predicted_n":3,"reasoning_tokens":0,"thinking_capped":false}}}'
)
FAILED = b'{"v":1,"kind":"error","final":true,"body":{"code":"session_busy","message":"busy","detail":{"session":"s"}}}'


def framed(*payloads: bytes) -> bytes:
    """Frames by hand."""
    return b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads)


Handler = Callable[[trio.SocketStream], Awaitable[None]]


@asynccontextmanager
async def listening(path: Path, handler: Handler) -> AsyncIterator[None]:
    """Serve a unix socket until the block is left."""
    listener = trio.socket.socket(socket.AF_UNIX)
    await listener.bind(str(path))
    listener.listen()
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, handler, [trio.SocketListener(listener)])
            yield
            nursery.cancel_scope.cancel()


def saying(raw: bytes, chunk_bytes: int = 1 << 20) -> Handler:
    """A loopd that reads the request, sends these bytes, and hangs up."""

    async def handler(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(1 << 20)
            with suppress(trio.BrokenResourceError):
                for at in range(0, len(raw), chunk_bytes):
                    await stream.send_all(raw[at : at + chunk_bytes])
                    await trio.lowlevel.checkpoint()

    return handler


async def frames_of(path: Path) -> list[Frame]:
    """The frames of one turn, to the final one."""
    found: list[Frame] = []
    async with open_turn(path, TURN) as channel:
        while not found or not found[-1].final:
            found.append(await channel.receive())
    return found


async def test_the_request_is_one_frame_to_the_byte(short_dir: Path, autojump_clock: MockClock) -> None:
    received = b""

    async def handler(stream: trio.SocketStream) -> None:
        nonlocal received
        async with stream:
            while len(received) < len(framed(REQUEST)):
                received += await stream.receive_some(1 << 20)
            await stream.send_all(framed(DONE))

    async with listening(short_dir / "s", handler):
        await frames_of(short_dir / "s")
    assert received == framed(REQUEST)


@pytest.mark.parametrize("chunk_bytes", [1, 3, 97, 1 << 20])
async def test_frames_are_the_same_however_they_are_cut(
    short_dir: Path, chunk_bytes: int, autojump_clock: MockClock
) -> None:
    async with listening(short_dir / "s", saying(framed(CONTENT, CONTENT, DONE), chunk_bytes)):
        found = await frames_of(short_dir / "s")
    usage = Figures(cache_n=1, prompt_n=2, predicted_n=3, reasoning_tokens=0, thinking_capped=False)
    assert [frame.answer for frame in found] == [
        Content(text="Hi."),
        Content(text="Hi."),
        TurnDone(content="Hi.", usage=usage),
    ]
    assert [frame.final for frame in found] == [False, False, True]
    assert found[0].body == {"event": {"type": "content", "text": "Hi."}}


async def test_an_error_is_a_final_frame_like_any_other(short_dir: Path, autojump_clock: MockClock) -> None:
    async with listening(short_dir / "s", saying(framed(FAILED))):
        (found,) = await frames_of(short_dir / "s")
    assert found.answer == WireError(code=ErrorCode.SESSION_BUSY, message="busy", detail={"session": "s"})


async def test_an_event_of_an_unknown_type_is_given_with_its_body_and_no_meaning(
    short_dir: Path, autojump_clock: MockClock
) -> None:
    async with listening(short_dir / "s", saying(framed(UNKNOWN, DONE))):
        unknown, done = await frames_of(short_dir / "s")
    assert unknown.answer is None
    assert unknown.body == json.loads(UNKNOWN)["body"]
    assert not unknown.final
    assert isinstance(done.answer, TurnDone)


@pytest.mark.parametrize("raw", [b"", framed(CONTENT), framed(CONTENT, DONE)[:-1], framed(CONTENT) + b"\0\0"])
async def test_loopd_going_away_before_its_final_frame_is_channel_closed(
    short_dir: Path, raw: bytes, autojump_clock: MockClock
) -> None:
    async with listening(short_dir / "s", saying(raw)):
        with pytest.raises(ChannelClosed):
            await frames_of(short_dir / "s")


async def test_a_reset_is_channel_closed_too(short_dir: Path, autojump_clock: MockClock) -> None:
    async def handler(stream: trio.SocketStream) -> None:
        await trio.sleep(1)  # the request is there, and is thrown away unread: that is a reset
        await trio.aclose_forcefully(stream)

    async with listening(short_dir / "s", handler):
        with pytest.raises(ChannelClosed):
            await frames_of(short_dir / "s")


async def test_an_answer_to_a_request_that_was_not_read_whole_is_received(
    short_dir: Path, autojump_clock: MockClock
) -> None:
    async def handler(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(100)
            await stream.send_all(framed(FAILED))

    large = Turn(session=SessionId("s"), content="x" * 3_000_000, resume=False)
    async with listening(short_dir / "s", handler), open_turn(short_dir / "s", large) as channel:
        frame = await channel.receive()
    assert isinstance(frame.answer, WireError)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"\0\0\0\0", BadFrame),
        ((64 * 1024 * 1024 + 1).to_bytes(4, "big") + b"{", BadFrame),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", BadFrame),
        (framed(b"not json"), BadFrame),
        (framed(DONE.replace(b'"v":1', b'"v":2')), UnsupportedVersion),
        (framed(DONE.replace(b"turn_done", b"turn_gone")), BadRequest),
        (framed(CONTENT.replace(b'"Hi."', b"7")), BadRequest),
        (framed(FAILED.replace(b"session_busy", b"no_such_code")), BadRequest),
    ],
)
async def test_a_loopd_that_speaks_another_protocol_is_a_named_error(
    short_dir: Path, raw: bytes, error: type[Exception], autojump_clock: MockClock
) -> None:
    async with listening(short_dir / "s", saying(raw)):
        with pytest.raises(error):
            await frames_of(short_dir / "s")


async def test_leaving_the_block_hangs_up(short_dir: Path, autojump_clock: MockClock) -> None:
    gone = trio.Event()

    async def handler(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(framed(CONTENT))
            while await stream.receive_some(1 << 20):
                pass
            gone.set()

    async with listening(short_dir / "s", handler):
        async with open_turn(short_dir / "s", TURN) as channel:
            await channel.receive()
        await gone.wait()


async def test_a_cancelled_receive_loses_no_frame(short_dir: Path, autojump_clock: MockClock) -> None:
    half = len(framed(CONTENT)) // 2

    async def handler(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(framed(CONTENT)[:half])
            await trio.sleep(10)
            await stream.send_all(framed(CONTENT)[half:] + framed(DONE))

    async with listening(short_dir / "s", handler), open_turn(short_dir / "s", TURN) as channel:
        with trio.move_on_after(5) as scope:
            await channel.receive()
        assert scope.cancelled_caught
        assert (await channel.receive()).answer == Content(text="Hi.")
        assert (await channel.receive()).final


async def test_a_turn_that_no_loopd_would_take_is_refused_before_anything_is_sent(
    short_dir: Path, autojump_clock: MockClock
) -> None:
    bad = Turn(session=SessionId("s"), content="\ud800", resume=False)
    with pytest.raises(ValueRefused):
        async with open_turn(short_dir / "nobody", bad):
            pass


# -- nobody there ------------------------------------------------------------------------------


async def refused(path: Path) -> NobodyListens:
    """The error of a path that nobody listens on."""
    with trio.fail_after(LIMIT_S), pytest.raises(NobodyListens) as caught:
        async with open_turn(path, TURN):
            pass
    assert caught.value.path == path
    assert str(path) in str(caught.value)
    return caught.value


async def test_no_file_no_listener_a_file_and_a_directory_are_each_nobody(
    short_dir: Path, autojump_clock: MockClock
) -> None:
    dead, file = short_dir / "dead", short_dir / "file"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))
    file.write_text("", "utf-8")
    assert (await refused(short_dir / "none")).reason == "no such socket"
    assert (await refused(short_dir / "no" / "directory")).reason == "no such socket"
    assert (await refused(dead)).reason == "connection refused"
    assert (await refused(file)).reason == "connection refused"
    assert (await refused(file / "below")).reason == "not a directory"
    assert (await refused(short_dir)).reason == "connection refused"


async def test_a_path_of_107_bytes_is_used_and_one_of_108_is_refused_with_the_limit(
    short_dir: Path, autojump_clock: MockClock
) -> None:
    room = 107 - len(str(short_dir).encode()) - 1
    longest = short_dir / ("é" + "x" * (room - 2))  # bytes count, not characters
    assert len(str(longest).encode()) == 107
    async with listening(longest, saying(framed(DONE))):
        assert (await frames_of(longest))[-1].final
    too_long = longest.with_name(longest.name + "x")
    assert "107 bytes" in (await refused(too_long)).reason


async def test_a_daemon_whose_queue_of_connections_is_full_is_not_taken_for_one_that_hung_up(
    short_dir: Path, autojump_clock: MockClock
) -> None:
    path = short_dir / "s"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))  # a backlog of 0 takes one
        assert "busy" in (await refused(path)).reason
