"""Saving and restoring slots on a scripted server: what is asked, in which order, and that no failure hurts a turn."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from boxmaker.loopd.saving import last_in_slots, save_dir_problem, server_identity
from boxmaker.proto.ids import SessionId
from boxmaker.proto.saved import ServerIdentity
from boxmaker.session.ledger import read_lines
from boxmaker.session.saved import SavedFiles
from boxmaker.session.store import LOG_NAME
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.server import (
    STREAM_HEAD,
    Hang,
    ScriptedServer,
    Send,
    delta,
    error_response,
    json_response,
    reply,
    scripted_server,
)

TEXT = '[slots]\nsave_dir = "kv"\n'
PROPS = {
    "default_generation_settings": {"n_ctx": 4096},
    "total_slots": 2,
    "model_path": "/models/m.gguf",
    "model_alias": "scripted",
    "chat_template": "abc",
    "build_info": "b1",
}


@define
class Kv:
    """A server's side of a save_dir: `tokens` in the slot, `size` bytes a file; `asked` in order."""

    directory: Path
    tokens: int = 14
    size: int = 100
    asked: list[str] = field(factory=list)

    def act(self, what: str, body: Any) -> bytes:
        self.asked.append(what)
        file = self.directory / body["filename"]
        if what.endswith("save"):
            file.write_bytes(b"k" * self.size)
            return json_response(200, {"n_saved": self.tokens, "n_written": self.size})
        return json_response(200, {"n_restored": self.tokens, "n_read": file.stat().st_size})


def shown(held: int | None) -> list[dict[str, Any]]:
    """`/slots` with the slot idle, holding so many tokens; None: never used."""
    entry: dict[str, Any] = {"id": 0, "n_ctx": 4096, "is_processing": False}
    return [entry if held is None else {**entry, "id_task": 1, "n_prompt_tokens": held}]


@asynccontextmanager
async def serving(directory: Path, text: str = TEXT) -> AsyncIterator[tuple[ScriptedServer, Kv, Daemon]]:
    (directory / "kv").mkdir(exist_ok=True)
    async with scripted_server() as server:
        kv = Kv(directory / "kv")
        server.props, server.on_slot_action = dict(PROPS), kv.act
        async with running_daemon(directory, server.url, text) as daemon:
            yield server, kv, daemon


async def say(
    server: ScriptedServer, daemon: Daemon, session: str = "a", *, cached: int = 0, resume: bool = True
) -> None:
    """A turn whose slot holds 14 tokens more than it began with."""
    server.scripts = [reply("Hi", cache_n=cached, prompt_n=10, predicted_n=5)]
    await daemon.ask(session, "Hello", resume=resume)


async def hang_up_in(server: ScriptedServer, daemon: Daemon, action: str, session: str, *, resume: bool = True) -> None:
    """A turn whose channel goes while the server saves or restores its slot."""
    asked = trio.Event()

    async def hang(path: str) -> None:
        if path.endswith(f"action={action}"):
            asked.set()
            await trio.sleep_forever()

    server.on_probe = hang
    stream, _ = await daemon.open(session, "Hello", resume=resume)
    await asked.wait()
    await stream.aclose()
    await daemon.until_free(session)
    server.on_probe = None


async def save(directory: Path) -> None:
    """A daemon that talks once and ends as SIGTERM has it."""
    async with serving(directory) as (server, _, daemon):
        assert daemon.saver is not None
        server.slots = shown(None)
        await say(server, daemon, resume=False)
        server.slots = shown(14)
        await daemon.saver.drain()


def paths(server: ScriptedServer) -> list[str]:
    return [request.path.removeprefix("/v1/") for request in server.received]


def files(directory: Path) -> SavedFiles:
    return SavedFiles(directory / "kv", directory / "home")


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [vars(record).get("fields", {}) for record in caplog.records if record.getMessage() == event]


async def test_what_a_daemon_saved_at_its_end_is_restored_before_the_next_request(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    await save(tmp_path)
    saved = files(tmp_path).read(SessionId("a"))
    assert saved is not None
    assert (saved.session, saved.tokens, saved.bytes, saved.prompt.messages) == ("a", 14, 100, 2)
    assert saved.server == ServerIdentity(
        model_path="/models/m.gguf", model_bytes=1000, n_ctx=4096, template="ba7816bf8f01", build="b1", lora=None
    )
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(None)
        await say(server, daemon, cached=14)
        known = ["/props", "models", "/lora-adapters"]
        asked = ["/slots", *known, "/slots/0?action=restore", "/slots", "chat/completions"]
        assert paths(server) == asked
        await say(server, daemon, cached=28)
        assert paths(server)[len(asked) :] == ["/slots", "chat/completions"], "once"
        assert kv.asked == ["0?action=restore"]


async def test_nothing_is_asked_without_a_save_dir(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path, "") as (server, kv, daemon):
        assert daemon.saver is None
        await say(server, daemon, resume=False)
        assert (paths(server), kv.asked) == (["/slots", "chat/completions"], [])


async def test_a_slot_that_still_holds_what_was_saved_is_left_alone(tmp_path: Path, autojump_clock: MockClock) -> None:
    await save(tmp_path)
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        await say(server, daemon, cached=14)
        assert kv.asked == []


@pytest.mark.parametrize(
    "change",
    [
        {"model_path": "/models/other.gguf"},
        {"default_generation_settings": {"n_ctx": 2048}},
        {"chat_template": "abd"},
        {"build_info": "b2"},
        {"model_path": None},
        "size",
        "lora",
    ],
)
async def test_another_server_is_not_given_it_and_it_is_kept(
    tmp_path: Path, autojump_clock: MockClock, change: dict[str, Any] | str
) -> None:
    await save(tmp_path)
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(None)
        if isinstance(change, dict):
            server.props |= change
        elif change == "size":
            server.models = {"data": [{"meta": {"size": 1001}}]}
        else:
            server.lora = [{"id": 0, "path": "/adapter.gguf", "scale": 1.0}]
        await say(server, daemon)
        assert kv.asked == []
    assert files(tmp_path).read(SessionId("a")) is not None


async def test_another_prompt_is_not_given_it(tmp_path: Path, autojump_clock: MockClock) -> None:
    await save(tmp_path)
    async with serving(tmp_path, TEXT + "[request.chat_template_kwargs]\nx = 1\n") as (server, kv, daemon):
        server.slots = shown(None)
        await say(server, daemon)
        assert kv.asked == []
    assert list((tmp_path / "kv").iterdir()) == []


async def test_a_session_is_saved_before_another_one_takes_its_slot(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        await say(server, daemon, "b", resume=False)
        await say(server, daemon, "a", cached=14)
        server.slots = shown(28)
        await say(server, daemon, "a", cached=28)
        assert kv.asked == ["0?action=save", "0?action=save", "0?action=restore"]
        assert paths(server)[-2:] == ["/slots", "chat/completions"]


async def test_a_slot_that_a_restart_has_emptied_is_not_saved(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        server.slots = shown(None)
        await say(server, daemon, "b", resume=False)
        await daemon.saver.drain()
        assert kv.asked == []


async def test_a_restart_of_the_server_alone_has_an_earlier_state_restored(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    await save(tmp_path)
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        await say(server, daemon, cached=14)
        server.slots = shown(None)
        await say(server, daemon, cached=14)
        assert kv.asked == ["0?action=restore"]


async def test_a_restore_that_did_nothing_is_told_and_not_tried_again_for_this_server(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "boxmaker")
    await save(tmp_path)
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(None)
        await say(server, daemon, cached=1)
        assert logged(caplog, "slot_restore_useless") == [{"slot": 0, "session": "a", "tokens": 14, "cached": 1}]
        server.slots = shown(14)
        await say(server, daemon, "b", resume=False)
        await say(server, daemon, "a")
        await daemon.saver.drain()
        assert kv.asked == ["0?action=restore"]
        server.props["build_info"] = "b2"  # another server: perhaps it can
        await daemon.saver.drain()
        assert kv.asked[1:] == ["0?action=save"]


async def test_a_restored_slot_is_no_server_that_has_begun_anew(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The real server lists a slot that was restored as never used."""
    async with serving(tmp_path) as (server, kv, daemon):

        def act(what: str, body: Any) -> bytes:
            if what.endswith("restore"):
                server.slots = shown(None)
            return kv.act(what, body)

        server.on_slot_action = act
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        await say(server, daemon, "b", resume=False)
        await say(server, daemon, "a", cached=6)
        assert kv.asked == ["0?action=save", "0?action=save", "0?action=restore"]
        assert daemon.client.record.renewals == 0
        await wait_all_tasks_blocked(0.02)
        line = read_lines(daemon.store.directory / "a")[2]
        assert (line.lost, line.cause) == (8, "evicted")
        assert line.detail == {"session": "b", "restored": 14}


async def test_a_loss_over_a_restart_is_told_as_one_also_when_an_older_state_was_restored(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, resume=False)
        await daemon.saver.drain()
        await say(server, daemon, cached=14)
        server.slots = shown(None)
        await say(server, daemon, cached=14)
        assert kv.asked == ["0?action=save", "0?action=restore"]
        await wait_all_tasks_blocked(0.02)
        line = read_lines(daemon.store.directory / "a")[3]
        assert (line.expected, line.lost, line.cause, line.detail) == (28, 14, "restarted", {"restored": 14})


@pytest.mark.parametrize(
    ("cached", "told", "off"),
    [
        # 14 tokens are saved at first, then what was cached and 14 more
        ((2, 2), 2, True),  # less than half of it twice
        ((2, 8, 3), 2, False),  # but not in a row
        ((1,), 1, True),  # less than a tenth of it at once
        ((7, 11), 0, False),
    ],
)
async def test_a_restore_that_brought_back_little_once_may_be_the_templates_doing(
    tmp_path: Path,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    cached: tuple[int, ...],
    told: int,
    off: bool,
) -> None:
    caplog.set_level("INFO", "boxmaker")
    await save(tmp_path)
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        for tokens in cached:
            server.slots = shown(None)
            await say(server, daemon, cached=tokens)
            server.slots = shown(tokens + 14)
            kv.tokens = tokens + 14
            await daemon.saver.drain()
        assert len(logged(caplog, "slot_restore_useless")) == told
        actions = [what.rpartition("=")[2] for what in kv.asked]
        assert actions == ["restore", "save"] * (len(cached) - off) + ["restore"] * off


def refuse(status: int) -> Callable[[Kv, str, Any], bytes]:
    return lambda *_: error_response(status, "no")


def lie(**values: Any) -> Callable[[Kv, str, Any], bytes]:
    def act(kv: Kv, what: str, body: Any) -> bytes:
        kv.act(what, body)
        return json_response(200, {"n_saved": 14, "n_written": 100, "n_restored": 14} | values)

    return act


BAD: dict[str, Callable[[Kv, str, Any], bytes]] = {
    "501": refuse(501),
    "400": refuse(400),
    "500": refuse(500),
    "no object": lambda *_: json_response(200, []),
    "not there": lambda *_: json_response(200, {"n_saved": 14, "n_written": 100}),
    "another size": lie(n_written=99),
    "no tokens": lie(n_saved=0),
    "odd tokens": lie(n_saved="14", n_restored="14"),
    "fewer come back": lie(n_restored=13),
    "cut off": lambda *_: b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{",
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("action", ["save", "restore"])
async def test_no_failure_of_the_server_hurts_a_turn(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, action: str, kind: str
) -> None:
    """Two sessions take turns on a slot, so each turn saves one and restores the other."""
    caplog.set_level("INFO", "boxmaker")
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        await say(server, daemon, "b", resume=False)  # a is saved
        server.on_slot_action = lambda what, body: (
            BAD[kind](kv, what, body) if what.endswith(action) else kv.act(what, body)
        )
        for session in ("a", "b"):
            await say(server, daemon, session)
    assert logged(caplog, "tool_port_failed") == []
    for name in os.listdir(tmp_path / "kv"):
        if name.endswith(".kv"):
            assert (tmp_path / "kv" / name).with_suffix(".json").exists(), "no file without its record"


async def test_a_file_that_comes_back_otherwise_is_removed(tmp_path: Path, autojump_clock: MockClock) -> None:
    await save(tmp_path)
    async with serving(tmp_path) as (server, _, daemon):
        server.slots = shown(None)
        server.on_slot_action = lambda *_: json_response(200, {"n_restored": 13})
        await say(server, daemon)
    assert list((tmp_path / "kv").iterdir()) == []


@pytest.mark.parametrize("status", [501, 503, 500, 401, 400])
async def test_a_server_that_restores_nothing_just_now_costs_no_file(
    tmp_path: Path, autojump_clock: MockClock, status: int
) -> None:
    """As when it was started once without --slot-save-path, or has no room (400) beside what its other slots hold."""
    await save(tmp_path)
    async with serving(tmp_path) as (server, _, daemon):
        server.slots = shown(None)
        server.on_slot_action = lambda *_: error_response(status, "no")
        await say(server, daemon)
    assert files(tmp_path).read(SessionId("a")) is not None


async def test_a_directory_that_is_not_the_servers_is_found_out(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The file that it says it has written is another one, or none."""
    caplog.set_level("INFO", "boxmaker")
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        server.on_slot_action = lambda what, body: lie(n_written=99)(kv, what, body)
        for number, session in enumerate(["a", "b", "a"]):
            await say(server, daemon, session, resume=number > 1)
        assert kv.asked == ["0?action=save"]
    assert [one["reason"] for one in logged(caplog, "slot_not_saved")] == ["save_dir is not the server's"]
    assert files(tmp_path).read(SessionId("a")) is None


async def test_what_is_saved_is_not_saved_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, resume=False)
        await daemon.saver.drain()
        await daemon.saver.drain()
        assert kv.asked == ["0?action=save"]
        await say(server, daemon, cached=14)
        server.slots = shown(28)
        await daemon.saver.drain()
        assert kv.asked == ["0?action=save"] * 2


async def test_a_live_cache_is_not_restored_over_by_an_older_state(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The daemon was killed after two turns, the first of which was saved; the server has kept its slot."""
    await save(tmp_path)
    async with serving(tmp_path, "") as (server, _, daemon):
        server.slots = shown(14)
        await say(server, daemon, cached=14)
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(28)
        await say(server, daemon, cached=28)
        assert kv.asked == []


async def test_as_many_tokens_of_another_session_are_not_taken_for_its_own(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Sessions of one kind grow alike: whose log was written last decides."""
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        await say(server, daemon, "b", resume=False)
        await daemon.saver.drain()
        assert kv.asked == ["0?action=save"] * 2
        for seconds, session in enumerate("ab", start=1):  # the clock of the disk may be too coarse
            os.utime(daemon.store.directory / session / LOG_NAME, (seconds, seconds))
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        await say(server, daemon, "a", cached=14)
        assert kv.asked == ["0?action=restore"]
    async with serving(tmp_path) as (server, kv, daemon):  # a is there now, as its log says
        server.slots = shown(28)
        await say(server, daemon, "a", cached=28)
        assert kv.asked == []


@pytest.mark.parametrize(
    ("held", "restores"),
    [
        (14, False),  # what was saved
        (28, False),  # what the second turn has left
        (29, False),  # the third turn had begun
        (27, False),  # somebody else; the server may still have the 28 in its memory, but never for a restored slot
        (13, False),
        (None, True),
    ],
)
async def test_what_a_killed_daemon_has_left_in_the_slot_is_not_restored_over(
    tmp_path: Path, autojump_clock: MockClock, held: int | None, restores: bool
) -> None:
    await save(tmp_path)
    async with serving(tmp_path, "") as (server, _, daemon):
        server.slots = shown(14)
        await say(server, daemon, cached=14)
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(held)
        await say(server, daemon, cached=14)
        assert kv.asked == ["0?action=restore"] * restores


async def test_what_was_saved_last_is_restored_over_anything_else(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Nothing was said since: more tokens than that are somebody else's."""
    await save(tmp_path)
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(15)
        await say(server, daemon, cached=14)
        assert kv.asked == ["0?action=restore"]


async def test_a_slot_that_somebody_else_has_used_is_restored(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Also when that came first after a restart of the server, which our look has not seen."""
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, resume=False)
        await daemon.saver.drain()
        assert kv.asked == ["0?action=save"]
        server.slots = shown(500)
        await say(server, daemon, cached=14)
        assert kv.asked == ["0?action=save", "0?action=restore"]


@pytest.mark.parametrize(("saved", "restores"), [(90, True), (89, False)])
async def test_a_state_that_is_much_older_is_not_put_before_what_the_server_may_bring_back(
    tmp_path: Path, autojump_clock: MockClock, saved: int, restores: bool
) -> None:
    """Of 100 tokens, which a server with --cache-ram has still, though not for a slot that was restored."""
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(saved)
        kv.tokens = saved
        server.scripts = [reply("Hi", cache_n=0, prompt_n=saved - 4, predicted_n=5)]
        await daemon.ask("a", "Hello", resume=False)
        await daemon.saver.drain()
        server.scripts = [reply("Hi", cache_n=saved, prompt_n=96 - saved, predicted_n=5)]
        await daemon.ask("a", "Hello", resume=True)
        server.slots = shown(500)
        await say(server, daemon, cached=saved)
        assert kv.asked == ["0?action=save"] + ["0?action=restore"] * restores


async def test_a_fork_that_was_never_asked_costs_its_parent_no_live_cache(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """By the logs the fork was there last; the slot holds what the parent has left."""
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(186)
        kv.tokens = 186
        server.scripts = [reply("Hi", cache_n=0, prompt_n=182, predicted_n=5)]
        await daemon.ask("a", "Hello", resume=False)
        await daemon.saver.drain()
        await say(server, daemon, cached=186)
        await daemon.store.fork(SessionId("a"), None, SessionId("f"), slot=0)
        os.utime(daemon.store.directory / "a" / LOG_NAME, (1, 1))
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(200)
        await say(server, daemon, cached=200)
        assert kv.asked == []


async def test_a_restore_of_before_is_not_judged_by_the_request_after_a_restart_of_the_server(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "boxmaker")
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, resume=False)
        await daemon.saver.drain()
        server.slots = shown(None)
        server.scripts = [error_response(400, "no", "invalid_request_error")]
        await daemon.fail("a", "Hello", resume=True)
        assert kv.asked == ["0?action=save", "0?action=restore"]
        server.on_slot_action = lambda *_: error_response(503, "no")
        await say(server, daemon, cached=0)
    assert logged(caplog, "slot_restore_useless") == []


@pytest.mark.parametrize("kind", BAD)
async def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, autojump_clock: MockClock, kind: str) -> None:
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, resume=False)
        await daemon.saver.drain()
        await say(server, daemon, cached=14)
        server.on_slot_action = lambda what, body: BAD[kind](kv, what, body)
        server.slots = shown(28)
        await say(server, daemon, "b", resume=False)
    saved = files(tmp_path).read(SessionId("a"))
    assert saved is not None
    assert (saved.tokens, saved.bytes) == (14, 100)
    assert {file.suffix for file in kv.directory.iterdir()} == {".kv", ".json"}


async def test_a_server_that_begins_anew_is_asked_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    """It may have been started with --slot-save-path, or with another one."""
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        server.on_slot_action = refuse_all
        await say(server, daemon, "a", resume=False)
        await say(server, daemon, "b", resume=False)
        await say(server, daemon, "a")
        server.slots = shown(None)
        server.on_slot_action = kv.act
        await say(server, daemon, "a")
        server.slots = shown(14)
        await say(server, daemon, "b")
        assert kv.asked == ["0?action=save"]


def refuse_all(what: str, body: Any) -> bytes:
    return error_response(501, f"{what} {body}")


async def test_what_somebody_else_has_put_into_the_slot_is_not_saved(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        server.slots = shown(77)
        await say(server, daemon, "b", resume=False)
        await daemon.saver.drain()
        assert kv.asked == []


async def test_a_session_that_has_moved_is_saved_from_its_new_slot_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with serving(tmp_path) as (server, kv, daemon):
        saver = daemon.saver
        assert saver is not None
        body = b'{"messages":[]}'
        server.slots = [{**shown(14)[0], "id": slot} for slot in (0, 1)]
        for slot in (0, 1):
            await saver.prepare(slot, SessionId("a"), body, None)
            saver.completed(slot, SessionId("a"), 0, 14)
        await saver.drain()
        assert kv.asked == ["1?action=save"]


async def test_a_server_that_saves_nothing_is_asked_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        server.on_slot_action = lambda what, body: kv.asked.append(what) or error_response(501, "no")  # type: ignore[func-returns-value]  # for its effect
        for number, session in enumerate(["a", "b", "a", "b"]):
            await say(server, daemon, session, resume=number > 1)
        assert kv.asked == ["0?action=save"]


async def test_saving_takes_no_longer_than_it_may(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path, TEXT + "save_s = 3\n") as (server, _, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)

        async def hang(path: str) -> None:
            if "action" in path:
                await trio.sleep_forever()

        server.on_probe = hang
        began = trio.current_time()
        await say(server, daemon, "b", resume=False)
        assert trio.current_time() - began == pytest.approx(3)
        began = trio.current_time()
        await daemon.saver.drain()
        assert trio.current_time() - began == pytest.approx(3)
    assert files(tmp_path).read(SessionId("a")) is None


async def test_a_turn_that_is_hung_up_on_while_its_slot_is_saved_leaves_all_in_order(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        await hang_up_in(server, daemon, "save", "b", resume=False)
        await say(server, daemon, "a", cached=14)
        server.slots = shown(28)
        await say(server, daemon, "b")
        assert kv.asked == ["0?action=save"], "of a, which was there last for certain"


async def test_a_session_is_not_forgotten_when_the_one_that_came_after_it_hangs_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """It is in the slot still, and the next one to come takes it from there."""
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        await hang_up_in(server, daemon, "save", "b", resume=False)
        await say(server, daemon, "c", resume=False)
        assert kv.asked == ["0?action=save"]
    saved = files(tmp_path).read(SessionId("a"))
    assert saved is not None
    assert saved.tokens == 14


async def test_after_a_restore_that_was_cancelled_nobody_is_taken_to_be_in_the_slot(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The server goes on with it, and may hold as many tokens then as the one before had."""
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        for session in "ba":
            await say(server, daemon, session, resume=False)  # b is saved, a is there
        await hang_up_in(server, daemon, "restore", "b")
        assert kv.asked == ["0?action=save"] * 2
        await say(server, daemon, "a", cached=14)
        assert kv.asked[2:] == ["0?action=restore"]
        server.slots = shown(28)
        kv.tokens = 28
        await daemon.saver.drain()
    async with serving(tmp_path) as (server, kv, daemon):  # by its log a is there
        server.slots = shown(28)
        kv.tokens = 28
        await hang_up_in(server, daemon, "restore", "b")
        await say(server, daemon, "a", cached=28)
        assert kv.asked == ["0?action=restore"]


async def test_what_is_restored_was_of_use(tmp_path: Path, autojump_clock: MockClock) -> None:
    await save(tmp_path)
    record = (tmp_path / "kv" / files(tmp_path).kv_name(SessionId("a"))).with_suffix(".json")
    os.utime(record, (1, 1))
    async with serving(tmp_path) as (server, _, daemon):
        server.slots = shown(None)
        await say(server, daemon, cached=14)
    assert os.stat(record).st_mtime > 1


def test_who_was_in_a_slot_last_is_told_by_the_logs() -> None:
    in_use = [(SessionId("a"), 0), (SessionId("b"), 1), (SessionId("c"), 0)]
    assert last_in_slots((0, 1), in_use) == {0: "c", 1: "b"}
    assert last_in_slots((7,), in_use) == {7: "c"}, "wherever they began"
    assert last_in_slots((0, 1), []) == {}


async def test_a_directory_that_goes_away_hurts_no_turn(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        (tmp_path / "kv").rmdir()
        await say(server, daemon, "b", resume=False)
        await daemon.saver.sweep(daemon.store.directory)
        await daemon.saver.drain()
        assert kv.asked == []


async def test_files_that_were_deleted_are_no_loss(tmp_path: Path, autojump_clock: MockClock) -> None:
    await save(tmp_path)
    for file in (tmp_path / "kv").iterdir():
        file.unlink()
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(None)
        await say(server, daemon)
        assert kv.asked == []


async def test_the_quota_takes_what_was_of_use_longest_ago(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path, TEXT + "save_mib = 1\n") as (server, kv, daemon):
        kv.size = 400_000
        server.slots = shown(14)
        for session in ("a", "b", "c", "d"):
            await say(server, daemon, session, resume=False)
            for one in "abc":  # the clock of the disk is too coarse to tell them apart
                record = (tmp_path / "kv" / files(tmp_path).kv_name(SessionId(one))).with_suffix(".json")
                if record.exists():
                    os.utime(record, (ord(one), ord(one)))
    kept = [one for one in "abcd" if files(tmp_path).read(SessionId(one)) is not None]
    assert kept == ["b", "c"], "two of 400,000 bytes fit into a MiB, d is still in the slot"


async def test_what_no_session_has_a_use_for_is_swept_and_nothing_else(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    await save(tmp_path)
    kv = tmp_path / "kv"
    mine = files(tmp_path)
    record = json.loads((kv / mine.kv_name(SessionId("a"))).with_suffix(".json").read_text())

    def put(files: SavedFiles, session: str, **changes: Any) -> None:
        name = kv / files.kv_name(SessionId(session))
        name.write_bytes(b"k" * 100)
        value = record | {"session": session} | changes
        name.with_suffix(".json").write_text(json.dumps(value) + "\n")

    put(mine, "gone")
    put(mine, "cut", bytes=0, tokens=0)
    other = SavedFiles(kv, tmp_path / "other home")
    put(other, "a")
    (kv / "owner.kv").write_bytes(b"mine")
    (kv / f"boxmaker-{'0' * 32}.kv").write_bytes(b"without a record")
    (kv / f"boxmaker-{'1' * 32}.json").write_text("{}")
    async with serving(tmp_path) as (_, _, daemon):
        assert daemon.saver is not None
        (daemon.store.directory / "cut").mkdir()
        await daemon.saver.sweep(daemon.store.directory)
    left = {file.name for file in kv.iterdir()}
    kept = {"owner.kv", f"boxmaker-{'0' * 32}.kv", f"boxmaker-{'1' * 32}.json"}
    for one in (mine, other):
        name = one.kv_name(SessionId("a"))
        kept |= {name, name.replace(".kv", ".json")}
    assert left == kept


def test_a_directory_must_be_one_where_we_may_remove(tmp_path: Path) -> None:
    assert save_dir_problem(tmp_path) is None
    assert save_dir_problem(tmp_path / "none") == "No such file or directory"
    (tmp_path / "file").write_text("")
    assert save_dir_problem(tmp_path / "file") == "Not a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove everywhere")
def test_a_directory_where_we_may_not_remove_is_none(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert save_dir_problem(tmp_path) == "loopd may not read, write and remove there"
    tmp_path.chmod(0o700)
    shared = os.stat("/tmp")  # everybody may write there, and remove what is their own
    if shared.st_mode & stat.S_ISVTX and shared.st_uid != os.geteuid():
        assert save_dir_problem(Path("/tmp")) == "its sticky bit lets nobody remove the server's files"


@pytest.mark.parametrize(
    ("props", "models", "found"),
    [
        (PROPS, {"data": [{"meta": {"size": 5}}]}, 5),
        (PROPS, {"data": []}, None),
        (PROPS, None, None),
        (PROPS, {"data": [{"meta": {"size": "5"}}]}, None),
        (PROPS | {"build_info": 7}, {"data": [{"meta": {"size": 5}}]}, 5),
        ({**PROPS, "default_generation_settings": {}}, None, "unknown"),
        ({}, None, "unknown"),
        (None, None, "unknown"),
    ],
)
def test_a_server_is_known_by_its_model_context_and_template(props: Any, models: Any, found: Any) -> None:
    identity = server_identity(props, models, [])
    if found == "unknown":
        assert identity is None
    else:
        build = "b1" if props["build_info"] == "b1" else None
        assert identity == ServerIdentity(
            model_path="/models/m.gguf", model_bytes=found, n_ctx=4096, template="ba7816bf8f01", build=build, lora=None
        )


def test_a_server_is_known_by_its_adapters() -> None:
    def lora(value: Any) -> str | None:
        identity = server_identity(PROPS, None, value)
        assert identity is not None
        return identity.lora

    # printf '%s' '[{"id":0,"path":"/a.gguf","scale":1.0}]' | sha256sum
    assert lora([{"id": 0, "path": "/a.gguf", "scale": 1.0}]) == "92eb9893e7f0"
    assert lora([{"id": 0, "path": "/a.gguf", "scale": 0.5}]) != "92eb9893e7f0"
    assert (lora([]), lora(None)) == (None, None)


async def test_a_request_that_is_refused_leaves_nothing_to_save_under_its_name(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The slot still holds what the session before it has left."""
    caplog.set_level("INFO", "boxmaker")
    async with serving(tmp_path) as (server, _, daemon):
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        server.scripts = [error_response(400, "no", "invalid_request_error")]
        await daemon.fail("b", "Hello", resume=False)
        await say(server, daemon, "a", cached=14)
        assert files(tmp_path).read(SessionId("b")) is None
        server.slots = shown(28)
        await say(server, daemon, "b", cached=3)
    assert logged(caplog, "slot_restore_useless") == []


async def break_off(server: ScriptedServer, daemon: Daemon, session: str, script: list[Any]) -> None:
    """A turn whose channel goes in the middle of the answer."""
    count = len(server.completions)
    server.scripts = [script]
    stream, _ = await daemon.open(session, "Tell me all", resume=True)
    await server.wait_for_completions(count + 1)
    await wait_all_tasks_blocked(0.02)
    await stream.aclose()
    await daemon.until_free(session)


@pytest.mark.parametrize(
    ("held", "saves"),
    [
        (100, True),
        (14, True),  # it was cancelled before it had read anything
        (13, False),  # that is not what the session had before
        (None, False),
    ],
)
async def test_what_a_reply_that_was_broken_off_has_left_is_saved(
    tmp_path: Path, autojump_clock: MockClock, held: int | None, saves: bool
) -> None:
    """The session's next request begins with what it had before, and with the message that was asked then."""
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        await break_off(server, daemon, "a", [Send(STREAM_HEAD + delta(content="long")), Hang()])
        server.slots = shown(held)
        kv.tokens = held or 0
        await say(server, daemon, "b", resume=False)
        assert kv.asked == ["0?action=save"] * saves
        saved = files(tmp_path).read(SessionId("a"))
        assert (saved is not None) is saves
        if saved is not None:
            assert (saved.tokens, saved.sure, saved.prompt.messages) == (held, 14, 4)
            server.slots = shown(14)
            await say(server, daemon, "a", cached=14)
            assert kv.asked[-1] == "0?action=restore"


@pytest.mark.parametrize(("cached", "told"), [(7, False), (6, True)])
async def test_a_restore_of_what_was_broken_off_is_judged_by_what_is_sure_and_turns_nothing_off(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, cached: int, told: bool
) -> None:
    """A server that cannot go back, as of a sliding-window model, may be able to restore a completion."""
    caplog.set_level("INFO", "boxmaker")
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        await break_off(server, daemon, "a", [Send(STREAM_HEAD + delta(content="long")), Hang()])
        server.slots = shown(100)
        kv.tokens = 100
        await say(server, daemon, "b", resume=False)
        server.slots = shown(14)
        kv.tokens = 14
        server.on_slot_action = lambda what, body: (
            json_response(200, {"n_restored": 100}) if what.endswith("restore") else kv.act(what, body)
        )
        await say(server, daemon, "a", cached=cached)
        useless = [{"slot": 0, "session": "a", "tokens": 100, "cached": cached}]
        assert logged(caplog, "slot_restore_useless") == useless * told
        server.on_slot_action = kv.act
        server.slots = shown(cached + 14)
        kv.tokens = cached + 14
        await say(server, daemon, "c", resume=False)
        assert kv.asked[-1] == "0?action=save"
        saved = files(tmp_path).read(SessionId("a"))
        assert saved is not None
        assert (saved.tokens, saved.sure) == (cached + 14, cached + 14)


async def test_at_its_end_the_daemon_waits_until_the_server_has_left_a_reply(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A turn that is cancelled by the end of the grace is broken off just before."""
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        await break_off(server, daemon, "a", [Send(STREAM_HEAD + delta(content="long")), Hang()])
        server.slots = [{"id": 0, "n_ctx": 4096, "is_processing": True}]
        looks: list[str] = []

        async def left(path: str) -> None:
            looks.append(path)
            if len(looks) == 3:
                server.slots = shown(100)

        server.on_probe = left
        kv.tokens = 100
        await daemon.saver.drain()
        assert kv.asked == ["0?action=save"]
        saved = files(tmp_path).read(SessionId("a"))
        assert saved is not None
        assert (saved.tokens, saved.sure) == (100, 14)


async def test_at_its_end_the_daemon_does_not_wait_for_a_request_of_others(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with serving(tmp_path) as (server, kv, daemon):
        assert daemon.saver is not None
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        server.slots = [{"id": 0, "n_ctx": 4096, "is_processing": True}]
        began = trio.current_time()
        await daemon.saver.drain()
        assert (kv.asked, trio.current_time() - began) == ([], 0)


async def test_what_a_request_without_an_answer_has_left_is_not_saved(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The server may not have begun with it: the slot may hold another session's tokens."""
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        await break_off(server, daemon, "a", [Hang()])
        server.slots = shown(100)
        await say(server, daemon, "b", resume=False)
        assert kv.asked == []


async def test_a_save_of_another_count_than_was_left_is_not_kept(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Somebody else took the slot between our look and the save."""
    async with serving(tmp_path) as (server, kv, daemon):
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        kv.tokens = 77
        await say(server, daemon, "b", resume=False)
        assert kv.asked == ["0?action=save"]
    assert list((tmp_path / "kv").iterdir()) == []


async def test_the_quota_leaves_what_is_about_to_be_restored(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path, TEXT + "save_mib = 1\n") as (server, kv, daemon):
        kv.size = 600_000
        server.slots = shown(14)
        await say(server, daemon, "a", resume=False)
        await say(server, daemon, "b", resume=False)
        await say(server, daemon, "a", cached=14)
        assert kv.asked == ["0?action=save", "0?action=save", "0?action=restore"]
