"""Texts that join a running turn: in order, in the log before their senders know, none once it has decided to end."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from boxmaker.channel.client import TurnChannel
from boxmaker.proto import records
from boxmaker.proto.channel import Steer, SteerDone, Steered, ToolCallStarted, TurnDone, WireError
from boxmaker.proto.chat import Content
from boxmaker.proto.frames import Answer, encode_request
from boxmaker.proto.ids import SessionId
from boxmaker.proto.tools import ToolResponse
from boxmaker.session.disk import InlineDisk
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.port import ScriptedPort, hang, public
from boxmaker.testing.server import STREAM_HEAD, Hang, Send, Until, delta, ending, reply, scripted_server
from boxmaker.turn.steering import Steering

Work = TypeVar("Work")
S = SessionId("s")
HALF = STREAM_HEAD + delta(content="So ")
REST = ending(cache_n=None, prompt_n=None, predicted_n=None)


def answer(text: str) -> bytes:
    return reply(text, cache_n=None, prompt_n=None, predicted_n=None)


def calls(*made: tuple[str, str]) -> bytes:
    given = [(name, "clock", arguments) for name, arguments in made]
    return reply(calls=given, cache_n=None, prompt_n=None, predicted_n=None)


async def say(daemon: Daemon, text: str) -> tuple[trio.SocketStream, TurnChannel]:
    """Send a text to the turn of `s`; everything that can happen has happened when it returns."""
    stream = await daemon.connect()
    await stream.send_all(encode_request(Steer(session=S, content=text)))
    await wait_all_tasks_blocked()
    return stream, TurnChannel(stream)


async def final(peer: tuple[trio.SocketStream, TurnChannel]) -> Answer | None:
    async with peer[0]:
        frame = await peer[1].receive()
        assert frame.final
        return frame.answer


async def rest(peer: tuple[trio.SocketStream, TurnChannel]) -> list[Any]:
    found: list[Any] = []
    async with peer[0]:
        while True:
            frame = await peer[1].receive()
            found.append(frame.answer)
            if frame.final:
                return found


def users(daemon: Daemon) -> list[str]:
    return [one.content for one in daemon.log("s") if isinstance(one, records.User)]


def no_turn(found: Answer | None) -> object:
    assert isinstance(found, WireError)
    assert found.code == "no_turn"
    return found.detail["ending"]


def at_noon(go: trio.Event) -> Callable[[object], Awaitable[ToolResponse]]:
    """A call that ends when the test says so."""

    async def wait(_: object) -> ToolResponse:
        await go.wait()
        return public("noon")

    return wait


async def test_texts_join_after_all_results_in_the_order_in_which_they_came(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    go = trio.Event()
    port = ScriptedPort([at_noon(go), public("one")])
    async with scripted_server(calls(("a", "{}"), ("b", '{"n":1}')), answer("Ah.")) as server:
        async with running_daemon(tmp_path, server.url, port=port) as daemon:
            turn = await daemon.open("s", "go", resume=False)
            await port.started.wait()
            first, second = await say(daemon, "one"), await say(daemon, "two")
            go.set()
            assert await final(first) == SteerDone()
            assert await final(second) == SteerDone()
            told = await rest(turn)
            kinds = [type(one).__name__ for one in told]
            assert kinds == [
                "ToolCallStarted", "ToolResult", "ToolCallStarted", "ToolResult", "Steered", "Steered", "Content",
                "TurnDone",
            ]  # fmt: skip
            assert told[4:6] == [Steered(content="one"), Steered(content="two")]
            assert users(daemon) == ["go", "one", "two"]
            roles = [message["role"] for message in server.completions[1].json()["messages"]]
            assert roles == ["system", "user", "assistant", "tool", "tool", "user", "user"]


async def test_a_text_keeps_a_turn_going_that_would_have_ended(tmp_path: Path, autojump_clock: MockClock) -> None:
    half = trio.Event()
    async with scripted_server([Send(HALF), Until(half), Send(REST)], answer("Ah.")) as server:
        async with running_daemon(tmp_path, server.url) as daemon:
            turn = await daemon.open("s", "go", resume=False)
            await server.wait_for_completions(1)
            peer = await say(daemon, "rather this")
            assert users(daemon) == ["go"], "not before the reply is whole"
            half.set()
            assert await final(peer) == SteerDone()
            told = await rest(turn)
            assert told[:3] == [Content(text="So "), Steered(content="rather this"), Content(text="Ah.")]
            assert told[3].content == "Ah."


@pytest.mark.parametrize("first", ["the text", "the end"])
async def test_a_text_and_the_end_of_the_turn_in_both_orders(
    tmp_path: Path, autojump_clock: MockClock, first: str
) -> None:
    """The turn decides to end when its reply is in the log; between that and its end a text is too late."""
    half = trio.Event()
    disk = Gate()
    async with scripted_server([Send(HALF), Until(half), Send(REST)], answer("Ah.")) as server:
        async with running_daemon(tmp_path, server.url, disk=disk) as daemon:
            turn = await daemon.open("s", "go", resume=False)
            await server.wait_for_completions(1)
            await wait_all_tasks_blocked()
            disk.shut()  # the reply's append waits: the turn has not decided yet
            half.set()
            await wait_all_tasks_blocked()
            if first == "the text":
                peer = await say(daemon, "rather this")
                disk.open()
                assert await final(peer) == SteerDone()
            else:
                place = daemon.service._desk.turn(S)
                assert place is not None
                assert place.control is not None
                disk.open()
                await place.over.wait()
                assert place.control.steering.add("too late") is None
                assert no_turn(await final(await say(daemon, "rather this"))) == "idle"
            told = await rest(turn)
            assert isinstance(told[-1], TurnDone)
            assert users(daemon) == (["go", "rather this"] if first == "the text" else ["go"])


class Gate(InlineDisk):
    """A disk that waits while it is shut; work that has begun is finished, as in a thread."""

    def __init__(self) -> None:
        self._left = math.inf
        self._more = trio.Event()

    def shut(self) -> None:
        self._left = 0

    def open(self, works: float = math.inf) -> None:
        """Let it do so many pieces of work."""
        self._left = works
        self._more.set()
        self._more = trio.Event()

    async def run(self, work: Callable[[], Work]) -> Work:
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            while self._left < 1:
                await self._more.wait()
            self._left -= 1
        return work()


@pytest.mark.parametrize("how", ["stop", "leave"])
async def test_a_text_that_is_being_written_is_acknowledged_whatever_comes(
    tmp_path: Path, autojump_clock: MockClock, how: str
) -> None:
    half = trio.Event()
    disk = Gate()
    async with scripted_server([Send(HALF), Until(half), Send(REST)], [Hang()]) as server:
        async with running_daemon(tmp_path, server.url, disk=disk) as daemon:
            turn = await daemon.open("s", "go", resume=False)
            await server.wait_for_completions(1)
            peer = await say(daemon, "rather this")
            disk.shut()
            half.set()
            await wait_all_tasks_blocked()
            disk.open(1)  # the reply is in the log, the text is next
            await wait_all_tasks_blocked()
            assert [note.taken for note in notes(daemon)] == [True]
            if how == "stop":
                daemon.closing.begin()
                daemon.closing.cancel_turns()
            else:
                await turn[0].aclose()
            await wait_all_tasks_blocked()
            disk.open()
            assert await final(peer) == SteerDone()
            assert users(daemon) == ["go", "rather this"]
            if how == "stop":
                told = await rest(turn)
                assert told[-1].code == "shutting_down"


def notes(daemon: Daemon) -> list[Any]:
    place = daemon.service._desk.turn(S)
    assert place is not None
    assert place.control is not None
    return place.control.steering._notes


async def test_a_text_whose_sender_leaves_before_the_boundary_was_never_said(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    half = trio.Event()
    async with scripted_server([Send(HALF), Until(half), Send(REST)]) as server:
        async with running_daemon(tmp_path, server.url) as daemon:
            turn = await daemon.open("s", "go", resume=False)
            await server.wait_for_completions(1)
            stream, _ = await say(daemon, "never mind")
            stream.socket.close()  # the daemon's watcher has not run yet
            half.set()
            told = await rest(turn)
            assert isinstance(told[-1], TurnDone)
            assert users(daemon) == ["go"]


@pytest.mark.parametrize(("how", "ending"), [("cancel", "cancelled"), ("error", "inference"), ("limit", "turn_limit")])
async def test_a_turn_that_ends_early_says_how_to_those_who_wait_to_join(
    tmp_path: Path, autojump_clock: MockClock, how: str, ending: str
) -> None:
    port = ScriptedPort([hang])
    text = "[loop]\nturn_s = 60\n[retry]\nattempts = 1\n[timeouts]\nstall_s = 30\n"
    script = calls(("a", "{}")) if how == "limit" else [Send(HALF), Hang()]
    async with scripted_server(script) as server:
        async with running_daemon(tmp_path, server.url, text, port=port) as daemon:
            turn = await daemon.open("s", "go", resume=False)
            await server.wait_for_completions(1)
            peer = await say(daemon, "psst")
            if how == "cancel":
                await turn[0].aclose()
            assert no_turn(await final(peer)) == ending
            assert daemon.is_free("s"), "it is told when the session is free"
            assert users(daemon) == ["go"]
            await turn[0].aclose()


async def test_the_owner_may_have_a_call_made_again_but_lifts_no_limit(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    go = trio.Event()
    port = ScriptedPort([at_noon(go), public("again"), public("not reached")])
    same = [calls((name, "{}")) for name in "abc"]
    async with scripted_server(*same) as server:
        async with running_daemon(tmp_path, server.url, "[loop]\ntool_iterations = 2\n", port=port) as daemon:
            turn = await daemon.open("s", "go", resume=False)
            await port.started.wait()
            peer = await say(daemon, "look again")
            go.set()
            assert await final(peer) == SteerDone()
            told = await rest(turn)
            assert sum(isinstance(one, ToolCallStarted) for one in told) == 2
            assert told[-1].detail == {"limit": "tool_iterations", "value": 2}
            contents = [one.content for one in daemon.log("s") if isinstance(one, records.ToolResult)]
            assert contents == ["noon", "again", "Not run: the turn's limit of tool calls was reached."]


async def test_nothing_runs_and_no_such_session(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(answer("Hi.")) as server, running_daemon(tmp_path, server.url) as daemon:
        found = await final(await say(daemon, "psst"))
        assert isinstance(found, WireError)
        assert found.code == "no_such_session"
        await daemon.ask("s", "go", resume=False)
        assert no_turn(await final(await say(daemon, "psst"))) == "idle"
        assert users(daemon) == ["go"]


def test_notes_by_hand() -> None:
    steering = Steering()
    gone = False
    one, two = steering.add("one"), steering.add("two", lambda: gone)
    assert one is not None
    assert two is not None
    gone = True
    assert steering.take() == [one], "two's sender has left"
    assert steering.take() == [], "one is being written"
    steering.withdraw(one)
    steering.joined([one])
    assert (one.joined, one.settled.is_set(), two.settled.is_set()) == (True, True, False)
    steering.withdraw(two)
    steering.withdraw(two)
    gone = False
    assert steering.take() == [], "who has withdrawn does not come back"
    three = steering.add("three")
    assert three is not None
    steering.close()
    assert (three.joined, three.settled.is_set()) == (False, True)
    assert steering.add("four") is None
