"""One turn while it runs: its frames, what is typed meanwhile, and Ctrl-C.

Laws:
* A line typed at a terminal joins the turn that runs; one that comes too late is given back as a turn of its own.
* The first Ctrl-C asks loopd to end the turn and waits for its last word; the second one, or silence, hangs up.
* Until loopd has said that the turn has begun (its first event but `queued`), the session may be somebody else's: what
  is typed waits, and Ctrl-C leaves. A steer or a cancel would hit the turn of somebody else.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import trio
from attrs import define, field, frozen

from boxmaker.channel.client import Frame, TurnChannel, ask, open_turn
from boxmaker.errors import BoxmakerError, ValueRefused
from boxmaker.proto.channel import (
    Cancel,
    ErrorCode,
    Steer,
    ToolCallStarted,
    ToolResult,
    Turn,
    TurnDone,
    WireError,
)
from boxmaker.proto.chat import Queued

READER_LOOK_S = 0.25
"""How often it is looked whether our output is still read, while nothing comes."""
CANCEL_WAIT_S = 2.0
"""How long loopd may take to end a turn that was cancelled; then we hang up, which cancels it too."""
STEER_WAIT_S = 5.0
"""How long it may take to say that a text did not join, once the turn has ended."""


@frozen(kw_only=True)
class Screen:
    """How to tell a person something while a turn runs."""

    frame: Callable[[Frame], None]
    status: Callable[[str], None]
    error: Callable[[str, str], None]
    refused: Callable[[Frame, str], None]
    """loopd did not take a line; the text says what became of it."""
    pause: Callable[[], None]
    """Nothing more is here just now: what is held back must be seen."""
    typed: Callable[[], None]
    """A line was typed, so the cursor stands at the beginning of one."""


@define
class Typed:
    """The lines of a terminal, read while a turn runs; `rest` is what came after the last line end."""

    fd: int
    most_bytes: int
    rest: bytes = b""

    async def next_line(self) -> bytes | None:
        """Wait for a line, with its end; None at the end of the input. Cancellation: safe, nothing is lost."""
        while b"\n" not in self.rest:
            await trio.lowlevel.wait_readable(self.fd)
            try:
                data = os.read(self.fd, self.most_bytes + 1)
            except OSError:  # EIO: the terminal has gone
                data = b""
            if not data:
                return None
            self.rest += data
        line, end, self.rest = self.rest.partition(b"\n")
        return line + end


@define
class LiveTurn:
    """Runs one turn; what happened is in its fields afterwards.

    `stopped`: the owner ended it, by Ctrl-C or in words. `quit`: the owner wants to leave. `late`: lines that were
    typed while it ran and did not join it. `final` is loopd's last word, None when we hung up.
    """

    socket: Path
    turn: Turn
    screen: Screen
    reader_gone: Callable[[], bool]
    typed: Typed | None = None
    decode: Callable[[bytes], str | None] = lambda raw: raw.decode("utf-8")
    """A typed line as text; None when it cannot be sent, of which the owner has been told."""
    stopped: bool = False
    by_signal: bool = False
    quit: bool = False
    late: list[str] = field(factory=list)
    final: Frame | None = None
    done: list[str] = field(factory=list)
    """Tools that have a result."""
    running: list[str] = field(factory=list)
    """Tools that were started and have none."""
    _begun: trio.Event = field(factory=trio.Event)
    _scope: trio.CancelScope = field(factory=trio.CancelScope)
    _unsent: deque[int] = field(factory=deque)
    _typed_more: trio.Event = field(factory=trio.Event)
    _unjoined: dict[int, str] = field(factory=dict)
    """Lines by their number, until it is known what became of them."""
    _failure: BoxmakerError | OSError | None = None

    async def run(self) -> None:
        """Run it to its end.

        Raises:
            BoxmakerError: the turn was not sent, or its connection was lost.
            OSError: our output cannot be written.

        Cancellation: safe at any point; loopd cancels the turn.
        """
        async with trio.open_nursery() as texts, trio.open_nursery() as listening:
            if threading.current_thread() is threading.main_thread():
                listening.start_soon(self._on_ctrl_c, listening)
            if self.typed is not None:
                listening.start_soon(self._read, self.typed, listening)
                listening.start_soon(self._say, texts)
            try:
                with self._scope:
                    async with open_turn(self.socket, self.turn) as channel:
                        await self._frames(channel)
            except (BoxmakerError, OSError) as exc:  # not through the nurseries: it would come out as a group
                self._failure = exc
            listening.cancel_scope.cancel()
            wait_s = 0 if self._failure is not None or self.final is None else STEER_WAIT_S
            texts.cancel_scope.deadline = trio.current_time() + wait_s
        self.late = [text for _, text in sorted(self._unjoined.items())]
        if self._failure is not None:
            raise self._failure

    async def _frames(self, channel: TurnChannel) -> None:
        while self.final is None:
            frame = await self._receive(channel)
            self._note(frame)
            if frame.final:
                self.final = frame
            if not self._ends_our_cancel(frame):
                self.screen.frame(frame)
        self.screen.pause()

    def _ends_our_cancel(self, frame: Frame) -> bool:
        return self.stopped and isinstance(frame.answer, WireError) and frame.answer.code == ErrorCode.CANCELLED

    def _note(self, frame: Frame) -> None:
        if not frame.final and not isinstance(frame.answer, Queued):
            self._begun.set()
        if isinstance(frame.answer, ToolCallStarted):
            self.running.append(frame.answer.name)
        elif isinstance(frame.answer, ToolResult) and self.running:
            self.done.append(self.running.pop(0))

    async def _receive(self, channel: TurnChannel) -> Frame:
        if (frame := channel.received()) is not None:
            return frame
        self.screen.pause()
        while True:
            with trio.move_on_after(READER_LOOK_S):
                return await channel.receive()
            if self.reader_gone():
                raise BrokenPipeError(errno.EPIPE, "the reader of the answers has gone")

    async def _on_ctrl_c(self, listening: trio.Nursery) -> None:
        """Cancelled by: the end of the turn."""
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            async for _ in signals:
                self.by_signal = True
                self._stop(listening)

    def _stop(self, listening: trio.Nursery) -> None:
        """Ask for the end of the turn; the second time, and before it has begun, leave. Not once it has ended."""
        if self.final is not None:
            return
        if self.stopped or not self._begun.is_set():
            self._scope.cancel()
        else:
            self._scope.deadline = trio.current_time() + CANCEL_WAIT_S
            listening.start_soon(self._cancel)
        self.stopped = True

    async def _cancel(self) -> None:
        try:
            answer = (await ask(self.socket, Cancel(session=self.turn.session, cause="owner"))).answer
        except BoxmakerError:
            self._scope.cancel()
        else:
            if isinstance(answer, WireError):  # a loopd that knows no cancel: leaving is one
                self._scope.cancel()

    async def _read(self, typed: Typed, listening: trio.Nursery) -> None:
        """Take what is typed. Cancelled by: the end of the turn."""
        try:
            number = 0
            while (raw := await typed.next_line()) is not None:
                number += 1
                self.screen.typed()
                text = self.decode(raw)
                word = (text or "").strip()
                if word in ("/quit", "/cancel"):
                    self.quit = self.quit or word == "/quit"
                    self._stop(listening)
                elif word.split()[:1] == ["/fork"]:
                    self.screen.status("a turn runs: /fork when it has ended, or after /cancel")
                elif text is not None and word:
                    self._unjoined[number] = text
                    self._unsent.append(number)
                    self._typed_more.set()
            self.quit = True
        except OSError as exc:
            self._fail(exc)

    async def _say(self, texts: trio.Nursery) -> None:
        """Send what was typed, in order, once the turn has begun. Cancelled by: the end of the turn."""
        await self._begun.wait()
        while True:
            while self._unsent:
                await texts.start(self._steer, self._unsent.popleft())
            self._typed_more = trio.Event()
            await self._typed_more.wait()

    def _fail(self, exc: OSError) -> None:
        self._failure = exc
        self._scope.cancel()

    async def _steer(self, number: int, task_status: trio.TaskStatus[None]) -> None:
        """Say a line to the turn; it is told as an event of the turn when it joins. Cancelled by: `run`.

        One that is cancelled has not joined: we hang up on it.
        """
        sent = False
        text = self._unjoined[number]
        try:
            async with open_turn(self.socket, Steer(session=self.turn.session, content=text)) as channel:
                sent = True
                task_status.started()
                frame = await channel.receive()
            if not isinstance(frame.answer, WireError):
                del self._unjoined[number]
            elif frame.answer.code not in (ErrorCode.NO_TURN, ErrorCode.NO_SUCH_SESSION):
                del self._unjoined[number]
                self.screen.refused(frame, "the line was not sent")
        except OSError as exc:
            self._fail(exc)
        except BoxmakerError as exc:
            del self._unjoined[number]
            code = ErrorCode.BAD_REQUEST.value if isinstance(exc, ValueRefused) else exc.code
            self.screen.error(
                code, f"{exc}; {'whether the line has joined is not known' if sent else 'it was not sent'}"
            )
        finally:
            if not sent:
                task_status.started()

    def answer(self) -> TurnDone | WireError | None:
        """loopd's last word, taken apart; None when we hung up."""
        answer = self.final.answer if self.final is not None else None
        return answer if isinstance(answer, TurnDone | WireError) else None

    def already_done(self) -> str:
        """What a turn that was ended early had done, in words; empty when that is nothing."""
        parts = [f"already done: {', '.join(self.done)}"] if self.done else []
        if self.running:
            parts.append(f"its outcome is not known: {', '.join(self.running)}")
        return "; ".join(parts)
