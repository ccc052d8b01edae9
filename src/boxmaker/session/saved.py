"""The files of saved slots in `[slots] save_dir`: the server writes `.kv`, we write the `.json` record beside it.

Laws:
* Files of a session are known by their name, a digest of home and session; which sessions have files here, by the
  records that name them. Nothing else is ever removed.
* Whatever is missing or damaged here costs a cache and nothing more: anybody may empty the directory at any time.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from attrs import frozen

from boxmaker.errors import ValueRefused
from boxmaker.proto.ids import SessionId
from boxmaker.proto.saved import SAVED_SLOT, SavedSlot

RECORD_MAX_BYTES = 65_536
_NAME = re.compile(r"boxmaker-[0-9a-f]{32}\.json")


@frozen
class SavedFiles:
    """Those of one home. Every method but `kv_name` blocks on the disk, and raises OSError where that says no."""

    directory: Path
    home: Path

    def kv_name(self, session: SessionId) -> str:
        """The name of a session's file, of letters that every server takes."""
        digest = hashlib.sha256(f"{self.home}\0{session}".encode()).hexdigest()
        return f"boxmaker-{digest[:32]}.kv"

    def _record(self, session: SessionId) -> Path:
        return self.directory / Path(self.kv_name(session)).with_suffix(".json")

    def size(self, session: SessionId) -> int | None:
        """How many bytes the server has written for a session; None when there is no file."""
        try:
            return os.lstat(self.directory / self.kv_name(session)).st_size
        except FileNotFoundError:
            return None

    def write(self, saved: SavedSlot) -> None:
        """Put the record of a session in place, whole or not at all."""
        record = self._record(saved.session)
        building = record.with_suffix(".new")
        fd = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(SAVED_SLOT.encode(saved) + "\n")
        os.replace(building, record)

    def read(self, session: SessionId) -> SavedSlot | None:
        """The record of a session whose file is there and whole; None without."""
        saved = self._read(self._record(session))
        return saved if saved is not None and saved.session == session and self._is_whole(saved) else None

    def _is_whole(self, saved: SavedSlot) -> bool:
        return saved.tokens > 0 and saved.bytes == self.size(saved.session)

    def last_in(self, slot: int) -> SessionId | None:
        """Whose record of a slot was written last: at a restore it is written again."""
        found = [(self._written_ns(one), one.session) for one in self._ours() if one.slot == slot]
        return max(found)[1] if found else None

    def _written_ns(self, saved: SavedSlot) -> int:
        return os.lstat(self._record(saved.session)).st_mtime_ns

    def remove(self, session: SessionId) -> None:
        """Remove what a session has here; the record goes last, so that nothing is left without one."""
        for file in (self.directory / self.kv_name(session), self._record(session)):
            file.unlink(missing_ok=True)

    def sweep(self, exists: Callable[[SessionId], bool]) -> int:
        """Remove what no session of this home has any use for; how many sessions' files that were."""
        swept = 0
        for saved in list(self._ours()):
            if not exists(saved.session) or not self._is_whole(saved):
                self.remove(saved.session)
                swept += 1
        return swept

    def keep_within(self, most_bytes: int, keep: SessionId | None) -> list[SessionId]:
        """Remove what was of use longest ago until the rest is at most `most_bytes`; the sessions concerned.

        `keep` is about to be restored: it stays.
        """
        found = [(self._written_ns(one), self.size(one.session) or 0, one.session) for one in self._ours()]
        total = sum(size for _, size, _ in found)
        removed: list[SessionId] = []
        for _, size, session in sorted(found):
            if total <= most_bytes:
                break
            if session == keep:
                continue
            self.remove(session)
            removed.append(session)
            total -= size
        return removed

    def _ours(self) -> Iterator[SavedSlot]:
        for entry in os.scandir(self.directory):
            if _NAME.fullmatch(entry.name):
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
