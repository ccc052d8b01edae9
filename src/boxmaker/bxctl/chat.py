"""`bxctl chat`: a turn a line, over one connection each.

Source: M2b section 7; design.md section 9.
"""

from __future__ import annotations

import errno
import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Protocol, TextIO

import trio
from attrs import define, frozen

from boxmaker.bxctl.output import reader_watch
from boxmaker.bxctl.render import Renderer, one_visible_line, visible
from boxmaker.channel.client import Frame, TurnChannel, open_turn
from boxmaker.errors import BoxmakerError, ChannelClosed, NobodyListens, ValueRefused
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


TERMINAL_LINE_BYTES = 4095
"""What Linux hands over of one line that is typed or pasted; it drops the rest without a word (n_tty)."""
READER_LOOK_S = 0.25
"""How often it is looked whether our output is still read, while nothing comes."""


class LineCut(Exception):
    """A line that the terminal may have cut."""


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

    def pause(self) -> None:
        """Nothing more is here just now: what is held back must be seen."""

    def error(self, code: str, message: str) -> None:
        """Something failed on this side."""

    def cancelled(self) -> None:
        """The owner stopped the turn."""


class JsonView:
    """`--json`: frame bodies as ASCII lines on stdout; errors also on stderr."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._encode = json.JSONEncoder(separators=(",", ":")).encode

    def begin(self) -> None:
        """Nothing to show."""

    def frame(self, frame: Frame) -> None:
        """Print the body."""
        self._out.write(self._encode(frame.body) + "\n")
        if isinstance(frame.answer, WireError):
            self._out.flush()
            self._line(frame.answer.code.value, frame.answer.message)

    def pause(self) -> None:
        """Hand over what is written: all frames of one read at once."""
        self._out.flush()

    def error(self, code: str, message: str) -> None:
        """Print a body like that of an error frame, and a line on stderr."""
        self._out.write(self._encode({"code": code, "message": message, "detail": {}}) + "\n")
        self._out.flush()
        self._line(code, message)

    def _line(self, code: str, message: str) -> None:
        print(f"bxctl: {code}: {one_visible_line(message)}", file=self._err, flush=True)

    def cancelled(self) -> None:
        """Print a line on stderr."""
        self._out.flush()
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

    def pause(self) -> None:
        """Nothing is held back."""


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
            self._renderer.tell_unanswered(answer.content, answer.usage)
            self._out.write(visible(answer.content) + "\n")
            self._out.flush()
        elif answer is not None and not isinstance(answer, Content):
            self._renderer.show(answer)

    def pause(self) -> None:
        """Nothing is held back but the answer."""


@define
class Chat:
    """One conversation from this side: which session, and whether it exists yet."""

    socket: Path
    session: SessionId
    resume: bool
    view: View
    err: TextIO
    reader_gone: Callable[[], bool] = lambda: False
    unreachable: bool = False
    """The last turn found no daemon."""

    def turn(self, content: str) -> bool:
        """Run one turn and show it; True when it has an answer.

        Raises:
            BrokenPipeError: the reader of our output has gone; the turn was cancelled.
            KeyboardInterrupt: Ctrl-C; the turn was cancelled.
        """
        self.view.begin()
        self.unreachable = False
        try:
            final = trio.run(self._turn, content, self.resume)
            if isinstance(final, WireError) and final.code == ErrorCode.NO_SUCH_SESSION and self.resume:
                print(f"new session {self.session}", file=self.err, flush=True)
                self.resume = False
                final = trio.run(self._turn, content, False)
        except ValueRefused as exc:  # text that loopd would refuse: it was not sent
            self.view.error(ErrorCode.BAD_REQUEST.value, str(exc))
            return False
        except BoxmakerError as exc:
            self.unreachable = isinstance(exc, NobodyListens)
            self.resume = self.resume or isinstance(exc, ChannelClosed)
            self.view.error(exc.code, str(exc))
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
                frame = await self._receive(channel)
                answer = frame.answer
                refused = resume and isinstance(answer, WireError) and answer.code == ErrorCode.NO_SUCH_SESSION
                if not refused:  # a refused first try is not shown: the same turn is sent once more
                    self.view.frame(frame)
                if isinstance(answer, TurnDone | WireError):
                    self.view.pause()
                    return answer

    async def _receive(self, channel: TurnChannel) -> Frame:
        frame = channel.received()
        if frame is not None:
            return frame
        self.view.pause()
        while True:
            with trio.move_on_after(READER_LOOK_S):
                return await channel.receive()
            if self.reader_gone():
                raise BrokenPipeError(errno.EPIPE, "the reader of the answers has gone")


def new_session_id() -> SessionId:
    """An id from the time and a random suffix."""
    chance = random.SystemRandom()  # as `secrets` has it, without the 20 modules that it brings
    suffix = "".join(chance.choice(SUFFIX_ALPHABET) for _ in range(SUFFIX_LENGTH))
    return make_session_id(time.strftime("%Y%m%d-%H%M%S"), suffix)


def run_chat(options: Options, *, no_colour: bool) -> int:
    """Run the command; give its exit status.

    Raises:
        OSError: our output cannot be written; BrokenPipeError: nobody reads it any more.
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
    chat = Chat(
        socket=options.socket,
        session=session,
        resume=options.session is not None,
        view=view,
        err=err,
        reader_gone=reader_watch(out),
    )
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
    while True:
        try:
            line = _read_line(chat.err if prompt else None, interactive)
        except KeyboardInterrupt:
            print(file=chat.err, flush=True)
            return INTERRUPTED_STATUS
        except LineTooLong:
            chat.view.error("bad_request", f"a line of over {MAX_LINE_BYTES} bytes; nothing more is read")
            return 1
        except UnicodeDecodeError:
            chat.view.error("bad_request", "the line is not UTF-8; it was not sent")
            failed = True
            continue
        except LineCut:
            text = f"a terminal hands over {TERMINAL_LINE_BYTES} bytes of a line at most, and the rest of yours is gone"
            chat.view.error("bad_request", f"{text}; it was not sent. Pipe a long text into `bxctl chat --session ID`")
            failed = True
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
            if not interactive:  # there is no prompt to return to
                return INTERRUPTED_STATUS
        if chat.unreachable and not interactive:
            return 1


def _read_line(prompt: TextIO | None, terminal: bool) -> str | None:
    """Read one line of stdin without its end; None at the end.

    Raises:
        LineTooLong, LineCut, UnicodeDecodeError: it is no line to send; the next one may be read.
    """
    if prompt is not None:
        prompt.write("> ")
        prompt.flush()
    raw = sys.stdin.buffer.readline(MAX_LINE_BYTES + 1) if sys.stdin is not None else b""
    if not raw:
        return None
    if len(raw) > MAX_LINE_BYTES:
        raise LineTooLong
    if terminal and len(raw) > TERMINAL_LINE_BYTES:  # with its LF: as much as fits, so more may have been typed
        raise LineCut
    return raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
