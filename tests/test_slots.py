"""Several slots of the server are ours: who gets which, and that turns on different slots run at the same time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from boxmaker.channel.client import TurnChannel
from boxmaker.proto.channel import Cancel, CancelDone, Fork, ForkDone, Status, StatusDone, TurnDone
from boxmaker.proto.chat import Queued
from boxmaker.proto.frames import Answer, encode_request
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import SessionStart
from boxmaker.session.ledger import read_lines
from boxmaker.session.logs import slots_in_use
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.server import STREAM_HEAD, Send, Until, delta, ending, reply, scripted_server

TWO = "[slots]\nmain = [1, 0]\n"


def listed(*busy: int) -> list[dict[str, Any]]:
    return [{"id": slot, "n_ctx": 4096, "is_processing": slot in busy} for slot in (0, 1, 2)]


def started_on(daemon: Daemon, session: str) -> int:
    start = daemon.log(session)[0]
    assert isinstance(start, SessionStart)
    return start.slot


def asked_slots(bodies: list[bytes]) -> list[int]:
    return [json.loads(body)["id_slot"] for body in bodies]


async def answer_to(daemon: Daemon, request: Any) -> Answer:
    async with await daemon.connect() as stream:
        await stream.send_all(encode_request(request))
        while True:
            frame = await TurnChannel(stream).receive()
            if frame.final:
                assert frame.answer is not None
                return frame.answer


async def test_turns_on_different_slots_run_at_the_same_time(tmp_path: Path, autojump_clock: MockClock) -> None:
    go = trio.Event()
    held = [Send(STREAM_HEAD + delta(content="So ")), Until(go), Send(ending())]
    third = reply("Third.")
    async with scripted_server(held, held, third) as server, running_daemon(tmp_path, server.url, TWO) as daemon:
        server.slots = listed()
        done: dict[str, list[Answer]] = {}

        async def turn(session: str) -> None:
            done[session] = await daemon.turn(session, "Hello", resume=False)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(turn, "a")
            await server.wait_for_completions(1)
            nursery.start_soon(turn, "b")
            await server.wait_for_completions(2)
            nursery.start_soon(turn, "c")  # there is no third slot: it shares that of a, which was used longest ago
            await wait_all_tasks_blocked(0.02)
            assert len(server.completions) == 2
            go.set()
        assert asked_slots(server.bodies) == [1, 0, 1]
        assert [started_on(daemon, session) for session in "abc"] == [1, 0, 1]
        assert all(isinstance(answers[-1], TurnDone) for answers in done.values())
        waited = {session: [a for a in answers if isinstance(a, Queued)] for session, answers in done.items()}
        assert waited == {"a": [], "b": [], "c": [Queued(ahead=1)]}


async def test_a_session_keeps_its_slot_over_turns_and_restarts(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(*[reply("ok", cache_n=None)] * 8) as server:
        server.slots = listed()
        async with running_daemon(tmp_path, server.url, TWO) as daemon:
            for session, resume in [("a", False), ("b", False), ("b", True), ("a", True)]:
                await daemon.ask(session, "Hello", resume=resume)
        async with running_daemon(tmp_path, server.url, TWO) as daemon:
            for session in "ba":
                await daemon.ask(session, "Hello", resume=True)
        assert asked_slots(server.bodies) == [1, 0, 0, 1, 0, 1]


async def test_after_a_restart_a_new_session_takes_the_slot_that_was_used_longest_ago(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server(*[reply("ok", cache_n=None)] * 3) as server:
        server.slots = listed()
        async with running_daemon(tmp_path, server.url, TWO) as daemon:
            await daemon.ask("a", "Hello", resume=False)
            await daemon.ask("b", "Hello", resume=False)
            sessions = daemon.store.directory
        os.utime(sessions / "b" / "0.jsonl", (1, 1))
        os.utime(sessions / "a" / "0.jsonl", (2, 2))
        assert slots_in_use(sessions) == [("b", 0), ("a", 1)]
        async with running_daemon(tmp_path, server.url, TWO) as daemon:
            await daemon.ask("c", "Hello", resume=False)
            assert started_on(daemon, "c") == 0


def test_logs_that_cannot_be_read_have_no_slot(tmp_path: Path) -> None:
    for session in ("empty", "torn", "none", "link"):
        (tmp_path / session).mkdir()
    (tmp_path / "empty" / "0.jsonl").write_bytes(b"")
    (tmp_path / "torn" / "0.jsonl").write_bytes(b'{"type":"session_st')
    (tmp_path / "link" / "0.jsonl").symlink_to(tmp_path / "torn" / "0.jsonl")
    assert slots_in_use(tmp_path) == []


async def test_a_session_whose_slot_is_not_listed_any_more_moves_and_still_extends(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server(*[reply("ok", cache_n=None)] * 3) as server:
        server.slots = listed()
        async with running_daemon(tmp_path, server.url, "[slots]\nmain = 2\n") as daemon:
            await daemon.ask("a", "Hello", resume=False)
        async with running_daemon(tmp_path, server.url, TWO) as daemon:
            await daemon.ask("a", "Hello", resume=True)
            await daemon.ask("a", "Hello", resume=True)
            assert started_on(daemon, "a") == 2, "the one that it began on"
        first, second, third = server.bodies
        assert asked_slots([first, second, third]) == [2, 1, 1]
        for shorter, longer in ((first, second), (second, third)):
            assert longer.startswith(shorter[: shorter.index(b'],"tools":')])


async def test_a_session_that_could_not_be_begun_takes_no_slot(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(*[reply("ok", cache_n=None)] * 3) as server:
        server.slots = listed()
        async with running_daemon(tmp_path, server.url, TWO) as daemon:
            (daemon.store.directory / "x").mkdir()
            await daemon.fail("x", "Hello", resume=False)
            await daemon.fail("y", "Hello", resume=True)
            await daemon.ask("a", "Hello", resume=False)
            await daemon.ask("b", "Hello", resume=False)
            assert [started_on(daemon, session) for session in "ab"] == [1, 0]


async def test_a_fork_is_a_new_session_and_takes_the_other_slot(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(*[reply("ok", cache_n=None)] * 2) as server:
        server.slots = listed()
        async with running_daemon(tmp_path, server.url, TWO) as daemon:
            await daemon.ask("a", "Hello", resume=False)
            fork = Fork(session=SessionId("a"), from_=None, new=SessionId("b"))
            assert isinstance(await answer_to(daemon, fork), ForkDone)
            await daemon.ask("b", "And?", resume=True)
            assert asked_slots(server.bodies) == [1, 0]
            assert started_on(daemon, "b") == 0
            assert daemon.log("b")[1:4] == daemon.log("a")[1:4]


@pytest.mark.parametrize(("busy", "free"), [((0,), True), ((1,), False)])
async def test_a_cancel_looks_at_the_slot_of_its_turn(
    busy: tuple[int, ...], free: bool, tmp_path: Path, autojump_clock: MockClock
) -> None:
    held = [Send(STREAM_HEAD + delta(content="So ")), Until(trio.Event())]
    async with scripted_server(held) as server, running_daemon(tmp_path, server.url, TWO) as daemon:
        server.slots = listed()
        stream, _ = await daemon.open("a", "Hello", resume=False)
        async with stream:
            await server.wait_for_completions(1)
            server.slots = listed(*busy)
            done = await answer_to(daemon, Cancel(session=SessionId("a"), cause="owner"))
    assert isinstance(done, CancelDone)
    assert done.slot_free is free


async def test_the_status_marks_every_slot_of_ours(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url, TWO) as daemon:
        server.slots = listed()
        status = await answer_to(daemon, Status())
    assert isinstance(status, StatusDone)
    assert [(slot.id, slot.ours) for slot in status.slots] == [(0, True), (1, True), (2, False)]


async def test_two_sessions_on_two_slots_lose_nothing_to_each_other(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [reply("ok"), reply("ok"), reply("ok", cache_n=3), reply("ok", cache_n=14)]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url, TWO) as daemon:
        server.slots = listed()
        for session, resume in [("a", False), ("b", False), ("a", True), ("b", True)]:
            await daemon.ask(session, "Hello", resume=resume)
        await wait_all_tasks_blocked(0.02)
        written = read_lines(daemon.store.directory / "a")
    # a lost 11 tokens on its own slot, and b was not there
    rows = [(line.slot, line.lost, line.cause) for line in written.values()]
    assert rows == [(1, 0, None), (1, 11, "restarted_or_foreign")]
