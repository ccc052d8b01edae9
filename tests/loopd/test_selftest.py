"""Tests of the self-test against every kind of server that it may meet."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from boxmaker.config import load_config
from boxmaker.inference.client import Client
from boxmaker.loopd.home import lock_home, prepare_home
from boxmaker.loopd.selftest import Check, Report, run_selftest, warm_flags
from boxmaker.testing.daemon import make_config
from boxmaker.testing.server import (
    LOADING,
    ScriptedServer,
    error_response,
    http_response,
    json_response,
    render_plainly,
    scripted_server,
)
from boxmaker.tools.fake import fake_registry

LIMIT_S = 2000

TWO_SLOTS = [{"id": 0, "n_ctx": 4096, "is_processing": False}, {"id": 1, "n_ctx": 4096, "is_processing": False}]
HTML = http_response(200, b"<!doctype html><title>Router</title>", "text/html")
NOT_FOUND = error_response(404, "File Not Found", "not_found_error")
NOT_SUPPORTED = error_response(501, "This server does not support slots endpoint.", "not_supported_error")
NO_KEY = error_response(401, "Invalid API Key", "authentication_error")

Body = dict[str, Any]


async def run(directory: Path, server: ScriptedServer, text: str = "") -> Report:
    """Run the self-test; whatever it finds, it asks for no completion."""
    config = make_config(directory, server.url, text)
    with trio.fail_after(LIMIT_S):
        async with Client(config) as client:
            report = await run_selftest(config, client, fake_registry())
    assert not [request.path for request in server.received if request.path == "/v1/chat/completions"]
    return report


def states(report: Report) -> dict[str, str]:
    """Each check by its name; no name comes twice."""
    assert len({check.name for check in report.checks}) == len(report.checks)
    return {check.name: check.state for check in report.checks}


def check(report: Report, name: str) -> Check:
    """One check of a report."""
    (found,) = [check for check in report.checks if check.name == name]
    return found


async def test_a_good_server_passes_every_check(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        server.slots = TWO_SLOTS
        report = await run(tmp_path, server)
    assert states(report) == {
        "home": "ok",
        "system.md": "ok",
        "server": "ok",
        "slot": "ok",
        "template": "ok",
        "prefix": "ok",
        "baseline": "ok",
    }
    assert not report.failed
    assert report.facts.alternate is False
    assert report.facts.model == "scripted"
    assert not (tmp_path / "home").exists(), "nothing is made"


def test_a_check_is_one_line() -> None:
    ok = Check(name="server", state="ok", message="http://127.0.0.1:8080")
    bad = Check(name="slot", state="fail", message="slot 2 does not exist", remedy="Set [slots] main")
    assert ok.line() == "ok    server: http://127.0.0.1:8080"
    assert bad.line() == "fail  slot: slot 2 does not exist. Set [slots] main"


# -- reaching the server -----------------------------------------------------------------------


async def test_a_server_that_refuses_connections_fails_at_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        pass
    began = trio.current_time()
    report = await run(tmp_path, server)
    assert trio.current_time() == began
    assert states(report) == {"home": "ok", "system.md": "ok", "server": "fail"}
    assert server.url in check(report, "server").message
    assert report.failed


async def test_a_loading_server_is_waited_for(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, trio.open_nursery() as nursery:
        props, server.props, server.slots = server.props, LOADING, TWO_SLOTS

        async def load() -> None:
            await trio.sleep(2.5)
            server.props = props

        nursery.start_soon(load)
        began = trio.current_time()
        report = await run(tmp_path, server)
        assert trio.current_time() - began == pytest.approx(3)  # it is looked at every second
    assert set(states(report).values()) == {"ok"}
    assert [request.path for request in server.received[:4]] == ["/props"] * 4


async def test_a_server_that_loads_for_longer_than_loading_s_fails(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        server.props = LOADING
        began = trio.current_time()
        report = await run(tmp_path, server, "[retry]\nloading_s = 20")
        assert trio.current_time() - began == pytest.approx(20)
    assert states(report)["server"] == "fail"
    assert "loading_s" in check(report, "server").remedy


async def test_a_server_that_says_nothing_fails_in_the_end(tmp_path: Path, autojump_clock: MockClock) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:  # connections are made by the kernel, and never answered
        report = await run(tmp_path, ScriptedServer(port=listener.socket.getsockname()[1]))
    assert states(report)["server"] == "fail"
    assert "/props" in check(report, "server").message


async def test_a_key_that_is_refused_fails_and_names_the_file_to_mend(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        server.props = NO_KEY
        report = await run(tmp_path, server)
    assert states(report) == {"home": "ok", "system.md": "ok", "server": "fail"}
    assert "api_key_file" in check(report, "server").remedy


async def test_the_key_is_sent_and_not_told(tmp_path: Path, autojump_clock: MockClock) -> None:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text("sk-secret\n", "ascii")
    async with scripted_server() as server:
        config = make_config(tmp_path, server.url)
        text = config.file.read_text("utf-8").replace("[paths]", 'api_key_file = "key"\n[paths]')
        config.file.write_text(text, "utf-8")
        config = load_config(config.file, {})
        with trio.fail_after(LIMIT_S):
            async with Client(config) as client:
                report = await run_selftest(config, client, fake_registry())
    assert {request.headers.get("authorization") for request in server.received} == {"Bearer sk-secret"}
    assert "sk-secret" not in "\n".join(found.line() for found in report.checks)


async def test_a_server_that_vanishes_in_the_middle_fails(tmp_path: Path, autojump_clock: MockClock) -> None:
    async def vanish(path: str) -> None:
        if path == "/slots":
            raise trio.BrokenResourceError

    async with scripted_server() as server:
        server.on_probe = vanish
        with trio.fail_after(LIMIT_S):
            config = make_config(tmp_path, server.url)
            async with Client(config) as client:
                report = await run_selftest(config, client, fake_registry())
    assert report.checks[-1].name == "server"
    assert report.checks[-1].state == "fail"


async def test_what_answers_html_to_everything_passes_for_nothing(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        server.props = server.slots = server.apply_template = server.input_tokens = server.tokenize = HTML
        report = await run(tmp_path, server)
    assert states(report) == {"home": "ok", "system.md": "ok", "server": "fail"}
    assert "no llama-server" in check(report, "server").message


# -- the slot ----------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [NOT_FOUND, NOT_SUPPORTED])
async def test_a_server_without_slots_is_warned_of_and_props_count_them(
    tmp_path: Path, refusal: bytes, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        server.slots = refusal
        report = await run(tmp_path, server)
        server.props = server.props | {"total_slots": 1}
        one = await run(tmp_path, server)
    assert (states(report)["slots"], states(report)["slot"]) == ("warn", "ok")
    assert "--slots" in check(report, "slots").remedy
    assert not report.failed
    assert states(one)["slot"] == "warn"


@pytest.mark.parametrize("slots", [TWO_SLOTS, NOT_FOUND])
async def test_a_slot_out_of_range_fails_and_says_what_is_allowed(
    tmp_path: Path, slots: Any, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        server.slots = slots
        last = await run(tmp_path, server, "[slots]\nmain = 1")
        over = await run(tmp_path, server, "[slots]\nmain = 2")
    assert states(last)["slot"] == "ok"
    assert states(over)["slot"] == "fail"
    assert "slot 2" in check(over, "slot").message
    assert "0 to 1" in check(over, "slot").remedy


async def test_each_of_our_slots_is_checked(tmp_path: Path, autojump_clock: MockClock) -> None:
    three = [{"id": 0, "n_ctx": 4096}, {"id": 1, "n_ctx": 600}, {"id": 2, "n_ctx": 4096}]
    async with scripted_server() as server:
        server.slots = three
        server.input_tokens = {"input_tokens": 500}
        report = await run(tmp_path, server, "[slots]\nmain = [2, 1, 3]")
        apart = await run(tmp_path, server, "[slots]\nmain = [2, 0]")
    found = [(one.name, one.state, one.message) for one in report.checks if one.name.startswith("slot ")]
    assert found == [
        ("slot 2", "ok", "slot 2 of 3, 4096 tokens"),
        ("slot 1", "ok", "slot 1 of 3, 600 tokens"),
        ("slot 3", "fail", "slot 3 does not exist, the server has 3"),
    ]
    # 500 tokens and room for 512 do not fit into the smallest of them
    assert states(report)["baseline"] == "fail"
    assert states(apart)["baseline"] == "ok"


def test_the_flags_leave_a_slot_to_others() -> None:
    assert warm_flags((0,)) == "-np 2 --no-kv-unified -b 256"
    assert warm_flags((2, 0)) == "-np 4 --no-kv-unified -b 256"


async def test_one_slot_is_warned_of_with_the_flags_that_keep_it_warm(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        report = await run(tmp_path, server)
    found = check(report, "slot")
    assert found.state == "warn"
    for flag in ("-np 2", "--no-kv-unified", "-b "):
        assert flag in found.remedy


# -- the template ------------------------------------------------------------------------------


def template(make: Callable[[Body], str | bytes]) -> Callable[[Body], bytes]:
    """A template of the test: text is the prompt, bytes are the whole answer."""

    def answer(body: Body) -> bytes:
        made = make(body)
        return made if isinstance(made, bytes) else json_response(200, {"prompt": made})

    return answer


def roles(body: Body) -> list[str]:
    """The roles of a conversation, in order."""
    return [message["role"] for message in body["messages"]]


def without(what: str) -> Callable[[Body], str]:
    """A template that leaves something out; calls in replies are rendered by all of them."""

    def make(body: Body) -> str:
        kept = [m for m in body["messages"] if what != m["role"]]
        return render_plainly({"messages": kept, "tools": [] if what == "tools" else body["tools"]})

    return make


@pytest.mark.parametrize("status", [400, 500])
async def test_a_template_that_refuses_tools_fails_with_its_words(
    tmp_path: Path, status: int, autojump_clock: MockClock
) -> None:
    def make(body: Body) -> str | bytes:
        if "tool" in roles(body):
            return error_response(status, "Jinja Exception: this template has no tools", "server_error")
        return render_plainly(body)

    async with scripted_server() as server:
        server.apply_template = template(make)
        report = await run(tmp_path, server)
    assert states(report)["template"] == "fail"
    assert "this template has no tools" in check(report, "template").message
    assert "prefix" not in states(report)
    assert "baseline" in states(report), "the rest is checked all the same"


@pytest.mark.parametrize(
    ("what", "named"),
    [("system", "the system message"), ("tools", "the tools"), ("tool", "tool results")],
)
async def test_a_template_that_leaves_something_out_fails_naming_it(
    tmp_path: Path, what: str, named: str, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        server.apply_template = template(without(what))
        report = await run(tmp_path, server)
    found = check(report, "template")
    assert found.state == "fail"
    assert found.message == f"the chat template leaves out {named}"
    assert "--jinja" in found.remedy


@pytest.mark.parametrize("answer", [NOT_FOUND, NOT_SUPPORTED, json_response(200, {"text": "x"}), HTML])
async def test_a_template_that_cannot_be_asked_is_warned_of(
    tmp_path: Path, answer: bytes, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        server.apply_template = answer
        report = await run(tmp_path, server)
    assert states(report)["template"] == "warn"
    assert report.facts.alternate is False
    assert not report.failed


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("before", ["user", "tool"])
async def test_alternate_is_found_where_the_template_refuses_user_after_user_or_after_tool(
    tmp_path: Path, before: str, status: int, autojump_clock: MockClock
) -> None:
    def make(body: Body) -> str | bytes:
        said = roles(body)
        if (before, "user") in itertools.pairwise(said):
            return error_response(status, "roles must alternate", "server_error")
        return render_plainly(body)

    async with scripted_server() as server:
        server.apply_template = template(make)
        report = await run(tmp_path, server)
    assert report.facts.alternate is True
    assert check(report, "template").state == "ok"
    assert "alternate" in check(report, "template").message
    assert check(report, "prefix").state == "ok"


async def test_alternate_is_not_taken_from_a_template_that_refuses_with_and_without_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        server.apply_template = error_response(500, "broken template")
        report = await run(tmp_path, server)
    assert report.facts.alternate is False
    assert states(report)["template"] == "fail"


def forgetful(body: Body) -> str:
    """As Qwen3's: reasoning is kept behind the last user message only."""
    last_user = max(at for at, role in enumerate(roles(body)) if role == "user")
    kept = [
        {k: v for k, v in message.items() if k != "reasoning_content" or at > last_user}
        for at, message in enumerate(body["messages"])
    ]
    return render_plainly({"messages": kept, "tools": body["tools"]})


HEEDS = {"chat_template_caps": {"supports_preserve_reasoning": True}}
QWEN3 = "<|im_start|> {{ enable_thinking }} <args-json-object>"


@pytest.mark.parametrize(
    ("more", "text", "remedy"),
    [
        ({"chat_template": QWEN3}, "[thinking]\ncap = 2000",
         "Start llama-server with --chat-template-file templates/qwen3.jinja of boxmaker's source: Qwen3's own, but "
         "prefix-stable. Its price is context: up to 2000 tokens of reasoning a reply stay in it"),
        (HEEDS, "[request.chat_template_kwargs]\npreserve_reasoning = false",
         "Take preserve_reasoning out of [request] chat_template_kwargs: it is true by itself. Its price is context: "
         "up to 4096 tokens of reasoning a reply stay in it"),
        (HEEDS, "[request.chat_template_kwargs]\nclear_thinking = true",
         "[request] chat_template_kwargs or a flag of the server overrides preserve_reasoning (clear_thinking does): "
         "take it out. Its price is context: up to 4096 tokens of reasoning a reply stay in it"),
        ({"chat_template": "of nobody"}, "",
         "boxmaker has no template for this family: use one that keeps reasoning; `bxctl cache` tells each loss"),
    ],
)  # fmt: skip
async def test_a_template_that_forgets_old_reasoning_is_warned_of_with_the_remedy_for_it(
    tmp_path: Path, autojump_clock: MockClock, more: Body, text: str, remedy: str
) -> None:
    async with scripted_server() as server:
        server.props = server.props | more
        server.apply_template = template(forgetful)
        report = await run(tmp_path, server, text)
    found = check(report, "prefix")
    assert found.state == "warn"
    assert "rewrites earlier messages" in found.message
    assert found.remedy == remedy
    assert not report.failed


async def test_a_generation_prompt_that_stands_in_front_of_the_answer_later_is_no_loss(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    def make(body: Body) -> str:
        parts = [f"<|{message['role']}|>{json.dumps(message)}" for message in body["messages"]]
        return json.dumps(body["tools"]) + "".join(parts) + "<|assistant|>"

    async with scripted_server() as server:
        server.apply_template = template(make)
        report = await run(tmp_path, server)
    assert check(report, "prefix").state == "ok"


async def test_a_generation_prompt_that_is_gone_later_is_warned_of(tmp_path: Path, autojump_clock: MockClock) -> None:
    """As Qwen3's with thinking off: the prompt's empty block is not in the history, so each answer is read again."""
    text = "[thinking]\nenabled = false"
    async with scripted_server() as server:
        server.props["chat_template"] = QWEN3
        server.apply_template = template(lambda body: render_plainly(body) + "\n<think>\n\n</think>\n\n")
        report = await run(tmp_path, server, text)
    found = check(report, "prefix")
    assert found.state == "warn"
    assert "re-reads each answer" in found.message
    assert found.remedy == (
        "Start llama-server with --chat-template-file templates/qwen3.jinja of boxmaker's source: Qwen3's own, but "
        "prefix-stable. Its price is context: a few a reply stay in it"
    )


async def test_what_the_template_is_asked_is_what_a_turn_sends(tmp_path: Path, autojump_clock: MockClock) -> None:
    text = '[request]\nchat_template_kwargs = { date_string = "1 Jan 2026" }\n[thinking]\nenabled = false'
    async with scripted_server() as server:
        await run(tmp_path, server, text)
    bodies = [request.json() for request in server.received if request.path == "/apply-template"]
    assert bodies
    for body in bodies:
        assert [tool["function"]["name"] for tool in body["tools"]] == ["clock", "find_tool", "call_tool"]
        assert body["chat_template_kwargs"] == {
            "enable_thinking": False,
            "preserve_reasoning": True,
            "date_string": "1 Jan 2026",
        }
    answered = [body["messages"][2] for body in bodies if len(body["messages"]) > 3]
    assert {message.get("reasoning_content") for message in answered} == {None}, "no thinking, no reasoning to keep"


async def test_the_stability_probe_has_reasoning_and_a_call_and_a_later_user_message(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        await run(tmp_path, server)
    bodies = [request.json() for request in server.received if request.path == "/apply-template"]
    assert any(
        roles(body) == ["system", "user", "assistant", "tool", "assistant", "user"]
        and body["messages"][2]["reasoning_content"]
        and body["messages"][2]["tool_calls"]
        and body["messages"][4]["reasoning_content"]
        for body in bodies
    )


# -- the baseline ------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "state"), [(3000, "ok"), (3001, "fail")])
async def test_the_baseline_may_have_token_budget_tokens_and_not_one_more(
    tmp_path: Path, tokens: int, state: str, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        server.slots = TWO_SLOTS
        server.input_tokens = {"input_tokens": tokens}
        report = await run(tmp_path, server)
    found = check(report, "baseline")
    assert found.state == state
    assert f"{tokens} tokens" in found.message
    assert "3000" in found.message


@pytest.mark.parametrize(("n_ctx", "state"), [(612, "ok"), (611, "fail")])
@pytest.mark.parametrize("shown_by", ["slots", "props"])
async def test_the_baseline_must_leave_512_tokens_of_the_slot(
    tmp_path: Path, n_ctx: int, state: str, shown_by: str, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        server.input_tokens = {"input_tokens": 100}
        server.props = server.props | {"default_generation_settings": {"n_ctx": n_ctx}}
        server.slots = [{**slot, "n_ctx": n_ctx} for slot in TWO_SLOTS] if shown_by == "slots" else NOT_FOUND
        report = await run(tmp_path, server)
    assert check(report, "baseline").state == state


async def test_the_slots_own_n_ctx_counts_before_that_of_the_server(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        server.slots = [{"id": 0, "n_ctx": 600}, {"id": 1, "n_ctx": 4096}]
        small = await run(tmp_path, server)
        large = await run(tmp_path, server, "[slots]\nmain = 1")
    assert check(small, "baseline").state == "fail"
    assert check(large, "baseline").state == "ok"


async def test_what_is_counted_is_the_baseline_of_a_new_session(tmp_path: Path, autojump_clock: MockClock) -> None:
    core = tmp_path / "home" / "memory" / "core.md"
    core.parent.mkdir(parents=True)
    core.write_text("The owner is called Ada.\n", "utf-8")
    async with scripted_server() as server:
        await run(tmp_path, server)
    (counted,) = [r.json() for r in server.received if r.path == "/v1/chat/completions/input_tokens"]
    assert counted["messages"] == [{"role": "system", "content": "You are a test.\n\nThe owner is called Ada."}]
    assert len(counted["tools"]) == 3
    assert counted["add_generation_prompt"] is False


@pytest.mark.parametrize("missing", [NOT_FOUND, HTML, json_response(200, {"input_tokens": "many"})])
async def test_without_a_counter_the_rendered_text_is_tokenized(
    tmp_path: Path, missing: bytes, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        server.input_tokens = missing
        server.tokenize = {"tokens": list(range(77))}
        report = await run(tmp_path, server)
        server.tokenize = NOT_FOUND
        uncounted = await run(tmp_path, server)
    assert "77 tokens" in check(report, "baseline").message
    asked = next(r.json() for r in server.received if r.path == "/tokenize")
    assert "You are a test." in asked["content"]
    assert asked["add_special"] is True
    assert states(uncounted)["baseline"] == "warn"
    assert not uncounted.failed


# -- files and settings ------------------------------------------------------------------------


async def selftest_without_system_md(directory: Path, server: ScriptedServer, text: str) -> Report:
    config = make_config(directory, server.url, text)
    (directory / "system.md").unlink()
    with trio.fail_after(LIMIT_S):
        async with Client(config) as client:
            return await run_selftest(config, client, fake_registry())


async def test_a_missing_system_md_is_warned_of_at_its_default_path_and_fails_where_it_was_set(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        default = await selftest_without_system_md(tmp_path, server, "")
        named = await selftest_without_system_md(tmp_path, server, '[baseline]\nsystem = "mine.md"')
    assert states(default)["system.md"] == "warn"
    assert str(tmp_path / "system.md") in check(default, "system.md").message
    assert "packaged" in check(default, "system.md").message
    assert states(default)["baseline"] == "ok"
    assert states(named)["system.md"] == "fail"
    assert str(tmp_path / "mine.md") in check(named, "system.md").message
    assert "baseline" not in states(named), "there is none to count"
    assert states(named)["server"] == "ok"


async def test_a_memory_that_cannot_be_read_fails_naming_the_file(tmp_path: Path, autojump_clock: MockClock) -> None:
    core = tmp_path / "home" / "memory" / "core.md"
    core.parent.mkdir(parents=True)
    core.write_bytes(b"caf\xe9")
    async with scripted_server() as server:
        report = await run(tmp_path, server)
    assert states(report)["system.md"] == "fail"
    assert str(core) in check(report, "system.md").message


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ("", False),
        ("[request]\nmax_tokens = 4607", True),
        ("[request]\nmax_tokens = 4608", False),
        ("[request]\nmax_tokens = -1", False),
        ("[request]\nn_predict = 1", True),
        ("[request]\nmax_completion_tokens = 4000", True),
        ("[request]\nmax_tokens = 767\n[thinking]\ncap = 256", True),
        ("[request]\nmax_tokens = 768\n[thinking]\ncap = 256", False),
    ],
)
async def test_max_tokens_below_the_thinking_cap_and_512_is_warned_of(
    tmp_path: Path, text: str, warned: bool, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        report = await run(tmp_path, server, text)
    assert ("max_tokens" in states(report)) == warned
    assert not report.failed


async def test_the_home_is_said_to_be_made_or_ours(tmp_path: Path, autojump_clock: MockClock) -> None:
    home = tmp_path / "home"
    async with scripted_server() as server:
        absent = await run(tmp_path, server)
        assert not home.exists()
        prepare_home(home)
        idle = await run(tmp_path, server)
        with lock_home(home):
            ours = await run(tmp_path, server)
    assert check(absent, "home").message == f"{home} will be made"
    assert check(idle, "home").message == f"{home}"
    assert check(ours, "home").message == f"{home}, locked by this loopd"
    assert {states(report)["home"] for report in (absent, idle, ours)} == {"ok"}


async def test_a_home_that_cannot_be_made_fails_before_anything_is_served(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    (tmp_path / "home").write_text("", "utf-8")
    async with scripted_server() as server:
        report = await run(tmp_path, server)
    assert states(report)["home"] == "fail"
    assert "BOXMAKER_HOME" in check(report, "home").message


# -- anything at all ---------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10_000) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["id", "n_ctx", "total_slots", "default_generation_settings", "prompt", "error", "message", "tokens"]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
ANSWER = st.one_of(
    JSON,
    st.builds(json_response, st.sampled_from([200, 400, 404, 500, 503]), JSON),
    st.builds(http_response, st.sampled_from([200, 500]), st.binary(max_size=20), st.just("text/plain")),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(props={}, slots=[{"id": []}, {"id": {}}], prompt={}, counted={}, tokens={})
@given(props=ANSWER, slots=ANSWER, prompt=ANSWER, counted=ANSWER, tokens=ANSWER)
def test_no_answer_of_a_server_makes_the_selftest_raise(
    props: Any, slots: Any, prompt: Any, counted: Any, tokens: Any
) -> None:
    async def main() -> Report:
        with TemporaryDirectory() as directory:
            async with scripted_server() as server:
                server.props, server.slots = props, slots
                server.input_tokens, server.tokenize = counted, tokens
                server.apply_template = prompt if isinstance(prompt, bytes) else json_response(200, prompt)
                return await run(Path(directory), server, "[retry]\nloading_s = 3")

    report = trio.run(main, clock=MockClock(autojump_threshold=0))
    for found in report.checks:
        assert found.state in ("ok", "warn", "fail")
        json.dumps(found.line())


@pytest.mark.parametrize("path", ["slots", "apply_template", "input_tokens"])
async def test_a_key_that_is_refused_anywhere_fails_with_its_remedy(
    tmp_path: Path, path: str, autojump_clock: MockClock
) -> None:
    """Some paths of a server may be open where others ask for the key."""
    async with scripted_server() as server:
        setattr(server, path, NO_KEY)
        report = await run(tmp_path, server)
    server_check = [one for one in report.checks if one.name == "server" and one.state == "fail"]
    assert [one.remedy for one in server_check] == ["Put its --api-key into the file that [server] api_key_file names"]


async def test_what_has_none_of_the_servers_own_paths_is_no_llama_server(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """As `python -m http.server` answers: 404 to GET, 501 to POST."""
    async with scripted_server() as server:
        server.props = server.slots = http_response(404, b"<!DOCTYPE HTML>", "text/html")
        server.apply_template = server.input_tokens = http_response(501, b"<!DOCTYPE HTML>", "text/html")
        report = await run(tmp_path, server)
    assert report.failed
    assert "no llama-server" in report.checks[-1].message


async def test_max_tokens_is_no_matter_where_the_model_does_not_think(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        report = await run(tmp_path, server, "[request]\nmax_tokens = 100\n[thinking]\nenabled = false\n")
    assert [one.name for one in report.checks if one.name == "max_tokens"] == []


# -- saved slots ----------------------------------------------------------------------------------


async def test_slots_may_be_saved_where_we_may_remove_and_the_server_saves(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    (tmp_path / "kv").mkdir()
    text = '[slots]\nsave_dir = "kv"\n'
    async with scripted_server() as server:
        server.on_slot_action = lambda *_: error_response(400, "Invalid action", "invalid_request_error")
        report = await run(tmp_path, server, text)
        assert check(report, "save_dir").state == "ok"
        assert "saving" not in states(report)
        server.on_slot_action = None
        report = await run(tmp_path, server, text)
    found = check(report, "saving")
    assert (found.state, found.message) == ("warn", "the server saves no slots (501)")
    assert found.remedy == f"Start llama-server with --slot-save-path {tmp_path}/kv/"
    assert [r.path for r in server.received if r.path.startswith("/slots/")] == ["/slots/0?action=none"] * 2


async def test_a_directory_for_slots_where_we_may_not_remove_is_refused(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server:
        report = await run(tmp_path, server, '[slots]\nsave_dir = "kv"\n')
    assert report.failed
    found = check(report, "save_dir")
    assert found.state == "fail"
    assert found.message == f"{tmp_path}/kv: No such file or directory"
    assert found.remedy.endswith("--slot-save-path; or take [slots] save_dir out")


@pytest.mark.parametrize(
    ("outer", "inner", "state"), [(0o755, 0o755, "warn"), (0o700, 0o755, "ok"), (0o755, 0o770, "ok")]
)
async def test_a_directory_for_slots_that_everybody_may_enter_is_warned_of(
    autojump_clock: MockClock, outer: int, inner: int, state: str
) -> None:
    """The server writes its files so that all may read them, and they hold what was said."""
    with TemporaryDirectory() as name:
        os.mkdir(f"{name}/kv")
        os.chmod(f"{name}/kv", inner)
        os.chmod(name, outer)
        async with scripted_server() as server:
            server.on_slot_action = lambda *_: error_response(400, "Invalid action", "invalid_request_error")
            report = await run(Path(name), server, '[slots]\nsave_dir = "kv"\n')
        found = check(report, "save_dir")
        assert (found.state, found.remedy) == (state, f"Run: chmod o-rwx {name}/kv" if state == "warn" else "")
