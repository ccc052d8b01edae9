"""The calls of one reply: which of them run, which at the same time, and the one result that each of them gets.

Laws:
* Events and results keep the model's order, whatever finishes first.
* A call that the port calls safe beside others overlaps with its neighbours that are, `parallel_tools` at a time; any
  other is a barrier: those before it have their results when it starts, those after it start when it has its own.
* One task writes results. A fault of this module invents none: the next turn gives them, as after `kill -9`.

Source: task 06, steps 6a to 6d; design.md section 8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import trio
from attrs import define

from boxmaker.errors import TurnLimit
from boxmaker.log import log_exception
from boxmaker.proto import channel, records
from boxmaker.proto.chat import ToolCall
from boxmaker.proto.tools import Denied, Failed, PendingApproval, Result, ToolRequest, ToolResponse
from boxmaker.session.store import Session
from boxmaker.tools import endings
from boxmaker.tools.dispatch import Local, cap_result, dispatch, tool_failed
from boxmaker.tools.port import ParallelPort
from boxmaker.turn.runtime import Emit, Runtime, tell_nobody

MAX_REPEATS = 2


@define(eq=False)
class _Open:
    """A call that has no result in the log yet; `result` is there before its turn to be written has come."""

    call: ToolCall
    started: bool = False
    result: Result | None = None


class Calls:
    """Works on the calls of one turn's replies, and remembers which were made."""

    def __init__(self, session: Session, rt: Runtime, emit: Emit) -> None:
        self._session = session
        self._rt = rt
        self._emit = emit
        self._seen: set[tuple[str, str]] = set()
        self._repeats = 0
        self._open: deque[_Open] = deque()
        self._running = 0
        self._changed = trio.Event()

    def forget_seen(self) -> None:
        """The owner has spoken: a call may be made again. Repeats that were counted stay counted."""
        self._seen.clear()

    async def work_on(self, calls: Sequence[ToolCall]) -> None:
        """Give every call of a reply its result.

        Raises:
            TurnLimit: for the second repeat; every call has a result.
            StorageError, InternalError: the log is as it was before the failed append.

        Cancellation: safe at any point; tools stop at their next checkpoint, and `close` gives the missing results.
        """
        opened = [_Open(call) for call in calls]
        self._open = deque(opened)
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            try:
                for number, one in enumerate(opened, start=self._session.state.next_call):
                    await self._begin(one, number, nursery)
                await self._until(lambda: not self._open)
            except Exception as exc:  # not through the nursery: it would come out as a group
                failure = exc
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _begin(self, one: _Open, number: int, nursery: trio.Nursery) -> None:
        """Answer a call, or start its tool; one that is a barrier has its result when this returns."""
        name = one.call.name.strip()
        started = channel.ToolCallStarted(name=name)
        key = (name, one.call.arguments)
        text = None
        if self._rt.config.loop.repeat_detection and key in self._seen:
            self._repeats += 1
            if self._repeats == MAX_REPEATS:
                await self._until(lambda: self._open[0] is one)
                await self._emit([started])
                await self._end_by_repeat()
            text = endings.ALREADY_CALLED
        self._seen.add(key)
        request = self._request(one.call, number) if text is None else text
        if isinstance(request, str):
            await self._emit([started])
            one.result = _ours(request)
            await self._write_settled()
        elif self._runs_beside(request):
            await self._until(lambda: self._running < self._rt.config.loop.parallel_tools)
            await self._emit([started])
            one.started = True
            self._running += 1
            nursery.start_soon(self._run_beside, one, request)
        else:
            await self._until(lambda: self._open[0] is one)
            await self._emit([started])
            one.started = True
            one.result = await self._call_port(request)
            await self._write_settled()

    async def _end_by_repeat(self) -> None:
        for place, one in enumerate(self._open):
            one.result = _ours(endings.AFTER_REPEAT if place else endings.REPEATED_AGAIN)
        await self._write_settled()
        raise TurnLimit(limit="repeat_detection", value=MAX_REPEATS)

    def _request(self, call: ToolCall, number: int) -> ToolRequest | str:
        """What the port is asked, or our own answer."""
        todo = dispatch(self._rt.registry, call.name.strip(), call.arguments)
        if isinstance(todo, Local):
            return todo.text
        return ToolRequest(session=self._session.id, call=number, tool=todo.tool, arguments=todo.arguments)

    def _runs_beside(self, request: ToolRequest) -> bool:
        port = self._rt.port
        try:
            return isinstance(port, ParallelPort) and port.runs_beside(request)
        except Exception:  # the tool boundary: what a port cannot say is no
            log_exception("tool_port_failed", session=request.session, call=request.call)
            return False

    async def _run_beside(self, one: _Open, request: ToolRequest) -> None:
        """Run one tool of the pool. Cancelled by: the turn."""
        one.result = await self._call_port(request)
        self._running -= 1
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Write what can be written while tools finish, until a condition holds."""
        while True:
            await self._write_settled()
            if condition():
                return
            self._changed = trio.Event()
            await self._changed.wait()

    async def _call_port(self, request: ToolRequest) -> Result:
        call_s = self._rt.config.tools.call_s
        response: ToolResponse | None = None
        with trio.CancelScope() if call_s is None else trio.move_on_after(call_s):
            try:
                response = await self._rt.port.call(request)
            except (
                Exception,
                BaseExceptionGroup,
            ) as exc:  # the tool boundary: whatever a port does, the call gets a result
                cancelled = _cancel_in(exc)
                log_exception("tool_port_failed", session=request.session, call=request.call)
                if cancelled is not None:  # what fails while it is cancelled is cancelled
                    raise cancelled from None
                response = Failed(message="an error inside the tool port; the daemon's log has it")
        match response:
            case Result():
                return response
            case Failed(message=message):
                return _ours(tool_failed(message))
            case Denied(reason=reason):
                return _ours(endings.call_denied(reason))
            case PendingApproval():
                return _ours(endings.NO_APPROVAL)
        return _ours(endings.TIMED_OUT)

    async def _write_settled(self) -> None:
        """Write the results that are there, up to the first call that has none."""
        while self._open and (result := self._open[0].result) is not None:
            event = await self._append(self._open[0].call, result)
            self._open.popleft()
            await self._emit([event])

    async def _append(self, call: ToolCall, result: Result) -> channel.ToolResult:
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
        return channel.ToolResult(
            name=call.name.strip(), class_=result.class_, truncated=truncated, untrusted=result.untrusted
        )

    async def answer_all(self, text: str, emit: Emit | None = None) -> None:
        """Give every call that has no result yet the same one, in the model's order."""
        for call in list(self._session.state.open_calls):
            event = await self._append(call, _ours(text))
            await (emit or self._emit)([event])

    async def close(self, not_run: str) -> None:
        """Give the calls of a cancelled turn their results; nothing is told to the channel.

        What a tool has answered stands; one that was running has an unknown outcome; `not_run` is for the others.
        """
        for one in list(self._open):
            text = endings.INTERRUPTED if one.started else not_run
            await self._append(one.call, one.result or _ours(text))
            self._open.popleft()
        await self.answer_all(not_run, tell_nobody)

    async def make_good(self) -> None:
        """Give results to the calls that a killed daemon, or a fault of ours, has left open in the turn before.

        The first was perhaps running, and with it those tools that may run beside it; any other call has not begun.
        """
        calls = list(self._session.state.open_calls)
        opened = deque(_Open(call) for call in calls)
        pool = True
        for number, one in enumerate(opened, start=self._session.state.next_call):
            request = self._request(one.call, number)
            beside = isinstance(request, ToolRequest) and self._runs_beside(request)
            first = one is opened[0]
            one.result = _ours(endings.KILLED if first or (pool and beside) else endings.STOPPED)
            pool = pool and (beside or (isinstance(request, str) and not first))
        self._open = opened
        await self._write_settled()


def _cancel_in(exc: BaseException) -> BaseException | None:
    """The cancel that came out of a port's nursery together with its faults, if one did.

    Raises:
        BaseExceptionGroup: there is something else in it that ends the process.
    """
    if not isinstance(exc, BaseExceptionGroup):
        return None
    cancelled, rest = exc.split(trio.Cancelled)
    if rest is not None and not isinstance(rest, ExceptionGroup):
        raise exc
    return cancelled


def _ours(text: str) -> Result:
    """A text of ours as a call's result."""
    return Result(content=text, class_="public", untrusted=False, truncated=False)
