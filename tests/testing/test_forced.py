"""The forced server: that a real server says what it is told to, and that the proxy changes nothing else.

What it does to bytes and connections is tried in front of a scripted server, what the real one makes of it in front
of the embedded one. Replies are short: a token is the expensive thing here.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

from boxmaker.demo.server import N_CTX_PER_SLOT
from boxmaker.testing.forced import ForcedReply, ForcedServer, forced_server, segments
from boxmaker.testing.server import (
    CHAT_PATH,
    LOADING,
    STREAM_HEAD,
    Hang,
    Pause,
    Reset,
    Script,
    ScriptedServer,
    Send,
    chunk,
    delta,
    ending,
    error_response,
    json_response,
    reply,
    scripted_server,
)
from tests.e2e.conftest import llama_server
from tests.embedded import on_the_embedded_server

LIMIT_S = 240


# -- what a reply is cut into ------------------------------------------------------------------------


def parts(reply: ForcedReply) -> list[tuple[str, str | None]]:
    """Each part's text and kind."""
    text, found = segments(reply)
    begin = 0
    cut = []
    for part in found:
        cut.append((text[begin : part.end], part.kind))
        begin = part.end
    assert begin == len(text)
    return cut


def test_a_plain_reply_is_content() -> None:
    assert parts(ForcedReply(content="Hi.")) == [("Hi.", "content")]
    assert parts(ForcedReply()) == []


def test_reasoning_stands_between_its_tags() -> None:
    assert parts(ForcedReply(content="Hi.", reasoning="Hm.")) == [
        ("<think>\n", None),
        ("Hm.\n", "reasoning_content"),
        ("</think>\n\n", None),
        ("Hi.", "content"),
    ]


@pytest.mark.parametrize(("content", "shown"), [("", []), ("Look.", [("Look.\n", "content")])])
def test_calls_follow_the_content_with_a_line_end_between(content: str, shown: list[tuple[str, str | None]]) -> None:
    reply = ForcedReply(content=content, calls=[("clock", {}), ("echo", {"text": "a"})])
    assert parts(reply) == [
        *shown,
        ('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>', None),
        ('\n<tool_call>\n{"name": "echo", "arguments": {"text": "a"}}\n</tool_call>', None),
    ]
    assert [part.call for part in segments(reply)[1] if part.call] == [("clock", "{}"), ("echo", '{"text": "a"}')]


# -- asking ------------------------------------------------------------------------------------------


def asked(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    """A body as our client sends it."""
    said = [{"role": role, "content": content} for role, content in messages or [("user", "Hi")]]
    fixed = {"stream": True, "stream_options": {"include_usage": True}, "id_slot": 0, "cache_prompt": True}
    return {"messages": said, **fixed, "return_progress": True, **more}


async def post(url: str, body: Any, path: str = CHAT_PATH) -> tuple[int, bytes]:
    async with httpx.AsyncClient(timeout=None, trust_env=False, headers={"Connection": "close"}) as client:
        response = await client.post(f"{url}{path}", json=body)
        return response.status_code, response.content


async def get(url: str, path: str) -> tuple[int, Any]:
    async with httpx.AsyncClient(timeout=None, trust_env=False, headers={"Connection": "close"}) as client:
        response = await client.get(f"{url}{path}")
        return response.status_code, response.json()


async def ask_and_leave_after(url: str, body: Any, wanted: bytes) -> None:
    """Ask for a completion, and close the connection once these bytes have come."""
    async with await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2])) as stream:
        raw = json.dumps(body).encode()
        await stream.send_all(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT_PATH.encode(), len(raw))
        )
        await stream.send_all(raw)
        seen = b""
        while wanted not in seen:
            piece = await stream.receive_some(65536)
            assert piece, seen
            seen += piece


class Said:
    """A stream put together by the simplest reader there is."""

    def __init__(self, answer: tuple[int, bytes]) -> None:
        status, self.body = answer
        assert status == 200, self.body
        *events, done, rest = self.body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        self.chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
        choices = [chunk["choices"][0] for chunk in self.chunks if chunk["choices"]]
        self.deltas = [choice["delta"] for choice in choices]
        self.content = "".join(delta.get("content") or "" for delta in self.deltas)
        self.reasoning = "".join(delta.get("reasoning_content") or "" for delta in self.deltas)
        self.calls = [call for delta in self.deltas for call in delta.get("tool_calls", ())]
        self.finish = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        self.timings = self.chunks[-1].get("timings", {})
        self.usage = self.chunks[-1].get("usage", {})

    def named(self) -> list[tuple[int, str, str]]:
        return [(call["index"], call["function"]["name"], call["function"]["arguments"]) for call in self.calls]


# -- in front of a scripted server -------------------------------------------------------------------


def by_character(body: dict[str, Any]) -> bytes:
    """A tokenizer: a character is a token, but the one that is two, and `<P>` grows together with an `x` behind it."""
    tokens: list[dict[str, Any]] = []
    for char in body["content"].replace("<P>x", "\x01"):
        pieces = [char] if char != "世" else [[0xE4, 0xB8], [0x96]]
        tokens += [{"id": ord(char) + at, "piece": piece} for at, piece in enumerate(pieces)]
    return json_response(200, {"tokens": tokens})


@asynccontextmanager
async def in_front_of(
    *scripts: Script, replies: list[ForcedReply]
) -> AsyncIterator[tuple[ForcedServer, ScriptedServer]]:
    """A forced server whose "real" one is scripted: it generates what the script says."""
    with trio.fail_after(LIMIT_S):
        async with scripted_server(*scripts) as upstream, forced_server(upstream.url) as server:
            upstream.apply_template = json_response(200, {"prompt": "<P>"})
            upstream.tokenize = by_character
            server.replies = replies
            yield server, upstream


THOUGHT = ForcedReply(content="Hi.", reasoning="Hm.", calls=[("clock", {}), ("echo", {"text": "a"})])
RAW = (
    '<think>\nHm.\n</think>\n\nHi.\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n<tool_call>\n'
    '{"name": "echo", "arguments": {"text": "a"}}\n</tool_call>'
)
"""What a model generates for it."""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_the_parts_are_told_apart_wherever_the_tokens_end(size: int, autojump_clock: MockClock) -> None:
    tokens = b"".join(delta(content=RAW[at : at + size]) for at in range(0, len(RAW), size))
    async with in_front_of(STREAM_HEAD + tokens + ending(), replies=[THOUGHT]) as (server, _):
        said = Said(await post(server.url, asked()))
    assert (said.reasoning, said.content, said.finish) == ("Hm.\n", "Hi.\n", ["tool_calls"])
    assert said.named() == [(0, "clock", "{}"), (1, "echo", '{"text": "a"}')]
    assert [call["type"] for call in said.calls] == ["function", "function"]
    assert len({call["id"] for call in said.calls}) == 2
    kinds = [next(iter(delta)) for delta in said.deltas if delta]
    assert sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index) == kinds
    assert all(len(delta) < 2 for delta in said.deltas), "one kind a chunk, as llama-server does"


@pytest.mark.parametrize("size", [1, 5, 10_000])
async def test_everything_but_the_deltas_passes_byte_for_byte(size: int, autojump_clock: MockClock) -> None:
    before = b":\n\n" + chunk({"choices": [], "prompt_progress": {"total": 5, "cache": 0, "processed": 5}})
    before += delta(role="assistant", content=None)
    after = b'data: {"choices":[],"timings":{"cache_n":7,"predicted_ms":1.50,"x":"\xe2\x80\xa8"}}\n\ndata: [DONE]\n\n'
    finish = chunk({"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}]})
    raw = STREAM_HEAD + before + delta(content="Hi.") + finish + after
    steps = [step for at in range(0, len(raw), size) for step in (Send(raw[at : at + size]), Pause(0.001))]
    async with in_front_of(steps, replies=[ForcedReply(content="Hi.")]) as (server, _):
        status, body = await post(server.url, asked())
    assert status == 200
    assert body.startswith(before)
    assert body.endswith(finish + after)
    assert json.loads(body[len(before) : -len(finish + after)].removeprefix(b"data: ")) == {
        "choices": [{"index": 0, "finish_reason": None, "delta": {"content": "Hi."}}],
        "model": "scripted",
    }


async def test_the_real_server_is_asked_for_the_same_with_a_grammar(autojump_clock: MockClock) -> None:
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    kwargs = {"enable_thinking": True}
    body = asked(tools=[tool], chat_template_kwargs=kwargs, temperature=0.7, max_tokens=5)
    async with in_front_of(reply("Hi."), replies=[ForcedReply(content="Hi.")]) as (server, upstream):
        await post(server.url, body)
        kept = server.completions[0].json()
    assert kept == body, "what is kept is what the client sent"
    paths = [request.path for request in upstream.received]
    assert paths == ["/apply-template", "/tokenize", "/tokenize", CHAT_PATH]
    rendered, prompt, whole, completion = (request.json() for request in upstream.received)
    assert rendered == {"messages": body["messages"], "tools": [tool], "chat_template_kwargs": kwargs}
    assert (prompt["content"], whole["content"]) == ("<P>", "<P>Hi.")
    grammar = "root ::= <[72]> <[105]> <[46]>"
    forced = {"tool_choice": "none", "reasoning_format": "none", "temperature": 0, "grammar": grammar}
    assert completion == body | forced


async def test_a_refusal_is_in_the_servers_own_words_and_the_reply_waits(autojump_clock: MockClock) -> None:
    refusals = [LOADING, error_response(400, "too long", "exceed_context_size_error")]
    async with in_front_of(*refusals, reply("Hi."), replies=[ForcedReply(content="Hi.")]) as (server, _):
        for refusal in refusals:
            status, body = await post(server.url, asked())
            assert (b"HTTP/1.1 %d " % status) == refusal[:13]
            assert refusal.endswith(b"\r\n\r\n" + body)
            assert json.loads(body)["error"]
            assert server.forced == []
        assert Said(await post(server.url, asked())).content == "Hi."
        assert len(server.forced) == 1
        assert server.replies == []


async def test_a_request_that_cannot_be_rendered_is_left_to_the_server(autojump_clock: MockClock) -> None:
    wrong = error_response(500, "no messages")
    async with in_front_of(wrong, replies=[ForcedReply(content="Hi.")]) as (server, upstream):
        upstream.apply_template = wrong
        status, body = await post(server.url, asked())
        assert (status, json.loads(body)["error"]["message"]) == (500, "no messages")
        assert upstream.completions[0].json() == asked(), "as it came, without a grammar"
        assert server.replies == [ForcedReply(content="Hi.")]


@pytest.mark.parametrize("broken", [True, False])
async def test_a_stream_that_breaks_breaks_for_the_client_and_not_for_the_next_one(
    broken: bool, autojump_clock: MockClock
) -> None:
    half = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n" % (len(HALF), HALF)
    steps = [Send(half), Pause(1), *([Reset()] if broken else [])]
    two = [ForcedReply(content="Hi there."), ForcedReply(content="Hi.")]
    async with in_front_of(steps, reply("Hi."), replies=two) as (server, _):
        assert await post(server.url, asked()) == (200, HALF)
        assert Said(await post(server.url, asked())).content == "Hi."


HALF = delta(content="Hi")


async def test_what_an_ended_stream_left_unfinished_is_not_lost(autojump_clock: MockClock) -> None:
    async with in_front_of(STREAM_HEAD + HALF + b"error: no mem", replies=[ForcedReply(content="Hi.")]) as (server, _):
        status, body = await post(server.url, asked())
    assert status == 200
    assert body == HALF + b"error: no mem"


@pytest.mark.parametrize("replies", [[ForcedReply(content="Hi there.")], []])
async def test_a_client_that_goes_takes_the_connection_to_the_server_with_it(
    replies: list[ForcedReply], autojump_clock: MockClock
) -> None:
    async with in_front_of([Send(STREAM_HEAD + HALF), Hang()], replies=replies) as (server, upstream):
        await ask_and_leave_after(server.url, asked(), b'"content": "Hi"')
        await upstream.completions[0].closed.wait()
        assert upstream.completions[0].hung_up


async def test_a_client_that_goes_before_the_server_has_answered_is_noticed_too(autojump_clock: MockClock) -> None:
    async with in_front_of([Hang()], replies=[ForcedReply(content="Hi.")]) as (server, upstream):
        with trio.move_on_after(1):
            await post(server.url, asked())
        await upstream.completions[0].closed.wait()
        assert upstream.completions[0].hung_up


@pytest.mark.parametrize(
    "generated", [delta(content="Ho."), delta(content="Hi. More"), delta(content="Hi")], ids=["other", "more", "less"]
)
async def test_a_server_that_says_something_else_fails_the_test(generated: bytes, autojump_clock: MockClock) -> None:
    with pytest.RaisesGroup(AssertionError, flatten_subgroups=True, allow_unwrapped=True):
        async with in_front_of(STREAM_HEAD + generated + ending(), replies=[ForcedReply(content="Hi.")]) as (server, _):
            await post(server.url, asked())
            await trio.sleep_forever()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("Hi, 世界.", "the bytes e4 b8 are a token and no whole characters"),
        ("xyz", "its first token grows into the prompt's last"),
    ],
)
async def test_a_reply_that_cannot_be_forced_is_refused_and_nothing_is_generated(
    content: str, problem: str, autojump_clock: MockClock
) -> None:
    two = [ForcedReply(content=content), ForcedReply(content="é.")]
    async with in_front_of(reply("é."), replies=two) as (server, upstream):
        status, body = await post(server.url, asked())
        assert (status, json.loads(body)["error"]["message"]) == (599, f"this reply cannot be forced: {problem}")
        assert upstream.completions == []
        assert server.forced == []
        assert Said(await post(server.url, asked())).content == "é.", "the next one is not concerned"
        assert server.forced[0].reply_tokens == [0xE9, 0x2E]


# -- in front of the real server ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    """One embedded server for this module."""
    with tempfile.TemporaryDirectory() as directory:
        with llama_server(Path(directory) / "server.log") as address:
            yield address


@asynccontextmanager
async def forcing(llama: str, *replies: ForcedReply) -> AsyncIterator[ForcedServer]:
    with trio.fail_after(LIMIT_S):
        async with forced_server(llama) as server:
            server.replies = list(replies)
            yield server


CLOCK: tuple[str, dict[str, Any]] = ("clock", {})


@on_the_embedded_server
@pytest.mark.parametrize(
    ("forced", "said", "thought", "calls"),
    [
        (ForcedReply(content='{"a": "\\n"}\n\n`x` <b>'), '{"a": "\\n"}\n\n`x` <b>', "", []),
        (ForcedReply(content="Größe – “é”"), "Größe – “é”", "", []),
        (ForcedReply(content="Hi.", reasoning="Hm,\n\nso."), "Hi.", "Hm,\n\nso.\n", []),
        (ForcedReply(reasoning="Hm."), "", "Hm.\n", []),
        (ForcedReply(calls=[CLOCK]), "", "", [(0, "clock", "{}")]),
        (
            ForcedReply(content="So.", reasoning="Hm.", calls=[CLOCK, ("echo", {"t": 'ä "'})]),
            "So.\n",
            "Hm.\n",
            [(0, "clock", "{}"), (1, "echo", '{"t": "ä \\""}')],
        ),
        (ForcedReply(), "", "", []),
    ],
    ids=["text", "whole characters", "thought and text", "thought alone", "call", "everything", "nothing"],
)
async def test_the_real_server_says_exactly_what_it_is_told_to(
    llama: str, forced: ForcedReply, said: str, thought: str, calls: list[tuple[int, str, str]]
) -> None:
    async with forcing(llama, forced) as server:
        got = Said(await post(server.url, asked()))
        (made,) = server.forced
    assert (got.content, got.reasoning, got.named()) == (said, thought, calls)
    assert got.finish == ["tool_calls" if calls else "stop"]
    assert len({call["id"] for call in got.calls}) == len(calls)
    # the server's own figures: what was rendered, what was generated and the end of the turn behind it
    assert got.usage["prompt_tokens"] == got.timings["cache_n"] + got.timings["prompt_n"] == len(made.prompt_tokens)
    assert got.usage["completion_tokens"] == got.timings["predicted_n"] == len(made.reply_tokens) + 1


@on_the_embedded_server
async def test_replies_are_used_in_order_and_after_the_last_the_model_speaks_for_itself(llama: str) -> None:
    async with forcing(llama, ForcedReply(content="One."), ForcedReply(content="Two.", reasoning="Hm.")) as server:
        free = asked(max_tokens=2, temperature=0)
        told = [Said(await post(server.url, asked())).content for _ in range(2)]
        own = Said(await post(server.url, free))
        direct = Said(await post(llama, free))
    assert told == ["One.", "Two."]
    assert own.timings["predicted_n"] == 2
    assert own.finish == ["length"]
    assert own.content == direct.content
    assert len(server.completions) == 3
    assert len(server.forced) == 2


@on_the_embedded_server
async def test_the_next_request_finds_every_token_of_a_forced_reply_in_the_cache(llama: str) -> None:
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    async with forcing(llama, ForcedReply(content="It is noon."), ForcedReply(content="Yes.")) as server:
        begin = ("system", "Be."), ("user", "The time?")
        await post(server.url, asked(*begin, tools=[tool]))
        history = *begin, ("assistant", "It is noon."), ("user", "Sure?")
        second = Said(await post(server.url, asked(*history, tools=[tool])))
        without = await server.ask("/apply-template", {"messages": asked(*begin)["messages"]})
        bare = await server.tokenize(without["prompt"])
    assert len(server.forced[0].prompt_tokens) > len(bare) + 20, "the tools are rendered"
    held = server.forced[0].prompt_tokens + server.forced[0].reply_tokens
    assert second.timings["cache_n"] == len(held)
    assert server.forced[1].prompt_tokens[: len(held)] == held


@on_the_embedded_server
@pytest.mark.parametrize(
    ("forced", "content"),
    [(ForcedReply(content="Hello there, owner of mine."), "Hello there,"), (ForcedReply(calls=[CLOCK]), "")],
)
async def test_a_reply_over_max_tokens_is_cut_as_the_server_cuts_it(
    llama: str, forced: ForcedReply, content: str
) -> None:
    async with forcing(llama, forced) as server:
        got = Said(await post(server.url, asked(max_tokens=3)))
    assert (got.content, got.calls, got.finish) == (content, [], ["length"])
    assert got.timings["predicted_n"] == 3


@on_the_embedded_server
async def test_a_prompt_that_does_not_fit_is_refused_by_the_server_itself(llama: str) -> None:
    long = asked(("user", "word " * (N_CTX_PER_SLOT + 10)))
    async with forcing(llama, ForcedReply(content="Hi.")) as server:
        status, body = await post(server.url, long)
        error = json.loads(body)["error"]
        assert (status, error["type"]) == (400, "exceed_context_size_error")
        assert error["n_ctx"] == N_CTX_PER_SLOT
        assert Said(await post(server.url, asked())).content == "Hi."


@on_the_embedded_server
async def test_a_character_that_is_no_whole_token_is_refused(llama: str) -> None:
    async with forcing(llama, ForcedReply(content="世")) as server:
        status, body = await post(server.url, asked())
    assert status == 599
    assert b"no whole characters" in body


@on_the_embedded_server
async def test_other_requests_are_answered_by_the_real_server(llama: str) -> None:
    async with forcing(llama, ForcedReply(content="Hi.")) as server:
        for path in ("/health", "/props", "/slots", "/v1/models"):
            before, answered, after = [await get(url, path) for url in (llama, server.url, llama)]
            assert answered in (before, after)  # /v1/models says what second it is
            assert answered[0] == 200
        assert [slot["is_processing"] for slot in (await get(server.url, "/slots"))[1]] == [False, False]
        assert (await get(server.url, "/nothing"))[0] == 404
        for path, body in (
            ("/tokenize", {"content": "Hi there"}),
            ("/apply-template", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
        ):
            answer = await post(server.url, body, path)
            assert answer == await post(llama, body, path)
            assert answer[0] == 200
        assert server.replies == [ForcedReply(content="Hi.")]
        assert server.completions == []


@on_the_embedded_server
async def test_a_client_that_goes_stops_the_generation(llama: str) -> None:
    """What the slot holds afterwards tells how far it came, whatever the speed of the machine."""
    numbers = " ".join(str(number) for number in range(10, 35))
    async with forcing(llama, ForcedReply(content=numbers), ForcedReply(content="Hi.")) as server:
        await ask_and_leave_after(server.url, asked(("user", "Count.")), b'"content": "1"')
        while (await get(llama, "/slots"))[1][0]["is_processing"]:  # noqa: ASYNC110  # another process: no event
            await trio.sleep(0.02)
        after = Said(await post(server.url, asked(("user", "Count."), ("assistant", numbers), ("user", "More."))))
        made = server.forced[0]
    prompt, whole = len(made.prompt_tokens), len(made.prompt_tokens) + len(made.reply_tokens)
    assert prompt < after.timings["cache_n"] < whole
