"""Who has a session and who waits: order, every cause of a cancel, each race in both orders; through connections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from boxmaker.channel.client import TurnChannel
from boxmaker.channel.stop import Stop
from boxmaker.errors import ChannelClosed
from boxmaker.loopd.desk import Desk, Place
from boxmaker.proto import channel
from boxmaker.proto.channel import CancelDone, ForkDone, Request, StatusDone, TurnDone, WhenBusy, WireError
from boxmaker.proto.chat import Queued
from boxmaker.proto.frames import Answer, encode_request
from boxmaker.proto.ids import SessionId
from boxmaker.session.store import BASELINE_NAME, LOG_NAME
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.port import ScriptedPort, hang
from boxmaker.testing.server import (
    STREAM_HEAD,
    Hang,
    Script,
    Send,
    Until,
    delta,
    ending,
    error_response,
    reply,
    scripted_server,
)
from boxmaker.turn.runtime import Emit
from boxmaker.turn.steering import TurnControl

S = SessionId("s")
HALF = STREAM_HEAD + delta(content="So ")
REST = ending(cache_n=None, prompt_n=None, predicted_n=None)


def answer(text: str) -> bytes:
    return reply(text, cache_n=None, prompt_n=None, predicted_n=None)


@define(eq=False)
class Peer:
    stream: trio.SocketStream
    channel: TurnChannel
    answers: list[Answer] = field(factory=list)

    async def read(self) -> None:
        async with self.stream:
            try:
                while True:
                    found = (await self.channel.receive()).answer
                    assert found is not None
                    self.answers.append(found)
            except (ChannelClosed, trio.ClosedResourceError):
                pass

    @property
    def ahead(self) -> list[int]:
        return [one.ahead for one in self.answers if isinstance(one, Queued)]

    @property
    def final(self) -> Any:
        return self.answers[-1] if self.answers else None


@define
class Room:
    daemon: Daemon
    nursery: trio.Nursery

    async def ask(self, request: Request) -> Peer:
        """Send a request; everything that can happen has happened when this returns."""
        stream = await self.daemon.connect()
        peer = Peer(stream, TurnChannel(stream))
        await stream.send_all(encode_request(request))
        self.nursery.start_soon(peer.read)
        await wait_all_tasks_blocked()
        return peer

    async def turn(self, content: str, when_busy: WhenBusy = "refuse", *, resume: bool = True) -> Peer:
        return await self.ask(channel.Turn(session=S, content=content, resume=resume, when_busy=when_busy))

    async def cancel(self, session: str = "s") -> Peer:
        return await self.ask(channel.Cancel(session=SessionId(session), cause="owner"))

    def users(self) -> list[str]:
        lines = (self.daemon.store.directory / "s" / LOG_NAME).read_bytes().splitlines()
        return [record["content"] for record in map(json.loads, lines) if record["type"] == "user"]


async def test_first_come_first_served_and_each_is_told_its_place(tmp_path: Path, autojump_clock: MockClock) -> None:
    halves = [trio.Event() for _ in range(3)]
    scripts = [[Send(HALF), Until(half), Send(REST)] for half in halves]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            one = await room.turn("one", resume=False)
            two = await room.turn("two", "wait")
            three = await room.turn("three", "wait")
            four = await room.turn("four", "wait")
            assert (two.ahead, three.ahead, four.ahead) == ([1], [2], [3])
            assert room.users() == ["one"]
            await three.stream.aclose()
            await wait_all_tasks_blocked()
            assert (two.ahead, four.ahead) == ([1], [3, 2]), "told of the change, and only who it concerns"
            for half in halves:
                half.set()
                await wait_all_tasks_blocked()
            assert [type(peer.final) for peer in (one, two, four)] == [TurnDone] * 3
            assert four.ahead == [3, 2, 1]
            assert room.users() == ["one", "two", "four"]


async def test_replace_cancels_what_runs_and_goes_ahead_of_those_that_wait(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scripts: list[Any] = [[Send(HALF), Hang()], answer("r"), answer("w")]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            one = await room.turn("one", resume=False)
            waits = await room.turn("waits", "wait")
            replaces = await room.turn("replaces", "replace")
            assert isinstance(one.final, WireError)
            assert (one.final.code, one.final.detail) == ("cancelled", {"cause": "replaced"})
            assert isinstance(replaces.final, TurnDone)
            assert isinstance(waits.final, TurnDone)
            assert room.users() == ["one", "replaces", "waits"]


@pytest.mark.parametrize("when_busy", ["wait", "replace"])
async def test_a_turn_that_begins_a_session_neither_waits_nor_replaces(
    tmp_path: Path, autojump_clock: MockClock, when_busy: WhenBusy
) -> None:
    async with scripted_server([Send(HALF), Hang()]) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            one = await room.turn("one", resume=False)
            other = await room.turn("other", when_busy, resume=False)
            assert other.final.code == "session_exists"
            assert not isinstance(one.final, WireError), "what runs was not touched"
            nursery.cancel_scope.cancel()


async def test_who_just_comes_does_not_overtake_who_waits(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Not even while the place is handed over: the turn that runs has gone, one waits, another comes."""
    scripts: list[Any] = [[Send(HALF), Hang()], answer("w")]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            one = await room.turn("one", resume=False)
            waits = await room.turn("waits", "wait")
            one.stream.socket.shutdown(2)  # no step of the loop between this and the next
            stream = await daemon.connect()
            comes = Peer(stream, TurnChannel(stream))
            await stream.send_all(encode_request(channel.Turn(session=S, content="comes", resume=True)))
            nursery.start_soon(comes.read)
            await wait_all_tasks_blocked()
            assert comes.final.code == "session_busy"
            assert isinstance(waits.final, TurnDone)


async def test_a_place_is_not_given_to_who_has_left(tmp_path: Path, autojump_clock: MockClock) -> None:
    half = trio.Event()
    scripts: list[Any] = [[Send(HALF), Until(half), Send(REST)], answer("three")]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            await room.turn("one", resume=False)
            two = await room.turn("two", "wait")
            three = await room.turn("three", "wait")
            half.set()
            two.stream.socket.shutdown(2)
            await wait_all_tasks_blocked()
            assert isinstance(three.final, TurnDone)
            assert room.users() == ["one", "three"]


@pytest.mark.parametrize("first", ["the place", "the hang-up"])
async def test_a_place_and_the_hang_up_of_who_waits_for_it_in_both_orders(
    tmp_path: Path, autojump_clock: MockClock, first: str
) -> None:
    """Who is handed the place and cancelled before it runs hands it on, and those who ask are told an ending."""
    scripts: list[Any] = [[Send(HALF), Hang()], answer("three")]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            await room.turn("one", resume=False)
            await room.turn("two", "wait")
            three = await room.turn("three", "wait")
            line = daemon.service._desk._lines[S]
            one, two = line.has_it, line.waiting[0]
            if first == "the hang-up":
                two.stop.cancel("disconnect")
            one.stop.cancel("owner")
            while line.has_it is one:
                await trio.lowlevel.checkpoint()
            assert (line.has_it is two) == (first == "the place")
            two.stop.cancel("disconnect")
            await wait_all_tasks_blocked()
            assert two.ending == ("cancelled" if first == "the place" else "")
            assert isinstance(three.final, TurnDone)
            assert room.users() == ["one", "three"]


async def test_who_is_cancelled_while_it_is_told_its_place_hands_it_on(autojump_clock: MockClock) -> None:
    """Its channel is slow: it is handed the session in the middle of being told that one is ahead."""
    desk = Desk()
    one, two, three = (Place(session=S, stop=Stop(), control=TurnControl()) for _ in range(3))

    async def have(place: Place, emit: Emit) -> None:
        with place.stop.scope:
            async with desk.place(place, resume=True, when_busy="wait", emit=emit):
                await trio.sleep_forever()

    async def slow(_: object) -> None:
        await trio.sleep_forever()

    async def quick(_: object) -> None:
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for place, emit in ((one, quick), (two, slow), (three, quick)):
            nursery.start_soon(have, place, emit)
            await wait_all_tasks_blocked()
        one.stop.cancel("owner")
        await wait_all_tasks_blocked()
        assert desk.turn(S) is two
        two.stop.cancel("disconnect")
        await wait_all_tasks_blocked()
        assert desk.turn(S) is three
        assert (two.ending, two.over.is_set()) == ("cancelled", True)
        three.stop.cancel("owner")
    assert desk.turn(S) is None
    assert desk.status() == ()


# -- cancel --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["stream", "tool", "slot"])
async def test_a_cancel_is_answered_when_the_turn_is_over(
    tmp_path: Path, autojump_clock: MockClock, place: str
) -> None:
    port = ScriptedPort([hang])
    script: Any = reply(calls=[("a", "clock", "{}")]) if place == "tool" else [Send(HALF), Hang()]
    async with scripted_server(script) as server, running_daemon(tmp_path, server.url, port=port) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            hold = daemon.client.hold(0)
            if place == "slot":
                assert hold.take_nowait()
            one = await room.turn("one", resume=False)
            other = await room.cancel()
            assert other.answers == [CancelDone(ending="cancelled", cause="owner", slot_free=True)]
            assert daemon.is_free("s")
            assert one.final.detail == {"cause": "owner"}
            hold.give_back()


async def test_nothing_to_cancel(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(answer("Hi.")) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            await room.turn("one", resume=False)
            assert (await room.cancel()).final == CancelDone(ending="idle", cause=None, slot_free=True)
            assert (await room.cancel("nope")).final.code == "no_such_session"


@pytest.mark.parametrize("busy_s", [4.0, 6.0])
async def test_a_slot_that_stays_busy_is_said(tmp_path: Path, autojump_clock: MockClock, busy_s: float) -> None:
    async with scripted_server([Send(HALF), Hang()]) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            await room.turn("one", resume=False)
            server.slots = [{"id": 0, "is_processing": True}]
            other = await room.cancel()
            began = trio.current_time()
            assert other.answers == []
            await trio.sleep(busy_s)
            server.slots = [{"id": 0, "is_processing": False}]
            await trio.sleep(1)
            assert other.final == CancelDone(ending="cancelled", cause="owner", slot_free=busy_s < 5)
            assert trio.current_time() - began == pytest.approx(busy_s + 1)


@pytest.mark.parametrize("slots", [error_response(404, "no"), error_response(500, "no")])
async def test_a_server_that_cannot_be_asked_is_taken_to_be_free(
    tmp_path: Path, autojump_clock: MockClock, slots: bytes
) -> None:
    async with scripted_server([Send(HALF), Hang()]) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            await room.turn("one", resume=False)
            server.slots = slots
            assert (await room.cancel()).final.slot_free is True


@pytest.mark.parametrize("first", ["cancel", "end"])
async def test_a_cancel_and_the_end_of_the_turn_in_both_orders(
    tmp_path: Path, autojump_clock: MockClock, first: str
) -> None:
    half = trio.Event()
    script = [Send(HALF), Until(half), Send(REST)]
    async with scripted_server(script) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            one = await room.turn("one", resume=False)
            if first == "end":
                half.set()
                await wait_all_tasks_blocked()
            other = await room.cancel()
            half.set()
            await wait_all_tasks_blocked()
            assert other.final.ending == ("idle" if first == "end" else "cancelled")
            assert isinstance(one.final, TurnDone) == (first == "end")


async def test_a_turn_that_ends_by_itself_after_its_cancel_keeps_its_answer(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Its last checkpoint was behind it: the cancel is answered with `turn_done`, and no cause."""
    async with scripted_server([Send(HALF), Hang()]) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            await room.turn("one", resume=False)
            place = daemon.service._desk.turn(S)
            assert place is not None
            place.ending = "turn_done"  # as `_turn` leaves it when nothing more is waited for
            assert (await room.cancel()).final == CancelDone(ending="turn_done", cause=None, slot_free=True)


CAUSES = ["owner", "replaced", "disconnect", "shutdown"]


@pytest.mark.parametrize("second", CAUSES)
@pytest.mark.parametrize("first", CAUSES)
async def test_the_first_cause_wins_and_later_askers_are_told_it(
    tmp_path: Path, autojump_clock: MockClock, first: str, second: str
) -> None:
    async with scripted_server([Send(HALF), Hang()], [Hang()]) as server:
        async with running_daemon(tmp_path, server.url) as daemon, trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            await room.turn("one", resume=False)
            place = daemon.service._desk.turn(S)
            assert place is not None
            place.stop.cancel(first)  # type: ignore[arg-type]  # one of the causes
            place.stop.cancel(second)  # type: ignore[arg-type]
            asked = await room.cancel()
            assert asked.final.cause == first
            assert asked.final.ending == ("shutting_down" if first == "shutdown" else "cancelled")


async def test_a_peer_that_takes_nothing_is_told_of_as_such(tmp_path: Path, autojump_clock: MockClock) -> None:
    flood = [Send(STREAM_HEAD + delta(content="y" * 1200) * 300), Hang()]
    async with scripted_server(flood) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            stream, _ = await daemon.open("s", "hi", resume=False)
            await server.wait_for_completions(1)
            place = daemon.service._desk.turn(S)
            assert place is not None
            await place.over.wait()
            assert (place.ending, place.stop.cause) == ("cancelled", "stalled_channel")
            await stream.aclose()
            del room


async def test_a_cancel_leaves_those_that_wait(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts: list[Any] = [[Send(HALF), Hang()], answer("two")]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            await room.turn("one", resume=False)
            two = await room.turn("two", "wait")
            asked = await room.cancel()
            assert asked.final == CancelDone(ending="cancelled", cause="owner", slot_free=True)
            assert isinstance(two.final, TurnDone)


@pytest.mark.parametrize("when", ["begin", "end of the grace"])
async def test_who_waits_in_line_has_no_grace_and_who_runs_has(
    tmp_path: Path, autojump_clock: MockClock, when: str
) -> None:
    async with scripted_server([Send(HALF), Hang()]) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            one = await room.turn("one", resume=False)
            two = await room.turn("two", "wait")
            daemon.closing.begin()
            await wait_all_tasks_blocked()
            assert two.final.code == "shutting_down"
            assert not isinstance(one.final, WireError)
            if when != "begin":
                daemon.closing.cancel_turns()
                await daemon.closing.wait_no_turns()
                await wait_all_tasks_blocked()
                assert one.final.code == "shutting_down"
            nursery.cancel_scope.cancel()


# -- several slots -------------------------------------------------------------------------------


async def test_a_new_session_does_not_wait_while_a_slot_is_free(tmp_path: Path, autojump_clock: MockClock) -> None:
    half = trio.Event()
    scripts: list[Script] = [[Send(HALF), Until(half), Send(REST)], answer("two"), answer("three"), answer("four")]
    config = "[slots]\nmain = [0, 1]\n"
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url, config) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            await room.turn("one", resume=False)
            for session in ("b", "c"):
                await room.ask(channel.Turn(session=SessionId(session), content="?", resume=False))
            await room.ask(channel.Fork(session=SessionId("c"), from_=None, new=SessionId("f")))
            await room.ask(channel.Turn(session=SessionId("d"), content="?", resume=False))
            assert [json.loads(body)["id_slot"] for body in server.bodies] == [0, 1, 1, 1]
            half.set()


# -- fork and status -----------------------------------------------------------------------------


async def test_a_fork_goes_on_from_its_answer_as_a_byte_extension(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [answer(text) for text in ("one", "two", "three", "other")]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            for number, text in enumerate(("1", "2", "3")):
                await room.turn(text, resume=number > 0)
            before = (daemon.store.directory / "s" / LOG_NAME).read_bytes()
            done = await room.ask(channel.Fork(session=S, from_=2, new=SessionId("f")))
            assert done.answers == [ForkDone(session=SessionId("f"), from_=2)]
            await room.ask(channel.Turn(session=SessionId("f"), content="else", resume=True))
            parent, child = (daemon.store.directory / name for name in "sf")
            assert (parent / LOG_NAME).read_bytes() == before, "the old session was not touched"
            assert (child / BASELINE_NAME).read_bytes() == (parent / BASELINE_NAME).read_bytes()
            old, new = before.splitlines(), (child / LOG_NAME).read_bytes().splitlines()
            assert new[1:7] == old[1:7]
            assert json.loads(new[0])["session"] == "f"
            assert json.loads(new[7])["content"] == "else"
            asked_at_2 = server.bodies[1].partition(b'],"tools":')[0]
            assert server.bodies[3].startswith(asked_at_2)
            assert (child.stat().st_mode & 0o777, (child / LOG_NAME).stat().st_mode & 0o777) == (0o700, 0o600)


async def test_what_a_fork_is_refused_for(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(answer("one"), [Send(HALF), Hang()]) as server:
        async with running_daemon(tmp_path, server.url) as daemon, trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            new = SessionId("f")

            async def refused(session: str, at: int | None, to: SessionId = new) -> str:
                found = (await room.ask(channel.Fork(session=SessionId(session), from_=at, new=to))).final
                assert isinstance(found, WireError)
                return str(found.code.value)

            await room.turn("one", resume=False)
            assert await refused("nope", None) == "no_such_session"
            assert await refused("s", None, S) == "session_exists"
            assert await refused("s", 2) == "bad_request"
            await room.turn("two")
            assert await refused("s", None) == "session_busy"
            assert sorted(one.name for one in daemon.store.directory.iterdir()) == ["s"]
            nursery.cancel_scope.cancel()


async def test_what_the_daemon_says_of_itself(tmp_path: Path, autojump_clock: MockClock) -> None:
    port = ScriptedPort([hang])
    async with scripted_server(reply(calls=[("a", "clock", "{}")])) as server:
        async with running_daemon(tmp_path, server.url, port=port) as daemon, trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            idle = (await room.ask(channel.Status())).final
            assert isinstance(idle, StatusDone)
            assert idle.sessions == ()
            await room.turn("one", resume=False)
            await room.turn("two", "wait")
            await room.ask(channel.Turn(session=SessionId("other"), content="x", resume=False))
            server.slots = [{"id": 0, "is_processing": True}, {"id": 1, "is_processing": False}, {"id": -1}, 5]
            await trio.sleep(2.5)
            found = (await room.ask(channel.Status())).final
            assert isinstance(found, StatusDone)
            assert found.server == channel.ServerStatus(url=server.url, state="ready")
            assert [(slot.id, slot.busy, slot.ours) for slot in found.slots] == [(0, True, True), (1, False, False)]
            assert [(one.session, one.phase, one.age_ms, one.waiting) for one in found.sessions] == [
                ("other", "waiting", 2500, 0),
                ("s", "tools", 2500, 1),
            ]
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("slots", "state"),
    [
        (error_response(503, "Loading model", "unavailable_error"), "loading"),
        (error_response(404, "no"), "ready"),
        ({"not": "a list"}, "ready"),
    ],
)
async def test_a_server_that_lists_no_slots(tmp_path: Path, autojump_clock: MockClock, slots: Any, state: str) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            server.slots = slots
            found = (await Room(daemon, nursery).ask(channel.Status())).final
            assert (found.server.state, found.slots) == (state, ())


async def test_a_server_that_is_away_or_silent_is_unreachable(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:

            async def silent(_: str) -> None:
                await trio.sleep_forever()

            server.on_probe = silent
            peer = await Room(daemon, nursery).ask(channel.Status())
            await trio.sleep(6)
            assert peer.final.server.state == "unreachable"
    async with running_daemon(tmp_path, server.url) as daemon, trio.open_nursery() as nursery:
        peer = await Room(daemon, nursery).ask(channel.Status())
        assert peer.final.server.state == "unreachable"


async def test_a_turn_that_was_never_let_through_leaves_no_slot_behind(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The slot is busy with another turn of ours, by right."""
    async with scripted_server([Send(HALF), Hang()]) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            await room.ask(channel.Turn(session=SessionId("other"), content="x", resume=False))
            server.slots = [{"id": 0, "is_processing": True}]
            await room.turn("one", resume=False)
            began = trio.current_time()
            found = await room.cancel()
            assert found.final == CancelDone(ending="cancelled", cause="owner", slot_free=True)
            assert trio.current_time() == began
            nursery.cancel_scope.cancel()


async def test_the_age_of_a_turn_begins_when_it_is_handed_the_session(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Asked for in the very moment of it, before the turn itself has come to run."""
    desk = Desk()
    first, second = (Place(session=S, stop=Stop(), control=TurnControl()) for _ in range(2))
    ages: list[int] = []
    await trio.sleep(100)

    async def wait() -> None:
        async with desk.place(second, resume=True, when_busy="wait"):
            pass

    async with trio.open_nursery() as nursery:
        async with desk.place(first, resume=True, when_busy="refuse"):
            nursery.start_soon(wait)
            await trio.sleep(7)
            ages += [one.age_ms for one in desk.status()]
        ages += [one.age_ms for one in desk.status()]
    assert ages == [7000, 0]


async def test_a_turn_is_with_the_model_once_its_request_has_left(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server([Hang()]) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            phases = []
            server.slots = [{"id": 0, "is_processing": True}]
            await room.turn("one", resume=False)
            for _ in range(2):
                found = (await room.ask(channel.Status())).final
                assert isinstance(found, StatusDone)
                phases += [one.phase for one in found.sessions]
                server.slots = [{"id": 0, "is_processing": False}]
                await trio.sleep(5)
            assert phases == ["waiting", "model"]
            nursery.cancel_scope.cancel()


async def test_a_refused_fork_forgets_nothing_of_what_is_kept(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(answer("one")) as server, running_daemon(tmp_path, server.url) as daemon:
        async with trio.open_nursery() as nursery:
            room = Room(daemon, nursery)
            await room.turn("one", resume=False)
            store = daemon.store
            kept, counted = dict(store._kept), store._kept_bytes
            assert counted > 0
            for _ in range(3):
                assert (await room.ask(channel.Fork(session=S, from_=None, new=S))).final.code == "session_exists"
                assert (await room.turn("two", resume=False)).final.code == "session_exists"
            assert (store._kept, store._kept_bytes) == (kept, counted)
