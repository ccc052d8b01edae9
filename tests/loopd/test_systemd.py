"""What systemd gives and wants: a passed socket, and a word when we are ready."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from boxmaker.errors import StartError
from boxmaker.loopd.home import inherited_socket, notify_systemd
from boxmaker.testing.daemon import make_config
from boxmaker.testing.server import reply, scripted_server


@pytest.fixture
def short_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bx") as name:
        yield Path(name)


def test_nothing_is_taken_where_nothing_was_passed() -> None:
    for environ in ({}, {"LISTEN_FDS": "1"}, {"LISTEN_PID": "1", "LISTEN_FDS": "1"}, {"LISTEN_PID": str(os.getpid())}):
        assert inherited_socket(dict(environ)) is None


def test_the_variables_are_for_us_and_not_for_our_children() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "HOME": "/h"}
    inherited_socket(environ)
    assert environ == {"HOME": "/h"}


def test_several_sockets_are_refused() -> None:
    with pytest.raises(StartError, match="systemd passed 2 sockets"):
        inherited_socket({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"})


@pytest.mark.parametrize("address", ["path", "abstract"])
def test_a_listening_manager_is_told(short_dir: Path, address: str) -> None:
    name = str(short_dir / "n") if address == "path" else f"@boxmaker-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        manager.settimeout(5)
        notify_systemd("READY=1", {"NOTIFY_SOCKET": name})
        assert manager.recv(100) == b"READY=1"


def test_a_manager_that_is_not_there_does_no_harm(short_dir: Path) -> None:
    for environ in ({}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:1"}, {"NOTIFY_SOCKET": str(short_dir / "x")}):
        notify_systemd("READY=1", environ)


LAUNCHER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.set_inheritable(3, True)
os.environ["LISTEN_PID"] = str(os.getpid())
os.environ["LISTEN_FDS"] = "1"
os.execv(sys.executable, [sys.executable, "-m", "boxmaker.loopd", "serve", "--config", sys.argv[2]])
"""


@pytest.mark.real
async def test_a_passed_socket_is_served_and_its_file_stays(short_dir: Path) -> None:
    path = short_dir / "passed.sock"
    async with scripted_server(reply("over a passed socket")) as server:
        config = make_config(short_dir, server.url)
        with (
            socket.socket(socket.AF_UNIX) as listener,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
            (short_dir / "log").open("wb") as log,
        ):
            listener.bind(str(path))
            listener.listen(5)
            manager.bind(str(short_dir / "notify"))
            process = subprocess.Popen(  # noqa: ASYNC220  # starting is quick, and it must not be awaited
                [sys.executable, "-c", LAUNCHER, str(listener.fileno()), str(config.file)],
                pass_fds=[listener.fileno()],
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": str(short_dir / "notify")},
            )
            try:
                with trio.fail_after(60):
                    await trio.lowlevel.wait_readable(manager)
                    assert manager.recv(100) == b"READY=1"
                    command = [sys.executable, "-m", "boxmaker.bxctl", "chat", "--socket", str(path), "--say", "hi"]
                    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
                    assert done.stdout == b"over a passed socket\n"
                    process.send_signal(signal.SIGTERM)
                    await trio.lowlevel.wait_readable(manager)
                    assert manager.recv(100) == b"STOPPING=1"
                    assert await trio.to_thread.run_sync(process.wait) == 0
            finally:
                process.kill()
                process.wait()
        assert path.exists(), "the socket is systemd's, not ours"
        assert not config.channel.socket.exists()


@pytest.mark.real
async def test_a_passed_thing_that_is_no_listening_socket_is_refused(short_dir: Path) -> None:
    async with scripted_server() as server:
        config = make_config(short_dir, server.url)
        ours, theirs = socket.socketpair()
        with ours, theirs, trio.fail_after(60):
            done = await trio.run_process(
                [sys.executable, "-c", LAUNCHER, str(theirs.fileno()), str(config.file)],
                pass_fds=[theirs.fileno()],
                capture_stderr=True,
                check=False,
            )
    assert done.returncode == 1
    assert b"no listening unix stream" in done.stderr
