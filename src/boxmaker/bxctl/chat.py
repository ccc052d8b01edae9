"""`bxctl chat`: a turn a line, over one connection each.

Source: M2b section 7; design.md section 9.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Protocol, TextIO

import trio
from attrs import define, frozen

from boxmaker.bxctl.render import Renderer, one_visible_line, visible
from boxmaker.channel.client import Frame, open_turn
from boxmaker.errors import ChannelClosed, ValueRefused, WireableError
from boxmaker.proto.channel import ErrorCode, Turn, TurnDone, WireError
from boxmaker.proto.chat import Content
from boxmaker.proto.ids import SUFFIX_ALPHABET, SUFFIX_LENGTH, SessionId, make_session_id

NOT_BEGUN = frozenset({
    ErrorCode.BAD_REQUEST, ErrorCode.UNSUPPORTED_VERSION, ErrorCode.SESSION_BUSY,
    ErrorCode.SESSION_EXISTS, ErrorCode.NO_SUCH_SESSION,
})  # fmt: skip
"""Refusals: the turn left no trace, so a session that was to be new still is. After any other error it may
exist; if it does not, the next turn falls back as `--session` does."""

INTERRUPTED_STATUS = 130
MAX_LINE_BYTES = 16 * 1024 * 1024
"""What is read of one line before we believe that it is no line: loopd's own limit is far below."""


class LineTooLong(Exception):
    """A line over MAX_LINE_BYTES; the rest of the input is not read."""


@frozen(kw_only=True)
class Options:
    """What the command line says."""

    socket: Path
    session: SessionId | None
    reasoning: bool
    say: str | None
    as_json: bool
    figures: bool


class View(Protocol):
    """What shows the frames of a turn."""

    def begin(self) -> None:
        """A turn begins."""

    def frame(self, frame: Frame) -> None:
        """One frame has come."""

    def error(self, code: str, message: str) -> None:
        """Something failed on this side."""

    def cancelled(self) -> None:
        """The owner stopped the turn."""


class JsonView:
    """`--json`: frame bodies as ASCII lines on stdout; errors also on stderr."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err

    def begin(self) -> None:
        """Nothing to show."""

    def frame(self, frame: Frame) -> None:
        """Print the body."""
        self._out.write(json.dumps(frame.body, separators=(",", ":")) + "\n")
        self._out.flush()
        if isinstance(frame.answer, WireError):
            self.error(frame.answer.code.value, frame.answer.message)

    def error(self, code: str, message: str) -> None:
        """Print a line on stderr."""
        print(f"bxctl: {code}: {one_visible_line(message)}", file=self._err, flush=True)

    def cancelled(self) -> None:
        """Print a line on stderr."""
        print("bxctl: cancelled", file=self._err, flush=True)


class HumanView:
    """For people: what the Renderer makes of it."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.begin = renderer.begin
        self.error = renderer.error
        self.cancelled = renderer.cancelled

    def frame(self, frame: Frame) -> None:
        """Show the frame, if it is of a kind that we know."""
        if frame.answer is not None:
            self._renderer.show(frame.answer)


class SayView:
    """`--say`: the answer at the end; lines about the turn on stderr."""

    def __init__(self, renderer: Renderer, out: TextIO) -> None:
        self._renderer = renderer
        self._out = out
        self.begin = renderer.begin
        self.error = renderer.error
        self.cancelled = renderer.cancelled

    def frame(self, frame: Frame) -> None:
        """Print the answer when it is there; content before that is no answer yet, or comes again in it."""
        answer = frame.answer
        if isinstance(answer, TurnDone):
            if not answer.content:
                self._renderer.show(answer)
            self._out.write(visible(answer.content) + "\n")
            self._out.flush()
        elif answer is not None and not isinstance(answer, Content):
            self._renderer.show(answer)


@define
class Chat:
    """One conversation from this side: which session, and whether it exists yet."""

    socket: Path
    session: SessionId
    resume: bool
    view: View
    err: TextIO

    def turn(self, content: str) -> bool:
        """Run one turn and show it; True when it has an answer.

        Raises:
            NobodyListens: no daemon; nothing was sent.
            KeyboardInterrupt: Ctrl-C; the turn was cancelled.
        """
        self.view.begin()
        try:
            final = trio.run(self._turn, content, self.resume)
            if isinstance(final, WireError) and final.code == ErrorCode.NO_SUCH_SESSION and self.resume:
                print(f"new session {self.session}", file=self.err, flush=True)
                self.resume = False
                final = trio.run(self._turn, content, False)
        except ChannelClosed as exc:
            self.resume = True
            self.view.error(exc.code, str(exc))
            return False
        except WireableError as exc:
            self.view.error(exc.code, str(exc))
            return False
        except ValueRefused as exc:  # text that loopd would refuse: it was not sent
            self.view.error(ErrorCode.BAD_REQUEST.value, str(exc))
            return False
        except KeyboardInterrupt:
            self.resume = True
            raise
        if not isinstance(final, WireError):
            self.resume = True
            return True
        self.resume = self.resume or final.code not in NOT_BEGUN
        return False

    async def _turn(self, content: str, resume: bool) -> TurnDone | WireError:
        turn = Turn(session=self.session, content=content, resume=resume)
        async with open_turn(self.socket, turn) as channel:
            while True:
                frame = await channel.receive()
                answer = frame.answer
                refused = resume and isinstance(answer, WireError) and answer.code == ErrorCode.NO_SUCH_SESSION
                if not refused:  # a refused first try is not shown: the same turn is sent once more
                    self.view.frame(frame)
                if isinstance(answer, TurnDone | WireError):
                    return answer


def new_session_id() -> SessionId:
    """An id from the time and a random suffix."""
    suffix = "".join(secrets.choice(SUFFIX_ALPHABET) for _ in range(SUFFIX_LENGTH))
    return make_session_id(time.strftime("%Y%m%d-%H%M%S"), suffix)


def run_chat(options: Options, *, no_colour: bool) -> int:
    """Run the command; give its exit status.

    Raises:
        NobodyListens: no daemon behind the socket.
    """
    out, err = sys.stdout, sys.stderr
    if isinstance(out, TextIOWrapper):
        out.reconfigure(errors="backslashreplace")  # as stderr is: an answer is not lost to the locale
    terminal = out.isatty()
    renderer = Renderer(
        out,
        err,
        stream=terminal and options.say is None,
        transient=err.isatty(),
        colour=terminal and err.isatty() and not no_colour,
        reasoning=options.reasoning,
        figures=options.figures and err.isatty(),
        clock_s=time.monotonic,
        columns=lambda: shutil.get_terminal_size().columns,
    )
    view: View
    if options.as_json:
        view = JsonView(out, err)
    elif options.say is not None:
        view = SayView(renderer, out)
    else:
        view = HumanView(renderer)
    session = options.session or new_session_id()
    chat = Chat(socket=options.socket, session=session, resume=options.session is not None, view=view, err=err)
    print(f"session {session}", file=err, flush=True)
    if options.say is not None:
        try:
            return 0 if chat.turn(options.say) else 1
        except KeyboardInterrupt:
            view.cancelled()
            return INTERRUPTED_STATUS
    interactive = sys.stdin is not None and sys.stdin.isatty()  # None: `bxctl chat <&-`
    return _lines(chat, interactive=interactive, prompt=terminal and interactive and not options.as_json)


def _lines(chat: Chat, *, interactive: bool, prompt: bool) -> int:
    """A turn a line, until EOF or /quit. A person at a terminal has seen each error: that ends with 0."""
    failed = False
    lines = _read_lines(chat.err if prompt else None)
    while True:
        try:
            line = next(lines, None)
        except KeyboardInterrupt:
            print(file=chat.err, flush=True)
            return INTERRUPTED_STATUS
        except LineTooLong:
            chat.view.error("bad_request", f"a line of over {MAX_LINE_BYTES} bytes; nothing more is read")
            return 1
        except UnicodeDecodeError:
            chat.view.error("bad_request", "the line is not UTF-8; it was not sent")
            failed = True
            lines = _read_lines(chat.err if prompt else None)
            continue
        if line is None or line.strip() == "/quit":
            if line is None and prompt:
                print(file=chat.err, flush=True)
            return 1 if failed and not interactive else 0
        if not line.strip():
            continue
        try:
            failed |= not chat.turn(line)
        except KeyboardInterrupt:
            chat.view.cancelled()
            failed = True


def _read_lines(prompt: TextIO | None) -> Iterator[str]:
    while True:
        if prompt is not None:
            prompt.write("> ")
            prompt.flush()
        raw = sys.stdin.buffer.readline(MAX_LINE_BYTES + 1) if sys.stdin is not None else b""
        if not raw:
            return
        if len(raw) > MAX_LINE_BYTES:
            raise LineTooLong
        yield raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
