"""Runs `loopd serve` and `bxctl chat --say` as an owner would, on a home that is ours.

Law: no program outlives this one: the daemon watches a pipe of ours, and a terminal ends with its daemon.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, frozen

from boxmaker.config import Config
from boxmaker.demo.run import end_of
from boxmaker.errors import StartError
from boxmaker.verify.judge import Record, read_records

SESSION = "verify"
LOOK_EVERY_S = 0.05
STOP_S = 30.0


@frozen(kw_only=True)
class Said:
    """What one `bxctl chat --say --json` gave: its status, its last body, and the records that the turn wrote."""

    status: int
    last: dict[str, Any]
    records: list[Record]

    def problem(self) -> str | None:
        """Why there is no answer, or None."""
        if self.status == 0:
            return None
        code, message = self.last.get("code"), self.last.get("message")
        return f"{code}: {message}" if code else f"bxctl ended with status {self.status}"

    @property
    def at_limit(self) -> bool:
        """Did a limit end the turn? The session goes on, and the next attempt may do better."""
        return self.last.get("code") == "turn_limit"


@define
class Programs:
    """The daemon and the terminal; `config` is the owner's on our home."""

    config: Config

    @asynccontextmanager
    async def daemon(self) -> AsyncIterator[None]:
        """`loopd serve` on our home, from ready to its clean end.

        Raises:
            StartError: it did not start, or did not stop with status 0.
        """
        home = self.config.paths.home
        command = ["boxmaker.loopd", "serve", "--until-eof", "--config", str(self.config.file), "--home", str(home)]
        log = home / "loopd.log"
        with log.open("ab") as sink:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", *command], stdin=subprocess.PIPE, stdout=sink, stderr=sink
            )
        try:
            await self._until_ready(process, log)
            yield
            process.terminate()
            status = None
            with trio.move_on_after(STOP_S):
                status = await process.wait()
            if status != 0:
                raise StartError(message=f"loopd ended with {status} after SIGTERM", more=end_of(log))
        finally:
            await end(process)

    async def _until_ready(self, process: trio.Process, log: Path) -> None:
        while process.poll() is None:
            try:
                stream = await trio.open_unix_socket(self.config.channel.socket)
            except OSError:
                await trio.sleep(LOOK_EVERY_S)
                continue
            await stream.aclose()
            return
        raise StartError(message="loopd did not start", more=end_of(log))

    def chat_command(self, text: str) -> list[str]:
        """The command of one turn; the first one finds no session and makes it."""
        command = ["boxmaker.bxctl", "chat", "--json", "--say", text, "--session", SESSION]
        return [sys.executable, "-m", *command, "--socket", str(self.config.channel.socket)]

    async def say(self, text: str) -> Said:
        """Run one turn. Cancellation: the terminal is ended, and the daemon cancels the turn."""
        before = len(self.records())
        done = await trio.run_process(
            self.chat_command(text), capture_stdout=True, check=False, stderr=subprocess.DEVNULL
        )
        lines = done.stdout.splitlines()
        last = json.loads(lines[-1]) if lines else {}
        return Said(status=done.returncode, last=last, records=self.records()[before:])

    def records(self) -> list[Record]:
        """The session's log."""
        file = self.config.paths.home / "sessions" / SESSION / "0.jsonl"
        return read_records(file.read_bytes()) if file.exists() else []


async def end(process: trio.Process) -> None:
    """End one of our programs, however we got here."""
    with trio.CancelScope(shield=True):
        if process.stdin is not None:
            await process.stdin.aclose()
        if process.poll() is None:
            process.kill()
            await process.wait()
        if process.stdout is not None:
            await process.stdout.aclose()
