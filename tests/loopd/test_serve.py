"""Tests of the daemon as a real process, with a scripted server in the test's own loop."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import pytest
import trio

from boxmaker.channel.client import open_turn
from boxmaker.errors import NobodyListens
from boxmaker.proto.channel import ErrorCode, Turn, TurnDone, WireError
from boxmaker.proto.chat import Content
from boxmaker.proto.ids import SessionId
from boxmaker.testing.server import (
    LOADING,
    STREAM_HEAD,
    Hang,
    Script,
    ScriptedServer,
    Send,
    Until,
    delta,
    ending,
    error_response,
    json_response,
    reply,
    scripted_server,
)
from tests.loopd.daemon_process import loopd, loopd_serve, names, write_config

pytestmark = pytest.mark.real


def modes(home: Path) -> dict[str, str]:
    """The mode of everything below a home, and of the home."""
    paths = [home, *home.rglob("*")]
    return {str(path.relative_to(home)): oct(stat.S_IMODE(path.lstat().st_mode)) for path in paths}


async def test_a_daemon_serves_turns_and_goes_without_a_trace_on_sigterm(short_dir: Path) -> None:
    (short_dir / "key").touch(0o600)
    (short_dir / "key").write_text("sk-very-secret\n", "ascii")
    before = os.umask(0)
    try:
        async with scripted_server(reply("The answer.", reasoning="A thought.")) as server:
            config = write_config(short_dir, server.url)
            config.write_text(config.read_text("utf-8").replace("[paths]", 'api_key_file = "key"\n[paths]'), "utf-8")
            async with loopd_serve(config) as daemon:
                done = await daemon.turn("s1", "A question.", resume=False)
                await daemon.wait_for("event=turn_end")
                side_file = short_dir / "home" / "sessions" / "s1" / "cache.jsonl"
                while not side_file.exists():  # noqa: ASYNC110  # it is written behind the turn, and has no event
                    await trio.sleep(0.02)
                found = modes(short_dir / "home")
                status = await daemon.stop(signal.SIGTERM)
                await daemon.wait_for("event=stopped")
                log = daemon.log
            keys = {request.headers["authorization"] for request in server.received}
    finally:
        os.umask(before)
    assert isinstance(done, TurnDone)
    assert done.content == "The answer."
    assert status == 0
    assert found == {
        ".": "0o700",
        "sessions": "0o700",
        "sessions/s1": "0o700",
        "sessions/s1/0.baseline.json": "0o600",
        "sessions/s1/0.jsonl": "0o600",
        "sessions/s1/cache.jsonl": "0o600",
        "run": "0o700",
        "run/loop": "0o700",
        "run/loop/loop.sock": "0o600",
        "run/loop/loopd.lock": "0o600",
    }
    assert names(daemon.socket.parent) == ["loopd.lock"]
    assert keys == {"Bearer sk-very-secret"}
    for private in ("sk-very-secret", "question", "The answer", "thought", "You are a test"):
        assert private not in log
    (ready,) = [line for line in log.splitlines() if "event=ready" in line]
    assert f"socket={daemon.socket}" in ready
    assert f"pid={daemon.process.pid}" in ready
    (turn_end,) = [line for line in log.splitlines() if "event=turn_end" in line]
    assert "session=s1" in turn_end
    assert "ending=turn_done" in turn_end
    assert "Traceback" not in log


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_after_a_restart_the_next_request_is_a_byte_extension_of_the_last(
    short_dir: Path, how: signal.Signals
) -> None:
    replies = [reply(f"Answer {number}.", reasoning="r") for number in range(2)]
    async with scripted_server(*replies, reply("Answer 2.")) as server:
        config = write_config(short_dir, server.url)
        async with loopd_serve(config) as daemon:
            await daemon.turn("s", "one", resume=False)
            await daemon.turn("s", "two", resume=True)
            await daemon.stop(how)
            assert daemon.socket.exists() == (how == signal.SIGKILL)
        (short_dir / "system.md").write_text("Another prompt, for sessions to come.\n", "utf-8")
        async with loopd_serve(config) as daemon:  # a dead socket of its own is no obstacle
            done = await daemon.turn("s", "three", resume=True)
            exists = await daemon.turn("s", "four", resume=False)
        bodies = server.bodies
    assert isinstance(done, TurnDone)
    assert isinstance(exists, WireError)
    assert exists.code == ErrorCode.SESSION_EXISTS
    for earlier, later in ((bodies[0], bodies[1]), (bodies[1], bodies[2])):
        messages = earlier[: earlier.index(b'],"tools":')]  # `messages` comes first, `tools` directly after
        assert later.startswith(messages + b",")
        assert later[later.index(b'],"tools":') :] == earlier[earlier.index(b'],"tools":') :]


async def test_a_second_daemon_on_a_home_is_refused_and_the_selftest_says_who_serves_it(short_dir: Path) -> None:
    async with scripted_server(reply("Hi.")) as server:
        config = write_config(short_dir, server.url)
        async with loopd_serve(config) as daemon:
            second = await loopd("serve", "--config", str(config))
            selftest = await loopd("selftest", "--config", str(config))
            over = await daemon.turn("t", "x" * 2_000_000, resume=False)  # max_frame is 1 MiB
            done = await daemon.turn("s", "x" * 300_000, resume=False)
    pid = daemon.process.pid
    assert second.returncode == 1
    assert second.stderr.decode().splitlines() == [
        f"loopd: the home {short_dir}/home is served by another loopd, pid {pid}"
    ]
    assert selftest.returncode == 0
    assert f"served by a running loopd, pid {pid}" in selftest.stdout.decode()
    assert isinstance(over, WireError)
    assert over.code == ErrorCode.BAD_FRAME
    assert isinstance(done, TurnDone)


async def test_a_failed_selftest_ends_the_daemon_before_it_listens(short_dir: Path) -> None:
    async with scripted_server() as server:
        server.input_tokens = {"input_tokens": 9999}
        config = write_config(short_dir, server.url)
        run = await loopd("serve", "--config", str(config))
        assert server.completions == []
    assert run.returncode == 1
    last = run.stderr.decode().splitlines()[-2:]
    assert last[0].startswith("loopd: the self-test failed")
    assert last[1].startswith("fail  baseline: 9999 tokens, allowed are 3000")
    assert names(short_dir / "home" / "run" / "loop") == ["loopd.lock"]
    assert "event=ready" not in run.stderr.decode()


async def test_a_socket_of_another_program_is_refused_and_untouched(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(short_dir / "s"))
        other.listen()
        async with scripted_server() as server:
            config = write_config(short_dir, server.url, '[channel]\nsocket = "s"')
            run = await loopd("serve", "--config", str(config))
    assert run.returncode == 1
    assert run.stderr.decode().splitlines()[-1].startswith(f"loopd: another program answers on {short_dir}/s")
    assert (short_dir / "s").is_socket()


async def test_the_end_of_stdin_stops_it_where_that_was_asked_for_and_only_there(short_dir: Path) -> None:
    async with scripted_server(reply("Hi.")) as server:
        config = write_config(short_dir, server.url)
        async with loopd_serve(config) as daemon:
            assert daemon.process.stdin is not None
            await daemon.process.stdin.aclose()
            assert isinstance(await daemon.turn("s", "hi", resume=False), TurnDone)
            assert await daemon.stop(signal.SIGINT) == 0
            await daemon.wait_for("event=stopped")
            assert "stdin ended" not in daemon.log
        async with loopd_serve(config, "--until-eof") as daemon:
            assert daemon.process.stdin is not None
            await daemon.process.stdin.send_all(b"anything")
            await daemon.process.stdin.aclose()
            assert await daemon.process.wait() == 0
            await daemon.wait_for("event=stopped")
            assert "stdin ended" in daemon.log
            assert not daemon.socket.exists()


async def test_a_running_turn_may_finish_after_sigterm_and_a_new_one_finds_nobody(short_dir: Path) -> None:
    go = trio.Event()
    slow: Script = [Send(STREAM_HEAD + delta(content="So ")), Until(go), Send(delta(content="long.") + ending())]
    turn = Turn(session=SessionId("s"), content="hi", resume=False)
    async with scripted_server(slow) as server:
        async with loopd_serve(write_config(short_dir, server.url)) as daemon:
            async with open_turn(daemon.socket, turn) as channel:
                assert (await channel.receive()).answer == Content(text="So ")
                daemon.process.send_signal(signal.SIGTERM)
                await daemon.wait_for("event=stopping")
                while daemon.socket.exists():  # noqa: ASYNC110  # the file has no event
                    await trio.sleep(0.01)
                with pytest.raises(NobodyListens):
                    await daemon.turn("t", "hi", resume=False)
                go.set()
                assert (await channel.receive()).answer == Content(text="long.")
                done = (await channel.receive()).answer
            assert await daemon.process.wait() == 0
    assert isinstance(done, TurnDone)
    assert done.content == "So long."


async def test_grace_s_ends_a_turn_that_does_not(short_dir: Path) -> None:
    turn = Turn(session=SessionId("s"), content="hi", resume=False)
    async with scripted_server([Send(STREAM_HEAD + delta(content="So ")), Hang()]) as server:
        async with loopd_serve(write_config(short_dir, server.url, "[channel]\ngrace_s = 0.3")) as daemon:
            async with open_turn(daemon.socket, turn) as channel:
                await channel.receive()
                daemon.process.send_signal(signal.SIGTERM)
                final = (await channel.receive()).answer
            assert await daemon.process.wait() == 0
            await server.completions[0].closed.wait()
    assert isinstance(final, WireError)
    assert final.code == ErrorCode.SHUTTING_DOWN


async def test_a_second_signal_ends_the_grace_and_a_third_changes_nothing(short_dir: Path) -> None:
    # The peer does not read: its connection outlives the grace, so the third signal finds the daemon there.
    turn = Turn(session=SessionId("s"), content="hi", resume=False)
    stalled: Script = [Send(STREAM_HEAD + delta(content="y" * 1000) * 800), Hang()]
    async with scripted_server(stalled) as server:
        config = write_config(short_dir, server.url, "[channel]\ngrace_s = 50\nwrite_timeout_s = 1")
        async with loopd_serve(config) as daemon, open_turn(daemon.socket, turn) as channel:
            await channel.receive()
            daemon.process.send_signal(signal.SIGTERM)
            await daemon.wait_for("event=stopping", 1)
            daemon.process.send_signal(signal.SIGINT)
            await daemon.wait_for("event=stopping", 2)
            daemon.process.send_signal(signal.SIGTERM)
            assert await daemon.process.wait() == 0
            await daemon.wait_for("event=stopped")
            assert not daemon.socket.exists()
            assert "Traceback" not in daemon.log


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "the end of stdin"])
async def test_a_daemon_that_waits_for_a_loading_model_can_be_stopped(short_dir: Path, how: str) -> None:
    async with scripted_server() as server:
        server.props = LOADING
        config = write_config(short_dir, server.url)
        async with loopd_serve(config, "--until-eof", ready=False) as daemon:
            while not server.received:  # noqa: ASYNC110  # what happens is in another process
                await trio.sleep(0.02)
            if how == "the end of stdin":
                assert daemon.process.stdin is not None
                await daemon.process.stdin.aclose()
                status = await daemon.process.wait()
            else:
                status = await daemon.stop(getattr(signal, how))
            await daemon.wait_for("event=stopped")
    assert status == 0
    assert "event=ready" not in daemon.log


async def test_what_a_killed_creation_left_goes_at_start_up(short_dir: Path) -> None:
    async with scripted_server() as server:
        config = write_config(short_dir, server.url)
        sessions = short_dir / "home" / "sessions"
        (sessions / ".new-0123456789abcdef").mkdir(parents=True)
        (sessions / ".new-0123456789abcdef" / "0.jsonl").touch()
        (sessions / "kept").mkdir()
        for directory in (short_dir / "home", sessions):
            directory.chmod(0o700)
        async with loopd_serve(config) as daemon:
            assert names(sessions) == ["kept"]
            assert "event=unfinished_sessions_removed count=1" in daemon.log
            await daemon.stop(signal.SIGTERM)


# -- saved slots ------------------------------------------------------------------------------------


def with_saving(server: ScriptedServer, directory: Path) -> tuple[Path, list[str]]:
    """A server that saves into `kv`, and the configuration for it; what it is asked comes into the list."""
    kv = directory / "kv"
    kv.mkdir()
    asked: list[str] = []

    def act(what: str, body: dict[str, str]) -> bytes:
        asked.append(what)
        if what.endswith("none"):
            return error_response(400, "Invalid action", "invalid_request_error")
        if what.endswith("save"):
            (kv / body["filename"]).write_bytes(b"kv")
        return json_response(200, {"n_saved": 14, "n_written": 2, "n_restored": 14})

    server.props["model_path"] = "/models/m.gguf"
    server.on_slot_action = act
    return write_config(directory, server.url, '[slots]\nsave_dir = "kv"\n'), asked


async def test_a_slot_is_saved_at_sigterm_and_restored_by_the_next_daemon(short_dir: Path) -> None:
    async with scripted_server(reply("One."), reply("Two.", cache_n=14)) as server:
        config, asked = with_saving(server, short_dir)
        async with loopd_serve(config) as daemon:
            await daemon.turn("s", "one", resume=False)
            assert await daemon.stop(signal.SIGTERM) == 0
        assert asked == ["0?action=none", "0?action=save"]
        assert len(names(short_dir / "kv")) == 2
        async with loopd_serve(config) as daemon:
            await daemon.turn("s", "two", resume=True)
            assert await daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        assert asked[2:] == ["0?action=none", "0?action=restore"]
        for file in (short_dir / "home" / "sessions" / "s").iterdir():
            file.unlink()
        (short_dir / "home" / "sessions" / "s").rmdir()
        async with loopd_serve(config) as daemon:
            await daemon.wait_for("event=ready")
            assert names(short_dir / "kv") == [], "of a session that is gone"
            assert await daemon.stop(signal.SIGTERM) == 0


async def test_a_second_signal_ends_the_saving(short_dir: Path) -> None:
    async with scripted_server(reply("One.")) as server:
        config, _ = with_saving(server, short_dir)
        saving = trio.Event()

        async def hang(path: str) -> None:
            if path.endswith("save"):
                saving.set()
                await trio.sleep_forever()

        server.on_probe = hang
        async with loopd_serve(config) as daemon:
            await daemon.turn("s", "one", resume=False)
            daemon.process.send_signal(signal.SIGTERM)
            await saving.wait()
            began = trio.current_time()
            assert await daemon.stop(signal.SIGTERM) == 0
            assert trio.current_time() - began < 8, "save_s is 10"
