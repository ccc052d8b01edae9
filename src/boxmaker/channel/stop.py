"""How one connection's request is ended before its time, and by whom.

Laws:
* The first cause wins; whoever asks later is told it.
* A request that was told to stop is not "busy": others wait for its end.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from boxmaker.proto.channel import CancelCause


class Stop:
    """The cancel scope of one request; `left` asks whether its peer has gone."""

    def __init__(self, left: Callable[[], bool] = lambda: False) -> None:
        self.scope = trio.CancelScope()
        self.cause: CancelCause | None = None
        self.in_line = False
        """It waits for another turn's end and has begun nothing."""
        self._left = left

    def cancel(self, cause: CancelCause) -> None:
        """End the request; a cause that comes after another one changes nothing."""
        if self.cause is None:
            self.cause = cause
            self.scope.cancel()

    def gone(self) -> bool:
        """Will nobody hear the answer, or was the request cancelled?"""
        return self.cause is not None or self._left()
