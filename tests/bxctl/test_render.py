"""Tests of what a person sees of a turn: on a terminal, in a pipe, with and without colour."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from io import StringIO

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.bxctl.render import Renderer, one_visible_line, visible
from boxmaker.proto.channel import CacheLoss, Context, Cut, ErrorCode, ToolCallStarted, ToolResult, TurnDone, WireError
from boxmaker.proto.chat import Content, Figures, Progress, Queued, Reasoning, Retrying, ThinkingCapped, Waiting
from boxmaker.proto.frames import Answer

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CLEAR = "\r\x1b[J"


def done(content: str, reasoning_tokens: int = 0) -> TurnDone:
    """A final answer that cost 1,200 tokens from the cache, 34 read and 50 generated."""
    usage = Figures(cache_n=1200, prompt_n=34, predicted_n=50, reasoning_tokens=reasoning_tokens, thinking_capped=False)
    return TurnDone(content=content, usage=usage)


def failed(message: str = "no") -> WireError:
    """A final error."""
    return WireError(code=ErrorCode.INFERENCE, message=message, detail={})


CALL = ToolCallStarted(name="clock")
RESULT = ToolResult(name="clock", class_="public", truncated=False)
RETRY = Retrying(attempt=2, after_ms=1500, error="refused")


@define
class Screen:
    """A terminal, where both streams are seen as one, and each stream by itself."""

    out: StringIO = field(factory=StringIO)
    err: StringIO = field(factory=StringIO)
    seen: str = ""
    now_s: float = 0.0
    columns: int = 80

    def renderer(
        self,
        *,
        stream: bool,
        transient: bool = True,
        colour: bool = False,
        reasoning: bool = True,
        figures: bool = False,
    ) -> Renderer:
        """A renderer on this screen."""
        screen = self

        class Both(StringIO):
            def __init__(self, one: StringIO) -> None:
                super().__init__()
                self._one = one

            def write(self, text: str) -> int:
                screen.seen += text
                return self._one.write(text)

        return Renderer(
            Both(self.out),
            Both(self.err),
            stream=stream,
            transient=transient,
            colour=colour,
            reasoning=reasoning,
            figures=figures,
            clock_s=lambda: self.now_s,
            columns=lambda: self.columns,
        )


def on_terminal(*answers: Answer, colour: bool = False, reasoning: bool = True) -> str:
    """What a terminal shows of one turn."""
    screen = Screen()
    renderer = screen.renderer(stream=True, colour=colour, reasoning=reasoning)
    renderer.begin()
    for answer in answers:
        renderer.show(answer)
    return screen.seen


def in_pipe(*answers: Answer) -> tuple[str, str]:
    """What stdout and stderr hold of one turn when stdout is a pipe."""
    screen = Screen()
    renderer = screen.renderer(stream=False, transient=False)
    renderer.begin()
    for answer in answers:
        renderer.show(answer)
    return screen.out.getvalue(), screen.err.getvalue()


# -- escapes -----------------------------------------------------------------------------------

EXAMPLES = [
    ("plain ünï ☃ 🐈\n\ttext", "plain ünï ☃ 🐈\n\ttext"),
    ("\x1b[31m", r"\x1b[31m"),
    ("a\x00b\x07\x08\x0b\x0c\r", r"a\x00b\x07\x08\x0b\x0c\x0d"),
    ("\x7f", r"\x7f"),
    ("\x80\x9b2J\x9f\x85", r"\x80\x9b2J\x9f\x85"),
    ("\u202a\u202b\u202c\u202d\u202e", r"\u202a\u202b\u202c\u202d\u202e"),
    ("\u2066\u2067\u2068\u2069\u200e\u200f\u061c", r"\u2066\u2067\u2068\u2069\u200e\u200f\u061c"),
    ("\xa0\u2028\u200d\u0301", "\xa0\u2028\u200d\u0301"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "shown"), EXAMPLES)
def test_control_and_bidi_characters_become_visible_escapes(text: str, shown: str) -> None:
    assert visible(text) == shown


BIDI_MARKS = {"LEFT-TO-RIGHT MARK", "RIGHT-TO-LEFT MARK", "ARABIC LETTER MARK"}
BIDI_CLASSES = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def is_unsafe(character: str) -> bool:
    """By Unicode's own data: a control other than LF and TAB, or a character with Bidi_Control."""
    if unicodedata.category(character) == "Cc":
        return character not in "\n\t"
    return unicodedata.bidirectional(character) in BIDI_CLASSES or unicodedata.name(character, "") in BIDI_MARKS


def test_exactly_the_unsafe_characters_are_changed() -> None:
    plane = [chr(code) for code in range(0x10000)]  # no other plane has such characters
    assert [c for c in plane if visible(c) != c] == [c for c in plane if is_unsafe(c)]


@given(st.text(), st.text())
def test_a_text_cut_anywhere_shows_the_same(one: str, other: str) -> None:
    assert visible(one) + visible(other) == visible(one + other)


@given(st.text())
def test_one_visible_line_is_one_line(text: str) -> None:
    shown = one_visible_line(text)
    assert "\n" not in shown
    assert "\t" not in shown
    assert not any(is_unsafe(character) for character in shown)


# -- a terminal --------------------------------------------------------------------------------


def test_content_streams_and_ends_with_a_line_end() -> None:
    assert on_terminal(Content(text="Hel"), Content(text="lo."), done("Hello.")) == "Hello.\n"
    assert on_terminal(Content(text="Hello.\n"), done("Hello.\n")) == "Hello.\n"


def test_an_answer_that_did_not_come_as_events_is_shown_all_the_same() -> None:
    assert on_terminal(done("Hello.")) == "Hello.\n"
    assert on_terminal(Content(text="Look."), CALL, RESULT, done("Noon.")) == "Look.\n[calls clock]\nNoon.\n"


def test_every_piece_is_shown_as_soon_as_it_comes() -> None:
    screen = Screen()
    renderer = screen.renderer(stream=True)
    renderer.begin()
    renderer.show(Content(text="Hel"))
    assert screen.out.getvalue() == "Hel"


def test_reasoning_comes_before_the_answer_on_lines_of_its_own_and_dimmed() -> None:
    turn = (Reasoning(text="Let me "), Reasoning(text="see."), Content(text="Yes."), done("Yes."))
    assert on_terminal(*turn) == "Let me see.\nYes.\n"
    assert on_terminal(*turn, colour=True) == f"{DIM}Let me {PLAIN}{DIM}see.{PLAIN}\nYes.\n"
    assert on_terminal(*turn, reasoning=False) == "Yes.\n"
    ended = (Reasoning(text="See.\n"), Content(text="Yes."), done("Yes."))
    assert on_terminal(*ended) == "See.\nYes.\n"


def test_reasoning_goes_to_stderr_and_content_to_stdout() -> None:
    screen = Screen()
    renderer = screen.renderer(stream=True)
    for answer in (Reasoning(text="Hm."), Content(text="Yes."), CALL, RESULT, Content(text="So."), done("So.")):
        renderer.show(answer)
    assert screen.out.getvalue() == "Yes.\nSo.\n"
    assert screen.err.getvalue() == "Hm.\n[calls clock]\n"


LINES = [
    (Queued(ahead=2), "[queued, 2 ahead]"),
    (Waiting(slot_busy=True), "[waiting: the server's slot is busy]"),
    (Waiting(slot_busy=False), "[waiting: the model is loading]"),
    (CALL, "[calls clock]"),
    (ToolResult(name="clock", class_="private", truncated=False), "[result of clock: private]"),
    (ToolResult(name="clock", class_="public", truncated=True), "[result of clock: truncated]"),
    (ToolResult(name="web", class_="public", truncated=False, untrusted=True), "[result of web: untrusted]"),
    (ToolResult(name="clock", class_="secret", truncated=True), "[result of clock: secret, truncated]"),
    (ThinkingCapped(tokens=4096), "[thinking capped after 4096 tokens]"),
    (CacheLoss(expected=100, got=30), "[lost 70 cached tokens (bxctl why)]"),
    (
        Context(used=6713, n_ctx=8192),
        "[the context is 81% full, 6,713 of 8,192 tokens: go on in a new session soon]",
    ),
    (Cut(reason="length"), "[the reply was cut at its length limit]"),
    (Cut(reason="thinking_cap"), "[the reply was cut at the thinking cap]"),
    (RETRY, "[retrying (try 2, in 1.5 s): refused]"),
    (failed("the server said no"), "bxctl: inference: the server said no"),
]


@pytest.mark.parametrize(("answer", "line"), LINES)
def test_each_event_is_one_line_of_its_own(answer: Answer, line: str) -> None:
    assert on_terminal(answer) == f"{line}\n"
    assert in_pipe(answer) == ("", f"{line}\n")
    dimmed = line if line.startswith("bxctl: ") else f"{DIM}{line}{PLAIN}"
    assert on_terminal(answer, colour=True) == f"{dimmed}\n"
    # after text that has no line end
    after = on_terminal(Reasoning(text="Hm"), answer).split("\n")
    assert after[0] == "Hm"
    assert after[-2:] == [line, ""]


def test_a_plain_result_is_no_line() -> None:
    assert on_terminal(RESULT) == ""


def test_a_turn_with_a_call_is_told_in_order() -> None:
    turn = (Content(text="Let me look."), CALL, RESULT, Content(text="Noon."), done("Noon."))
    assert on_terminal(*turn) == "Let me look.\n[calls clock]\nNoon.\n"


@pytest.mark.parametrize("end", [RETRY, failed()])
def test_what_is_voided_on_a_terminal_is_said_to_be_withdrawn(end: Answer) -> None:
    shown = on_terminal(Content(text="So far"), end).split("\n")
    assert shown[:2] == ["So far", "[the text above is withdrawn]"]
    assert len(shown) == 4


@pytest.mark.parametrize("end", [RETRY, failed()])
def test_what_a_tool_result_has_fixed_is_not_withdrawn(end: Answer) -> None:
    assert "withdrawn" not in on_terminal(Content(text="Let me look."), CALL, RESULT, end)
    assert "withdrawn" not in on_terminal(Reasoning(text="Hm."), end)
    assert "withdrawn" not in on_terminal(end)


def test_a_cancelled_turn_withdraws_its_text_and_leaves_nothing_for_the_next() -> None:
    screen = Screen()
    renderer = screen.renderer(stream=True)
    renderer.begin()
    renderer.show(Content(text="So far"))
    renderer.cancelled()
    renderer.begin()
    renderer.show(failed())
    assert screen.seen == "So far\n[the text above is withdrawn]\n[cancelled]\nbxctl: inference: no\n"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([done("")], "[the model gave no answer]"),
        ([Reasoning(text="Hm."), done("", reasoning_tokens=1)], "[the model gave no answer, only reasoning]"),
        # reasoning that a retry voided, or that belongs to an earlier completion, is not the last one's
        ([Reasoning(text="Hm."), RETRY, done("")], "[the model gave no answer]"),
        ([Reasoning(text="Hm."), CALL, RESULT, done("")], "[the model gave no answer]"),
    ],
)
def test_an_empty_answer_is_said_to_be_one(answers: list[Answer], said: str) -> None:
    assert on_terminal(*answers).endswith(f"{said}\n")


@pytest.mark.parametrize("blank", ["\n", " ", "\t\n ", "\u00a0"])
def test_an_answer_of_white_space_is_said_to_be_none(blank: str) -> None:
    assert "[the model gave no answer]\n" in on_terminal(Content(text=blank), done(blank))
    assert in_pipe(done(blank))[1] == "[the model gave no answer]\n"


@pytest.mark.parametrize("seen", [".", "\u200f", "\x0b", "\r"])
def test_an_answer_that_shows_something_is_one(seen: str) -> None:
    assert in_pipe(done(seen))[1] == ""


def test_texts_of_models_tools_and_servers_are_escaped_everywhere() -> None:
    evil = "a\x1b]0;x\x07\nb\u202e"
    shown = r"a\x1b]0;x\x07\nb\u202e"
    assert on_terminal(ToolCallStarted(name=evil)) == f"[calls {shown}]\n"
    assert shown in on_terminal(ToolResult(name=evil, class_="secret", truncated=False))
    assert shown in on_terminal(Retrying(attempt=2, after_ms=0, error=evil))
    assert on_terminal(failed(evil)) == f"bxctl: inference: {shown}\n"
    lines = shown.replace(r"\n", "\n")  # a line end in a text stays one
    assert on_terminal(Content(text=evil), done(evil)) == lines + "\n"
    assert on_terminal(Reasoning(text=evil)) == lines
    assert in_pipe(done(evil)) == (lines + "\n", "")


def test_an_escape_sequence_cut_over_deltas_does_not_get_through() -> None:
    assert on_terminal(Content(text="\x1b"), Content(text="[2J\xc2"), Content(text="\x9b")) == "\\x1b[2J\xc2\\x9b"


def test_an_empty_delta_opens_no_line() -> None:
    assert on_terminal(Content(text=""), Reasoning(text=""), CALL) == "[calls clock]\n"


# -- progress and figures ----------------------------------------------------------------------


def test_progress_is_a_line_that_vanishes() -> None:
    screen = Screen()
    renderer = screen.renderer(stream=True)
    renderer.begin()
    renderer.show(Progress(total=4000, cache=1000, processed=1000))
    screen.now_s = 2.0
    renderer.show(Progress(total=4000, cache=1000, processed=2000))
    first, second = screen.seen.split(CLEAR)
    assert first == "reading 1,000 of 4,000 tokens, 1,000 from cache"
    assert second == "reading 2,000 of 4,000 tokens, 1,000 from cache, 500/s"
    renderer.show(Progress(total=4000, cache=1000, processed=4000))
    assert screen.seen.endswith(CLEAR)
    renderer.show(Content(text="Hi."))
    assert screen.seen.endswith(f"{CLEAR}Hi.")


@pytest.mark.parametrize("answer", [answer for answer, _ in LINES] + [Content(text="x"), Reasoning(text="x"), done("")])
def test_whatever_comes_next_clears_the_line_first(answer: Answer) -> None:
    screen = Screen()
    renderer = screen.renderer(stream=True)
    renderer.begin()
    renderer.show(Progress(total=10, cache=0, processed=5))
    before = screen.seen
    renderer.show(answer)
    assert screen.seen.removeprefix(before).startswith(CLEAR)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "reading 50,614 of 100,000 tokens, 0 from cache"),
        (47, "reading 50,614 of 100,000 tokens, 0 from cache"),
        (46, "reading 50,614 of 100,000 tokens"),
        (20, "50,614 of 100,000"),
        (12, "50%"),
        (3, ""),
    ],
)
def test_the_vanishing_line_says_what_fits_and_never_half_a_number(columns: int, shown: str) -> None:
    screen = Screen(columns=columns)
    screen.renderer(stream=True).show(Progress(total=100_000, cache=0, processed=50_614))
    assert screen.seen == shown


def test_the_line_vanishes_whole_when_the_terminal_has_become_narrower() -> None:
    """A terminal of 20 columns shows its 46 characters on three rows, the cursor on the last."""
    screen = Screen(columns=80)
    renderer = screen.renderer(stream=True)
    renderer.show(Progress(total=100_000, cache=0, processed=50_614))
    screen.columns = 20
    renderer.show(Content(text="x"))
    assert screen.seen.endswith("\x1b[2A\r\x1b[Jx")


def test_progress_leaves_no_trace_where_there_is_no_terminal() -> None:
    screen = Screen()
    screen.renderer(stream=True, transient=False).show(Progress(total=10, cache=0, processed=5))
    screen.renderer(stream=False, transient=True).show(Progress(total=10, cache=0, processed=5))
    assert screen.seen == ""


def test_the_figures_of_the_last_completion_follow_the_answer() -> None:
    screen = Screen()
    renderer = screen.renderer(stream=True, figures=True)
    renderer.begin()
    renderer.show(Content(text="Hi."))
    screen.now_s = 4.0
    renderer.show(done("Hi."))
    assert screen.seen == "Hi.\n[1,200 cached, 34 read, 50 generated, 12.2 tokens/s]\n"  # 49 after the first, in 4 s


def test_figures_that_the_server_did_not_send_are_left_out() -> None:
    screen = Screen()
    renderer = screen.renderer(stream=True, figures=True)
    usage = Figures(cache_n=None, prompt_n=34, predicted_n=None, reasoning_tokens=0, thinking_capped=False)
    renderer.show(TurnDone(content="Hi.", usage=usage))
    assert screen.err.getvalue() == "[34 read]\n"


# -- a pipe ------------------------------------------------------------------------------------


def test_in_a_pipe_each_completion_is_written_when_it_is_final() -> None:
    screen = Screen()
    renderer = screen.renderer(stream=False, transient=False)
    renderer.begin()
    renderer.show(Content(text="Let me "))
    renderer.show(Content(text="look."))
    assert screen.out.getvalue() == ""
    renderer.show(CALL)
    assert screen.out.getvalue() == "Let me look.\n"
    renderer.show(RESULT)
    renderer.show(Content(text="No"))
    assert screen.out.getvalue() == "Let me look.\n"
    renderer.show(done("Noon."))
    assert screen.out.getvalue() == "Let me look.\nNoon.\n"


@pytest.mark.parametrize("end", [RETRY, failed()])
def test_in_a_pipe_what_is_voided_was_never_written(end: Answer) -> None:
    out, err = in_pipe(Content(text="Look."), CALL, RESULT, Content(text="So far"), end)
    assert out == "Look.\n"
    assert "withdrawn" not in err


def test_in_a_pipe_reasoning_and_progress_are_not_written() -> None:
    turn = (Progress(total=9, cache=0, processed=3), Reasoning(text="Hm."), Content(text="Yes."), done("Yes."))
    assert in_pipe(*turn) == ("Yes.\n", "")


TEXT = st.text(st.sampled_from("ab \n\t\x1b\x9b\u202e☃"), min_size=1, max_size=6)
EVENT: st.SearchStrategy[Answer] = st.one_of(
    st.builds(Content, text=TEXT),
    st.builds(Reasoning, text=TEXT),
    st.builds(ToolCallStarted, name=TEXT),
    st.builds(ToolResult, name=TEXT, class_=st.sampled_from(["public", "secret"]), truncated=st.booleans()),
    st.builds(Retrying, attempt=st.just(2), after_ms=st.just(0), error=TEXT),
    st.builds(Queued, ahead=st.integers(1, 3)),
    st.builds(CacheLoss, expected=st.just(5), got=st.just(2)),
)


def kept(answers: Iterable[Answer]) -> list[str]:
    """The completions of a turn, worked out from the events: text since a retry, up to each call or result."""
    completions, text = [], ""
    for answer in answers:
        if isinstance(answer, Content):
            text += answer.text
        elif isinstance(answer, Retrying):
            text = ""
        elif isinstance(answer, ToolCallStarted | ToolResult):
            completions.append(text)
            text = ""
    return [completion for completion in [*completions, text] if completion]


@given(st.lists(EVENT, max_size=12), TEXT)
def test_stdout_of_a_pipe_is_the_completions_that_hold_each_with_a_line_end(events: list[Answer], last: str) -> None:
    answers = [*events, RETRY, Content(text=last), done(last)]
    out, _ = in_pipe(*answers)
    assert out == "".join(visible(text) + ("" if text.endswith("\n") else "\n") for text in kept(answers))


@given(st.lists(EVENT, max_size=12))
def test_on_a_terminal_everything_on_stdout_is_content_in_order_and_nothing_is_unsafe(events: list[Answer]) -> None:
    screen = Screen()
    renderer = screen.renderer(stream=True)
    renderer.begin()
    for event in events:
        renderer.show(event)
    said = "".join(visible(event.text) for event in events if isinstance(event, Content))
    assert screen.out.getvalue().replace("\n", "") == said.replace("\n", "")
    assert not any(is_unsafe(character) for character in screen.seen)
    for line in screen.seen.split("\n"):
        assert "[" not in line[1:], "a line of ours is never behind text"
