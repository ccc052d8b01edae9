"""One turn: a user message in, an answer out, with a limit on every kind of runaway.

Laws:
* Every call that the log holds gets exactly one result, in the model's order, whatever ends the turn.
* Nothing is appended for a completion that is not final.
* `User` is in the log before the request leaves.

Source: task 06 "What `run_turn` does", M2b section 3, design.md section 8.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio
from attrs import frozen

from boxmaker.config import Config
from boxmaker.errors import InferenceError, InternalError, SessionFull, StorageError, TurnLimit
from boxmaker.inference.cache import Loss, TokenFigures, cache_outcome
from boxmaker.inference.client import Client, Look
from boxmaker.inference.completion import Completion
from boxmaker.inference.facts import ServerFacts
from boxmaker.inference.request import ChatRequest
from boxmaker.inference.retry import is_context_full
from boxmaker.log import log_exception
from boxmaker.proto import channel, records
from boxmaker.proto.channel import TurnEvent
from boxmaker.proto.chat import ChatEvent, Figures, ToolCall, ToolCallDelta
from boxmaker.proto.time import Timestamp
from boxmaker.proto.tools import Denied, Failed, PendingApproval, Result, ToolRequest, ToolResponse
from boxmaker.session.store import Session
from boxmaker.tools import dispatch
from boxmaker.tools.dispatch import Local, cap_result
from boxmaker.tools.port import ToolPort
from boxmaker.tools.registry import Registry

Emit = Callable[[Sequence[TurnEvent]], Awaitable[None]]
"""Takes events for the channel, in order; waits while the channel is slow."""

CLEANUP_S = 5.0
"""How long a cancelled turn may take to give its open calls their results."""
MAX_REPEATS = 2


@frozen(kw_only=True)
class Runtime:
    """What a turn needs besides the session; shared by all turns of the daemon."""

    config: Config
    client: Client
    facts: ServerFacts
    port: ToolPort
    registry: Registry
    now: Callable[[], Timestamp]


@frozen(kw_only=True)
class TurnOutcome:
    """The last completion's content (`""` when it had none), and what that completion cost."""

    content: str
    usage: Figures


async def run_turn(session: Session, rt: Runtime, content: str, emit: Emit) -> TurnOutcome:
    """Run one turn of a session that the caller has.

    Raises:
        SessionFull, InferenceError: nothing was appended for the failed request.
        TurnLimit: what was appended stays.
        StorageError, InternalError: the log is as it was before the failed append.

    Cancellation: safe at any point. The server's slot is left, open calls get their results within
    CLEANUP_S, and nothing is appended for a completion that was not final.
    """
    turn = _Turn(session, rt, emit)
    try:
        return await turn.run(content)
    except trio.Cancelled:
        with trio.move_on_after(CLEANUP_S, shield=True):
            await turn.close_open_calls()
        raise
    finally:
        turn.hold.give_back()


class _Turn:
    def __init__(self, session: Session, rt: Runtime, emit: Emit) -> None:
        self._session = session
        self._rt = rt
        self._emit = emit
        self._slot = rt.config.slots.main
        self.hold = rt.client.hold(self._slot)
        self._seen: set[tuple[str, str]] = set()
        self._repeats = 0
        self._call_is_running = False

    async def run(self, content: str) -> TurnOutcome:
        if self._session.state.open_calls:  # a kill -9 in the tool calls of the turn before
            self._call_is_running = True
            await self.close_open_calls(self._emit)
        look = await self._append_user(content)
        limit = self._rt.config.loop.tool_iterations
        iterations = 0
        while True:
            completion = await self._complete(look)
            look = None
            if not completion.tool_calls:
                return TurnOutcome(content=completion.content or "", usage=figures_of(completion))
            iterations += 1
            if iterations > limit:
                await self._answer_open_calls(dispatch.OVER_ITERATIONS)
                raise TurnLimit(limit="tool_iterations", value=limit)
            if completion.cut == "length":
                await self._answer_open_calls(dispatch.REPLY_CUT)
            else:
                for call in completion.tool_calls:
                    await self._work_on(call)

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
        before = self._session.state.last_figures
        request = ChatRequest(slot=self._slot, body=self._session.request_body())
        try:
            completion = await self._rt.client.chat_with_retry(request, self.hold, self._emit_chat, look)
        except InferenceError as exc:
            if is_context_full(exc):
                raise SessionFull(message=exc.message) from exc
            raise
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
        if before is not None:
            current = TokenFigures(
                cache_n=completion.cache_n, prompt_n=completion.prompt_n, predicted_n=completion.predicted_n
            )
            outcome = cache_outcome(before, current)
            if isinstance(outcome, Loss):
                written.append(records.CacheLoss(time=now, expected=outcome.expected, got=outcome.got))
                events.append(channel.CacheLoss(expected=outcome.expected, got=outcome.got))
        await self._session.append(*written)
        if events:
            await self._emit(events)
        return completion

    async def _emit_chat(self, events: Sequence[ChatEvent]) -> None:
        """Pieces of calls are dropped: the channel is told of whole calls."""
        await self._emit([event for event in events if not isinstance(event, ToolCallDelta)])

    async def _work_on(self, call: ToolCall) -> None:
        """Task 06, steps 6a to 6d."""
        name = call.name.strip()
        await self._emit([channel.ToolCallStarted(name=name)])
        key = (name, call.arguments)
        if self._rt.config.loop.repeat_detection and key in self._seen:
            self._repeats += 1
            if self._repeats == MAX_REPEATS:
                await self._answer(call, dispatch.REPEATED_AGAIN)
                await self._answer_open_calls(dispatch.AFTER_REPEAT)
                raise TurnLimit(limit="repeat_detection", value=MAX_REPEATS)
            await self._answer(call, dispatch.ALREADY_CALLED)
            return
        self._seen.add(key)
        todo = dispatch.dispatch(self._rt.registry, name, call.arguments)
        if isinstance(todo, Local):
            await self._answer(call, todo.text)
            return
        request = ToolRequest(
            session=self._session.id, call=self._session.state.next_call, tool=todo.tool, arguments=todo.arguments
        )
        self._call_is_running = True
        response = await self._call_port(request)
        match response:
            case Result():
                await self._append_result(call, response)
            case Failed(message=message):
                await self._answer(call, dispatch.tool_failed(message))
            case Denied(reason=reason):
                await self._answer(call, dispatch.call_denied(reason))
            case PendingApproval():
                await self._answer(call, dispatch.NO_APPROVAL)

    async def _call_port(self, request: ToolRequest) -> ToolResponse:
        try:
            return await self._rt.port.call(request)
        except Exception:  # the tool boundary: whatever a port does, the call gets a result
            log_exception("tool_port_failed", session=request.session, call=request.call)
            return Failed(message="an error inside the tool port; the daemon's log has it")

    async def _answer(self, call: ToolCall, text: str, emit: Emit | None = None) -> None:
        """Give a call a text of ours as its result."""
        result = Result(content=text, class_="public", untrusted=False, truncated=False)
        await self._append_result(call, result, emit)

    async def _append_result(self, call: ToolCall, result: Result, emit: Emit | None = None) -> None:
        content, cut = cap_result(result.content, self._rt.config.loop.tool_result_cap)
        truncated = cut or result.truncated
        await self._session.append(
            records.ToolResult(
                time=self._rt.now(),
                call=self._session.state.next_call,
                tool_call_id=call.id,
                content=content,
                class_=result.class_,
                untrusted=result.untrusted,
                truncated=truncated,
            )
        )
        self._call_is_running = False
        event = channel.ToolResult(name=call.name.strip(), class_=result.class_, truncated=truncated)
        await (emit or self._emit)([event])

    async def _answer_open_calls(self, text: str) -> None:
        """Give every call that has no result yet the same one, in the model's order."""
        for call in list(self._session.state.open_calls):
            await self._answer(call, text)

    async def close_open_calls(self, emit: Emit | None = None) -> None:
        """Give the call that was running an unknown outcome, and every later one "not run".

        Without `emit` nothing is told to the channel: it has gone, or is about to.
        """
        for call in list(self._session.state.open_calls):
            text = dispatch.INTERRUPTED if self._call_is_running else dispatch.NOT_RUN
            await self._answer(call, text, emit or _tell_nobody)


async def _tell_nobody(_: Sequence[TurnEvent]) -> None:
    pass


def figures_of(completion: Completion) -> Figures:
    """The five usage figures of a completion."""
    return Figures(
        cache_n=completion.cache_n,
        prompt_n=completion.prompt_n,
        predicted_n=completion.predicted_n,
        reasoning_tokens=completion.reasoning_tokens,
        thinking_capped=completion.thinking_capped,
    )
