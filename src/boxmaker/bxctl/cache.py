"""What people see of a session's tokens: why the last were lost, and what each completion cost.

Reads files, asks no daemon. An append that is under way at the end of the log is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from pathlib import Path

from attrs import asdict, frozen

from boxmaker.bxctl.render import one_visible_line
from boxmaker.proto.ids import SessionId
from boxmaker.proto.ledger import CACHE_LINE, REMEDY, CacheLine
from boxmaker.proto.records import LogRecord
from boxmaker.session.ledger import completions_of, read_lines
from boxmaker.session.logs import Finding, lines_of, read_log
from boxmaker.session.store import LOG_NAME

BAR_COLUMNS = 24
MOVED = "None: it is lost once."
"""For a session that runs on another slot than before, or a fork that does."""
BLOCKS = "█▓░"
"""A bar's parts: from the cache, read again, read because it was new."""
ASCII = "#!."
"""The same for an output that knows no other characters."""


@frozen(kw_only=True)
class Totals:
    """All completions together; `least` is what the server had to read in any case, `ratio` what it read, over that.

    `bound`: some of the lost tokens may have left the prompt, so `least` may have been more, and `ratio` less.
    """

    completions: int
    cached: int
    read: int
    generated: int
    lost: int
    least: int
    ratio: float | None
    bound: bool
    prefill_ms: int | None


def read_completions(sessions: Path, session: SessionId) -> list[CacheLine]:
    """What each completion of a session cost, by its log, with the causes that its side file has.

    A fork begins with completions of another session, which were made before it began: they are left out.

    Raises:
        NoSuchSession, SessionDamaged, StorageError.
    """
    raw = read_log(sessions, session)
    records: list[LogRecord] = []
    for _, read in lines_of(sessions / session / LOG_NAME, raw[: raw.rfind(b"\n") + 1]):
        if isinstance(read, Finding):
            raise read.error()
        records.append(read)
    began = records[0].time if records else ""
    found = completions_of(records, read_lines(sessions / session))
    return list(dropwhile(lambda one: one.time < began, found))


def totals_of(found: Sequence[CacheLine]) -> Totals:
    """Add the completions up; what the server did not tell counts nothing."""
    read = sum(one.read or 0 for one in found)
    least = sum(_least(one) for one in found)
    times = [one.prefill_ms for one in found if one.prefill_ms is not None]
    return Totals(
        completions=len(found),
        cached=sum(one.cached or 0 for one in found),
        read=read,
        generated=sum(one.generated or 0 for one in found),
        lost=sum(one.lost or 0 for one in found),
        least=least,
        ratio=round(read / least, 3) if least else None,
        bound=any(map(_may_have_left, found)),
        prefill_ms=sum(times) if times else None,
    )


def _least(one: CacheLine) -> int:
    """What would have been read without the loss: at least one token, which the server always needs."""
    read = one.read or 0
    return max(read - (one.lost or 0), min(read, 1))


def _may_have_left(one: CacheLine) -> bool:
    """May some of the lost tokens not be in the prompt any more, as when a template drops reasoning?"""
    return bool(one.lost) and (one.cause == "template" or (one.lost or 0) >= (one.read or 0))


def _seconds_lost(one: CacheLine) -> float | None:
    """The loss's share of the time that the server read the prompt."""
    if one.prefill_ms is None or not one.read or not one.lost:
        return None
    return one.prefill_ms / 1000 * min(one.lost, one.read) / one.read


def cache_json(found: Sequence[CacheLine]) -> Iterator[str]:
    """A line of ASCII JSON a completion, and one with the totals."""
    for one in found:
        yield json.dumps(CACHE_LINE.to_object(one), separators=(",", ":"))
    yield json.dumps({"totals": asdict(totals_of(found))}, separators=(",", ":"))


def cache_table(session: SessionId, found: Sequence[CacheLine], parts: str = BLOCKS) -> Iterator[str]:
    """The same for a person, with a bar of `parts` for each prompt."""
    totals = totals_of(found)
    yield f"session {session}"
    rows = [("#", "CACHED", "READ", "GENERATED", "LOST", "SECONDS", "")]
    widest = max((_prompt(one) for one in found), default=0)
    for one in found:
        seconds = "-" if one.prefill_ms is None else f"{one.prefill_ms / 1000:.1f}"
        figures = (_figure(one.cached), _figure(one.read), _figure(one.generated), _figure(one.lost))
        told = " ".join([_bar(one, widest, parts), *([one.cause] if one.cause else []), *_restored(one)])
        rows.append((str(one.completion), *figures, seconds, told))
    widths = [max(len(row[at]) for row in rows) for at in range(6)]
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[6]]).rstrip()
    if found:
        yield f"{parts[0]} cached  {parts[2]} read  {parts[1]} read again"
    most = "at most " if totals.bound else ""
    ratio = f", {most}{totals.ratio:.2f} times as much" if totals.ratio is not None else ""
    others = f"{totals.lost:,} lost, {totals.cached:,} cached"
    yield f"{totals.read:,} tokens read, {totals.least:,} at least{ratio}; {others}"


def _restored(one: CacheLine) -> list[str]:
    """That a saved slot was restored before it, of a line that anybody may have written."""
    tokens = _restored_tokens(one)
    return [f"restored {tokens:,} from disk"] if tokens else []


def _restored_tokens(one: CacheLine) -> int:
    tokens = one.detail.get("restored")
    return tokens if type(tokens) is int else 0


def _figure(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _prompt(one: CacheLine) -> int:
    return (one.cached or 0) + (one.read or 0)


def _bar(one: CacheLine, most: int, parts: str) -> str:
    """The prompt's parts, of BAR_COLUMNS for the longest one; the ends of the parts are rounded, not their lengths."""
    cached, again = one.cached or 0, min(one.lost or 0, one.read or 0)
    ends = [round(BAR_COLUMNS * tokens / most) if most else 0 for tokens in (cached, cached + again, _prompt(one))]
    return parts[0] * ends[0] + parts[1] * (ends[1] - ends[0]) + parts[2] * (ends[2] - ends[1])


def why_lines(session: SessionId, found: Sequence[CacheLine]) -> Iterator[str]:
    """The last loss of a session: how much, what it cost, why, and what to do."""
    losses = [one for one in found if one.lost]
    if not losses:
        plural = "" if len(found) == 1 else "s"
        yield f"session {session}: no cached tokens were lost in {len(found)} completion{plural}"
        return
    last = losses[-1]
    seconds = _seconds_lost(last)
    about = "at most about" if _may_have_left(last) else "about"
    cost = f", {about} {seconds:.1f} s" if seconds is not None else ""
    yield f"session {session}, completion {last.completion} of {found[-1].completion}, {last.time}"
    yield f"lost {last.lost:,} cached tokens: {last.cached or 0:,} of {last.expected or 0:,} were left{cost}"
    cause = last.cause or "unknown"
    yield from (f"{'cause:' if not at else '      '} {line}" for at, line in enumerate(_because(last)))
    did_little = 2 * (last.cached or 0) < _restored_tokens(last)
    yield from (f"{text}{', which did not help' if did_little else ''}" for text in _restored(last))
    moved = cause == "evicted" and last.detail.get("session") is None
    yield f"remedy: {MOVED if moved else REMEDY[cause]}"
    if len(losses) > 1:
        yield f"{len(losses)} losses in all (bxctl cache {session})"


def _because(one: CacheLine) -> list[str]:
    """A cause in words, of a line that anybody may have written."""
    shown = {key: one_visible_line(str(value)) for key, value in one.detail.items()}
    match one.cause:
        case "template":
            said = f"message {shown.get('message', '?')} ({shown.get('role', '?')})"
            return [
                f"template: the chat template renders {said} otherwise than before",
                f"before: {shown.get('was', '')}",
                f"now:    {shown.get('now', '')}",
            ]
        case "evicted" if one.detail.get("session") is not None:
            return [f"evicted: session {shown['session']} used slot {one.slot} since"]
        case "evicted":
            left = shown.get("slot_before", "?")
            return [f"evicted: the session runs on slot {one.slot} now, its cache was left in slot {left}"]
        case "model":
            what, was, now = (shown.get(key, "?") for key in ("what", "was", "now"))
            return [f"model: the server has another {what}: {now}, before {was}"]
        case "restarted":
            return ["restarted: the server has begun anew, with an empty cache"]
        case "foreign":
            return [f"foreign: somebody else's request took slot {one.slot}; it held {shown.get('held', '?')} tokens"]
        case "restarted_or_foreign":
            return ["restarted_or_foreign: the server was restarted, or somebody else's request took the slot"]
        case "reread":
            return ["reread: the slot held all of it and the prompt goes on from there; the server read it again"]
        case _:
            return ["unknown"]
