"""Runs our programs, each in a fork, and kills one at a chosen call to the disk.

Laws:
* A program is run by its own command line and is not told: the functions of `os` are wrapped around it.
* What is on the disk for certain stands in a journal outside of the watched tree: the length of a file at its last
  sync, the names in a directory at its last sync. A file that has a synced name is linked into `keep`, so that it
  can be had back after the name is gone.
* Jobs come on stdin, a line of JSON each; all that is said, and all that the program says, goes to stderr.
  When stdin ends, the program that runs is killed and we end too.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # the same as the programs below
import json
import os
import select
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NoReturn

import httpcore  # noqa: F401  # the same; httpx imports it when it is used
import trio
import trio.testing
from attrs import frozen

import boxmaker.bxctl.chat  # all that a program needs is here before it is forked: another user may not read it
import boxmaker.bxctl.logs
import boxmaker.loopd.serve
import boxmaker.session.logs  # noqa: F401  # the same
from boxmaker.bxctl.cli import main as bxctl
from boxmaker.loopd.cli import main as loopd

MARK = "\x1e"
"""Begins a line of ours on stderr: the pid of the program, or how it ended."""

Phase = Literal["before", "inside", "after"]
Program = Literal["loopd", "bxctl"]


@frozen(kw_only=True)
class Job:
    """A program to run; its calls to the disk below `root` are counted, and the `point`-th kills it."""

    program: Program
    arguments: list[str]
    root: str
    journal: str | None = None
    """Where the journal is written, or gone on with; None: the calls are not watched."""
    keep: str = ""
    point: int | None = None
    phase: Phase = "before"
    uid: int | None = None
    """Whom the program runs as, where that is another."""


class Watch:
    """The wrapped functions of `os`, for one process."""

    def __init__(self, job: Job) -> None:
        assert job.journal is not None
        self._root = os.path.realpath(job.root)
        self._keep = job.keep
        self._point = job.point
        self._phase = job.phase
        self._count = 0
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in WRAPPED}
        first = not os.path.exists(job.journal)
        self._journal = os.open(job.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if first:
            self._note_all()

    def install(self) -> None:
        """Wrap them."""
        for name in WRAPPED:
            setattr(os, name, getattr(self, name))

    # -- the functions ---------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Not a point: the name that it makes is as good as not there until the first write."""
        new = bool(flags & os.O_CREAT) and not os.path.lexists(self._place(path, dir_fd))
        fd: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if new and self._is_ours(self._place(path, dir_fd)):
            self._note(file=os.fstat(fd).st_ino, length=0)
        return fd

    def write(self, fd: int, data: bytes) -> int:
        half = data[: len(data) // 2]
        return int(
            self._at_fd("write", fd, lambda: self._real["write"](fd, data), lambda: self._real["write"](fd, half))
        )

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        half = data[: len(data) // 2]
        whole = lambda: self._real["pwrite"](fd, data, offset)  # noqa: E731
        return int(self._at_fd("pwrite", fd, whole, lambda: self._real["pwrite"](fd, half, offset)))

    def ftruncate(self, fd: int, length: int) -> None:
        self._at_fd("ftruncate", fd, lambda: self._real["ftruncate"](fd, length))

    def fdatasync(self, fd: int) -> None:
        self._at_fd("fdatasync", fd, lambda: self._synced(fd, "fdatasync"))

    def fsync(self, fd: int) -> None:
        self._at_fd("fsync", fd, lambda: self._synced(fd, "fsync"))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        def make() -> None:
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            self._note(directory=os.stat(path, dir_fd=dir_fd).st_ino, names={})

        self._at_path("mkdir", path, dir_fd, make)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._at_path("unlink", path, dir_fd, lambda: self._real["unlink"](path, dir_fd=dir_fd))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._at_path("rmdir", path, dir_fd, lambda: self._real["rmdir"](path, dir_fd=dir_fd))

    def link(self, src: Any, dst: Any, **more: Any) -> None:
        self._at_path("link", dst, more.get("dst_dir_fd"), lambda: self._real["link"](src, dst, **more))

    def rename(self, src: Any, dst: Any, **more: Any) -> None:
        self._at_path("rename", dst, more.get("dst_dir_fd"), lambda: self._real["rename"](src, dst, **more))

    def replace(self, src: Any, dst: Any, **more: Any) -> None:
        self._at_path("replace", dst, more.get("dst_dir_fd"), lambda: self._real["replace"](src, dst, **more))

    # -- points ----------------------------------------------------------------------------------

    def _at_fd(
        self, name: str, fd: int, call: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:  # a call's own type
        try:
            where = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            return call()
        return self._step(name, where, call, half) if self._is_ours(where) else call()

    def _at_path(self, name: str, path: Any, dir_fd: int | None, call: Callable[[], Any]) -> Any:
        where = self._place(path, dir_fd)
        return self._step(name, where, call, None) if self._is_ours(where) else call()

    def _step(self, name: str, where: str, call: Callable[[], Any], half: Callable[[], Any] | None) -> Any:
        self._count += 1
        self._note(call=name, path=os.path.relpath(where, self._root), cut=half is not None)
        here = self._count == self._point
        if here and self._phase == "before":
            die()
        if here and self._phase == "inside" and half is not None:
            half()
            die()
        try:
            return call()
        finally:
            if here:
                die()

    def _place(self, path: Any, dir_fd: int | None) -> str:
        above = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        return os.path.normpath(os.path.join(above, os.fspath(path)))

    def _is_ours(self, where: str) -> bool:
        return where == self._root or where.startswith(self._root + "/")

    # -- what is on the disk for certain ---------------------------------------------------------

    def _note_all(self) -> None:
        """Take what was there before the journal for synced."""
        for directory, _, files in os.walk(self._root):
            for name in files:
                found = os.lstat(os.path.join(directory, name))
                if stat.S_ISREG(found.st_mode):
                    self._note(file=found.st_ino, length=found.st_size)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            self._note_names(fd)
            os.close(fd)

    def _synced(self, fd: int, name: str) -> None:
        found = os.fstat(fd)
        self._real[name](fd)
        if not self._is_ours(os.readlink(f"/proc/self/fd/{fd}")):  # above the root, where others come and go
            return
        if stat.S_ISDIR(found.st_mode):
            self._note_names(fd)
        else:
            self._note(file=found.st_ino, length=found.st_size)

    def _note_names(self, fd: int) -> None:
        names = {}
        for name in os.listdir(fd):
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode):
                names[name] = [found.st_ino, "file"]
                kept = os.path.join(self._keep, str(found.st_ino))
                if not os.path.exists(kept):
                    self._real["link"](name, kept, src_dir_fd=fd, follow_symlinks=False)
            elif stat.S_ISDIR(found.st_mode):
                names[name] = [found.st_ino, "directory"]
        self._note(directory=os.fstat(fd).st_ino, names=names)

    def _note(self, **what: Any) -> None:
        self._real["write"](self._journal, json.dumps(what).encode() + b"\n")


WRAPPED = (
    "open", "write", "pwrite", "ftruncate", "fdatasync", "fsync", "mkdir", "unlink", "rmdir", "link", "rename",
    "replace",
)  # fmt: skip


def die() -> NoReturn:
    """End as `kill -9` does, when all that the daemon has said is said.

    The loop may have an event that it was given and has not sent: which of the two threads is quicker must not
    decide what a channel has seen.
    """
    with suppress(RuntimeError):  # this is the loop's own thread, or there is no loop
        trio.from_thread.run(trio.testing.wait_all_tasks_blocked)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def run(job: Job) -> int:
    """Be the program; its exit status."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # ours was made for what was there before
    if job.journal is not None:
        Watch(job).install()
    if job.uid is not None:
        os.setgroups([])
        os.setgid(job.uid)
        os.setuid(job.uid)
    try:
        {"loopd": loopd, "bxctl": bxctl}[job.program](job.arguments, prog_name=job.program)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def say(*words: object) -> None:
    """A line of ours."""
    os.write(2, f"{MARK}{' '.join(map(str, words))}\n".encode())


def main() -> None:
    """Take jobs until stdin ends."""
    say("ready")
    while line := sys.stdin.buffer.readline():
        job = Job(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = run(job)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        say("pid", pid)
        ended = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(0, select.POLLHUP)
        if ended not in dict(poll.poll()):
            os.kill(pid, signal.SIGKILL)
        os.close(ended)
        say("exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
