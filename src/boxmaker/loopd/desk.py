"""The desk of turns: for each session the request that has it, and the connections that wait for it.

Laws:
* A message that waits is a connection that waits: it is nowhere else, and it dies with its connection.
* First come, first served; only `replace` goes first, and only after the running turn has been cancelled.
* A place is handed over, never free in between: whoever is in line cannot be overtaken by who just comes.
* Nobody waits for a session that nobody has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import define, field

from boxmaker.channel.stop import Stop
from boxmaker.errors import SessionBusy, SessionExists, WireableError
from boxmaker.proto.channel import SessionStatus, WhenBusy
from boxmaker.proto.chat import Queued
from boxmaker.proto.ids import SessionId
from boxmaker.turn.runtime import Emit
from boxmaker.turn.steering import TurnControl


@define(eq=False)
class Place:
    """One request's claim on a session, while it waits and while it has it.

    `over` is set, and `ending` is known, once the session is free of it. `control` is None for what is no turn.
    """

    session: SessionId
    stop: Stop
    control: TurnControl | None
    began_s: float = 0.0
    ending: str = ""
    over: trio.Event = field(factory=trio.Event)
    _moved: trio.Event = field(factory=trio.Event)

    def tell(self) -> None:
        """Its place in the line has changed."""
        self._moved.set()
        self._moved = trio.Event()

    async def wait_moved(self) -> None:
        """Wait for the next `tell`. Cancellation: safe at any point."""
        await self._moved.wait()


@define(eq=False)
class _Line:
    has_it: Place
    waiting: list[Place] = field(factory=list)


class Desk:
    """All sessions that a request has now."""

    def __init__(self) -> None:
        self._lines: dict[SessionId, _Line] = {}

    @asynccontextmanager
    async def place(
        self, place: Place, *, resume: bool, when_busy: WhenBusy, emit: Emit | None = None
    ) -> AsyncIterator[None]:
        """Have a session inside the block, which says in `place.ending` how it ended if by no exception.

        Waits as `when_busy` says, and in any case for a turn that is ending because its channel has gone or because
        it was cancelled. `emit` is told how many are in front, on joining and on every change.

        Raises:
            SessionBusy, SessionExists: a live request has the session, and this one may not wait; nothing was changed.

        Cancellation: safe at any point; the place in the line is given up.
        """
        await self._take(place, resume, when_busy, emit)
        try:
            yield
        except WireableError as exc:
            place.ending = exc.code
            raise
        except Exception:
            place.ending = "internal"
            raise
        finally:
            self._give_back(place)

    async def _take(self, place: Place, resume: bool, when_busy: WhenBusy, emit: Emit | None) -> None:
        line = self._lines.get(place.session)
        if line is None:
            place.began_s = trio.current_time()
            self._lines[place.session] = _Line(place)
            return
        live = not all(other.stop.gone() for other in (line.has_it, *line.waiting))
        if live and not resume:
            raise SessionExists(session=place.session)
        if live and when_busy == "refuse":
            raise SessionBusy(session=place.session)
        if when_busy == "replace":
            if line.has_it.control is not None:  # a fork takes no time
                line.has_it.stop.cancel("replaced")
            line.waiting.insert(0, place)
        else:
            line.waiting.append(place)
        self._tell_all(line)
        told = 0
        place.stop.in_line = True
        try:
            while line.has_it is not place:
                ahead = line.waiting.index(place) + 1 if place in line.waiting else told
                if emit is not None and when_busy != "refuse" and ahead != told:
                    told = ahead
                    await emit([Queued(ahead=ahead)])
                else:
                    await place.wait_moved()
        except BaseException:
            if line.has_it is place:
                self._give_back(place)
            elif place in line.waiting:
                line.waiting.remove(place)
                self._tell_all(line)
            raise
        finally:
            place.stop.in_line = False

    def _give_back(self, place: Place) -> None:
        """Hand the session to the first in line who is still there, or free it; then those who asked are told."""
        line = self._lines[place.session]
        while line.waiting and line.waiting[0].stop.gone():
            line.waiting.pop(0)  # its own task finds out that it has left
        if line.waiting:
            line.has_it = line.waiting.pop(0)
            line.has_it.began_s = trio.current_time()
            line.has_it.tell()
            self._tell_all(line)
        else:
            del self._lines[place.session]
        if not place.ending:
            place.ending = "shutting_down" if place.stop.cause == "shutdown" else "cancelled"
        if place.control is not None:
            place.control.steering.close()
        place.over.set()

    def _tell_all(self, line: _Line) -> None:
        for place in line.waiting:
            place.tell()

    def turn(self, session: SessionId) -> Place | None:
        """The turn that has a session, if one does."""
        line = self._lines.get(session)
        return line.has_it if line is not None and line.has_it.control is not None else None

    def status(self) -> tuple[SessionStatus, ...]:
        """What runs, and how many wait for it, by session."""
        now = trio.current_time()
        return tuple(
            SessionStatus(
                session=session,
                phase="ending" if line.has_it.stop.cause is not None else line.has_it.control.phase,
                age_ms=int((now - line.has_it.began_s) * 1000),
                waiting=len(line.waiting),
            )
            for session, line in sorted(self._lines.items())
            if line.has_it.control is not None
        )
