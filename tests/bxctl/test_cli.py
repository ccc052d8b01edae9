"""Tests of the `bxctl` command: which socket, usage errors, and the command as a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from boxmaker.bxctl.cli import default_socket, main
from tests.bxctl.scripted_loopd import LIMIT_S, Hang, done, event, scripted_loopd

COMMAND = [sys.executable, "-m", "boxmaker.bxctl", "chat"]


def test_the_socket_is_that_of_boxmaker_home_unless_it_is_named(short_dir: Path) -> None:
    runner = CliRunner(env={"BOXMAKER_HOME": str(short_dir / "home")})
    with scripted_loopd(short_dir / "home" / "run" / "loop" / "loop.sock", [done("home")]):
        assert runner.invoke(main, ["chat", "--say", "x"]).stdout == "home\n"
        with scripted_loopd(short_dir / "other", [done("named")]):
            named = runner.invoke(main, ["chat", "--say", "x", "--socket", str(short_dir / "other")])
    assert named.stdout == "named\n"
    gone = runner.invoke(main, ["chat", "--say", "x"])
    assert f"{short_dir}/home/run/loop/loop.sock" in gone.stderr
    assert gone.exit_code == 1


@pytest.mark.parametrize("home", [None, ""])
def test_without_boxmaker_home_it_is_that_of_the_default_home(home: str | None) -> None:
    with CliRunner(env={"BOXMAKER_HOME": home}).isolation():
        assert default_socket() == Path("/var/lib/boxmaker/run/loop/loop.sock")


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "--session", "../up"],
        ["chat", "--session", ""],
        ["chat", "--session", "x" * 65],
        ["chat", "--session", "-x"],
        ["chat", "--no-such-option"],
        ["chat", "--say"],
        ["chat", "surplus"],
        ["no-such-command"],
    ],
)
def test_a_usage_error_has_status_2_and_asks_nobody(short_dir: Path, arguments: list[str]) -> None:
    runner = CliRunner(env={"BOXMAKER_HOME": str(short_dir)})
    with scripted_loopd(short_dir / "run" / "loop" / "loop.sock") as loopd:
        result = runner.invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert loopd.requests == []


def test_help_and_version_need_no_daemon() -> None:
    for arguments in (["--help"], ["chat", "--help"], ["--version"]):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0
        assert result.stdout


# -- as a process ------------------------------------------------------------------------------


@pytest.mark.real
def test_say_reads_no_stdin_and_keeps_answer_and_talk_apart(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [event("waiting", slot_busy=False), done("Hi.")]):
        command = [*COMMAND, "--socket", str(short_dir / "s"), "--session", "s1", "--say", "x"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]  # a dict of pipes
            assert process.stdout.read() == b"Hi.\n"  # stdin is open all the while
            assert process.stderr.read() == b"session s1\n[waiting: the model is loading]\n"
            assert process.wait(LIMIT_S) == 0


@pytest.mark.real
def test_a_reader_of_answers_that_goes_is_no_traceback(short_dir: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with scripted_loopd(short_dir / "s", [done("x" * 100_000)]):
        command = [*COMMAND, "--socket", str(short_dir / "s"), "--say", "x"]
        run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=LIMIT_S, check=False)
    os.close(writer)
    assert run.returncode == 1
    assert b"Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) == 1  # the session


@pytest.mark.real
def test_an_output_that_cannot_say_a_character_gets_its_escape(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [done("né ☃")]):
        command = [*COMMAND, "--socket", str(short_dir / "s"), "--say", "x"]
        environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
        run = subprocess.run(command, capture_output=True, env=environ, timeout=LIMIT_S, check=False)
    assert run.returncode == 0
    assert run.stdout == b"n\xe9 \\u2603\n"


@pytest.mark.real
def test_ctrl_c_in_say_cancels_the_turn_and_ends_with_130(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [event("waiting", slot_busy=True), Hang()]) as loopd:
        command = [*COMMAND, "--socket", str(short_dir / "s"), "--say", "x"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stderr.readline()
            assert b"busy" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 130
            assert process.stdout.read() == b""
            assert process.stderr.read() == b"[cancelled]\n"
        assert loopd.hung_up.wait(LIMIT_S)
