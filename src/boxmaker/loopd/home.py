"""The home directory and the socket: made, checked and locked before anything is served.

Laws:
* One daemon a home: a `flock` on `run/loop/loopd.lock`, which holds the pid for the error text.
* A socket file is removed only when it is a socket, nobody answers on it, or it is our own.
* A home that serves is on the disk: without the names of its directories, a power loss would take every session.

Source: design.md sections 4 and 6.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from boxmaker.errors import StartError
from boxmaker.proto.channel import SOCKET_PATH_MAX_BYTES
from boxmaker.session.disk import sync_directory

LISTEN_BACKLOG = 512
FIRST_PASSED_FD = 3
LOCK_TRIES = 10
LOCK_TRY_S = 0.02


def prepare_home(home: Path) -> None:
    """Make the home and what is in it, 0700 each.

    Raises:
        StartError: it cannot be made or written, or is somebody else's.
    """
    before = os.umask(0o077)  # for parents too: mkdir gives them no mode of ours
    try:
        for directory in (home, home / "sessions", home / "run", home / "run" / "loop"):
            directory.mkdir(mode=0o700, parents=directory == home, exist_ok=True)
        _sync_names(home)
    except OSError as exc:
        raise StartError(
            message=f"the home {home} cannot be made: {exc.strerror}; "
            "set BOXMAKER_HOME or [paths] home to a directory that is yours"
        ) from exc
    finally:
        os.umask(before)
    problem = home_problem(home)
    if problem:
        raise StartError(message=problem)


def _sync_names(home: Path) -> None:
    """Make home's own name durable, those in it, and those of its sessions.

    An earlier daemon may have been killed when it had made one and not synced it: what is built on it now would be
    lost with it. So all directories where we may have made one are synced; what we may not read, or what knows no
    sync, is left out.
    """
    for directory in (home / "sessions", home, *home.parents):
        if os.access(directory, os.W_OK):
            try:
                sync_directory(directory)
            except OSError as exc:
                if exc.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                    raise


def home_problem(home: Path) -> str | None:
    """Say why a home cannot be used, or why one that does not exist cannot be made; or None."""
    try:
        found = home.stat()
    except FileNotFoundError:
        above = next(parent for parent in home.parents if os.path.lexists(parent))
        if above.is_dir() and os.access(above, os.W_OK | os.X_OK) and not home.is_symlink():
            return None
        return f"the home {home} cannot be made in {above}; set BOXMAKER_HOME"
    except OSError as exc:
        return f"the home {home} cannot be used: {exc.strerror}; set BOXMAKER_HOME"
    if not stat.S_ISDIR(found.st_mode):
        return f"the home {home} is no directory; set BOXMAKER_HOME"
    if found.st_uid != os.geteuid():
        return f"the home {home} belongs to uid {found.st_uid}, loopd runs as uid {os.geteuid()}; set BOXMAKER_HOME"
    if not os.access(home, os.W_OK | os.X_OK):
        return f"the home {home} is not writable; set BOXMAKER_HOME or change its mode to 0700"
    return None


def exposed_directory(home: Path) -> Path | None:
    """A directory at, in or above a home where others can rename and replace what is ours; None when there is none.

    In a sticky one (/tmp) they can not.
    """
    real = home.resolve()
    for directory in (real / "run" / "loop", real / "run", real / "sessions", real, *real.parents):
        with suppress(OSError):
            mode = directory.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return directory
    return None


@contextmanager
def lock_home(home: Path) -> Iterator[None]:
    """Hold the home's lock; it goes with the process, however that ends.

    Raises:
        StartError: another daemon has it, named by its pid; or the lock's file cannot be written.
    """
    fd = _take_lock(home)
    try:
        yield
    finally:
        os.close(fd)


def _take_lock(home: Path) -> int:
    file = home / "run" / "loop" / "loopd.lock"
    fd = -1
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _lock_in_time(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as exc:
        taken = isinstance(exc, BlockingIOError)
        message = f"the home {home} is served by another loopd, {_holder(fd)}" if taken else f"{file}: {exc.strerror}"
        if fd >= 0:
            os.close(fd)
        raise StartError(message=message) from exc
    return fd


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


def _lock_in_time(fd: int) -> None:
    """Take the lock; a self-test that looks who holds it has it for an instant."""
    for _ in range(LOCK_TRIES):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_TRY_S)
    return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def inherited_socket(environ: MutableMapping[str, str]) -> socket.socket | None:
    """The listening socket that systemd passed, if it did; the variables are taken out of `environ`.

    Raises:
        StartError: there are several, or it is no listening unix stream socket.

    Source: sd_listen_fds(3).
    """
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or count == "0":
        return None
    if count != "1":
        raise StartError(message=f"systemd passed {count} sockets, loopd takes one; mend the .socket unit")
    try:
        passed = socket.socket(fileno=FIRST_PASSED_FD)
    except OSError as exc:
        raise StartError(message=f"what systemd passed is no socket: {exc.strerror}") from exc
    listening = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if passed.family != socket.AF_UNIX or passed.type != socket.SOCK_STREAM or not listening:
        passed.close()
        raise StartError(message="systemd passed a socket that is no listening unix stream: use ListenStream=/a/path")
    passed.set_inheritable(False)
    passed.setblocking(False)
    return passed


def notify_systemd(state: str, environ: Mapping[str, str]) -> None:
    """Tell a `Type=notify` unit how we are (`READY=1`); nothing happens where nobody listens.

    Source: sd_notify(3).
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # the abstract namespace
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender, suppress(OSError):
        sender.sendto(state.encode(), address)


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
    try:
        _remove_dead_socket(path)
    except OSError as exc:
        raise StartError(message=f"cannot make room for a socket at {path}: {exc.strerror}") from exc
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
        except OSError as exc:
            raise StartError(
                message=f"cannot listen on {path}: {exc.strerror}; make its directory, or set [channel] socket"
            ) from exc
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
    if not stat.S_ISSOCK(found.st_mode):
        raise StartError(message=f"{path} exists and is not a socket; remove it, or set [channel] socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        error = probe.connect_ex(os.fspath(path))
    if error == errno.ECONNREFUSED:
        _remove_own(path, found)
    elif error != errno.ENOENT:
        raise StartError(message=f"another program answers on {path}; set [channel] socket, or end it")
