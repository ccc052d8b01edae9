"""Any order of turns, steers, cancels, forks, hang-ups and restarts, while tools settle and the server answers.

A generated list of commands is interpreted inside one `trio.run` on a mock clock (a rule-based state machine cannot
keep a Trio run open between its rules). After each command, when every task stands still, the invariants hold:

* every acknowledged message is in the log exactly once, and no message that was answered with a refusal is;
* at most one stream is open per slot;
* no request has a call without a result, and each request of a session extends the one before;
* an idle session has no waiting connection, and who has a session goes on: nobody waits for nothing;
* results stand in the model's order, and nothing ends with `internal`;
* each connection gets at most one final frame, and exactly one when the daemon has ended cleanly.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import trio
from attrs import define, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from boxmaker.channel.client import TurnChannel
from boxmaker.errors import ChannelClosed
from boxmaker.proto import channel
from boxmaker.proto.channel import Request, WireError
from boxmaker.proto.chat import Queued
from boxmaker.proto.frames import Answer, encode_request
from boxmaker.proto.ids import SessionId
from boxmaker.proto.tools import Failed, ToolRequest, ToolResponse
from boxmaker.session.logs import check
from boxmaker.session.store import LOG_NAME
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.port import public
from boxmaker.testing.server import (
    STREAM_HEAD,
    ScriptedServer,
    Send,
    Step,
    Until,
    call_delta,
    delta,
    ending,
    error_response,
    scripted_server,
)
from tests.strict import refuse

LIMIT_S = 30_000
"""Virtual seconds for all commands of one example: a deadlock ends here."""
NAMES = ("a", "b")

# -- commands ------------------------------------------------------------------------------------


@frozen
class Say:
    session: str
    when_busy: Literal["refuse", "wait", "replace"]
    resume: bool


@frozen
class SaySteer:
    session: str


@frozen
class SayCancel:
    session: str


@frozen
class SayFork:
    session: str
    at: int | None


@frozen
class AskStatus:
    pass


@frozen
class HangUp:
    which: int


@frozen
class Settle:
    """A tool ends; `well` or with a failure."""

    which: int
    well: bool


@frozen
class Serve:
    """The server goes on with what it was asked last: text, calls, an error, or the end of its connection."""

    what: Literal["text", "answer", "calls", "beside", "error", "break"]


@frozen
class Pass:
    """Time passes: a stream that says nothing stalls."""

    seconds: int


@frozen
class Restart:
    """The daemon ends, as at SIGTERM or as at `kill -9`, and another one begins on its home."""

    how: Literal["stop", "kill"]


Command: TypeAlias = Say | SaySteer | SayCancel | SayFork | AskStatus | HangUp | Settle | Serve | Pass | Restart

sessions = st.sampled_from(["a", "a", "a", "b"])
when_busy = st.sampled_from(["refuse", "wait", "replace"])
settle = st.builds(Settle, st.integers(0, 3), st.booleans())
scenes: st.SearchStrategy[list[Command]] = st.one_of(
    st.tuples(st.builds(Say, sessions, when_busy, st.just(True))).map(list),
    st.tuples(
        st.builds(Say, sessions, when_busy, st.just(True)),
        st.builds(Serve, st.sampled_from(["text", "answer", "calls", "beside"])),
    ).map(list),
    st.tuples(st.builds(SaySteer, sessions)).map(list),
    st.tuples(st.builds(Serve, st.sampled_from(["text", "answer", "answer", "calls", "beside"]))).map(list),
    st.lists(settle, min_size=1, max_size=3),
    st.tuples(
        st.one_of(
            st.builds(Say, sessions, when_busy, st.just(False)),
            st.builds(SayCancel, sessions),
            st.builds(SayFork, sessions, st.sampled_from([None, 1, 2])),
            st.builds(AskStatus),
            st.builds(HangUp, st.integers(0, 5)),
            st.builds(Serve, st.sampled_from(["error", "break"])),
            st.builds(Pass, st.sampled_from([1, 70, 400])),
        )
    ).map(list),
)
restart: st.SearchStrategy[list[Command]] = st.tuples(st.builds(Restart, st.sampled_from(["stop", "kill"]))).map(list)
lives = st.lists(scenes, min_size=4, max_size=16).map(lambda found: [one for scene in found for one in scene])
commands = st.builds(
    lambda first, end, second: [Say("a", "refuse", True), *first, *end, *second], lives, restart, st.just([]) | lives
)
"""A turn has begun, in a daemon that ends once; mostly of one session, so that they meet."""

# -- the world -----------------------------------------------------------------------------------


@define(eq=False)
class Reply:
    """What the server says to one completion, decided while it is asked."""

    number: int
    next: trio.Event = field(factory=trio.Event)
    data: bytes = b""
    over: bool = False
    begun: bool = False

    def __iter__(self) -> Iterator[Step]:
        while not self.over:
            yield Until(self.next)
            self.next = trio.Event()
            yield Send(self.data)

    def say(self, what: str) -> None:
        """Go on with it."""
        head = b"" if self.begun else STREAM_HEAD
        self.over = what != "text"
        if what == "error" and not self.begun:
            self.data = error_response(400, "wrong")
        elif what in ("error", "break"):
            self.data = head
        elif what in ("text", "answer"):
            end = ending(cache_n=None, prompt_n=None, predicted_n=None) if what == "answer" else b""
            self.data = head + delta(content=f"r{self.number} ") + end
        else:
            side = "true" if what == "beside" else "false"
            arguments = f'{{{{"n":{{}},"round":{self.number // 2},"beside":{side}}}}}'
            made = [call_delta(i, f"c{self.number}-{i}", "clock", arguments.format(i)) for i in range(3)]
            self.data = head + b"".join(made) + ending("tool_calls", None, None, None)
        self.begun = True
        self.next.set()


class Replies(list[Any]):
    """Scripts without end; `open` are those that may still go on."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Reply] = []

    def __bool__(self) -> bool:
        return True

    def pop(self, _: object = -1) -> Any:
        self.made.append(Reply(len(self.made)))
        return self.made[-1]


@define(eq=False)
class Pending:
    request: ToolRequest
    settled: trio.Event = field(factory=trio.Event)
    response: ToolResponse | None = None


@define
class Port:
    """Tools that end when a command says so."""

    pending: list[Pending] = field(factory=list)
    most: int = 0

    def runs_beside(self, request: ToolRequest) -> bool:
        return '"beside":true' in request.arguments

    async def call(self, request: ToolRequest) -> ToolResponse:
        pending = Pending(request)
        self.pending.append(pending)
        self.most = max(self.most, len(self.pending))
        try:
            await pending.settled.wait()
        finally:
            self.pending.remove(pending)
        assert pending.response is not None
        return pending.response


@define(eq=False)
class Peer:
    """A connection and what it was told."""

    request: Request
    stream: trio.SocketStream
    answers: list[Answer] = field(factory=list)
    finals: int = 0
    closed: bool = False
    """loopd has closed it."""
    left: bool = False
    """We have."""

    async def read(self) -> None:
        frames = TurnChannel(self.stream)
        async with self.stream:
            with suppress(ChannelClosed, trio.ClosedResourceError):
                while True:
                    frame = await frames.receive()
                    assert frame.answer is not None
                    assert not self.finals, "a frame after the final one"
                    self.finals += frame.final
                    self.answers.append(frame.answer)
            self.closed = True

    @property
    def final(self) -> Answer | None:
        return self.answers[-1] if self.finals else None

    @property
    def content(self) -> str:
        assert isinstance(self.request, channel.Turn | channel.Steer)
        return self.request.content


LEFT_NO_TRACE = {
    "session_busy", "session_exists", "no_such_session", "bad_request", "no_turn",
}  # fmt: skip


@define
class World:
    directory: Path
    server: ScriptedServer
    port: Port
    nursery: trio.Nursery
    peers: list[Peer] = field(factory=list)
    said: int = 0
    forks: list[str] = field(factory=list)
    bodies: dict[str, bytes] = field(factory=dict)
    checked: int = 0

    async def connect(self, daemon: Daemon, request: Request) -> Peer:
        peer = Peer(request, await daemon.connect())
        self.peers.append(peer)
        await peer.stream.send_all(encode_request(request))
        self.nursery.start_soon(peer.read)
        return peer

    def text(self) -> str:
        self.said += 1
        return f"m{self.said}."

    async def do(self, daemon: Daemon, command: Command) -> None:
        match command:
            case Say(session=name, when_busy=when_busy, resume=resume):
                exists = (daemon.store.directory / name).exists()
                busy = SessionId(name) in daemon.service._desk._lines
                session = SessionId(name)
                turn = channel.Turn(
                    session=session, content=self.text(), resume=resume and (exists or busy), when_busy=when_busy
                )
                await self.connect(daemon, turn)
            case SaySteer(session=name):
                await self.connect(daemon, channel.Steer(session=SessionId(name), content=self.text()))
            case SayCancel(session=name):
                await self.connect(daemon, channel.Cancel(session=SessionId(name), cause="owner"))
            case SayFork(session=name, at=at):
                new = SessionId(f"f{len(self.peers)}")
                await self.connect(daemon, channel.Fork(session=SessionId(name), from_=at, new=new))
            case AskStatus():
                await self.connect(daemon, channel.Status())
            case HangUp(which=which):
                here = [peer for peer in self.peers if not peer.closed and not peer.left]
                if here:
                    peer = here[which % len(here)]
                    peer.left = True
                    await peer.stream.aclose()
            case Settle(which=which, well=well):
                if self.port.pending:
                    pending = self.port.pending[which % len(self.port.pending)]
                    pending.response = public("fine") if well else Failed(message="no")
                    pending.settled.set()
            case Serve(what=what):
                for reply, received in zip(self.replies, self.server.completions, strict=True):
                    if not reply.over and not received.closed.is_set():
                        reply.say(what)
            case Pass(seconds=seconds):
                await trio.sleep(seconds)
        await wait_all_tasks_blocked()

    @property
    def replies(self) -> list[Reply]:
        assert isinstance(self.server.scripts, Replies)
        return self.server.scripts.made

    # -- the invariants --------------------------------------------------------------------------

    def check(self, daemon: Daemon, *, ended: bool = False) -> None:
        self._check_log(daemon)
        streams = [received for received in self.server.completions if not received.closed.is_set()]
        assert len(streams) <= 1, "at most one stream is open per slot"
        self._check_requests()
        lines = daemon.service._desk._lines
        for peer in self.peers:
            assert peer.finals <= 1
            gone = peer.left or peer.closed
            if isinstance(peer.request, channel.Turn | channel.Steer | channel.Cancel) and not gone and not peer.finals:
                assert peer.request.session in lines, "an idle session has no waiting connection"
            assert not (isinstance(peer.final, WireError) and peer.final.code == channel.ErrorCode.INTERNAL)
            if ended and not peer.left:
                assert peer.finals == 1, "each connection gets one final frame"
        assert not [line for line in lines.values() if line.has_it.stop.in_line], "who has a session goes on"
        held = sum(line.has_it.control is not None for line in lines.values())
        assert held == len(daemon.closing._running & {line.has_it.stop for line in lines.values()})
        if ended:
            assert not lines

    def _check_log(self, daemon: Daemon) -> None:
        found: Counter[str] = Counter()
        for directory in daemon.store.directory.iterdir():
            records = [json.loads(line) for line in (directory / LOG_NAME).read_bytes().splitlines()]
            every_result_is_in_order(records)
            if directory.name in NAMES:
                found.update(record["content"] for record in records if record["type"] == "user")
        for peer in self.peers:
            if not isinstance(peer.request, channel.Turn | channel.Steer):
                continue
            times = found[peer.content]
            final = peer.final
            if isinstance(final, channel.TurnDone | channel.SteerDone):
                assert times == 1, f"{peer.content} was acknowledged"
            elif isinstance(final, WireError) and final.code.value in LEFT_NO_TRACE:
                assert times == 0, f"{peer.content} was refused: {final.code}"
            elif isinstance(peer.request, channel.Steer) and not peer.left and not peer.closed:
                assert times == 0, f"{peer.content} waits to join"
            elif any(not isinstance(answer, Queued | WireError) for answer in peer.answers):
                assert times == 1, f"{peer.content} is being answered"
            else:
                assert times <= 1

    def _check_requests(self) -> None:
        for received in self.server.completions[self.checked :]:
            messages = received.json()["messages"]
            assert refuse(messages) is None, refuse(messages)
            first = next(message["content"] for message in messages if message["role"] == "user")
            prefix = received.body.partition(b'],"tools":')[0]
            assert prefix.startswith(self.bodies.get(first, b"")), "a request extends the one before"
            self.bodies[first] = prefix
        self.checked = len(self.server.completions)


def every_result_is_in_order(records: Sequence[dict[str, Any]]) -> None:
    waiting: list[str] = []
    for record in records:
        if record["type"] == "assistant":
            waiting = [call["id"] for call in record["tool_calls"]]
        elif record["type"] == "tool_result":
            assert record["tool_call_id"] == waiting.pop(0), "results stand in the model's order"


@asynccontextmanager
async def daemon_on(directory: Path, server: ScriptedServer, port: Port) -> AsyncIterator[Daemon]:
    text = "[retry]\nattempts = 2\n[timeouts]\nprefill_s = 300\nstall_s = 60\n[loop]\nparallel_tools = 2\n"
    async with running_daemon(directory, server.url, text, port=port) as daemon:
        yield daemon


async def stop(daemon: Daemon) -> None:
    """End a daemon as `loopd serve` does at SIGTERM, without grace."""
    daemon.closing.begin()
    daemon.closing.cancel_turns()
    await daemon.closing.wait_no_turns()
    await wait_all_tasks_blocked()


async def interpret(directory: Path, todo: Sequence[Command]) -> World:
    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server, trio.open_nursery() as nursery:
            server.scripts = Replies()
            world = World(directory, server, Port(), nursery)
            left = list(todo)
            over = False
            while not over:
                async with daemon_on(directory, server, world.port) as daemon:
                    how = "stop"
                    while left:
                        command = left.pop(0)
                        if isinstance(command, Restart):
                            how = command.how
                            break
                        await world.do(daemon, command)
                        world.check(daemon)
                    else:
                        over = True
                    if how == "stop":
                        await stop(daemon)
                        for peer in world.peers:
                            assert peer.closed or peer.left
                        world.check(daemon, ended=True)
                await wait_all_tasks_blocked()
                world.peers = [peer for peer in world.peers if peer.finals]  # a kill says nothing
                world.port.pending.clear()
            for name in daemon.store.directory.iterdir():
                assert check(daemon.store.directory, SessionId(name.name)) == []
            nursery.cancel_scope.cancel()
            return world
    raise AssertionError("unreachable")


def play(todo: Sequence[Command]) -> World:
    with tempfile.TemporaryDirectory() as name:
        return trio.run(interpret, Path(name), todo, clock=MockClock(autojump_threshold=0))


@given(todo=commands)
@settings(max_examples=100)
def test_any_order_of_commands_keeps_the_invariants(todo: list[Command]) -> None:
    play(todo)


SAY, WAIT, REPLACE = (Say("a", how, True) for how in ("refuse", "wait", "replace"))
STORIES: dict[str, list[Command]] = {
    "a steer joins after calls": [SAY, Serve("calls"), SaySteer("a"), *[Settle(0, True)] * 3, Serve("answer")],
    "a pool that ends in the other order": [SAY, Serve("beside"), Settle(1, True), Settle(0, False), Settle(0, True)],
    "three in line": [SAY, WAIT, WAIT, REPLACE, Serve("answer"), Serve("answer"), Serve("answer"), Serve("answer")],
    "a kill in a pool": [SAY, Serve("beside"), Settle(1, True), Restart("kill"), SAY, Serve("answer")],
    "a stop in a pool": [SAY, Serve("beside"), SaySteer("a"), WAIT, Restart("stop"), SAY, Serve("answer")],
    "a fork while it runs, and after": [SAY, SayFork("a", None), Serve("answer"), SayFork("a", None)],
}


@pytest.mark.parametrize("name", STORIES)
def test_a_story_keeps_the_invariants(name: str) -> None:
    play(STORIES[name])
