"""Tests of `bxctl steer`, `cancel`, `fork` and `status`: what is asked, printed, and the exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from boxmaker.bxctl.cli import main
from tests.bxctl.scripted_loopd import Script, error, final, scripted_loopd

BUSY: dict[str, Any] = {
    "version": "0.1.0",
    "pid": 4711,
    "server": {"url": "http://h:1", "state": "ready"},
    "slots": [{"id": 0, "busy": True, "ours": True}, {"id": 1, "busy": False, "ours": False}],
    "sessions": [
        {"session": "a", "phase": "tools", "age_ms": 2150, "waiting": 2},
        {"session": "b", "phase": "waiting", "age_ms": 50, "waiting": 0},
    ],
}


def run(path: Path, answer: bytes, *arguments: str) -> tuple[Result, list[tuple[str, dict[str, Any]]]]:
    script: Script = [answer]
    with scripted_loopd(path) as loopd:
        loopd.answers[arguments[0]] = [script]
        result = CliRunner().invoke(main, [*arguments, "--socket", str(path)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result, loopd.asked


def test_steer(short_dir: Path) -> None:
    result, asked = run(short_dir / "s", final("steered"), "steer", "a", "rather this")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert asked == [("steer", {"session": "a", "content": "rather this"})]


def test_steer_with_nothing_to_say_is_a_usage_error(short_dir: Path) -> None:
    result = CliRunner().invoke(main, ["steer", "a", " ", "--socket", str(short_dir / "s")])
    assert result.exit_code == 2
    assert "white space alone says nothing" in result.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"ending": "idle", "cause": None, "slot_free": True}, "no turn runs\n"),
        ({"ending": "turn_done", "cause": None, "slot_free": True}, "the turn ended: turn_done\n"),
        ({"ending": "cancelled", "cause": "owner", "slot_free": True}, "the turn ended: cancelled (owner)\n"),
        (
            {"ending": "cancelled", "cause": "replaced", "slot_free": False},
            "the turn ended: cancelled (replaced)\nthe server still works on it: its slot is busy\n",
        ),
    ],
)
def test_cancel(short_dir: Path, body: dict[str, Any], said: str) -> None:
    result, asked = run(short_dir / "s", final("cancel_done", **body), "cancel", "a")
    assert (result.exit_code, result.stdout) == (0, said)
    assert asked == [("cancel", {"session": "a", "cause": "owner"})]


@pytest.mark.parametrize(("more", "at"), [((), None), (("--at", "3"), 3)])
def test_fork_prints_the_new_id_alone(short_dir: Path, more: tuple[str, ...], at: int | None) -> None:
    result, asked = run(short_dir / "s", final("fork_done", session="new", from_=3), "fork", "a", *more)
    assert (result.exit_code, result.stdout) == (0, "new\n")
    ((kind, body),) = asked
    assert (kind, body["session"], body["from"]) == ("fork", "a", at)
    assert re.fullmatch(r"\d{8}-\d{6}-[a-z0-9]{6}", body["new"])


def test_status_for_a_person(short_dir: Path) -> None:
    result, asked = run(short_dir / "s", final("status_done", **BUSY), "status")
    assert result.exit_code == 0
    assert result.stdout == (
        "loopd 0.1.0, pid 4711\nserver http://h:1: ready\nslot 0 (ours): busy\nslot 1: free\n"
        "session a: tools, 2.1 s, 2 waiting\nsession b: waiting, 0.1 s\n"
    )
    assert asked == [("status", {})]
    idle = {**BUSY, "slots": [], "sessions": []}
    result, _ = run(short_dir / "s", final("status_done", **idle), "status")
    assert result.stdout.endswith("ready\nno turn runs\n")


def test_status_for_a_program_is_the_body(short_dir: Path) -> None:
    result, _ = run(short_dir / "s", final("status_done", **BUSY), "status", "--json")
    assert json.loads(result.stdout) == BUSY
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [("steer", "a", "x"), ("cancel", "a"), ("fork", "a"), ("status",), ("status", "--json")]
)
def test_an_error_is_a_line_with_its_code_and_status_1(short_dir: Path, arguments: tuple[str, ...]) -> None:
    result, _ = run(short_dir / "s", error("no_such_session", "there is\nno session"), *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "bxctl: no_such_session: there is\\nno session\n"


@pytest.mark.parametrize("arguments", [("steer", "a", "x"), ("cancel", "a"), ("fork", "a"), ("status",)])
def test_nobody_listens(short_dir: Path, arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*arguments, "--socket", str(short_dir / "s")])
    assert result.exit_code == 1
    assert result.stderr.startswith("bxctl: nobody_listens: ")


@pytest.mark.parametrize("command", ["steer", "cancel", "fork"])
def test_an_id_that_is_none_is_a_usage_error(short_dir: Path, command: str) -> None:
    more = ["x"] if command == "steer" else []
    result = CliRunner().invoke(main, [command, "../a", *more, "--socket", str(short_dir / "s")])
    assert result.exit_code == 2
