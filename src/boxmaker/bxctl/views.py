"""What shows the frames of a chat: to a program, to a person, or the answer alone.

Source: M2b section 7; design.md section 9.
"""

from __future__ import annotations

import json
from typing import Protocol, TextIO

from boxmaker.bxctl.render import Renderer, one_visible_line, visible
from boxmaker.channel.client import Frame
from boxmaker.proto.channel import TurnDone, WireError
from boxmaker.proto.chat import Content
from boxmaker.proto.codec import JsonObject


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

    def refused(self, frame: Frame, outcome: str) -> None:
        """loopd did not do what was asked for beside the turn; `outcome` says what that means."""

    def done(self, frame: Frame, text: str) -> None:
        """loopd did it; `text` says so to a person."""

    def status(self, text: str) -> None:
        """Something about the conversation, in words."""

    def typed(self) -> None:
        """The owner has typed a line while the turn runs."""

    def cancelled(self, already_done: str, final: Frame | None) -> None:
        """The owner stopped the turn; `final` is what loopd said to that, None when we hung up."""


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
        self._body(frame.body)
        if isinstance(frame.answer, WireError):
            self._out.flush()
            self._line(frame.answer.code.value, frame.answer.message)

    def pause(self) -> None:
        """Hand over what is written: all frames of one read at once."""
        self._out.flush()

    def error(self, code: str, message: str) -> None:
        """Print a body like that of an error frame, and a line on stderr."""
        self._body({"code": code, "message": message, "detail": {}})
        self._out.flush()
        self._line(code, message)

    def refused(self, frame: Frame, outcome: str) -> None:
        """Print the body, and lines on stderr."""
        self.frame(frame)
        self.pause()
        if outcome:
            self.status(outcome)

    def done(self, frame: Frame, text: str) -> None:
        """Print the body, and a line on stderr."""
        self.frame(frame)
        self.pause()
        self.status(text)

    def _body(self, body: JsonObject) -> None:
        self._out.write(self._encode(body) + "\n")

    def _line(self, code: str, message: str) -> None:
        print(f"bxctl: {code}: {one_visible_line(message)}", file=self._err, flush=True)

    def status(self, text: str) -> None:
        """Print a line on stderr."""
        print(f"bxctl: {one_visible_line(text)}", file=self._err, flush=True)

    def typed(self) -> None:
        """Nothing to do."""

    def cancelled(self, already_done: str, final: Frame | None) -> None:
        """Print the body, and a line on stderr."""
        if final is not None:
            self._body(final.body)
        self._out.flush()
        self.status(f"cancelled; {already_done}" if already_done else "cancelled")


class HumanView:
    """For people: what the Renderer makes of it."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.begin = renderer.begin
        self.error = renderer.error
        self.status = renderer.status
        self.typed = renderer.typed

    def frame(self, frame: Frame) -> None:
        """Show the frame, if it is of a kind that we know."""
        if frame.answer is not None:
            self._renderer.show(frame.answer)

    def pause(self) -> None:
        """Nothing is held back."""

    def refused(self, frame: Frame, outcome: str) -> None:
        """Say what loopd said; the turn that runs goes on."""
        if isinstance(frame.answer, WireError):
            message = frame.answer.message
            self.error(frame.answer.code.value, f"{message}; {outcome}" if outcome else message)

    def done(self, _: Frame, text: str) -> None:
        """Say so."""
        self.status(text)

    def cancelled(self, already_done: str, _: Frame | None) -> None:
        """Say so."""
        self._renderer.cancelled(already_done)


class SayView(HumanView):
    """`--say`: the answer at the end; lines about the turn on stderr."""

    def __init__(self, renderer: Renderer, out: TextIO) -> None:
        super().__init__(renderer)
        self._out = out

    def frame(self, frame: Frame) -> None:
        """Print the answer when it is there; content before that is no answer yet, or comes again in it."""
        if isinstance(frame.answer, TurnDone):
            self._renderer.tell_unanswered(frame.answer.content, frame.answer.usage)
            self._out.write(visible(frame.answer.content) + "\n")
            self._out.flush()
        elif not isinstance(frame.answer, Content):
            super().frame(frame)
