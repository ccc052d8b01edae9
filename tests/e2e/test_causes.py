"""Causes of losses on the real embedded server: each is brought about, and named.

What the server says is forced, so that its tokens are those of the text; its slots, its cache and what it shows of
them are real.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import trio

from boxmaker.demo.server import chat_template
from boxmaker.proto.ledger import CacheLine
from boxmaker.session.ledger import read_lines
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.forced import ForcedReply, ForcedServer, forced_server
from tests.e2e.conftest import llama_server
from tests.embedded import EMBEDDED

pytestmark = EMBEDDED

LIMIT_S = 200
CONFIG = "[request]\nmax_tokens = 60\n"


async def turn(daemon: Daemon, server: ForcedServer, session: str, *, resume: bool) -> CacheLine:
    """One turn with a short answer after a thought; its line, once it is written."""
    directory = daemon.store.directory / session
    before = len(read_lines(directory)) if resume else 0
    server.replies = [ForcedReply(content="All is well.", reasoning="They ask how it is.")]
    await daemon.ask(session, f"How is {session}?", resume=resume)
    while len(found := read_lines(directory)) == before:  # noqa: ASYNC110  # a file: there is no event to wait for
        await trio.sleep(0.02)
    return found[before + 1]


def strips_reasoning() -> str:
    """The demo's template in Qwen3's manner: of replies before the last user message no reasoning is rendered."""
    text = chat_template()
    condition = "{%- if message.reasoning_content -%}"
    assert text.count(condition) == 1
    last = (
        "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
        "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    )
    return last + text.replace(condition, "{%- if message.reasoning_content and loop.index0 > ns.last -%}")


async def test_a_template_that_erases_reasoning_is_named(tmp_path: Path) -> None:
    template = tmp_path / "strips.jinja"
    template.write_text(strips_reasoning(), "utf-8")
    with trio.fail_after(LIMIT_S), llama_server(tmp_path / "log", str(template)) as llama:
        async with forced_server(llama) as server, running_daemon(tmp_path, server.url, CONFIG) as daemon:
            assert (await turn(daemon, server, "a", resume=False)).cause is None
            line = await turn(daemon, server, "a", resume=True)
    assert line.lost is not None
    assert line.lost > 0
    assert line.cause == "template"
    assert (line.detail["message"], line.detail["role"]) == (3, "assistant")
    assert line.detail["was"] == "They ask how it is."
    assert str(line.detail["now"]).startswith("All is well.<|im_end|>")
    assert line.prefill_ms is not None


async def test_two_sessions_on_one_slot_take_each_others_cache_and_on_two_they_do_not(
    llama: str, tmp_path: Path
) -> None:
    with trio.fail_after(LIMIT_S):
        async with forced_server(llama) as server, running_daemon(tmp_path, server.url, CONFIG) as daemon:
            for session in "ab":
                await turn(daemon, server, session, resume=False)
            lines = [await turn(daemon, server, session, resume=True) for session in "ab"]
        assert [(line.cause, line.detail) for line in lines] == [
            ("evicted", {"session": "b"}),
            ("evicted", {"session": "a"}),
        ]
        two = tmp_path / "two"
        two.mkdir()
        config = f"{CONFIG}[slots]\nmain = [0, 1]\n"
        async with forced_server(llama) as server, running_daemon(two, server.url, config) as daemon:
            for session in "ab":
                await turn(daemon, server, session, resume=False)
            lines = [await turn(daemon, server, session, resume=True) for session in "ab"]
        assert [(line.slot, line.lost, line.cause) for line in lines] == [(0, 0, None), (1, 0, None)]


async def test_somebody_elses_request_to_our_slot_is_named(llama: str, tmp_path: Path) -> None:
    with trio.fail_after(LIMIT_S):
        async with forced_server(llama) as server, running_daemon(tmp_path, server.url, CONFIG) as daemon:
            await turn(daemon, server, "a", resume=False)
            other = {"messages": [{"role": "user", "content": "Not yours."}], "id_slot": 0, "max_tokens": 4}
            usage = (await server.ask("/v1/chat/completions", other))["usage"]
            line = await turn(daemon, server, "a", resume=True)
    # what it left in the slot: everything but the last token sampled
    assert (line.cause, line.detail) == ("foreign", {"held": usage["total_tokens"] - 1})


async def test_a_restart_of_the_server_is_named(tmp_path: Path) -> None:
    with trio.fail_after(LIMIT_S):
        with llama_server(tmp_path / "log") as llama:
            async with forced_server(llama) as server, running_daemon(tmp_path, server.url, CONFIG) as daemon:
                for resume in (False, True):
                    assert (await turn(daemon, server, "a", resume=resume)).lost == 0
                with llama_server(tmp_path / "log") as another:  # as if the first one had been started anew
                    server.upstream_port = urlsplit(another).port or 0
                    line = await turn(daemon, server, "a", resume=True)
    assert (line.cached, line.cause, line.detail) == (0, "restarted", {})
