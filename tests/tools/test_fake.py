"""The fake tools: clock and echo."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from boxmaker.proto.ids import SessionId
from boxmaker.proto.time import Timestamp, timestamp
from boxmaker.proto.tools import Failed, Result, ToolRequest, ToolResponse
from boxmaker.tools.fake import FakeTools, fake_registry

NOW = Timestamp("2026-11-30T14:15:30.123Z")


async def ask(tool: str, arguments: str) -> ToolResponse:
    request = ToolRequest(session=SessionId("s"), call=0, tool=tool, arguments=arguments)
    return await FakeTools(lambda: NOW).call(request)


def public(content: str) -> Result:
    return Result(content=content, class_="public", untrusted=False, truncated=False)


@pytest.mark.parametrize("arguments", ["{}", "", '{"zone":"UTC"}'])
async def test_clock_answers_the_time_as_rfc_3339(arguments: str) -> None:
    assert await ask("clock", arguments) == public("2026-11-30T14:15:30.123Z")
    assert datetime.fromisoformat(NOW) == datetime(2026, 11, 30, 14, 15, 30, 123_000, tzinfo=UTC)


async def test_clock_asks_for_the_time_at_each_call() -> None:
    times = iter([timestamp(0), timestamp(1.5)])
    port = FakeTools(lambda: next(times))
    request = ToolRequest(session=SessionId("s"), call=0, tool="clock", arguments="{}")
    assert await port.call(request) == public("1970-01-01T00:00:00.000Z")
    assert await port.call(request) == public("1970-01-01T00:00:01.500Z")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"text":"hi"}', "hi"),
        ('{"text":""}', ""),
        ('{"text":"a\\nb \\ud83d\\ude00","other":1}', "a\nb 😀"),
    ],
)
async def test_echo_answers_its_text(arguments: str, text: str) -> None:
    assert await ask("echo", arguments) == public(text)


@pytest.mark.parametrize("arguments", ["", "{}", '{"text":5}', '{"text":null}', '{"text":["a"]}', '{"Text":"a"}'])
async def test_echo_without_a_text_has_failed(arguments: str) -> None:
    assert await ask("echo", arguments) == Failed(message="echo needs a text")


@pytest.mark.parametrize("arguments", ["[]", '{"text":', '{"text":"\\ud800"}'])
async def test_echo_without_arguments_that_parse_has_failed(arguments: str) -> None:
    answer = await ask("echo", arguments)
    assert isinstance(answer, Failed)
    assert answer.message.startswith("the arguments did not parse: ")


async def test_a_tool_that_it_does_not_have_has_failed() -> None:
    answer = await ask("rm", "{}")
    assert isinstance(answer, Failed)
    assert "'rm'" in answer.message


def test_clock_is_core_and_echo_has_to_be_found() -> None:
    registry = fake_registry()
    assert registry.is_core("clock")
    assert registry.is_callable("echo")
