"""Histories on disk: a whole one gives its bytes, odd ones give what a strict server accepts or are refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from boxmaker.inference.cache import TokenFigures
from boxmaker.proto.channel import ErrorCode, WireError
from boxmaker.proto.chat import ToolCall
from boxmaker.proto.ids import SessionId
from boxmaker.session.baseline import baseline_hash
from boxmaker.testing.daemon import running_daemon
from boxmaker.testing.server import error_response, reply, scripted_server
from tests.strict import problems

from .homes import BASELINE_RAW, FIXED, lay_out, make_store, new_session, say

FIXTURES = Path(__file__).parents[2] / "fixtures" / "sessions"
WHOLE = FIXTURES / "whole"
REPAIR = FIXTURES / "history-repair"


# -- a log that must be readable for ever -----------------------------------------------------


async def test_a_log_of_today_gives_these_bytes_in_every_later_version(tmp_path: Path) -> None:
    assert FIXED == {"stream": True, "id_slot": 0}, "the file of the request has them"
    log, baseline = ((WHOLE / name).read_bytes() for name in ("0.jsonl", "0.baseline.json"))
    lay_out(tmp_path, log, session="whole", baseline=baseline)
    store = make_store(tmp_path)
    async with store.turn(SessionId("whole"), resume=True, new=new_session(), alternate=False) as session:
        assert session.request_body() == (WHOLE / "request.json").read_bytes()
        assert session.state.next_call == 3
        assert session.state.open_calls == [ToolCall(id="c00000001", name="clock", arguments="{}")]
        assert session.state.last_figures == TokenFigures(cache_n=None, prompt_n=None, predicted_n=None)
        assert session.state.start is not None
        assert session.state.start.slot == 1


# -- histories that others have left behind ---------------------------------------------------


def lay_out_case(home: Path, name: str) -> Path:
    """Copy a case into a home as the session `case-a` and so on, with the hash of our baseline."""
    [file] = REPAIR.glob(f"{name}-*.jsonl")
    log = file.read_bytes()
    assert log.count(b"<sha-256 of 0.baseline.json>") == 1
    log = log.replace(b"<sha-256 of 0.baseline.json>", baseline_hash(BASELINE_RAW).encode())
    return lay_out(home, log, session=f"case-{name}")


def refuse(messages: list[Any]) -> bytes | None:
    found = [*problems(messages), *turns_out_of_order(messages)]
    return error_response(400, f"strict: {found}") if found else None


def turns_out_of_order(messages: list[Any]) -> list[str]:
    """What a template with strict turns refuses besides: a user who has had no answer yet."""
    roles = [message["role"] for message in messages]
    pairs = enumerate(itertools.pairwise(roles), start=1)
    return [f"message {at}: user after {before}" for at, (before, role) in pairs if role == "user" and before in TOLD]


TOLD = ("user", "tool")


USER_TEXTS = {
    "a": ["look"],
    "d": ["first, the server failed here", "second try"],
    "e": ["hi", "hello?"],
    "f": ["hi", "hello?"],
    "g": ["look", "again"],
    "h": ["look", "again"],
    "i": ["hi", "no answer was ever written"],
    "j": ["look", "again"],
}


@pytest.mark.parametrize("name", USER_TEXTS)
async def test_a_strict_server_accepts_the_next_turn_and_the_same_bytes_after_a_restart(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, name: str
) -> None:
    session = f"case-{name}"
    home = tmp_path / "home"
    log = lay_out_case(home, name)
    bodies = []
    with trio.fail_after(60):
        async with scripted_server(reply("fine"), reply("fine")) as server:
            server.refuse_history = refuse
            for restart in range(2):
                async with running_daemon(tmp_path, server.url, alternate=True) as daemon:
                    if restart == 0:
                        assert (await daemon.ask(session, "continue", resume=True)).content == "fine"
                    assert len(server.bodies) == 1, "nothing is asked twice"
                async with make_store(home).turn(
                    SessionId(session), resume=True, new=new_session(), alternate=True
                ) as had:
                    bodies.append(had.request_body())
    assert bodies[0] == bodies[1]
    request = json.loads(server.bodies[0])["messages"]
    users = [message["content"] for message in request if message["role"] == "user"]
    assert users == [*USER_TEXTS[name], "continue"]
    assert json.loads(bodies[0])["messages"] == [*request, {"role": "assistant", "content": "fine"}]
    assert log.read_bytes().startswith(b'{"type":"session_start"')


async def test_an_open_call_is_answered_before_the_next_message_and_not_run_again(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    lay_out_case(tmp_path / "home", "a")
    with trio.fail_after(60):
        async with scripted_server(reply("fine")) as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                await daemon.ask("case-a", "continue", resume=True)
    called, answered, user = json.loads(server.bodies[0])["messages"][-3:]
    assert called["tool_calls"][0]["id"] == answered["tool_call_id"] == "c1"
    assert "unknown" in answered["content"]
    assert user == {"role": "user", "content": "continue"}


async def test_two_users_in_a_row_are_sent_as_they_are_where_the_template_takes_them(tmp_path: Path) -> None:
    lay_out_case(tmp_path, "d")
    messages = json.loads(await say(make_store(tmp_path), session="case-d"))["messages"]
    assert messages[1:] == [
        {"role": "user", "content": "first, the server failed here"},
        {"role": "user", "content": "second try"},
    ]


async def test_a_used_id_is_renamed_with_its_result(tmp_path: Path) -> None:
    lay_out_case(tmp_path, "h")
    messages = json.loads(await say(make_store(tmp_path), session="case-h"))["messages"]
    ids = [call["id"] for message in messages for call in message.get("tool_calls", [])]
    results = {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}
    assert ids == ["c1", "c00000001"]
    assert results == {"c1": "one", "c00000001": "two"}


async def test_results_in_another_order_belong_to_their_calls(tmp_path: Path) -> None:
    lay_out_case(tmp_path, "j")
    messages = json.loads(await say(make_store(tmp_path), session="case-j"))["messages"]
    results = [(message["tool_call_id"], message["content"]) for message in messages if message["role"] == "tool"]
    assert results == [("c2", "two"), ("c1", "one")]


async def test_broken_arguments_are_sent_as_an_object(tmp_path: Path) -> None:
    lay_out_case(tmp_path, "g")
    messages = json.loads(await say(make_store(tmp_path), session="case-g"))["messages"]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == '{"raw":"{"}'


@pytest.mark.parametrize(("name", "line"), [("b", 6), ("c", 3)])
async def test_a_log_that_our_writer_cannot_make_is_refused_with_its_line(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, name: str, line: int
) -> None:
    log = lay_out_case(tmp_path / "home", name)
    before = log.read_bytes()
    with trio.fail_after(60):
        async with scripted_server() as server:
            async with running_daemon(tmp_path, server.url) as daemon:
                error = await daemon.fail(f"case-{name}", "continue", resume=True)
    assert isinstance(error, WireError)
    assert error.code == ErrorCode.SESSION_DAMAGED
    assert error.detail == {"file": str(log), "line": line}
    assert log.read_bytes() == before
    assert server.bodies == []


def test_every_case_is_tried() -> None:
    names = sorted(file.name[0] for file in REPAIR.iterdir())
    assert names == sorted([*USER_TEXTS, "b", "c"]) == list("abcdefghij")


def test_the_strict_server_refuses_what_is_not_mended(tmp_path: Path) -> None:
    """e, i and j are fine as they are; i has two users in a row once the next message is there."""
    refused = set()
    for name in "abcdefghij":
        log = lay_out_case(tmp_path, name).read_bytes()
        unmended = [{"role": "system", "content": ""}, *filter(None, map(as_it_is, map(json.loads, log.splitlines())))]
        if refuse(unmended):
            refused.add(name)
    assert refused == set("abcdfgh")


def as_it_is(record: dict[str, Any]) -> dict[str, Any] | None:
    """A record's message with nothing mended."""
    match record["type"]:
        case "user":
            return {"role": "user", "content": record["content"]}
        case "tool_result":
            return {"role": "tool", "tool_call_id": record["tool_call_id"], "content": record["content"]}
        case "assistant":
            calls = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in record["tool_calls"]
            ]
            if calls:
                return {"role": "assistant", "content": record["content"] or "", "tool_calls": calls}
            return {"role": "assistant", "content": record["content"]}
    return None
