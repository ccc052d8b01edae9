"""What the server's template is asked, and when it is asked again."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from boxmaker.errors import InferenceError
from boxmaker.inference.client import Answer, Client
from boxmaker.inference.facts import (
    TOOL_TURN,
    ServerFacts,
    find_alternate,
    limits_of,
    prompt_of,
    render,
    template_digest,
)
from boxmaker.testing.daemon import make_config
from boxmaker.testing.server import error_response, json_response, scripted_server
from boxmaker.tools.fake import fake_registry

TOOLS = fake_registry().core_schemas()


def strict_template(refused: set[tuple[str, str]]) -> Any:
    """A template that refuses some roles directly after others."""

    def render_strictly(body: dict[str, Any]) -> bytes:
        roles = [message["role"] for message in body["messages"]]
        if refused & set(pairwise(roles)):
            return error_response(500, "Conversation roles must alternate user/assistant/user/assistant/...")
        return json_response(200, {"prompt": json.dumps(body["messages"])})

    return render_strictly


@pytest.mark.parametrize(
    ("refused", "alternate"),
    [
        (set(), False),
        ({("user", "user")}, True),
        ({("tool", "user")}, True),
        ({("user", "user"), ("tool", "user")}, True),
        ({("system", "user")}, False),
        ({("user", "user"), ("user", "assistant")}, False),
    ],
    ids=["none", "user user", "tool user", "both", "refuses everything", "refuses the note too"],
)
async def test_alternate_is_found_by_asking(
    tmp_path: Path, autojump_clock: MockClock, refused: set[tuple[str, str]], alternate: bool
) -> None:
    async with scripted_server() as server:
        server.apply_template = strict_template(refused)
        config = make_config(tmp_path, server.url)
        async with Client(config) as client:
            assert await find_alternate(client, config, TOOLS) is alternate


@pytest.mark.parametrize("status", [404, 501])
async def test_a_server_without_apply_template_does_not_alternate(
    tmp_path: Path, autojump_clock: MockClock, status: int
) -> None:
    async with scripted_server() as server:
        server.apply_template = error_response(status, "File Not Found")
        config = make_config(tmp_path, server.url)
        async with Client(config) as client:
            assert await find_alternate(client, config, TOOLS) is False


async def test_the_template_is_asked_with_what_a_request_would_send(tmp_path: Path, autojump_clock: MockClock) -> None:
    text = '[request]\nchat_template_kwargs = { date_string = "26 Jul 2024" }\n'
    async with scripted_server() as server:
        config = make_config(tmp_path, server.url, text)
        async with Client(config) as client:
            answer = await render(client, config, TOOL_TURN, TOOLS)
        asked = server.received[0].json()
    assert prompt_of(answer) is not None
    assert (server.received[0].method, server.received[0].path) == ("POST", "/apply-template")
    assert asked["chat_template_kwargs"] == {
        "enable_thinking": True,
        "preserve_reasoning": True,
        "date_string": "26 Jul 2024",
    }
    assert [message["role"] for message in asked["messages"]] == ["system", "user", "assistant", "tool"]
    assert asked["messages"][2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "clock", "arguments": "{}"}}],
    }
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["clock", "find_tool", "call_tool"]


@pytest.mark.parametrize(
    ("status", "value", "prompt"),
    [
        (200, {"prompt": "<s>"}, "<s>"),
        (200, {"prompt": ""}, ""),
        (200, {"prompt": None}, None),
        (200, {}, None),
        (200, ["prompt"], None),
        (200, None, None),
        (500, {"prompt": "<s>"}, None),
        (404, None, None),
    ],
)
def test_a_prompt_is_what_a_200_calls_so(status: int, value: object, prompt: str | None) -> None:
    assert prompt_of(Answer(status=status, value=value, retry_after=None)) == prompt


@pytest.mark.parametrize("status", [400, 500])
async def test_a_refusal_is_a_400_or_a_500(tmp_path: Path, autojump_clock: MockClock, status: int) -> None:
    def render_strictly(body: dict[str, Any]) -> bytes:
        roles = [message["role"] for message in body["messages"]]
        return error_response(status, "no") if ("user", "user") in pairwise(roles) else json_response(200, {})

    async with scripted_server() as server:
        server.apply_template = render_strictly
        config = make_config(tmp_path, server.url)
        async with Client(config) as client:
            assert await find_alternate(client, config, TOOLS) is True


async def test_a_key_that_the_server_does_not_take_is_an_error(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        server.apply_template = error_response(401, "Invalid API Key")
        config = make_config(tmp_path, server.url)
        async with Client(config) as client:
            with pytest.raises(InferenceError) as caught:
                await render(client, config, TOOL_TURN, TOOLS)
    assert caught.value.status == 401


async def test_a_template_that_is_not_rendered_in_time_is_an_error(tmp_path: Path, autojump_clock: MockClock) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
    config = make_config(tmp_path, url)
    async with Client(config) as client:
        with pytest.raises(InferenceError, match="within 30 s") as caught:
            await render(client, config, TOOL_TURN, TOOLS)
    assert caught.value.kind == "connect"
    await listeners[0].aclose()


async def test_facts_are_asked_again_only_when_the_model_changes(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        server.apply_template = strict_template({("user", "user")})
        config = make_config(tmp_path, server.url)
        facts = ServerFacts(model="old")
        async with Client(config) as client:
            for same in ("old", None, "old"):
                facts.saw_model(same)
                await facts.refresh(client, config, TOOLS)
            assert server.received == []
            facts.saw_model("new")
            await facts.refresh(client, config, TOOLS)
            assert facts.alternate is True
            asked = len(server.received)
            assert asked > 0
            await facts.refresh(client, config, TOOLS)
            assert len(server.received) == asked


async def test_the_first_model_that_is_seen_is_no_change(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        config = make_config(tmp_path, server.url)
        facts = ServerFacts()
        facts.saw_model("first")
        async with Client(config) as client:
            await facts.refresh(client, config, TOOLS)
        assert server.received == []


async def test_facts_stay_stale_when_the_server_does_not_answer(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        url = server.url
        server.apply_template = strict_template({("tool", "user")})
    facts = ServerFacts(model="old", alternate=False)
    facts.saw_model("new")
    config = make_config(tmp_path, url)
    async with Client(config) as client:
        await facts.refresh(client, config, TOOLS)
    assert facts.alternate is False
    async with scripted_server() as server:
        server.apply_template = strict_template({("tool", "user")})
        config = make_config(tmp_path, server.url)
        async with Client(config) as client:
            await facts.refresh(client, config, TOOLS)
    assert facts.alternate is True


@pytest.mark.parametrize(
    ("props", "limits"),
    [
        ({"default_generation_settings": {"n_ctx": 4096}, "total_slots": 2}, (4096, 2)),
        (
            {"default_generation_settings": {"n_ctx": 1}, "total_slots": 9_007_199_254_740_991},
            (1, 9_007_199_254_740_991),
        ),
        ({"default_generation_settings": {"n_ctx": 0}, "total_slots": 9_007_199_254_740_992}, (None, None)),
        ({"default_generation_settings": {"n_ctx": True}, "total_slots": "2"}, (None, None)),
        ({"default_generation_settings": [4096], "total_slots": 2.0}, (None, None)),
        ({"default_generation_settings": {}}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_limits_are_whole_numbers_within_bounds(props: dict[str, Any], limits: tuple[int | None, int | None]) -> None:
    assert limits_of(props) == limits


@pytest.mark.parametrize(
    ("props", "digest"),
    [
        # as sha256sum has it of `abc`, and of the three bytes ED B2 80
        ({"chat_template": "abc"}, "ba7816bf8f01"),
        ({"chat_template": "\udc80"}, "37098e13faf7"),
        ({"chat_template": ""}, None),
        ({"chat_template": 5}, None),
        ({}, None),
        (["chat_template"], None),
        (None, None),
    ],
)
def test_a_template_has_a_digest_to_compare(props: Any, digest: str | None) -> None:
    assert template_digest(props) == digest


@pytest.mark.parametrize(
    ("slots", "told"),
    [
        ("[0, 1]", []),
        ("[0, 2]", [{"slot": 2, "total_slots": 2}]),
    ],
)
async def test_what_another_model_has_is_told_and_noted(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, slots: str, told: list[Any]
) -> None:
    """A slot that is not there would wrap to another one, so it is said."""
    caplog.set_level("INFO", "boxmaker")
    async with scripted_server() as server:
        server.props = {
            "default_generation_settings": {"n_ctx": 4096}, "total_slots": 2, "chat_template": "abc"
        }  # fmt: skip
        config = make_config(tmp_path, server.url, f"[slots]\nmain = {slots}\n")
        facts = ServerFacts(model="old")
        facts.saw_model("new")
        async with Client(config) as client:
            await facts.refresh(client, config, TOOLS)
    assert (facts.template, facts.n_ctx) == ("ba7816bf8f01", 4096)
    logged: dict[str, list[Any]] = {}
    for record in caplog.records:
        logged.setdefault(record.getMessage(), []).append(vars(record)["fields"])
    assert logged.get("slot_missing", []) == told
    assert logged["facts_refreshed"] == [{"props": 200, "total_slots": 2, "n_ctx": 4096}]


async def test_a_server_without_props_has_no_limits(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "boxmaker")
    async with scripted_server() as server:
        server.props = json_response(404, {"total_slots": 2})
        config = make_config(tmp_path, server.url)
        facts = ServerFacts(model="old")
        facts.saw_props({"chat_template": "abc"})
        facts.saw_model("new")
        async with Client(config) as client:
            await facts.refresh(client, config, TOOLS)
    assert facts.template == "ba7816bf8f01", "nothing was seen, so nothing is forgotten"
    (record,) = (one for one in caplog.records if one.getMessage() == "facts_refreshed")
    assert vars(record)["fields"] == {"props": 404}


@pytest.mark.parametrize("props", [[], None, "text", {"default_generation_settings": {"n_ctx": 9}}])
def test_props_that_are_no_object_say_nothing(props: Any) -> None:
    facts = ServerFacts()
    facts.saw_props({"chat_template": "abc", "default_generation_settings": {"n_ctx": 5}})
    facts.saw_props(props)
    assert (facts.template, facts.n_ctx) == (None, 9 if isinstance(props, dict) else None)
