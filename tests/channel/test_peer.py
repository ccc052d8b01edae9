"""Who may speak to the daemon: its own uid, by SO_PEERCRED."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
import trio

from boxmaker.channel.client import TurnChannel
from boxmaker.channel.peer import peer_uid
from boxmaker.channel.server import Closing, Emit, serve_connection
from boxmaker.config import Channel
from boxmaker.proto.channel import ErrorCode, Request, Turn, TurnDone, WireError
from boxmaker.proto.chat import Figures
from boxmaker.proto.frames import encode_request
from boxmaker.proto.ids import SessionId

TURN = encode_request(Turn(session=SessionId("s"), content="hi", resume=False))


async def answer(turn: Request, emit: Emit, stop: object) -> TurnDone:
    figures = Figures(cache_n=None, prompt_n=None, predicted_n=None, reasoning_tokens=0, thinking_capped=False)
    return TurnDone(content="served", usage=figures)


async def ask(owner_uid: int | None) -> TurnDone | WireError:
    ours, theirs = trio.socket.socketpair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_connection, trio.SocketStream(theirs), Channel(), answer, Closing(), owner_uid)
        async with trio.SocketStream(ours) as stream:
            await stream.send_all(TURN)
            with trio.fail_after(5):
                found = (await TurnChannel(stream).receive()).answer
    assert isinstance(found, TurnDone | WireError)
    return found


async def test_a_peer_with_our_uid_is_served() -> None:
    assert isinstance(await ask(os.geteuid()), TurnDone)


async def test_a_peer_with_another_uid_is_refused_before_its_request_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "boxmaker")
    found = await ask(os.geteuid() + 1)
    assert isinstance(found, WireError)
    assert found.code == ErrorCode.BAD_REQUEST
    assert found.message == f"$: loopd serves uid {os.geteuid() + 1} alone, you are {os.geteuid()}"
    assert [record.message for record in caplog.records] == ["peer_refused"]


async def test_the_uid_is_the_peers_own() -> None:
    ours, theirs = trio.socket.socketpair()
    with ours, theirs:
        assert peer_uid(trio.SocketStream(theirs)) == os.geteuid()


@pytest.mark.real
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a process of another uid")
async def test_a_process_of_another_user_is_refused_on_a_real_socket() -> None:
    """The socket is opened to all on purpose: the check must hold where the mode does not."""
    with tempfile.TemporaryDirectory(prefix="bx") as name:
        directory = Path(name)
        directory.chmod(0o755)  # noqa: ASYNC240  # a temporary directory
        path = directory / "s"
        listener = trio.socket.socket(trio.socket.AF_UNIX)
        await listener.bind(str(path))
        path.chmod(0o777)  # the same
        listener.listen(5)

        async def serve(stream: trio.SocketStream) -> None:
            await serve_connection(stream, Channel(), answer, Closing(), os.geteuid())

        code = (
            "import os, socket, sys\nos.setuid(65534)\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n"
            "try:\n    s.sendall(bytes.fromhex(sys.argv[2]))\nexcept BrokenPipeError:\n    pass\n"  # refused unread
            "print(s.recv(65536)[4:].decode())"
        )
        command = [sys.executable, "-c", code, str(path), TURN.hex()]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(listener)])
            with trio.fail_after(30):
                done = await trio.run_process(command, capture_stdout=True)
            nursery.cancel_scope.cancel()
    assert b'"code":"bad_request"' in done.stdout
    assert b"you are 65534" in done.stdout
