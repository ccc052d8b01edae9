"""Logs read from outside the daemon: lists, findings, and a torn end cut off."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boxmaker.errors import NoSuchSession, SessionBusy, SessionDamaged, StorageError, WireableError
from boxmaker.proto.ids import SessionId
from boxmaker.session.logs import (
    Finding,
    check,
    lines_of,
    read_log,
    repair,
    session_ids,
    summarize,
)

from .homes import BASELINE_RAW, S, assistant, body, call, lay_out, lines, make_store, result, said, say, usage, user
from .kernel import failing, kernel_calls, open_descriptors
from .test_disk import umask

WHOLE = lines(user("hi"), assistant("ho", call("c1")), usage(), result("c1", 0), user(" again\n and  again"))
LINES = WHOLE.splitlines(keepends=True)


def sessions(home: Path) -> Path:
    return home / "sessions"


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# -- which sessions there are -----------------------------------------------------------------


def test_sessions_are_listed_by_name_and_nothing_else_is(tmp_path: Path) -> None:
    directory = sessions(tmp_path)
    for name in ("b", "a.1", "20261130-141530-x7k2qf", ".new-1", ".hidden", "with space", "é", "x" * 65, "-x"):
        (directory / name).mkdir(parents=True)
    (directory / "file").write_bytes(b"")
    (directory / "link").symlink_to(directory / "b")
    assert session_ids(directory) == ["20261130-141530-x7k2qf", "a.1", "b"]


def test_a_directory_that_cannot_be_listed_is_storage(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot list"):
        session_ids(tmp_path / "nowhere")


# -- reading ----------------------------------------------------------------------------------


def test_a_log_is_read_as_it_is(tmp_path: Path) -> None:
    lay_out(tmp_path, WHOLE[:-3])
    assert read_log(sessions(tmp_path), S) == WHOLE[:-3]


def test_a_log_can_be_read_while_a_turn_has_it(tmp_path: Path) -> None:
    log = lay_out(tmp_path, WHOLE)
    with log.open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert read_log(sessions(tmp_path), S) == WHOLE
        assert check(sessions(tmp_path), S) == []


def test_what_is_no_log_is_refused_and_nothing_hangs(tmp_path: Path) -> None:
    log = lay_out(tmp_path, WHOLE)
    with pytest.raises(NoSuchSession):
        read_log(sessions(tmp_path), SessionId("other"))
    log.rename(log.with_suffix(".real"))
    for what in ("nothing", "link", "fifo", "directory"):
        match what:
            case "link":
                log.symlink_to(log.with_suffix(".real"))
            case "fifo":
                os.mkfifo(log)
            case "directory":
                log.mkdir()
        with pytest.raises(SessionDamaged) as caught:
            read_log(sessions(tmp_path), S)
        assert (caught.value.file, caught.value.line) == (log, 0)
        assert [(found.file, found.line) for found in check(sessions(tmp_path), S)] == [(log, 0)]
        if log.is_symlink() or log.exists():
            log.rmdir() if log.is_dir() else log.unlink()


def test_each_line_is_a_record_or_what_is_wrong_with_it(tmp_path: Path) -> None:
    file = tmp_path / "0.jsonl"
    found = list(lines_of(file, LINES[1] + b"{}\n" + LINES[1] + b"to"))
    assert [number for number, _ in found] == [1, 2, 3, 4]
    assert found[0][1] == found[2][1] == user("hi")
    bad, torn = found[1][1], found[3][1]
    assert isinstance(bad, Finding)
    assert str(bad).startswith(f"{file}:2: ")
    assert torn == Finding(file=file, line=4, problem="the last line is torn: 2 bytes without an end", torn=True)
    assert str(Finding(file=file, line=0, problem="x")) == f"{file}: x"


# -- checking ---------------------------------------------------------------------------------


def found_lines(home: Path) -> list[tuple[str, int]]:
    return [(found.file.name, found.line) for found in check(sessions(home), S)]


@pytest.mark.parametrize(
    ("log", "where"),
    [
        (WHOLE, []),
        (lines(), []),
        (b"", [1]),
        (WHOLE[:-1], [6]),
        (b"{}\n" + WHOLE, [1]),
        (LINES[0] + b"x\n" + LINES[1] + b"y\n" + b"z", [2, 4, 5]),
        (LINES[0] + LINES[4], [2]),
        (LINES[0] + LINES[4] + LINES[4] + b"x\n", [2, 4]),
        (LINES[1], [1]),
    ],
)
def test_a_check_finds_every_line_that_cannot_be_read_and_the_first_out_of_order(
    tmp_path: Path, log: bytes, where: list[int]
) -> None:
    lay_out(tmp_path, log)
    assert found_lines(tmp_path) == [("0.jsonl", line) for line in where]


def test_a_check_looks_at_the_baseline_too(tmp_path: Path) -> None:
    log = lay_out(tmp_path, WHOLE, baseline=BASELINE_RAW + b" ")
    assert found_lines(tmp_path) == [("0.baseline.json", 0)]
    log.with_name("0.baseline.json").unlink()
    assert found_lines(tmp_path) == [("0.baseline.json", 0)]


def test_a_check_of_a_session_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    sessions(tmp_path).mkdir()
    with pytest.raises(NoSuchSession):
        check(sessions(tmp_path), S)


async def store_refuses(home: Path) -> bool:
    try:
        await say(make_store(home))
    except WireableError:
        return True
    return False


@pytest.mark.parametrize(
    "log", [WHOLE, b"", WHOLE[:-1], LINES[0] + LINES[4], b"\x00" * 9, WHOLE + b"\n", lines() * 2, LINES[0]]
)
async def test_a_check_finds_something_when_the_store_would_refuse(tmp_path: Path, log: bytes) -> None:
    lay_out(tmp_path, log)
    assert bool(check(sessions(tmp_path), S)) == await store_refuses(tmp_path)


# -- a session at a glance --------------------------------------------------------------------


def test_a_summary_has_turns_first_words_and_the_time_of_the_last_write(tmp_path: Path) -> None:
    log = lay_out(tmp_path, lines(user("  Two\n\twords "), assistant("ho"), usage(), user("more")))
    os.utime(log, (1_700_000_000, 1_800_000_000.5))
    summary = summarize(sessions(tmp_path), S)
    assert (summary.session, summary.last_s) == ("s", 1_800_000_000.5)
    assert (summary.turns, summary.first_words, summary.damaged) == (2, "Two words", None)


def test_a_summary_of_a_session_without_a_turn_is_empty(tmp_path: Path) -> None:
    lay_out(tmp_path, lines())
    summary = summarize(sessions(tmp_path), S)
    assert (summary.turns, summary.first_words, summary.damaged) == (0, "", None)


@pytest.mark.parametrize(("log", "line"), [(WHOLE[:-1], 6), (LINES[0] + b"x\n" + LINES[1] + b"y", 2), (b"", 1)])
def test_a_summary_tells_the_first_damage_and_counts_the_rest(tmp_path: Path, log: bytes, line: int) -> None:
    file = lay_out(tmp_path, log)
    summary = summarize(sessions(tmp_path), S)
    assert summary.damaged is not None
    assert summary.damaged.startswith(f"{file}:{line}: ")
    assert summary.turns == (1 if log else 0)


def test_a_summary_of_what_is_no_session_tells_it(tmp_path: Path) -> None:
    log = lay_out(tmp_path, WHOLE)
    log.unlink()
    assert str(log) in (summarize(sessions(tmp_path), S).damaged or "")
    log.mkdir()
    assert str(log) in (summarize(sessions(tmp_path), S).damaged or "")
    assert summarize(sessions(tmp_path), SessionId("other")).damaged


# -- repairing --------------------------------------------------------------------------------


async def test_a_repair_cuts_a_torn_end_off_and_keeps_the_damaged_log(tmp_path: Path) -> None:
    whole = lines(user("hi"), assistant("ho"), usage())
    log = lay_out(tmp_path, whole + b'{"type":"us')
    with umask(0):
        done = repair(sessions(tmp_path), S)
    assert done is not None
    assert done.dropped == b'{"type":"us'
    assert done.line == 5
    assert re.fullmatch(r"0\.damaged-\d{8}-\d{6}-[0-9a-f]{4}\.jsonl", done.kept.name)
    assert files(log.parent) == {
        "0.baseline.json": BASELINE_RAW,
        "0.jsonl": whole,
        done.kept.name: whole + b'{"type":"us',
    }
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert check(sessions(tmp_path), S) == []
    replied = '{"role":"assistant","content":"ho"}'
    assert await say(make_store(tmp_path), user("more")) == body(said("hi"), replied, said("more"))


def test_a_repair_replaces_the_log_when_both_files_are_on_the_disk(tmp_path: Path) -> None:
    lay_out(tmp_path, WHOLE + b"torn")
    before = open_descriptors()
    with kernel_calls() as calls:
        repair(sessions(tmp_path), S)
    assert calls == ["flock", "write", "fdatasync", "link", "rename", "fsync"]
    assert open_descriptors() == before


@pytest.mark.parametrize("call_name", ["write", "fdatasync", "link", "rename"])
def test_a_repair_that_the_disk_refuses_leaves_the_log_and_can_be_tried_again(tmp_path: Path, call_name: str) -> None:
    log = lay_out(tmp_path, WHOLE + b"torn")
    with kernel_calls(failing(call_name, errno.EIO)), pytest.raises(StorageError, match="cannot repair"):
        repair(sessions(tmp_path), S)
    assert log.read_bytes() == WHOLE + b"torn"
    for leftover in log.parent.glob("0.damaged-*"):  # a second try in the same second has the same name
        leftover.unlink()
    assert repair(sessions(tmp_path), S) is not None
    assert log.read_bytes() == WHOLE


def test_a_whole_log_is_not_touched(tmp_path: Path) -> None:
    log = lay_out(tmp_path, WHOLE)
    before = log.stat()
    assert repair(sessions(tmp_path), S) is None
    assert files(log.parent) == {"0.baseline.json": BASELINE_RAW, "0.jsonl": WHOLE}
    assert (log.stat().st_ino, log.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("log", "line"),
    [(b"", 1), (b"torn", 1), (b"\x00" * 512, 1), (LINES[0] + b"x\n" + LINES[1], 2), (LINES[0] + b"x\n" + b"torn", 2)],
)
def test_damage_of_another_kind_is_not_guessed_at(tmp_path: Path, log: bytes, line: int) -> None:
    file = lay_out(tmp_path, log)
    with pytest.raises(SessionDamaged) as caught:
        repair(sessions(tmp_path), S)
    assert (caught.value.file, caught.value.line) == (file, line)
    assert files(file.parent) == {"0.baseline.json": BASELINE_RAW, "0.jsonl": log}


def test_a_session_that_a_turn_has_is_not_repaired(tmp_path: Path) -> None:
    log = lay_out(tmp_path, WHOLE + b"torn")
    with log.open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(SessionBusy):
            repair(sessions(tmp_path), S)
    assert log.read_bytes() == WHOLE + b"torn"
    assert repair(sessions(tmp_path), S) is not None


def test_what_does_not_exist_is_not_repaired(tmp_path: Path) -> None:
    sessions(tmp_path).mkdir()
    with pytest.raises(NoSuchSession):
        repair(sessions(tmp_path), S)


def test_what_a_killed_repair_left_is_in_nobodys_way(tmp_path: Path) -> None:
    log = lay_out(tmp_path, WHOLE + b"torn")
    log.with_name(".new-0.jsonl").write_bytes(b"half")
    done = repair(sessions(tmp_path), S)
    assert done is not None
    assert set(files(log.parent)) == {"0.baseline.json", "0.jsonl", done.kept.name}
    assert log.read_bytes() == WHOLE


async def test_the_daemon_reads_a_repaired_log_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    first = await say(store, user("hi"), resume=False)
    with (sessions(tmp_path) / "s" / "0.jsonl").open("ab") as log:
        log.write(b"torn")
    with pytest.raises(SessionDamaged, match="bxctl session repair s"):
        await say(store)
    assert repair(sessions(tmp_path), S) is not None
    assert await say(store) == first


@settings(deadline=None)
@given(length=st.integers(0, len(WHOLE)))
def test_a_repair_keeps_every_whole_line_of_a_log_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    home = tmp_path_factory.mktemp("home")
    log = lay_out(home, WHOLE[:length])
    kept = b"".join(line for line in WHOLE[:length].splitlines(keepends=True) if line.endswith(b"\n"))
    if kept:
        repair(sessions(home), S)
        assert log.read_bytes() == kept
    else:
        with pytest.raises(SessionDamaged):
            repair(sessions(home), S)
