"""The files of saved slots in `[slots] save_dir`: the server writes `.kv`, we write the `.json` record beside it.

Laws:
* Files of a session are known by their name, a digest of home and session; nothing else is ever removed.
* What is saved stays until a newer state is there whole: the server writes `.saving`, which takes the `.kv`'s place.
* Whatever is missing or damaged here costs a cache and nothing more: anybody may empty the directory at any time.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from attrs import evolve, frozen

from boxmaker.errors import ValueRefused
from boxmaker.proto.ids import SessionId
from boxmaker.proto.saved import SAVED_SLOT, SavedSlot

RECORD_MAX_BYTES = 65_536
_NAME = re.compile(r"(boxmaker-[0-9a-f]{32})\.(kv|saving|json|new)")


@frozen
class SavedFiles:
    """Those of one home. Every method that is not about names blocks on the disk, and raises OSError."""

    directory: Path
    home: Path

    def stem(self, session: SessionId) -> str:
        """What the names of a session's files begin with: letters that every server takes."""
        digest = hashlib.sha256(f"{self.home}\0{session}".encode()).hexdigest()
        return f"boxmaker-{digest[:32]}"

    def kv_name(self, session: SessionId) -> str:
        """The file that the server restores."""
        return f"{self.stem(session)}.kv"

    def saving_name(self, session: SessionId) -> str:
        """The file that the server is asked to write."""
        return f"{self.stem(session)}.saving"

    def _record(self, session: SessionId) -> Path:
        return self._file(session, "json")

    def _file(self, session: SessionId, suffix: str) -> Path:
        return self.directory / f"{self.stem(session)}.{suffix}"

    def size(self, name: str) -> int | None:
        """How many bytes a file of the server's has; None when it is not there."""
        try:
            return os.lstat(self.directory / name).st_size
        except FileNotFoundError:
            return None

    def begin(self, saved: SavedSlot) -> None:
        """The server is about to be asked to save: leave a record, so that what it writes is known as ours."""
        if self.read(saved.session) is None:
            self._write(evolve(saved, tokens=0, bytes=0))

    def complete(self, saved: SavedSlot) -> None:
        """The server has written what `saved` says: put it in the place of what was there.

        When we die in the middle the record says that there is nothing.
        """
        older = self.read(saved.session)
        self._write(evolve(saved, tokens=0, bytes=0))
        try:
            os.replace(self._file(saved.session, "saving"), self._file(saved.session, "kv"))
        except OSError:
            if older is not None:
                self._write(older)
            raise
        self._write(saved)

    def give_up(self, session: SessionId) -> None:
        """The server has not saved: what it may have written goes, what was saved before stays."""
        for suffix in ("saving", "new"):
            self._file(session, suffix).unlink(missing_ok=True)
        if self.read(session) is None:
            self.remove(session)

    def touch(self, session: SessionId) -> None:
        """It was of use just now."""
        os.utime(self._record(session))

    def _write(self, saved: SavedSlot) -> None:
        """Put the record of a session in place, whole or not at all, over a loss of power too."""
        record = self._record(saved.session)
        building = record.with_suffix(".new")
        fd = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(SAVED_SLOT.encode(saved) + "\n")
            file.flush()
            os.fsync(fd)
        os.replace(building, record)

    def read(self, session: SessionId) -> SavedSlot | None:
        """The record of a session whose file is there and whole; None without."""
        saved = self._read(self._record(session))
        return saved if saved is not None and saved.session == session and self._is_whole(saved) else None

    def _is_whole(self, saved: SavedSlot) -> bool:
        return saved.tokens > 0 and saved.bytes == self.size(self.kv_name(saved.session))

    def remove(self, session: SessionId) -> None:
        """Remove what a session has here; the record goes last, so that nothing is left without one."""
        for suffix in ("kv", "saving", "new", "json"):
            self._file(session, suffix).unlink(missing_ok=True)

    def sweep(self, sessions: Collection[SessionId]) -> int:
        """Remove what no session of this home, of which there are `sessions`, has any use for; of how many that was."""
        swept = 0
        names = {match[1] for entry in os.scandir(self.directory) if (match := _NAME.fullmatch(entry.name))}
        owners = {self.stem(session): session for session in sessions}
        owners |= {self.stem(saved.session): saved.session for saved in self._ours()}
        for name in sorted(names & owners.keys()):
            session = owners[name]
            if session not in sessions or self.read(session) is None:
                self.remove(session)
                swept += 1
            else:
                self.give_up(session)
        return swept

    def keep_within(self, most_bytes: int, keep: SessionId | None) -> list[SessionId]:
        """Remove what was of use longest ago until the rest is at most `most_bytes`; the sessions concerned.

        `keep` is about to be restored: it stays. What does not fit even alone goes before all others.
        """
        found = [
            (size <= most_bytes, os.lstat(self._record(one)).st_mtime_ns, size, one)
            for one, size in ((saved.session, self._bytes(saved.session)) for saved in self._ours())
        ]
        total = sum(size for _, _, size, _ in found)
        removed: list[SessionId] = []
        for _, _, size, session in sorted(found):
            if total <= most_bytes:
                break
            if session == keep:
                continue
            self.remove(session)
            removed.append(session)
            total -= size
        return removed

    def _bytes(self, session: SessionId) -> int:
        return sum(self.size(name) or 0 for name in (self.kv_name(session), self.saving_name(session)))

    def _ours(self) -> Iterator[SavedSlot]:
        for entry in os.scandir(self.directory):
            if _NAME.fullmatch(entry.name) and entry.name.endswith(".json"):
                saved = self._read(Path(entry.path))
                if saved is not None and self._record(saved.session).name == entry.name:
                    yield saved

    def _read(self, record: Path) -> SavedSlot | None:
        try:
            fd = os.open(record, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            saved = SAVED_SLOT.decode(os.read(fd, RECORD_MAX_BYTES).rstrip(b"\n"))
        except (OSError, ValueRefused):
            return None
        finally:
            os.close(fd)
        return saved
