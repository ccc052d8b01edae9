"""M2b's first claim: every request of a session is a strict extension of the one before.

Generated conversations run through connection, store, client and tools against the scripted
server; the judge is the bodies that it recorded. Besides, each body is rebuilt from the log by an
independent reader, to the byte. The failing example is printed so that it can be replayed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from boxmaker.proto import chat
from boxmaker.proto.chat import ChatMessage, ToolCall
from boxmaker.proto.tools import Denied, Failed, Result, ToolRequest, ToolResponse
from boxmaker.testing.daemon import running_daemon
from boxmaker.testing.port import ScriptedPort, hang
from boxmaker.testing.server import (
    STREAM_HEAD,
    Hang,
    Pause,
    Reset,
    Script,
    Send,
    delta,
    error_response,
    reply,
    scripted_server,
)
from tests.naive import naive_messages
from tests.strict import problems

Turn = tuple[str, list[Script], list[Any], str]
Session = list[list[Turn]]
CONFIG = "[loop]\ntool_iterations = 3\ntool_result_cap = 300\n[thinking]\ncap = 7\n[request]\ntemperature = 0.5\n"
TAIL = (
    '"stream":true,"stream_options":{"include_usage":true},"return_progress":true,"id_slot":0,"cache_prompt":true,'
    '"temperature":0.5,"chat_template_kwargs":{"enable_thinking":true,"preserve_reasoning":true},'
    '"reasoning_budget_tokens":7,"reasoning_budget_message":"[The thinking budget is used up. I answer now.]"}'
)
"""What follows `tools` in every body, from design.md section 7."""

any_text = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=10)
from_model = any_text | st.sampled_from(["", "\n", "a\n\n", "\x00", "\ud83d", "\ud83d\ude42", "\u2028"])
some_call = st.tuples(
    st.sampled_from(["", "a", "b", "c00000001", "call_0"]),
    st.sampled_from(["clock", " clock\n", "find_tool", "call_tool", "rm", ""]),
    st.sampled_from(
        ["", "{}", '{"n":1}', '{"n":2}', "{", '{"name":"echo","arguments":{"text":"x"}}', '"text"', "null"]
    ),
)
whole = st.builds(
    reply,
    st.none() | from_model,
    reasoning=st.none() | from_model,
    calls=st.lists(some_call, max_size=3),
    finish_reason=st.sampled_from([None, None, None, "length"]),
    cache_n=st.none() | st.integers(0, 50),
)
passing: st.SearchStrategy[Script] = st.sampled_from([
    STREAM_HEAD + delta(content="So"),
    [Send(STREAM_HEAD + delta(reasoning_content="So")), Pause(0.1), Reset()],
    error_response(503, "overloaded"),
])  # fmt: skip
final: st.SearchStrategy[Script] = st.sampled_from(
    [error_response(400, "wrong"), error_response(500, "Context size has been exceeded.")]
)
response: st.SearchStrategy[ToolResponse | Callable[[ToolRequest], Awaitable[ToolResponse]]] = st.one_of(
    st.builds(
        Result,
        content=from_model | st.just("é" * 200),
        class_=st.sampled_from(["public", "secret"]),
        untrusted=st.booleans(),
        truncated=st.booleans(),
    ),
    st.builds(Failed, message=any_text),
    st.builds(Denied, reason=any_text),
)


@st.composite
def turn(draw: st.DrawFn) -> Turn:
    """A user text, the server's replies, the port's responses, and how it ends."""
    ending = draw(st.sampled_from(["to the end", "to the end", "cancel in the stream", "cancel in a tool", "fail"]))
    scripts: list[Script] = []
    for _ in range(draw(st.integers(0, 3))):
        scripts += draw(st.lists(passing, max_size=1))
        scripts.append(draw(whole))
    responses = draw(st.lists(response, max_size=4))
    if ending == "cancel in the stream":
        scripts.append([Send(STREAM_HEAD + delta(content="half")), Hang()])
    elif ending == "cancel in a tool":
        responses.append(hang)
    elif ending == "fail":
        scripts.append(draw(final))
    return draw(any_text), scripts, responses, ending


async def play(directory: Path, session: Session, alternate: bool) -> list[bytes]:
    """Run a session: a list of daemons' lives, each a list of turns. Every body that was sent."""
    bodies: list[bytes] = []
    first = True
    async with scripted_server() as server:
        for life in session:
            port = ScriptedPort()
            async with running_daemon(directory, server.url, CONFIG, port=port, alternate=alternate) as daemon:
                for text, scripts, responses, _ in life:
                    # what the script has no reply for is answered at the end of the turn
                    server.scripts = [*scripts, *[reply("The end.", cache_n=None)] * 5]
                    port.responses = [*responses, *[Failed(message="nothing more")] * 20]
                    stream, frames = await daemon.open("s", text, resume=not first)
                    first = False
                    with trio.move_on_after(20):  # a turn that hangs is hung up on
                        while not (await frames.receive()).final:
                            pass
                    await stream.aclose()
                    await daemon.until_free("s")
                    records = (daemon.store.directory / "s" / "0.jsonl").read_bytes()
                    baseline = (daemon.store.directory / "s" / "0.baseline.json").read_bytes()
                    check_rebuilt(server.bodies[len(bodies) :], records, baseline, alternate)
                    bodies = server.bodies
    return bodies


def check_rebuilt(sent: list[bytes], log: bytes, baseline: bytes, alternate: bool) -> None:
    """Each body is what some beginning of the log stands for, read by a reader that knows nothing of ours."""
    base = json.loads(baseline)
    history: list[ChatMessage] = [chat.System(content=base["system"])]
    tools = [{"type": "function", "function": tool} for tool in base["tools"]]
    rest = b'],"tools":' + json.dumps(tools, ensure_ascii=False, separators=(",", ":")).encode() + b"," + TAIL.encode()
    rebuilt = set()
    for line in log.decode("utf-8").split("\n")[:-1]:
        record = json.loads(line)
        match record["type"]:
            case "user":
                history.append(chat.User(content=record["content"]))
            case "assistant":
                calls = tuple(ToolCall(**call) for call in record["tool_calls"])
                thought = record["reasoning_content"]
                history.append(chat.Assistant(content=record["content"], reasoning_content=thought, tool_calls=calls))
            case "tool_result":
                history.append(chat.Tool(tool_call_id=record["tool_call_id"], content=record["content"]))
        rebuilt.add(b'{"messages":[' + naive_messages(history, alternate) + rest)
    for body in sent:
        assert body in rebuilt


@given(st.lists(st.lists(turn(), min_size=1, max_size=3), min_size=1, max_size=3), st.booleans())
def test_every_request_extends_the_previous_one(session: Session, alternate: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        bodies = trio.run(play, Path(name), session, alternate, clock=MockClock(autojump_threshold=0))
    for body in bodies:
        assert problems(json.loads(body)["messages"], alternate) == []
    for before, after in pairwise(bodies):
        old, new = json.loads(before), json.loads(after)
        assert new["messages"][: len(old["messages"])] == old["messages"]
        assert new["tools"] == old["tools"]
        assert new["messages"][0] == old["messages"][0]
        prefix, bracket, _ = before.partition(b'],"tools":[{"type":"function","function":{"name":"clock"')
        assert bracket
        assert after.startswith(prefix)
