"""Which slot each session has, when several slots are ours; pure.

Laws:
* A session keeps its slot while that is listed.
* A new session takes the slot that was used least recently, the first listed of those that were never used, and one
  where no turn runs or waits before all others: two sessions share a slot only when every slot has one.
* A turn uses its slot from its begin to its end. A session that could not be begun has used nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from boxmaker.proto.ids import SessionId


class Pins:
    """The slots that are `listed`; `known` are sessions of before with the slots they began on, the last used last.

    The rest is in memory alone: after a restart a session has the slot that its log names again, if it is listed.
    """

    def __init__(self, listed: Sequence[int], known: Iterable[tuple[SessionId, int]] = ()) -> None:
        self._listed = tuple(listed)
        self._slots: dict[SessionId, tuple[int, int]] = {}
        """Of each session the slot, and which use of any slot was its last."""
        self._before: dict[SessionId, int] = {}
        """Of each session that is being begun, which use was its slot's last before."""
        self._used = dict.fromkeys(self._listed, 0)
        self._turns: Counter[int] = Counter()
        self._running: dict[SessionId, int] = {}
        self._uses = 0
        for session, slot in known:
            if slot in self._used:
                self._use(session, slot)

    def begin(self, session: SessionId) -> int:
        """Give a slot to a session that is about to be begun; `pin` it when it is there, `forget` it when it fails."""
        if session in self._slots:  # there is one: that it cannot be begun again is found out by who tries
            return self._slots[session][0]
        slot = self._least_recent()
        self._before[session] = self._used[slot]
        self._use(session, slot)
        return slot

    def forget(self, session: SessionId) -> None:
        """The session was not begun: its slot counts as used when it was before; no effect on one that is there."""
        before = self._before.pop(session, None)
        if before is not None:
            slot, use = self._slots.pop(session)
            if self._used[slot] == use:  # nobody has used it meanwhile
                self._used[slot] = before

    def pin(self, session: SessionId, began_on: int) -> int:
        """The slot of a session for the turn that it begins now; its log says that it began on `began_on`.

        `over` ends the turn.
        """
        self._before.pop(session, None)
        slot, _ = self._slots.get(session, (began_on, 0))
        if slot not in self._used:
            slot = self._least_recent()
        self._use(session, slot)
        self._turns[slot] += 1
        self._running[session] = slot
        return slot

    def over(self, session: SessionId) -> None:
        """The session's turn has ended; no effect when none had begun."""
        slot = self._running.pop(session, None)
        if slot is not None:
            self._turns[slot] -= 1
            self._use(session, slot)

    def _least_recent(self) -> int:
        return min(self._listed, key=lambda slot: (self._turns[slot], self._used[slot]))

    def _use(self, session: SessionId, slot: int) -> None:
        self._uses += 1
        self._used[slot] = self._uses
        self._slots[session] = (slot, self._uses)
