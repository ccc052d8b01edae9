"""The judge of a log, on logs written by hand: what holds, and each way in which it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from boxmaker.verify.judge import (
    Check,
    Record,
    cache_figures,
    calls_of,
    clock_answered,
    echo_answered,
    read_records,
    result_problem,
    usage_problem,
)

NOON = "2026-11-30T12:00:00.000Z"


def user() -> Record:
    return {"type": "user", "time": NOON, "content": "x"}


def assistant(*calls: tuple[str, str, str]) -> Record:
    made = [{"id": id_, "name": name, "arguments": arguments} for id_, name, arguments in calls]
    return {"type": "assistant", "time": NOON, "content": "", "reasoning_content": None, "tool_calls": made}


def usage(cache: int | None, prompt: int | None, predicted: int | None, *, capped: bool = False) -> Record:
    figures = {"cache_n": cache, "prompt_n": prompt, "predicted_n": predicted}
    return {"type": "usage", "time": NOON, **figures, "reasoning_tokens": 0, "thinking_capped": capped}


def result(call: int, id_: str, content: str) -> Record:
    return {"type": "tool_result", "time": NOON, "call": call, "tool_call_id": id_, "content": content}


FIGURES = usage(0, 10, 5)
FIND = ("b", "find_tool", '{"query":"echo"}')
ECHO = ("c", "call_tool", '{"name":"echo","arguments":{"text":"hi"}}')
FOUND = '[{"name":"echo"}]'


def test_records_are_the_whole_lines_of_a_log() -> None:
    raw = b'{"type":"user","content":"\xe2\x80\xa8"}\n{"type":"us'
    assert read_records(raw) == [{"type": "user", "content": "\u2028"}]


def test_a_check_is_a_line_that_a_person_can_read() -> None:
    assert Check(name="echo", state="no_call", message="not called").line() == "no call  echo: not called"
    assert Check(name="cache", state="ok", message="no loss").line() == "ok       cache: no loss"


def test_calls_have_their_results_by_the_sessions_own_number() -> None:
    turn = [user(), assistant(("a", "clock", "{}"), FIND), FIGURES, result(7, "a", NOON), result(8, "b", FOUND)]
    assert calls_of(turn) == [("clock", "{}", NOON), ("find_tool", FIND[2], FOUND)]
    assert calls_of([user(), assistant(FIND), FIGURES]) == [("find_tool", FIND[2], None)]


@pytest.mark.parametrize(
    ("turn", "missing"),
    [
        ([assistant(("a", "clock", "{}")), result(3, "a", NOON)], None),
        ([assistant(("a", "clock", "{}")), result(3, "a", "it is noon")], "clock gave no time"),
        ([assistant(("a", "clock", "{}"))], "clock gave no time"),
        ([assistant(FIND), result(0, "b", NOON)], "clock was not called"),
        ([assistant()], "clock was not called"),
    ],
)
def test_clock_has_answered_when_a_call_of_it_has_a_time(turn: list[Record], missing: str | None) -> None:
    assert clock_answered(turn) == missing


@pytest.mark.parametrize(
    ("calls", "results", "missing"),
    [
        ([FIND, ECHO], [FOUND, "hi"], None),
        ([ECHO, FIND, ECHO], ["hi", FOUND, "hi"], None),
        ([ECHO], ["hi"], "find_tool did not give echo"),
        ([FIND, ECHO], ["[]", "hi"], "find_tool did not give echo"),
        ([FIND, ECHO], [FOUND, "ho"], "find_tool gave echo, and call_tool did not echo a text"),
        ([FIND, ("c", "call_tool", "{")], [FOUND, "hi"], "find_tool gave echo, and call_tool did not echo a text"),
        ([FIND, ("c", "call_tool", "[]")], [FOUND, "hi"], "find_tool gave echo, and call_tool did not echo a text"),
        (
            [FIND, ("c", "call_tool", '{"name":"clock","arguments":{"text":"hi"}}')],
            [FOUND, "hi"],
            "find_tool gave echo, and call_tool did not echo a text",
        ),
        ([FIND], [FOUND], "find_tool gave echo, and call_tool did not echo a text"),
    ],
)
def test_echo_has_answered_when_it_was_found_first_and_gave_its_text_back(
    calls: list[tuple[str, str, str]], results: list[str], missing: str | None
) -> None:
    turn = [record for call in calls for record in (assistant(call),)]
    answered = [result(at, call[0], text) for at, (call, text) in enumerate(zip(calls, results, strict=True))]
    assert echo_answered([*turn, *answered]) == missing


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([user(), assistant(), FIGURES, user(), user(), assistant(), usage(14, 3, 2)], None),
        ([user(), assistant(), user()], "line 3 of the log: a completion without one usage right behind it"),
        ([user(), assistant()], "line 2 of the log: a completion without one usage right behind it"),
        ([user(), FIGURES], "line 2 of the log: a completion without one usage right behind it"),
        ([assistant(), FIGURES, FIGURES], "line 3 of the log: a completion without one usage right behind it"),
        ([user()], "the log has no completion"),
        (
            [assistant(), usage(None, 1, 1)],
            "line 2 of the log: the server sent no figures, so that nothing is known of the cache",
        ),
        (
            [assistant(), usage(0, 1, None, capped=True)],
            "line 2 of the log: the thinking cap closed the stream before figures, "
            "so that nothing is known of the cache",
        ),
    ],
)
def test_each_completion_has_one_usage_with_figures(records: list[Record], problem: str | None) -> None:
    assert usage_problem(records) == problem


A, B = ("a", "clock", "{}"), ("b", "clock", "{}")


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([assistant(A, B), FIGURES, result(0, "a", ""), result(1, "b", ""), user()], None),
        ([assistant(A), FIGURES, result(0, "a", ""), assistant(B), result(1, "b", "")], None),
        ([assistant(A, B), result(1, "b", "")], "line 2 of the log: a result for no open call, or out of order"),
        ([assistant(A), result(0, "x", "")], "line 2 of the log: a result for no open call, or out of order"),
        ([assistant(A), result(1, "a", "")], "line 2 of the log: a result for no open call, or out of order"),
        (
            [assistant(A), result(0, "a", ""), result(0, "a", "")],
            "line 3 of the log: a result for no open call, or out of order",
        ),
        ([assistant(A, B), result(0, "a", ""), user()], "line 3 of the log: call 1 has no result before it"),
        ([assistant(A), FIGURES, assistant()], "line 3 of the log: call 0 has no result before it"),
        ([assistant(A)], "call 0 has no result at the end of the log"),
    ],
)
def test_each_call_has_one_result_in_order_before_anything_else(records: list[Record], problem: str | None) -> None:
    assert result_problem(records) == problem


@pytest.mark.parametrize(
    ("usages", "read", "least", "losses", "first"),
    [
        # 0+10+5-1 = 14 in the slot; then 14+3+2-1 = 18
        ([(0, 10, 5), (14, 3, 2), (18, 4, 1)], 7, 7, 0, ""),
        # a cancelled turn left its message in the slot: more was used than the last completion left
        ([(0, 10, 5), (20, 3, 2)], 3, 3, 0, ""),
        # the second found nothing: 17 read where 3 had to be
        ([(0, 10, 5), (0, 17, 2), (18, 4, 1)], 21, 7, 1, "14 tokens were in the slot, 0 were used"),
        # one token short
        ([(0, 10, 5), (13, 4, 2)], 4, 3, 1, "14 tokens were in the slot, 13 were used"),
        ([(7, 10, 5)], 0, 0, 0, ""),
    ],
)
def test_what_was_read_is_compared_with_what_had_to_be(
    usages: list[tuple[int, int, int]], read: int, least: int, losses: int, first: str
) -> None:
    figures = cache_figures([record for figures in usages for record in (assistant(), usage(*figures))])
    assert (figures.completions, figures.read, figures.least) == (len(usages), read, least)
    assert (figures.losses, figures.first_loss) == (losses, first)


def test_the_hand_written_records_have_the_shape_of_real_ones() -> None:
    from boxmaker.proto.records import RECORDS

    whole: list[dict[str, Any]] = [user(), assistant(A, B), FIGURES]
    whole.append(result(0, "a", "") | {"class": "public", "untrusted": False, "truncated": False})
    for record in whole:
        RECORDS.decode(json.dumps(record))
