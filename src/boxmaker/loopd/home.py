"""The home directory and the socket: made, checked and locked before anything is served.

Laws:
* One daemon a home: a `flock` on `run/loop/loopd.lock`, which holds the pid for the error text.
* A socket file is removed only when it is a socket, nobody answers on it, or it is our own.

Source: design.md sections 4 and 6.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from boxmaker.channel.client import SOCKET_PATH_MAX_BYTES
from boxmaker.errors import StartError

LISTEN_BACKLOG = 512


def prepare_home(home: Path) -> None:
    """Make the home and what is in it, 0700 each.

    Raises:
        StartError: it cannot be made or written, or is somebody else's.
    """
    try:
        for directory in (home, home / "sessions", home / "run", home / "run" / "loop"):
            directory.mkdir(mode=0o700, parents=directory == home, exist_ok=True)
    except OSError as exc:
        raise StartError(
            message=f"the home {home} cannot be made: {exc.strerror}; "
            "set BOXMAKER_HOME or [paths] home to a directory that is yours"
        ) from exc
    problem = home_problem(home)
    if problem:
        raise StartError(message=problem)


def home_problem(home: Path) -> str | None:
    """Say why a home that exists cannot be used, or None."""
    owner = home.stat().st_uid
    if owner != os.geteuid():
        return f"the home {home} belongs to uid {owner}, loopd runs as uid {os.geteuid()}; set BOXMAKER_HOME"
    if not os.access(home, os.W_OK | os.X_OK):
        return f"the home {home} is not writable; set BOXMAKER_HOME or change its mode to 0700"
    return None


@contextmanager
def lock_home(home: Path) -> Iterator[None]:
    """Hold the home's lock; it goes with the process, however that ends.

    Raises:
        StartError: another daemon has it, named by its pid.
    """
    file = home / "run" / "loop" / "loopd.lock"
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise StartError(message=f"the home {home} is served by another loopd, {_holder(fd)}") from exc
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def lock_holder(home: Path) -> str | None:
    """Say who serves a home now (`pid 123`), or None."""
    try:
        fd = os.open(home / "run" / "loop" / "loopd.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(fd)
    finally:
        os.close(fd)
    return None


def _holder(fd: int) -> str:
    return f"pid {os.pread(fd, 32, 0).decode('ascii', 'replace').strip() or 'unknown'}"


@contextmanager
def bound_socket(path: Path) -> Iterator[socket.socket]:
    """Listen on a socket of mode 0600; its file goes when the block is left, if it is still ours.

    Raises:
        StartError: the path is too long, is taken by something that is not a dead socket, or cannot be made.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_MAX_BYTES:
        raise StartError(
            message=f"the socket path {path} has {len(os.fsencode(path))} bytes, a unix socket allows "
            f"{SOCKET_PATH_MAX_BYTES}; set [channel] socket to a shorter one"
        )
    _remove_dead_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
        except OSError as exc:
            raise StartError(message=f"cannot listen on {path}: {exc.strerror}") from exc
        finally:
            os.umask(before)
        made = os.lstat(path)
        listener.listen(LISTEN_BACKLOG)
        try:
            yield listener
        finally:
            _remove_own(path, made)
    finally:
        listener.close()


def _remove_own(path: Path, made: os.stat_result) -> None:
    try:
        now = os.lstat(path)
    except FileNotFoundError:
        return
    if (now.st_dev, now.st_ino) == (made.st_dev, made.st_ino):
        path.unlink(missing_ok=True)


def _remove_dead_socket(path: Path) -> None:
    """lstat, is it a socket, does anybody answer, only then unlink."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise StartError(message=f"cannot look at {path}: {exc.strerror}") from exc
    if not stat.S_ISSOCK(found.st_mode):
        raise StartError(message=f"{path} exists and is not a socket; remove it, or set [channel] socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        error = probe.connect_ex(os.fspath(path))
    if error == errno.ECONNREFUSED:
        _remove_own(path, found)
    elif error != errno.ENOENT:
        raise StartError(message=f"another program answers on {path}; set [channel] socket, or end it")
