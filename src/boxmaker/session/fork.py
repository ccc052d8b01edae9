"""Forks: which lines of a log a new session begins with; pure.

Laws:
* A fork point is an answer: an `Assistant` without calls, with the `Usage` and `CacheLoss` that follow it.
* The old lines are taken byte for byte, so that the new session's first request extends the old one's to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from boxmaker.errors import BadRequest, SessionDamaged, ValueRefused
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import Assistant, CacheLoss, SessionStart, Usage, decode_line, encode_line
from boxmaker.proto.time import Timestamp
from boxmaker.session.replay import LogState, OutOfOrder, figures_of


@frozen(kw_only=True)
class Cut:
    """Where a log is cut: after its answer number `at`, counted from 1; from its second line to byte `end`."""

    at: int
    begin: int
    end: int
    baseline: str


def cut_log(file: Path, session: SessionId, lines: Iterable[tuple[int, bytes]], wanted: int | None) -> Cut:
    """Find the answer number `wanted` of a log, or its last one; `lines` are numbered from 1, without their LF.

    Raises:
        SessionDamaged: the log cannot be read. BadRequest: it has no such answer.
    """
    state = LogState(session)
    ends: list[int] = []
    """For each answer, how many bytes of the log there are up to its end."""
    first = size = 0
    follows = False
    for number, line in lines:
        try:
            record = decode_line(line)
            state.apply(record)
        except (ValueRefused, OutOfOrder) as exc:
            raise SessionDamaged(file=file, line=number, problem=str(exc)) from exc
        size += len(line) + 1
        first = first or size
        if isinstance(record, Assistant):
            follows = not record.tool_calls
            if follows:
                ends.append(size)
        elif follows and isinstance(record, Usage | CacheLoss):
            ends[-1] = size
        else:
            follows = False
    if state.start is None:
        raise SessionDamaged(file=file, line=1, problem="the log is empty")
    if not ends or (wanted or 1) > len(ends):
        answers = "no answer" if not ends else f"{len(ends)} answer{'s' if len(ends) > 1 else ''}"
        raise BadRequest(path="$.body.from", problem=f"session {session} has {answers} to fork at")
    at = wanted or len(ends)
    return Cut(at=at, begin=first, end=ends[at - 1], baseline=state.start.baseline)


def last_answer_within(lines: Iterable[bytes], tokens: float) -> int | None:
    """The number of the last answer that left fewer than so many tokens in the context; None when none did.

    By the server's own figures; an answer without them counts as one that did. `lines` are a whole log that was read
    before.
    """
    fits: list[bool] = []
    """Of each answer."""
    answered = False
    for record in map(decode_line, lines):
        if isinstance(record, Assistant):
            answered = not record.tool_calls
            if answered:
                fits.append(True)
        elif isinstance(record, Usage) and answered:
            used = figures_of(record).used
            fits[-1] = used is None or used < tokens
    return max((number for number, one in enumerate(fits, start=1) if one), default=None)


def forked_log(cut: Cut, raw: bytes, *, session: SessionId, slot: int, time: Timestamp) -> bytes:
    """The log of the new session, made of the old one's bytes."""
    start = SessionStart(time=time, session=session, epoch=0, slot=slot, baseline=cut.baseline)
    return encode_line(start) + raw[cut.begin : cut.end]
