"""One turn: a user message in, an answer out, with a limit on every kind of runaway.

Laws:
* Every call that the log holds gets exactly one result, in the model's order, whatever ends the turn.
* Nothing is appended for a completion that is not final.
* `User` is in the log before the request leaves.
* What is said to a running turn joins it between two requests, never within one.

Source: task 06 "What `run_turn` does", M2b section 3, design.md section 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import trio
from attrs import frozen

from boxmaker.errors import InferenceError, InternalError, SessionFull, StorageError, TurnLimit
from boxmaker.inference.cache import Loss, TokenFigures, Unknown, cache_outcome, expected_tokens
from boxmaker.inference.cause import SlotSeen
from boxmaker.inference.client import Look
from boxmaker.inference.completion import Completion
from boxmaker.inference.request import ChatRequest
from boxmaker.inference.retry import is_context_full
from boxmaker.proto import channel, records
from boxmaker.proto.channel import TurnEvent
from boxmaker.proto.chat import ChatEvent, Figures, Queued, Retrying, ToolCallDelta, Waiting
from boxmaker.session.store import Session
from boxmaker.tools import endings
from boxmaker.turn.calls import Calls
from boxmaker.turn.runtime import Emit, Runtime, Spent
from boxmaker.turn.steering import TurnControl

CLEANUP_S = 5.0
"""How long a cancelled turn may take to give its open calls their results."""


@frozen(kw_only=True)
class TurnOutcome:
    """The last completion's content (`""` when it had none), and what that completion cost."""

    content: str
    usage: Figures


async def run_turn(
    session: Session, rt: Runtime, content: str, emit: Emit, control: TurnControl | None = None
) -> TurnOutcome:
    """Run one turn of a session that the caller has.

    `control` is how others steer it, see where it stands, and say why they cancel it.

    Raises:
        SessionFull, InferenceError: nothing was appended for the failed request.
        TurnLimit: what was appended stays.
        StorageError, InternalError: the log is as it was before the failed append.

    Cancellation: safe at any point. The server's slot is left, open calls get their results within
    CLEANUP_S, and nothing is appended for a completion that was not final.
    """
    control = control or TurnControl()
    turn = _Turn(session, rt, emit, control)
    turn_s = rt.config.loop.turn_s or math.inf
    try:
        with trio.move_on_after(turn_s) as time:
            try:
                return await turn.run(content)
            except BaseException as exc:
                if not _is_cancel(exc):
                    raise
                control.phase = "ending"
                with trio.move_on_after(CLEANUP_S, shield=True):
                    await turn.calls.close(_not_run(control, over_time=time.cancel_called))
                raise
        raise TurnLimit(limit="turn_s", value=turn_s)
    finally:
        turn.hold.give_back()


def _is_cancel(exc: BaseException) -> bool:
    """Is it a cancel, also one that came out of a nursery?"""
    if isinstance(exc, BaseExceptionGroup):
        return all(map(_is_cancel, exc.exceptions))
    return isinstance(exc, trio.Cancelled)


def _not_run(control: TurnControl, *, over_time: bool) -> str:
    """Why a call of a cancelled turn did not run."""
    cause = control.cause()
    if cause == "shutdown":
        return endings.STOPPED
    return endings.OVER_TIME if over_time and cause is None else endings.NOT_RUN


class _Turn:
    def __init__(self, session: Session, rt: Runtime, emit: Emit, control: TurnControl) -> None:
        self._session = session
        self._rt = rt
        self._emit = emit
        self._control = control
        self._slot = session.slot
        self.hold = rt.client.hold(self._slot)
        self.hold.on_use = self._slot_used
        self.calls = Calls(session, rt, emit)
        self._told_context = False

    async def run(self, content: str) -> TurnOutcome:
        if self._session.state.open_calls:
            await self.calls.make_good()
        look = await self._append_user(content)
        limit = self._rt.config.loop.tool_iterations
        iterations = 0
        while True:
            completion = await self._complete(look)
            look = None
            if completion.tool_calls:
                iterations += 1
                self._control.phase = "tools"
                if iterations > limit:
                    await self.calls.answer_all(endings.OVER_ITERATIONS)
                    raise TurnLimit(limit="tool_iterations", value=limit)
                if completion.cut == "length":
                    await self.calls.answer_all(endings.REPLY_CUT)
                else:
                    await self.calls.work_on(completion.tool_calls)
            if not await self._join() and not completion.tool_calls:
                self._control.steering.close()
                return TurnOutcome(content=completion.content or "", usage=figures_of(completion))

    async def _join(self) -> bool:
        """At a boundary: append what was said to the turn meanwhile; False when nothing was."""
        notes = self._control.steering.take()
        if not notes:
            return False
        now = self._rt.now()
        await self._session.append(*(records.User(time=now, content=note.content) for note in notes))
        self._control.steering.joined(notes)
        self.calls.forget_seen()
        await self._emit([channel.Steered(content=note.content) for note in notes])
        return True

    async def _append_user(self, content: str) -> Look | None:
        """Append `User`; when the gate is free at once, look at the slot meanwhile."""
        user = records.User(time=self._rt.now(), content=content)
        if not self.hold.take_nowait():
            await self._session.append(user)
            return None
        looks: list[Look] = []
        failure: StorageError | InternalError | None = None

        async def look() -> None:
            looks.append(await self._rt.client.look(self._slot))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            try:
                await self._session.append(user)
            except (StorageError, InternalError) as exc:  # not through the nursery: it would come out as a group
                failure = exc
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return looks[0]

    async def _complete(self, look: Look | None) -> Completion:
        """Get one completion, and append it with its usage."""
        self._control.phase = "waiting"
        before = self._session.state.last_figures
        expected = expected_tokens(before) if before is not None else None
        request = ChatRequest(slot=self._slot, body=self._session.request_body(), session=self._session.id)
        keeper = self._rt.keeper
        if keeper is not None:
            self.hold.prepare = partial(keeper.prepare, self._slot, self._session.id, request.body, expected)
        try:
            completion = await self._rt.client.chat_with_retry(request, self.hold, self._emit_chat, look)
        except InferenceError as exc:
            if is_context_full(exc):
                raise await self._session_full(exc) from exc
            raise
        evidence = self._rt.client.record.completed(self._slot, self._session.id)
        self._rt.facts.saw_model(completion.model)
        now = self._rt.now()
        figures = figures_of(completion)
        written: list[records.LogRecord] = [
            records.Assistant(
                time=now,
                content=completion.content,
                reasoning_content=completion.reasoning_content,
                tool_calls=completion.tool_calls,
            ),
            records.Usage(
                time=now,
                cache_n=figures.cache_n,
                prompt_n=figures.prompt_n,
                predicted_n=figures.predicted_n,
                reasoning_tokens=figures.reasoning_tokens,
                thinking_capped=figures.thinking_capped,
            ),
        ]
        events: list[TurnEvent] = [channel.Cut(reason=completion.cut)] if completion.cut else []
        current = TokenFigures(
            cache_n=completion.cache_n, prompt_n=completion.prompt_n, predicted_n=completion.predicted_n
        )
        restored = None
        if keeper is not None:
            restored = keeper.completed(self._slot, self._session.id, current.cache_n, expected_tokens(current))
        lost: int | None = 0
        if before is not None:
            outcome = cache_outcome(before, current)
            if isinstance(outcome, Unknown):
                lost = None
            if isinstance(outcome, Loss):
                lost = outcome.expected - outcome.got
                written.append(records.CacheLoss(time=now, expected=outcome.expected, got=outcome.got))
                events.append(channel.CacheLoss(expected=outcome.expected, got=outcome.got))
        await self._session.append(*written)
        self._control.spent.append(
            Spent(
                time=now,
                completion=self._session.state.completions,
                slot=self._slot,
                cached=completion.cache_n,
                read=completion.prompt_n,
                generated=completion.predicted_n,
                prompt_before=before.prompt_tokens if before is not None else None,
                expected=expected,
                lost=lost,
                prefill_ms=completion.prefill_ms,
                model=completion.model,
                evidence=evidence,
                body=request.body if lost else None,
                restored=restored,
            )
        )
        events += self._context(current.used, evidence.seen)
        if events:
            await self._emit(events)
        return completion

    async def _session_full(self, exc: InferenceError) -> SessionFull:
        """The error, with the answer that a fork can go on from: one that leaves room, where that is known."""
        state, n_ctx = self._session.state, self._n_ctx(self._rt.client.record.seen(self._slot))
        at: int | None = state.answers
        if n_ctx is not None:
            with suppress(StorageError):  # what went wrong first is what is told
                at = await self._session.last_answer_within(self._rt.config.session.warn_at * n_ctx)
        if not at:
            return SessionFull(message=exc.message)
        return SessionFull(message=exc.message, fork=self._session.id, at=at if at < state.answers else None)

    def _n_ctx(self, seen: SlotSeen | None) -> int | None:
        """Tokens of the slot, as it was seen last."""
        return seen.n_ctx if seen is not None and seen.n_ctx else self._rt.facts.n_ctx

    def _slot_used(self) -> None:
        """A request leaves for the server."""
        self._control.phase = "model"
        self._control.used_slot = self._slot

    def _context(self, used: int | None, seen: SlotSeen | None) -> list[TurnEvent]:
        """Say once a turn that the slot is nearly full; by the server's own figures, or not at all."""
        n_ctx = self._n_ctx(seen)
        if self._told_context or n_ctx is None or used is None or used < self._rt.config.session.warn_at * n_ctx:
            return []
        self._told_context = True
        return [channel.Context(used=used, n_ctx=n_ctx)]

    async def _emit_chat(self, events: Sequence[ChatEvent]) -> None:
        """Pieces of calls are dropped: the channel is told of whole calls."""
        if events and isinstance(events[-1], Queued | Waiting | Retrying):
            self._control.phase = "waiting"
        await self._emit([event for event in events if not isinstance(event, ToolCallDelta)])


def figures_of(completion: Completion) -> Figures:
    """The five usage figures of a completion."""
    return Figures(
        cache_n=completion.cache_n,
        prompt_n=completion.prompt_n,
        predicted_n=completion.predicted_n,
        reasoning_tokens=completion.reasoning_tokens,
        thinking_capped=completion.thinking_capped,
    )
