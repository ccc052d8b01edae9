"""The store: creating, appending, resuming, who may have a session, and what is kept in memory."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from boxmaker.errors import (
    InternalError,
    NoSuchSession,
    SessionBusy,
    SessionDamaged,
    SessionExists,
    StorageError,
    WireableError,
)
from boxmaker.inference.request import RequestEncoder
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import Assistant, CacheLoss, LogRecord, decode_line
from boxmaker.session.baseline import Baseline
from boxmaker.session.disk import InlineDisk, ThreadDisk
from boxmaker.session.replay import messages
from boxmaker.session.store import Store, open_locked

from .child import run_in_child
from .homes import (
    BASELINE,
    BASELINE_RAW,
    CLOCK,
    FIXED,
    MIB,
    S,
    T,
    assistant,
    body,
    call,
    lay_out,
    lines,
    make_store,
    new_session,
    result,
    said,
    say,
    start_record,
    usage,
    user,
)
from .kernel import failing, kernel_calls, open_descriptors
from .strategies import writer_records
from .test_disk import limit_files, umask

R = TypeVar("R")
HASH = hashlib.sha256(BASELINE_RAW).hexdigest()
START_LINE = (
    '{"type":"session_start","time":"2026-11-30T14:15:30.123Z","session":"s","epoch":0,"slot":0,'
    f'"baseline":"{HASH}"}}\n'
).encode()
USER_LINE = '{"type":"user","time":"2026-11-30T14:15:30.123Z","content":"größe"}\n'.encode()
USER = '{"role":"user","content":"größe"}'


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, and its content."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def kept(store: Store) -> list[str]:
    """The sessions in memory, least recently used first."""
    return list(store._kept)


def assert_idle(store: Store) -> None:
    """No turn has a session, and no creation has left anything."""
    assert not store._running
    assert not [path for path in store.directory.iterdir() if path.name.startswith(".new-")]


# -- creating ---------------------------------------------------------------------------------


async def test_a_new_session_has_its_baseline_and_one_line(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    async with store.turn(S, resume=False, new=new_session(), alternate=False) as session:
        assert tree(store.directory) == {"s/0.baseline.json": BASELINE_RAW, "s/0.jsonl": START_LINE}
        assert session.id == "s"
        assert session.state.start == start_record()
        assert session.request_body() == body()


async def test_a_session_is_pinned_to_the_slot_of_its_time(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    new = new_session()
    async with store.turn(S, resume=False, new=type(new)(slot=3, baseline=new.baseline), alternate=False) as session:
        assert session.state.start is not None
        assert session.state.start.slot == 3


async def test_a_sessions_files_are_the_owners_alone_under_any_umask(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with umask(0):
        await say(store, user("hi"), resume=False)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.directory.rglob("*")}
    assert found == {"s": 0o700, "0.baseline.json": 0o600, "0.jsonl": 0o600}


@pytest.mark.parametrize("what", ["session", "directory", "file", "dangling symlink"])
async def test_a_name_that_is_taken_is_session_exists(tmp_path: Path, what: str) -> None:
    store = make_store(tmp_path)
    path = store.directory / "s"
    match what:
        case "session":
            await say(store, user("hi"), resume=False)
        case "directory":
            path.mkdir()
        case "file":
            path.write_bytes(b"x")
        case "dangling symlink":
            path.symlink_to(tmp_path / "nowhere")
    before = tree(tmp_path)
    with pytest.raises(SessionExists) as caught:
        await say(store, resume=False)
    assert caught.value.detail() == {"session": "s"}
    assert tree(tmp_path) == before
    assert_idle(store)


async def test_a_session_that_does_not_exist_cannot_be_resumed(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with pytest.raises(NoSuchSession) as caught:
        await say(store)
    assert caught.value.detail() == {"session": "s"}
    assert list(store.directory.iterdir()) == []
    assert_idle(store)


async def test_a_failed_creation_leaves_an_id_that_can_be_used(tmp_path: Path) -> None:
    store = make_store(tmp_path)

    def no_baseline() -> Baseline:
        raise StorageError(action="read", file=tmp_path / "system.md", reason="gone")

    with pytest.raises(StorageError, match=r"system\.md"):
        async with store.turn(S, resume=False, new=new_session(no_baseline), alternate=False):
            pass
    store.directory.rmdir()
    with pytest.raises(StorageError, match="cannot create") as caught:
        await say(store, resume=False)
    assert caught.value.detail() == {"file": str(store.directory / "s"), "action": "create"}
    store.directory.mkdir()
    assert await say(store, user("größe"), resume=False) == body(USER)


async def test_of_two_creations_at_once_in_one_daemon_one_wins(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    outcomes: list[str] = []

    async def create() -> None:
        try:
            await say(store, user("hi"), resume=False)
            outcomes.append("made")
        except SessionExists:
            outcomes.append("exists")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(create)
        nursery.start_soon(create)
    assert sorted(outcomes) == ["exists", "made"]


async def test_of_two_creations_at_once_in_two_stores_one_wins(tmp_path: Path) -> None:
    """Two stores know nothing of each other: the disk decides, in two threads."""
    outcomes: list[str] = []
    barrier = threading.Barrier(2)

    def baseline() -> Baseline:
        barrier.wait(30)
        return BASELINE

    async def create(store: Store, session: str) -> None:
        try:
            async with store.turn(SessionId(session), resume=False, new=new_session(baseline), alternate=False):
                outcomes.append("made")
        except SessionExists:
            outcomes.append("exists")

    with trio.fail_after(60):
        for number in range(10):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(create, make_store(tmp_path, ThreadDisk()), f"s{number}")
    assert sorted(outcomes) == ["exists"] * 10 + ["made"] * 10
    assert len(list((tmp_path / "sessions").iterdir())) == 10


@pytest.mark.parametrize("steps", range(10))
async def test_a_cancel_at_any_step_leaves_a_whole_session_or_none(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, steps: int
) -> None:
    store = make_store(tmp_path)
    ran_out = False

    async def cancel_later(scope: trio.CancelScope) -> None:
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_later, nursery.cancel_scope)
            await say(store, user("größe"), resume=False)
            ran_out = True
            nursery.cancel_scope.cancel()
        assert_idle(store)
        files = tree(store.directory)
        assert files in (
            {},
            {"s/0.baseline.json": BASELINE_RAW, "s/0.jsonl": START_LINE},
            {"s/0.baseline.json": BASELINE_RAW, "s/0.jsonl": START_LINE + USER_LINE},
        )
        if ran_out:
            assert len(files.get("s/0.jsonl", b"")) == len(START_LINE + USER_LINE)
        whole = body(USER) if len(files.get("s/0.jsonl", b"")) > len(START_LINE) else body()
        assert await say(store, resume=bool(files)) == whole


# -- appending --------------------------------------------------------------------------------


async def test_a_record_is_its_line_in_the_log_and_its_message_in_the_body(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    async with store.turn(S, resume=False, new=new_session(), alternate=False) as session:
        await session.append(user("größe"))
        assert (store.directory / "s" / "0.jsonl").read_bytes() == START_LINE + USER_LINE
        assert session.request_body() == body(USER)
        await session.append(assistant("noon", call("c1")), usage(), CacheLoss(time=T, expected=9, got=1))
        replied = (
            '{"role":"assistant","content":"noon","tool_calls":[{"id":"c1","type":"function",'
            '"function":{"name":"clock","arguments":"{}"}}]}'
        )
        assert session.request_body() == body(USER, replied)
        assert session.state.open_calls == [call("c1")]
        await session.append(result("c1", 0, "12:00"))
        told = '{"role":"tool","tool_call_id":"c1","content":"12:00"}'
        assert session.request_body() == body(USER, replied, told)
        assert session.state.open_calls == []
        assert session.state.next_call == 1


class CountingDisk:
    """Counts pieces of work."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self, work: Callable[[], R]) -> R:
        self.count += 1
        return await InlineDisk().run(work)


async def test_records_that_belong_together_are_one_append(tmp_path: Path) -> None:
    disk = CountingDisk()
    store = make_store(tmp_path, disk)
    async with store.turn(S, resume=False, new=new_session(), alternate=False) as session:
        await session.append(user("hi"))
        before = disk.count
        await session.append(assistant("ho"), usage(), CacheLoss(time=T, expected=9, got=1))
        assert disk.count == before + 1
        before = disk.count
        session.request_body()
        assert disk.count == before, "the body costs no reading"


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([result("c9", 0)], "no open call"),
        ([usage()], "usage does not follow"),
        ([start_record()], "has one"),
        ([user("a \ud800 surrogate")], "surrogate"),
        ([assistant("x", call("c1")), usage(), user("y")], "has no result"),
    ],
)
async def test_a_record_that_cannot_stand_there_is_our_fault_and_nothing_is_written(
    tmp_path: Path, records: list[LogRecord], why: str
) -> None:
    store = make_store(tmp_path)
    async with store.turn(S, resume=False, new=new_session(), alternate=False) as session:
        await session.append(user("größe"))
        before = tree(tmp_path), session.state, session.request_body()
        with pytest.raises(InternalError, match=why):
            await session.append(*records)
        assert (tree(tmp_path), session.state, session.request_body()) == before
        await session.append(user("more"))
    assert await say(store) == body(USER, said("more"))


async def test_a_record_that_its_line_does_not_give_back_is_our_fault(tmp_path: Path) -> None:
    """What goes on is what the log says: a list where a tuple belongs would not be that."""
    store = make_store(tmp_path)
    listed = Assistant(time=T, content=None, reasoning_content=None, tool_calls=[call("c1")])  # type: ignore[arg-type]
    async with store.turn(S, resume=False, new=new_session(), alternate=False) as session:
        with pytest.raises(InternalError, match="does not survive its own line"):
            await session.append(user("größe"), listed)
        assert session.request_body() == body()
    assert (store.directory / "s" / "0.jsonl").read_bytes() == START_LINE


async def test_a_cancelled_append_is_not_begun(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    async with store.turn(S, resume=False, new=new_session(), alternate=False) as session:
        with trio.CancelScope() as scope:
            scope.cancel()
            await session.append(user("never"))
        assert scope.cancelled_caught
        assert session.request_body() == body()
        await session.append(user("größe"))
    assert await say(store) == body(USER)


async def test_an_append_that_has_begun_is_in_the_state_although_its_turn_was_cancelled(tmp_path: Path) -> None:
    """Else the turn would write a result for a call again that the log has already."""
    begun, released = threading.Event(), threading.Event()

    class SlowDisk:
        slow = False

        async def run(self, work: Callable[[], R]) -> R:
            def slowly() -> R:
                if self.slow:
                    begun.set()
                    assert released.wait(30)
                return work()

            return await ThreadDisk().run(slowly)

    disk = SlowDisk()
    store = make_store(tmp_path, disk)
    with trio.fail_after(60):
        async with store.turn(S, resume=False, new=new_session(), alternate=False) as session:
            disk.slow = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.append, user("größe"))
                await trio.to_thread.run_sync(begun.wait)
                nursery.cancel_scope.cancel()
                released.set()
            disk.slow = False
            assert session.request_body() == body(USER)
    assert (store.directory / "s" / "0.jsonl").read_bytes() == START_LINE + USER_LINE


# -- resuming ---------------------------------------------------------------------------------

TURN: list[LogRecord] = [user("größe"), assistant("noon"), usage()]
ANSWER = '{"role":"assistant","content":"noon"}'


async def test_a_cold_store_goes_on_where_the_other_stopped(tmp_path: Path) -> None:
    first = await say(make_store(tmp_path), *TURN, resume=False)
    store = make_store(tmp_path)
    async with store.turn(S, resume=True, new=new_session(), alternate=False) as session:
        assert session.request_body() == first == body(USER, ANSWER)
        await session.append(user("größe"))
        assert session.request_body() == body(USER, ANSWER, USER)


async def test_the_baseline_comes_from_the_file_that_the_session_began_with(tmp_path: Path) -> None:
    await say(make_store(tmp_path), *TURN, resume=False)

    def other() -> Baseline:
        raise AssertionError("system.md is read for new sessions only")

    store = make_store(tmp_path)
    for _ in "cold", "warm":
        async with store.turn(S, resume=True, new=new_session(other), alternate=False) as session:
            assert session.request_body() == body(USER, ANSWER)


async def test_a_template_that_has_changed_encodes_the_session_anew(tmp_path: Path) -> None:
    note = '{"role":"assistant","content":"[No answer was given.]"}'
    store = make_store(tmp_path)
    plain = await say(store, user("größe"), user("größe"), resume=False)
    assert plain == body(USER, USER)
    assert await say(store, alternate=True) == body(USER, note, USER)
    assert await say(store, alternate=False) == plain


async def test_calls_that_a_crash_left_open_are_open_after_resuming(tmp_path: Path) -> None:
    lay_out(tmp_path, lines(user("hi"), assistant(None, call("a"), call("b")), usage(), result("a", 4)))
    async with make_store(tmp_path).turn(S, resume=True, new=new_session(), alternate=False) as session:
        assert session.state.open_calls == [call("b")]
        assert session.state.next_call == 5


# -- who may have a session -------------------------------------------------------------------


async def test_a_session_that_a_turn_has_is_busy(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    async with store.turn(S, resume=False, new=new_session(), alternate=False):
        with pytest.raises(SessionBusy) as caught:
            await say(store)
        assert caught.value.detail() == {"session": "s"}
        await say(store, user("hi"), session="other", resume=False)
    await say(store, user("größe"))


async def test_that_a_session_exists_is_said_before_that_it_is_busy(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    async with store.turn(S, resume=False, new=new_session(), alternate=False):
        with pytest.raises(SessionExists):
            await say(store, resume=False)
        with pytest.raises(SessionExists):
            await say(make_store(tmp_path), resume=False)


@pytest.mark.parametrize("ending", ["normal", "error", "cancel"])
async def test_a_session_is_free_whatever_ends_its_turn(tmp_path: Path, ending: str) -> None:
    store = make_store(tmp_path)
    with trio.CancelScope() as scope:
        try:
            async with store.turn(S, resume=False, new=new_session(), alternate=False) as session:
                await session.append(user("größe"))
                if ending == "error":
                    raise ValueError("a fault of ours")
                if ending == "cancel":
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
        except ValueError:
            pass
    assert_idle(store)
    assert await say(store) == body(USER)
    assert await say(make_store(tmp_path)) == body(USER)


@pytest.mark.parametrize(("resume", "outcome"), [(True, "late"), (False, "late: session_exists")])
async def test_a_turn_whose_channel_has_gone_is_waited_for(tmp_path: Path, resume: bool, outcome: str) -> None:
    store = make_store(tmp_path)
    got: list[str] = []

    async def take(name: str, resume: bool) -> None:
        try:
            await say(store, user(name), resume=resume)
        except WireableError as refused:
            got.append(f"{name}: {refused.code}")
        else:
            got.append(name)

    gone = False
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            async with store.turn(S, resume=False, new=new_session(), alternate=False, gone=lambda: gone) as session:
                await take("early", True)
                assert got == ["early: session_busy"]
                gone = True
                nursery.start_soon(take, "late", resume)
                await trio.testing.wait_all_tasks_blocked()
                assert got == ["early: session_busy"], "it waits"
                await session.append(user("last words"))
    assert got == ["early: session_busy", outcome]
    assert await say(store) == body(said("last words"), *([said("late")] if resume else []))


async def test_of_two_that_wait_for_a_gone_turn_one_is_next_and_the_other_meets_it(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    released = trio.Event()
    outcomes: list[str] = []

    async def take() -> None:
        try:
            async with store.turn(S, resume=True, new=new_session(), alternate=False):
                outcomes.append("had it")
                await released.wait()
        except SessionBusy:
            outcomes.append("busy")

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            async with store.turn(S, resume=False, new=new_session(), alternate=False, gone=lambda: True):
                nursery.start_soon(take)
                nursery.start_soon(take)
                await trio.testing.wait_all_tasks_blocked()
            await trio.testing.wait_all_tasks_blocked()
            assert sorted(outcomes) == ["busy", "had it"]
            released.set()


async def test_who_stops_waiting_takes_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with trio.fail_after(30):
        async with store.turn(S, resume=False, new=new_session(), alternate=False, gone=lambda: True) as session:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(say, store)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            await session.append(user("größe"))
        assert_idle(store)
        assert await say(store) == body(USER)


async def test_a_log_that_another_program_has_locked_is_busy(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    await say(store, user("größe"), resume=False)
    with (store.directory / "s" / "0.jsonl").open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        for other in (store, make_store(tmp_path)):
            with pytest.raises(SessionBusy):
                await say(other)
            with pytest.raises(SessionExists):
                await say(other, resume=False)
            assert_idle(other)
    assert await say(store) == body(USER)


async def test_a_running_turn_has_its_log_locked(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    async with store.turn(S, resume=False, new=new_session(), alternate=False):
        with (store.directory / "s" / "0.jsonl").open("rb") as theirs:
            with pytest.raises(BlockingIOError):
                fcntl.flock(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)
    with (store.directory / "s" / "0.jsonl").open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)


HOLDER = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('locked', flush=True); input()"


@pytest.mark.real
async def test_a_log_that_another_process_has_locked_is_busy_until_that_is_killed(tmp_path: Path) -> None:
    store = make_store(tmp_path, ThreadDisk())
    await say(store, user("größe"), resume=False)
    command = [sys.executable, "-c", HOLDER, str(store.directory / "s" / "0.jsonl")]
    with trio.fail_after(60):
        holder = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert holder.stdin is not None
        assert holder.stdout is not None
        async with holder.stdin, holder.stdout:
            try:
                assert await holder.stdout.receive_some(1) == b"l", "it has the lock"
                with pytest.raises(SessionBusy):
                    await say(store)
            finally:
                holder.kill()
                await holder.wait()
        assert await say(store) == body(USER)


# -- changes by others ------------------------------------------------------------------------


async def test_a_log_that_grew_between_turns_is_read_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    await say(store, resume=False)
    with (store.directory / "s" / "0.jsonl").open("ab") as log:
        log.write(USER_LINE)
    assert await say(store) == body(USER)


async def test_a_log_that_was_replaced_between_turns_is_read_again(tmp_path: Path) -> None:
    """As `bxctl session repair` and most editors do it, here with as many bytes as before."""
    store = make_store(tmp_path)
    await say(store, user("größe"), resume=False)
    log = store.directory / "s" / "0.jsonl"
    other = log.with_suffix(".new")
    other.write_bytes(log.read_bytes().replace("größe".encode(), b"laenge1"))
    other.rename(log)
    assert await say(store) == body(said("laenge1"))


async def test_a_log_that_was_edited_in_place_between_turns_is_read_again(tmp_path: Path) -> None:
    """With as many bytes in the same file: only the time of the change tells."""
    store = make_store(tmp_path)
    await say(store, user("größe"), resume=False)
    log = store.directory / "s" / "0.jsonl"
    raw = log.read_bytes().replace("größe".encode(), b"laenge1")
    later = log.stat().st_mtime_ns + 1_000_000
    with log.open("r+b") as opened:
        opened.write(raw)
    os.utime(log, ns=(later, later))  # the clock of a file system may be coarser than two writes
    assert await say(store) == body(said("laenge1"))


async def test_a_session_that_was_removed_is_gone_and_its_id_is_free(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    await say(store, user("größe"), resume=False)
    shutil.rmtree(store.directory / "s")
    with pytest.raises(NoSuchSession):
        await say(store)
    assert await say(store, resume=False) == body()


async def test_nothing_of_a_removed_session_is_taken_for_the_new_one_with_its_id(tmp_path: Path) -> None:
    """The new log may have the inode number and the size of the old one."""
    store = make_store(tmp_path)
    for system in ("one", "two", "six", "ten"):
        new = new_session(lambda system=system: Baseline(system=system, tools=()))  # type: ignore[misc]
        async with store.turn(S, resume=False, new=new, alternate=False) as session:
            assert session.request_body().startswith(
                b'{"messages":[{"role":"system","content":"%s"}]' % system.encode()
            )
        shutil.rmtree(store.directory / "s")


def grow(log: Path) -> None:
    with log.open("ab") as opened:
        opened.write(USER_LINE)


def shrink(log: Path) -> None:
    os.truncate(log, len(START_LINE))


def replace(log: Path) -> None:
    other = log.with_suffix(".new")
    shutil.copy(log, other)
    other.rename(log)


def remove(log: Path) -> None:
    shutil.rmtree(log.parent)


@pytest.mark.parametrize("change", [grow, shrink, replace, remove])
async def test_a_change_of_the_log_during_a_turn_is_storage(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """What is appended after it would stand in the wrong place, or in a file that nobody finds."""
    store = make_store(tmp_path)
    log = store.directory / "s" / "0.jsonl"
    async with store.turn(S, resume=False, new=new_session(), alternate=False) as session:
        await session.append(user("größe"))
        change(log)
        changed = tree(tmp_path)
        with pytest.raises(StorageError, match="another program has changed the log") as caught:
            await session.append(user("lost"))
        assert caught.value.detail() == {"file": str(log), "action": "append to"}
        assert tree(tmp_path) == changed
        assert session.request_body() == body(USER)
    if change is remove:
        with pytest.raises(NoSuchSession):
            await say(store)
    else:
        assert await say(store) == (body(USER, USER) if change is grow else body() if change is shrink else body(USER))


def test_a_log_that_is_replaced_between_open_and_lock_is_busy(tmp_path: Path) -> None:
    """A repair that ends just then leaves us the lock of a file that nobody finds any more."""
    log = lay_out(tmp_path, lines())

    def interfere(name: str) -> None:
        if name == "flock":
            replace(log)

    before = open_descriptors()
    with kernel_calls(interfere), pytest.raises(SessionBusy):
        open_locked(tmp_path / "sessions", S)
    assert open_descriptors() == before
    os.close(open_locked(tmp_path / "sessions", S))


def test_a_lock_that_the_kernel_does_not_give_is_storage(tmp_path: Path) -> None:
    lay_out(tmp_path, lines())
    before = open_descriptors()
    with kernel_calls(failing("flock", errno.ENOLCK)), pytest.raises(StorageError, match="cannot lock"):
        open_locked(tmp_path / "sessions", S)
    assert open_descriptors() == before


@pytest.mark.parametrize("skipped", [0, 1])
async def test_a_file_that_the_disk_does_not_give_is_storage_and_no_damage(tmp_path: Path, skipped: int) -> None:
    """The log is read first, then the baseline; nobody should be told to repair either."""
    log = lay_out(tmp_path, lines(user("größe")))
    reads: list[str] = []

    def fail_later(name: str) -> None:
        if name == "pread":
            reads.append(name)
            if len(reads) > skipped:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    with kernel_calls(fail_later), pytest.raises(StorageError, match="cannot read") as caught:
        await say(make_store(tmp_path))
    assert caught.value.file == [log, log.with_name("0.baseline.json")][skipped]
    assert await say(make_store(tmp_path)) == body(USER)


@pytest.mark.parametrize("call_name", ["write", "fdatasync"])
async def test_an_append_that_the_disk_refuses_is_storage_and_leaves_all_as_it_was(
    tmp_path: Path, call_name: str
) -> None:
    store = make_store(tmp_path)
    log = store.directory / "s" / "0.jsonl"
    async with store.turn(S, resume=False, new=new_session(), alternate=False) as session:
        await session.append(user("größe"))
        before = log.read_bytes(), session.state, session.request_body()
        with kernel_calls(failing(call_name, errno.EIO)), pytest.raises(StorageError, match="Input/output error"):
            await session.append(user("lost"))
        assert (log.read_bytes(), session.state, session.request_body()) == before
        await session.append(user("kept"))
    assert await say(make_store(tmp_path)) == body(USER, said("kept"))


@pytest.mark.parametrize("call_name", ["mkdir", "write", "fdatasync", "fsync", "rename"])
async def test_a_creation_that_the_disk_refuses_leaves_an_id_that_can_be_used(tmp_path: Path, call_name: str) -> None:
    store = make_store(tmp_path)
    with kernel_calls(failing(call_name, errno.EIO)), pytest.raises(StorageError, match="cannot create"):
        await say(store, resume=False)
    assert list(store.directory.iterdir()) == []
    assert await say(store, user("größe"), resume=False) == body(USER)


async def test_a_log_that_shrinks_while_it_is_read_ends_the_reading(tmp_path: Path) -> None:
    log = lay_out(tmp_path, lines(user("größe")))

    def shrink_it(name: str) -> None:
        if name == "pread":
            os.truncate(log, len(START_LINE))

    with kernel_calls(shrink_it):
        assert await say(make_store(tmp_path)) == body()


def child_may_not_open(directory: Path) -> None:
    """The superuser may everything, so be another."""
    os.chdir(directory)
    log, baseline = (Path("sessions/s") / name for name in ("0.jsonl", "0.baseline.json"))
    if os.geteuid() == 0:
        for path in (Path(), Path("sessions"), log.parent, log, baseline):
            os.chown(path, 65534, 65534)
        os.setuid(65534)
    for path in (log, baseline):
        path.chmod(0)
        with pytest.raises(StorageError, match=f"cannot open {path}: Permission denied"):
            trio.run(say, make_store(Path()))
        path.chmod(0o600)
    assert trio.run(say, make_store(Path())) == body(USER)


@pytest.mark.real
def test_a_file_that_may_not_be_opened_is_storage_and_no_damage(tmp_path: Path) -> None:
    lay_out(tmp_path, lines(user("größe")))
    assert run_in_child(child_may_not_open, tmp_path) == 0


async def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    before = open_descriptors()
    await say(store, user("hi"), resume=False)
    await say(make_store(tmp_path))
    with (store.directory / "s" / "0.jsonl").open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(SessionBusy):
            await say(store)
    baseline = store.directory / "s" / "0.baseline.json"
    for damaged in (b"", None):
        baseline.unlink() if damaged is None else baseline.write_bytes(damaged)
        with pytest.raises(SessionDamaged):
            await say(make_store(tmp_path))
    baseline.mkdir()
    with pytest.raises(SessionDamaged):
        await say(make_store(tmp_path))
    (store.directory / "s" / "0.jsonl").write_bytes(b"torn")
    with pytest.raises(SessionDamaged):
        await say(store)
    assert open_descriptors() == before


def test_a_descriptor_of_a_log_survives_no_exec(tmp_path: Path) -> None:
    """A child that inherits it would hold the lock after the daemon's end."""
    lay_out(tmp_path, lines())
    fd = open_locked(tmp_path / "sessions", S)
    assert not os.get_inheritable(fd)
    os.close(fd)


# -- what is kept in memory -------------------------------------------------------------------


async def test_the_least_recently_used_sessions_are_forgotten_and_nothing_changes(tmp_path: Path) -> None:
    """Each session here costs a little over 200 KB of request and some KB besides; two fit."""
    store = make_store(tmp_path, memory_bytes=500_000)
    big = user("x" * 200_000)
    message = said(big.content)
    for name in ("a", "b"):
        await say(store, big, session=name, resume=False)
    assert kept(store) == ["a", "b"]
    assert await say(store, session="a") == body(message)
    assert kept(store) == ["b", "a"]
    await say(store, big, session="c", resume=False)
    assert kept(store) == ["a", "c"]
    for name in ("a", "b", "c", "b", "a"):
        assert await say(store, session=name) == body(message)
        assert len(kept(store)) == 2


async def test_a_session_over_the_limit_is_forgotten_at_once(tmp_path: Path) -> None:
    store = make_store(tmp_path, memory_bytes=5000)
    await say(store, user("größe"), session="small", resume=False)
    assert kept(store) == ["small"]
    assert await say(store, user("x" * 5000), resume=False)
    assert kept(store) == []
    assert await say(store, session="small") == body(USER)


async def test_a_session_in_memory_is_not_read_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    await say(store, user("größe"), resume=False)
    (store.directory / "s" / "0.baseline.json").unlink()
    assert await say(store) == body(USER)


# -- a full disk ------------------------------------------------------------------------------


def child_appends_to_a_full_disk(directory: Path) -> None:
    trio.run(_append_to_a_full_disk, directory)


async def _append_to_a_full_disk(directory: Path) -> None:
    store = make_store(directory, ThreadDisk())
    log = store.directory / "s" / "0.jsonl"
    async with store.turn(S, resume=False, new=new_session(), alternate=False) as session:
        await session.append(user("größe"), assistant(None, call("c1")), usage())
        whole, before, state = log.read_bytes(), session.request_body(), session.state
        for room in (0, 1, 50):
            limit_files(len(whole) + room)
            with pytest.raises(StorageError, match="cannot append to") as caught:
                await session.append(result("c1", 0, "x" * 100))
            assert caught.value.code == "storage"
            assert log.read_bytes() == whole
            assert session.request_body() == before
            assert session.state == state
        limit_files(len(whole) + 1000)
        await session.append(result("c1", 0))
    limit_files(len(whole) + 100)
    with pytest.raises(StorageError):
        await say(store, user("x" * 100))
    with pytest.raises(StorageError):
        await say(store, user("x" * 5000), session="other", resume=False)
    limit_files(10)
    with pytest.raises(StorageError, match="cannot create"):
        await say(store, session="third", resume=False)
    assert not (store.directory / "third").exists()
    limit_files(None)
    after = await say(store, user("größe"))
    assert after.startswith(before[: before.index(b'],"tools":')])
    assert await say(make_store(directory)) == after
    assert_idle(store)


@pytest.mark.real
def test_a_full_disk_is_storage_and_the_session_works_again_when_there_is_room(tmp_path: Path) -> None:
    assert run_in_child(child_appends_to_a_full_disk, tmp_path) == 0


# -- the prefix -------------------------------------------------------------------------------


def without_end(request: bytes) -> bytes:
    """A body up to, not including, the `]` that closes its messages."""
    end = b'],"tools":[{"type":"function","function":{"name":"clock",'
    assert request.count(end) == 1
    return request[: request.index(end)]


def from_log_alone(log: Path, alternate: bool) -> bytes:
    """The body that replay gives of a log, read by the codec alone."""
    *raw, rest = log.read_bytes().split(b"\n")
    assert rest == b""
    encoder = RequestEncoder(tools=(CLOCK,), fixed=FIXED, alternate=alternate)
    for message in messages(BASELINE, [decode_line(line) for line in raw]):
        encoder.add(message)
    return encoder.body()


def in_appends(records: list[LogRecord], draw: st.DataObject) -> list[list[LogRecord]]:
    """Cut a sequence into appends at any place."""
    cuts = draw.draw(st.lists(st.booleans(), min_size=len(records), max_size=len(records)))
    appends: list[list[LogRecord]] = [[]]
    for record, cut in zip(records, cuts, strict=True):
        if cut and appends[-1]:
            appends.append([])
        appends[-1].append(record)
    return appends


@settings(deadline=None, max_examples=40)
@given(records=writer_records(), alternate=st.booleans(), memory=st.sampled_from([0, 64 * MIB]), data=st.data())
def test_each_request_extends_the_last_and_a_cold_store_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[LogRecord],
    alternate: bool,
    memory: int,
    data: st.DataObject,
) -> None:
    home = tmp_path_factory.mktemp("home")
    log = home / "sessions" / "s" / "0.jsonl"
    appends = in_appends(records, data)
    new_turn = data.draw(st.lists(st.booleans(), min_size=len(appends), max_size=len(appends)))

    async def run() -> None:
        store = make_store(home, memory_bytes=memory)
        before = await say(store, resume=False, alternate=alternate)
        turns: list[list[list[LogRecord]]] = [[]]
        for append, starts_turn in zip(appends, new_turn, strict=True):
            if starts_turn:
                turns.append([])
            turns[-1].append(append)
        for turn in turns:
            async with store.turn(S, resume=True, new=new_session(), alternate=alternate) as session:
                assert session.request_body() == before
                for append in turn:
                    await session.append(*append)
                    now = session.request_body()
                    assert now.startswith(without_end(before))
                    before = now
        assert before == from_log_alone(log, alternate)
        assert await say(make_store(home), alternate=alternate) == before

    trio.run(run)
    shutil.rmtree(home)
