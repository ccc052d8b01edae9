"""Whole turns on recordings of a real llama-server, byte for byte, from the socket to the socket.

The recordings were made in separate conversations, so their cache figures do not line up: the loop
rightly writes CacheLoss between them, and these tests allow for that (task 06, Context). Every
request is checked as a strict server would.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from trio.testing import MockClock

from boxmaker.proto.channel import CacheLoss, Cut, ErrorCode, ToolCallStarted, ToolResult, TurnDone, WireError
from boxmaker.proto.chat import Content, Progress, Reasoning, Retrying, ToolCall, Waiting
from boxmaker.proto.frames import Answer
from boxmaker.proto.records import Assistant, LogRecord
from boxmaker.proto.records import CacheLoss as CacheLossRecord
from boxmaker.proto.records import ToolResult as ToolResultRecord
from boxmaker.testing.daemon import running_daemon
from boxmaker.testing.server import ScriptedServer, scripted_server
from tests.strict import refuse

HTTP = Path(__file__).parents[1] / "fixtures" / "http"


async def play(directory: Path, *names: str) -> tuple[list[Answer], list[LogRecord], ScriptedServer]:
    """One turn on these recordings; its answers, its log without losses, and the server."""
    scripts = [(HTTP / f"{name}.http").read_bytes() for name in names]
    async with scripted_server(*scripts) as server, running_daemon(directory, server.url) as daemon:
        server.refuse_history = refuse
        answers = await daemon.turn("s", "Go.", resume=False)
        log: list[LogRecord] = [record for record in daemon.log("s")[1:] if not isinstance(record, CacheLossRecord)]
        assert server.scripts == [], "every recording was asked for"
        server.scripts = [(HTTP / "final.http").read_bytes()]
        assert (await daemon.ask("s", "And now?", resume=True)).content == "Done.", "the session stays usable"
    shown: list[Answer] = [answer for answer in answers if not isinstance(answer, CacheLoss | Progress)]
    return shown, log, server


def text(answers: list[Answer]) -> str:
    return "".join(answer.text for answer in answers if isinstance(answer, Content))


def thoughts(answers: list[Answer]) -> str:
    return "".join(answer.text for answer in answers if isinstance(answer, Reasoning))


def results(log: list[LogRecord]) -> list[str]:
    return [record.content for record in log if isinstance(record, ToolResultRecord)]


async def test_plain(tmp_path: Path, autojump_clock: MockClock) -> None:
    answers, log, _ = await play(tmp_path, "plain_usage_progress")
    assert text(answers) == "There are no three colours."
    done = answers[-1]
    assert isinstance(done, TurnDone)
    assert (done.usage.cache_n, done.usage.prompt_n, done.usage.predicted_n) == (6, 19, 7)
    assert [type(record).__name__ for record in log] == ["User", "Assistant", "Usage"]


async def test_reasoning(tmp_path: Path, autojump_clock: MockClock) -> None:
    answers, log, server = await play(tmp_path, "reasoning")
    assert thoughts(answers) == "The user wants a sum; 2+2 is 4 — trivial ✓.\n"
    assert text(answers) == "It is 4 (四)."
    assert isinstance(log[1], Assistant)
    assert log[1].reasoning_content == thoughts(answers)
    assert server.completions[1].json()["messages"][2]["reasoning_content"] == thoughts(answers)


async def test_find_tool_then_call_tool_of_an_unknown_tool(tmp_path: Path, autojump_clock: MockClock) -> None:
    answers, log, server = await play(tmp_path, "find_tool", "call_tool", "final")
    assert [answer for answer in answers if not isinstance(answer, TurnDone | Content)] == [
        ToolCallStarted(name="find_tool"),
        ToolResult(name="find_tool", class_="public", truncated=False),
        ToolCallStarted(name="call_tool"),
        ToolResult(name="call_tool", class_="public", truncated=False),
    ]
    assert results(log) == [
        "No tool matches.",
        "Unknown tool 'fs.write' for call_tool. find_tool with an empty query lists them all.",
    ]
    call = ToolCall(id="OKvGkoXSTPEszknBiDm7gfvXTFCdYF90", name="find_tool", arguments='{"query": "files", "limit": 2}')
    assert isinstance(log[1], Assistant)
    assert log[1].tool_calls == (call,)
    sent = server.completions[2].json()["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert sent[2]["tool_calls"][0]["function"]["arguments"] == call.arguments, "as the model wrote it, blanks too"


async def test_reasoning_then_a_call(tmp_path: Path, autojump_clock: MockClock) -> None:
    answers, _, _ = await play(tmp_path, "reasoning_then_call", "final")
    assert thoughts(answers) == "Now I need the files tool, so I call find_tool.\n"
    assert ToolCallStarted(name="find_tool") in answers


async def test_content_then_a_call_is_sent_back_without_its_last_line_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    _, log, server = await play(tmp_path, "content_then_call", "final")
    assert isinstance(log[1], Assistant)
    assert log[1].content == "I will look that up now.\n"
    assert server.completions[1].json()["messages"][2]["content"] == "I will look that up now."


async def test_two_calls_in_one_reply(tmp_path: Path, autojump_clock: MockClock) -> None:
    _, log, _ = await play(tmp_path, "parallel_calls", "final")
    assert [r.tool_call_id for r in log if isinstance(r, ToolResultRecord)] == [
        "2ytPGemSskLMxsouffKlZ9vTOpiYTYGQ",
        "qDMZVYtOmaKj9mNazv0CtMALNLsuecwM",
    ]


async def test_a_call_cut_at_its_length_does_not_poison_the_session(tmp_path: Path, autojump_clock: MockClock) -> None:
    answers, log, server = await play(tmp_path, "cut_in_call", "final")
    assert answers[0] == Cut(reason="length")
    assert results(log) == ["Not run: the reply was cut at its length limit. Ask again in smaller pieces."]
    call = server.completions[1].json()["messages"][2]["tool_calls"][0]["function"]
    assert call == {"name": "call_tool", "arguments": '{"raw":"{\\"name\\": \\"fs.write"}'}


async def test_a_text_cut_at_its_length(tmp_path: Path, autojump_clock: MockClock) -> None:
    answers, _, _ = await play(tmp_path, "cut_in_text")
    assert text(answers) == "Once upon a time, in"
    assert answers[-2] == Cut(reason="length")


async def test_a_loading_model_and_a_broken_stream_before_the_reply(tmp_path: Path, autojump_clock: MockClock) -> None:
    answers, log, server = await play(tmp_path, "loading", "drop_after_text", "final")
    assert answers[0] == Waiting(slot_busy=False)
    retry = next(at for at, answer in enumerate(answers) if isinstance(answer, Retrying))
    assert text(answers[retry:]) == "Done."
    assert [type(record).__name__ for record in log] == ["User", "Assistant", "Usage"]
    assert len({request.body for request in server.completions[:3]}) == 1, "a retry sends the same bytes"


@pytest.mark.parametrize(
    ("names", "code", "detail"),
    [
        (["context_full"], ErrorCode.SESSION_FULL, {}),
        (["full_mid_answer"], ErrorCode.SESSION_FULL, {}),
        (["midstream_error", "midstream_error"], ErrorCode.INFERENCE, {"status": 500, "attempts": 2}),
        (["unauthorized"], ErrorCode.INFERENCE, {"status": 401}),
        (["broken_history_500", "broken_history_500"], ErrorCode.INFERENCE, {"status": 500, "attempts": 2}),
    ],
)
async def test_a_failure_ends_the_turn_with_its_code_and_leaves_the_user_record(
    tmp_path: Path, autojump_clock: MockClock, names: list[str], code: ErrorCode, detail: dict[str, object]
) -> None:
    answers, log, _ = await play(tmp_path, *names)
    error = answers[-1]
    assert isinstance(error, WireError)
    assert (error.code, error.detail) == (code, detail)
    assert [type(record).__name__ for record in log] == ["User"]
