"""Causes as a whole daemon finds them: what is asked of the server, what is written, and that no turn is hurt.

The server is scripted, so each loss is what its figures say. Everything runs on the autojump clock.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from boxmaker.channel.stop import Stop
from boxmaker.inference.cause import Evidence
from boxmaker.proto.channel import Fork, ForkDone, TurnDone
from boxmaker.proto.ids import SessionId
from boxmaker.proto.ledger import CacheLine
from boxmaker.session.ledger import LEDGER_NAME, read_lines
from boxmaker.testing.daemon import Daemon, fixed_now, running_daemon
from boxmaker.testing.server import (
    STREAM_HEAD,
    Hang,
    ScriptedServer,
    Send,
    chunk,
    delta,
    error_response,
    json_response,
    reply,
    scripted_server,
)
from boxmaker.turn.runtime import Spent, tell_nobody


async def lines_of(daemon: Daemon, session: str = "a") -> list[CacheLine]:
    """The lines of a session, once the daemon has done what it had to."""
    await wait_all_tasks_blocked(0.02)
    found = read_lines(daemon.store.directory / session)
    return [found[number] for number in sorted(found)]


def shown(held: int | None, task: int = 1, n_ctx: int = 4096) -> list[dict[str, Any]]:
    """`/slots` with the slot idle, holding so many tokens; None: never used."""
    entry: dict[str, Any] = {"id": 0, "n_ctx": n_ctx, "is_processing": False}
    return [entry if held is None else {**entry, "id_task": task, "n_prompt_tokens": held}]


def asked_since(server: ScriptedServer, count: int) -> list[str]:
    return [request.path for request in server.received[count:]]


async def begin(server: ScriptedServer, daemon: Daemon) -> None:
    """The first turn of session a, which leaves 99 tokens in its slot."""
    server.scripts += [reply("Hi", cache_n=0, prompt_n=80, predicted_n=20)]
    await daemon.ask("a", "Hello", resume=False)


async def fork(daemon: Daemon) -> ForkDone:
    """Fork session a at its last answer: session f."""
    done = await daemon.service.run(Fork(session=SessionId("a"), from_=None, new=SessionId("f")), tell_nobody, Stop())
    assert isinstance(done, ForkDone)
    return done


async def test_every_completion_has_its_line(tmp_path: Path, autojump_clock: MockClock) -> None:
    timed = (
        STREAM_HEAD
        + delta(content="One.")
        + chunk({"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}]})
        + chunk({"choices": [], "timings": {"cache_n": 0, "prompt_n": 10, "predicted_n": 5, "prompt_ms": 200.4}})
        + b"data: [DONE]\n\n"
    )
    scripts = (
        timed,
        reply(calls=[("c", "clock", "{}")], cache_n=14, prompt_n=6, predicted_n=4),
        reply("Two.", cache_n=23, prompt_n=5, predicted_n=3),
        reply("Three.", cache_n=None, prompt_n=None, predicted_n=3),
    )
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        await daemon.ask("a", "Hello", resume=False)
        await daemon.ask("a", "Time?", resume=True)
        before = len(server.received)
        await daemon.ask("a", "And?", resume=True)
        lines = await lines_of(daemon)
        assert asked_since(server, before) == ["/slots", "/v1/chat/completions"]  # nothing lost, nothing asked
    rows = [(line.completion, line.cached, line.read, line.generated, line.expected, line.lost) for line in lines]
    assert rows == [
        (1, 0, 10, 5, None, 0),
        (2, 14, 6, 4, 14, 0),
        (3, 23, 5, 3, 23, 0),
        (4, None, None, 3, 30, None),
    ]
    assert [line.prefill_ms for line in lines] == [200, None, None, None]
    assert [line.cause for line in lines] == [None] * 4


async def lose(
    daemon: Daemon, server: ScriptedServer, before: Any = None, *, got: int = 3, slots: Any = None
) -> CacheLine:
    """Two turns of session a, the second of which loses; give its line. Between them `/slots` changes."""
    if before is not None:
        server.slots = before
    server.scripts += [reply("Hi there", reasoning="Greet.", cache_n=0, prompt_n=80, predicted_n=20)]
    await daemon.ask("a", "Hello", resume=False)
    await wait_all_tasks_blocked(0.02)
    if slots is not None:
        server.slots = slots
    server.scripts += [reply("Again", cache_n=got, prompt_n=110, predicted_n=5)]
    await daemon.ask("a", "And?", resume=True)
    line = (await lines_of(daemon))[-1]
    assert (line.expected, line.lost, line.cached) == (99, 99 - got, got)
    return line


def stripping(body: dict[str, Any]) -> bytes:
    """A template in Qwen3's manner: of the past there is no reasoning."""
    text = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
    return json_response(200, {"prompt": text + "<assistant>"})


async def test_a_template_that_drops_reasoning_is_named_with_message_and_text(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.apply_template = stripping
        line = await lose(daemon, server, shown(None), slots=shown(99))
        assert line.cause == "template"
        assert line.detail == {
            "message": 3,
            "role": "assistant",
            "was": "Greet.",
            "now": "Hi there<user>And?<assistant>",
        }
        rendered = [request.json() for request in server.received if request.path == "/apply-template"]
        assert [len(body["messages"]) for body in rendered] == [2, 4]
        sent = json.loads(server.bodies[-1])
        assert all(body["chat_template_kwargs"] == sent["chat_template_kwargs"] for body in rendered)
        assert all(body["tools"] == sent["tools"] for body in rendered)


async def test_a_slot_that_held_everything_was_read_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        line = await lose(daemon, server, shown(None), slots=shown(99))
        assert (line.cause, line.detail) == ("reread", {})


async def test_a_template_that_cannot_be_asked_leaves_the_cause_unknown(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.apply_template = error_response(404, "File Not Found")
        line = await lose(daemon, server, shown(None), slots=shown(99))
        assert line.cause == "unknown"


async def test_another_session_on_the_slot_is_named(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.scripts += [reply("Hi", cache_n=0, prompt_n=80, predicted_n=20), reply("Ho", cache_n=3)]
        await daemon.ask("a", "Hello", resume=False)
        await daemon.ask("b", "Hello", resume=False)
        server.scripts += [reply("Again", cache_n=3, prompt_n=110, predicted_n=5)]
        before = len(server.received)
        await daemon.ask("a", "And?", resume=True)
        line = (await lines_of(daemon))[-1]
        assert (line.cause, line.detail, line.lost) == ("evicted", {"session": "b"}, 96)
        assert asked_since(server, before) == ["/slots", "/v1/chat/completions"]


async def test_a_request_that_was_refused_has_taken_nothing(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.slots = shown(None)
        server.scripts += [reply("Hi", cache_n=0, prompt_n=80, predicted_n=20), error_response(400, "No.")]
        await daemon.ask("a", "Hello", resume=False)
        server.slots = shown(99)
        await daemon.fail("b", "Hello", resume=False)
        server.slots = shown(640, 7)
        server.scripts += [reply("Again", cache_n=3, prompt_n=110, predicted_n=5)]
        await daemon.ask("a", "And?", resume=True)
        line = (await lines_of(daemon))[-1]
        assert (line.cause, line.detail) == ("foreign", {"held": 640}), "it was not b"


async def test_a_request_that_broke_off_has_taken_the_slot(tmp_path: Path, autojump_clock: MockClock) -> None:
    config = "[retry]\nattempts = 1\n"
    async with scripted_server() as server, running_daemon(tmp_path, server.url, config) as daemon:
        server.scripts += [reply("Hi", cache_n=0, prompt_n=80, predicted_n=20), [Send(STREAM_HEAD)]]
        await daemon.ask("a", "Hello", resume=False)
        await daemon.fail("b", "Hello", resume=False)
        server.scripts += [reply("Again", cache_n=3, prompt_n=110, predicted_n=5)]
        await daemon.ask("a", "And?", resume=True)
        line = (await lines_of(daemon))[-1]
        assert (line.cause, line.detail) == ("evicted", {"session": "b"})


TWO = "[slots]\nmain = [0, 1]\n"


def both_shown(*held: int | None) -> list[dict[str, Any]]:
    """`/slots` with slots 0 and 1, as `shown`."""
    return [{**shown(tokens)[0], "id": number} for number, tokens in enumerate(held)]


async def test_a_fork_that_runs_on_another_slot_has_left_its_cache_there(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url, TWO) as daemon:
        server.slots = both_shown(None, None)
        await begin(server, daemon)
        assert await fork(daemon) == ForkDone(session=SessionId("f"), from_=1)
        server.slots = both_shown(99, None)
        server.scripts += [reply("Again", cache_n=0, prompt_n=110, predicted_n=5)]
        await daemon.ask("f", "And?", resume=True)
        line = (await lines_of(daemon, "f"))[-1]
        assert (line.slot, line.cause, line.detail) == (1, "evicted", {"session": None, "slot_before": 0})


async def test_a_fork_on_the_same_slot_is_told_who_has_used_it_since(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.scripts += [reply("Hi", cache_n=0, prompt_n=80, predicted_n=20), reply("Ho", cache_n=3)]
        await daemon.ask("a", "Hello", resume=False)
        await daemon.ask("b", "Hello", resume=False)
        await fork(daemon)
        server.scripts += [reply("Again", cache_n=3, prompt_n=110, predicted_n=5)]
        await daemon.ask("f", "And?", resume=True)
        line = (await lines_of(daemon, "f"))[-1]
        assert (line.cause, line.detail) == ("evicted", {"session": "b"})


async def test_of_a_fork_that_this_daemon_has_not_made_no_slot_proves_anything(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        server.slots = both_shown(None, None)
        async with running_daemon(tmp_path, server.url, TWO) as daemon:
            await begin(server, daemon)
            await fork(daemon)
        async with running_daemon(tmp_path, server.url, TWO) as daemon:
            server.slots = both_shown(99, None)
            server.scripts += [reply("Hm", cache_n=99, prompt_n=3, predicted_n=3)]
            await daemon.ask("a", "More?", resume=True)  # now it is known that the server lists what was used
            server.scripts += [reply("Again", cache_n=0, prompt_n=110, predicted_n=5)]
            await daemon.ask("f", "And?", resume=True)
            line = (await lines_of(daemon, "f"))[-1]
            assert (line.slot, line.lost, line.cause) == (1, 99, "unknown")


async def test_a_session_that_has_moved_while_the_daemon_was_down_is_told_so(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        server.slots = both_shown(None, None)
        async with running_daemon(tmp_path, server.url) as daemon:
            await begin(server, daemon)
            await lines_of(daemon)
        async with running_daemon(tmp_path, server.url, "[slots]\nmain = 1\n") as daemon:
            server.slots = both_shown(99, None)
            server.scripts += [reply("Again", cache_n=0, prompt_n=110, predicted_n=5)]
            await daemon.ask("a", "And?", resume=True)
            line = (await lines_of(daemon))[-1]
            assert (line.slot, line.cause, line.detail) == (1, "evicted", {"session": None, "slot_before": 0})


async def test_a_side_file_of_another_log_says_nothing(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        server.slots = both_shown(None, None)
        async with running_daemon(tmp_path, server.url) as daemon:
            await begin(server, daemon)
            await lines_of(daemon)
            file = daemon.store.directory / "a" / LEDGER_NAME
        file.write_text(file.read_text("utf-8").replace('"read":80', '"read":81'), "utf-8")
        async with running_daemon(tmp_path, server.url, "[slots]\nmain = 1\n") as daemon:
            server.slots = both_shown(99, None)
            server.scripts += [reply("Again", cache_n=0, prompt_n=110, predicted_n=5)]
            await daemon.ask("a", "And?", resume=True)
            assert (await lines_of(daemon))[-1].cause == "unknown"


async def test_of_a_template_that_came_while_nothing_was_lost_no_change_is_told(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        daemon.rt.facts.saw_props({"chat_template": "old"})
        server.props = {"chat_template": "new"}
        for session in "ab":  # the second one is begun on a server that has begun anew since the first
            server.slots = shown(None)
            server.scripts += [reply("Hi", cache_n=0, prompt_n=80, predicted_n=20)]
            await daemon.ask(session, "Hello", resume=False)
            server.slots = shown(99)
            server.scripts += [reply("Hm", cache_n=99, prompt_n=6, predicted_n=3)]
            await daemon.ask(session, "More?", resume=True)
        server.slots = shown(None)
        server.scripts += [reply("Again", cache_n=0, prompt_n=110, predicted_n=5)]
        await daemon.ask("b", "And?", resume=True)
        assert (await lines_of(daemon, "b"))[-1].cause == "restarted"


async def test_another_template_is_told_to_every_session_that_it_has_cost_tokens(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url, TWO) as daemon:
        daemon.rt.facts.saw_props({"chat_template": "old"})
        server.slots = both_shown(None, None)
        server.scripts += [reply("Hi", cache_n=0, prompt_n=80, predicted_n=20)] * 2
        for session in "ab":
            await daemon.ask(session, "Hello", resume=False)
        server.slots = both_shown(99, 99)
        server.scripts += [reply("Hm", cache_n=99, prompt_n=6, predicted_n=3)] * 2
        for session in "ab":
            await daemon.ask(session, "More?", resume=True)
        server.props = {"chat_template": "new"}
        for session in "ab":
            server.slots = both_shown(None, None)
            server.scripts += [reply("Again", cache_n=0, prompt_n=110, predicted_n=5)]
            await daemon.ask(session, "And?", resume=True)
            line = (await lines_of(daemon, session))[-1]
            assert (line.cause, line.detail.get("what")) == ("model", "template"), session
        for session in "ab":
            server.slots = both_shown(300, 300)
            server.scripts += [reply("Hm", cache_n=114, prompt_n=6, predicted_n=3)]
            await daemon.ask(session, "More?", resume=True)
            server.slots = both_shown(None, None)
            server.scripts += [reply("Again", cache_n=0, prompt_n=150, predicted_n=5)]
            await daemon.ask(session, "And?", resume=True)
            assert (await lines_of(daemon, session))[-1].cause == "restarted", "the template is the same since"


async def test_a_slot_that_was_used_and_is_unused_again_is_a_restart(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.scripts += [reply("Hm", cache_n=0, prompt_n=3, predicted_n=3)]
        await daemon.ask("b", "First", resume=False)
        line = await lose(daemon, server, shown(5), got=0, slots=shown(None))
        assert (line.cause, line.detail) == ("restarted", {})
        assert server.received[-1].path == "/props"


async def test_a_restart_with_another_template_is_a_change_of_model(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        daemon.rt.facts.saw_props({"chat_template": "old"})
        server.props = {"chat_template": "new"}
        server.scripts += [reply("Hm", cache_n=0, prompt_n=3, predicted_n=3)]
        await daemon.ask("b", "First", resume=False)
        line = await lose(daemon, server, shown(5), got=0, slots=shown(None))
        # the first twelve digits of each SHA-256
        assert (line.cause, line.detail) == (
            "model",
            {"what": "template", "was": "cba06b5736fa", "now": "11507a0e2f5e"},
        )


async def test_a_slot_that_holds_something_else_was_used_by_others(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        line = await lose(daemon, server, shown(None), slots=shown(640, 7))
        assert (line.cause, line.detail) == ("foreign", {"held": 640})


async def test_another_context_is_a_change_of_model(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        line = await lose(daemon, server, shown(None), slots=shown(None, n_ctx=512))
        assert (line.cause, line.detail) == ("model", {"what": "n_ctx", "was": 4096, "now": 512})


async def test_a_server_that_shows_nothing_leaves_restart_and_others_apart(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        line = await lose(daemon, server, error_response(501, "no slots", "not_supported_error"))
        assert line.cause == "restarted_or_foreign"


async def test_after_a_restart_of_the_daemon_the_server_is_asked_whether_it_lists_use(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        async with running_daemon(tmp_path, server.url) as daemon:
            await begin(server, daemon)
        async with running_daemon(tmp_path, server.url) as daemon:
            server.slots = shown(None)

            async def as_used(path: str) -> None:
                if path == "/slots" and server.completions[1:]:
                    server.slots = shown(124)

            server.on_probe = as_used
            server.scripts += [reply("Again", cache_n=0, prompt_n=110, predicted_n=5)]
            await daemon.ask("a", "And?", resume=True)
            line = (await lines_of(daemon))[-1]
            assert (line.cause, line.lost) == ("restarted", 99)
            assert [request.path for request in server.received[-2:]] == ["/slots", "/props"]


async def test_at_most_two_things_are_asked_for_a_turn_with_several_losses(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.slots = shown(None)
        await begin(server, daemon)
        server.slots = shown(99)
        server.scripts += [
            reply(calls=[("c", "clock", "{}")], cache_n=90, prompt_n=20, predicted_n=5),
            reply("Two", cache_n=50, prompt_n=20, predicted_n=5),
        ]
        looks: list[int] = []

        async def as_left(path: str) -> None:
            if path == "/slots":
                looks.append(len(server.completions))
                server.slots = shown(99 if len(server.completions) < 2 else 114)

        server.on_probe = as_left
        before = len(server.received)
        await daemon.ask("a", "And?", resume=True)
        lines = await lines_of(daemon)
        assert [(line.lost, line.cause) for line in lines] == [(0, None), (9, "unknown"), (64, "reread")]
        asked = asked_since(server, before)
        assert asked.count("/apply-template") == 2
        assert asked.count("/slots") == 2, "those before the requests"


async def test_a_turn_that_arrives_ends_the_search_and_the_lines_are_written(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.slots = shown(None)
        await begin(server, daemon)

        async def hang(path: str) -> None:
            if path == "/apply-template":
                await trio.sleep_forever()

        server.on_probe = hang
        server.slots = shown(99)
        server.scripts += [reply("Two", cache_n=50, prompt_n=20, predicted_n=5), [Send(STREAM_HEAD), Hang()]]
        began = trio.current_time()
        await daemon.ask("a", "And?", resume=True)
        stream, _ = await daemon.open("a", "Next?", resume=True)
        async with stream:
            await server.wait_for_completions(3)
            assert trio.current_time() == began
            lines = await lines_of(daemon)
            assert [(line.lost, line.cause) for line in lines] == [(0, None), (49, "unknown")]


async def test_a_search_that_the_server_does_not_answer_ends_by_itself(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.slots = shown(None)
        await begin(server, daemon)

        async def hang(path: str) -> None:
            if len(server.completions) == 2:
                await trio.sleep_forever()

        server.on_probe = hang
        server.slots = error_response(501, "no slots", "not_supported_error")
        server.scripts += [reply("Two", cache_n=50, prompt_n=20, predicted_n=5)]
        await daemon.ask("a", "And?", resume=True)
        await trio.sleep(6)
        assert [line.cause for line in await lines_of(daemon)] == [None, "restarted_or_foreign"]


@pytest.mark.parametrize("in_its_place", ["directory", "no session"])
async def test_a_side_file_that_cannot_be_written_hurts_no_turn_and_is_told_once(
    in_its_place: str, tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "boxmaker")
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.scripts += [reply("Hi", cache_n=14 * n, prompt_n=10, predicted_n=5) for n in range(3)]
        await daemon.ask("a", "Hello", resume=False)
        await wait_all_tasks_blocked(0.02)
        file = daemon.store.directory / "a" / LEDGER_NAME
        file.unlink()
        file.mkdir()
        assert isinstance(await daemon.ask("a", "And?", resume=True), TurnDone)
        assert isinstance(await daemon.ask("a", "And?", resume=True), TurnDone)
        await wait_all_tasks_blocked(0.02)
        told = [record for record in caplog.records if record.getMessage() == "cache_lines_not_written"]
        assert len(told) == 1
        file.rmdir()
        server.scripts += [reply("Hi", cache_n=42, prompt_n=10, predicted_n=5)]
        await daemon.ask("a", "And?", resume=True)
        assert [line.completion for line in await lines_of(daemon)] == [4]


async def test_a_turn_that_fails_has_lines_for_what_is_in_the_log(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.scripts += [reply(calls=[("c", "clock", "{}")]), error_response(400, "no")]
        await daemon.fail("a", "Hello", resume=False)
        assert [line.completion for line in await lines_of(daemon)] == [1]


async def test_a_turn_that_arrives_before_the_search_has_begun_leaves_none(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server(reply("Hi")) as server, running_daemon(tmp_path, server.url) as daemon:
        await daemon.ask("a", "Hello", resume=False)
        await wait_all_tasks_blocked(0.02)
        spent = Spent(
            time=fixed_now(),
            completion=2,
            slot=0,
            cached=4,
            read=20,
            generated=5,
            prompt_before=10,
            expected=14,
            lost=10,
            prefill_ms=None,
            model=None,
            evidence=Evidence(),
            body=b'{"messages":[{"role":"user","content":"?"},{"role":"assistant","content":"Hi"}]}',
        )
        before = len(server.received)
        daemon.causes.turn_over(SessionId("a"), [spent])
        daemon.causes.turn_arrives()
        assert [line.cause for line in await lines_of(daemon)] == [None, "restarted_or_foreign"]
        assert asked_since(server, before) == []
