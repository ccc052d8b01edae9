"""Logs read from outside the daemon: what is in them, what is wrong with them, and a torn end cut off.

Law: reading takes no lock and changes nothing; only `repair` writes, and it keeps what it replaces.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from boxmaker.errors import NoSuchSession, SessionDamaged, StorageError, ValueRefused, printable
from boxmaker.proto.ids import SessionId, parse_session_id
from boxmaker.proto.records import LogRecord, SessionStart, User, decode_line
from boxmaker.session.disk import NEW_PREFIX, sync_directory, write_new
from boxmaker.session.replay import LogState, OutOfOrder
from boxmaker.session.store import (
    BASELINE_NAME,
    LOG_MAX_BYTES,
    LOG_NAME,
    check_size,
    open_locked,
    read_baseline,
    split_log,
)

RECENT = 64
"""How many sessions may have used the slots last; older ones are not asked which was theirs."""
FIRST_LINE_MAX_BYTES = 4096


@frozen(kw_only=True)
class Finding:
    """Something wrong with a session; `line` counts from 1, 0 is the file as a whole."""

    file: Path
    line: int
    problem: str
    torn: bool = False

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else str(self.file)
        return printable(f"{where}: {self.problem}")

    def error(self) -> SessionDamaged:
        """The same as an error, which says what to do."""
        return SessionDamaged(file=self.file, line=self.line, problem=self.problem, torn=self.torn)


@frozen(kw_only=True)
class Summary:
    """A session at a glance; `damaged` says why it cannot be read whole."""

    session: SessionId
    last_s: float
    """When its log was last written, seconds since the epoch."""
    turns: int
    first_words: str
    damaged: str | None


@frozen(kw_only=True)
class Repaired:
    """What `repair` did: the bytes it dropped, and where the damaged file is kept."""

    dropped: bytes
    kept: Path
    line: int


def session_ids(sessions: Path) -> list[SessionId]:
    """The sessions of a home, by name; what cannot be a session is left out.

    Raises:
        StorageError: the directory cannot be read.
    """
    found = []
    try:
        names = sorted(entry.name for entry in os.scandir(sessions) if entry.is_dir(follow_symlinks=False))
    except OSError as exc:
        reason = f"{exc.strerror}; name the daemon's home with --home or BOXMAKER_HOME"
        raise StorageError(action="list", file=sessions, reason=reason) from exc
    for name in names:
        if not name.startswith(NEW_PREFIX):
            try:
                found.append(parse_session_id(name))
            except ValueRefused:
                continue
    return found


def newest_session(sessions: Path) -> SessionId:
    """The session whose log was written last.

    Raises:
        StorageError: there is none, or the directory cannot be read.
    """
    written = _by_last_write(sessions)
    if not written:
        raise StorageError(action="find a session in", file=sessions, reason="there is none")
    return written[-1]


def slots_in_use(sessions: Path) -> list[tuple[SessionId, int]]:
    """The RECENT sessions that were used last, with the slots that they began on, the latest at the end.

    A log that cannot be read is left out.

    Raises:
        StorageError: the directory cannot be read.
    """
    found = []
    for session in _by_last_write(sessions)[-RECENT:]:
        with suppress(OSError, ValueRefused):
            fd = os.open(sessions / session / LOG_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, "rb") as log:
                start = decode_line(log.readline(FIRST_LINE_MAX_BYTES))
            if isinstance(start, SessionStart):
                found.append((session, start.slot))
    return found


def _by_last_write(sessions: Path) -> list[SessionId]:
    """The sessions whose log can be seen, the one that was written last at the end."""
    written: list[tuple[float, SessionId]] = []
    for session in session_ids(sessions):
        with suppress(OSError):
            written.append(((sessions / session / LOG_NAME).stat().st_mtime, session))
    return [session for _, session in sorted(written)]


def read_log(sessions: Path, session: SessionId) -> bytes:
    """The bytes of a log.

    Raises:
        NoSuchSession: there is none. SessionDamaged: it is no file, or too large. StorageError: it cannot be read.
    """
    file = sessions / session / LOG_NAME
    if not os.path.lexists(sessions / session):
        raise NoSuchSession(session=session, directory=sessions)
    if not file.is_file() or file.is_symlink():
        raise SessionDamaged(file=file, line=0, problem="is no log file")
    try:
        check_size(file, file.stat().st_size, LOG_MAX_BYTES)
        return file.read_bytes()
    except OSError as exc:
        raise StorageError(action="read", file=file, reason=exc.strerror or str(exc)) from exc


def lines_of(file: Path, raw: bytes) -> Iterator[tuple[int, LogRecord | Finding]]:
    """Each line of a log as its record, or as what is wrong with it; a torn end is the last finding."""
    try:
        for number, line in split_log(file, raw):
            try:
                yield number, decode_line(line)
            except ValueRefused as exc:
                yield number, Finding(file=file, line=number, problem=str(exc))
    except SessionDamaged as exc:
        yield exc.line, Finding(file=file, line=exc.line, problem=exc.problem, torn=exc.torn)


def check(sessions: Path, session: SessionId) -> list[Finding]:
    """Everything that is wrong with a session's files.

    After a line that cannot be read, the order of those behind it is not judged.

    Raises:
        NoSuchSession.
    """
    try:
        raw = read_log(sessions, session)
    except (SessionDamaged, StorageError) as exc:
        file = sessions / session / LOG_NAME
        return [Finding(file=file, line=0, problem=getattr(exc, "problem", str(exc)))]
    return _examine(sessions, session, raw)[0]


def _examine(sessions: Path, session: SessionId, raw: bytes) -> tuple[list[Finding], list[LogRecord]]:
    """What is wrong with a log and its baseline, and the records that could be read."""
    file = sessions / session / LOG_NAME
    findings: list[Finding] = []
    records: list[LogRecord] = []
    state: LogState | None = LogState(session)
    for number, read in lines_of(file, raw):
        if isinstance(read, Finding):
            findings.append(read)
            state = None
            continue
        records.append(read)
        if state is not None:
            try:
                state.apply(read)
            except OutOfOrder as exc:
                findings.append(Finding(file=file, line=number, problem=str(exc)))
                state = None
    if not raw:
        findings.append(Finding(file=file, line=1, problem="the log is empty"))
    elif state is not None and state.start is not None:
        try:
            read_baseline(sessions / session / BASELINE_NAME, state.start.baseline)
        except SessionDamaged as exc:
            findings.append(Finding(file=exc.file, line=exc.line, problem=exc.problem))
        except StorageError as exc:
            findings.append(Finding(file=exc.file, line=0, problem=exc.reason))
    return findings, records


def summarize(sessions: Path, session: SessionId) -> Summary:
    """A session at a glance; damage is told, not raised."""
    file = sessions / session / LOG_NAME
    turns, first_words, last_s = 0, "", 0.0
    try:
        last_s = file.stat().st_mtime
        findings, records = _examine(sessions, session, read_log(sessions, session))
        damaged = str(findings[0]) if findings else None
        users = [record.content for record in records if isinstance(record, User)]
        turns = len(users)
        first_words = next((words for content in users if (words := " ".join(content.split()))), "")
    except OSError as exc:
        damaged = printable(f"{file}: {exc.strerror}")
    except (NoSuchSession, SessionDamaged, StorageError) as exc:
        damaged = str(exc)
    return Summary(session=session, last_s=last_s, turns=turns, first_words=first_words, damaged=damaged)


def repair(sessions: Path, session: SessionId) -> Repaired | None:
    """Cut a torn last line off; None when the log has none.

    The damaged file stays beside the repaired one, under a name with the time. Nothing that was
    acknowledged is lost: an append counts only when its last LF is on the disk.

    Raises:
        SessionDamaged: there is damage of another kind, which cannot be mended without losing records.
        SessionBusy: a turn runs. NoSuchSession, StorageError.
    """
    file = sessions / session / LOG_NAME
    if not os.path.lexists(sessions / session):
        raise NoSuchSession(session=session, directory=sessions)
    fd = open_locked(sessions, session)
    try:
        raw = read_log(sessions, session)
        whole = raw[: raw.rfind(b"\n") + 1]
        findings, _ = _examine(sessions, session, raw)
        for finding in findings:
            if not finding.torn or finding.line == 1:
                raise finding.error()
        if not findings:
            return None
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        kept = file.with_name(f"0.damaged-{stamp}-{secrets.token_hex(2)}.jsonl")
        mended = file.with_name(f"{NEW_PREFIX}{LOG_NAME}")
        try:
            mended.unlink(missing_ok=True)
            write_new(mended, whole)
            os.link(file, kept)
            os.rename(mended, file)
            sync_directory(file.parent)
        except OSError as exc:
            raise StorageError(action="repair", file=file, reason=exc.strerror or str(exc)) from exc
        return Repaired(dropped=raw[len(whole) :], kept=kept, line=whole.count(b"\n") + 1)
    finally:
        os.close(fd)
