"""What a person sees of a turn: text on stdout, everything else on stderr.

Laws:
* stdout holds answers only. On a terminal they stream; elsewhere each completion is printed when it
  is final, because a pipe cannot be withdrawn.
* Control characters and bidi controls that came from a model, a tool or a server are shown as
  visible escapes, whatever the output is.

Source: M2b section 7; design.md section 9.
"""

from __future__ import annotations

import re
from typing import TextIO

from boxmaker.proto.channel import CacheLoss, Cut, ToolCallStarted, ToolResult, TurnDone, WireError
from boxmaker.proto.chat import Content, Queued, Reasoning, Retrying, ThinkingCapped, Waiting
from boxmaker.proto.frames import Answer

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

DIM = "\x1b[2m"
PLAIN = "\x1b[0m"


def visible(text: str) -> str:
    """Show C0 controls but LF and TAB, DEL, C1 and bidi controls as escapes such as `\\x1b`."""
    return _UNSAFE.sub(lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text)


def one_visible_line(text: str) -> str:
    """The same, on one line."""
    return visible(text.replace("\n", "\\n").replace("\t", " "))


class Renderer:
    """Show one turn after another.

    `stream`: stdout is a terminal, so text is shown as it comes. `colour` dims what is no answer.
    """

    def __init__(self, out: TextIO, err: TextIO, *, stream: bool, colour: bool, reasoning: bool) -> None:
        self._out = out
        self._err = err
        self._stream = stream
        self._colour = colour
        self._reasoning = reasoning
        self._pending: list[str] = []
        self._at_line_start = True
        self._in_reasoning = False
        self._had_reasoning = False

    def begin(self) -> None:
        """A turn begins."""
        self._pending = []
        self._had_reasoning = False

    def show(self, answer: Answer) -> None:
        """Show one event or final answer."""
        match answer:
            case Content(text=text):
                self._content(text)
            case Reasoning(text=text):
                self._reasoning_text(text)
            case ToolCallStarted(name=name):
                self._flush_completion()
                self.status(f"calls {name}")
            case ToolResult(name=name, class_=class_, truncated=truncated):
                self._flush_completion()
                notes = [note for note, on in ((class_, class_ != "public"), ("truncated", truncated)) if on]
                if notes:
                    self.status(f"result of {name}: {', '.join(notes)}")
            case Queued(ahead=ahead):
                self.status(f"queued, {ahead} ahead")
            case Waiting(slot_busy=slot_busy):
                self.status("waiting: the server's slot is busy" if slot_busy else "waiting: the model is loading")
            case Retrying(attempt=attempt, after_ms=after_ms, error=error):
                self._void()
                self.status(f"retrying (try {attempt}, in {after_ms / 1000:.1f} s): {error}")
            case ThinkingCapped(tokens=tokens):
                self.status(f"thinking capped after {tokens} tokens")
            case CacheLoss(expected=expected, got=got):
                self.status(f"lost {expected - got} cached tokens: {got} of {expected} were left")
            case Cut(reason=reason):
                why = "its length limit" if reason == "length" else "the thinking cap"
                self.status(f"the reply was cut at {why}")
            case TurnDone(content=content):
                self._done(content)
            case WireError(code=code, message=message):
                self._void()
                self.error(code.value, message)
            case _:
                pass  # progress is for a status line of its own

    def status(self, text: str) -> None:
        """One line about the turn, dimmed, on stderr."""
        self._fresh_line()
        line = f"[{one_visible_line(text)}]"
        self._write_err(f"{DIM}{line}{PLAIN}\n" if self._colour else f"{line}\n")

    def error(self, code: str, message: str) -> None:
        """One error, on stderr."""
        self._fresh_line()
        self._write_err(f"bxctl: {code}: {one_visible_line(message)}\n")

    def cancelled(self) -> None:
        """The owner stopped the turn."""
        self._void()
        self.status("cancelled")

    def _content(self, text: str) -> None:
        if not self._stream:
            self._pending.append(text)
            return
        if self._in_reasoning:
            self._fresh_line()
        self._write_out(visible(text))
        self._at_line_start = text.endswith("\n")
        self._pending.append(text)

    def _reasoning_text(self, text: str) -> None:
        self._had_reasoning = True
        if not self._stream or not self._reasoning:
            return
        if not self._in_reasoning:
            self._fresh_line()
            self._in_reasoning = True
        shown = visible(text)
        self._write_err(f"{DIM}{shown}{PLAIN}" if self._colour else shown)
        self._at_line_start = text.endswith("\n")

    def _fresh_line(self) -> None:
        """Begin a new line if the last one was left open."""
        if not self._at_line_start:
            if self._in_reasoning:
                self._write_err("\n")
            elif self._stream:
                self._write_out("\n")
        self._at_line_start = True
        self._in_reasoning = False

    def _flush_completion(self) -> None:
        """A completion is final: print what of it was held back."""
        text, self._pending = "".join(self._pending), []
        if text and not self._stream:
            self._write_out(visible(text) if text.endswith("\n") else visible(text) + "\n")

    def _void(self) -> None:
        """What was sent since the last tool result does not hold."""
        had_text = bool(self._pending)
        self._pending = []
        if had_text and self._stream:
            self.status("the text above is withdrawn")

    def _done(self, content: str) -> None:
        if not content:
            self.status("the model gave no answer" + (", only reasoning" if self._had_reasoning else ""))
            return
        if not self._stream:
            self._pending = [content]
        self._flush_completion()
        self._fresh_line()

    def _write_out(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _write_err(self, text: str) -> None:
        self._err.write(text)
        self._err.flush()
