"""What an idle daemon costs, and what turns leave behind."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from boxmaker.channel.client import TurnChannel, open_turn
from boxmaker.config import Config
from boxmaker.proto.channel import Turn
from boxmaker.proto.ids import SessionId
from boxmaker.testing.daemon import make_config
from boxmaker.testing.server import reply, scripted_server
from tests.loopd.daemon_process import open_files, resident_mib

pytestmark = pytest.mark.real
IDLE_MIB = 60
TURNS = 60


@pytest.fixture
def short_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bx") as name:
        yield Path(name)


async def run_turn(config: Config, session: str, resume: bool) -> None:
    turn = Turn(session=SessionId(session), content="hi", resume=resume)
    async with open_turn(config.channel.socket, turn) as channel:
        await read_to_end(channel)


async def read_to_end(channel: TurnChannel) -> None:
    while not (await channel.receive()).final:
        pass


async def test_an_idle_daemon_is_small_and_turns_leave_no_file_open(short_dir: Path) -> None:
    async with scripted_server(*[reply("ok")] * TURNS) as server:
        config = make_config(short_dir, server.url)
        command = [sys.executable, "-m", "boxmaker.loopd", "serve", "--config", str(config.file)]
        with (short_dir / "log").open("wb") as log, trio.fail_after(120):
            process = await trio.lowlevel.open_process(command, stderr=log)
            try:
                while b"event=ready" not in (short_dir / "log").read_bytes():  # noqa: ASYNC110  # another process
                    await trio.sleep(0.05)
                assert resident_mib(process.pid) < IDLE_MIB
                await run_turn(config, "s", resume=False)
                before = open_files(process.pid)
                for number in range(1, TURNS):
                    await run_turn(config, f"s{number % 7}", resume=number > 7)
                while open_files(process.pid) > before:  # noqa: ASYNC110  # it may be closing the last connection still
                    await trio.sleep(0.05)
                assert resident_mib(process.pid) < IDLE_MIB
            finally:
                process.send_signal(signal.SIGTERM)
                await process.wait()
    assert process.returncode == 0
