"""One turn through connection, store, client and tools: the record sequences, and every limit.

Task 06 fixes the sequences; design.md section 8 fixes the endings. Logs are written out whole.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from boxmaker.proto import channel, chat
from boxmaker.proto.channel import Context, Cut, ErrorCode, ToolCallStarted, TurnDone, WireError
from boxmaker.proto.chat import (
    Content,
    Figures,
    Queued,
    Reasoning,
    Retrying,
    ThinkingCapped,
    ToolCall,
    Waiting,
)
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import Assistant, CacheLoss, LogRecord, SessionStart, ToolResult, Usage, User
from boxmaker.proto.tools import Denied, Failed, PendingApproval, Result, ToolRequest, ToolResponse
from boxmaker.session.baseline import Baseline
from boxmaker.session.disk import InlineDisk
from boxmaker.session.store import NewSession
from boxmaker.testing.daemon import Daemon, fixed_now, running_daemon
from boxmaker.testing.port import ScriptedPort, hang, public
from boxmaker.testing.server import (
    LOADING,
    STREAM_HEAD,
    Hang,
    ScriptedServer,
    Send,
    call_delta,
    delta,
    ending,
    error_response,
    json_response,
    reply,
    scripted_server,
)
from boxmaker.turn import run_turn
from tests.session.kernel import failing, kernel_calls

HTTP = Path(__file__).parents[1] / "fixtures" / "http"
T = fixed_now()
Work = TypeVar("Work")


def usage(cache_n: int | None = 0, prompt_n: int | None = 10, predicted_n: int | None = 5, **more: Any) -> Usage:
    return Usage(
        time=T,
        cache_n=cache_n,
        prompt_n=prompt_n,
        predicted_n=predicted_n,
        reasoning_tokens=more.get("reasoning_tokens", 0),
        thinking_capped=more.get("thinking_capped", False),
    )


def said(content: str | None, *calls: ToolCall, reasoning: str | None = None) -> Assistant:
    return Assistant(time=T, content=content, reasoning_content=reasoning, tool_calls=calls)


def result(call: int, call_id: str, content: str, **more: Any) -> ToolResult:
    return ToolResult(
        time=T,
        call=call,
        tool_call_id=call_id,
        content=content,
        class_=more.get("class_", "public"),
        untrusted=more.get("untrusted", False),
        truncated=more.get("truncated", False),
    )


def call(call_id: str, name: str, arguments: str) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def done(content: str, cache_n: int | None = 0, **more: Any) -> TurnDone:
    return TurnDone(
        content=content,
        usage=Figures(
            cache_n=cache_n,
            prompt_n=more.get("prompt_n", 10),
            predicted_n=more.get("predicted_n", 5),
            reasoning_tokens=more.get("reasoning_tokens", 0),
            thinking_capped=more.get("thinking_capped", False),
        ),
    )


def finished(name: str, class_: chat.ResultClass = "public", truncated: bool = False) -> channel.ToolResult:
    return channel.ToolResult(name=name, class_=class_, truncated=truncated)


def after_start(log: Sequence[LogRecord]) -> list[LogRecord]:
    assert isinstance(log[0], SessionStart)
    return list(log[1:])


def contents(log: Sequence[LogRecord]) -> list[str]:
    return [record.content for record in log if isinstance(record, ToolResult)]


def messages(server: ScriptedServer, at: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.bodies[at])["messages"]
    return found


def looks(server: ScriptedServer) -> int:
    """How often the slots were looked at."""
    return sum(request.path == "/slots" for request in server.received)


# -- the three sequences of task 06 --------------------------------------------------------------


async def test_a_plain_turn(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(reply("Hello.")) as server, running_daemon(tmp_path, server.url) as daemon:
        answers = await daemon.turn("s", "hi", resume=False)
        log = daemon.log("s")
    assert answers == [Content(text="Hello."), done("Hello.")]
    assert after_start(log) == [User(time=T, content="hi"), said("Hello."), usage()]
    assert messages(server, 0) == [
        {"role": "system", "content": "You are a test."},
        {"role": "user", "content": "hi"},
    ]


async def test_a_turn_that_finds_the_gate_free_looks_at_the_slot_once_a_completion(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scripts = [reply(calls=[("a", "clock", "{}")]), reply("ok")]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        await daemon.ask("s", "hi", resume=False)
    assert len(server.completions) == looks(server) == 2


class SlowDisk:
    """A disk whose work is done when `ready` says so."""

    ready: Callable[[], bool] = staticmethod(lambda: True)

    async def run(self, work: Callable[[], Work]) -> Work:
        while not self.ready():  # noqa: ASYNC110  # a list of requests has no event
            await trio.sleep(0.1)
        return await InlineDisk().run(work)


async def test_the_first_look_at_the_slot_does_not_wait_for_the_disk(tmp_path: Path, autojump_clock: MockClock) -> None:
    disk = SlowDisk()
    scripts = [reply("a"), reply("b")]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url, disk=disk) as daemon:
        await daemon.ask("s", "1", resume=False)

        def before_the_gate_or_after_the_look() -> bool:
            gate = daemon.client.hold(0)
            free = gate.take_nowait()
            gate.give_back()
            return free or looks(server) == 2

        disk.ready = before_the_gate_or_after_the_look
        with trio.fail_after(60):
            assert (await daemon.ask("s", "2", resume=True)).content == "b"


async def test_a_disk_that_refuses_the_user_record_ends_the_turn_before_its_request(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server(reply("a"), reply("b")) as server, running_daemon(tmp_path, server.url) as daemon:
        await daemon.ask("s", "1", resume=False)
        before = daemon.log("s")
        with kernel_calls(failing("fdatasync", errno.ENOSPC)):
            error = await daemon.fail("s", "2", resume=True)
        assert error.code == ErrorCode.STORAGE
        assert daemon.log("s") == before
        assert len(server.completions) == 1
        assert (await daemon.ask("s", "2", resume=True)).content == "b"


async def test_a_turn_with_a_tool(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [
        reply("Let me see.\n", reasoning="Time?\n", calls=[("x1", "clock", "{}")], prompt_n=100, predicted_n=20),
        reply("It is late.", cache_n=119, prompt_n=12, predicted_n=6),
    ]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        answers = await daemon.turn("s", "what time is it?", resume=False)
        log = daemon.log("s")
    assert answers == [
        Reasoning(text="Time?\n"),
        Content(text="Let me see.\n"),
        ToolCallStarted(name="clock"),
        finished("clock"),
        Content(text="It is late."),
        done("It is late.", 119, prompt_n=12, predicted_n=6),
    ]
    assert after_start(log) == [
        User(time=T, content="what time is it?"),
        said("Let me see.\n", call("x1", "clock", "{}"), reasoning="Time?\n"),
        usage(0, 100, 20, reasoning_tokens=1),
        result(0, "x1", "2026-11-30T14:15:30.000Z"),
        said("It is late."),
        usage(119, 12, 6),
    ]
    assert messages(server, 1)[2:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Time?\n",
            "tool_calls": [{"id": "x1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "x1", "content": "2026-11-30T14:15:30.000Z"},
    ]


async def test_a_turn_through_find_tool_and_call_tool(tmp_path: Path, autojump_clock: MockClock) -> None:
    echo = '{"name":"echo","arguments":{"text":"héllo"}}'
    scripts = [
        reply(calls=[("f", "find_tool", '{"query":"ECHO"}')]),
        reply(calls=[("e", "call_tool", echo)], cache_n=14),
        reply("héllo", cache_n=28),
    ]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        answers = await daemon.turn("s", "echo it", resume=False)
        log = daemon.log("s")
    schema = (
        '[{"name":"echo","description":"Returns the text that it is given.","parameters":{"type":"object",'
        '"properties":{"text":{"type":"string","description":"The text to return"}},"required":["text"]}}]'
        "\nCall it with call_tool."
    )
    assert after_start(log) == [
        User(time=T, content="echo it"),
        said(None, call("f", "find_tool", '{"query":"ECHO"}')),
        usage(),
        result(0, "f", schema),
        said(None, call("e", "call_tool", echo)),
        usage(14),
        result(1, "e", "héllo"),
        said("héllo"),
        usage(28),
    ]
    assert answers == [
        ToolCallStarted(name="find_tool"),
        finished("find_tool"),
        ToolCallStarted(name="call_tool"),
        finished("call_tool"),
        Content(text="héllo"),
        done("héllo", 28),
    ]


async def test_call_numbers_go_on_over_turns_and_restarts(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [
        reply(calls=[("a", "clock", "{}"), ("b", "echo", "{}")]),
        reply("1"),
        reply(calls=[("c", "clock", "{}")]),
    ]
    async with scripted_server(*scripts, reply("2")) as server:
        async with running_daemon(tmp_path, server.url) as daemon:
            await daemon.ask("s", "one", resume=False)
        async with running_daemon(tmp_path, server.url) as daemon:
            await daemon.ask("s", "two", resume=True)
            log = daemon.log("s")
    assert [r.call for r in log if isinstance(r, ToolResult)] == [0, 1, 2]


async def test_every_request_is_a_byte_extension_of_the_one_before_over_a_restart(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scripts = [
        reply("one", reasoning="r"),
        reply("calling\n", calls=[("", "clock", ""), ("", " clock ", "nonsense")]),
        reply("two"),
        reply(None),
        reply("four"),
    ]
    async with scripted_server(*scripts) as server:
        async with running_daemon(tmp_path, server.url) as daemon:
            await daemon.ask("s", "a", resume=False)
            await daemon.ask("s", "b", resume=True)
        (tmp_path / "system.md").write_text("Another text.")
        async with running_daemon(tmp_path, server.url) as daemon:
            await daemon.ask("s", "c", resume=True)
            await daemon.ask("s", "d", resume=True)
    assert len(server.bodies) == 5
    for before, after in zip(server.bodies, server.bodies[1:], strict=False):
        prefix, bracket, _ = before.partition(b'],"tools":')
        assert bracket
        assert after.startswith(prefix)
        assert json.loads(before)["tools"] == json.loads(after)["tools"]
    assert messages(server, 4)[0]["content"] == "You are a test."


# -- CacheLoss -----------------------------------------------------------------------------------


async def test_a_cache_loss_is_logged_with_its_assistant_and_told(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [reply("a", cache_n=0, prompt_n=100, predicted_n=20), reply("b", cache_n=50, prompt_n=80)]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        await daemon.ask("s", "1", resume=False)
        answers = await daemon.turn("s", "2", resume=True)
        log = daemon.log("s")
    assert answers == [
        Content(text="b"),
        channel.CacheLoss(expected=119, got=50),
        done("b", 50, prompt_n=80),
    ]
    assert log[-3:] == [said("b"), usage(50, 80, 5), CacheLoss(time=T, expected=119, got=50)]


async def test_an_outcome_is_unknown_after_a_completion_without_figures(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scripts = [
        reply("a", prompt_n=1000),
        reply("b", cache_n=None, prompt_n=None, predicted_n=None),
        reply("c", cache_n=3),
        reply("d", cache_n=17),
    ]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        for at, text in enumerate("abcd"):
            await daemon.ask("s", text, resume=at > 0)
        log = daemon.log("s")
    assert [type(record) for record in log if isinstance(record, CacheLoss)] == []
    assert usage(None, None, None) in log


async def test_an_outcome_over_a_restart_is_judged_from_the_log(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(reply("a", prompt_n=100), reply("b", cache_n=0)) as server:
        async with running_daemon(tmp_path, server.url) as daemon:
            await daemon.ask("s", "1", resume=False)
        async with running_daemon(tmp_path, server.url) as daemon:
            answers = await daemon.turn("s", "2", resume=True)
    assert channel.CacheLoss(expected=104, got=0) in answers


# -- limits, one by one --------------------------------------------------------------------------


async def test_tool_iterations_end_the_turn_at_the_ninth_reply_with_calls(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scripts = [reply(calls=[(f"c{n}", "clock", json.dumps({"n": n}))]) for n in range(1, 9)]
    scripts.append(reply(calls=[("c9", "clock", "{}"), ("d9", "echo", "{}")], cache_n=None))
    port = ScriptedPort([public(f"noon {n}") for n in range(1, 9)])
    async with (
        scripted_server(*scripts, reply("still here")) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        answers = await daemon.turn("s", "go", resume=False)
        log = daemon.log("s")
        assert (await daemon.ask("s", "and now?", resume=True)).content == "still here"
    assert len(port.requests) == 8
    assert answers[-1] == WireError(
        code=ErrorCode.TURN_LIMIT,
        message="the turn was ended after 8 rounds of tool calls ([loop] tool_iterations)",
        detail={"limit": "tool_iterations", "value": 8},
    )
    assert answers[-3:-1] == [finished("clock"), finished("echo")]
    assert sum(isinstance(answer, ToolCallStarted) for answer in answers) == 8
    assert contents(log)[:8] == [f"noon {n}" for n in range(1, 9)]
    assert log[-4:] == [
        said(None, call("c9", "clock", "{}"), call("d9", "echo", "{}")),
        usage(None),
        result(8, "c9", "Not run: the turn's limit of tool calls was reached."),
        result(9, "d9", "Not run: the turn's limit of tool calls was reached."),
    ]


async def test_the_iteration_limit_is_the_configured_one(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [reply(calls=[("a", "clock", "{}")]), reply(calls=[("b", "clock", '{"b":1}')])]
    async with (
        scripted_server(*scripts) as server,
        running_daemon(tmp_path, server.url, "[loop]\ntool_iterations = 1\n") as daemon,
    ):
        error = await daemon.fail("s", "go", resume=False)
    assert error.detail == {"limit": "tool_iterations", "value": 1}


async def test_a_first_repeat_is_not_run_and_the_turn_goes_on(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [
        reply(calls=[("a", "clock", "{}")]),
        reply(calls=[("b", " clock\n", "{}")], cache_n=None),
        reply("fine", cache_n=None),
    ]
    port = ScriptedPort([public("noon")])
    async with (
        scripted_server(*scripts) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        answers = await daemon.turn("s", "go", resume=False)
        log = daemon.log("s")
    assert len(port.requests) == 1
    assert answers == [
        ToolCallStarted(name="clock"),
        finished("clock"),
        ToolCallStarted(name="clock"),
        finished("clock"),
        Content(text="fine"),
        done("fine", None),
    ]
    assert contents(log) == [
        "noon",
        "Not run: this call was already made with these arguments in this turn. Its result is above.",
    ]


async def test_a_second_repeat_ends_the_turn_and_every_call_has_a_result(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    same = '{"a":1}'
    scripts = [
        reply(
            calls=[
                ("a", "clock", same),
                ("b", "clock", same),
                ("c", "clock", '{"a": 1}'),
                ("d", "clock", same),
                ("e", "clock", "{}"),
            ]
        ),
        reply("usable"),
    ]
    port = ScriptedPort([public("noon"), public("one")])
    async with (
        scripted_server(*scripts) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        answers = await daemon.turn("s", "go", resume=False)
        log = daemon.log("s")
        assert (await daemon.ask("s", "more", resume=True)).content == "usable"
    assert [request.arguments for request in port.requests] == [same, '{"a": 1}']
    assert [type(answer) for answer in answers] == [
        *[ToolCallStarted, channel.ToolResult] * 4,
        channel.ToolResult,
        WireError,
    ]
    assert isinstance(answers[-1], WireError)
    assert answers[-1].code == ErrorCode.TURN_LIMIT
    assert answers[-1].detail == {"limit": "repeat_detection", "value": 2}
    assert contents(log) == [
        "noon",
        "Not run: this call was already made with these arguments in this turn. Its result is above.",
        "one",
        "Not run: the same call was repeated again, so the turn was ended.",
        "Not run: the turn was ended before this call.",
    ]


async def test_repeats_are_counted_over_the_turn_and_begin_anew_with_the_next(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    a, b = ("a", "clock", '{"a":1}'), ("b", "clock", '{"b":1}')
    scripts = [reply(calls=[a]), reply(calls=[b]), reply(calls=[a]), reply(calls=[b]), reply(calls=[a]), reply("new")]
    port = ScriptedPort([public("1"), public("2"), public("3")])
    async with (
        scripted_server(*scripts) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        error = await daemon.fail("s", "go", resume=False)
        assert error.detail == {"limit": "repeat_detection", "value": 2}
        assert (await daemon.ask("s", "again", resume=True)).content == "new"
    assert len(server.completions) == 6
    assert len(port.requests) == 3


async def test_repeat_detection_can_be_off(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [reply(calls=[("a", "clock", "{}")])] * 3
    port = ScriptedPort([public("1"), public("2"), public("3")])
    async with (
        scripted_server(*scripts, reply("done")) as server,
        running_daemon(tmp_path, server.url, "[loop]\nrepeat_detection = false\n", port=port) as daemon,
    ):
        assert (await daemon.ask("s", "go", resume=False)).content == "done"
    assert len(port.requests) == 3


async def test_a_call_answered_as_unknown_or_unparsable_counts_as_made(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scripts = [reply(calls=[("a", "rm", "{}"), ("b", "clock", "{")]), reply(calls=[("c", "rm", "{}")]), reply("ok")]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        await daemon.ask("s", "go", resume=False)
        found = contents(daemon.log("s"))
    assert found[0] == (
        "Unknown tool 'rm'. The tools are clock, find_tool, call_tool; find_tool finds more, call_tool calls them."
    )
    assert found[1].startswith("The arguments did not parse: ")
    assert "already" in found[2]


async def test_an_unknown_tool_never_reaches_the_port(tmp_path: Path, autojump_clock: MockClock) -> None:
    inner = '{"name":"rm","arguments":{}}'
    scripts = [reply(calls=[("a", "call_tool", inner), ("b", "echo", "{}"), ("c", "", "{}")]), reply("ok")]
    port = ScriptedPort()
    async with (
        scripted_server(*scripts) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        await daemon.ask("s", "go", resume=False)
    assert port.requests == []


async def test_the_thinking_cap_ends_the_turn_with_what_there_is(tmp_path: Path, autojump_clock: MockClock) -> None:
    script = [Send(STREAM_HEAD + delta(content="So: ") + delta(reasoning_content="x") * 400), Hang()]
    async with (
        scripted_server(script) as server,
        running_daemon(tmp_path, server.url, "[thinking]\ncap = 1\n") as daemon,
    ):
        answers = await daemon.turn("s", "think", resume=False)
        log = daemon.log("s")
        assert server.completions[0].hung_up
    assert answers[-3:] == [
        ThinkingCapped(tokens=257),
        Cut(reason="thinking_cap"),
        done("So: ", None, prompt_n=None, predicted_n=None, reasoning_tokens=257, thinking_capped=True),
    ]
    assert log[-2:] == [
        said("So: ", reasoning="x" * 257),
        usage(None, None, None, reasoning_tokens=257, thinking_capped=True),
    ]


async def test_calls_of_a_reply_that_we_closed_are_dropped(tmp_path: Path, autojump_clock: MockClock) -> None:
    script = [Send(STREAM_HEAD + call_delta(0, "a", "clock", "{}") + delta(reasoning_content="x") * 400), Hang()]
    async with (
        scripted_server(script) as server,
        running_daemon(tmp_path, server.url, "[thinking]\ncap = 1\n") as daemon,
    ):
        answers = await daemon.turn("s", "think", resume=False)
    assert isinstance(answers[-1], TurnDone)
    assert not any(isinstance(answer, ToolCallStarted) for answer in answers)


async def test_a_full_context_is_session_full_with_nothing_appended(tmp_path: Path, autojump_clock: MockClock) -> None:
    full = error_response(400, "request (9001 tokens) exceeds the available context size (8192 tokens)", None)
    async with scripted_server(reply("a"), full, full) as server, running_daemon(tmp_path, server.url) as daemon:
        await daemon.ask("s", "1", resume=False)
        before = daemon.log("s")
        error = await daemon.fail("s", "2", resume=True)
        assert daemon.log("s") == [*before, User(time=T, content="2")]
        again = await daemon.fail("s", "3", resume=True)
    assert error.code == again.code == ErrorCode.SESSION_FULL
    assert len(server.completions) == 3
    assert error.message.endswith("go on without this message: bxctl fork s (--at N keeps less), or in a new session")


async def test_the_fork_that_a_full_session_names_leaves_out_what_did_not_fit(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    full = error_response(400, "the request exceeds the available context size")
    async with scripted_server(reply("a"), full, reply("b")) as server, running_daemon(tmp_path, server.url) as daemon:
        await daemon.ask("s", "1", resume=False)
        await daemon.fail("s", "2", resume=True)
        await daemon.store.fork(SessionId("s"), None, SessionId("t"), slot=0)
        await daemon.ask("t", "3", resume=True)
    sent = json.loads(server.bodies[-1])["messages"]
    assert [message["content"] for message in sent[1:]] == ["1", "a", "3"]


async def test_a_full_session_names_an_answer_that_leaves_room(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The last answer has filled the context, so a fork at it would be as full."""
    full = error_response(400, "the request exceeds the available context size")
    scripts = [
        reply("a", cache_n=0, prompt_n=3000, predicted_n=276),
        reply("b", cache_n=3275, prompt_n=5, predicted_n=800),
        full,
    ]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        for content, resume in (("1", False), ("2", True)):
            await daemon.ask("s", content, resume=resume)
        error = await daemon.fail("s", "3", resume=True)  # 4080 of 4096 tokens; 80 % are 3276.8
        assert error.message.endswith(
            "go on with what was said up to answer 1: bxctl fork s --at 1, or in a new session"
        )


async def test_a_full_session_none_of_whose_answers_leaves_room_names_no_fork(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    full = error_response(400, "the request exceeds the available context size")
    scripts = [reply("a", cache_n=0, prompt_n=3000, predicted_n=277), full]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        await daemon.ask("s", "1", resume=False)
        error = await daemon.fail("s", "2", resume=True)
        assert error.message.endswith("the available context size; go on in a new session")


async def test_a_full_session_is_told_also_when_its_log_cannot_be_read_for_advice(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = error_response(400, "the request exceeds the available context size")
    async with scripted_server(reply("a"), full) as server, running_daemon(tmp_path, server.url) as daemon:
        await daemon.ask("s", "1", resume=False)

        def broken(*_: object) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pread", broken)
        error = await daemon.fail("s", "2", resume=True)
    assert error.code == ErrorCode.SESSION_FULL
    assert error.message.endswith("bxctl fork s (--at N keeps less), or in a new session")


@pytest.mark.parametrize("scripts", [[], [reply(calls=[("c", "clock", "{}")])]])
async def test_a_full_session_without_an_answer_names_no_fork(
    scripts: list[bytes], tmp_path: Path, autojump_clock: MockClock
) -> None:
    full = error_response(400, "the request exceeds the available context size")
    async with scripted_server(*scripts, full) as server, running_daemon(tmp_path, server.url) as daemon:
        error = await daemon.fail("s", "1", resume=False)
    assert error.message.endswith("the available context size; go on in a new session")


def told_of_context(answers: Sequence[object]) -> list[Context]:
    return [answer for answer in answers if isinstance(answer, Context)]


@pytest.mark.parametrize(
    ("read", "more", "told"),
    [
        # 80 % of 4096 tokens are 3276.8: 3277 of them are told, 3276 are not
        (3272, "", [Context(used=3277, n_ctx=4096)]),
        (3271, "", []),
        (3271, "[session]\nwarn_at = 0.5", [Context(used=3276, n_ctx=4096)]),
        (4000, "[session]\nwarn_at = 1", []),
        (4091, "[session]\nwarn_at = 1", [Context(used=4096, n_ctx=4096)]),
        (None, "", []),
    ],
)
async def test_a_slot_that_is_nearly_full_is_told(
    read: int | None, more: str, told: list[Context], tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with (
        scripted_server(reply("a", prompt_n=read)) as server,
        running_daemon(tmp_path, server.url, more) as daemon,
    ):
        assert told_of_context(await daemon.turn("s", "1", resume=False)) == told


async def test_a_nearly_full_slot_is_told_once_a_turn_and_in_the_next_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scripts = [
        reply(calls=[("a", "clock", "{}")], prompt_n=3000),
        reply(calls=[("b", "clock", '{"b":1}')], cache_n=3004, prompt_n=300),
        reply("b", cache_n=3308, prompt_n=10),
        reply("c", cache_n=3322, prompt_n=10),
    ]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        answers = await daemon.turn("s", "1", resume=False)
        assert told_of_context(answers) == [Context(used=3309, n_ctx=4096)]
        second = [at for at, answer in enumerate(answers) if isinstance(answer, ToolCallStarted)][1]
        assert answers.index(Context(used=3309, n_ctx=4096)) < second
        assert told_of_context(await daemon.turn("s", "2", resume=True)) == [Context(used=3337, n_ctx=4096)]


async def test_a_server_without_slots_is_believed_what_its_properties_say(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with (
        scripted_server(*[reply("a", prompt_n=95)] * 2) as server,
        running_daemon(tmp_path, server.url) as daemon,
    ):
        server.slots = error_response(501, "no slots", "not_supported_error")
        assert told_of_context(await daemon.turn("s", "1", resume=False)) == []
        daemon.rt.facts.saw_props({"default_generation_settings": {"n_ctx": 100}})
        assert told_of_context(await daemon.turn("t", "1", resume=False)) == [Context(used=100, n_ctx=100)]


async def test_a_recorded_full_context_is_recognised(tmp_path: Path, autojump_clock: MockClock) -> None:
    message = "request (361 tokens) exceeds the available context size (256 tokens), try increasing it"
    full = error_response(400, message, "exceed_context_size_error")
    async with scripted_server(full) as server, running_daemon(tmp_path, server.url) as daemon:
        error = await daemon.fail("s", "1", resume=False)
    assert error.code == ErrorCode.SESSION_FULL
    assert message in error.message


async def test_a_result_over_the_cap_is_cut_at_a_character(tmp_path: Path, autojump_clock: MockClock) -> None:
    text = "é" * 200  # 400 bytes; 257 allowed: 128 whole characters are 256
    port = ScriptedPort([Result(content=text, class_="private", untrusted=True, truncated=False)])
    async with (
        scripted_server(reply(calls=[("a", "clock", "{}")]), reply("ok")) as server,
        running_daemon(tmp_path, server.url, "[loop]\ntool_result_cap = 257\n", port=port) as daemon,
    ):
        answers = await daemon.turn("s", "go", resume=False)
        log = daemon.log("s")
    expected = "é" * 128 + "[truncated]"
    assert result(0, "a", expected, class_="private", untrusted=True, truncated=True) in log
    assert channel.ToolResult(name="clock", class_="private", truncated=True, untrusted=True) in answers
    assert messages(server, 1)[-1]["content"] == expected


async def test_a_reply_cut_at_its_length_runs_no_call_and_counts_as_an_iteration(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    cut = reply("half", calls=[("a", "clock", "{}"), ("b", "clock", '{"x"')], finish_reason="length")
    scripts = [cut, reply(calls=[("c", "clock", "{}")])]
    port = ScriptedPort()
    async with (
        scripted_server(*scripts) as server,
        running_daemon(tmp_path, server.url, "[loop]\ntool_iterations = 1\n", port=port) as daemon,
    ):
        answers = await daemon.turn("s", "go", resume=False)
        log = daemon.log("s")
    assert port.requests == []
    assert answers[0] == Content(text="half")
    assert answers[1:4] == [Cut(reason="length"), finished("clock"), finished("clock")]
    assert not any(isinstance(answer, ToolCallStarted) for answer in answers)
    assert contents(log)[:2] == ["Not run: the reply was cut at its length limit. Ask again in smaller pieces."] * 2
    assert isinstance(answers[-1], WireError)
    assert answers[-1].detail == {"limit": "tool_iterations", "value": 1}


async def test_a_call_of_a_cut_reply_does_not_count_as_made(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [
        reply(calls=[("a", "clock", "{}")], finish_reason="length"),
        reply(calls=[("b", "clock", "{}")]),
        reply("ok"),
    ]
    port = ScriptedPort([public("noon")])
    async with (
        scripted_server(*scripts) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        await daemon.ask("s", "go", resume=False)
    assert len(port.requests) == 1


async def test_a_plain_reply_that_was_cut_is_said_and_kept(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with (
        scripted_server(reply("half an ans", finish_reason="length")) as server,
        running_daemon(tmp_path, server.url) as daemon,
    ):
        answers = await daemon.turn("s", "go", resume=False)
    assert answers == [Content(text="half an ans"), Cut(reason="length"), done("half an ans")]


async def test_a_reply_with_nothing_or_only_reasoning_is_an_empty_answer(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with (
        scripted_server(reply(None), reply(None, reasoning="hm")) as server,
        running_daemon(tmp_path, server.url) as daemon,
    ):
        assert await daemon.ask("s", "1", resume=False) == done("")
        assert await daemon.ask("s", "2", resume=True) == done("", reasoning_tokens=1)
        log = daemon.log("s")
    assert said(None) in log
    assert said(None, reasoning="hm") in log
    assert messages(server, 1)[2] == {"role": "assistant", "content": ""}


# -- what the port may answer --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (Failed(message="no such file"), "The tool failed: no such file"),
        (Denied(reason="not at night"), "The call was denied: not at night"),
        (PendingApproval(id="p1"), "The call needs the owner's approval, and this version cannot wait for it."),
        (
            RuntimeError("secret detail"),
            "The tool failed: an error inside the tool port; the daemon's log has it",
        ),
    ],
    ids=["failed", "denied", "pending", "raises"],
)
async def test_every_response_of_the_port_gives_a_result(
    tmp_path: Path, autojump_clock: MockClock, response: ToolResponse | Exception, text: str
) -> None:
    port = ScriptedPort([response])
    async with (
        scripted_server(reply(calls=[("a", "clock", "{}")]), reply("ok")) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        await daemon.ask("s", "go", resume=False)
        log = daemon.log("s")
    assert result(0, "a", text) in log


async def test_a_port_that_raises_is_in_the_daemons_log_with_its_call(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    port = ScriptedPort([public("1"), RuntimeError("secret detail")])
    async with (
        scripted_server(reply(calls=[("a", "clock", "{}"), ("b", "clock", " ")]), reply("ok")) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        await daemon.ask("s", "go", resume=False)
    (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (logged.getMessage(), logged.__dict__["fields"]) == ("tool_port_failed", {"session": "s", "call": 1})


async def test_a_result_is_cleaned_once_at_the_border(tmp_path: Path, autojump_clock: MockClock) -> None:
    port = ScriptedPort([public("a\x00b\ud800c")])
    async with (
        scripted_server(reply(calls=[("a", "clock", "{}")]), reply("ok")) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        await daemon.ask("s", "go", resume=False)
        log = daemon.log("s")
    assert contents(log) == ["a\ufffdb\ufffdc"]
    assert messages(server, 1)[-1]["content"] == "a\ufffdb\ufffdc"


async def test_the_port_gets_session_call_number_tool_and_arguments(tmp_path: Path, autojump_clock: MockClock) -> None:
    inner = '{"name":"echo","arguments":{"text": "x"}}'
    port = ScriptedPort([public("1"), public("2")])
    scripts = [reply(calls=[("a", "clock", ""), ("b", "call_tool", inner)]), reply("ok")]
    async with (
        scripted_server(*scripts) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        await daemon.ask("s", "go", resume=False)
    session = SessionId("s")
    assert port.requests == [
        ToolRequest(session=session, call=0, tool="clock", arguments="{}"),
        ToolRequest(session=session, call=1, tool="echo", arguments='{"text":"x"}'),
    ]


# -- failures of the server ----------------------------------------------------------------------


async def test_a_failed_completion_leaves_only_the_user_record(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with (
        scripted_server(error_response(400, "wrong"), reply("ok")) as server,
        running_daemon(tmp_path, server.url) as daemon,
    ):
        error = await daemon.fail("s", "1", resume=False)
        assert after_start(daemon.log("s")) == [User(time=T, content="1")]
        assert (await daemon.ask("s", "2", resume=True)).content == "ok"
    assert error == WireError(
        code=ErrorCode.INFERENCE, message="the server answered 400: wrong", detail={"status": 400}
    )
    assert [message["role"] for message in messages(server, 1)] == ["system", "user", "user"]


async def test_users_in_a_row_get_the_note_where_the_template_wants_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scripts = [
        error_response(400, "wrong"),
        reply(calls=[("a", "clock", "{}")]),
        error_response(400, "no"),
        reply("ok"),
    ]
    async with (
        scripted_server(*scripts) as server,
        running_daemon(tmp_path, server.url, alternate=True) as daemon,
    ):
        await daemon.fail("s", "1", resume=False)
        await daemon.fail("s", "2", resume=True)
        await daemon.ask("s", "3", resume=True)
    note = {"role": "assistant", "content": "[No answer was given.]"}
    found = messages(server, 3)
    assert [message["role"] for message in found] == [
        "system", "user", "assistant", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    assert found[2] == note
    assert found[6] == note


async def test_a_retry_in_mid_stream_voids_what_was_sent_and_leaves_no_trace(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    broken = STREAM_HEAD + delta(content="Three no")
    async with scripted_server(broken, reply("Three notes.")) as server, running_daemon(tmp_path, server.url) as daemon:
        answers = await daemon.turn("s", "go", resume=False)
        log = daemon.log("s")
    assert answers == [
        Content(text="Three no"),
        Retrying(attempt=2, after_ms=500, error="the stream ended before the reply was complete"),
        Content(text="Three notes."),
        done("Three notes."),
    ]
    assert after_start(log) == [User(time=T, content="go"), said("Three notes."), usage()]
    assert server.bodies[0] == server.bodies[1]


# -- hanging up ----------------------------------------------------------------------------------


async def hang_up(daemon: Daemon, server: ScriptedServer, stream: trio.SocketStream, session: str) -> None:
    """Close the channel and wait until the turn has ended; what it left is checked here."""
    await stream.aclose()
    with trio.fail_after(10):
        while not daemon.is_free(session):
            await wait_all_tasks_blocked()
        for request in server.completions:
            await request.closed.wait()
    hold = daemon.client.hold(daemon.config.slots.listed[0])
    assert hold.take_nowait(), "the gate is free"
    hold.give_back()


async def test_hanging_up_while_streaming_ends_the_turn_and_appends_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = [Send(STREAM_HEAD + delta(content="a")), Hang()]
    async with scripted_server(script, reply("ok")) as server, running_daemon(tmp_path, server.url) as daemon:
        stream, frames = await daemon.open("s", "1", resume=False)
        assert (await frames.receive()).answer == Content(text="a")
        await hang_up(daemon, server, stream, "s")
        assert server.completions[0].hung_up
        assert after_start(daemon.log("s")) == [User(time=T, content="1")]
        assert (await daemon.ask("s", "2", resume=True)).content == "ok"


async def test_hanging_up_in_back_off_ends_the_turn(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with (
        scripted_server(error_response(502, "x"), reply("ok")) as server,
        running_daemon(tmp_path, server.url) as daemon,
    ):
        stream, frames = await daemon.open("s", "1", resume=False)
        assert isinstance((await frames.receive()).answer, Retrying)
        await hang_up(daemon, server, stream, "s")
        assert after_start(daemon.log("s")) == [User(time=T, content="1")]
        assert (await daemon.ask("s", "2", resume=True)).content == "ok"


async def test_hanging_up_in_a_tool_gives_every_call_a_result(tmp_path: Path, autojump_clock: MockClock) -> None:
    calls = [("a", "clock", "{}"), ("b", "clock", '{"b":1}'), ("c", "clock", '{"c":1}')]
    port = ScriptedPort([public("noon"), hang])
    async with (
        scripted_server(reply(calls=calls), reply("ok")) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        stream, _ = await daemon.open("s", "1", resume=False)
        while len(port.requests) < 2:
            await wait_all_tasks_blocked()
        await hang_up(daemon, server, stream, "s")
        log = daemon.log("s")
        assert (await daemon.ask("s", "2", resume=True)).content == "ok"
    assert port.cancelled == 1
    assert contents(log) == [
        "noon",
        "Interrupted: the call was running when the turn ended; its outcome is unknown.",
        "Not run: the turn ended before this call.",
    ]
    assert [r.call for r in log if isinstance(r, ToolResult)] == [0, 1, 2]


async def test_a_turn_cancelled_before_its_first_call_runs_says_that_none_was_run(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    calls = [("a", "clock", "{}"), ("b", "clock", '{"b":1}')]
    async with scripted_server(reply(calls=calls)) as server, running_daemon(tmp_path, server.url) as daemon:
        baseline = Baseline(system="You are a test.", tools=())
        with trio.CancelScope() as scope:

            async def emit(events: Sequence[channel.TurnEvent]) -> None:
                if ToolCallStarted(name="clock") in events:
                    scope.cancel()
                await trio.lowlevel.checkpoint()

            new = NewSession(slot=0, baseline=lambda: baseline)
            async with daemon.store.turn(SessionId("s"), resume=False, new=new, alternate=False) as session:
                await run_turn(session, daemon.rt, "1", emit)
        assert scope.cancelled_caught
        assert contents(daemon.log("s")) == ["Not run: the turn ended before this call."] * 2


async def test_a_turn_waits_its_turn_at_the_gate_and_says_so(tmp_path: Path, autojump_clock: MockClock) -> None:
    port = ScriptedPort([hang])
    scripts = [reply(calls=[("a", "clock", "{}")]), reply("second")]
    async with (
        scripted_server(*scripts) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
    ):
        stream, _ = await daemon.open("one", "1", resume=False)
        await port.started.wait()
        other, frames = await daemon.open("two", "2", resume=False)
        assert (await frames.receive()).answer == Queued(ahead=1)
        assert after_start(daemon.log("two")) == [User(time=T, content="2")]
        assert looks(server) == 1, "who waits at the gate does not look at the slot"
        assert not daemon.client.hold(0).take_nowait()
        await stream.aclose()
        assert (await frames.receive()).answer == Content(text="second")
        await other.aclose()


async def test_somebody_elses_request_on_the_slot_is_waited_for(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(reply("ok")) as server, running_daemon(tmp_path, server.url) as daemon:
        server.slots = [{"id": 0, "is_processing": True}]
        stream, frames = await daemon.open("s", "1", resume=False)
        assert (await frames.receive()).answer == Waiting(slot_busy=True)
        await trio.sleep(60)
        assert looks(server) > 2
        assert server.bodies == []
        server.slots = [{"id": 0, "is_processing": False}]
        assert (await frames.receive()).answer == Content(text="ok")
        await stream.aclose()


# -- kill -9 -------------------------------------------------------------------------------------


async def test_open_calls_of_a_killed_daemon_get_their_results_before_the_next_user(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    calls = [("a", "clock", "{}"), ("b", "clock", '{"b":1}')]
    port = ScriptedPort([hang])
    async with scripted_server(reply(calls=calls), reply("ok")) as server:
        async with running_daemon(tmp_path, server.url, port=port) as daemon:
            stream, _ = await daemon.open("s", "1", resume=False)
            await port.started.wait()
            killed = (daemon.store.directory / "s" / "0.jsonl").read_bytes()
            await stream.aclose()
        (tmp_path / "home" / "sessions" / "s" / "0.jsonl").write_bytes(killed)
        async with running_daemon(tmp_path, server.url) as daemon:
            answers = await daemon.turn("s", "2", resume=True)
            log = daemon.log("s")
    assert answers[:2] == [finished("clock"), finished("clock")]
    assert after_start(log)[3:6] == [
        result(0, "a", "Interrupted: boxmaker failed while the call may have been running; its outcome is unknown."),
        result(1, "b", "Not run: boxmaker was stopped before this call."),
        User(time=T, content="2"),
    ]
    assert not any(isinstance(answer, ToolCallStarted) for answer in answers)


async def test_an_assistant_without_its_usage_is_valid_and_its_outcome_unknown(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server(reply("a", prompt_n=500), reply("b", cache_n=0)) as server:
        async with running_daemon(tmp_path, server.url) as daemon:
            await daemon.ask("s", "1", resume=False)
            file = daemon.store.directory / "s" / "0.jsonl"
            lines = file.read_bytes().splitlines(keepends=True)
            assert b'"usage"' in lines[-1]
            file.write_bytes(b"".join(lines[:-1]))
            answers = await daemon.turn("s", "2", resume=True)
    assert answers == [Content(text="b"), done("b")]


# -- recordings of a real server -----------------------------------------------------------------


async def test_the_reasoning_of_a_streamed_reply_is_sent_back_as_it_came(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    stream = (
        STREAM_HEAD + delta(reasoning_content="a\n") + delta(reasoning_content="b\n") + delta(content="x") + ending()
    )
    async with scripted_server(stream, reply("y")) as server, running_daemon(tmp_path, server.url) as daemon:
        await daemon.ask("s", "1", resume=False)
        await daemon.ask("s", "2", resume=True)
    assert messages(server, 1)[2] == {"role": "assistant", "content": "x", "reasoning_content": "a\nb\n"}


# -- two sessions on one slot --------------------------------------------------------------------


def speakers(server: ScriptedServer) -> list[str]:
    """Whose requests came, in order: the first user text of each."""
    return [messages(server, at)[1]["content"] for at in range(len(server.bodies))]


async def test_sessions_on_one_slot_change_places_between_turns_only_in_order_of_arrival(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    release = trio.Event()

    async def slow(_: ToolRequest) -> ToolResponse:
        await release.wait()
        return public("noon")

    port = ScriptedPort([slow, public("one"), public("two")])
    scripts = [
        reply(calls=[("a", "clock", "{}")]),
        reply("first"),
        reply(calls=[("b", "clock", "{}")]),
        reply("second"),
        reply("third"),
    ]
    async with (
        scripted_server(*scripts) as server,
        running_daemon(tmp_path, server.url, port=port) as daemon,
        trio.open_nursery() as nursery,
    ):
        for name in ("first", "second", "third"):
            nursery.start_soon(partial(daemon.ask, name, name, resume=False))
            await wait_all_tasks_blocked()
        await trio.sleep(60)  # a turn keeps its slot while its tool runs
        assert speakers(server) == ["first"]
        release.set()
    assert speakers(server) == ["first", "first", "second", "second", "third"]


@pytest.mark.parametrize("pause", [error_response(502, "x"), LOADING], ids=["back-off", "loading"])
async def test_a_turn_that_waits_for_the_server_lets_the_next_one_go_first(
    tmp_path: Path, autojump_clock: MockClock, pause: bytes
) -> None:
    async with (
        scripted_server(pause, reply("second"), reply("first")) as server,
        running_daemon(tmp_path, server.url) as daemon,
        trio.open_nursery() as nursery,
    ):
        for name in ("first", "second"):
            nursery.start_soon(partial(daemon.ask, name, name, resume=False))
            await wait_all_tasks_blocked()
    assert speakers(server) == ["first", "second", "first"]


# -- another model behind the same address --------------------------------------------------------


async def test_another_model_is_seen_in_the_stream_and_asked_whether_users_alternate(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Then sessions are encoded anew: the one exception to the prefix, logged as such."""
    caplog.set_level("INFO", "boxmaker")

    def strict(body: dict[str, Any]) -> bytes:
        roles = [message["role"] for message in body["messages"]]
        if ("user", "user") in pairwise(roles):
            return error_response(500, "roles must alternate")
        return json_response(200, {"prompt": "rendered"})

    refused = error_response(400, "wrong")
    other = reply("second").replace(b"scripted", b"replaced")
    async with (
        scripted_server(refused, reply("first"), other, reply("third").replace(b"scripted", b"replaced")) as server,
        running_daemon(tmp_path, server.url) as daemon,
    ):
        await daemon.fail("s", "1", resume=False)
        await daemon.ask("s", "2", resume=True)
        server.apply_template = strict
        await daemon.ask("s", "3", resume=True)
        await daemon.ask("s", "4", resume=True)
    assert [message["role"] for message in messages(server, 2)] == ["system", "user", "user", "assistant", "user"]
    assert [message["role"] for message in messages(server, 3)] == [
        "system", "user", "assistant", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    events = [record.message for record in caplog.records]
    assert events.count("model_changed") == 1
    assert events.count("alternate_changed") == 1
