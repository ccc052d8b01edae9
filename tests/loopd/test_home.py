"""Tests of the home, its lock and the socket file, on real directories, flocks and sockets."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from boxmaker.errors import StartError
from boxmaker.loopd.home import bound_socket, home_problem, lock_holder, lock_home, prepare_home


def mode(path: Path) -> int:
    """The permission bits of a file."""
    return stat.S_IMODE(path.lstat().st_mode)


@contextmanager
def umask(value: int) -> Iterator[None]:
    """Make files as a careless shell would have them made."""
    before = os.umask(value)
    try:
        yield
    finally:
        assert os.umask(before) == value, "the umask is as it was"


# -- the home ----------------------------------------------------------------------------------


def test_everything_that_is_made_is_0700_whatever_the_umask(short_dir: Path) -> None:
    home = short_dir / "above" / "home"
    with umask(0):
        prepare_home(home)
    made = [home.parent, home, home / "sessions", home / "run", home / "run" / "loop"]
    assert [oct(mode(path)) for path in made] == ["0o700"] * 5


def test_a_home_that_exists_is_left_as_it_is(short_dir: Path) -> None:
    prepare_home(short_dir)
    session = short_dir / "sessions" / "s"
    session.mkdir()
    short_dir.chmod(0o750)
    prepare_home(short_dir)
    assert session.is_dir()
    assert mode(short_dir) == 0o750


@pytest.mark.parametrize("where", ["file", "file/below", "dangling", "n" * 300])
def test_a_home_that_cannot_be_made_is_an_error_that_names_it_and_boxmaker_home(short_dir: Path, where: str) -> None:
    (short_dir / "file").touch(0o700)
    (short_dir / "dangling").symlink_to("nowhere")
    home = short_dir / where
    problem = home_problem(home)
    assert problem is not None
    with pytest.raises(StartError) as caught:
        prepare_home(home)
    for text in (problem, str(caught.value)):
        assert str(home) in text
        assert "BOXMAKER_HOME" in text
    assert sorted(path.name for path in short_dir.iterdir()) == ["dangling", "file"]


def test_a_home_that_does_not_exist_yet_is_no_problem(short_dir: Path) -> None:
    assert home_problem(short_dir / "not" / "yet") is None
    assert list(short_dir.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_home_of_somebody_else_is_refused_naming_both(short_dir: Path) -> None:
    home = short_dir / "home"
    home.mkdir()
    os.chown(home, 12345, -1)
    with pytest.raises(StartError, match=r"belongs to uid 12345, loopd runs as uid 0"):
        prepare_home(home)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_is_not_writable_is_refused(short_dir: Path) -> None:
    home = short_dir / "home"
    prepare_home(home)
    home.chmod(0o500)
    problem = home_problem(home)
    assert problem is not None
    assert "not writable" in problem
    assert home_problem(home / "below") is not None


# -- the lock ----------------------------------------------------------------------------------


def test_a_second_lock_of_a_home_is_refused_naming_the_pid(short_dir: Path) -> None:
    prepare_home(short_dir)
    with umask(0), lock_home(short_dir):
        assert mode(short_dir / "run" / "loop" / "loopd.lock") == 0o600
        with pytest.raises(StartError) as caught, lock_home(short_dir):
            pass
        assert str(caught.value) == f"the home {short_dir} is served by another loopd, pid {os.getpid()}"
        assert lock_holder(short_dir) == f"pid {os.getpid()}"
    assert lock_holder(short_dir) is None
    with lock_home(short_dir):
        pass


def test_the_pid_of_a_daemon_that_is_gone_is_neither_believed_nor_left(short_dir: Path) -> None:
    prepare_home(short_dir)
    (short_dir / "run" / "loop" / "loopd.lock").write_text("4194304000\n", "ascii")
    assert lock_holder(short_dir) is None
    with lock_home(short_dir):
        assert lock_holder(short_dir) == f"pid {os.getpid()}"


def test_no_home_has_no_holder(short_dir: Path) -> None:
    assert lock_holder(short_dir / "none") is None
    assert list(short_dir.iterdir()) == []


@pytest.mark.parametrize("kind", ["symlink", "directory"])
def test_a_lock_that_is_no_file_is_refused_and_untouched(short_dir: Path, kind: str) -> None:
    prepare_home(short_dir)
    lock, other = short_dir / "run" / "loop" / "loopd.lock", short_dir / "other"
    other.write_text("mine", "utf-8")
    if kind == "symlink":
        lock.symlink_to(other)
    else:
        lock.mkdir()
    with pytest.raises(StartError, match=r"loopd\.lock"), lock_home(short_dir):
        pass
    assert other.read_text("utf-8") == "mine"


HOLD = """
import sys
from pathlib import Path
from boxmaker.loopd.home import lock_home
with lock_home(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.real
def test_a_lock_names_the_process_that_has_it_and_goes_with_it_even_by_kill_9(short_dir: Path) -> None:
    prepare_home(short_dir)
    command = [sys.executable, "-c", HOLD, str(short_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        assert lock_holder(short_dir) == f"pid {child.pid}"
        with pytest.raises(StartError, match=f"pid {child.pid}$"), lock_home(short_dir):
            pass
        child.kill()
        child.wait(10)
    with lock_home(short_dir):
        pass


# -- the socket --------------------------------------------------------------------------------


def test_the_socket_is_0600_whatever_the_umask_and_goes_with_the_block(short_dir: Path) -> None:
    path = short_dir / "s"
    with umask(0), bound_socket(path) as listener:
        assert mode(path) == 0o600
        assert stat.S_ISSOCK(path.lstat().st_mode)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            listener.accept()[0].close()
    assert not path.exists()


def test_a_socket_that_nobody_answers_on_is_replaced(short_dir: Path) -> None:
    path = short_dir / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    with bound_socket(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_that_somebody_answers_on_is_refused_and_untouched(short_dir: Path) -> None:
    path = short_dir / "s"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        with pytest.raises(StartError, match="another program answers"), bound_socket(path):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_socket_whose_owner_is_too_busy_to_answer_is_untouched(short_dir: Path) -> None:
    path = short_dir / "s"
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as first:
        living.bind(str(path))
        living.listen(0)
        first.connect(str(path))
        with pytest.raises(StartError, match="another program answers"), bound_socket(path):
            pass
        assert path.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "symlink to nothing", "symlink to a dead socket", "fifo"])
def test_what_is_no_socket_is_refused_and_untouched(short_dir: Path, kind: str) -> None:
    path, other = short_dir / "s", short_dir / "other"
    if kind == "file":
        path.write_text("mine", "utf-8")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(other)
        if kind == "symlink to a dead socket":
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(other))
    before = path.lstat()
    with pytest.raises(StartError, match="is not a socket"), bound_socket(path):
        pass
    assert path.lstat() == before
    assert other.is_socket() == (kind == "symlink to a dead socket")


@pytest.mark.parametrize("other", ["socket", "file", "nothing"])
def test_what_took_our_sockets_place_meanwhile_is_left_alone(short_dir: Path, other: str) -> None:
    path = short_dir / "s"
    with socket.socket(socket.AF_UNIX) as stranger:
        with bound_socket(path):
            path.unlink()
            if other == "socket":
                stranger.bind(str(path))
            elif other == "file":
                path.write_text("mine", "utf-8")
        assert path.exists() == (other != "nothing")


def test_the_socket_goes_when_the_block_ends_with_an_exception(short_dir: Path) -> None:
    def fail() -> None:
        with bound_socket(short_dir / "s"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(short_dir.iterdir()) == []


def test_a_path_of_107_bytes_is_bound_and_one_of_108_is_refused_with_the_limit(short_dir: Path) -> None:
    longest = short_dir / ("x" * (107 - len(str(short_dir)) - 1))
    with bound_socket(longest):
        assert longest.exists()
    with (
        pytest.raises(StartError, match=r"has 108 bytes, a unix socket allows 107; set \[channel\] socket"),
        bound_socket(longest.with_name(longest.name + "x")),
    ):
        pass


@pytest.mark.parametrize("where", ["none/s", "file/s"])
def test_a_socket_whose_directory_is_missing_is_an_error_that_names_the_path(short_dir: Path, where: str) -> None:
    (short_dir / "file").write_text("", "utf-8")
    with pytest.raises(StartError, match=str(short_dir / where)), bound_socket(short_dir / where):
        pass
