"""The cache claim with the server's own figures: what it reads is the least that it can read.

The real embedded server is forced to say what the script wants, so the whole conversation with tools,
limits, a cancel and a restart runs on its real tokenizer, slots and cache. The least possible is
worked out from the token ids alone: what the slot held (prompt and reply, without the last token
sampled) is a prefix of the next prompt, and the rest must be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from boxmaker.demo.server import chat_template
from boxmaker.proto.chat import Content
from boxmaker.proto.records import CacheLoss, LogRecord, ToolResult, Usage
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.forced import ForcedReply, ForcedServer, forced_server
from boxmaker.testing.port import ScriptedPort, public
from tests.e2e.conftest import llama_server
from tests.embedded import EMBEDDED

pytestmark = EMBEDDED

CONFIG = "[loop]\ntool_result_cap = 1024\n[request]\nmax_tokens = 400\n"
LIMIT_S = 280


def say(content: str, reasoning: str = "") -> ForcedReply:
    return ForcedReply(content=content, reasoning=reasoning)


def calls(*made: tuple[str, dict[str, Any]], content: str = "", reasoning: str = "") -> ForcedReply:
    return ForcedReply(content=content, reasoning=reasoning, calls=made)


Turns = list[tuple[str, list[ForcedReply]]]
ECHO: tuple[str, dict[str, Any]] = ("call_tool", {"name": "echo", "arguments": {"text": "Greetings, world"}})
TURNS: Turns = [
    ("Hello.", [say("Hello, owner.", "A greeting.")]),
    ("What time is it?", [calls(("clock", {}), reasoning="I call the clock."), say("It is a quarter past two.")]),
    (
        "Echo a greeting.",
        [
            calls(("find_tool", {"query": "echo"}), content="Let me look."),
            calls(ECHO, reasoning="There it is."),
            say("Greetings, world"),
        ],
    ),
    (
        "Twice, please, and the time.",
        [
            calls(("clock", {"again": 1}), ("find_tool", {"query": "clock"})),
            calls(("find_tool", {"query": ""})),
            say("Done twice.", "Two results."),
        ],
    ),
    ("Read the long file.", [calls(("clock", {"long": True})), say("It was cut.", "So long.")]),
    ("What is 2 + 2?", [say("4", "Two and two.")]),
    (
        "Now everything again.",
        [
            calls(("clock", {"n": 1}), content="First."),
            calls(("clock", {"n": 2}), content="Second.", reasoning="One more."),
            calls(("call_tool", {"name": "echo", "arguments": {"text": "a\nb"}})),
            say("All done."),
        ],
    ),
    (
        "Good night, 世界 🙂.",
        [
            say("Good night."),
        ],
    ),
    ("And again?", [say("Good night again.", "Polite.")]),
    ("Still there?", [calls(("clock", {"last": True})), say("Yes.", "Checking.")]),
]
"""Ten turns of the script; one more is cancelled in its middle. Replies are ASCII: a grammar of token ids
is not exact inside a character that the tokenizer splits (seen: "Unexpected empty grammar stack")."""
RESULTS = [public(text) for text in ("14:15", "Greetings, world", "14:16 Grüße", "x" * 3000, "1", "2", "a\nb", "14:20")]


def usages(log: Sequence[LogRecord]) -> list[Usage]:
    return [record for record in log if isinstance(record, Usage)]


async def run_turns(daemon: Daemon, server: ForcedServer, turns: Turns, first: bool) -> None:
    for at, (text, replies) in enumerate(turns):
        server.replies = list(replies)
        done = await daemon.ask("s", text, resume=not (first and at == 0))
        assert done.content == replies[-1].content
        assert server.replies == []


async def cancel_in_mid_answer(daemon: Daemon, server: ForcedServer) -> None:
    server.replies = [say("This answer is long and will not be heard to its end by anybody at all.")]
    stream, frames = await daemon.open("s", "Tell me something long.", resume=True)
    seen = 0
    while seen < 4:
        seen += isinstance((await frames.receive()).answer, Content)
    await stream.aclose()
    await daemon.until_free("s")
    server.replies = []


async def test_what_is_read_is_the_least_possible_over_tools_a_cancel_and_a_restart(llama: str, tmp_path: Path) -> None:
    port = ScriptedPort(list(RESULTS))
    with trio.fail_after(LIMIT_S):
        async with forced_server(llama) as server:
            async with running_daemon(tmp_path, server.url, CONFIG, port=port) as daemon:
                await run_turns(daemon, server, TURNS[:4], first=True)
            async with running_daemon(tmp_path, server.url, CONFIG, port=port) as daemon:  # a restart in the middle
                await run_turns(daemon, server, TURNS[4:7], first=False)
                before_cancel = len(server.forced)
                await cancel_in_mid_answer(daemon, server)
                await run_turns(daemon, server, TURNS[7:], first=False)
                log = daemon.log("s")
    assert [record for record in log if isinstance(record, CacheLoss)] == []
    capped = [record for record in log if isinstance(record, ToolResult) and record.truncated]
    assert [record.content for record in capped] == ["x" * 1024 + "[truncated]"]
    figures = usages(log)
    forced = [one for at, one in enumerate(server.forced) if at != before_cancel]  # the cancelled one has no usage
    assert len(figures) == len(forced) == 20
    assert figures[0].cache_n is not None
    for at in range(1, len(forced)):
        before, now = forced[at - 1], forced[at]
        held = before.prompt_tokens + before.reply_tokens  # and the end token, which was sampled last
        assert now.prompt_tokens[: len(held)] == held, f"completion {at} extends the tokens of the one before"
        least = len(now.prompt_tokens) - len(held)
        if at == before_cancel:
            read = figures[at].prompt_n
            assert read is not None
            assert read <= least, "the cancelled turn may have left more in the cache"
        else:
            assert (figures[at].cache_n, figures[at].prompt_n) == (len(held), least), f"completion {at}"
        assert figures[at].predicted_n == len(now.reply_tokens) + 1


def test_the_script_is_what_the_issue_asks_for() -> None:
    replies = [reply for _, turn in TURNS for reply in turn]
    assert len(replies) >= 20
    assert any(len(reply.calls) == 2 for reply in replies)
    assert {name for reply in replies for name, _ in reply.calls} == {"clock", "find_tool", "call_tool"}
    assert "reasoning_content" in chat_template()


STRIPPING = (
    "{%- set ns = namespace(last_user=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
)
"""In Qwen3's manner: reasoning is rendered only behind the last user message."""


async def test_a_template_that_drops_old_reasoning_loses_at_each_new_user_message_and_nowhere_else(
    tmp_path: Path,
) -> None:
    """The numbers are worked out from token ids: what two prompts have in common is what can be kept."""
    kept = "{%- if message.reasoning_content -%}"
    dropping = STRIPPING + chat_template().replace(
        kept, "{%- if message.reasoning_content and loop.index0 > ns.last_user -%}"
    )
    assert dropping.count("ns.last_user") == 2
    (tmp_path / "template").write_text(dropping, "utf-8")
    turns: Turns = [
        ("Hello.", [say("Hello, owner.", "A greeting, I think.")]),
        ("The time?", [calls(("clock", {}), reasoning="I call the clock."), say("A quarter past two.", "Now I know.")]),
        ("Thank you.", [say("You are welcome.")]),
        ("Good night.", [say("Good night.", "It is late.")]),
        ("Are you there?", [say("Yes.")]),
    ]
    with trio.fail_after(LIMIT_S), llama_server(tmp_path / "log", str(tmp_path / "template")) as url:
        async with forced_server(url) as server:
            port = ScriptedPort([public("14:15")])
            async with running_daemon(tmp_path, server.url, CONFIG, port=port) as daemon:
                await run_turns(daemon, server, turns, first=True)
                log = daemon.log("s")
    found: list[tuple[int, int, int]] = []
    at = -1
    for record in log:
        if isinstance(record, Usage):
            at += 1
        elif isinstance(record, CacheLoss):
            found.append((at, record.expected, record.got))
    wanted = []
    for place in range(1, len(server.forced)):
        before, now = server.forced[place - 1], server.forced[place]
        held = before.prompt_tokens + before.reply_tokens
        same = next((n for n, (a, b) in enumerate(zip(held, now.prompt_tokens, strict=False)) if a != b), len(held))
        if same < len(held):
            wanted.append((place, len(held), same))
    # completions: 0 hello | 1 call, 2 answer | 3 thanks | 4 night | 5 there.
    # 2 is inside a turn, and 4 follows a turn without reasoning: nothing is dropped there
    assert [place for place, _, _ in wanted] == [1, 3, 5]
    assert found == wanted
