"""Slots that are saved and restored, on the real embedded server: over its restart, and when two sessions share one."""

from __future__ import annotations

from pathlib import Path

import trio

from boxmaker.demo.server import chat_template
from boxmaker.proto.chat import Content
from boxmaker.proto.ids import SessionId
from boxmaker.proto.ledger import CacheLine
from boxmaker.proto.records import CacheLoss, Usage
from boxmaker.session.disk import ThreadDisk
from boxmaker.session.ledger import read_lines
from boxmaker.testing.daemon import Daemon, running_daemon
from tests.e2e.conftest import llama_server
from tests.embedded import EMBEDDED

pytestmark = EMBEDDED

LIMIT_S = 280
PAGE = " ".join(f"On page {page} the ship sails on." for page in range(4))


def figures(daemon: Daemon, session: str) -> list[tuple[int, int, int]]:
    """Cached, read and generated, a completion."""
    found = []
    for record in daemon.log(session):
        if isinstance(record, Usage):
            assert record.cache_n is not None
            assert record.prompt_n is not None
            assert record.predicted_n is not None
            found.append((record.cache_n, record.prompt_n, record.predicted_n))
    return found


async def last_line(daemon: Daemon, session: str, completion: int) -> CacheLine:
    """What the side file says of a completion, once the daemon has written it."""
    directory = daemon.store.directory / session
    while completion not in (lines := read_lines(directory)):  # noqa: ASYNC110  # the file has no event
        await trio.sleep(0.02)
    return lines[completion]


def config(directory: Path) -> str:
    (directory / "kv").mkdir(exist_ok=True)
    return f'[slots]\nsave_dir = "{directory}/kv"\n[request]\nmax_tokens = 12\nseed = 7\n'


async def test_a_session_is_there_again_after_a_restart_of_the_server(tmp_path: Path) -> None:
    text = config(tmp_path)
    with trio.fail_after(LIMIT_S):
        with llama_server(tmp_path / "log", "-", str(tmp_path / "kv")) as url:
            async with running_daemon(tmp_path, url, text, disk=ThreadDisk()) as daemon:
                assert daemon.saver is not None
                await daemon.ask("s", f"Hello. {PAGE}", resume=False)
                await daemon.ask("s", "And?", resume=True)
                await daemon.saver.drain()
                first = figures(daemon, "s")
        held = sum(first[-1]) - 1
        with llama_server(tmp_path / "log", "-", str(tmp_path / "kv")) as url:
            async with running_daemon(tmp_path, url, text, disk=ThreadDisk()) as daemon:
                await daemon.ask("s", "Still there?", resume=True)
                assert figures(daemon, "s")[-1][0] == held
                assert not [record for record in daemon.log("s") if isinstance(record, CacheLoss)]
                assert (await last_line(daemon, "s", 3)).detail == {"restored": held}
                await daemon.ask("s", "Yes?", resume=True)
                assert (await last_line(daemon, "s", 4)).detail == {}, "restored once"


async def test_a_session_whose_answer_was_broken_off_is_there_again(tmp_path: Path) -> None:
    text = config(tmp_path).replace("max_tokens = 12", "max_tokens = 400")
    with trio.fail_after(LIMIT_S):
        with llama_server(tmp_path / "log", "-", str(tmp_path / "kv")) as url:
            async with running_daemon(tmp_path, url, text, disk=ThreadDisk()) as daemon:
                assert daemon.saver is not None
                await daemon.ask("s", "Say hello.", resume=False)
                stream, channel = await daemon.open("s", f"Say all of this again and again: {PAGE}", resume=True)
                while not isinstance((await channel.receive()).answer, Content):
                    pass
                await stream.aclose()
                await daemon.until_free("s")
                await daemon.saver.drain()
                (first,) = figures(daemon, "s")
        with llama_server(tmp_path / "log", "-", str(tmp_path / "kv")) as url:
            async with running_daemon(tmp_path, url, text, disk=ThreadDisk()) as daemon:
                await daemon.ask("s", "Stop. Say yes.", resume=True)
                cached, read, _ = figures(daemon, "s")[-1]
                assert not [record for record in daemon.log("s") if isinstance(record, CacheLoss)]
                assert (await last_line(daemon, "s", 2)).detail.keys() == {"restored"}
                # the long message was read before the reply was broken off
                assert cached > sum(first) + 20
                assert read < 40


async def test_another_template_is_not_given_what_was_saved(tmp_path: Path) -> None:
    text = config(tmp_path)
    other = tmp_path / "template"
    other.write_text(chat_template().replace("# Tools", "# The tools"), "utf-8")
    with trio.fail_after(LIMIT_S):
        with llama_server(tmp_path / "log", "-", str(tmp_path / "kv")) as url:
            async with running_daemon(tmp_path, url, text, disk=ThreadDisk()) as daemon:
                assert daemon.saver is not None
                await daemon.ask("s", "Hello.", resume=False)
                await daemon.saver.drain()
        with llama_server(tmp_path / "log", str(other), str(tmp_path / "kv")) as url:
            async with running_daemon(tmp_path, url, text, disk=ThreadDisk()) as daemon:
                await daemon.ask("s", "Still there?", resume=True)
                assert figures(daemon, "s")[-1][0] == 0
                assert (await last_line(daemon, "s", 2)).cause is not None


async def test_two_sessions_on_one_slot_have_their_cache_back_in_turn(tmp_path: Path) -> None:
    text = config(tmp_path)
    with trio.fail_after(LIMIT_S), llama_server(tmp_path / "log", "-", str(tmp_path / "kv")) as url:
        async with running_daemon(tmp_path, url, text, disk=ThreadDisk()) as daemon:
            for number in range(2):
                for session in ("a", "b"):
                    await daemon.ask(session, f"{session} {number}. {PAGE}", resume=number > 0)
            for session in ("a", "b"):
                before, after = figures(daemon, session)
                assert after[0] == sum(before) - 1
                assert (await last_line(daemon, session, 2)).detail == {"restored": sum(before) - 1}
                assert not [record for record in daemon.log(SessionId(session)) if isinstance(record, CacheLoss)]
