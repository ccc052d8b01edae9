"""How many tokens the server reads for a conversation, over the least that it could read: by template, and by slots.

The embedded server is real; what it says is forced, so every run has the same words. `least`
is what `bxctl cache` says: what was read, without what was lost. The conversation is that of the cache claim in
`tests/e2e`: 20 completions over ten turns with tools, a capped result and reasoning.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import trio
from attrs import frozen
from tests.e2e.conftest import llama_server
from tests.e2e.test_cache_claim import CONFIG, RESULTS, STRIPPING, TURNS, run_turns

from benchmarks.bench import Row, row
from boxmaker.bxctl.cache import read_completions, totals_of
from boxmaker.demo.server import chat_template
from boxmaker.proto.ids import SessionId
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.forced import ForcedReply, ForcedServer, forced_server
from boxmaker.testing.port import ScriptedPort

TEMPLATE = Path(__file__).parents[1] / "templates" / "qwen3.jinja"
KEPT = "{%- if reasoning or not thinking -%}"
DROPPED = "{%- if reasoning and (loop.index0 > ns.last_user) or not thinking -%}"
FLAGGED = (
    "{%- if reasoning and (loop.index0 > ns.last_user or (preserve_thinking is defined and preserve_thinking))"
    " or not thinking -%}"
)
"""Of a template with a flag, as Qwen3.6's; llama-server hands our `preserve_reasoning` on under the flag's own name."""
ALTERNATIONS = 6
PAGE = " ".join(f"On page {page} the ship sails on." for page in range(25))
"""Some 200 tokens for the owner to say: what two sessions have in common, their baseline, is not lost."""


@frozen(kw_only=True)
class Read:
    """What a server read for the sessions of a daemon, over the least, and how long the last prompt was."""

    ratio: float
    read: int
    lost: int
    context: int


def rows(quick: bool) -> list[Row]:
    """Measure, and say it in rows."""
    own = TEMPLATE.read_text("utf-8")
    dropping, flagged = (STRIPPING + own.replace(KEPT, condition) for condition in (DROPPED, FLAGGED))
    assert dropping.count("ns.last_user") == flagged.count("ns.last_user") == 2
    without = CONFIG + "[request.chat_template_kwargs]\npreserve_reasoning = false\n"
    conversations = [
        ("the demo's template", chat_template(), CONFIG),
        ("in Qwen3's manner", dropping, CONFIG),
        ("that with templates/qwen3.jinja", own, CONFIG),
        ("with a flag, and preserve_reasoning = false", flagged, without),
        ("that with preserve_reasoning (our default)", flagged, CONFIG),
    ]
    found = [
        _row(f"20 completions: {name}", trio.run(_conversation, template, config, quick))
        for name, template, config in conversations
    ]
    for name, slots in (("one slot", "0"), ("two slots", "[0, 1]")):
        found.append(
            _row(f"two sessions in turn on {name}", trio.run(_alternation, f"[slots]\nmain = {slots}\n", quick))
        )
    return found


def _row(name: str, read: Read) -> Row:
    note = f"{read.read:,} read, {read.lost:,} of them lost before; {read.context:,} tokens of context at the end"
    return row(name, "least possible", [read.ratio], note=note)


async def _conversation(template: str, config: str, quick: bool) -> Read:
    port = ScriptedPort(list(RESULTS))
    turns = TURNS[:4] if quick else TURNS

    async def talk(daemon: Daemon, server: ForcedServer) -> None:
        await run_turns(daemon, server, turns, first=True)

    return await _measure(template, config, port, talk)


async def _alternation(config: str, quick: bool) -> Read:
    async def talk(daemon: Daemon, server: ForcedServer) -> None:
        for number in range(2 if quick else ALTERNATIONS):
            for session in ("a", "b"):
                server.replies = [ForcedReply(content=f"Number {number} for {session}.")]
                await daemon.ask(session, f"Say number {number}. {PAGE}", resume=number > 0)

    return await _measure(chat_template(), config, ScriptedPort([]), talk)


async def _measure(
    template: str, config: str, port: ScriptedPort, talk: Callable[[Daemon, ForcedServer], Awaitable[None]]
) -> Read:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bm-")))
        (directory / "template").write_text(template, "utf-8")
        url = stack.enter_context(llama_server(directory / "log", str(directory / "template")))
        async with forced_server(url) as server:
            async with running_daemon(directory, server.url, config, port=port) as daemon:
                await talk(daemon, server)
                sessions = daemon.store.directory
                names = sorted(path.name for path in sessions.iterdir())
                lines = [line for name in names for line in read_completions(sessions, SessionId(name))]
    totals = totals_of(lines)
    assert totals.ratio is not None
    last = server.forced[-1]
    context = len(last.prompt_tokens) + len(last.reply_tokens)
    return Read(ratio=totals.ratio, read=totals.read, lost=totals.lost, context=context)
