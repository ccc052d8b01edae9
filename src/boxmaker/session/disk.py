"""The disk: durable appends, whole directories at once, and where the waiting is done.

Laws:
* What `append_durably` returned from is on the disk; what it raised from is not in the file.
* A directory made by `create_directory` is there whole or not at all.
* Files are 0600 and directories 0700 from their first moment.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")

NEW_PREFIX = ".new-"


class Disk(Protocol):
    """Where blocking file work is done."""

    async def run(self, work: Callable[[], T]) -> T:
        """Do the work and give its result; raises what it raises.

        Cancellation: checked on entry only. Work that has begun is finished, and its result given.
        """
        ...


class ThreadDisk:
    """The daemon's disk: one thread call a piece of work, so that a slow disk stops nobody else."""

    async def run(self, work: Callable[[], T]) -> T:
        """Do the work in a thread, which is never abandoned: the number of its file may be used again."""
        return await trio.to_thread.run_sync(work)


class InlineDisk:
    """The same work in the loop itself, for tests whose clock jumps while a thread works."""

    async def run(self, work: Callable[[], T]) -> T:
        """Do the work here, after one checkpoint."""
        await trio.lowlevel.checkpoint()
        return work()


def append_durably(fd: int, data: bytes) -> None:
    """Write at the end of a file and sync it.

    Raises:
        OSError: the disk said no; the file is cut back to where the append began.
    """
    began = os.fstat(fd).st_size
    try:
        written = os.write(fd, data)
        if written != len(data):
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes could be written")
        os.fdatasync(fd)
    except BaseException:
        os.ftruncate(fd, began)
        raise


def write_new(file: Path, data: bytes) -> None:
    """Make a file that does not exist yet, with this content, synced."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        append_durably(fd, data)
    finally:
        os.close(fd)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def create_directory(directory: Path, files: Mapping[str, bytes]) -> None:
    """Make a directory with its files in one step: built beside, synced, renamed into place.

    Raises:
        FileExistsError: the name is taken; nothing has changed.
        OSError: the disk said no; the name can be used again.
    """
    parent = directory.parent
    building = parent / f"{NEW_PREFIX}{secrets.token_hex(8)}"
    placed = False
    try:
        building.mkdir(mode=0o700)
        for name, data in files.items():
            write_new(building / name, data)
        sync_directory(building)
        if os.path.lexists(directory):
            raise FileExistsError(errno.EEXIST, "exists", str(directory))
        try:
            os.rename(building, directory)
        except OSError as exc:
            if exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, "exists", str(directory)) from exc
            raise
        placed = True
        sync_directory(parent)
    except BaseException:
        shutil.rmtree(directory if placed else building, ignore_errors=True)
        raise


def sweep_new(parent: Path) -> int:
    """Remove what killed creations have left; give their number."""
    leftovers = [path for path in parent.iterdir() if path.name.startswith(NEW_PREFIX)]
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return len(leftovers)
