"""The slot gate: a first-come queue in front of one slot of the server.

The server answers a request to a busy slot with silence, and can corrupt the generation that runs
there (`../shared/llama-server.md`, 0.2). So at most one of our requests is on its way to a slot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

OnAhead = Callable[[int], Awaitable[None]]


class _Waiter:
    def __init__(self) -> None:
        self.ahead = 0
        self.holds = False
        self.changed = trio.Event()

    def tell(self, ahead: int) -> None:
        self.ahead = ahead
        self.changed.set()
        self.changed = trio.Event()


class SlotGate:
    """A lock whose waiters know how many are in front of them."""

    def __init__(self) -> None:
        self._held = False
        self._waiters: list[_Waiter] = []

    def acquire_nowait(self) -> bool:
        """Take the gate when it is free and nobody waits; False otherwise."""
        if self._held:
            return False
        self._held = True
        return True

    async def acquire(self, on_ahead: OnAhead) -> None:
        """Take the gate, after those who came before.

        `on_ahead` is told how many are in front (the holder included, ≥ 1) on joining and on every
        change; not at all when the gate is free.

        Cancellation: safe at any point; the place in the queue is given up, and a gate that was
        handed over meanwhile goes to the next.
        """
        if self.acquire_nowait():
            return
        waiter = _Waiter()
        self._waiters.append(waiter)
        waiter.ahead = len(self._waiters)
        told = 0
        try:
            while not waiter.holds:
                if waiter.ahead != told:
                    told = waiter.ahead
                    await on_ahead(told)
                else:
                    await waiter.changed.wait()
        except BaseException:
            if waiter.holds:
                self.release()
            else:
                self._waiters.remove(waiter)
                self._tell_all()
            raise

    def release(self) -> None:
        """Hand the gate to the first waiter, or free it."""
        if not self._waiters:
            self._held = False
            return
        first = self._waiters.pop(0)
        first.holds = True
        first.tell(0)
        self._tell_all()

    def _tell_all(self) -> None:
        for ahead, waiter in enumerate(self._waiters, start=1):
            if waiter.ahead != ahead:
                waiter.tell(ahead)

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return len(self._waiters)


class SlotHold:
    """One turn's place at the gate: held, or given back for a while.

    `prepare` is called before each request to the slot, once that is idle; True says that it has used the slot itself.
    `on_use` is told of each request.
    """

    def __init__(self, gate: SlotGate) -> None:
        self._gate = gate
        self.held = False
        self.prepare: Callable[[], Awaitable[bool]] | None = None
        self.on_use: Callable[[], None] = lambda: None

    def take_nowait(self) -> bool:
        """Take the gate if it is free at once."""
        self.held = self.held or self._gate.acquire_nowait()
        return self.held

    async def take(self, on_ahead: OnAhead) -> None:
        """Take the gate, waiting in line; no effect when it is held already."""
        if not self.held:
            await self._gate.acquire(on_ahead)
            self.held = True

    def give_back(self) -> None:
        """Let the next turn have the slot; no effect when it is not held."""
        if self.held:
            self.held = False
            self._gate.release()
