"""Tests of `bxctl chat` on a pseudo-terminal: what a person sees, types and interrupts."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

import pytest
from attrs import define

from boxmaker.bxctl.chat import wait_for_line
from tests.bxctl.scripted_loopd import LIMIT_S, Hang, Script, Wait, done, error, event, scripted_loopd

pytestmark = pytest.mark.real

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
PLAIN_SIZE = {"NO_COLOR": "1", "COLUMNS": ""}
"""Without colour, and with the terminal's own width: COLUMNS would hide it."""


@define
class Terminal:
    """A bxctl with a terminal of its own; `seen` is what that shows, `taken` how much of it a test has read."""

    process: subprocess.Popen[bytes]
    fd: int
    seen: str = ""
    taken: int = 0

    def read_until(self, text: str) -> str:
        """Read until a text comes: all up to it, the text included. What came behind it is for the next read."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen[self.taken :]:
            ready, _, _ = select.select([self.fd], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.fd, 65536).decode("utf-8")
        return self._take(self.seen.index(text, self.taken) + len(text))

    def read_to_end(self) -> str:
        """What comes until the process has ended."""
        while True:
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # EIO: nobody has the other end any more
                data = b""
            if not data:
                return self._take(len(self.seen))
            self.seen += data.decode("utf-8")

    def _take(self, end: int) -> str:
        began, self.taken = self.taken, end
        return self.seen[began:end]

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.fd, text.encode())


@contextmanager
def terminal(path: Path, *arguments: str, environ: dict[str, str] | None = None) -> Iterator[Terminal]:
    """Run `bxctl chat` on a new terminal, in a session of its own; killed when the block is left."""
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[3] &= ~termios.ECHO  # what is typed is not shown: only what bxctl writes is
    attributes[1] &= ~termios.OPOST  # a line end stays LF
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    command = [sys.executable, "-m", "boxmaker.bxctl", "chat", "--socket", str(path), "--session", "s1", *arguments]
    cleared = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**cleared, **(environ or {})},
        start_new_session=True,
        # the terminal becomes the session's own, so that Ctrl-C typed at it is a signal
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT_S)
        os.close(ours)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


TURN: Script = [
    event("reasoning", text="Let me "),
    event("reasoning", text="see."),
    event("content", text="It is \x1b[31m"),
    event("content", text="noon."),
    done("It is \x1b[31mnoon."),
]


def test_a_turn_on_a_terminal(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", TURN, [done("")]) as loopd, terminal(short_dir / "s", "--quiet") as screen:
        assert screen.read_until("> ") == "session s1\n> "
        screen.type("What time is it? ☃\n")
        answer = screen.read_until("> ")
        screen.type("\n")
        assert screen.read_until("> ") == "> "
        screen.type("/quit\n")
        rest = screen.read_to_end()
        assert screen.process.wait(LIMIT_S) == 0
    assert answer == f"{DIM}Let me {PLAIN}{DIM}see.{PLAIN}\nIt is \\x1b[31mnoon.\n> "
    assert rest == ""
    assert [request["content"] for request in loopd.requests] == ["What time is it? ☃"]


def test_how_far_the_server_has_read_is_a_line_that_vanishes(short_dir: Path) -> None:
    script: Script = [event("progress", total=10, cache=0, processed=5), event("content", text="Hi."), done("Hi.")]
    with scripted_loopd(short_dir / "s", script), terminal(short_dir / "s", environ={"NO_COLOR": "1"}) as screen:
        screen.read_until("> ")
        screen.type("x\n")
        shown = screen.read_until("> ")
    assert shown.startswith("reading 5 of 10 tokens, 0 from cache\r\x1b[JHi.\n[1 cached, 2 read, 3 generated")


def test_content_is_shown_while_the_turn_runs(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [event("content", text="So far"), Hang()]) as loopd:
        with terminal(short_dir / "s") as screen:
            screen.read_until("> ")
            screen.type("x\n")
            screen.read_until("So far")
        assert loopd.hung_up.wait(LIMIT_S)


@pytest.mark.parametrize(
    ("arguments", "environ", "shown"),
    [
        ((), {"NO_COLOR": "1"}, "Let me see.\nIt is \\x1b[31mnoon.\n"),
        ((), {"NO_COLOR": ""}, f"{DIM}Let me {PLAIN}{DIM}see.{PLAIN}\nIt is \\x1b[31mnoon.\n"),
        (("--no-thinking",), {}, "It is \\x1b[31mnoon.\n"),
    ],
)
def test_no_color_and_no_thinking(
    short_dir: Path, arguments: tuple[str, ...], environ: dict[str, str], shown: str
) -> None:
    with scripted_loopd(short_dir / "s", TURN):
        with terminal(short_dir / "s", "--quiet", *arguments, environ=environ) as screen:
            screen.read_until("> ")
            screen.type("x\n")
            assert screen.read_until("> ") == f"{shown}> "


def test_ctrl_c_at_the_prompt_ends_with_130_and_ctrl_d_with_0(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s"):
        with terminal(short_dir / "s") as screen:
            screen.read_until("> ")
            screen.type("half a line\x03")
            assert screen.read_to_end() == "\n"
            assert screen.process.wait(LIMIT_S) == 130
        with terminal(short_dir / "s") as screen:
            screen.read_until("> ")
            screen.type("\x04")
            assert screen.read_to_end() == "\n"
            assert screen.process.wait(LIMIT_S) == 0


def test_ctrl_c_in_a_turn_hangs_up_and_the_chat_goes_on(short_dir: Path) -> None:
    scripts: list[Script] = [[event("content", text="So far"), Hang()], [error("inference", "no")], [done("Hi.")]]
    with scripted_loopd(short_dir / "s", *scripts) as loopd, terminal(short_dir / "s", "--quiet") as screen:
        screen.read_until("> ")
        screen.type("one\n")
        screen.read_until("So far")
        screen.process.send_signal(signal.SIGINT)
        cancelled = screen.read_until("> ")
        assert loopd.hung_up.wait(LIMIT_S)
        screen.type("two\n")
        failed = screen.read_until("> ")
        screen.type("three\n")
        answered = screen.read_until("> ")
        screen.type("\x04")
        screen.read_to_end()
        assert screen.process.wait(LIMIT_S) == 0, "who sits at a terminal has seen each error"
    assert cancelled == f"\n{DIM}[the text above is withdrawn]{PLAIN}\n{DIM}[cancelled]{PLAIN}\n> "
    assert failed == "bxctl: inference: no\n> "
    assert answered == "Hi.\n> "
    assert [request["content"] for request in loopd.requests] == ["one", "two", "three"]
    assert loopd.resumes == [True, True, True]


def test_a_line_that_the_terminal_may_have_cut_is_not_sent(short_dir: Path) -> None:
    """Linux hands over 4095 bytes of a typed line, and drops the rest without a word."""
    with scripted_loopd(short_dir / "s", [done("4094")]) as loopd, terminal(short_dir / "s") as screen:
        screen.read_until("> ")
        for _ in range(3):
            screen.type("x" * 2000)
            time.sleep(0.05)  # the terminal's own queue is 4096 bytes: let the other side take them
        screen.type("\n")
        said = screen.read_until("> ")
        screen.type("y" * 4094 + "\n")
        screen.read_until("4094\n")
    assert "bxctl: bad_request: a terminal hands over 4095 bytes of a line at most" in said
    assert "Pipe a long text" in said
    assert [request["content"] for request in loopd.requests] == ["y" * 4094]


def test_a_terminal_keeps_its_prompt_while_the_daemon_is_away(short_dir: Path) -> None:
    with terminal(short_dir / "s") as screen:
        screen.read_until("> ")
        screen.type("one\n")
        assert "bxctl: nobody_listens: no loopd answers on" in screen.read_until("> ")
        with scripted_loopd(short_dir / "s", [done("Back again.")]):
            screen.type("two\n")
            assert screen.read_until("> ").startswith("Back again.\n")
        screen.type("/quit\n")
        screen.read_to_end()
        assert screen.process.wait(LIMIT_S) == 0


def resize(fd: int, columns: int) -> None:
    """Give a terminal a width, as its window does when it is dragged."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


HALFWAY = event("progress", total=100_000, cache=0, processed=50_614)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [(100, "reading 50,614 of 100,000 tokens, 0 from cache"), (20, "50,614 of 100,000"), (6, "50%")],
)
def test_the_status_line_fits_the_terminal(short_dir: Path, columns: int, shown: str) -> None:
    script: Script = [HALFWAY, event("content", text="Hi."), done("Hi.")]
    quiet = ("--quiet",)
    with scripted_loopd(short_dir / "s", script), terminal(short_dir / "s", *quiet, environ=PLAIN_SIZE) as screen:
        resize(screen.fd, columns)
        screen.read_until("> ")
        screen.type("x\n")
        assert screen.read_until("> ") == f"{shown}\r\x1b[JHi.\n> "


def test_a_status_line_vanishes_from_a_terminal_that_was_made_narrower(short_dir: Path) -> None:
    """46 characters stand on two rows of 30 columns then: both are cleared."""
    script: Script = [HALFWAY, Wait(), event("content", text="Hi."), done("Hi.")]
    quiet = ("--quiet",)
    with (
        scripted_loopd(short_dir / "s", script) as loopd,
        terminal(short_dir / "s", *quiet, environ=PLAIN_SIZE) as screen,
    ):
        resize(screen.fd, 80)
        screen.read_until("> ")
        screen.type("x\n")
        screen.read_until("from cache")
        resize(screen.fd, 30)
        loopd.go_on.set()
        assert screen.read_until("> ") == "\x1b[1A\r\x1b[JHi.\n> "


def test_what_happens_to_a_reply_is_said_in_a_line_each(short_dir: Path) -> None:
    script: Script = [
        event("content", text="Three no"),
        event("retrying", attempt=2, after_ms=500, error="the connection broke"),
        event("content", text="Three notes"),
        event("cut", reason="length"),
        event("cache_loss", expected=1204, got=0),
        done("Three notes"),
    ]
    with (
        scripted_loopd(short_dir / "s", script, [done("")]),
        terminal(short_dir / "s", "--quiet", environ=PLAIN_SIZE) as screen,
    ):
        screen.read_until("> ")
        screen.type("x\n")
        assert screen.read_until("> ") == (
            "Three no\n[the text above is withdrawn]\n[retrying (try 2, in 0.5 s): the connection broke]\n"
            "Three notes\n[the reply was cut at its length limit]\n"
            "[lost 1,204 cached tokens (bxctl why)]\n> "
        )
        screen.type("x\n")
        assert screen.read_until("> ") == "[the model gave no answer]\n> "


def test_a_line_of_figures_follows_each_answer_unless_quiet(short_dir: Path) -> None:
    with (
        scripted_loopd(short_dir / "s", [event("content", text="Hi."), done("Hi.")]),
        terminal(short_dir / "s", environ=PLAIN_SIZE) as screen,
    ):
        screen.read_until("> ")
        screen.type("x\n")
        assert screen.read_until("> ").startswith("Hi.\n[1 cached, 2 read, 3 generated")


@define
class Between:
    """A terminal at which a signal comes after Python has looked for one, and before the system is called."""

    fd: int

    def fileno(self) -> int:
        signal.raise_signal(signal.SIGINT)
        return self.fd


def test_a_signal_between_two_looks_of_python_is_not_lost_until_a_line_comes() -> None:
    """Its handler says nothing, so that only the wait itself can notice it."""
    heard: list[int] = []

    def too_long(*_: object) -> None:
        raise TimeoutError("the signal was not noticed")

    read_end, write_end = os.pipe()
    before = {
        number: signal.signal(number, handler)
        for number, handler in ((signal.SIGINT, lambda number, _: heard.append(number)), (signal.SIGALRM, too_long))
    }
    try:
        signal.alarm(5)
        wait_for_line(cast("TextIO", Between(read_end)))
        assert heard == [signal.SIGINT]
        os.write(write_end, b"a line\n")
        with open(read_end, closefd=False) as terminal:
            wait_for_line(terminal)
            assert terminal.readline() == "a line\n"
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)
    assert signal.set_wakeup_fd(-1) == -1, "nothing is left of it"
