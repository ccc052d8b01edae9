"""The session store: who may write a session now, and its log in step with its request bytes.

Laws:
* One writer a session: a lock in the daemon, and a `flock` on the log against other programs.
* A record is in the state only when its line is on the disk, and the state is made of that line.
* Between turns everything may be forgotten; a log that has changed meanwhile is read again.

Source: M2b section 2; design.md sections 4 and 6.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, field, frozen

from boxmaker.errors import (
    InternalError,
    NoSuchSession,
    SessionBusy,
    SessionDamaged,
    SessionExists,
    StorageError,
    ValueRefused,
)
from boxmaker.inference.request import RequestEncoder
from boxmaker.proto import chat
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import LogRecord, SessionStart, decode_line, encode_line
from boxmaker.proto.time import Timestamp
from boxmaker.session.baseline import BASELINE, Baseline, baseline_hash, encode_baseline
from boxmaker.session.disk import Disk, append_durably, create_directory, sync_directory
from boxmaker.session.fork import cut_log, forked_log, last_answer_within
from boxmaker.session.replay import LogState, OutOfOrder

LOG_NAME = "0.jsonl"
BASELINE_NAME = "0.baseline.json"
NO_FILE = frozenset({errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO})
"""Nothing is there, or something that is no file: damage. Any other failure to open is the disk's."""
LOG_MAX_BYTES = 1 << 30
"""No server's context holds what such a log says; reading it whole could take the daemon's memory, and all sessions."""
BASELINE_MAX_BYTES = 16 << 20
_STATE_BYTES = 4096
"""What a kept session costs besides its request bytes, roughly."""


@define
class _Known:
    """A session's log, read: the state it stands for and the request bytes it makes."""

    device: int
    inode: int
    size_bytes: int
    changed_ns: int
    """When the log was last written: an edit in place may keep its size."""
    state: LogState
    encoder: RequestEncoder
    kept_bytes: int = 0
    """What it counted for when it was kept last."""


@define
class _Running:
    """A turn that has a session; `gone` says whether its channel has left."""

    gone: Callable[[], bool]
    done: trio.Event = field(factory=trio.Event)


@frozen(kw_only=True)
class NewSession:
    """What a session is created with; `baseline` reads the files of the moment."""

    slot: int
    baseline: Callable[[], Baseline]


class Session:
    """A session that one turn has, at the server's slot `slot`: append records, ask for the request body."""

    def __init__(self, session: SessionId, file: Path, fd: int, disk: Disk, known: _Known, slot: int) -> None:
        self.id = session
        self.slot = slot
        self._file = file
        self._fd = fd
        self._disk = disk
        self._known = known

    @property
    def state(self) -> LogState:
        """Where the session stands; read only."""
        return self._known.state

    def request_body(self) -> bytes:
        """The body of the next request: what the log on disk says, to the byte."""
        return self._known.encoder.body()

    async def last_answer_within(self, tokens: float) -> int | None:
        """The number of the last answer that left fewer than so many tokens in the context; None when none did.

        Raises:
            StorageError: the log cannot be read.

        Cancellation: checked on entry only.
        """
        size = self._known.size_bytes
        raw = await self._disk.run(lambda: _read_all(self._file, self._fd, size))
        return last_answer_within(raw.split(b"\n")[:-1], tokens)

    async def append(self, *records: LogRecord) -> None:
        """Write records as one durable append, then take them into the state.

        Raises:
            StorageError: the disk said no; log and state are as before.
            InternalError: a record that cannot stand here, or that its line does not give back;
                nothing was written.

        Cancellation: checked on entry only; an append that has begun is finished.
        """
        known = self._known
        lines = b""
        trial = known.state.copy()
        added: list[chat.ChatMessage] = []
        try:
            for record in records:
                line = encode_line(record)
                if decode_line(line) != record:
                    raise InternalError(message="a record does not survive its own line; nothing was written")
                message = trial.apply(record)
                if message is not None:
                    added.append(message)
                lines += line
        except (ValueRefused, OutOfOrder) as exc:
            raise InternalError(message=f"a record cannot be written: {exc}") from exc
        known.changed_ns = await self._disk.run(lambda: self._write(lines, known.size_bytes))
        known.size_bytes += len(lines)
        known.state = trial
        for message in added:
            known.encoder.add(message)

    def _write(self, lines: bytes, size_bytes: int) -> int:
        try:
            if not _is_at(self._file, self._fd) or os.fstat(self._fd).st_size != size_bytes:
                raise OSError(errno.EBUSY, "another program has changed the log during this turn")
            append_durably(self._fd, lines)
            return os.fstat(self._fd).st_mtime_ns
        except OSError as exc:
            raise StorageError(action="append to", file=self._file, reason=exc.strerror or str(exc)) from exc


class Store:
    """All sessions of one home.

    `fixed` are the request's fixed fields, `memory_bytes` bounds what is kept between turns, `now`
    gives the time for SessionStart.
    """

    def __init__(
        self,
        home: Path,
        disk: Disk,
        *,
        memory_bytes: int,
        fixed: dict[str, Any],
        now: Callable[[], Timestamp],
    ) -> None:
        self.directory = home / "sessions"
        self.disk = disk
        self._memory_bytes = memory_bytes
        self._fixed = fixed
        self._now = now
        self._running: dict[SessionId, _Running] = {}
        self._kept: OrderedDict[SessionId, _Known] = OrderedDict()
        self._kept_bytes = 0

    @asynccontextmanager
    async def turn(
        self,
        session: SessionId,
        *,
        resume: bool,
        new: NewSession,
        alternate: bool,
        gone: Callable[[], bool] = lambda: False,
        pin: Callable[[int], int] | None = None,
    ) -> AsyncIterator[Session]:
        """Have a session for one turn; it is free again when the block is left.

        `resume` says whether the session must exist, or must not: then it is created as `new` says.
        `gone` tells others whether this turn's channel has left: they wait for such a turn. `pin` gives this turn's
        slot, told the one that the session began on; without it that is the one in the fixed fields.

        Raises:
            SessionExists, NoSuchSession, SessionBusy, SessionDamaged, StorageError: nothing has changed.

        Cancellation: safe at any point; a creation that has begun is finished or undone.
        """
        running = await self._claim(session, resume, gone)
        try:
            if not resume:
                await self._create(session, new)
            fd, known = await self._open(session, alternate)
            try:
                assert known.state.start is not None  # a log without it is refused
                began_on = known.state.start.slot
                slot = pin(began_on) if pin is not None else self._fixed.get("id_slot", began_on)
                known.encoder.pin(slot)
                yield Session(session, self._log(session), fd, self.disk, known, slot)
            finally:
                os.close(fd)  # and with it goes the flock
                self._keep(session, known)
        finally:
            del self._running[session]
            running.done.set()

    async def _claim(self, session: SessionId, resume: bool, gone: Callable[[], bool]) -> _Running:
        while (other := self._running.get(session)) is not None:
            if not other.gone():
                if resume:
                    raise SessionBusy(session=session)
                raise SessionExists(session=session)
            await other.done.wait()
        mine = self._running[session] = _Running(gone)
        return mine

    def _log(self, session: SessionId) -> Path:
        return self.directory / session / LOG_NAME

    async def _create(self, session: SessionId, new: NewSession) -> None:
        started = self._now()

        def create() -> None:
            if os.path.lexists(self.directory / session):
                raise SessionExists(session=session)
            raw = encode_baseline(new.baseline())
            start = SessionStart(time=started, session=session, epoch=0, slot=new.slot, baseline=baseline_hash(raw))
            self._place(session, raw, encode_line(start))

        await self.disk.run(create)
        self._take_kept(session)  # of one that was removed; its inode number may be used again

    def _place(self, session: SessionId, baseline: bytes, log: bytes) -> None:
        directory = self.directory / session
        try:
            create_directory(directory, {BASELINE_NAME: baseline, LOG_NAME: log})
        except FileExistsError as exc:
            raise SessionExists(session=session) from exc
        except OSError as exc:
            raise StorageError(action="create", file=directory, reason=exc.strerror or str(exc)) from exc

    async def fork(self, session: SessionId, at: int | None, new: SessionId, *, slot: int) -> int:
        """Make the session `new` of what a session holds up to its answer number `at`, by default the last.

        Gives the answer's number. The new one is there whole or not at all; the old one is not touched.

        Raises:
            NoSuchSession, SessionBusy, SessionDamaged, SessionExists, BadRequest, StorageError: nothing has changed.

        Cancellation: checked on entry only; a creation that has begun is finished.
        """
        started = self._now()

        def fork() -> int:
            fd = open_locked(self.directory, session)
            try:
                if os.path.lexists(self.directory / new):
                    raise SessionExists(session=new)
                file = self._log(session)
                raw = _read_all(file, fd, LOG_MAX_BYTES)
                cut = cut_log(file, session, split_log(file, raw), at)
                baseline = read_baseline_bytes(file.with_name(BASELINE_NAME), cut.baseline)
                self._place(new, baseline, forked_log(cut, raw, session=new, slot=slot, time=started))
            finally:
                os.close(fd)
            return cut.at

        at = await self.disk.run(fork)
        self._take_kept(new)  # of one that was removed
        return at

    async def _open(self, session: SessionId, alternate: bool) -> tuple[int, _Known]:
        """Open, lock, and read what is not known yet."""
        kept = self._take_kept(session)
        if kept is not None and kept.encoder.alternate != alternate:
            kept = None

        def open_log() -> tuple[int, _Known]:
            fd = open_locked(self.directory, session)
            try:
                now = os.fstat(fd)
                if kept is not None and (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns) == (
                    kept.device,
                    kept.inode,
                    kept.size_bytes,
                    kept.changed_ns,
                ):
                    return fd, kept
                state, baseline, found = read_session(self.directory, session, fd)
                self._sync_names(session)
                encoder = RequestEncoder(tools=baseline.tools, fixed=self._fixed, alternate=alternate)
                encoder.add(chat.System(content=baseline.system))
                for message in found:
                    encoder.add(message)
                return fd, _Known(now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, state, encoder)
            except BaseException:
                os.close(fd)
                raise

        return await self.disk.run(open_log)

    def _sync_names(self, session: SessionId) -> None:
        """Make the log's name durable: a repair may have put the log there and been killed before it synced."""
        try:
            sync_directory(self.directory / session)
        except OSError as exc:
            raise StorageError(action="open", file=self._log(session), reason=exc.strerror or str(exc)) from exc

    def _keep(self, session: SessionId, known: _Known) -> None:
        """Remember the session just used; forget the least recently used ones beyond the limit."""
        known.kept_bytes = known.encoder.size_bytes + _STATE_BYTES
        self._kept[session] = known
        self._kept_bytes += known.kept_bytes
        while self._kept_bytes > self._memory_bytes:
            self._take_kept(next(iter(self._kept)))

    def _take_kept(self, session: SessionId) -> _Known | None:
        known = self._kept.pop(session, None)
        if known is not None:
            self._kept_bytes -= known.kept_bytes
        return known


def open_locked(sessions: Path, session: SessionId) -> int:
    """Open a session's log for appending and take its `flock`; the caller closes the descriptor.

    Raises:
        NoSuchSession, SessionBusy, SessionDamaged, StorageError.
    """
    file = sessions / session / LOG_NAME
    try:
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as exc:
        if exc.errno == errno.ENOENT and not os.path.lexists(sessions / session):
            raise NoSuchSession(session=session) from exc
        if exc.errno in NO_FILE:
            raise SessionDamaged(file=file, line=0, problem=f"is no log file: {exc.strerror}") from exc
        raise StorageError(action="open", file=file, reason=exc.strerror or str(exc)) from exc
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SessionDamaged(file=file, line=0, problem="is no log file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(file, fd):  # another program put a new file there between open and flock
            raise SessionBusy(session=session)
    except BaseException as exc:
        os.close(fd)
        if isinstance(exc, BlockingIOError):
            raise SessionBusy(session=session) from exc
        if isinstance(exc, OSError):
            raise StorageError(action="lock", file=file, reason=exc.strerror or str(exc)) from exc
        raise
    return fd


def _is_at(file: Path, fd: int) -> bool:
    """Does a path still name the file that is open?"""
    try:
        return os.path.samestat(os.lstat(file), os.fstat(fd))
    except FileNotFoundError:
        return False


def read_session(sessions: Path, session: SessionId, fd: int) -> tuple[LogState, Baseline, list[chat.ChatMessage]]:
    """Read a log and its baseline whole.

    Gives the state, the baseline, and the messages after the system message.

    Raises:
        SessionDamaged: naming file and line. StorageError: the disk said no.
    """
    file = sessions / session / LOG_NAME
    state = LogState(session)
    found: list[chat.ChatMessage] = []
    for line_number, line in split_log(file, _read_all(file, fd, LOG_MAX_BYTES)):
        try:
            message = state.apply(decode_line(line))
        except (ValueRefused, OutOfOrder) as exc:
            raise SessionDamaged(file=file, line=line_number, problem=str(exc)) from exc
        if message is not None:
            found.append(message)
    if state.start is None:
        raise SessionDamaged(file=file, line=1, problem="the log is empty")
    return state, read_baseline(sessions / session / BASELINE_NAME, state.start.baseline), found


def split_log(file: Path, raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Cut a log into its lines, numbered from 1; LF alone ends a line.

    Raises:
        SessionDamaged: for a last line without its LF, once all others were given.
    """
    *lines, rest = raw.split(b"\n")
    yield from enumerate(lines, start=1)
    if rest:
        raise SessionDamaged(
            file=file,
            line=len(lines) + 1,
            problem=f"the last line is torn: {len(rest)} bytes without an end",
            torn=True,
        )


def check_size(file: Path, size_bytes: int, most_bytes: int) -> None:
    """Refuse a file that is larger than any that we write; raises SessionDamaged."""
    if size_bytes > most_bytes:
        raise SessionDamaged(file=file, line=0, problem=f"has {size_bytes} bytes, allowed are {most_bytes}")


def _read_all(file: Path, fd: int, most_bytes: int) -> bytes:
    try:
        size = os.fstat(fd).st_size
        check_size(file, size, most_bytes)
        raw = b""
        while len(raw) < size:
            piece = os.pread(fd, size - len(raw), len(raw))
            if not piece:
                break
            raw += piece
        return raw
    except OSError as exc:
        raise StorageError(action="read", file=file, reason=exc.strerror or str(exc)) from exc


def read_baseline(file: Path, expected_hash: str) -> Baseline:
    """Read a baseline and check it against the hash that the log names.

    Raises:
        SessionDamaged: it is missing, no file, another one, or no baseline. StorageError: the disk said no.
    """
    try:
        return BASELINE.decode(read_baseline_bytes(file, expected_hash))
    except ValueRefused as exc:
        raise SessionDamaged(file=file, line=0, problem=str(exc)) from exc


def read_baseline_bytes(file: Path, expected_hash: str) -> bytes:
    """The same, not looked into."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno in NO_FILE:
            raise SessionDamaged(file=file, line=0, problem=f"is no baseline file: {exc.strerror}") from exc
        raise StorageError(action="open", file=file, reason=exc.strerror or str(exc)) from exc
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SessionDamaged(file=file, line=0, problem="is no baseline file")
        raw = _read_all(file, fd, BASELINE_MAX_BYTES)
    finally:
        os.close(fd)
    if baseline_hash(raw) != expected_hash:
        raise SessionDamaged(file=file, line=0, problem="the baseline is not the one that the session began with")
    return raw
