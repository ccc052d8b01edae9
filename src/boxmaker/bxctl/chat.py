"""`bxctl chat`: a turn a line, over one connection each.

Source: M2b section 7; design.md section 9.
"""

from __future__ import annotations

import random
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import trio
from attrs import define, field, frozen

from boxmaker.bxctl.live import LiveTurn, Screen, Typed
from boxmaker.bxctl.output import reader_watch
from boxmaker.bxctl.render import Renderer
from boxmaker.bxctl.views import HumanView, JsonView, SayView, View
from boxmaker.channel.client import Frame, ask
from boxmaker.errors import BoxmakerError, ChannelClosed, NobodyListens, ValueRefused
from boxmaker.proto.channel import Cancel, CancelDone, ErrorCode, Fork, ForkDone, Turn, TurnDone, WhenBusy, WireError
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


@frozen(kw_only=True)
class Options:
    """What the command line says."""

    socket: Path
    session: SessionId | None
    reasoning: bool
    say: str | None
    as_json: bool
    figures: bool
    when_busy: WhenBusy = "refuse"


@define
class Chat:
    """One conversation from this side: which session, and whether it exists yet.

    With `typed`, a terminal, what is typed while a turn runs joins it.
    """

    socket: Path
    session: SessionId
    resume: bool
    view: View
    err: TextIO
    when_busy: WhenBusy = "refuse"
    typed: Typed | None = None
    reader_gone: Callable[[], bool] = lambda: False
    unreachable: bool = False
    """The last turn found no daemon."""
    late: list[str] = field(factory=list)
    """Lines that were typed too late to join a turn: turns of their own."""
    quit: bool = False
    """The owner wants to leave."""

    def turn(self, content: str) -> bool:
        """Run one turn and show it; True when it has an answer.

        Raises:
            BrokenPipeError: the reader of our output has gone; the turn was cancelled.
            KeyboardInterrupt: Ctrl-C; the turn was cancelled, and the owner told what it had done.
        """
        self.view.begin()
        self.unreachable = False
        live = self._live(content, self.resume)
        try:
            _run(live)
            answer = live.answer()
            if isinstance(answer, WireError) and answer.code == ErrorCode.NO_SUCH_SESSION and self.resume:
                print(f"new session {self.session}", file=self.err, flush=True)
                self.resume = False
                first, live = live, self._live(content, False)
                _run(live)
                answer = live.answer()
                live.late[:0] = first.late
                live.quit = live.quit or first.quit
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
            self.view.cancelled(live.already_done(), None)
            raise
        if not live.stopped:  # after a cancel the owner is to say them again
            self.late += live.late
        self.quit = self.quit or live.quit
        if live.stopped and not isinstance(answer, TurnDone):
            self.resume = True
            if answer is None or answer.code == ErrorCode.CANCELLED:
                self.view.cancelled(live.already_done(), live.final)
            for text in live.late:
                self.view.status(f"did not join, and is not sent: {text}")
            if live.by_signal:
                raise KeyboardInterrupt
            return False
        if not isinstance(answer, WireError):
            self.resume = True
            return True
        self.resume = self.resume or answer.code not in NOT_BEGUN
        return False

    def _live(self, content: str, resume: bool) -> LiveTurn:
        turn = Turn(session=self.session, content=content, resume=resume, when_busy=self.when_busy)

        def frame(frame: Frame) -> None:
            refused = isinstance(frame.answer, WireError) and frame.answer.code == ErrorCode.NO_SUCH_SESSION
            if not (resume and refused):  # a refused first try is not shown: the same turn is sent once more
                self.view.frame(frame)

        screen = Screen(
            frame=frame,
            status=self.view.status,
            error=self.view.error,
            refused=self.view.refused,
            pause=self.view.pause,
            typed=self.view.typed,
        )
        return LiveTurn(self.socket, turn, screen, self.reader_gone, self.typed, self.decode)

    def decode(self, raw: bytes) -> str | None:
        """A line that was read, as text; None, and a word to the owner, for one that is not to be sent."""
        if self.typed is not None and len(raw) > TERMINAL_LINE_BYTES:  # with its LF: perhaps more was typed
            text = f"a terminal hands over {TERMINAL_LINE_BYTES} bytes of a line at most, and the rest of yours is gone"
            self.view.error("bad_request", f"{text}; it was not sent. Pipe a long text into `bxctl chat --session ID`")
            return None
        try:
            return raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            self.view.error("bad_request", "the line is not UTF-8; it was not sent")
            return None

    def cancel(self) -> None:
        """`/cancel` at the prompt: end a turn that another client has begun."""
        frame = self._ask(Cancel(session=self.session, cause="owner"))
        if frame is not None and isinstance(frame.answer, CancelDone):
            ending = frame.answer.ending
            self.view.done(frame, "no turn runs" if ending == "idle" else f"the turn ended: {ending}")

    def fork(self, at: str) -> None:
        """`/fork`, `/fork N`: go on in a new session that holds this one up to its answer N."""
        if at and not (at.isascii() and at.isdigit() and int(at)):
            self.view.error("bad_request", "/fork takes the number of an answer, from 1")
            return
        new = new_session_id()
        frame = self._ask(Fork(session=self.session, from_=int(at) if at else None, new=new))
        if frame is not None and isinstance(frame.answer, ForkDone):
            self.view.done(frame, f"forked {self.session} at answer {frame.answer.from_}")
            self.session, self.resume = new, True
            print(f"session {new}", file=self.err, flush=True)

    def _ask(self, request: Cancel | Fork) -> Frame | None:
        try:
            frame = trio.run(ask, self.socket, request)
        except BoxmakerError as exc:
            self.view.error(exc.code, str(exc))
            return None
        if isinstance(frame.answer, WireError):
            self.view.refused(frame, "")
        return frame


def _run(live: LiveTurn) -> None:
    """Run a turn; Ctrl-C that came before it could be taken is Ctrl-C, not a group."""
    try:
        trio.run(live.run)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        raise KeyboardInterrupt from None


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
    interactive = options.say is None and sys.stdin is not None and sys.stdin.isatty()  # None: `bxctl chat <&-`
    chat = Chat(
        socket=options.socket,
        session=session,
        resume=options.session is not None,
        view=view,
        err=err,
        when_busy=options.when_busy,
        typed=Typed(sys.stdin.fileno(), TERMINAL_LINE_BYTES) if interactive else None,
        reader_gone=reader_watch(out),
    )
    print(f"session {session}", file=err, flush=True)
    if options.say is not None:
        try:
            return 0 if chat.turn(options.say) else 1
        except KeyboardInterrupt:
            return INTERRUPTED_STATUS
    return _lines(chat, prompt=terminal and interactive and not options.as_json)


def _lines(chat: Chat, *, prompt: bool) -> int:
    """A turn a line, until EOF or /quit. A person at a terminal has seen each error: that ends with 0."""
    interactive = chat.typed is not None
    failed = False
    while chat.late or not chat.quit:
        if chat.late:
            line = chat.late.pop(0)
            chat.view.status(f"the turn had ended; sent as the next one: {line}")
        else:
            try:
                raw = _read_line(chat, prompt)
            except KeyboardInterrupt:
                print(file=chat.err, flush=True)
                return INTERRUPTED_STATUS
            if len(raw) > MAX_LINE_BYTES:
                chat.view.error("bad_request", f"a line of over {MAX_LINE_BYTES} bytes; nothing more is read")
                return 1
            if not raw:
                if prompt:
                    print(file=chat.err, flush=True)
                break
            text = chat.decode(raw)
            if text is None:
                failed = True
                continue
            line = text
        word = line.strip()
        if word == "/quit":
            break
        if not word:
            continue
        if interactive and word == "/cancel":
            chat.cancel()
            continue
        if interactive and word.split()[0] == "/fork":
            chat.fork(word.removeprefix("/fork").strip())
            continue
        try:
            failed |= not chat.turn(line)
        except KeyboardInterrupt:
            failed = True
            if not interactive:  # there is no prompt to return to
                return INTERRUPTED_STATUS
        if chat.unreachable and not interactive:
            return 1
    return 1 if failed and not interactive else 0


def wait_for_line(terminal: TextIO) -> None:
    """Wait until a terminal has something to read, or a signal has come; both may have come before.

    Python tells a signal before a call to the system, or when it breaks one off. One that comes between the two would
    wait for the next line: a Ctrl-C at the very moment of the prompt was lost until Enter (seen).
    """
    woken, wakes = socket.socketpair()
    with woken, wakes:
        wakes.setblocking(False)
        before = signal.set_wakeup_fd(wakes.fileno())
        try:
            select.select([terminal.fileno(), woken.fileno()], [], [])
        finally:
            signal.set_wakeup_fd(before)


def _read_line(chat: Chat, prompt: bool) -> bytes:
    """Read one line of stdin with its end; empty at the end of the input."""
    if prompt:
        chat.err.write("> ")
        chat.err.flush()
    if sys.stdin is None:
        return b""
    typed = chat.typed
    if typed is None:
        return sys.stdin.buffer.readline(MAX_LINE_BYTES + 1)
    before, typed.rest = typed.rest, b""  # what was typed without a line end while a turn ran
    end = before.find(b"\n") + 1
    if end:
        before, typed.rest = before[:end], before[end:]
        return before
    wait_for_line(sys.stdin)
    return before + sys.stdin.buffer.readline(MAX_LINE_BYTES + 1)
