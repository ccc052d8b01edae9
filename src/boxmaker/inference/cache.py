"""Did the server still have what it had? A judgement from its own figures; pure.

Source: design.md section 7; measured exact for a token extension (`../shared/llama-server.md`, 2 and 6).
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from boxmaker.proto.codec import MAX_INTEGER


@frozen(kw_only=True)
class TokenFigures:
    """What the server said of one completion: tokens from the cache, read, generated."""

    cache_n: int | None
    prompt_n: int | None
    predicted_n: int | None

    @property
    def prompt_tokens(self) -> int | None:
        """The whole prompt; None when a figure is missing."""
        return _sum(self.cache_n, self.prompt_n)

    @property
    def used(self) -> int | None:
        """Prompt and reply: what there is of the context's tokens; None when a figure is missing."""
        return _sum(self.cache_n, self.prompt_n, self.predicted_n)


def _sum(*figures: int | None) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if len(known) == len(figures) else None


@frozen
class Hit:
    """Everything that could be in the cache was."""


@frozen(kw_only=True)
class Loss:
    """`got` tokens were in the cache, `expected` could have been."""

    expected: int
    got: int


@frozen
class Unknown:
    """A figure that the judgement needs is missing."""


CacheOutcome: TypeAlias = Hit | Loss | Unknown


def expected_tokens(previous: TokenFigures) -> int | None:
    """How many tokens the next request of a session should find in the cache; None when a figure is missing.

    After a completion the slot holds all its tokens but the last one sampled: `cache_n + prompt_n + predicted_n - 1`.
    """
    used = previous.used
    # of figures that an older log holds: a record could not hold their sum
    return used - 1 if used is not None and used - 1 <= MAX_INTEGER else None


def cache_outcome(previous: TokenFigures, current: TokenFigures) -> CacheOutcome:
    """Compare two consecutive completions of a session, the second of which extends the first."""
    expected = expected_tokens(previous)
    if expected is None or current.cache_n is None:
        return Unknown()
    if current.cache_n < expected:
        return Loss(expected=expected, got=current.cache_n)
    return Hit()
