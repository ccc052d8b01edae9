"""Hanging up: at each place where a turn can stand, and at every single step of it.

After each the same is checked: the task gone, the connection to the server closed, the log whole,
the gate free, and the next turn of the session fine.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from boxmaker.channel.client import TurnChannel
from boxmaker.channel.server import serve_connection
from boxmaker.errors import BadFrame, ChannelClosed
from boxmaker.loopd.turns import TurnService
from boxmaker.proto.channel import ToolCallStarted, Turn, TurnDone
from boxmaker.proto.chat import Content, Progress, Queued, Reasoning, Retrying, Waiting
from boxmaker.proto.frames import encode_request
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import Assistant, ToolResult
from boxmaker.session.disk import InlineDisk
from boxmaker.session.store import NewSession, Session
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.port import ScriptedPort, hang, public
from boxmaker.testing.server import (
    LOADING,
    STREAM_HEAD,
    Hang,
    Script,
    ScriptedServer,
    Send,
    call_delta,
    delta,
    error_response,
    progress,
    reply,
    scripted_server,
)
from boxmaker.turn.loop import _Turn, run_turn
from boxmaker.turn.runtime import Emit, Runtime
from boxmaker.turn.steering import TurnControl
from tests.strict import refuse

T = TypeVar("T")


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait, without moving the clock, until the tasks have made something true."""
    for _ in range(1000):
        if condition():
            return
        await wait_all_tasks_blocked()
    raise AssertionError("it never came true")


def check_gate(daemon: Daemon) -> None:
    hold = daemon.client.hold(daemon.config.slots.listed[0])
    assert hold.take_nowait(), "the gate is free"
    hold.give_back()


async def check_left(daemon: Daemon, server: ScriptedServer, session: str) -> None:
    """What must hold after a channel of a session has gone."""
    await eventually(lambda: daemon.is_free(session))
    await eventually(lambda: all(request.closed.is_set() for request in server.completions))
    check_gate(daemon)
    log = daemon.log(session)  # reads strictly: a torn or broken line fails
    calls = [call.id for record in log if isinstance(record, Assistant) for call in record.tool_calls]
    results = [record.tool_call_id for record in log if isinstance(record, ToolResult)]
    assert calls == results, "every call has one result, in the model's order"
    before = server.bodies[-1] if server.bodies else b'{"messages":[],"tools":'
    server.scripts = [reply("fine")]
    server.refuse_history = refuse
    done = await daemon.ask(session, "and now?", resume=True)
    assert done.content == "fine"
    prefix, bracket, _ = before.partition(b'],"tools":')
    assert bracket
    assert server.bodies[-1].startswith(prefix), "the next request extends the last one"


async def check_left_or_new(daemon: Daemon, server: ScriptedServer) -> None:
    """The same for session `s`, which may not have been created when its channel went."""
    if (daemon.store.directory / "s").exists():
        await check_left(daemon, server, "s")
    else:
        check_gate(daemon)
        server.scripts = [reply("fine")]
        assert (await daemon.ask("s", "hi", resume=False)).content == "fine"


@asynccontextmanager
async def standing_daemon(
    directory: Path, *scripts: Script, text: str = "", **more: Any
) -> AsyncIterator[tuple[ScriptedServer, Daemon]]:
    async with scripted_server(*scripts) as server, running_daemon(directory, server.url, text, **more) as daemon:
        yield server, daemon


async def leave_after(
    daemon: Daemon, server: ScriptedServer, seen: Callable[[object], bool], session: str = "s"
) -> None:
    """Send a turn, hang up at the first event that `seen` names, and check."""
    stream, frames = await daemon.open(session, "hi", resume=False)
    while not seen((await frames.receive()).answer):
        pass
    await stream.aclose()
    await check_left(daemon, server, session)


def is_a(kind: type) -> Callable[[object], bool]:
    return lambda answer: isinstance(answer, kind)


async def test_in_the_queue_of_the_gate(tmp_path: Path, autojump_clock: MockClock) -> None:
    port = ScriptedPort([hang])
    async with standing_daemon(tmp_path, reply(calls=[("a", "clock", "{}")]), port=port) as (server, daemon):
        first, _ = await daemon.open("first", "hi", resume=False)
        await port.started.wait()
        stream, frames = await daemon.open("s", "hi", resume=False)
        assert (await frames.receive()).answer == Queued(ahead=1)
        await stream.aclose()
        await eventually(lambda: daemon.is_free("s"))
        await first.aclose()
        await eventually(lambda: daemon.is_free("first"))
        await check_left(daemon, server, "s")


async def test_in_the_busy_wait(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with standing_daemon(tmp_path) as (server, daemon):
        server.slots = [{"id": 0, "is_processing": True}]
        stream, frames = await daemon.open("s", "hi", resume=False)
        assert (await frames.receive()).answer == Waiting(slot_busy=True)
        await stream.aclose()
        await eventually(lambda: daemon.is_free("s"))
        server.slots = [{"id": 0, "is_processing": False}]
        await check_left(daemon, server, "s")
        assert len(server.completions) == 1


async def test_while_connecting(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The listener's queue is full when the POST comes, so its connection does not stand."""
    listener = trio.socket.socket()
    await listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    address = listener.getsockname()
    server = ScriptedServer(port=address[1])
    fillers = ExitStack()
    full = trio.Event()

    async def accept_one() -> None:
        stream, _ = await listener.accept()
        await server.serve(trio.SocketStream(stream))
        for _ in range(3):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        full.set()

    async with running_daemon(tmp_path, server.url) as daemon, trio.open_nursery() as nursery:
        nursery.start_soon(accept_one)
        stream, _ = await daemon.open("s", "hi", resume=False)
        await full.wait()
        await wait_all_tasks_blocked()
        assert not daemon.is_free("s")
        assert server.completions == []
        await stream.aclose()
        await eventually(lambda: daemon.is_free("s"))
        fillers.close()
        nursery.start_soon(trio.serve_listeners, server.serve, [trio.SocketListener(listener)])
        await check_left(daemon, server, "s")
        nursery.cancel_scope.cancel()


async def test_while_waiting_for_headers(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with standing_daemon(tmp_path, [Hang()]) as (server, daemon):
        stream, _ = await daemon.open("s", "hi", resume=False)
        await server.wait_for_completions(1)
        await stream.aclose()
        await check_left(daemon, server, "s")
        assert server.completions[0].hung_up


STREAMED = {
    "prefill": (progress(900, 0, 300), is_a(Progress)),
    "reasoning": (delta(reasoning_content="hm"), is_a(Reasoning)),
    "content": (delta(content="Well"), is_a(Content)),
}


@pytest.mark.parametrize("place", STREAMED)
async def test_in_the_stream(tmp_path: Path, autojump_clock: MockClock, place: str) -> None:
    sent, seen = STREAMED[place]
    async with standing_daemon(tmp_path, [Send(STREAM_HEAD + sent), Hang()]) as (server, daemon):
        await leave_after(daemon, server, seen)
        assert server.completions[0].hung_up


async def test_in_a_tool_call_delta(tmp_path: Path, autojump_clock: MockClock) -> None:
    sent = delta(content="So") + call_delta(0, "a", "clock", '{"x')
    async with standing_daemon(tmp_path, [Send(STREAM_HEAD + sent), Hang()]) as (server, daemon):
        await leave_after(daemon, server, is_a(Content))
        assert server.completions[0].hung_up


async def test_in_back_off(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with standing_daemon(tmp_path, error_response(502, "x")) as (server, daemon):
        await leave_after(daemon, server, is_a(Retrying))


async def test_in_the_loading_wait(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with standing_daemon(tmp_path, LOADING) as (server, daemon):
        await leave_after(daemon, server, lambda answer: answer == Waiting(slot_busy=False))


async def test_in_a_tool(tmp_path: Path, autojump_clock: MockClock) -> None:
    calls = [("a", "clock", "{}"), ("b", "clock", '{"b":1}')]
    port = ScriptedPort([hang])
    async with standing_daemon(tmp_path, reply(calls=calls), port=port) as (server, daemon):
        await leave_after(daemon, server, is_a(ToolCallStarted))
        assert port.cancelled == 1


@define
class SlowDisk:
    """A disk that keeps one piece of work waiting: before it begins, or once it has."""

    stop_at: int
    begun: bool
    reached: trio.Event = field(factory=trio.Event)
    release: trio.Event = field(factory=trio.Event)
    _works: int = 0
    _inline: InlineDisk = field(factory=InlineDisk)

    async def run(self, work: Callable[[], T]) -> T:
        self._works += 1
        if self._works != self.stop_at:
            return await self._inline.run(work)
        self.reached.set()
        if not self.begun:
            await self.release.wait()
            return await self._inline.run(work)
        with trio.CancelScope(shield=True):  # as a thread that is not abandoned
            await self.release.wait()
        return work()


@pytest.mark.parametrize("begun", [False, True], ids=["before it begins", "once it has begun"])
@pytest.mark.parametrize("stop_at", [3, 4, 5, 6], ids=["user", "assistant", "result", "last assistant"])
async def test_in_an_append(tmp_path: Path, autojump_clock: MockClock, stop_at: int, begun: bool) -> None:
    """Works 1 and 2 create and open the session; an append that has begun is whole in the log."""
    disk = SlowDisk(stop_at, begun)
    port = ScriptedPort([public("noon")])
    scripts = [reply(calls=[("a", "clock", "{}")]), reply("ok", cache_n=14)]
    async with standing_daemon(tmp_path, *scripts, port=port, disk=disk) as (server, daemon):
        stream, _ = await daemon.open("s", "hi", resume=False)
        await disk.reached.wait()
        await stream.aclose()
        await wait_all_tasks_blocked()
        disk.release.set()
        await eventually(lambda: daemon.is_free("s"))
        records = len(daemon.log("s"))
        whole = {3: 2, 4: 4, 5: 5, 6: 7}[stop_at]  # lines of the log once that append is there
        interrupted = {3: 1, 4: 2, 5: 5, 6: 5}[stop_at]  # a result that was not appended is made up for
        assert records == (whole if begun and stop_at != 4 else 5 if begun else interrupted)
        await check_left(daemon, server, "s")


async def test_in_a_blocked_channel_write(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The reader reads nothing, so kernel and memory channel are full, and the stream stands still."""
    flood = [Send(STREAM_HEAD), *[Send(delta(content="x" * 10_000))] * 700, Hang()]
    text = "[channel]\nwrite_timeout_s = 1000\n"
    async with standing_daemon(tmp_path, flood, text=text) as (server, daemon):
        stream, _ = await daemon.open("s", "hi", resume=False)
        await server.wait_for_completions(1)
        await trio.sleep(100)
        assert not daemon.is_free("s")
        await stream.aclose()
        await check_left(daemon, server, "s")
        assert server.completions[0].hung_up


# -- the sweep -----------------------------------------------------------------------------------


class Steps(trio.abc.Instrument):
    """Counts the steps of one task, and does something before the n-th."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        self.task: trio.lowlevel.Task | None = None
        self.seen = 0
        self._at = at
        self._action = action

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.seen += 1
            if self.seen == self._at:
                self._action()


SWEPT: list[Script] = [
    error_response(503, "overloaded"),
    reply("Let me see.\n", reasoning="hm", calls=[("a", "clock", "{}"), ("b", "call_tool", '{"name":"echo"}')]),
    reply("It is noon."),
]


async def sweep(
    run_one: Callable[[int, Path], Awaitable[bool]], directory: Path, at_least: int, upper: int = 2000
) -> int:
    """Run with a cancel at the first, second, third … step, until one run is over before its cancel."""
    for step in count(1):
        assert step < upper, "the sweep does not end"
        run_directory = directory / str(step)
        run_directory.mkdir()
        if await run_one(step, run_directory):
            assert step > at_least, "the sweep has hardly any steps: is the task the right one?"
            return step
    raise AssertionError


RunTurn = Callable[[Session, Runtime, str, Emit], Awaitable[Any]]


async def cancel_run_turn(step: int, directory: Path, run_turn: RunTurn = run_turn, pool: bool = False) -> bool:
    """Cancel `run_turn` itself at one step; True when it was over before. `pool`: its tools run side by side."""
    port = ScriptedPort([public("noon"), public("hi")], beside=lambda _: pool)
    async with standing_daemon(directory, *SWEPT, port=port) as (server, daemon):
        service = TurnService(daemon.rt, daemon.store, daemon.causes, daemon.pins)
        new = NewSession(slot=0, baseline=service._baseline)
        scope = trio.CancelScope()
        steps = Steps(step, scope.cancel)

        async def emit(_: object) -> None:
            await trio.lowlevel.checkpoint()

        async def turn() -> None:
            async with daemon.store.turn(SessionId("s"), resume=False, new=new, alternate=False) as session:
                steps.task = trio.lowlevel.current_task()
                with scope:
                    await run_turn(session, daemon.rt, "hi", emit)

        trio.lowlevel.add_instrument(steps)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turn)
        trio.lowlevel.remove_instrument(steps)
        await check_left(daemon, server, "s")
        return not scope.cancelled_caught and steps.seen < step


async def hang_up_at(step: int, directory: Path) -> bool:
    """Hang up before one step of the task that runs the turn; True when it was over before."""
    port = ScriptedPort([public("noon"), public("hi")])
    async with standing_daemon(directory, *SWEPT, port=port) as (server, daemon):
        stream, frames = await daemon.open("s", "hi", resume=False)
        ours = stream.socket

        def leave() -> None:
            if ours.fileno() != -1:
                ours.shutdown(socket.SHUT_RDWR)

        steps = Steps(step, leave)
        steps.task = next(task for task in daemon.nursery.child_tasks if task.name.endswith("serve_connection"))
        trio.lowlevel.add_instrument(steps)
        done = False
        try:
            while True:
                frame = await frames.receive()
                done = done or isinstance(frame.answer, TurnDone)
                if frame.final:
                    break
        except (ChannelClosed, BadFrame):
            pass  # our own end was shut down
        await stream.aclose()
        await eventually(lambda: steps.task not in daemon.nursery.child_tasks)
        trio.lowlevel.remove_instrument(steps)
        await check_left_or_new(daemon, server)
        return done and steps.seen < step


async def test_a_cancel_of_run_turn_at_every_step(tmp_path: Path, autojump_clock: MockClock) -> None:
    await sweep(cancel_run_turn, tmp_path, at_least=20)


async def test_a_cancel_of_run_turn_at_every_step_with_a_pool_of_tools(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    await sweep(partial(cancel_run_turn, pool=True), tmp_path, at_least=20)


async def test_a_hang_up_at_every_step_of_the_connection(tmp_path: Path, autojump_clock: MockClock) -> None:
    await sweep(hang_up_at, tmp_path, at_least=20)


async def keeps_the_gate(session: Session, rt: Runtime, content: str, emit: Emit) -> None:
    """A planted fault: a cancel leaves the gate taken."""
    try:
        await run_turn(session, rt, content, emit)
    except trio.Cancelled:
        rt.client.hold(0).take_nowait()
        raise


async def leaves_calls_open(session: Session, rt: Runtime, content: str, emit: Emit) -> None:
    """A planted fault: a cancel gives no results to open calls."""
    turn = _Turn(session, rt, emit, TurnControl())
    try:
        await turn.run(content)
    finally:
        turn.hold.give_back()


FOUND_BY: dict[RunTurn, str] = {keeps_the_gate: "the gate is free", leaves_calls_open: "every call has one result"}


def assertions(group: BaseExceptionGroup[AssertionError]) -> list[str]:
    return [
        text
        for exc in group.exceptions
        for text in (assertions(exc) if isinstance(exc, BaseExceptionGroup) else [str(exc)])
    ]


@pytest.mark.parametrize("fault", FOUND_BY)
async def test_the_sweep_finds_a_planted_fault(tmp_path: Path, autojump_clock: MockClock, fault: RunTurn) -> None:
    """By the check that is there for it, at a step in the middle: not by the sweep's own end."""
    steps = 0

    async def run_one(step: int, directory: Path) -> bool:
        nonlocal steps
        steps = step
        return await cancel_run_turn(step, directory, fault)

    found: list[str] = []
    try:
        await sweep(run_one, tmp_path, at_least=20)
    except* AssertionError as group:
        found += assertions(group)
    assert len(found) == 1
    assert found[0].startswith(FOUND_BY[fault])
    assert 1 <= steps < 60


async def cancel_connection_at(step: int, directory: Path, leak: bool = False) -> bool:
    """Cancel the connection handler itself before one of its steps, as the end of the grace does."""
    port = ScriptedPort([public("noon"), public("hi")])
    async with standing_daemon(directory, *SWEPT, port=port) as (server, daemon):
        ours, theirs = trio.socket.socketpair()
        service = TurnService(daemon.rt, daemon.store, daemon.causes, daemon.pins)
        scope = trio.CancelScope()
        steps = Steps(step, scope.cancel)

        async def connection() -> None:
            steps.task = trio.lowlevel.current_task()
            with scope:
                await serve_connection(trio.SocketStream(theirs), daemon.config.channel, service.run, daemon.closing)
            if leak and scope.cancelled_caught:
                daemon.client.hold(0).take_nowait()

        trio.lowlevel.add_instrument(steps)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection)
            async with trio.SocketStream(ours) as stream:
                await stream.send_all(encode_request(Turn(session=SessionId("s"), content="hi", resume=False)))
                frames = TurnChannel(stream)
                with suppress(ChannelClosed):
                    while not (await frames.receive()).final:
                        pass
        trio.lowlevel.remove_instrument(steps)
        await check_left_or_new(daemon, server)
        return not scope.cancelled_caught and steps.seen < step


async def test_a_cancel_of_the_connection_at_every_step(tmp_path: Path, autojump_clock: MockClock) -> None:
    await sweep(cancel_connection_at, tmp_path, at_least=20)


async def test_the_sweep_of_the_connection_finds_a_planted_fault(tmp_path: Path, autojump_clock: MockClock) -> None:
    async def run_one(step: int, directory: Path) -> bool:
        return await cancel_connection_at(step, directory, leak=True)

    found: list[str] = []
    try:
        await sweep(run_one, tmp_path, at_least=20)
    except* AssertionError as group:
        found += assertions(group)
    assert len(found) == 1
    assert found[0].startswith("the gate is free")
