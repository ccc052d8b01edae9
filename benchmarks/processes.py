"""The programs that are measured, each in a process of its own, on a temporary home.

Laws:
* Whatever ends a block, its process is gone and its directory removed when the block is left.
* A child that outlives us ends at the end of its stdin.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen
from tests.loopd.daemon_process import LIMIT_S, resident_mib, write_config

ROOT = Path(__file__).parents[1]
STOP_S = 20.0
TICKS = os.sysconf("SC_CLK_TCK")


@frozen(kw_only=True)
class LoopdProcess:
    """A running daemon: where its socket is, and what it costs."""

    process: subprocess.Popen[bytes]
    socket: Path
    sessions: Path

    def cpu_s(self) -> float:
        """Seconds of CPU that it has had."""
        return cpu_s(self.process.pid)

    def resident_mib(self) -> float:
        """What it holds of memory."""
        return resident_mib(self.process.pid)


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has had, in ticks; threads that have ended count, which `schedstat` leaves out.

    The name in the line may hold spaces, so its fields are counted from the name's end.
    """
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def raise_file_limit() -> None:
    """Let this process and its children open as many files as they may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def home(*, in_memory: bool = False) -> Iterator[Path]:
    """A temporary directory for a configuration and its home; TMPDIR says on which file system.

    `in_memory`: where syncs cost nothing, if there is such a place; for what is not about time.
    """
    shared = "/dev/shm" if in_memory and os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="bm-", dir=shared, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def child(command: Sequence[str], *, log: Path | None = None, env: dict[str, str] | None = None,
          stdout: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:  # fmt: skip
    """Run a program until the block is left: it is asked to end by the end of its stdin, then told, then killed."""
    with open(log or os.devnull, "ab") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, env={**os.environ, **(env or {})}
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.terminate()
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@frozen(kw_only=True)
class Server:
    """The scripted server's process."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def stamp_server(slots: int = 2) -> Iterator[Server]:
    """Run the stamping server."""
    with child([sys.executable, "-m", "benchmarks.stamp_server", str(slots)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield Server(process=process, port=int(process.stdout.readline()))


@contextmanager
def loopd(directory: Path, url: str, text: str = "") -> Iterator[LoopdProcess]:
    """Run a daemon in a directory until the block is left; `text` is more TOML."""
    config = write_config(directory, url, text)
    log = directory / "log"
    with ready_socket(directory) as (ready, env), child(serve_command(config), log=log, env=env) as process:
        wait_ready(ready, process, log)
        run = directory / "home"
        yield LoopdProcess(process=process, socket=run / "run" / "loop" / "loop.sock", sessions=run / "sessions")


def many_slots(slots: int) -> str:
    """The configuration of a daemon that has that many slots of the server."""
    return f"[slots]\nmain = {list(range(slots))}\n"


def serve_command(config: Path) -> list[str]:
    """`loopd serve`, which ends with its stdin."""
    return [*program("loopd.cli", "loopd"), "serve", "--until-eof", "--config", str(config)]


def program(module: str, name: str) -> list[str]:
    """One of our commands as its installed script runs it, in this interpreter."""
    return [sys.executable, "-c", f"from boxmaker.{module} import main; main(prog_name={name!r})"]


@contextmanager
def ready_socket(directory: Path) -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """A socket to be told READY on, as systemd has one, and the environment that names it."""
    path = directory / "ready"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(os.fspath(path))
        try:
            yield ready, {"NOTIFY_SOCKET": os.fspath(path)}
        finally:
            path.unlink()


def wait_ready(ready: socket.socket, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a daemon says that it is ready.

    Raises:
        RuntimeError: it has ended, or says nothing within LIMIT_S; with its log.
    """
    ready.settimeout(0.5)
    for _ in range(int(LIMIT_S / 0.5)):
        try:
            if ready.recv(4096).startswith(b"READY=1"):
                return
        except TimeoutError:
            if process.poll() is not None:
                break
    raise RuntimeError(f"no daemon came up: {log.read_text('utf-8', 'replace')}")


def file_system(directory: Path) -> str:
    """What kind of file system a directory is on, for a note: a sync costs nothing in memory."""
    best, kind = "", "?"
    for line in Path("/proc/mounts").read_text("utf-8").splitlines():
        _, point, name, *_ = line.split(" ")
        if re.match(re.escape(point.rstrip("/")) + "(/|$)", str(directory.resolve())) and len(point) >= len(best):
            best, kind = point, name
    return kind
