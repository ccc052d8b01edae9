"""A real `loopd` in a process of its own, for tests on the real clock."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import define, field

from boxmaker.channel.client import open_turn
from boxmaker.proto.channel import Turn, TurnDone, WireError
from boxmaker.proto.ids import parse_session_id

LIMIT_S = 60
"""For anything that a real process does; on an idle machine it takes less than one second."""


def write_config(directory: Path, url: str, text: str = "") -> Path:
    """A configuration whose home is in the same directory; `text` is more TOML."""
    file = directory / "config.toml"
    file.write_text(f'[server]\nurl = "{url}"\n[paths]\nhome = "home"\n{text}', "utf-8")
    (directory / "system.md").write_text("You are a test.\n", "utf-8")
    return file


def names(directory: Path) -> list[str]:
    """What is in a directory."""
    return sorted(path.name for path in directory.iterdir())


@define
class LoopdProcess:
    """A running `loopd serve`; `log` is its stderr so far."""

    process: trio.Process
    socket: Path
    log: str = ""
    _grown: trio.Event = field(factory=trio.Event)

    async def read_log(self) -> None:
        """Collect stderr to its end; cancelled by `loopd_serve`."""
        assert self.process.stderr is not None
        async for data in self.process.stderr:
            self.log += data.decode("utf-8")
            self._grown.set()
            self._grown = trio.Event()

    async def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until the log holds a text that many times."""
        while self.log.count(text) < count:
            await self._grown.wait()

    async def turn(self, session: str, content: str, *, resume: bool) -> TurnDone | WireError:
        """Run one turn over the socket; its final frame."""
        turn = Turn(session=parse_session_id(session), content=content, resume=resume)
        async with open_turn(self.socket, turn) as channel:
            while not (frame := await channel.receive()).final:
                pass
        assert isinstance(frame.answer, TurnDone | WireError)
        return frame.answer

    async def stop(self, number: int) -> int:
        """Send a signal, and wait for the end; the exit status."""
        self.process.send_signal(number)
        return await self.process.wait()


@asynccontextmanager
async def loopd_serve(config: Path, *more: str, ready: bool = True) -> AsyncIterator[LoopdProcess]:
    """Run `loopd serve`; it is killed when the block is left, if it still runs."""
    command = [sys.executable, "-m", "boxmaker.loopd", "serve", "--config", str(config), *more]
    with trio.fail_after(LIMIT_S):
        process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        daemon = LoopdProcess(process, config.parent / "home" / "run" / "loop" / "loop.sock")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(daemon.read_log)
                if ready:
                    with trio.move_on_after(LIMIT_S / 2):
                        await daemon.wait_for("event=ready")
                    assert "event=ready" in daemon.log, daemon.log
                yield daemon
                nursery.cancel_scope.cancel()
        finally:
            if process.returncode is None:
                process.kill()
            with trio.move_on_after(5, shield=True):
                await process.wait()
            for pipe in (process.stdin, process.stderr):
                if pipe is not None:
                    await trio.aclose_forcefully(pipe)


async def loopd(*arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run a `loopd` command to its end."""
    command: Sequence[str] = [sys.executable, "-m", "boxmaker.loopd", *arguments]
    with trio.fail_after(LIMIT_S):
        return await trio.run_process(
            command, capture_stdout=True, capture_stderr=True, check=False, env={**os.environ, **(environ or {})}
        )


def resident_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
