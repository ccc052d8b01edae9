"""`loopd demo`: the embedded server, a daemon on it, and a chat, all by command line.

Laws:
* Server and daemon run in sessions of their own: Ctrl-C reaches only the chat.
* Each watches a pipe of ours, and the chat is hung up: nothing outlives this process, however it ends.
* A demo that runs already is used, and left running.

Source: design.md section 10.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from boxmaker.errors import StartError, printable
from boxmaker.proto.channel import SOCKET_PATH_MAX_BYTES

START_S = 120.0
"""For the model to load and the daemon to answer; it takes seconds on an idle machine."""
STOP_S = 10.0
POLL_S = 0.05
PR_SET_PDEATHSIG = 1
SOCKET_NAME = "loop.sock"

CONFIG = """\
# Written by `loopd demo` at each start.
[server]
url = {url}

[request]
temperature = 0.3
max_tokens = 1024

[thinking]
cap = 256

[channel]
socket = {socket}

[paths]
home = {home}
"""


def run_demo(environ: Mapping[str, str], say: str | None) -> int:
    """Run the demo; give the exit status of the chat.

    Raises:
        StartError: server or daemon did not start; the message names the log.
    """
    state = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "boxmaker-demo"
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise StartError(message=f"{state} cannot be made: {exc.strerror}; set XDG_STATE_HOME") from exc
    with ExitStack() as running:
        lock = running.enter_context(_owned(state / "demo.lock"))
        if lock is not None:
            socket_file = socket_directory(environ, state) / SOCKET_NAME
            os.ftruncate(lock, 0)
            os.pwrite(lock, os.fsencode(socket_file), 0)  # for a second demo, whose environment may be another
            url = running.enter_context(embedded_server(state / "server.log"))
            config = state / "config.toml"
            config.write_text(demo_config(url, socket_file, state / "home"), "utf-8")
            loopd = running.enter_context(_daemon(config, state / "loopd.log"))
            _wait_for(socket_file, loopd, state / "loopd.log")
        else:
            socket_file = _socket_of_the_first(state / "demo.lock")
            _wait_for(socket_file, None, state / "loopd.log")
        return _chat(socket_file, say)


def demo_config(url: str, socket_file: Path, home: Path) -> str:
    """The configuration of the demo's daemon, as TOML."""
    return CONFIG.format(url=toml_text(url), socket=toml_text(str(socket_file)), home=toml_text(str(home)))


def toml_text(text: str) -> str:
    """A basic string: JSON's, but for the one control character that JSON leaves bare."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def socket_directory(environ: Mapping[str, str], state: Path) -> Path:
    """Make a short directory that is ours alone, one for each state directory; a socket path has 107 bytes.

    Raises:
        StartError: it cannot be made, is not ours, or is not short.
    """
    base = Path(environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not base.is_dir():
        base = Path(tempfile.gettempdir())
    mark = hashlib.sha256(os.fsencode(state)).hexdigest()[:8]
    directory = base / f"boxmaker-demo-{os.geteuid()}-{mark}"
    if len(os.fsencode(directory / SOCKET_NAME)) > SOCKET_PATH_MAX_BYTES:
        raise StartError(message=f"{directory} is too long for a socket; set XDG_RUNTIME_DIR to a shorter path")
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(directory)
    except OSError as exc:
        raise StartError(message=f"{directory} cannot be made: {exc.strerror}; set XDG_RUNTIME_DIR") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StartError(message=f"{directory} is not a directory of ours with mode 0700; remove it")
    return directory


@contextmanager
def _owned(file: Path) -> Iterator[int | None]:
    """Be the one demo of this home, and have its lock's descriptor; None when another one is."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield fd
    finally:
        os.close(fd)


def _socket_of_the_first(lock: Path) -> Path:
    """Where the demo that runs has its socket; it says so as soon as it has its lock."""
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        path = lock.read_bytes()
        if path:
            return Path(os.fsdecode(path))
        time.sleep(POLL_S)
    raise StartError(message=f"another demo holds {lock} and does not say where it is; end it and try again")


@contextmanager
def _child(command: list[str], log: Path, stdout: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own, with a pipe as stdin; ended when the block is left."""
    with log.open("ab") as sink:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sink if stdout is None else stdout,
            stderr=sink,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def embedded_server(log: Path) -> Iterator[str]:
    """Run the embedded server while the block lasts; gives its address.

    Raises:
        StartError: it did not start; the end of its log is told.
    """
    with _child([sys.executable, "-m", "boxmaker.demo.server"], log, subprocess.PIPE) as child:
        assert child.stdout is not None
        url = child.stdout.readline().decode("utf-8").strip()
        if not url:
            raise StartError(message="the embedded server did not start", more=end_of(log))
        yield url


@contextmanager
def _daemon(config: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "boxmaker.loopd", "serve", "--config", str(config), "--until-eof"]
    with _child(command, log, None) as child:
        yield child


def _wait_for(path: Path, daemon: subprocess.Popen[bytes] | None, log: Path) -> None:
    """Wait until a daemon answers on the socket."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(os.fspath(path)) == 0:
                return
        if daemon is not None and daemon.poll() is not None:
            raise StartError(message="loopd did not start", more=end_of(log))
        time.sleep(POLL_S)
    raise StartError(message=f"no loopd answered on {path} within {START_S:.0f} s", more=end_of(log))


def end_of(log: Path) -> str:
    """What a person is told of a log: its last lines."""
    try:
        lines = log.read_text("utf-8", "replace").splitlines()[-5:]
    except OSError as exc:
        return printable(f"{log} cannot be read: {exc.strerror}")
    return "\n".join(printable(line) for line in (f"the end of {log}:", *lines))


def _end_with_parent() -> None:
    """In the chat's process: a hang-up when the demo is killed, or it would share the terminal with the shell.

    The chat's stdin is the terminal, so it cannot watch a pipe as server and daemon do.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)


def _chat(socket_file: Path, say: str | None) -> int:
    """Run the chat in the foreground. Ctrl-C is its own; we only must not die of it."""
    command = [sys.executable, "-m", "boxmaker.bxctl", "chat", "--socket", str(socket_file)]
    if say is not None:
        command += ["--say", say]
    before = signal.signal(signal.SIGINT, lambda *_: None)  # a handler, not SIG_IGN: that would be inherited
    try:
        return subprocess.call(command, preexec_fn=_end_with_parent)
    finally:
        signal.signal(signal.SIGINT, before)
