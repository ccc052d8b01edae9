"""What a turn needs besides its session, and what it leaves to be told of its completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from attrs import frozen

from boxmaker.config import Config
from boxmaker.inference.cause import Evidence
from boxmaker.inference.client import Client
from boxmaker.inference.facts import ServerFacts
from boxmaker.proto.channel import TurnEvent
from boxmaker.proto.ids import SessionId
from boxmaker.proto.time import Timestamp
from boxmaker.tools.port import ToolPort
from boxmaker.tools.registry import Registry

Emit = Callable[[Sequence[TurnEvent]], Awaitable[None]]
"""Takes events for the channel, in order; waits while the channel is slow."""


class SlotKeeper(Protocol):
    """Keeps what a session has in its slot while others use it, and over restarts of the server."""

    async def prepare(self, slot: int, session: SessionId, body: bytes, left: int | None) -> bool:
        """A request goes to an idle slot of ours, gate in hand; True when the slot was used for this.

        `left` tokens were in the slot after the session's last completion, if that is known.

        Cancellation: safe at any point.
        """
        ...

    def completed(self, slot: int, session: SessionId, cached: int | None, left: int | None) -> int | None:
        """It has its completion, with `cached` tokens; `left` are in the slot now. Gives what a restore gave back."""
        ...


@frozen(kw_only=True)
class Runtime:
    """Shared by all turns of the daemon; `keeper` where slots are saved."""

    config: Config
    client: Client
    facts: ServerFacts
    port: ToolPort
    registry: Registry
    now: Callable[[], Timestamp]
    keeper: SlotKeeper | None = None


@frozen(kw_only=True)
class Spent:
    """One completion that is in the log as its number `completion`, and what was seen around it.

    Figures are tokens, None when the server sent none; `prompt_before` is what the completion before it was asked with.
    `body` is its request, kept for a loss alone. `restored` tokens were brought back from the disk before it, if any.
    """

    time: Timestamp
    completion: int
    slot: int
    cached: int | None
    read: int | None
    generated: int | None
    prompt_before: int | None
    expected: int | None
    lost: int | None
    prefill_ms: int | None
    model: str | None
    evidence: Evidence
    body: bytes | None
    restored: int | None = None


async def tell_nobody(_: Sequence[TurnEvent]) -> None:
    """An Emit for a channel that has gone, or is about to."""
