"""Every row of the table "Every way a turn can end" in docs/design.md, driven through a daemon's socket.

A driver a row: it brings the ending about, and what it saw is written as the row's cells and compared with the
table as text. The daemon is whole (accept loop, unix socket, store, turns, HTTP client) on a scripted
llama-server. The turn is sent by `bxctl chat --say`, which runs in a thread, or as a process where a signal is the
ending; by hand, where bxctl cannot do such a thing (hang up and listen, send what is no request).

Time stands still, because bxctl is outside the clock's sight. Where an ending is a matter of time, the clock jumps
from deadline to deadline while a turn runs and at no other moment.
"""

from __future__ import annotations

import ast
import errno
import fcntl
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import pytest
import trio
from attrs import define, field, frozen
from click.testing import CliRunner
from trio.testing import MockClock, wait_all_tasks_blocked

from boxmaker import errors
from boxmaker.bxctl.cli import main
from boxmaker.channel.client import TurnChannel
from boxmaker.channel.server import Emit
from boxmaker.channel.stop import Stop
from boxmaker.errors import ChannelClosed, InferenceError, NoSuchSession, StorageError, TurnLimit, WireableError
from boxmaker.inference.completion import BUDGET_MESSAGE
from boxmaker.loopd.serve import _accept
from boxmaker.loopd.turns import TurnService
from boxmaker.proto.channel import Cut, ErrorCode, Final, Request
from boxmaker.proto.ids import parse_session_id
from boxmaker.proto.time import Timestamp
from boxmaker.proto.tools import ToolRequest, ToolResponse
from boxmaker.session.disk import InlineDisk
from boxmaker.session.logs import check
from boxmaker.session.store import LOG_NAME
from boxmaker.testing.daemon import Daemon, fixed_now, running_daemon
from boxmaker.testing.port import Response, ScriptedPort, hang, public
from boxmaker.testing.server import (
    LOADING,
    STREAM_HEAD,
    Hang,
    Pause,
    Reset,
    Script,
    ScriptedServer,
    Send,
    Until,
    call_delta,
    delta,
    ending,
    error_response,
    http_response,
    reply,
    scripted_server,
)
from tests.bxctl import scripted_loopd
from tests.loopd.daemon_process import loopd_serve, write_config
from tests.session.homes import lay_out, lines
from tests.session.kernel import failing, kernel_calls
from tests.test_documents import DESIGN, ROOT, section

T = TypeVar("T")

LIMIT_S = 30
"""Real seconds for one row; on an idle machine it takes a fraction of one."""
COLUMNS = ("ending", "records", "events", "final frame", "status", "next turn")
NOTHING = "–"
EXISTING = "20261130-141530-x7k2qf"
"""A session that was there before the turn; new ones have the id that bxctl makes up."""
TWO_CALLS = [("a", "clock", "{}"), ("b", "clock", '{"b":1}')]
uncounted = partial(reply, cache_n=None, prompt_n=None, predicted_n=None)
"""A reply without figures: nothing can be said about its cache."""
HALF_A_REPLY = STREAM_HEAD + delta(content="So ")
CHANNEL_CODES = {ChannelClosed.code}
"""What bxctl says by itself when no final frame came."""


# -- the table -----------------------------------------------------------------------------------


def read_table() -> dict[str, dict[str, str]]:
    """The rows by their first cell: the column's name, and the cell's text."""
    found = [line for line in section(DESIGN, "Every way a turn can end").splitlines() if line.startswith("| ")]
    rows = [tuple(cell.strip() for cell in line.strip().strip("|").split(" | ")) for line in found]
    assert rows[0] == COLUMNS
    assert set(rows[1]) == {"---"}
    table = {row[0]: dict(zip(COLUMNS[1:], row[1:], strict=True)) for row in rows[2:]}
    assert len(table) == len(rows) - 2, "two rows have the same name"
    return table


TABLE = read_table()


def as_list(kinds: Sequence[str]) -> str:
    """Kinds in their order: `user`, 2 × `tool_result`."""
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    return ", ".join(f"{count} × `{kind}`" if count > 1 else f"`{kind}`" for kind, count in runs) or NOTHING


@frozen(kw_only=True)
class Seen:
    """What one turn left and said."""

    session: str
    records: list[str]
    """Types of the records that it added to the log, without the session's own first one."""
    bodies: list[dict[str, Any]]
    """Bodies of its frames."""
    status: int | None = None
    """How bxctl ended, if it was bxctl that sent the turn."""

    def events(self) -> str:
        kinds: list[str] = []
        for body in self.bodies:
            if "event" in body:
                kind, reason = body["event"]["type"], body["event"].get("reason")
                # a text comes in any number of pieces
                if kind not in ("content", "reasoning") or kinds[-1:] != [kind]:
                    kinds.append(f"{kind}: {reason}" if reason else kind)
        return as_list(kinds)

    def final(self, home: Path) -> str:
        last: dict[str, Any] = self.bodies[-1] if self.bodies else {"event": None}
        if "event" in last or last.get("code") in CHANNEL_CODES:
            return NOTHING
        if "code" not in last:
            figures = [last["usage"][name] for name in ("cache_n", "prompt_n", "predicted_n")]
            words = ["`turn_done`"]
            if not last["content"]:
                words.append("an empty answer")
            if figures == [None] * 3:
                words.append("no figures")
            return ", ".join(words)
        detail = ", ".join(f"{key}: {value}" for key, value in last["detail"].items())
        for path, name in ((str(home), "<home>"), (str(home.parent), "<config>"), (self.session, "<id>")):
            detail = detail.replace(path, name)
        return f"`{last['code']}`" + (f" `{{{detail}}}`" if detail else "")


# -- a daemon and its channels -------------------------------------------------------------------


class Service(TurnService):
    """The daemon's turns; with `time_passes`, the clock jumps from deadline to deadline while one runs."""

    def __init__(self, daemon: Daemon, clock: MockClock | None) -> None:
        super().__init__(daemon.rt, daemon.store, daemon.causes, daemon.pins)
        self._clock = clock

    async def run(self, request: Request, emit: Emit, stop: Stop) -> Final:
        if self._clock is not None:
            self._clock.autojump_threshold = 0
        try:
            return await super().run(request, emit, stop)
        finally:
            if self._clock is not None:
                self._clock.autojump_threshold = math.inf


@asynccontextmanager
async def listening(daemon: Daemon, clock: MockClock | None = None) -> AsyncIterator[trio.MemorySendChannel[int]]:
    """Have a daemon accept on its socket, as `loopd serve` does; gives where to put signals for it."""
    send, receive = trio.open_memory_channel[int](1)
    async with trio.open_nursery() as nursery, send, receive:
        nursery.start_soon(_accept, daemon.config, Service(daemon, clock), receive, False)
        await wait_all_tasks_blocked()
        yield send
        nursery.cancel_scope.cancel()


@define
class Peer:
    """A connection made by hand, and what it was told."""

    stream: trio.SocketStream
    channel: TurnChannel
    bodies: list[dict[str, Any]] = field(factory=list)

    async def until(self, kind: str) -> None:
        """Read to the first event of a kind."""
        while not self.bodies or self.bodies[-1]["event"]["type"] != kind:
            self.bodies.append((await self.channel.receive()).body)

    async def rest(self) -> list[dict[str, Any]]:
        """Read until the daemon closes the connection; everything that it said."""
        final = False
        async with self.stream:
            with suppress(ChannelClosed):
                while True:
                    frame = await self.channel.receive()
                    assert not final, "a frame after the final one"
                    final = frame.final
                    self.bodies.append(frame.body)
        return self.bodies


@define
class Whole:
    """A running daemon, the server behind it, and what a driver does with them."""

    server: ScriptedServer
    daemon: Daemon
    signals: trio.MemorySendChannel[int]
    peers: list[Peer] = field(factory=list)

    @property
    def home(self) -> Path:
        return self.daemon.config.paths.home

    @property
    def socket(self) -> Path:
        return self.daemon.config.channel.socket

    def log(self, session: str) -> Path:
        return self.home / "sessions" / session / LOG_NAME

    def log_bytes(self, session: str) -> bytes:
        return self.log(session).read_bytes() if self.log(session).exists() else b""

    async def connect(self, raw: bytes) -> Peer:
        """Connect, and send these bytes."""
        stream = await trio.open_unix_socket(self.socket)
        self.peers.append(Peer(stream, TurnChannel(stream)))
        await stream.send_all(raw)
        return self.peers[-1]

    async def begin(self, session: str, content: str = "hi", *, resume: bool = False) -> Peer:
        """Send a turn and leave it running."""
        return await self.connect(request(session=session, content=content, resume=resume))

    def seen(self, session: str, before: bytes, bodies: list[dict[str, Any]], status: int | None = None) -> Seen:
        """What a turn has left, now that it has ended."""
        return Seen(
            session=session,
            records=types(added(before, self.log_bytes(session))),
            bodies=bodies,
            status=status,
        )

    async def say(self, content: str = "hi", *, session: str | None = None) -> Seen:
        """Have bxctl run a turn to its end: of the session named, or of a new one."""
        before = self.log_bytes(session) if session else b""
        status, out, err = await trio.to_thread.run_sync(partial(bxctl, self.socket, content, session))
        made = re.match(r"session (\S+)\n", err)
        assert made, err
        return self.seen(made[1], before, out, status)

    async def go_on(self, session: str, content: str = "and now?") -> list[dict[str, Any]]:
        """Send a turn as the protocol advises when in doubt: resume, and begin it if it is not there."""
        self.server.scripts = [uncounted("Still here.")]
        self.server.slots = [{"id": 0, "is_processing": False}]
        for resume in (True, False):
            bodies = await (await self.begin(session, content, resume=resume)).rest()
            if bodies[-1].get("code") != "no_such_session":
                break
        return bodies

    async def next_turn(self, session: str, mend: Callable[[], Awaitable[None]] | None) -> str:
        """Go on with a session after a turn of it has ended; what comes of it, in words."""
        before = self.log_bytes(session)
        seen = self.seen(session, before, await self.go_on(session))
        final = seen.bodies[-1]
        if "code" in final and mend is not None:
            assert seen.records == []
            await mend()
            return f"`{final['code']}` until mended, then {await self.next_turn(session, None)}"
        assert check(self.home / "sessions", parse_session_id(session)) == []
        every_call_has_one_result_in_order(self.log_bytes(session))
        if "code" in final:
            assert (await self.go_on("another"))[-1]["content"] == "Still here."
            return f"`{final['code']}`; a new session works"
        assert final["content"] == "Still here."
        assert seen.records[-3:] == ["user", "assistant", "usage"]
        made_good = seen.records[:-3]
        assert seen.events() == as_list([*made_good, "content"]), "the channel is told of what was made good"
        if not before:
            return "works, as its first"
        return f"works, after {as_list(made_good)}" if made_good else "works"

    async def row(self, seen: Seen, mend: Callable[[], Awaitable[None]] | None = None) -> dict[str, str]:
        """The cells of the table for a turn that has ended, and for the one after it."""
        cells = [
            as_list(seen.records),
            seen.events(),
            seen.final(self.home),
            NOTHING if seen.status is None else str(seen.status),
            await self.next_turn(seen.session, mend),
        ]
        return dict(zip(COLUMNS[1:], cells, strict=True))


def added(before: bytes, after: bytes) -> bytes:
    """What was added to a log, which only grows."""
    assert after.startswith(before)
    return after[len(before) :]


def types(raw: bytes) -> list[str]:
    """The types of a log's records, but for the one that begins the session."""
    found = [str(json.loads(line)["type"]) for line in raw.splitlines()]
    return found[1:] if found[:1] == ["session_start"] else found


def every_call_has_one_result_in_order(raw: bytes) -> None:
    """Read by hand: the results that follow an assistant record are those of its calls."""
    records = [json.loads(line) for line in raw.splitlines()]
    calls = [(at, call["id"]) for at, record in enumerate(records) for call in record.get("tool_calls", ())]
    made_by = 0
    results = []
    for at, record in enumerate(records):
        if record["type"] == "assistant":
            made_by = at
        elif record["type"] == "tool_result":
            results.append((made_by, record["tool_call_id"]))
    assert results == calls


def request(**body: Any) -> bytes:
    """A turn's request by hand."""
    return framed("turn", **body)


def framed(kind: str, **body: Any) -> bytes:
    """A request of any kind by hand."""
    return scripted_loopd.framed({"v": 1, "kind": kind, "final": True, "body": body})


def bxctl(socket: Path, content: str, session: str | None = None) -> tuple[int, list[dict[str, Any]], str]:
    """Run `bxctl chat --say`: its exit status, the frame bodies that it printed, and its stderr."""
    arguments = ["chat", "--socket", str(socket), "--say", content, "--json"]
    ran = CliRunner().invoke(main, arguments + (["--session", session] if session else []))
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return ran.exit_code, [json.loads(line) for line in ran.stdout.splitlines()], ran.stderr


async def bxctl_on(final: dict[str, Any]) -> int:
    """The exit status of `bxctl chat --say` on the answer to what it cannot send itself."""

    def run() -> int:
        with tempfile.TemporaryDirectory(prefix="bx-", dir="/tmp") as directory:
            answer = scripted_loopd.error(final["code"], final["message"], **final["detail"])
            with scripted_loopd.scripted_loopd(Path(directory) / "s", [answer]):
                status, out, _ = bxctl(Path(directory) / "s", "hi")
                assert out == [final]
                return status

    return await trio.to_thread.run_sync(run)


@frozen
class Place:
    """Where a driver works: a directory with a short path, and the clock."""

    directory: Path
    clock: MockClock

    @asynccontextmanager
    async def whole(
        self, *scripts: Script, text: str = "", time_passes: bool = False, **more: Any
    ) -> AsyncIterator[Whole]:
        """Run a daemon on a server that plays these scripts. `text` is more TOML, `more` is for `running_daemon`."""
        async with scripted_server(*scripts) as server:
            async with running_daemon(self.directory, server.url, text, **more) as daemon:
                async with listening(daemon, self.clock if time_passes else None) as signals:
                    it = Whole(server, daemon, signals)
                    try:
                        yield it
                    finally:  # a row that fails leaves no socket for the next one to be blamed for
                        for peer in it.peers:
                            peer.stream.socket.close()


@contextmanager
def real_deadline() -> Iterator[None]:
    """A deadline in real time, because the clock stands still."""
    token = trio.lowlevel.current_trio_token()
    with trio.CancelScope() as scope:
        timer = threading.Timer(LIMIT_S, lambda: token.run_sync_soon(scope.cancel))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
    assert not scope.cancelled_caught, f"it hangs: {LIMIT_S} s"


# -- the drivers ---------------------------------------------------------------------------------

Driver = Callable[[Place], Awaitable[dict[str, str]]]
DRIVERS: dict[str, Driver] = {}


def ends(name: str) -> Callable[[Driver], Driver]:
    """This is the driver of that row."""

    def keep(driver: Driver) -> Driver:
        assert name not in DRIVERS
        DRIVERS[name] = driver
        return driver

    return keep


def said(name: str, *scripts: Script, calls: Sequence[Response] = (), **more: Any) -> None:
    """A row that takes no more than the server's replies, those of the tools, and a turn of a new session."""

    @ends(name)
    async def drive(place: Place) -> dict[str, str]:
        async with place.whole(*scripts, port=ScriptedPort(list(calls)), **more) as it:
            row = await it.row(await it.say())
            assert len(it.server.completions) == len(scripts) + 1
            return row


said("an answer", reply("Hello."))
said(
    "an answer after tools",
    reply("Let me see.", calls=TWO_CALLS),
    reply("It is noon.", cache_n=14),
    calls=[public("noon"), public("one")],
)
said("an empty answer", reply(None, reasoning="Hm."))
said("an answer with little room left", reply("Noon.", cache_n=0, prompt_n=3272, predicted_n=5))
said("an answer cut at its length", reply("Half an ans", finish_reason="length"))
said(
    "thinking over the cap",
    STREAM_HEAD
    + delta(reasoning_content="Hm.")
    + delta(reasoning_content=BUDGET_MESSAGE)
    + delta(content="So.")
    + ending(),
)
said(
    "thinking over the cap, and the server goes on",
    [Send(STREAM_HEAD + call_delta(0, "a", "clock", "{}") + delta(reasoning_content="x") * 400), Hang()],
    text="[thinking]\ncap = 1\n",
)
said(
    "too many rounds of calls",
    uncounted(calls=[("z", "clock", "{}")]),
    uncounted(calls=TWO_CALLS),
    calls=[public("noon")],
    text="[loop]\ntool_iterations = 1\n",
)
said(
    "the turn takes too long",
    uncounted(calls=TWO_CALLS),
    calls=[hang],
    text="[loop]\nturn_s = 60\n",
    time_passes=True,
)
said(
    "the same calls again",
    reply(calls=[("a", "clock", "{}"), ("b", "clock", "{}"), ("c", "clock", "{}"), ("d", "clock", '{"n":1}')]),
    calls=[public("noon")],
)


@ends("the context is full")
async def context_is_full(place: Place) -> dict[str, str]:
    def refuse(messages: list[Any]) -> bytes | None:
        full = len(messages) > 3
        return error_response(400, "the request exceeds the available context size") if full else None

    async with place.whole() as it:
        await it.go_on(EXISTING)
        it.server.refuse_history = refuse
        return await it.row(await it.say(session=EXISTING))


# -- the server fails ----------------------------------------------------------------------------

TWO_TRIES = "[retry]\nattempts = 2\n"

said("the server says no", error_response(400, "wrong"))
said("the server says no at every try", *[error_response(503, "overloaded")] * 5, time_passes=True)
said("the server goes away before it answers", [Reset()], [Reset()], text=TWO_TRIES, time_passes=True)
said("the stream breaks", HALF_A_REPLY, HALF_A_REPLY, text=TWO_TRIES, time_passes=True)
said("no event stream comes", http_response(200, b"<html>Sign in</html>", "text/html"))
said("silence before the reply", [Hang()], time_passes=True)
said("silence in the reply", *[[Send(HALF_A_REPLY), Hang()]] * 2, time_passes=True)
said("the model loads too long", *[LOADING] * 3, text="[retry]\nloading_s = 2\n", time_passes=True)
said(
    "a reply over its limit",
    [Send(HALF_A_REPLY), Pause(1), Send(delta(content="x" * 300) + ending())],
    text="[inference]\nreply_max_bytes = 256\n",
    time_passes=True,
)
said(
    "an event over its limit",
    [Send(HALF_A_REPLY), Pause(1), Send(delta(content="x" * 300)), Hang()],
    text="[inference]\nevent_max_bytes = 256\n",
    time_passes=True,
)


@ends("the slot stays busy")
async def slot_stays_busy(place: Place) -> dict[str, str]:
    async with place.whole(text="[timeouts]\nbusy_s = 2\n", time_passes=True) as it:
        it.server.slots = [{"id": 0, "is_processing": True}]
        seen = await it.say()
        assert it.server.completions == []
        return await it.row(seen)


# -- others have their say -----------------------------------------------------------------------


@ends("an answer to what steered it")
async def is_steered(place: Place) -> dict[str, str]:
    half = trio.Event()
    async with place.whole() as it:
        await it.go_on(EXISTING)
        it.server.scripts = [
            [Send(HALF_A_REPLY), Until(half), Send(ending())],
            reply("Oh.", cache_n=14),
        ]
        seen: list[Seen] = []

        async def say() -> None:
            seen.append(await it.say(session=EXISTING))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(say)
            await it.server.wait_for_completions(2)
            peer = await it.connect(framed("steer", session=EXISTING, content="rather this"))
            await wait_all_tasks_blocked()
            half.set()
            assert await peer.rest() == [{}]
        assert json.loads(it.server.bodies[2])["messages"][-1] == {"role": "user", "content": "rather this"}
        return await it.row(seen[0])


@ends("an answer after waiting in line")
async def waits_in_line(place: Place) -> dict[str, str]:
    half = trio.Event()
    first_reply: Script = [Send(HALF_A_REPLY), Until(half), Send(ending())]
    async with place.whole(first_reply, reply("Now.", cache_n=14)) as it:
        first = await it.begin("new")
        await first.until("content")
        body = {"session": "new", "content": "next", "resume": True, "when_busy": "wait"}
        second = await it.connect(framed("turn", **body))
        await second.until("queued")
        before = it.log_bytes("new")
        half.set()
        await first.rest()
        bodies = await second.rest()
        records = types(added(before, it.log_bytes("new")))
        assert records[:2] == ["assistant", "usage"], "the turn before it"
        return await it.row(Seen(session="new", records=records[2:], bodies=bodies, status=0))


async def cancelled_as_seen(place: Place, port: ScriptedPort, until: str, *scripts: Script) -> dict[str, str]:
    async with place.whole(*scripts, port=port) as it:
        peer = await it.begin("new")
        await peer.until(until)
        other = await it.connect(framed("cancel", session="new", cause="owner"))
        bodies = await peer.rest()
        seen = it.seen("new", b"", bodies, await bxctl_on(bodies[-1]))
        assert await other.rest() == [{"ending": "cancelled", "cause": "owner", "slot_free": True}]
        return await it.row(seen)


@ends("the owner cancels it in a stream")
async def cancelled_in_a_stream(place: Place) -> dict[str, str]:
    return await cancelled_as_seen(place, ScriptedPort(), "content", [Send(HALF_A_REPLY), Hang()])


@ends("the owner cancels it in a tool")
async def cancelled_in_a_tool(place: Place) -> dict[str, str]:
    return await cancelled_as_seen(place, ScriptedPort([hang]), "tool_call_started", uncounted(calls=TWO_CALLS))


@ends("a newer message takes its place")
async def replaced(place: Place) -> dict[str, str]:
    async with place.whole([Send(HALF_A_REPLY), Hang()], uncounted("Now.")) as it:
        peer = await it.begin("new")
        await peer.until("content")
        body = {"session": "new", "content": "rather this", "resume": True, "when_busy": "replace"}
        newer = await it.connect(framed("turn", **body))
        bodies = await peer.rest()
        assert (await newer.rest())[-1]["content"] == "Now."
        records = types(it.log_bytes("new"))
        assert records[-3:] == ["user", "assistant", "usage"], "those of the newer one"
        status = await bxctl_on(bodies[-1])
        return await it.row(Seen(session="new", records=records[:-3], bodies=bodies, status=status))


# -- the channel leaves, or does not read --------------------------------------------------------


@ends("the channel hangs up in a stream")
async def hangs_up_in_a_stream(place: Place) -> dict[str, str]:
    """Its sending half alone, so that it hears whether it is told anything."""
    async with place.whole([Send(HALF_A_REPLY), Hang()]) as it:
        peer = await it.begin("new")
        await peer.until("content")
        await peer.stream.send_eof()
        seen = it.seen("new", b"", await peer.rest())
        await it.server.completions[0].closed.wait()
        assert it.server.completions[0].hung_up
        return await it.row(seen)


@ends("the channel hangs up in a tool")
async def hangs_up_in_a_tool(place: Place) -> dict[str, str]:
    port = ScriptedPort([hang])
    async with place.whole(reply(calls=TWO_CALLS), port=port) as it:
        peer = await it.begin("new")
        await peer.until("tool_call_started")
        await port.started.wait()
        await peer.stream.send_eof()
        return await it.row(it.seen("new", b"", await peer.rest()))


@ends("the channel takes nothing")
async def takes_nothing(place: Place) -> dict[str, str]:
    # More than a socket takes, and less than stops the scripted server: the daemon can hold the rest.
    flood: Script = [Send(STREAM_HEAD + delta(content="y" * 1200) * 300), Hang()]
    async with place.whole(flood, time_passes=True) as it:
        peer = await it.begin("new")
        await it.server.wait_for_completions(1)
        began = trio.current_time()
        await it.daemon.until_free("new")
        assert trio.current_time() - began == pytest.approx(it.daemon.config.channel.write_timeout_s)
        return await it.row(it.seen("new", b"", await peer.rest()))


@ends("the channel sends too much after its request")
async def sends_too_much(place: Place) -> dict[str, str]:
    async with place.whole([Send(HALF_A_REPLY), Hang()]) as it:
        peer = await it.begin("new")
        await peer.until("content")
        await peer.stream.send_all(b"x" * 65_537)
        bodies = await peer.rest()
        return await it.row(it.seen("new", b"", bodies, await bxctl_on(bodies[-1])))


@ends("Ctrl-C in bxctl")
async def ctrl_c(place: Place) -> dict[str, str]:
    async with place.whole([Send(HALF_A_REPLY), Hang()]) as it:
        command = [sys.executable, "-m", "boxmaker.bxctl", "chat", "--json", "--say", "hi", "--socket", str(it.socket)]
        async with process_of(command) as (process, out, err):
            made = re.match(rb"session (\S+)\n", await err.until(b"\n"))
            assert made
            await out.until(b"content")
            process.send_signal(signal.SIGINT)
            status = await process.wait()
            await out.to_the_end()
        session = made[1].decode()
        await it.daemon.until_free(session)
        await it.server.completions[0].closed.wait()
        assert it.server.completions[0].hung_up
        bodies = [json.loads(line) for line in out.data.splitlines()]
        return await it.row(it.seen(session, b"", bodies, status))


# -- the daemon ends -----------------------------------------------------------------------------


@ends("the daemon shuts down")
async def shuts_down(place: Place) -> dict[str, str]:
    port = ScriptedPort([hang])

    async def stop() -> None:
        await port.started.wait()
        await it.signals.send(signal.SIGTERM)

    async with place.whole(reply(calls=TWO_CALLS), port=port, time_passes=True) as it:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            began = trio.current_time()
            seen = await it.say()
        assert trio.current_time() - began == pytest.approx(it.daemon.config.channel.grace_s)
    async with place.whole() as it:
        return await it.row(seen)


@ends("the daemon shuts down while it waits in line")
async def shuts_down_in_line(place: Place) -> dict[str, str]:
    async with place.whole([Send(HALF_A_REPLY), Hang()]) as it:
        first = await it.begin("new")
        await first.until("content")
        before = it.log_bytes("new")
        body = {"session": "new", "content": "next", "resume": True, "when_busy": "wait"}
        second = await it.connect(framed("turn", **body))
        await second.until("queued")
        began = trio.current_time()
        await it.signals.send(signal.SIGTERM)
        bodies = await second.rest()
        assert trio.current_time() == began, "it has no grace: nothing of it has begun"
        seen = it.seen("new", before, bodies, await bxctl_on(bodies[-1]))
    async with place.whole() as it:
        return await it.row(seen)


@ends("the daemon shuts down before the request is whole")
async def shuts_down_before_the_request(place: Place) -> dict[str, str]:
    async with place.whole() as it:
        peer = await it.connect(request(session="new", content="hi", resume=False)[:-1])
        await wait_all_tasks_blocked()
        await it.signals.send(signal.SIGTERM)
        bodies = await peer.rest()
        seen = it.seen("new", b"", bodies, await bxctl_on(bodies[-1]))
    async with place.whole() as it:
        return await it.row(seen)


@define
class Output:
    """What a process writes."""

    stream: trio.abc.ReceiveStream
    data: bytes = b""

    async def until(self, text: bytes) -> bytes:
        """Read until it has written that."""
        while text not in self.data:
            more = await self.stream.receive_some()
            assert more, f"it ended: {self.data!r}"
            self.data += more
        return self.data

    async def to_the_end(self) -> None:
        """Read until it has closed it."""
        async for more in self.stream:
            self.data += more


@asynccontextmanager
async def process_of(command: list[str]) -> AsyncIterator[tuple[trio.Process, Output, Output]]:
    """A process with its stdout and stderr; it is killed when the block is left, if it still runs."""
    process = await trio.lowlevel.open_process(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    async with process.stdout, process.stderr:
        try:
            yield process, Output(process.stdout), Output(process.stderr)
        finally:
            if process.returncode is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


def serve_until_killed(directory: Path, url: str) -> None:
    """In a process of its own: a daemon on a home, whose tool never ends; it says where it stands."""

    async def never(_: ToolRequest) -> ToolResponse:
        await wait_all_tasks_blocked()  # the channel has been told
        print("in the tool", flush=True)
        await trio.sleep_forever()
        raise AssertionError("sleep_forever returned")

    async def serve() -> None:
        async with running_daemon(directory, url, port=ScriptedPort([never])) as daemon, listening(daemon):
            print("listening", flush=True)
            await trio.sleep_forever()

    trio.run(serve)


async def kill_in(place: Place, process: trio.Process, reached: Awaitable[object]) -> dict[str, str]:
    """Kill a daemon at that place of a turn, and go on with another one on its home."""
    ran: list[tuple[int, list[dict[str, Any]], str]] = []

    async def say() -> None:
        ran.append(await trio.to_thread.run_sync(bxctl, place.directory / "home/run/loop/loop.sock", "hi"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(say)
        await reached
        process.kill()
        assert await process.wait() == -signal.SIGKILL
    ((status, bodies, err),) = ran
    async with place.whole() as it:
        return await it.row(it.seen(err.split()[1], b"", bodies, status))


@ends("`kill -9` in a stream")
async def killed_in_a_stream(place: Place) -> dict[str, str]:
    async with scripted_server([Hang()]) as server:
        async with loopd_serve(write_config(place.directory, server.url)) as loopd:
            return await kill_in(place, loopd.process, server.wait_for_completions(1))


@ends("`kill -9` in a tool")
async def killed_in_a_tool(place: Place) -> dict[str, str]:
    """A daemon of ours: the tools of loopd do not wait."""
    code = "import sys, pathlib, tests.test_endings as m; m.serve_until_killed(pathlib.Path(sys.argv[1]), sys.argv[2])"
    async with scripted_server(reply(calls=TWO_CALLS)) as server:
        command = [sys.executable, "-c", code, str(place.directory), server.url]
        async with process_of(command) as (process, out, _):
            await out.until(b"listening")
            return await kill_in(place, process, out.until(b"in the tool"))


# -- the disk ------------------------------------------------------------------------------------


def failing_at(name: str, number: int, error: int) -> Callable[[str], None]:
    """Let the n-th call of that name fail with an errno."""
    left = [number]

    def before(called: str) -> None:
        left[0] -= called == name
        if called == name and not left[0]:
            raise OSError(error, os.strerror(error))

    return before


@ends("the disk takes no record")
async def disk_takes_no_record(place: Place) -> dict[str, str]:
    async with place.whole(reply("Hello.")) as it:
        await it.go_on(EXISTING)
        it.server.scripts = [reply("Hello.")]
        with kernel_calls(failing_at("fdatasync", 2, errno.ENOSPC)):  # the first is the user's record
            seen = await it.say(session=EXISTING)
        return await it.row(seen)


@ends("the disk takes no new session")
async def disk_takes_no_session(place: Place) -> dict[str, str]:
    async with place.whole() as it:
        with kernel_calls(failing_at("fsync", 2, errno.EIO)):  # when it is in its place already
            seen = await it.say()
        return await it.row(seen)


@ends("`system.md` cannot be read")
async def system_cannot_be_read(place: Place) -> dict[str, str]:
    async with place.whole() as it:
        system = it.daemon.config.baseline.system
        text = system.read_bytes()
        system.write_bytes(b"\xff")
        seen = await it.say()
        system.write_bytes(text)
        return await it.row(seen)


@define
class NoDescriptors:
    """A disk whose process has no file descriptor left, for as long as it says so."""

    none_left: bool = False
    _inline: InlineDisk = field(factory=InlineDisk)

    async def run(self, work: Callable[[], T]) -> T:
        def starved() -> T:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            try:
                return work()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        return await self._inline.run(starved if self.none_left else work)


@ends("the log cannot be opened")
async def log_cannot_be_opened(place: Place) -> dict[str, str]:
    disk = NoDescriptors()
    async with place.whole(disk=disk) as it:
        lay_out(it.home, lines(session=EXISTING), session=EXISTING)
        disk.none_left = True
        seen = await it.say(session=EXISTING)
        disk.none_left = False
        return await it.row(seen)


def refused_by_the_kernel(name: str, called: str) -> None:
    """A row about a log that is there, and that the kernel does not give."""

    @ends(name)
    async def drive(place: Place) -> dict[str, str]:
        async with place.whole() as it:
            lay_out(it.home, lines(session=EXISTING), session=EXISTING)
            with kernel_calls(failing(called, errno.EIO)):
                seen = await it.say(session=EXISTING)
            return await it.row(seen)


refused_by_the_kernel("the log cannot be locked", "flock")
refused_by_the_kernel("the log cannot be read", "pread")


@ends("another program writes to the log")
async def another_program_writes(place: Place) -> dict[str, str]:
    go = trio.Event()

    async def write() -> None:
        await it.server.wait_for_completions(2)
        with it.log(EXISTING).open("ab") as log:
            log.write(b'{"type":"epoch_end","time":"2026-12-01T00:00:00.000Z"}\n')
        go.set()

    async with place.whole() as it, trio.open_nursery() as nursery:
        await it.go_on(EXISTING)
        it.server.scripts = [[Until(go), Send(reply("Hello."))]]
        nursery.start_soon(write)
        return await it.row(await it.say(session=EXISTING))


@ends("the log is damaged")
async def log_is_damaged(place: Place) -> dict[str, str]:
    async with place.whole() as it:
        await it.go_on(EXISTING)
        os.truncate(it.log(EXISTING), it.log(EXISTING).stat().st_size - 1)

        async def mend() -> None:
            arguments = ["session", "repair", EXISTING, "--home", str(it.home)]
            assert CliRunner().invoke(main, arguments).exit_code == 0

        return await it.row(await it.say(session=EXISTING), mend)


@define
class Clock:
    """The daemon's clock, with a fault."""

    broken: bool = False

    def __call__(self) -> Timestamp:
        if self.broken:
            raise ZeroDivisionError("my secret")
        return fixed_now()


@ends("a fault of ours")
async def fault_of_ours(place: Place) -> dict[str, str]:
    now, go = Clock(), trio.Event()

    async def break_it() -> None:
        await it.server.wait_for_completions(1)
        now.broken = True
        go.set()

    async with place.whole([Until(go), Send(reply("Hello."))], now=now) as it, trio.open_nursery() as nursery:
        nursery.start_soon(break_it)
        seen = await it.say()
        now.broken = False
        assert "secret" not in json.dumps(seen.bodies)
        return await it.row(seen)


# -- refused -------------------------------------------------------------------------------------


@ends("refused: another turn has the session")
async def another_turn_has_it(place: Place) -> dict[str, str]:
    go = trio.Event()
    async with place.whole([Until(go), Send(uncounted("First."))]) as it:
        first = await it.begin(EXISTING)
        await it.server.wait_for_completions(1)
        seen = await it.say(session=EXISTING)
        go.set()
        assert (await first.rest())[-1]["content"] == "First."
        return await it.row(seen)


@ends("refused: another program has the log")
async def another_program_has_it(place: Place) -> dict[str, str]:
    async with place.whole() as it:
        await it.go_on(EXISTING)
        with it.log(EXISTING).open("rb") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            seen = await it.say(session=EXISTING)
        return await it.row(seen)


@define
class TakesTheName:
    """A disk on which another program makes each session that was looked for in vain."""

    home: Path
    _inline: InlineDisk = field(factory=InlineDisk)

    async def run(self, work: Callable[[], T]) -> T:
        try:
            return await self._inline.run(work)
        except NoSuchSession as exc:
            lay_out(self.home, lines(session=exc.session), session=exc.session)
            raise


@ends("refused: the session exists")
async def session_exists(place: Place) -> dict[str, str]:
    """bxctl asks for a session, is told that there is none, and begins one: too late."""
    async with place.whole(disk=TakesTheName(place.directory / "home")) as it:
        return await it.row(await it.say(session=EXISTING))


@ends("refused: no such session")
async def no_such_session(place: Place) -> dict[str, str]:
    async with place.whole() as it:
        bodies = await (await it.begin(EXISTING, resume=True)).rest()
        it.server.scripts = [reply("Hello.")]
        status = (await it.say(session="another")).status
        return await it.row(it.seen(EXISTING, b"", bodies, status))


@ends("refused: nothing runs that could be steered")
async def nothing_to_steer(place: Place) -> dict[str, str]:
    async with place.whole() as it:
        await it.go_on(EXISTING)
        before = it.log_bytes(EXISTING)
        bodies = await (await it.connect(framed("steer", session=EXISTING, content="psst"))).rest()
        return await it.row(it.seen(EXISTING, before, bodies, await bxctl_on(bodies[-1])))


@ends("refused: a request over `max_frame`")
async def request_over_max_frame(place: Place) -> dict[str, str]:
    async with place.whole(text="[channel]\nmax_frame = 256\n") as it:
        return await it.row(await it.say("x" * 256))


def refused_by_hand(name: str, raw: bytes) -> None:
    """A row about a request that bxctl cannot send."""

    @ends(name)
    async def drive(place: Place) -> dict[str, str]:
        async with place.whole() as it:
            bodies = await (await it.connect(raw)).rest()
            return await it.row(it.seen("new", b"", bodies, await bxctl_on(bodies[-1])))


refused_by_hand("refused: no frame", b"GET / HTTP/1.1\r\n\r\n")
refused_by_hand("refused: no request", request(session="new", content="hi", resume=0))
refused_by_hand("refused: another version", scripted_loopd.framed({"v": 2, "kind": "turn", "final": True, "body": {}}))


@ends("refused: no whole request within `request_s`")
async def no_whole_request(place: Place) -> dict[str, str]:
    async with place.whole() as it:
        peer = await it.connect(request(session="new", content="hi", resume=False)[:-1])
        await wait_all_tasks_blocked()
        place.clock.jump(it.daemon.config.channel.request_s)
        bodies = await peer.rest()
        return await it.row(it.seen("new", b"", bodies, await bxctl_on(bodies[-1])))


# -- the tests -----------------------------------------------------------------------------------


def as_row(name: str, cells: dict[str, str]) -> str:
    return f"| {name} | {' | '.join(cells.values())} |"


@pytest.mark.parametrize("name", DRIVERS)
async def test_a_turn_ends_as_its_row_says(name: str, mock_clock: MockClock) -> None:
    with tempfile.TemporaryDirectory(prefix="bx-", dir="/tmp") as directory, real_deadline():
        row = await DRIVERS[name](Place(Path(directory), mock_clock))
    assert as_row(name, row) == as_row(name, TABLE.get(name, {}))


def test_every_row_has_a_driver_and_every_driver_a_row() -> None:
    assert list(TABLE) == list(DRIVERS)


# -- is every ending in the table? ---------------------------------------------------------------


def finals() -> list[tuple[str, dict[str, str]]]:
    """Code and detail of every error frame of the table."""
    found = []
    for row in TABLE.values():
        parts = re.fullmatch(r"`(\w+)`(?: `\{(.*)\}`)?", row["final frame"])
        if parts and parts[1] != "turn_done":
            pairs = [pair.split(": ", 1) for pair in (parts[2] or "").split(", ") if pair]
            found.append((parts[1], dict(pairs)))
    return found


def details(code: str, key: str) -> set[str]:
    """Every value that a key of one code's detail has in the table."""
    return {detail[key] for found, detail in finals() if found == code and key in detail}


@cache
def the_code() -> list[tuple[Path, ast.AST]]:
    """Every node of every module, with its file."""
    files = (ROOT / "src" / "boxmaker").rglob("*.py")
    return [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]


def name_of(node: ast.AST) -> str:
    """`x` of `x` and of `module.x`."""
    return str(getattr(node, "id", getattr(node, "attr", "")))


def given(cls: type[WireableError], keyword: str, *, without: str = "") -> set[str]:
    """Every value that a keyword of an error has where it is made, anywhere in the code."""
    found: set[str] = set()
    for file, node in the_code():
        if not isinstance(node, ast.Call) or name_of(node.func) != cls.__name__ or (without and file.match(without)):
            continue
        assert all(argument.arg for argument in node.keywords), f"{file}: cannot be read without running it"
        for argument in node.keywords:
            if argument.arg == keyword:
                value = getattr(argument.value, "value", None)
                assert isinstance(value, str), f"{file}: {keyword} is no constant"
                found.add(value)
    return found


def test_every_code_that_can_be_sent_is_in_the_table() -> None:
    kinds = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, WireableError)]
    sent = {cls.code for cls in kinds if cls is not WireableError}
    assert sent == {code.value for code in ErrorCode} == {code for code, _ in finals()}


def test_errors_for_the_channel_are_declared_in_one_place() -> None:
    kinds = {name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, WireableError)}
    classes = [(file, node) for file, node in the_code() if isinstance(node, ast.ClassDef)]
    found = {file.name for file, node in classes if kinds & {name_of(base) for base in node.bases}}
    assert found == {"errors.py"}


def test_every_limit_of_a_completion_is_in_the_table() -> None:
    assert given(InferenceError, "limit") == details("inference", "limit")


def test_every_limit_of_a_turn_is_in_the_table() -> None:
    declared = set(get_args(get_type_hints(TurnLimit)["limit"]))
    assert given(TurnLimit, "limit") == declared == details("turn_limit", "limit")


def test_every_reason_of_a_cut_is_in_the_table() -> None:
    events = " ".join(row["events"] for row in TABLE.values())
    assert set(get_args(get_type_hints(Cut)["reason"])) == set(re.findall(r"`cut: (\w+)`", events))


def test_everything_that_the_disk_can_refuse_a_turn_is_in_the_table() -> None:
    # session/logs.py is for commands that read logs from outside
    assert given(StorageError, "action", without="session/logs.py") == details("storage", "action")
