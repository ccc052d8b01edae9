"""Stories: what happens to one or two sessions, as data that a test can play, and generators of them.

What Hypothesis prints of a story is an expression that makes it again.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeAlias

from attrs import frozen
from hypothesis import strategies as st

from boxmaker.proto.tools import Denied, Failed, PendingApproval, Result, ToolResponse
from boxmaker.testing.server import (
    LOADING,
    STREAM_HEAD,
    Hang,
    Pause,
    Reset,
    Script,
    Send,
    call_delta,
    chunk,
    delta,
    error_response,
    reply,
)

TOOL_ITERATIONS = 3
RESULT_CAP_BYTES = 300
THINKING_CAP = 7
HANG_UP_AT = THINKING_CAP + 256
"""Deltas of reasoning after which the client closes the stream."""
BUDGET_MESSAGE = "[The thinking budget is used up. I answer now.]"

# -- a session as data: what is printed of it can be pasted --------------------------------------


@frozen
class Call:
    """A call as the server sends it; a part that is None is left out, or null."""

    id: str | None
    name: str | None
    arguments: str | None

    def pieces(self, index: int) -> bytes:
        first = call_delta(index, self.id, self.name, "")
        return first if self.arguments is None else first + call_delta(index, None, None, self.arguments)

    def logged(self) -> dict[str, str]:
        """The call as the log must hold it."""
        return {"id": clean(self.id), "name": clean(self.name), "arguments": clean(self.arguments)}


@frozen
class Reply:
    """A whole completion."""

    content: str | None = None
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    cut: bool = False
    cache_n: int | None = None

    def script(self) -> Script:
        reason = "length" if self.cut else "tool_calls" if self.calls else "stop"
        whole = reply(self.content, reasoning=self.reasoning, finish_reason=reason, cache_n=self.cache_n)
        before, finish, after = whole.rpartition(b'data: {"choices": [{"index": 0, "finish_reason": "')
        return before + b"".join(call.pieces(index) for index, call in enumerate(self.calls)) + finish + after

    def logged(self) -> dict[str, Any]:
        """The completion as the log must hold it."""
        return {
            "content": None if self.content is None else clean(self.content),
            "reasoning_content": None if self.reasoning is None else clean(self.reasoning),
            "tool_calls": [call.logged() for call in self.calls],
        }


@frozen
class Endless:
    """Thinking that goes on over the cap until the client hangs up; the call before it is dropped."""

    content: str | None = None

    def script(self) -> Script:
        before = b"" if self.content is None else delta(content=self.content)
        before += call_delta(0, "a", "clock", "{}")
        return [Send(STREAM_HEAD + before + delta(reasoning_content="x") * (HANG_UP_AT + 5)), Hang()]

    def logged(self) -> dict[str, Any]:
        content = None if self.content is None else clean(self.content)
        return {"content": content, "reasoning_content": "x" * HANG_UP_AT, "tool_calls": []}


HALF = STREAM_HEAD + delta(reasoning_content="Hm") + delta(content="So")
PASSING: dict[str, Script] = {
    "ends early": HALF,
    "ends in a call": HALF + call_delta(0, "half", "clock", '{"n'),
    "reset": [Send(HALF), Pause(0.1), Reset()],
    "stall": [Send(HALF), Hang()],
    "error in the stream": HALF + chunk({"error": {"code": 503, "message": "overloaded"}}),
    "503": error_response(503, "overloaded"),
    "429": error_response(429, "slow down", headers="Retry-After: 1\r\n"),
    "500": error_response(500, "a fault"),
    "loading": LOADING,
}
FINAL: dict[str, Script] = {
    "400": error_response(400, "wrong"),
    "too long": HALF + delta(content="x" * 9000),
    "full": error_response(500, "Context size has been exceeded."),
    "full in the stream": HALF + chunk({"error": {"code": 400, "type": "exceed_context_size_error", "message": "x"}}),
}


@frozen
class Failing:
    """A try that gives nothing; `how` is a key of PASSING or FINAL."""

    how: str

    def script(self) -> Script:
        return PASSING.get(self.how) or FINAL[self.how]


Played: TypeAlias = Reply | Endless | Failing
How: TypeAlias = Literal["hang up", "stop", "abort", "kill"]
PortResponse: TypeAlias = ToolResponse | Literal["hang", "raise"]


@frozen
class Interrupt:
    """How a turn is ended from outside: before a step of the daemon's tasks, or after that many seconds.

    One that is over by then is followed by the interruption, so a restart may fall between two turns.

    A stop is SIGTERM without grace, an abort cancels every task of the daemon at once, a kill is `kill -9`: the
    next daemon finds the disk as it was at that moment. `then_kill`: a kill that many steps later.
    """

    how: How
    step: int | None = None
    after_s: float | None = None
    then_kill: int | None = None


@frozen
class Tear:
    """The power goes in a turn's n-th piece of disk work.

    Of what it would have appended, that many whole lines and bytes of the next line are on the disk.
    """

    work: int
    lines: int
    more_bytes: int


@frozen
class Turn:
    """A user's text, what server and port answer, and how the turn is interrupted.

    `busy`: so many looks at the slot find it taken. A response "raise" is a fault in the port.
    """

    text: str
    replies: tuple[Played, ...] = ()
    responses: tuple[PortResponse, ...] = ()
    end: Interrupt | Tear | None = None
    busy: int = 0
    session: str = "s"


@frozen
class Story:
    """Turns of one or two sessions of a home; a daemon lives until an interruption ends it.

    `looks`: the server tells of its slots.
    """

    turns: tuple[Turn, ...]
    alternate: bool = False
    looks: bool = True


def clean(text: str | None) -> str:
    """What the log must hold of a text that the server sent."""
    paired = json.loads(json.dumps(text or ""))  # two halves that make a character become it
    return "".join("\ufffd" if char == "\x00" or "\ud800" <= char <= "\udfff" else char for char in paired)


# -- generated stories ---------------------------------------------------------------------------

plain_text = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=10)
user_text = plain_text | st.sampled_from(["", "\n", '"}],"tools":[', "\u2028\x7f\ufffd", "é" * 3000])
from_model = plain_text | st.sampled_from(["", "\n", "a\n\n", "\x00", "\ud83d", "\ud83d\ude42", "\u2028"])
maybe_text = st.none() | from_model
thought = st.none() | from_model | st.just(f"Hm. {BUDGET_MESSAGE}")
call_ids = st.sampled_from([None, "", " ", "a", "a", "b", "c00000001", "c00000002", "call_0"]) | from_model
call_names = st.sampled_from(["clock"] * 6 + [" clock\n", "find_tool", "call_tool", "call_tool", "rm", "", None])
call_arguments = st.sampled_from([
    *(f'{{"n":{n}}}' for n in range(16)), "{}", "{}", "", None, "{", "null", '"text"', "\ud83d", '{"n":' + "[" * 200,
    '{"n":NaN}', '{"n":"\\ud800"}', '{"n": "\\u0000"}',
    '{"name":"echo","arguments":{"text":"x"}}', '{"name":"echo"}', '{"name":"clock"}',
])  # fmt: skip
calls = st.builds(Call, id=call_ids, name=call_names, arguments=call_arguments)
some_calls = st.lists(calls, min_size=1, max_size=3).map(tuple)
cuts = st.sampled_from([False] * 7 + [True])
cached = st.none() | st.integers(0, 50)


def replies(made_calls: st.SearchStrategy[tuple[Call, ...]]) -> st.SearchStrategy[Reply]:
    return st.builds(Reply, content=maybe_text, reasoning=thought, calls=made_calls, cut=cuts, cache_n=cached)


working = replies(some_calls)
failing = st.sampled_from([*PASSING]).map(Failing)
tries_before = st.sampled_from([0] * 5 + [1, 1, 2, 3])
last_replies: list[st.SearchStrategy[Played]] = [replies(st.just(()))] * 8 + [
    st.sampled_from([*FINAL]).map(Failing)
] * 2
last_replies += [st.builds(Endless, maybe_text)]
tool_results = st.builds(
    Result,
    content=from_model | st.sampled_from(["é" * 200, "x" * 299 + "é", "x" * RESULT_CAP_BYTES]),
    class_=st.sampled_from(["public", "private", "secret"]),
    untrusted=st.booleans(),
    truncated=st.booleans(),
)
responses: st.SearchStrategy[tuple[PortResponse, ...]] = st.lists(
    st.one_of(
        tool_results,
        tool_results,
        st.builds(Failed, message=plain_text),
        st.builds(Denied, reason=plain_text),
        st.builds(PendingApproval, id=plain_text),
        st.sampled_from(["raise", "hang"]),
    ),
    max_size=4,
).map(tuple)
STEPS_OF_TURN = 26
STEPS_OF_REPLY = 20
STEPS_OF_LOOK = 15
"""About how many steps the daemon's tasks make: a step is drawn from the whole length of a turn."""
rounds_of_calls = st.sampled_from([0, 0, 1, 1, 2, 3, TOOL_ITERATIONS + 1])
ways_to_end = st.sampled_from([None] * 9 + ["step"] * 6 + ["tear", "tear", "after"])
interrupts: st.SearchStrategy[How] = st.sampled_from(["hang up", "hang up", "stop", "abort", "kill", "kill"])
delays_s = st.sampled_from([0.01, 0.1, 0.3, 0.5, 5.0, 30.0])
second_kills = st.none() | st.integers(1, 12)
kept_lines = st.integers(0, 2)
kept_bytes = st.just(0) | st.integers(1, 60)
which_last = st.sampled_from(range(len(last_replies)))
busy_looks = st.sampled_from([0, 0, 0, 1, 3])
names_of_sessions = st.sampled_from(["s", "s", "s", "t"])
one_in_three = st.sampled_from([False, False, True])


@st.composite
def turns(draw: st.DrawFn, looks: bool) -> Turn:
    made: list[Played] = []
    work = replies(st.just(draw(some_calls))) if draw(one_in_three) else working  # the same calls again, or others
    for _ in range(draw(rounds_of_calls)):
        made += [draw(failing) for _ in range(draw(tries_before))]
        made.append(draw(work))
    made += [draw(failing) for _ in range(draw(tries_before))]
    made.append(draw(last_replies[draw(which_last)]))
    end: Interrupt | Tear | None = None
    kind = draw(ways_to_end)
    if kind == "tear":
        end = Tear(draw(st.integers(1, 3 + 2 * len(made))), draw(kept_lines), draw(kept_bytes))
    elif kind == "after":
        end = Interrupt(draw(interrupts), after_s=draw(delays_s))
    elif kind == "step":
        how = draw(interrupts)
        step = draw(st.integers(1, STEPS_OF_TURN + (STEPS_OF_REPLY + STEPS_OF_LOOK * looks) * len(made)))
        end = Interrupt(how, step=step, then_kill=draw(second_kills) if how in ("hang up", "stop") else None)
    return Turn(
        draw(user_text), tuple(made), draw(responses), end, draw(busy_looks) if looks else 0, draw(names_of_sessions)
    )


told = {looks: st.lists(turns(looks), min_size=1, max_size=6).map(tuple) for looks in (False, True)}


@st.composite
def _stories(draw: st.DrawFn) -> Story:
    looks = draw(one_in_three)
    return Story(draw(told[looks]), alternate=draw(st.booleans()), looks=looks)


stories = _stories()
"""Any story."""


# -- stories that every run plays ----------------------------------------------------------------

STORIES = (
    # the power goes between a reply with calls and its figures; in the middle of these; in a user's text
    Story((Turn("1", (Reply("\n", None, (Call("a", "clock", "{}"), Call("a", "rm", "{"))),), end=Tear(4, 1, 0)),) * 2),
    Story((Turn("2", (Reply(None, "", (Call("", "clock", None),)),), end=Tear(4, 1, 9)),), alternate=True),
    Story((Turn("0", (Reply("y"),), end=Tear(4, 1, 0)),)),
    Story((Turn("3", (Reply(""),)), Turn("4", (Reply(""),), end=Tear(2, 0, 40))), alternate=True),
    # every interruption, and none, in the second of four calls
    *(
        Story((
            Turn("5", (
                Reply("x\n", "y", tuple(Call(n, "clock", f'{{"n":"{n}"}}') for n in (None, "b", "b", "c"))),
                Reply("Noon."),
            ), (Denied(reason="no"), "hang"), end),
            Turn("6", (Reply("\n"),)),
        ), alternate=True)
        for end in (
            Interrupt("kill", after_s=1.0), Interrupt("stop", after_s=1.0), Interrupt("abort", after_s=1.0),
            Interrupt("hang up", after_s=1.0), None,
        )
    ),
    # a hang-up in the only call
    Story((Turn("7", (Reply("", "", (Call("a", "clock", "{}"),)),), ("hang",), Interrupt("hang up", after_s=1.0)),)),
    # every limit
    Story((Turn(
        "8", tuple(Reply(None, None, (Call("a", "clock", f'{{"n":{n}}}'),)) for n in range(TOOL_ITERATIONS + 1)),
        (Result(content="x" * 299 + "é", class_="public", untrusted=False, truncated=False), Failed(message="")),
    ),)),
    Story((Turn("9", (Reply(None, None, (Call("a", "clock", "{}"),) * 4), Reply(""))), Turn("10", (Endless("x"),)))),
)  # fmt: skip
"""What is printed for a story that fails belongs here."""
