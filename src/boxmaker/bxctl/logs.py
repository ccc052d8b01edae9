"""What people see of logs: a list of sessions, a conversation, findings. Reads files, asks no daemon."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from boxmaker.bxctl.render import one_visible_line, visible
from boxmaker.errors import SessionDamaged, ValueRefused
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import (
    RECORDS,
    Assistant,
    CacheLoss,
    EpochEnd,
    LogRecord,
    SessionStart,
    ToolResult,
    Usage,
    User,
    decode_line,
)
from boxmaker.session.logs import Finding, Summary, lines_of, read_log
from boxmaker.session.store import LOG_NAME

FOLLOW_S = 0.25
"""How often a followed log is looked at."""
SHOWN_ARGUMENTS = 200


def age(seconds: float) -> str:
    """A span of time in its largest unit: `5 s`, `3 min`, `7 h`, `12 d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"


def sessions_table(summaries: list[Summary], now_s: float, columns: int) -> list[str]:
    """A line a session, the latest first; cut to the terminal's width."""
    rows = [("SESSION", "AGE", "TURNS", "FIRST WORDS")]
    for one in sorted(summaries, key=lambda s: s.last_s, reverse=True):
        words = f"damaged: {one.damaged}" if one.damaged else one.first_words
        rows.append((one.session, age(now_s - one.last_s), str(one.turns), one_visible_line(words)))
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    lines = [f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:>{widths[2]}}  {r[3]}" for r in rows]
    return [line if len(line) <= columns else line[: columns - 1] + "…" for line in lines]


def summary_json(one: Summary) -> str:
    """A session as a line of ASCII JSON."""
    return json.dumps({
        "session": one.session,
        "last": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one.last_s)),
        "turns": one.turns,
        "first_words": one.first_words,
        "damaged": one.damaged,
    }, separators=(",", ":"))  # fmt: skip


class LogText:
    """Records as a person reads them, one after another."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def lines(self, record: LogRecord) -> list[str]:
        """The lines for one record."""
        match record:
            case SessionStart(time=moment, session=session, slot=slot):
                return [f"session {session}, begun {moment}, slot {slot}"]
            case User(content=content):
                return ["", *(f"> {line}" for line in visible(content).split("\n"))]
            case Assistant():
                return self._assistant(record)
            case Usage():
                return [self._usage(record)]
            case ToolResult():
                return self._result(record)
            case CacheLoss(expected=expected, got=got):
                return [f"[lost {expected - got} cached tokens: {got} of {expected} were left]"]
            case EpochEnd():
                return ["[the epoch ends]"]

    def _assistant(self, record: Assistant) -> list[str]:
        lines = []
        if record.reasoning_content:
            lines += [f"~ {line}" for line in visible(record.reasoning_content).rstrip("\n").split("\n")]
        if record.content:
            lines += visible(record.content).rstrip("\n").split("\n")
        elif not record.tool_calls:
            lines.append("[no answer]")
        for call in record.tool_calls:
            self._names.setdefault(call.id, []).append(call.name.strip())
            arguments = one_visible_line(call.arguments)
            if len(arguments) > SHOWN_ARGUMENTS:
                arguments = arguments[: SHOWN_ARGUMENTS - 1] + "…"
            lines.append(f"[calls {one_visible_line(call.name.strip())} {arguments}]")
        return lines

    @staticmethod
    def _usage(record: Usage) -> str:
        figures = ((record.cache_n, "cached"), (record.prompt_n, "read"), (record.predicted_n, "generated"))
        parts = [f"{count} {what}" for count, what in figures if count is not None] or ["no figures"]
        if record.reasoning_tokens:
            parts.append(f"{record.reasoning_tokens} of reasoning")
        if record.thinking_capped:
            parts.append("thinking capped")
        return f"[{', '.join(parts)}]"

    def _result(self, record: ToolResult) -> list[str]:
        names = self._names.get(record.tool_call_id, [])
        name = names.pop(0) if names else "a tool"
        notes: list[str] = [record.class_] if record.class_ != "public" else []
        notes += ["untrusted"] if record.untrusted else []
        notes += ["truncated"] if record.truncated else []
        head = f"[result {record.call} of {one_visible_line(name)}{''.join(f', {note}' for note in notes)}]"
        return [head, *(f"| {line}" for line in visible(record.content).rstrip("\n").split("\n"))]


def show_log(
    sessions: Path,
    session: SessionId,
    out: TextIO,
    *,
    as_json: bool,
    follow: bool,
    reader_gone: Callable[[], bool] = lambda: False,
) -> None:
    """Print a log; with `follow`, go on as it grows, until the reader or the owner has enough.

    Raises:
        NoSuchSession, StorageError: nothing was printed. SessionDamaged: after all that could be read.
    """
    text = LogText()
    file = sessions / session / LOG_NAME

    def show(record: LogRecord) -> None:
        if as_json:
            out.write(json.dumps(RECORDS.to_object(record), separators=(",", ":")) + "\n")
        else:
            out.writelines(f"{line}\n" for line in text.lines(record))

    raw = read_log(sessions, session)
    if not raw:  # a session appears with its first line
        raise SessionDamaged(file=file, line=1, problem="the log is empty")
    whole = raw if not follow else raw[: raw.rfind(b"\n") + 1]  # a torn end may be an append under way
    for _, read in lines_of(file, whole):
        if isinstance(read, Finding):
            out.flush()
            raise read.error()
        show(read)
    out.flush()
    if follow:
        for line_number, line in _grow(file, len(whole), whole.count(b"\n"), reader_gone):
            try:
                show(decode_line(line))
            except ValueRefused as exc:
                raise SessionDamaged(file=file, line=line_number, problem=str(exc)) from exc
            out.flush()


def _grow(file: Path, offset: int, lines: int, reader_gone: Callable[[], bool]) -> Iterator[tuple[int, bytes]]:
    """Whole lines that are appended from now on; ends when the file or the reader has gone.

    An append that failed is cut back by the daemon: what was seen of it is forgotten.
    """
    with file.open("rb") as opened:
        while not reader_gone():
            try:
                if not os.path.samestat(os.fstat(opened.fileno()), os.stat(file)):
                    return  # repaired: what follows is another file
            except FileNotFoundError:
                return
            opened.seek(offset)
            piece = opened.read()
            for line in piece[: piece.rfind(b"\n") + 1].split(b"\n")[:-1]:
                offset += len(line) + 1
                lines += 1
                yield lines, line
            time.sleep(FOLLOW_S)
