"""Replay: the messages of a log, the order of its records, and where a session stands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boxmaker.inference.cache import TokenFigures
from boxmaker.proto import chat
from boxmaker.proto.chat import ToolCall
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import (
    Assistant,
    CacheLoss,
    EpochEnd,
    LogRecord,
    SessionStart,
    ToolResult,
    Usage,
    User,
    decode_line,
    encode_line,
)
from boxmaker.proto.time import Timestamp
from boxmaker.session.baseline import Baseline
from boxmaker.session.replay import LogState, OutOfOrder, message_of, messages

from .strategies import writer_records

T = Timestamp("2026-11-30T14:15:30.123Z")
S = SessionId("s")
START = SessionStart(time=T, session=S, epoch=0, slot=0, baseline="0" * 64)
NO_FIGURES = TokenFigures(cache_n=None, prompt_n=None, predicted_n=None)


def call(call_id: str, name: str = "clock", arguments: str = "{}") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def user(content: str = "hi") -> User:
    return User(time=T, content=content)


def assistant(*calls: ToolCall, content: str | None = None, reasoning: str | None = None) -> Assistant:
    return Assistant(time=T, content=content, reasoning_content=reasoning, tool_calls=calls)


def usage(cache_n: int | None = 0, prompt_n: int | None = 10, predicted_n: int | None = 5) -> Usage:
    return Usage(
        time=T,
        cache_n=cache_n,
        prompt_n=prompt_n,
        predicted_n=predicted_n,
        reasoning_tokens=0,
        thinking_capped=False,
    )


def result(call_id: str, number: int = 0, content: str = "ok") -> ToolResult:
    return ToolResult(
        time=T, call=number, tool_call_id=call_id, content=content, class_="public", untrusted=False, truncated=False
    )


LOSS = CacheLoss(time=T, expected=14, got=3)


def state_after(*records: LogRecord) -> LogState:
    state = LogState(S)
    for record in (START, *records):
        state.apply(record)
    return state


def refused(record: LogRecord, *before: LogRecord) -> str:
    """Why a record cannot stand after those before it; the state must be as it was."""
    state = state_after(*before)
    was = state.copy()
    with pytest.raises(OutOfOrder) as caught:
        state.apply(record)
    assert state == was
    return str(caught.value)


# -- messages ---------------------------------------------------------------------------------


def test_a_log_stands_for_these_messages() -> None:
    records: list[LogRecord] = [
        START,
        user("what time is it?"),
        assistant(call("c1"), call("c2", "echo", "{"), reasoning="hm"),
        usage(),
        result("c1", 0, "noon"),
        LOSS,
        result("c2", 1, "no"),
        assistant(content="Noon."),
        usage(),
        EpochEnd(time=T),
    ]
    assert messages(Baseline(system="Be brief.", tools=()), records) == [
        chat.System(content="Be brief."),
        chat.User(content="what time is it?"),
        chat.Assistant(content=None, reasoning_content="hm", tool_calls=(call("c1"), call("c2", "echo", "{"))),
        chat.Tool(tool_call_id="c1", content="noon"),
        chat.Tool(tool_call_id="c2", content="no"),
        chat.Assistant(content="Noon.", reasoning_content=None, tool_calls=()),
    ]


@pytest.mark.parametrize("record", [START, usage(), LOSS, EpochEnd(time=T)])
def test_what_the_model_never_sees_gives_no_message(record: LogRecord) -> None:
    assert message_of(record) is None


def test_nothing_is_mended_in_replay() -> None:
    """What the server sent is what the log says; the mending is done on what is sent back."""
    odd = assistant(call("", " clock ", ""), content="x\n\n")
    assert message_of(odd) == chat.Assistant(
        content="x\n\n", reasoning_content=None, tool_calls=(call("", " clock ", ""),)
    )


# -- the order of records ---------------------------------------------------------------------


def test_a_log_begins_with_session_start_and_has_one() -> None:
    for first in (user(), assistant(), usage(), result("c1"), LOSS, EpochEnd(time=T)):
        with pytest.raises(OutOfOrder, match="begins with session_start"):
            LogState(S).apply(first)
    assert "has one" in refused(START)


def test_a_log_of_another_session_is_refused() -> None:
    with pytest.raises(OutOfOrder, match="the log is of session s"):
        LogState(SessionId("other")).apply(START)


@pytest.mark.parametrize(("record", "kind"), [(user(), "user"), (assistant(), "assistant")])
def test_a_message_while_a_call_is_open_is_refused_with_both_their_names(record: LogRecord, kind: str) -> None:
    reason = refused(record, assistant(call("c1"), call("c2")), usage(), result("c1"))
    assert reason.startswith(f"{kind} record ")
    assert "'c2'" in reason


def test_a_later_epoch_is_refused() -> None:
    later = SessionStart(time=T, session=S, epoch=1, slot=0, baseline="0" * 64)
    with pytest.raises(OutOfOrder, match="epoch 1"):
        LogState(S).apply(later)


def test_nothing_comes_between_a_call_and_its_result_but_losses() -> None:
    open_call = (user(), assistant(call("c1")), usage())
    assert "'c1'" in refused(user(), *open_call)
    assert "'c1'" in refused(assistant(), *open_call)
    state_after(*open_call, LOSS, result("c1"), user())


def test_a_result_without_its_call_is_refused() -> None:
    assert "'c9'" in refused(result("c9"), user())
    assert "'c9'" in refused(result("c9"), user(), assistant(call("c1")), usage())


def test_a_second_result_for_a_call_is_refused() -> None:
    assert "'c1'" in refused(result("c1", 1), user(), assistant(call("c1")), usage(), result("c1"))


def test_results_may_come_in_another_order_than_their_calls() -> None:
    state = state_after(user(), assistant(call("a"), call("b"), call("c")), usage(), result("b", 0))
    assert [open_call.id for open_call in state.open_calls] == ["a", "c"]
    state.apply(result("c", 1))
    state.apply(result("a", 2))
    assert state.open_calls == []


def test_calls_with_one_id_are_answered_in_their_order() -> None:
    """A model may send the same id twice, or none."""
    first, second, third = call("", "clock"), call("", "echo"), call("", "clock")
    state = state_after(user(), assistant(first, second, third), usage(), result("", 0))
    assert state.open_calls == [second, third]
    state.apply(result("", 1))
    assert state.open_calls == [third]


def test_usage_follows_its_assistant_at_once() -> None:
    assert "usage" in refused(usage())
    assert "usage" in refused(usage(), user())
    assert "usage" in refused(usage(), user(), assistant(), usage())
    assert "usage" in refused(usage(), user(), assistant(call("c1")), result("c1"))
    assert "usage" in refused(usage(), user(), assistant(), LOSS)


def test_a_refused_record_does_not_use_up_the_place_of_the_usage() -> None:
    state = state_after(user(), assistant(call("c1")))
    with pytest.raises(OutOfOrder):
        state.apply(user())
    state.apply(usage())


def test_two_users_in_a_row_are_in_order() -> None:
    """A turn that failed or was cancelled leaves its user message."""
    state_after(user(), user(), assistant(), usage(), user(), user())


def test_an_assistant_without_its_usage_is_in_order() -> None:
    """A crash between the lines of one append."""
    state = state_after(user(), assistant(call("c1")))
    assert [open_call.id for open_call in state.open_calls] == ["c1"]
    state.apply(result("c1"))
    state.apply(user())


# -- where a session stands -------------------------------------------------------------------


def test_the_next_call_is_one_more_than_the_highest_in_the_log() -> None:
    state = state_after(user())
    assert state.next_call == 0
    for record in (assistant(call("a"), call("b")), usage()):
        state.apply(record)
    assert state.next_call == 0
    state.apply(result("a", 7))
    assert state.next_call == 8
    state.apply(result("b", 3))
    assert state.next_call == 8


def test_open_calls_are_in_the_models_order() -> None:
    state = state_after(user(), assistant(call("b"), call("a")), usage())
    assert state.open_calls == [call("b"), call("a")]


def test_the_last_figures_are_those_of_the_last_completion() -> None:
    records: list[LogRecord] = [user(), assistant(), usage(1, 2, 3), user(), assistant(), usage(None, 2, 3)]
    state = state_after()
    seen = []
    for record in records:
        state.apply(record)
        seen.append(state.last_figures)
    first = TokenFigures(cache_n=1, prompt_n=2, predicted_n=3)
    second = TokenFigures(cache_n=None, prompt_n=2, predicted_n=3)
    # Once there is a newer completion, the figures of the one before say nothing about the cache any more.
    assert seen == [None, NO_FIGURES, first, first, NO_FIGURES, second]


def test_completions_are_counted_and_of_these_the_answers() -> None:
    turn: list[LogRecord] = [user(), assistant(call("a")), usage(), result("a"), assistant(content="1"), usage()]
    log: list[LogRecord] = [START, *turn, user(), assistant(content="2"), usage(), LOSS]
    counts = []
    for end in range(1, len(log) + 1):
        state = state_after(*log[1:end])
        counts.append((state.completions, state.answers))
    assert counts == [(0, 0), (0, 0), (1, 0), (1, 0), (1, 0), (2, 1), (2, 1), (2, 1), (3, 2), (3, 2), (3, 2)]


def test_a_copy_is_independent() -> None:
    state = state_after(user(), assistant(call("c1")), usage())
    other = state.copy()
    other.apply(result("c1", 4))
    assert state.open_calls == [call("c1")]
    assert (state.next_call, other.next_call) == (0, 5)
    state.apply(result("c1"))


# -- properties -------------------------------------------------------------------------------


@settings(deadline=None)
@given(writer_records())
def test_what_our_writer_writes_is_in_order(records: list[LogRecord]) -> None:
    state = state_after(*records)
    results = [record for record in records if isinstance(record, ToolResult)]
    assert state.next_call == max((record.call + 1 for record in results), default=0)
    calls = sum(len(record.tool_calls) for record in records if isinstance(record, Assistant))
    assert len(state.open_calls) == calls - len(results)


@settings(deadline=None)
@given(writer_records())
def test_the_messages_of_a_longer_log_begin_with_those_of_the_shorter(records: list[LogRecord]) -> None:
    baseline = Baseline(system="s", tools=())
    before = messages(baseline, [START])
    for count in range(len(records)):
        now = messages(baseline, [START, *records[: count + 1]])
        assert now[: len(before)] == before
        before = now


any_records = st.lists(
    st.sampled_from(
        [
            START,
            user(),
            assistant(),
            assistant(call("a")),
            assistant(call("a"), call("a"), call("b")),
            usage(),
            result("a"),
            result("b", 9),
            LOSS,
            EpochEnd(time=T),
        ]
    ),
    max_size=12,
)


@settings(deadline=None)
@given(any_records)
def test_any_records_are_taken_or_refused_and_a_refusal_changes_nothing(records: list[LogRecord]) -> None:
    state = LogState(S)
    for record in records:
        was = state.copy()
        try:
            message = state.apply(decode_line(encode_line(record)))
        except OutOfOrder:
            assert state == was
        else:
            assert message == message_of(record)
