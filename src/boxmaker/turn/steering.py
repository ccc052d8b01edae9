"""What a running turn shares with others: texts that join it, why it is cancelled, what its completions cost.

Laws:
* A text is in the log before its sender is told so; a sender that is told anything else has left nothing in it.
* A turn that has decided to end takes no more texts: from then on senders wait for its end.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from attrs import define, field

from boxmaker.proto.channel import CancelCause, Phase
from boxmaker.turn.runtime import Spent


@define(eq=False)
class Note:
    """One text that waits to join; `gone` says whether its sender has left.

    `taken`: it is being written to the log. `settled` is set once `joined` is known.
    """

    content: str
    gone: Callable[[], bool]
    taken: bool = False
    joined: bool = False
    settled: trio.Event = field(factory=trio.Event)


class Steering:
    """The texts that wait for a turn's next boundary, in the order in which they came."""

    def __init__(self) -> None:
        self._notes: list[Note] = []
        self._open = True

    def add(self, content: str, gone: Callable[[], bool] = lambda: False) -> Note | None:
        """Take a text; None when the turn takes no more."""
        if not self._open:
            return None
        note = Note(content, gone)
        self._notes.append(note)
        return note

    def withdraw(self, note: Note) -> None:
        """Forget a text whose sender leaves; no effect on one that is being written."""
        if not note.taken and note in self._notes:
            self._notes.remove(note)

    def take(self) -> list[Note]:
        """Give the texts whose senders are still there; each is to be settled with `joined`, or by `close`."""
        taken = [note for note in self._notes if not note.taken and not note.gone()]
        for note in taken:
            note.taken = True
        return taken

    def joined(self, notes: list[Note]) -> None:
        """They are in the log."""
        for note in notes:
            self._notes.remove(note)
            note.joined = True
            note.settled.set()

    def close(self) -> None:
        """The turn takes no more texts; those that wait have not joined."""
        self._open = False
        for note in self._notes:
            note.settled.set()
        self._notes.clear()


@define(eq=False)
class TurnControl:
    """What a running turn shares with those that steer, cancel and watch it."""

    cause: Callable[[], CancelCause | None] = lambda: None
    """Why it was cancelled, if it was."""
    steering: Steering = field(factory=Steering)
    phase: Phase = "starting"
    used_slot: int | None = None
    """The slot that a request of the turn has gone to, once one has."""
    spent: list[Spent] = field(factory=list)
    """Its completions that are in the log."""
