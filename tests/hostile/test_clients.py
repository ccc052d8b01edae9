"""Clients that lie, stop, crawl, flood and hang up: the connection that does it suffers, and nobody else."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from boxmaker.channel.client import open_turn
from boxmaker.proto import records
from boxmaker.proto.channel import ErrorCode, Turn, TurnDone, WireError
from boxmaker.proto.chat import Content
from boxmaker.proto.ids import SessionId
from boxmaker.session.logs import check
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.server import (
    STREAM_HEAD,
    Hang,
    Script,
    Send,
    Until,
    delta,
    ending,
    error_response,
    reply,
    scripted_server,
)
from tests.frames import rest, taken_apart
from tests.loopd.daemon_process import LoopdProcess, loopd_serve, open_files, resident_mib, write_config

LIMIT_S = 100_000
"""Virtual seconds: no test comes near it unless something hangs."""
REAL_LIMIT_S = 60


def request(session: str = "s", content: str = "hi", *, resume: bool = True, **more: Any) -> bytes:
    """A frame made by hand."""
    envelope = {"v": 1, "kind": "turn", "final": True} | more
    envelope["body"] = {"session": session, "content": content, "resume": resume}
    payload = json.dumps(envelope).encode()
    return len(payload).to_bytes(4, "big") + payload


async def read_bytes(stream: trio.SocketStream, count: int) -> bytes:
    """Exactly that many bytes."""
    raw = b""
    while len(raw) < count:
        data = await stream.receive_some(count - len(raw))
        assert data, raw
        raw += data
    return raw


@asynccontextmanager
async def a_good_turn(daemon: Daemon, go: trio.Event) -> AsyncIterator[None]:
    """While the block runs, a well-behaved client is in mid-answer; then it gets the rest of it, whole."""
    stream, channel = await daemon.open("good", "hi", resume=False)
    async with stream:
        assert (await channel.receive()).answer == Content(text="So ")
        yield
        go.set()
        assert (await channel.receive()).answer == Content(text="good.")
        done = (await channel.receive()).answer
    assert isinstance(done, TurnDone)
    assert done.content == "So good."


def good_script(go: trio.Event) -> Script:
    """Says nothing of its cache, so that no loss of it can be seen."""
    figures = ending(cache_n=None, prompt_n=None, predicted_n=None)
    return [Send(STREAM_HEAD + delta(content="So ")), Until(go), Send(delta(content="good.") + figures)]


# -- hanging up at any byte ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closes", "half-closes"])
async def test_a_request_that_ends_at_any_byte_begins_nothing(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level("INFO", "boxmaker")
    raw = request("bad", "Grüße", resume=False)
    go = trio.Event()
    answered: Counter[str] = Counter()
    with trio.fail_after(LIMIT_S):
        async with scripted_server(good_script(go)) as server, running_daemon(tmp_path, server.url) as daemon:
            async with a_good_turn(daemon, go):
                for count in range(len(raw)):
                    stream = await daemon.connect()
                    async with stream:
                        if count:
                            await stream.send_all(raw[:count])
                        if how == "half-closes":
                            await stream.send_eof()
                            for answer in taken_apart(await rest(stream)):
                                assert answer["final"] is True
                                answered[answer["body"]["code"]] += 1
            assert [path.name for path in daemon.store.directory.iterdir()] == ["good"]
            assert len(server.completions) == 1
    assert answered == ({"bad_frame": len(raw) - 1} if how == "half-closes" else {})
    assert [record.getMessage() for record in caplog.records] == ["turn_end"], "of the good client alone"


def said(daemon: Daemon, session: str, offset: int) -> list[str]:
    """What the log of a session holds behind an offset, by the records' types."""
    with (daemon.store.directory / session / "0.jsonl").open("rb") as log:
        log.seek(offset)
        return [json.loads(line)["type"] for line in log]


async def test_an_answer_that_is_left_at_any_byte_leaves_a_session_that_works(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    # A session whose every turn is left one byte later: in the first piece of the answer while the server speaks, in
    # the others while the turn ends; who has seen a byte of the final frame was told of what is in the log.
    piece = b'{"v":1,"kind":"turn_event","final":false,"body":{"event":{"type":"content","text":"So "}}}'
    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
            server.slots = error_response(404, "File Not Found")  # asked once: hundreds of turns follow
            server.scripts = [good_script(_set())]
            await daemon.ask("s", "begin", resume=False)
            server.scripts = [good_script(_set())]
            stream, _ = await daemon.open("s", "how long is it?", resume=True)
            async with stream:
                whole = await rest(stream)
            first = 4 + len(piece)
            assert whole[4:first] == piece
            *events, _ = taken_apart(whole)
            final_at = whole.index(b'{"v":1,"kind":"turn_done"') - 4
            assert [event["kind"] for event in events] == ["turn_event"] * 2
            turn = ["user", "assistant", "usage"]
            log = daemon.store.directory / "s" / "0.jsonl"
            assert said(daemon, "s", 0) == ["session_start", *turn * 2]
            size = log.stat().st_size
            for count in range(len(whole)):
                go = trio.Event()
                server.scripts = [good_script(go)]
                stream, _ = await daemon.open("s", f"turn {count}", resume=True)
                async with stream:
                    if count > first:
                        go.set()
                    assert await read_bytes(stream, count) == whole[:count]
                    if count <= first:
                        await server.wait_for_completions(count + 3)
                began = trio.current_time()
                await daemon.until_free("s")
                assert trio.current_time() - began < 1, "its end waits for no limit of ours"
                left = said(daemon, "s", size)
                size = log.stat().st_size
                assert left in ([turn] if count > final_at else [turn, turn[:1]] if count > first else [turn[:1]])
            server.scripts = [reply("Still here.")]
            assert (await daemon.ask("s", "and now?", resume=True)).content == "Still here."
            assert check(daemon.store.directory, SessionId("s")) == []
            bodies = server.bodies
    heads = [body[: body.index(b'],"tools"')] for body in bodies]
    assert all(later.startswith(earlier) for earlier, later in pairwise(heads))


def _set() -> trio.Event:
    event = trio.Event()
    event.set()
    return event


# -- slow and dead readers -----------------------------------------------------------------------


async def test_a_reader_of_a_byte_a_second_is_cut_off_and_the_next_in_the_queue_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level("INFO", "boxmaker")
    much = STREAM_HEAD + delta(content="y" * 1200) * 300

    async def crawl(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some(1):  # noqa: ASYNC110  # a slow reader, not a wait for anything
                await trio.sleep(1)

    with trio.fail_after(LIMIT_S):
        async with scripted_server([Send(much), Hang()], reply("Hi.")) as server:
            async with running_daemon(tmp_path, server.url) as daemon, trio.open_nursery() as nursery:
                crawling, _ = await daemon.open("slow", "hi", resume=False)
                nursery.start_soon(crawl, crawling)
                await server.wait_for_completions(1)
                began = trio.current_time()
                assert (await daemon.ask("good", "hi", resume=False)).content == "Hi."
                waited = trio.current_time() - began
                assert server.completions[0].hung_up
                assert said(daemon, "slow", 0) == ["session_start", "user"]
                nursery.cancel_scope.cancel()
                await crawling.aclose()
    assert waited == pytest.approx(30), "[channel] write_timeout_s"
    assert [record.getMessage() for record in caplog.records] == ["channel_stalled", "turn_end", "turn_end"]


@pytest.fixture
def bxctl_say() -> Callable[[Path], list[str]]:
    def command(path: Path) -> list[str]:
        return [sys.executable, "-m", "boxmaker.bxctl", "chat", "--session", "s", "--say", "hi", "--socket", str(path)]

    return command


@asynccontextmanager
async def process_of(command: list[str]) -> AsyncIterator[trio.Process]:
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    async with process.stdout, process.stderr:
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


async def to_the_end(stream: trio.abc.ReceiveStream | None) -> bytes:
    assert stream is not None
    return b"".join([data async for data in stream])


@pytest.mark.real
async def test_a_bxctl_that_is_stopped_gets_its_answer_later_if_it_fits_and_is_cut_off_if_it_does_not(
    short_dir: Path, bxctl_say: Callable[[Path], list[str]]
) -> None:
    go, more = trio.Event(), trio.Event()
    much = delta(content="y" * 1200) * 800
    short: Script = [Send(STREAM_HEAD + delta(content="So ")), Until(go), Send(delta(content="short.") + ending())]
    long: Script = [Send(STREAM_HEAD + delta(content="So ")), Until(more), Send(much), Hang()]
    config = "[channel]\nwrite_timeout_s = 0.3"
    with trio.fail_after(REAL_LIMIT_S):
        async with scripted_server(reply("Begun."), short, reply("Hi.")) as server:
            async with loopd_serve(write_config(short_dir, server.url, config)) as daemon:
                assert isinstance(await daemon.turn("s", "begin", resume=False), TurnDone)

                async with process_of(bxctl_say(daemon.socket)) as bxctl:
                    await server.wait_for_completions(2)
                    bxctl.send_signal(signal.SIGSTOP)
                    go.set()
                    await daemon.wait_for("ending=turn_done", 2)
                    done = await daemon.turn("s", "in between", resume=True)
                    bxctl.send_signal(signal.SIGCONT)
                    assert await to_the_end(bxctl.stdout) == b"So short.\n"
                    assert await bxctl.wait() == 0
                assert isinstance(done, TurnDone)

                server.scripts = [long, reply("Hi.")]
                async with process_of(bxctl_say(daemon.socket)) as bxctl:
                    await server.wait_for_completions(4)
                    bxctl.send_signal(signal.SIGSTOP)
                    more.set()
                    await daemon.wait_for("event=channel_stalled")
                    done = await daemon.turn("s", "in between", resume=True)
                    bxctl.send_signal(signal.SIGCONT)
                    err = await to_the_end(bxctl.stderr)
                    assert await bxctl.wait() == 1
                assert isinstance(done, TurnDone)
                assert b"bxctl: channel_closed: " in err
                assert b"Traceback" not in err
                assert await daemon.stop(signal.SIGTERM) == 0
    assert "Traceback" not in daemon.log


# -- many at once --------------------------------------------------------------------------------


async def until_files(pid: int, count: int) -> None:
    """Wait until the daemon has closed what its clients have left."""
    while open_files(pid) > count:  # noqa: ASYNC110  # what happens is in another process
        await trio.sleep(0.02)


def connected(path: Path) -> socket.socket:
    """A connection whose other end must act within the limit."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(REAL_LIMIT_S)
    sock.connect(str(path))
    return sock


def heard(sock: socket.socket) -> bytes:
    """What comes until the connection ends; closes our end."""
    raw = b""
    with sock, suppress(ConnectionResetError):
        while data := sock.recv(65536):
            raw += data
    return raw


MIB_PROMISED = (1024 * 1024).to_bytes(4, "big")
WAITING = 4
"""The first of the ten keep their connection open and wait for more."""


def one_of_ten(at: int) -> bytes:
    """What the connection of that number sends; each asks for a session of its own, but where `s` is asked for."""
    good = request(f"nobody{at}")
    ten = [
        b"",  # silent
        b"\x00\x00",  # half a length
        MIB_PROMISED + b"{",  # a frame of which nothing more comes
        good[:-1],
        b"GET / HTTP/1.1\r\n\r\n",
        request("nobody", v=2),
        good,
        request("s"),  # a good client has it
        b"\xff" * 3000,
        good + b"x" * 100,
    ]
    return ten[at % 10]


@pytest.mark.real
async def test_of_500_connections_at_once_each_gets_its_own_answer_and_a_good_one_is_served(short_dir: Path) -> None:
    # A quarter of a MiB a connection would be over the bound: memory is for bytes that came, not for those promised.
    go = trio.Event()
    with trio.fail_after(REAL_LIMIT_S):
        async with scripted_server(good_script(go), reply("Hi.")) as server:
            async with loopd_serve(write_config(short_dir, server.url, "[channel]\nrequest_s = 30")) as daemon:
                pid = daemon.process.pid
                files = open_files(pid)
                turn = Turn(session=SessionId("s"), content="hi", resume=False)
                async with open_turn(daemon.socket, turn) as good:
                    assert (await good.receive()).answer == Content(text="So ")
                    memory_mib = resident_mib(pid)
                    socks = [connected(daemon.socket) for _ in range(500)]
                    try:
                        for at, sock in enumerate(socks):
                            with suppress(BrokenPipeError):  # refused before it was all read
                                sock.sendall(one_of_ten(at))
                        answered: Counter[tuple[int, str]] = Counter()
                        for at, sock in enumerate(socks):
                            if at % 10 >= WAITING:
                                (frame,) = taken_apart(await trio.to_thread.run_sync(heard, sock))
                                answered[at % 10, frame["body"]["code"]] += 1
                        assert open_files(pid) >= files + 50 * WAITING
                        assert resident_mib(pid) < memory_mib + 50
                        go.set()
                        assert (await good.receive()).answer == Content(text="good.")
                        assert isinstance((await good.receive()).answer, TurnDone)
                        assert isinstance(await daemon.turn("other", "hi", resume=False), TurnDone)
                    finally:
                        for sock in socks:
                            sock.close()
                await until_files(pid, files)
                assert await daemon.stop(signal.SIGTERM) == 0
    assert answered == {
        (4, "bad_frame"): 50,
        (5, "unsupported_version"): 50,
        (6, "no_such_session"): 50,
        (7, "session_busy"): 50,
        (8, "bad_frame"): 50,
        (9, "no_such_session"): 50,
    }
    assert "Traceback" not in daemon.log
    assert "event=internal_error" not in daemon.log
    assert "event=connection_failed" not in daemon.log


def random_stream(rng: random.Random) -> bytes:
    """What a client might send: from noise to a request with one byte wrong. None of them can begin a session."""
    good = request(f"n{rng.randrange(10**9)}", rng.choice(["hi", "Grüße", "\U0001f600" * 50, "x" * 3000]))
    match rng.randrange(9):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            payload = rng.randbytes(rng.randrange(300))
            return len(payload).to_bytes(4, "big") + payload
        case 2:
            return rng.randrange(2**32).to_bytes(4, "big") + rng.randbytes(rng.randrange(50))
        case 3:
            return good[: rng.randrange(len(good))]
        case 4:
            wrong = bytearray(good)
            wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
            return bytes(wrong)
        case 5:
            at, cut = rng.randrange(4, len(good)), rng.randrange(1, 6)
            payload = good[4:at] + good[at + cut :]
            return len(payload).to_bytes(4, "big") + payload
        case 6:
            value = rng.choice([b"[" * 500, b"null", b'{"v":1}', b"1e999", b'{"v":' + b"9" * 5000 + b"}", b'"\\ud800"'])
            return len(value).to_bytes(4, "big") + value
        case 7:
            envelope: dict[str, Any] = {
                "v": rng.choice([1, 1.0, True, "1", 2]),
                "kind": rng.choice(["turn", "", "error", None]),
            }
            return request("n", final=rng.choice([True, False, 1]), **envelope)
        case _:
            return good * rng.randrange(1, 30)


def storm(path: Path, rng: random.Random, count: int) -> Counter[str]:
    """Send that many streams, 40 at a time, and leave each in one of four ways; what was answered, by its code."""
    codes: Counter[str] = Counter()
    left = count
    while left:
        batch = [connected(path) for _ in range(min(left, 40))]
        left -= len(batch)
        for sock in batch:
            raw = random_stream(rng)
            cut = rng.randrange(len(raw) + 1)
            with suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(raw[:cut])
                sock.sendall(raw[cut:])
        for sock in batch:
            how = rng.randrange(4)
            if how == 0:
                sock.close()
                continue
            if how == 1:
                with sock, suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                    sock.recv(rng.randrange(1, 40))
                continue
            with suppress(OSError):  # it has gone already
                sock.shutdown(socket.SHUT_WR)
            for frame in taken_apart(heard(sock)):
                assert frame["final"] is True
                codes[frame["body"]["code"]] += 1
    return codes


@pytest.mark.real
async def test_after_10_000_random_streams_a_turn_works_and_memory_and_files_are_where_they_were(
    short_dir: Path,
) -> None:
    rng = random.Random(20261130)
    with trio.fail_after(2 * REAL_LIMIT_S):
        async with scripted_server(reply("Hi."), reply("Still here.")) as server:
            async with loopd_serve(write_config(short_dir, server.url)) as daemon:
                pid = daemon.process.pid
                files = open_files(pid)
                assert isinstance(await daemon.turn("s", "hi", resume=False), TurnDone)
                codes = await trio.to_thread.run_sync(storm, daemon.socket, rng, 2000)  # what is made once, is made
                await until_files(pid, files)
                memory_mib = resident_mib(pid)
                codes += await trio.to_thread.run_sync(storm, daemon.socket, rng, 8000)
                await until_files(pid, files)
                grown_mib = resident_mib(pid) - memory_mib
                done = await daemon.turn("s", "and now?", resume=True)
                await until_files(pid, files)
                assert await daemon.stop(signal.SIGTERM) == 0
    assert isinstance(done, TurnDone)
    assert done.content == "Still here."
    assert grown_mib < 3, "0.4 KiB a stream"
    assert set(codes) == {"bad_frame", "bad_request", "unsupported_version", "no_such_session"}
    assert min(codes.values()) > 100, codes
    assert [path.name for path in (short_dir / "home" / "sessions").iterdir()] == ["s"]
    for word in ("Traceback", "event=internal_error", "event=connection_failed"):
        assert word not in daemon.log


# -- two of one session --------------------------------------------------------------------------


@pytest.mark.real
async def test_of_twenty_clients_that_want_one_session_at_once_one_has_it_and_the_others_are_told(
    short_dir: Path,
) -> None:
    go = trio.Event()
    ended: list[TurnDone | WireError] = []

    async def ask(daemon: LoopdProcess, resume: bool) -> None:
        ended.append(await daemon.turn("s", "hi", resume=resume))
        if len(ended) == 19:
            go.set()

    with trio.fail_after(REAL_LIMIT_S):
        async with scripted_server(good_script(go)) as server:
            async with loopd_serve(write_config(short_dir, server.url)) as daemon:
                async with trio.open_nursery() as nursery:
                    for _ in range(20):
                        nursery.start_soon(ask, daemon, False)
                assert await daemon.stop(signal.SIGTERM) == 0
    assert Counter(type(end).__name__ if isinstance(end, TurnDone) else end.code for end in ended) == {
        "TurnDone": 1,
        ErrorCode.SESSION_EXISTS: 19,
    }
    log = (short_dir / "home" / "sessions" / "s" / "0.jsonl").read_bytes().splitlines()
    assert [type(records.decode_line(line)).__name__ for line in log] == ["SessionStart", "User", "Assistant", "Usage"]
