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
from collections.abc import Callable
from typing import TextIO

from boxmaker.proto.channel import CacheLoss, Context, Cut, Steered, ToolCallStarted, ToolResult, TurnDone, WireError
from boxmaker.proto.chat import Content, Figures, Progress, Queued, Reasoning, Retrying, ThinkingCapped, Waiting
from boxmaker.proto.frames import Answer

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

LEAST_TIMED_S = 0.05
"""An answer that came in less is no measure of speed."""
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

    `stream`: stdout is a terminal, so text is shown as it comes, with a line of figures after each
    answer if `figures`. `transient`: stderr is one too, so a line that vanishes tells how far the
    server has read. `colour` dims what is no answer. `clock_s` and `columns` are asked each time: a
    terminal may change its width.
    """

    def __init__(
        self,
        out: TextIO,
        err: TextIO,
        *,
        stream: bool,
        transient: bool,
        colour: bool,
        reasoning: bool,
        figures: bool,
        clock_s: Callable[[], float],
        columns: Callable[[], int],
    ) -> None:
        self._out = out
        self._err = err
        self._stream = stream
        self._transient = transient
        self._colour = colour
        self._reasoning = reasoning
        self._figures = figures
        self._clock_s = clock_s
        self._columns = columns
        self._pending: list[str] = []
        self._at_line_start = True
        self._in_reasoning = False
        self._transient_columns = 0
        self._reading_since: tuple[float, int] | None = None
        self._first_delta_s: float | None = None

    def begin(self) -> None:
        """A turn begins."""
        self._pending = []
        self._begin_completion()

    def _begin_completion(self) -> None:
        self._reading_since = None
        self._first_delta_s = None

    def show(self, answer: Answer) -> None:
        """Show one event or final answer."""
        if isinstance(answer, Content | Reasoning) and self._first_delta_s is None:
            self._first_delta_s = self._clock_s()
        match answer:
            case Content(text="") | Reasoning(text=""):
                pass
            case Content(text=text):
                self._content(text)
            case Reasoning(text=text):
                self._reasoning_text(text)
            case Progress():
                self._progress(answer)
            case ToolCallStarted(name=name):
                self._flush_completion()
                self.status(f"calls {name}")
            case ToolResult(name=name, class_=class_, truncated=truncated, untrusted=untrusted):
                self._flush_completion()
                self._begin_completion()
                marks = ((class_, class_ != "public"), ("untrusted", untrusted), ("truncated", truncated))
                notes = [note for note, on in marks if on]
                if notes:
                    self.status(f"result of {name}: {', '.join(notes)}")
            case Queued(ahead=ahead):
                self.status(f"queued, {ahead} ahead")
            case Waiting(slot_busy=slot_busy):
                self.status("waiting: the server's slot is busy" if slot_busy else "waiting: the model is loading")
            case Retrying(attempt=attempt, after_ms=after_ms, error=error):
                self._void()
                self._begin_completion()
                self.status(f"retrying (try {attempt}, in {after_ms / 1000:.1f} s): {error}")
            case ThinkingCapped(tokens=tokens):
                self.status(f"thinking capped after {tokens} tokens")
            case CacheLoss(expected=expected, got=got):
                self.status(f"lost {expected - got:,} cached tokens (bxctl why)")
            case Cut(reason=reason):
                why = "its length limit" if reason == "length" else "the thinking cap"
                self.status(f"the reply was cut at {why}")
            case Context(used=used, n_ctx=n_ctx):
                share = 100 * used // n_ctx
                self.status(f"the context is {share}% full, {used:,} of {n_ctx:,} tokens: go on in a new session soon")
            case Steered(content=content):
                self._flush_completion()
                self._begin_completion()
                self.status(f"joined: {content}")
            case TurnDone(content=content, usage=usage):
                self._done(content, usage)
                self._show_figures(usage)
            case WireError(code=code, message=message):
                self._void()
                self.error(code.value, message)

    def status(self, text: str) -> None:
        """One line about the turn, dimmed, on stderr."""
        self._fresh_line()
        line = f"[{one_visible_line(text)}]"
        self._write_err(f"{DIM}{line}{PLAIN}\n" if self._colour else f"{line}\n")

    def error(self, code: str, message: str) -> None:
        """One error, on stderr."""
        self._fresh_line()
        self._write_err(f"bxctl: {code}: {one_visible_line(message)}\n")

    def tell_unanswered(self, content: str, usage: Figures) -> None:
        """Name an answer that shows nothing: a blank line would look like one."""
        if not visible(content).strip():
            self.status("the model gave no answer" + (", only reasoning" if usage.reasoning_tokens else ""))

    def typed(self) -> None:
        """The owner has typed a line while the turn runs: the cursor stands at the beginning of the next."""
        self._at_line_start = True
        self._transient_columns = 0

    def cancelled(self, already_done: str = "") -> None:
        """The owner stopped the turn; says what it had done by then."""
        self._void()
        self.status(f"cancelled; {already_done}" if already_done else "cancelled")

    def _content(self, text: str) -> None:
        if not self._stream:
            self._pending.append(text)
            return
        if self._in_reasoning:
            self._fresh_line()
        # noted before it is written: Ctrl-C may come between any two steps
        self._pending.append(text)
        self._at_line_start = text.endswith("\n")
        self._write_out(visible(text))

    def _reasoning_text(self, text: str) -> None:
        if not self._stream or not self._reasoning:
            return
        if not self._in_reasoning:
            self._fresh_line()
            self._in_reasoning = True
        shown = visible(text)
        self._at_line_start = text.endswith("\n")
        self._write_err(f"{DIM}{shown}{PLAIN}" if self._colour else shown)

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

    def _done(self, content: str, usage: Figures) -> None:
        self.tell_unanswered(content, usage)
        if not content:
            return
        if not self._stream:
            self._pending = [content]
        elif not self._pending:  # its text did not come as events
            self._content(content)
        self._flush_completion()
        self._fresh_line()

    def _progress(self, progress: Progress) -> None:
        """One line that tells how far the server is with reading the prompt, and vanishes."""
        if not self._stream or not self._transient or progress.processed >= progress.total:
            self._clear_transient()
            return
        now = self._clock_s()
        if self._reading_since is None:
            self._reading_since = (now, progress.processed)
        since, before = self._reading_since
        count = f"{progress.processed:,} of {progress.total:,}"
        cached = f"reading {count} tokens, {progress.cache:,} from cache"
        texts = [cached, f"reading {count} tokens", count, f"{100 * progress.processed // progress.total}%"]
        if now > since and progress.processed > before:
            texts.insert(0, f"{cached}, {(progress.processed - before) / (now - since):,.0f}/s")
        room = self._columns() - 1
        shown = next((text for text in texts if len(text) <= room), "")  # whole, or it would show a wrong number
        self._fresh_line()
        self._write_err(f"{DIM}{shown}{PLAIN}" if self._colour else shown)
        self._transient_columns = len(shown)

    def _clear_transient(self) -> None:
        if self._transient_columns:
            rows_above = (self._transient_columns - 1) // max(self._columns(), 1)  # the terminal may be narrower now
            self._transient_columns = 0
            self._write_err((f"\x1b[{rows_above}A" if rows_above else "") + "\r\x1b[J")

    def _show_figures(self, usage: Figures) -> None:
        """What the last completion cost, and how fast it came."""
        if not self._figures or not self._stream:
            return
        parts = [
            f"{count:,} {what}"
            for count, what in (
                (usage.cache_n, "cached"),
                (usage.prompt_n, "read"),
                (usage.predicted_n, "generated"),
            )
            if count is not None
        ]
        if usage.predicted_n and self._first_delta_s is not None:
            took_s = self._clock_s() - self._first_delta_s
            if took_s >= LEAST_TIMED_S:
                parts.append(f"{(usage.predicted_n - 1) / took_s:.1f} tokens/s")  # after the first
        if parts:
            self.status(", ".join(parts))

    def _write_out(self, text: str) -> None:
        self._clear_transient()
        self._out.write(text)
        self._out.flush()

    def _write_err(self, text: str) -> None:
        self._clear_transient()
        self._err.write(text)
        self._err.flush()
