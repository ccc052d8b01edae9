"""The disk: appends that are whole or not there, directories likewise, and where the work is done."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from boxmaker.session.disk import (
    Disk,
    InlineDisk,
    ThreadDisk,
    append_durably,
    create_directory,
    sweep_new,
    sync_directory,
    write_new,
)

from .child import run_in_child
from .kernel import kernel_calls, open_descriptors

DISKS: list[Disk] = [ThreadDisk(), InlineDisk()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def opened(file: Path) -> Iterator[int]:
    fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)


# -- appends ----------------------------------------------------------------------------------


def test_an_append_is_added_at_the_end(tmp_path: Path) -> None:
    with opened(tmp_path / "log") as fd:
        append_durably(fd, b"one\n")
        append_durably(fd, b"")
        append_durably(fd, b"two\n" * 50_000)
    assert (tmp_path / "log").read_bytes() == b"one\n" + b"two\n" * 50_000


def test_an_append_that_cannot_be_synced_is_an_error() -> None:
    """A pipe takes the bytes and cannot be synced: without the sync this would pass for written."""
    reads, writes = os.pipe()
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            append_durably(writes, b"x")
    finally:
        os.close(reads)
        os.close(writes)


def test_an_append_is_written_at_once_and_then_synced(tmp_path: Path) -> None:
    with opened(tmp_path / "log") as fd, kernel_calls() as calls:
        append_durably(fd, b"one\ntwo\n")
    assert calls == ["write", "fdatasync"]


def limit_files(size_bytes: int | None) -> None:
    """Let no file of this process grow over a size: the disk is full."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size_bytes is None else size_bytes, hard))


def child_appends_to_a_full_disk(directory: Path) -> None:
    file = directory / "log"
    with opened(file) as fd:
        append_durably(fd, b"1" * 100)
        limit_files(150)
        for more in (100, 51):
            with pytest.raises(OSError, match=f"only 50 of {more} bytes could be written") as short:
                append_durably(fd, b"2" * more)
            assert short.value.errno == errno.ENOSPC
            assert file.read_bytes() == b"1" * 100
        append_durably(fd, b"3" * 50)
        with pytest.raises(OSError, match="File too large"):
            append_durably(fd, b"4")
        assert file.read_bytes() == b"1" * 100 + b"3" * 50
        limit_files(None)
        append_durably(fd, b"5")
        assert file.read_bytes() == b"1" * 100 + b"3" * 50 + b"5"


@pytest.mark.real
def test_an_append_that_a_full_disk_cuts_short_is_cut_back(tmp_path: Path) -> None:
    assert run_in_child(child_appends_to_a_full_disk, tmp_path) == 0


# -- new files and directories ----------------------------------------------------------------


def test_a_new_file_takes_no_name_that_is_taken(tmp_path: Path) -> None:
    write_new(tmp_path / "a", b"1")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_what_is_made_is_the_owners_alone_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        create_directory(tmp_path / "s", {"a": b"1", "b": b"2"})
    assert mode(tmp_path / "s") == 0o700
    assert [mode(tmp_path / "s" / name) for name in "ab"] == [0o600, 0o600]


def test_a_directory_is_made_with_its_files(tmp_path: Path) -> None:
    create_directory(tmp_path / "s", {"a": b"1", "b": b""})
    assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == {"a": b"1", "b": b""}
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_directory_gets_its_name_when_its_files_are_on_the_disk(tmp_path: Path) -> None:
    """Each file is synced, then their names, and only then the directory's own name, synced too."""
    with kernel_calls() as calls:
        create_directory(tmp_path / "s", {"a": b"1", "b": b"2"})
    assert calls == ["mkdir", "write", "fdatasync", "write", "fdatasync", "fsync", "rename", "fsync"]


def test_a_directory_that_cannot_be_synced_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        sync_directory(Path("/proc/self"))


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = open_descriptors()
    create_directory(tmp_path / "s", {"a": b"1"})
    with pytest.raises(FileExistsError):
        create_directory(tmp_path / "s", {"a": b"1"})
    with pytest.raises(OSError, match="Invalid argument"):
        sync_directory(Path("/proc/self"))
    assert open_descriptors() == before


def taken_names(parent: Path) -> Iterator[Path]:
    """One name for each kind of thing that may have it."""
    for name in ("empty", "full"):
        (parent / name).mkdir()
    (parent / "full" / "x").write_bytes(b"x")
    (parent / "file").write_bytes(b"x")
    (parent / "dangling").symlink_to(parent / "nowhere")
    (parent / "link").symlink_to(parent / "empty")
    yield from sorted(parent.iterdir())


def test_a_name_that_is_taken_is_refused_and_nothing_has_changed(tmp_path: Path) -> None:
    names = list(taken_names(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    for path in names:
        with pytest.raises(FileExistsError):
            create_directory(path, {"a": b"1"})
        assert sorted(tmp_path.rglob("*")) == before


class Overtaken(Mapping[str, bytes]):
    """Files whose directory's name is taken by somebody else while they are written."""

    def __init__(self, directory: Path, *, as_file: bool) -> None:
        self._directory = directory
        self._as_file = as_file

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        yield "a"

    def __getitem__(self, name: str) -> bytes:
        if self._as_file:
            self._directory.write_bytes(b"theirs")
        else:
            self._directory.mkdir()
            (self._directory / "a").write_bytes(b"theirs")
        return b"ours"


@pytest.mark.parametrize("as_file", [True, False])
def test_a_name_that_is_taken_meanwhile_is_refused(tmp_path: Path, as_file: bool) -> None:
    with pytest.raises(FileExistsError):
        create_directory(tmp_path / "s", Overtaken(tmp_path / "s", as_file=as_file))
    assert (tmp_path / "s" if as_file else tmp_path / "s" / "a").read_bytes() == b"theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_failed_creation_leaves_nothing_and_the_name_can_be_used(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        create_directory(tmp_path / "s", {"a": b"1", "no/such": b"2"})
    assert list(tmp_path.iterdir()) == []
    create_directory(tmp_path / "s", {"a": b"1"})
    with pytest.raises(FileNotFoundError):
        create_directory(tmp_path / "missing" / "s", {"a": b"1"})
    with pytest.raises(OSError, match="File name too long"):
        create_directory(tmp_path / ("s" * 256), {"a": b"1"})
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def child_creates_where_names_cannot_be_synced(directory: Path) -> None:
    """In a directory that may be written but not read; the superuser may everything, so be another."""
    os.chdir(directory)
    os.chmod(".", 0o300)
    if os.geteuid() == 0:
        os.chown(".", 65534, 65534)
        os.setuid(65534)
    with pytest.raises(PermissionError):
        create_directory(Path("s"), {"a": b"1"})


@pytest.mark.real
def test_a_creation_whose_name_cannot_be_synced_is_undone(tmp_path: Path) -> None:
    directory = tmp_path / "sessions"
    directory.mkdir()
    assert run_in_child(child_creates_where_names_cannot_be_synced, directory) == 0
    directory.chmod(0o700)
    assert list(directory.iterdir()) == []


def test_of_creations_at_once_one_wins(tmp_path: Path) -> None:
    for number in range(20):
        barrier = threading.Barrier(4)
        outcomes: list[str] = []

        def create(name: str, directory: Path, barrier: threading.Barrier, outcomes: list[str]) -> None:
            barrier.wait(30)
            try:
                create_directory(directory, {"a": name.encode(), "b": name.encode()})
            except FileExistsError:
                outcomes.append("")
            else:
                outcomes.append(name)

        directory = tmp_path / str(number)
        threads = [
            threading.Thread(target=create, args=(name, directory, barrier, outcomes)) for name in ("p", "q", "r", "s")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        *lost, winner = sorted(outcomes)
        assert lost == ["", "", ""]
        assert {path.read_text() for path in directory.iterdir()} == {winner}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".new-")]


class Killed(Mapping[str, bytes]):
    """Files that the process does not live to write: it is killed at the second."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        yield "a"
        os.kill(os.getpid(), signal.SIGKILL)

    def __getitem__(self, name: str) -> bytes:
        return b"1"


def child_dies_in_a_creation(directory: Path) -> None:
    create_directory(directory / "s", Killed())


@pytest.mark.real
def test_what_a_killed_creation_leaves_is_swept_and_the_name_can_be_used(tmp_path: Path) -> None:
    assert run_in_child(child_dies_in_a_creation, tmp_path) == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".new-")
    assert [path.name for path in left.iterdir()] == ["a"]
    assert sweep_new(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []
    create_directory(tmp_path / "s", {"a": b"1"})


def child_creates_on_a_full_disk(directory: Path) -> None:
    limit_files(10)
    with pytest.raises(OSError, match="only 10 of 11 bytes"):
        create_directory(directory / "s", {"a": b"1" * 10, "b": b"1" * 11})
    assert list(directory.iterdir()) == []
    create_directory(directory / "s", {"a": b"1" * 10, "b": b"1" * 10})


@pytest.mark.real
def test_a_creation_that_a_full_disk_stops_leaves_nothing(tmp_path: Path) -> None:
    assert run_in_child(child_creates_on_a_full_disk, tmp_path) == 0


def test_the_sweep_takes_leftovers_alone(tmp_path: Path) -> None:
    assert sweep_new(tmp_path) == 0
    create_directory(tmp_path / "s", {"a": b"1"})
    create_directory(tmp_path / "new-x", {"a": b"1"})
    for name in (".new-1", ".new-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.jsonl").write_bytes(b"x")
    assert sweep_new(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new-x", "s"]


# -- where the work is done -------------------------------------------------------------------


@pytest.mark.parametrize("disk", DISKS)
async def test_work_gives_its_result_or_raises(disk: Disk) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "no room")

    with trio.fail_after(30):
        assert await disk.run(lambda: 7) == 7
        with pytest.raises(OSError, match="no room"):
            await disk.run(fail)


@pytest.mark.parametrize("disk", DISKS)
async def test_a_cancelled_caller_begins_no_work(disk: Disk) -> None:
    done: list[str] = []
    with trio.fail_after(30), trio.CancelScope() as scope:
        scope.cancel()
        await disk.run(lambda: done.append("work"))
    assert scope.cancelled_caught
    assert done == []


async def test_the_daemons_disk_works_in_another_thread_while_the_loop_goes_on() -> None:
    released = threading.Event()

    def work() -> int:
        assert released.wait(30), "the loop stood still"
        return threading.get_ident()

    async def release() -> None:
        await trio.testing.wait_all_tasks_blocked()
        released.set()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(release)
            thread = await ThreadDisk().run(work)
    assert thread != threading.get_ident()


async def test_work_that_has_begun_is_not_abandoned_when_its_caller_is_cancelled() -> None:
    """An abandoned thread would write into whatever has the file's number next."""
    begun, released = threading.Event(), threading.Event()
    given: list[str] = []

    def work() -> str:
        begun.set()
        assert released.wait(30)
        return "done"

    async def call() -> None:
        given.append(await ThreadDisk().run(work))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.to_thread.run_sync(begun.wait)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
                assert given == []
                released.set()
    assert given == ["done"], "the caller learns what has happened"


async def test_the_tests_disk_works_in_the_loop_and_no_time_passes(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 3600)  # the clock would jump here while a thread worked
        with trio.testing.assert_checkpoints():
            assert await InlineDisk().run(threading.get_ident) == threading.get_ident()
        assert trio.current_time() == 0
        nursery.cancel_scope.cancel()
