"""Faults that a reviewer found by using the commands; each is a kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from boxmaker.bxctl.logs import _grow
from boxmaker.bxctl.output import reader_watch
from tests.bxctl.scripted_loopd import Hang, done, event, scripted_loopd

USER = b'{"type":"user","time":"2026-11-30T12:00:0%d.000Z","content":"%s"}\n'
LIMIT_S = 60


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "boxmaker.bxctl", *arguments]


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=LIMIT_S, check=False, **more)


# -- a reader that goes away ------------------------------------------------------------------------


def test_a_pipe_whose_reader_has_gone_is_seen_without_a_write() -> None:
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w") as out:
        gone = reader_watch(out)
        assert gone() is False
        os.close(ours)
        assert gone() is True


def test_a_file_always_has_its_reader(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as out:
        assert reader_watch(out)() is False


@pytest.mark.real
def test_a_turn_whose_answer_nobody_reads_any_more_is_cancelled(short_dir: Path) -> None:
    """As in `bxctl chat | head -1`: the answer is held back, so no write would tell."""
    with scripted_loopd(short_dir / "s", [event("content", text="So far"), Hang()]) as loopd:
        process = subprocess.Popen(
            command("chat", "--socket", str(short_dir / "s")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"x\n")
        process.stdin.flush()
        while not loopd.requests:
            time.sleep(0.01)
        process.stdout.close()
        assert loopd.hung_up.wait(LIMIT_S)
        said = process.stderr.read()
        assert process.wait(LIMIT_S) == 1
        process.stdin.close()
        process.stderr.close()
    assert b"Traceback" not in said


@pytest.mark.real
def test_a_followed_log_whose_reader_has_gone_is_left(tmp_path: Path) -> None:
    log = tmp_path / "sessions" / "s" / "0.jsonl"
    log.parent.mkdir(parents=True)
    log.write_bytes(USER % (1, b"hi"))
    process = subprocess.Popen(
        command("log", "s", "--follow", "--json", "--home", str(tmp_path)), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT_S) == 0


# -- following a log that is cut back, repaired or removed ---------------------------------------------


@contextmanager
def following(file: Path) -> Iterator[tuple[list[bytes], Callable[[], None]]]:
    """Follow a log in a thread; the lines that were seen, and a way to end it."""
    seen: list[bytes] = []
    stop = threading.Event()
    thread = threading.Thread(target=lambda: seen.extend(line for _, line in _grow(file, 0, 0, stop.is_set)))
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(LIMIT_S)

    try:
        yield seen, lambda: thread.join(LIMIT_S)
    finally:
        end()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_append_that_was_cut_back_is_forgotten(tmp_path: Path) -> None:
    """A full disk: the daemon writes half a line, and cuts the file back to where it was."""
    file = tmp_path / "log"
    file.write_bytes(b"one\n")
    with following(file) as (seen, _):
        eventually(lambda: seen == [b"one"])
        with file.open("ab") as log:
            log.write(b"half a li")
        time.sleep(0.6)  # two looks: it must be seen and forgotten, which nothing tells
        os.truncate(file, 4)
        with file.open("ab") as log:
            log.write(b"two\n")
        eventually(lambda: len(seen) == 2)
    assert seen == [b"one", b"two"]


def test_a_log_that_is_removed_ends_the_following(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"one\n")
    with following(file) as (seen, join):
        eventually(lambda: seen == [b"one"])
        file.unlink()
        join()


# -- what is no turn, and where there is no prompt ----------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize("text", ["", "   ", "\t\n"])
def test_white_space_alone_is_no_turn(short_dir: Path, text: str) -> None:
    with scripted_loopd(short_dir / "s", [done("no")]) as loopd:
        result = run("chat", "--socket", str(short_dir / "s"), "--say", text)
        assert result.returncode == 2
        assert loopd.requests == []


@pytest.mark.real
def test_ctrl_c_ends_a_chat_that_reads_from_a_pipe(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [event("content", text="x"), Hang()], [done("second")]) as loopd:
        process = subprocess.Popen(
            command("chat", "--socket", str(short_dir / "s")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        process.stdin.write(b"one\ntwo\nthree\n")
        process.stdin.flush()
        while not loopd.requests:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert out == b""
        assert len(loopd.requests) == 1


# -- output that cannot be written --------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("mode", [["chat", "--say", "x"], ["sessions"]])
def test_a_full_disk_behind_stdout_is_one_line(short_dir: Path, mode: list[str]) -> None:
    (short_dir / "sessions").mkdir()
    arguments = [*mode, "--socket", str(short_dir / "s")] if mode[0] == "chat" else [*mode, "--home", str(short_dir)]
    with scripted_loopd(short_dir / "s", [done("An answer.")]), Path("/dev/full").open("w") as full:
        result = subprocess.run(
            command(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
        )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "bxctl: output: No space left on device; what was printed is not complete" in result.stderr


@pytest.mark.real
@pytest.mark.parametrize(("closed", "status"), [(">&-", 1), ("<&-", 0), ("2>&-", 0)])
def test_a_closed_stream_is_no_traceback(short_dir: Path, closed: str, status: int) -> None:
    with scripted_loopd(short_dir / "s", [done("An answer.")]):
        arguments = f"chat --socket {short_dir / 's'}" + (" --say x" if closed != "<&-" else "")
        shell = f"{sys.executable} -m boxmaker.bxctl {arguments} {closed}"
        result = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == status
    assert "Traceback" not in result.stderr
    assert result.stdout == ("An answer.\n" if closed == "2>&-" else "")


@pytest.mark.real
def test_json_says_errors_of_this_side_as_bodies_too(short_dir: Path) -> None:
    result = run("chat", "--socket", str(short_dir / "nobody"), "--json", "--say", "x")
    body = json.loads(result.stdout)
    assert (body["code"], body["detail"]) == ("nobody_listens", {})
    assert result.stderr.splitlines()[-1].startswith("bxctl: nobody_listens: no loopd answers on")


# -- offline commands that find nothing ---------------------------------------------------------------


@pytest.mark.real
def test_a_home_that_is_not_there_is_named_with_what_to_set(tmp_path: Path) -> None:
    for arguments in (["sessions"], ["log", "x"], ["session", "repair", "x"], ["session", "check", "x"]):
        result = run(*arguments, "--home", str(tmp_path / "none"))
        assert result.returncode == 1
        assert str(tmp_path / "none" / "sessions") in result.stderr
        assert "--home or BOXMAKER_HOME" in result.stderr
