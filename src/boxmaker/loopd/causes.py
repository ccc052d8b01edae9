"""After a turn: what each completion cost, and why tokens were lost, written beside the log.

Laws:
* It holds neither session nor slot, and no turn waits for it: a turn that arrives ends the search.
* The server is asked at most CALLS things for a turn, and nothing when nothing was lost.
* Whatever fails here is told to the daemon's log, once, and hurts no turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, frozen

from boxmaker.errors import InferenceError
from boxmaker.inference.cache import expected_tokens
from boxmaker.inference.cause import (
    LossFacts,
    ServerKnown,
    Verdict,
    changed,
    judge_prompts,
    last_reply,
    may_be_unused,
    proven,
    slot_seen,
    unproven,
)
from boxmaker.inference.client import LOOK_S, Answer, Client
from boxmaker.inference.completion import clean_text
from boxmaker.inference.facts import ServerFacts, prompt_of, template_digest
from boxmaker.inference.request import ALTERNATION_NOTE
from boxmaker.log import log_event, log_exception
from boxmaker.proto.ids import SessionId
from boxmaker.proto.ledger import CacheLine
from boxmaker.session.disk import Disk
from boxmaker.session.ledger import append_lines, figures_of, read_lines
from boxmaker.turn.runtime import Spent

CALLS = 2
"""How often the server is asked at most to find a cause: both of two prompts, or its slots and its properties."""
TAIL_BYTES = 65_536
"""How much of a side file is read to find out where the last completion was made: a line is some 250 bytes."""
TURNS_WAITING = 64
"""Turns whose lines are not written yet; more than that wait for a disk that has stopped, and are left out."""


@frozen(kw_only=True)
class _Over:
    """A turn that is over: its completions with what is known of each loss, and how many turns had come by then."""

    session: SessionId
    spent: Sequence[Spent]
    losses: dict[int, LossFacts]
    arrived: int


class CauseFinder:
    """Takes what turns have spent, finds causes, writes `cache.jsonl`. `sessions` is the directory of all sessions."""

    def __init__(self, client: Client, facts: ServerFacts, disk: Disk, sessions: Path) -> None:
        self._client = client
        self._facts = facts
        self._disk = disk
        self._sessions = sessions
        self._known: dict[SessionId, ServerKnown] = {}
        self._renewals = 0
        self._arrived = 0
        self._search: trio.CancelScope | None = None
        self._failing = False
        self._send, self._receive = trio.open_memory_channel[_Over](TURNS_WAITING)

    def turn_arrives(self) -> None:
        """A turn begins: the server is its, and a search that runs is dropped."""
        self._arrived += 1
        if self._search is not None:
            self._search.cancel()

    def forked(self, session: SessionId, new: SessionId) -> None:
        """A new session goes on with what another one has in the cache."""
        if session in self._known:
            self._known[new] = self._known[session]
        self._client.record.forked(session, new)

    def turn_over(self, session: SessionId, spent: Sequence[Spent]) -> None:
        """A turn has ended, however; its lines are written soon."""
        if not spent:
            return
        if self._renewals != self._client.record.renewals:  # it may have another template now
            self._renewals = self._client.record.renewals
            self._facts.template = None
        losses = {}
        for one in spent:
            seen = one.evidence.seen
            n_ctx = seen.n_ctx if seen is not None else None
            now = ServerKnown(model=one.model, n_ctx=n_ctx, slot=one.slot, template=self._facts.template)
            if one.lost and one.expected is not None and one.cached is not None:
                losses[one.completion] = LossFacts(
                    expected=one.expected,
                    got=one.cached,
                    prompt=one.prompt_before or 0,
                    before=self._known.get(session),
                    now=now,
                    evidence=one.evidence,
                )
            self._known[session] = now
        try:
            self._send.send_nowait(_Over(session=session, spent=spent, losses=losses, arrived=self._arrived))
        except trio.WouldBlock:
            log_event("cache_lines_dropped", session=session, count=len(spent))

    def close(self) -> None:
        """No more turns: `run` writes what it has, asks the server nothing more, and returns."""
        self.turn_arrives()
        self._send.close()

    async def run(self) -> None:
        """Write the lines of each turn that is over, in order. Cancelled by: the daemon, when it has waited enough."""
        async with self._receive:
            async for over in self._receive:
                try:
                    lines = await self._lines(over)
                    directory = self._sessions / over.session
                    await self._disk.run(lambda: append_lines(directory, lines))  # noqa: B023  # awaited here
                except OSError as exc:
                    if not self._failing:
                        log_event("cache_lines_not_written", session=over.session, reason=exc.strerror or str(exc))
                    self._failing = True
                except Exception:  # the third boundary: a fault of ours here is no turn's
                    log_exception("cause_failed", session=over.session)
                else:
                    self._failing = False

    async def _lines(self, over: _Over) -> list[CacheLine]:
        await self._recall(over)
        verdicts = {number: proven(facts) for number, facts in over.losses.items()}
        open_ones = [one for one in over.spent if one.completion in verdicts and verdicts[one.completion] is None]
        restarted = [n for n, verdict in verdicts.items() if verdict is not None and verdict.cause == "restarted"]
        if over.arrived == self._arrived:
            with trio.CancelScope() as self._search:
                # the last one: it is what the owner is told of
                if open_ones:
                    last = open_ones[-1]
                    verdicts[last.completion] = await self._ask(last, over.losses[last.completion])
                elif restarted:
                    facts = over.losses[restarted[-1]]
                    verdicts[restarted[-1]] = await self._began_as_another(facts) or verdicts[restarted[-1]]
            self._search = None
        lines = []
        for one in over.spent:
            verdict = None
            if one.completion in over.losses:
                verdict = verdicts[one.completion] or unproven(over.losses[one.completion], extension=False)
            lines.append(
                CacheLine(
                    time=one.time,
                    completion=one.completion,
                    slot=one.slot,
                    cached=one.cached,
                    read=one.read,
                    generated=one.generated,
                    expected=one.expected,
                    lost=one.lost,
                    prefill_ms=one.prefill_ms,
                    cause=verdict.cause if verdict is not None else None,
                    detail={
                        **(verdict.detail if verdict is not None else {}),
                        **({"restored": one.restored} if one.restored is not None else {}),
                    },
                )
            )
        return lines

    async def _recall(self, over: _Over) -> None:
        """Find out where a completion was made that this daemon has not seen: the side file may know."""
        for number, facts in over.losses.items():
            if facts.before is None:
                directory = self._sessions / over.session
                lines = await self._disk.run(lambda: read_lines(directory, TAIL_BYTES))  # noqa: B023  # awaited here
                found = lines.get(number - 1)
                if found is not None and expected_tokens(figures_of(found)) == facts.expected:
                    slot = ServerKnown(model=None, n_ctx=None, slot=found.slot)
                    over.losses[number] = evolve(facts, before=slot)

    async def _ask(self, one: Spent, facts: LossFacts) -> Verdict | None:
        """Ask the server what our own record does not prove; None when it does not tell."""
        if may_be_unused(facts):
            return await self._unused(one.slot, facts)
        request = json.loads(one.body or b"{}")
        messages = request.get("messages", [])
        reply = last_reply(messages, ALTERNATION_NOTE)
        if reply is None:
            return None
        before = await self._rendered(request, messages[:reply])
        after = await self._rendered(request, messages) if before is not None else None
        if before is None or after is None:
            return None
        return judge_prompts(facts, before, after, messages, reply)

    async def _unused(self, slot: int, facts: LossFacts) -> Verdict | None:
        """Does the server list use now? Then it had begun anew before the request."""
        answer = await self._answer("GET", "/slots")
        for entry in answer.entries() if answer is not None else ():
            if entry.get("id") == slot and slot_seen(entry).used:
                return await self._began_as_another(facts) or Verdict(cause="restarted")
        return unproven(facts, extension=False)

    async def _began_as_another(self, facts: LossFacts) -> Verdict | None:
        """The server was restarted: with another context or template than before?"""
        answer = await self._answer("GET", "/props")
        now = template_digest(answer.value) if answer is not None else None
        if now is not None:
            self._facts.template = now
        return changed("template", facts.before.template if facts.before is not None else None, now)

    async def _rendered(self, request: dict[str, Any], messages: Sequence[Any]) -> str | None:
        body = {key: value for key, value in request.items() if not key.startswith("stream")}
        answer = await self._answer("POST", "/apply-template", {**body, "messages": messages})
        prompt = prompt_of(answer) if answer is not None else None
        return clean_text(prompt) if prompt is not None else None

    async def _answer(self, method: str, path: str, body: Any = None) -> Answer | None:
        """Ask the server; None when it does not answer within LOOK_S."""
        try:
            with trio.move_on_after(LOOK_S):
                return await self._client.ask(method, path, body)
        except InferenceError:
            return None
        return None
