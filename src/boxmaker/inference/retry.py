"""Which failure is tried again, and when; pure.

Laws:
* Time and randomness come in as arguments.
* A request that did not fit, or that the server calls wrong, is never sent again.

Source: design.md section 7; M2a; `../shared/cases/32`, `34`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TypeAlias

from attrs import define, field, frozen

from boxmaker.config import Retry
from boxmaker.errors import InferenceError

RETRIED_STATUSES = frozenset({408, 429, 502, 503, 504})

_FULL_WORDINGS = re.compile(
    r"exceeds the available context size"
    r"|context size has been exceeded"
    r"|context shift is disabled"
    r"|maximum context length"
    r"|exceeds? (?:the )?(?:model'?s )?context (?:length|window|size)",
    re.IGNORECASE,
)


def is_context_full(error: InferenceError) -> bool:
    """Tell the error that says "the prompt does not fit" from all others, in every wording known.

    Task 06's own test comes first: status 400 with the type `exceed_context_size_error`.
    """
    if error.kind != "http" or error.status is None:
        return False
    if error.error_type == "exceed_context_size_error" or error.error_code == "context_length_exceeded":
        return True
    return error.status in (400, 413, 500) and bool(_FULL_WORDINGS.search(error.server_message))


def is_loading(error: InferenceError) -> bool:
    """Tell a model that is still being loaded: that is waited for, and is no try."""
    return error.status == 503 and (error.error_type == "unavailable_error" or error.server_message == "Loading model")


@frozen
class Again:
    """Try again after that many milliseconds."""

    after_ms: int


@frozen
class GiveUp:
    """The failure is final."""


Decision: TypeAlias = Again | GiveUp


@define
class RetryPolicy:
    """The tries of one completion.

    `uniform` gives a number between its two arguments (full jitter), `now_s` is seconds since the epoch,
    for a Retry-After that is a date.
    """

    config: Retry
    uniform: Callable[[float, float], float]
    now_s: Callable[[], float]
    tries: int = field(default=0, init=False)
    """Tries that have failed so far."""
    _only_once: set[str] = field(factory=set, init=False)

    def failed(self, error: InferenceError) -> Decision:
        """Count one failed try and decide; the caller sleeps."""
        self.tries += 1
        if self.tries >= self.config.attempts or not self._may_pass(error):
            return GiveUp()
        asked_ms = retry_after_ms(error.retry_after, self.now_s())
        if asked_ms is not None:
            return Again(int(min(asked_ms, self.config.cap_ms)))
        ceiling_ms = min(self.config.cap_ms, self.config.base_ms * 2 ** min(self.tries - 1, 60))
        return Again(int(self.uniform(0, ceiling_ms)))

    def _may_pass(self, error: InferenceError) -> bool:
        if is_context_full(error):
            return False
        if error.kind in ("connect", "broken"):
            return True
        if error.kind == "stall":
            return self._first_time("stall")
        if error.kind == "http":
            return error.status in RETRIED_STATUSES or (error.status == 500 and self._first_time("500"))
        return False

    def _first_time(self, what: str) -> bool:
        first = what not in self._only_once
        self._only_once.add(what)
        return first


def retry_after_ms(header: str | None, now_s: float) -> float | None:
    """Read a Retry-After header: seconds (a fraction is taken), or a date in the future.

    Anything else, a date that has passed included, is None: the usual back-off holds.
    """
    if header is None:
        return None
    header = header.strip()
    if re.fullmatch(r"\d{1,400}(\.\d{1,20})?", header, re.ASCII):
        return float(header) * 1000
    try:
        moment = parsedate_to_datetime(header)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)  # RFC 9110: every HTTP date is UTC, also the old form without a zone
    after_ms = (moment.timestamp() - now_s) * 1000
    return after_ms if after_ms > 0 else None
