"""What connections ask for, done: turns, what is said to them and asked about them, and forks.

Laws:
* A turn's session and slot are free before its last frame is given out, and before anybody is told that it is over.
* Nothing here is state that is not in a log or held by an open connection.
"""

from __future__ import annotations

import os
from typing import Any

import trio

from boxmaker import __version__
from boxmaker.channel.stop import Stop
from boxmaker.errors import InferenceError, NoSuchSession, NoTurn
from boxmaker.inference.client import LOOK_S
from boxmaker.inference.retry import is_loading
from boxmaker.loopd.causes import CauseFinder
from boxmaker.loopd.desk import Desk, Place
from boxmaker.loopd.pins import Pins
from boxmaker.proto.channel import (
    Cancel,
    CancelDone,
    Final,
    Fork,
    ForkDone,
    Request,
    ServerStatus,
    SlotStatus,
    Status,
    StatusDone,
    Steer,
    SteerDone,
    Turn,
    TurnDone,
)
from boxmaker.proto.ids import SessionId
from boxmaker.session.baseline import Baseline, assemble_baseline
from boxmaker.session.store import NewSession, Store
from boxmaker.turn.loop import CLEANUP_S, run_turn
from boxmaker.turn.runtime import Emit, Runtime
from boxmaker.turn.steering import TurnControl

SLOT_FREE_S = 5.0
"""How long the server may show a slot as busy that we have left, before a `cancel` says so."""
SLOT_LOOK_S = 0.2
CANCELLED_ENDINGS = frozenset({"cancelled", "shutting_down"})


class TurnService:
    """Answers the requests of all connections; holds what they share."""

    def __init__(self, rt: Runtime, store: Store, causes: CauseFinder, pins: Pins) -> None:
        self._rt = rt
        self._store = store
        self._causes = causes
        self._pins = pins
        self._desk = Desk()

    async def run(self, request: Request, emit: Emit, stop: Stop) -> Final:
        """Do what a request asks for; when it returns or raises, a turn's session and slot are free.

        Raises:
            WireableError: why there is no answer.

        Cancellation: safe at any point.
        """
        match request:
            case Turn():
                return await self._turn(request, emit, stop)
            case Steer():
                return await self._steer(request, stop)
            case Cancel():
                return await self._cancel(request)
            case Fork():
                return await self._fork(request, stop)
            case Status():
                return await self._status()

    async def _turn(self, turn: Turn, emit: Emit, stop: Stop) -> TurnDone:
        rt = self._rt
        control = TurnControl(cause=lambda: stop.cause)
        place = Place(session=turn.session, stop=stop, control=control)
        async with self._desk.place(place, resume=turn.resume, when_busy=turn.when_busy, emit=emit):
            self._causes.turn_arrives()
            await rt.facts.refresh(rt.client, rt.config, rt.registry.core_schemas())
            slot = self._pins.begin(turn.session) if not turn.resume else rt.config.slots.listed[0]
            new = NewSession(slot=slot, baseline=self._baseline)
            try:
                async with self._store.turn(
                    turn.session,
                    resume=turn.resume,
                    new=new,
                    alternate=rt.facts.alternate,
                    gone=stop.gone,
                    pin=lambda began_on: self._pins.pin(turn.session, began_on),
                ) as session:
                    try:
                        outcome = await run_turn(session, rt, turn.content, emit, control)
                    finally:
                        self._pins.over(turn.session)
            finally:
                self._pins.forget(turn.session)
                self._causes.turn_over(turn.session, control.spent)
            place.ending = "turn_done"
        return TurnDone(content=outcome.content, usage=outcome.usage)

    async def _steer(self, steer: Steer, stop: Stop) -> SteerDone:
        """Wait until the text has joined the turn that runs, or until that is over without it."""
        place = self._desk.turn(steer.session)
        if place is None or place.control is None:
            self._must_exist(steer.session)
            raise NoTurn(session=steer.session, ending="idle")
        steering = place.control.steering
        note = steering.add(steer.content, stop.gone)
        if note is not None:
            try:
                await note.settled.wait()
            except trio.Cancelled:
                steering.withdraw(note)
                if not note.taken:
                    raise
                # It is being written. What is in the log is acknowledged, if the sender can still be told.
                with trio.move_on_after(CLEANUP_S, shield=True):
                    await note.settled.wait()
                if not note.joined:
                    raise
            if note.joined:
                return SteerDone()
        await place.over.wait()
        raise NoTurn(session=steer.session, ending=place.ending)

    async def _cancel(self, cancel: Cancel) -> CancelDone:
        place = self._desk.turn(cancel.session)
        if place is None:
            self._must_exist(cancel.session)
            return CancelDone(ending="idle", cause=None, slot_free=True)
        place.stop.cancel(cancel.cause)
        await place.over.wait()
        cause = place.stop.cause if place.ending in CANCELLED_ENDINGS else None
        # A turn that was never let through has nothing to leave: whoever is in the slot is there by right.
        slot = place.control.used_slot if place.control is not None else None
        return CancelDone(ending=place.ending, cause=cause, slot_free=slot is None or await self._slot_is_free(slot))

    async def _slot_is_free(self, slot: int) -> bool:
        """Does the server stop showing a slot as busy within SLOT_FREE_S? True as well where it cannot be asked.

        A turn of ours that is let through has seen the slot free.
        """
        client = self._rt.client
        since = client.looks_begun
        with trio.move_on_after(SLOT_FREE_S):
            while not client.was_idle(slot, since):
                look = await client.look(slot)
                if look.state == "failed":
                    return True
                if look.state == "idle":
                    break
                await trio.sleep(SLOT_LOOK_S)
            return True
        return False

    async def _fork(self, fork: Fork, stop: Stop) -> ForkDone:
        place = Place(session=fork.session, stop=stop, control=None)
        async with self._desk.place(place, resume=True, when_busy="refuse"):
            slot = self._pins.begin(fork.new)
            try:
                at = await self._store.fork(fork.session, fork.from_, fork.new, slot=slot)
                self._pins.pin(fork.new, slot)
                self._pins.over(fork.new)
                self._causes.forked(fork.session, fork.new)
            finally:
                self._pins.forget(fork.new)
            place.ending = "fork_done"
        return ForkDone(session=fork.new, from_=at)

    async def _status(self) -> StatusDone:
        config = self._rt.config
        state, slots = await self._server()
        return StatusDone(
            version=__version__,
            pid=os.getpid(),
            server=ServerStatus(url=config.server.url, state=state),
            slots=tuple(
                SlotStatus(id=one["id"], busy=one["is_processing"], ours=one["id"] in config.slots.listed)
                for one in slots
                if _is_slot(one.get("id")) and type(one.get("is_processing")) is bool
            ),
            sessions=self._desk.status(),
        )

    async def _server(self) -> tuple[Any, list[dict[str, Any]]]:
        """How the server is, and its slots as it lists them; none where it does not."""
        with trio.move_on_after(LOOK_S):
            try:
                answer = await self._rt.client.ask("GET", "/slots")
            except InferenceError:
                return "unreachable", []
            if answer.status != 200:
                return ("loading" if is_loading(answer.error()) else "ready"), []
            return "ready", answer.entries()
        return "unreachable", []

    def _must_exist(self, session: SessionId) -> None:
        if not os.path.lexists(self._store.directory / session):
            raise NoSuchSession(session=session)

    def _baseline(self) -> Baseline:
        rt = self._rt
        return assemble_baseline(rt.config.baseline, rt.config.paths.home, rt.registry.core_schemas())


def _is_slot(value: object) -> bool:
    return type(value) is int and value >= 0
