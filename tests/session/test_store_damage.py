"""The store: logs and baselines that cannot be read are refused, naming file and line."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from boxmaker.errors import SessionDamaged
from boxmaker.proto.records import encode_line
from boxmaker.session.store import open_locked, read_session

from .homes import (
    BASELINE_RAW,
    S,
    assistant,
    body,
    call,
    lay_out,
    lines,
    make_store,
    result,
    said,
    say,
    start_record,
    usage,
    user,
)

WHOLE = lines(user("hi"), assistant("ho\u2028", call("c1")), usage(), result("c1", 0), user("again"))
LINES = WHOLE.splitlines(keepends=True)


async def damage(home: Path, session: str = "s") -> SessionDamaged:
    """The refusal of a session; whatever is there stays as it is, and the session is not busy."""
    store = make_store(home)
    for _ in "twice":
        with pytest.raises(SessionDamaged) as caught:
            await say(store, session=session)
        assert not store._running
    error = caught.value
    assert error.code == "session_damaged"
    assert error.detail() == {"file": str(error.file), "line": error.line}
    assert str(error).startswith(f"{error.file}:{error.line}: " if error.line else f"{error.file}: ")
    return error


# -- logs -------------------------------------------------------------------------------------

DAMAGED = {
    "empty": (b"", 1, "empty"),
    "torn": (WHOLE[:-20], 6, "torn"),
    "torn at the last byte, although it parses": (WHOLE[:-1], 6, "torn"),
    "torn in the first line": (LINES[0][:-5], 1, "torn"),
    "only a line end": (b"\n", 1, "not JSON"),
    "an empty line in the middle": (LINES[0] + b"\n" + LINES[1], 2, "not JSON"),
    "NULs at the end, as after power loss": (WHOLE + b"\x00" * 4096, 7, "torn"),
    "NULs and a line end": (WHOLE + b"\x00" * 4096 + b"\n", 7, "not JSON"),
    "NULs in place of a line": (LINES[0] + b"\x00" * len(LINES[1]) + b"".join(LINES[2:]), 2, "not JSON"),
    "NULs alone": (b"\x00" * 4096, 1, "torn"),
    "a byte order mark": (b"\xef\xbb\xbf" + WHOLE, 1, "not JSON"),
    "UTF-16": (WHOLE.decode().encode("utf-16-le"), 1, "not JSON"),
    "CR alone as line ends": (WHOLE.replace(b"\n", b"\r"), 1, "torn"),
    "bytes that are no UTF-8": (LINES[0] + LINES[1].replace(b"hi", b"\xff"), 2, "not UTF-8"),
    "a lone surrogate": (LINES[0] + LINES[1].replace(b"hi", b"\\ud800"), 2, "surrogate"),
    "NaN": (LINES[0] + LINES[1].replace(b'"hi"', b"NaN"), 2, "NaN"),
    "two records on one line": (LINES[0] + LINES[1][:-1] + LINES[1], 2, "not JSON"),
    "an array": (LINES[0] + b"[]\n", 2, "expected an object"),
    "an unknown type": (LINES[0] + b'{"type":"usr"}\n', 2, "$.type: unknown type"),
    "an unknown key": (LINES[0] + LINES[1][:-2] + b',"x":1}\n', 2, "unknown key"),
    "a missing key": (LINES[0] + b'{"type":"user","content":"hi"}\n', 2, "is missing"),
    "a number in place of text": (LINES[0] + LINES[1].replace(b'"hi"', b"5"), 2, "$.content: expected text"),
    "nested too deep": (LINES[0] + b"[" * 100_000 + b"\n", 2, "nested too deep"),
    "a number of 5000 digits": (LINES[0] + LINES[1].replace(b'"hi"', b"9" * 5000), 2, "not JSON"),
    "no session_start": (b"".join(LINES[1:]), 1, "begins with session_start"),
    "two of them": (LINES[0] * 2, 2, "has one"),
    "that of another session": (LINES[0].replace(b'"session":"s"', b'"session":"other"'), 1, "of session other"),
    "one of a later epoch": (LINES[0].replace(b'"epoch":0', b'"epoch":1'), 1, "epoch 1"),
    "a result without a call": (LINES[0] + LINES[4], 2, "no open call"),
    "a lost result": (b"".join(LINES[:4] + LINES[5:]), 5, "has no result"),
    "a lost assistant": (LINES[0] + LINES[1] + LINES[3], 3, "usage does not follow"),
}


@pytest.mark.parametrize("name", DAMAGED)
async def test_a_damaged_log_is_refused_with_its_line_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    raw, line, problem = DAMAGED[name]
    log = lay_out(tmp_path, raw)
    error = await damage(tmp_path)
    assert (error.file, error.line) == (log, line)
    assert problem in error.problem
    assert log.read_bytes() == raw


async def test_a_torn_line_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    lay_out(tmp_path, WHOLE + b'{"ty')
    error = await damage(tmp_path)
    assert error.line == 7
    assert error.problem == "the last line is torn: 4 bytes without an end"
    home = tmp_path / "home" if (tmp_path / "home").exists() else tmp_path
    assert error.remedy() == f"`bxctl session repair s --home {home}` cuts the torn end off and keeps a copy"


async def test_damage_before_a_torn_line_is_named_first(tmp_path: Path) -> None:
    lay_out(tmp_path, LINES[0] + b"{}\n" + b"torn")
    assert (await damage(tmp_path)).line == 2


async def test_a_log_with_cr_lf_line_ends_is_read(tmp_path: Path) -> None:
    """CR is JSON white space: nothing about such a log is unclear."""
    log = lay_out(tmp_path, lines(user("hi")).replace(b"\n", b"\r\n"))
    assert await say(make_store(tmp_path), user("ho")) == body(said("hi"), said("ho"))
    assert log.read_bytes().endswith(b'"content":"ho"}\n')


async def test_lines_are_split_on_lf_bytes_alone(tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\u0085d\x0be\x0cf\rg"
    log = lay_out(tmp_path, lines(user(odd)))
    assert log.read_bytes().count(b"\n") == 2
    message = '{"role":"user","content":"a\u2028b\u2029c\u0085d\\u000be\\ff\\rg"}'
    assert await say(make_store(tmp_path)) == body(message)


async def test_other_white_space_and_key_orders_are_read(tmp_path: Path) -> None:
    line = b'{ "content" : "hi",\t"time":"2026-11-30T14:15:30.123Z" , "type":"user"} \n'
    lay_out(tmp_path, lines() + line)
    assert await say(make_store(tmp_path)) == body(said("hi"))


def directory(path: Path) -> None:
    path.mkdir()


def link(path: Path) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(BASELINE_RAW if path.name == "0.baseline.json" else WHOLE)
    path.symlink_to(other)


def dangling_link(path: Path) -> None:
    path.symlink_to(path.with_suffix(".nowhere"))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def nothing(_: Path) -> None:
    pass


NO_FILES = [directory, link, dangling_link, fifo, listening_socket, nothing]


@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize("name", ["0.jsonl", "0.baseline.json"])
async def test_what_is_no_file_is_damage_and_nothing_hangs(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    lay_out(tmp_path, WHOLE)
    path = tmp_path / "sessions" / "s" / name
    path.unlink()
    make(path)
    error = await damage(tmp_path)
    assert (error.file, error.line) == (path, 0)


async def test_a_session_that_is_no_directory_is_damage(tmp_path: Path) -> None:
    make_store(tmp_path)
    (tmp_path / "sessions" / "s").write_bytes(b"")
    assert (await damage(tmp_path)).line == 0
    (tmp_path / "sessions" / "t").symlink_to(tmp_path / "nowhere")
    assert (await damage(tmp_path, "t")).line == 0


# -- baselines --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        BASELINE_RAW + b"\n",
        BASELINE_RAW.replace(b'","tools"', b'", "tools"'),
        BASELINE_RAW.replace(b"brief", b"BRIEF"),
        b"\x00" * len(BASELINE_RAW),
    ],
)
async def test_a_baseline_with_another_hash_is_refused(tmp_path: Path, raw: bytes) -> None:
    log = lay_out(tmp_path, WHOLE, baseline=raw)
    error = await damage(tmp_path)
    assert (error.file, error.line) == (log.with_name("0.baseline.json"), 0)
    assert error.problem == "the baseline is not the one that the session began with"


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected an object"),
        (b'{"system":"x"}', "is missing"),
        (b'{"system":5,"tools":[]}', "$.system: expected text"),
        (b'{"system":"\xff","tools":[]}', "not UTF-8"),
        (b'{"system":"x","tools":[{"name":"a","description":"b"}]}', "is missing"),
    ],
)
async def test_a_baseline_that_has_its_hash_but_is_none_is_refused(tmp_path: Path, raw: bytes, problem: str) -> None:
    log = lay_out(tmp_path, encode_line(start_record(baseline=raw)), baseline=raw)
    error = await damage(tmp_path)
    assert (error.file, error.line) == (log.with_name("0.baseline.json"), 0)
    assert problem in error.problem


# -- properties -------------------------------------------------------------------------------


def read(home: Path, raw: bytes) -> SessionDamaged | int:
    """Read a log: the refusal, or the number of its messages."""
    shutil.rmtree(home / "sessions", ignore_errors=True)
    log = lay_out(home, raw)
    fd = open_locked(home / "sessions", S)
    try:
        _, _, found = read_session(home / "sessions", S, fd)
    except SessionDamaged as error:
        refused = error
    else:
        return len(found)
    finally:
        os.close(fd)
    assert refused.file in (log, log.with_name("0.baseline.json"))
    assert 0 <= refused.line <= raw.count(b"\n") + 1
    return refused


@settings(deadline=None)
@given(st.integers(0, len(WHOLE)))
@example(0)
def test_a_log_cut_anywhere_is_whole_or_torn_in_the_line_of_the_cut(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    raw = WHOLE[:length]
    outcome = read(tmp_path_factory.getbasetemp(), raw)
    if raw.endswith(b"\n"):
        assert outcome == [0, 1, 2, 2, 3, 4][raw.count(b"\n") - 1]
    else:
        assert isinstance(outcome, SessionDamaged)
        assert outcome.line == raw.count(b"\n") + 1


@settings(deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_log_with_any_byte_changed_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, change: int
) -> None:
    raw = bytearray(WHOLE)
    raw[place] ^= change
    read(tmp_path_factory.getbasetemp(), bytes(raw))


@settings(deadline=None)
@given(st.binary(max_size=80) | st.lists(st.sampled_from([*LINES, b"{}", b"\n"]), max_size=8).map(b"".join))
def test_any_bytes_are_a_log_or_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    read(tmp_path_factory.getbasetemp(), raw)
