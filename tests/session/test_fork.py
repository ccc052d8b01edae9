"""Where a log is cut for a fork: after which answers, with what belongs to them, and what has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from boxmaker.errors import BadRequest, SessionDamaged
from boxmaker.proto.ids import SessionId
from boxmaker.proto.time import Timestamp
from boxmaker.session.fork import Cut, cut_log, forked_log, last_answer_within

A, B = SessionId("a"), SessionId("b")
FILE = Path("/home/sessions/a/0.jsonl")
HASH = "ab" * 32
TIME = '"time":"2026-11-30T14:15:30.000Z"'

START = f'{{"type":"session_start",{TIME},"session":"a","epoch":0,"slot":3,"baseline":"{HASH}"}}'
USER = f'{{"type":"user",{TIME},"content":"hi"}}'
ANSWER = f'{{"type":"assistant",{TIME},"content":"é","reasoning_content":null,"tool_calls":[]}}'
CALLS = (
    f'{{"type":"assistant",{TIME},"content":null,"reasoning_content":null,'
    '"tool_calls":[{"id":"x","name":"clock","arguments":"{}"}]}'
)
USAGE = (
    f'{{"type":"usage",{TIME},"cache_n":0,"prompt_n":1,"predicted_n":2,"reasoning_tokens":0,"thinking_capped":false}}'
)
LOSS = f'{{"type":"cache_loss",{TIME},"expected":9,"got":0}}'
RESULT = (
    f'{{"type":"tool_result",{TIME},"call":0,"tool_call_id":"x","content":"noon",'
    '"class":"public","untrusted":false,"truncated":false}'
)
LINES = [START, USER, CALLS, USAGE, RESULT, ANSWER, USAGE, LOSS, USER, ANSWER, USER, ANSWER, USAGE, USER]
"""Answers end with lines 8, 10 (a crash took its usage) and 13, counted from 1."""


def cut(lines: list[str], wanted: int | None) -> Cut:
    return cut_log(FILE, A, [(number, line.encode()) for number, line in enumerate(lines, 1)], wanted)


def raw(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.mark.parametrize(("wanted", "at", "last"), [(1, 1, 8), (2, 2, 10), (3, 3, 13), (None, 3, 13)])
def test_an_answer_ends_with_its_usage_and_its_loss(wanted: int | None, at: int, last: int) -> None:
    found = cut(LINES, wanted)
    assert (found.at, found.baseline) == (at, HASH)
    assert raw(LINES)[found.begin : found.end] == raw(LINES[1:last])


def used(cached: int | None, read: int | None, generated: int | None) -> str:
    figures = json.dumps([cached, read, generated])[1:-1].split(", ")
    named = zip(("cache_n", "prompt_n", "predicted_n"), figures, strict=True)
    return USAGE.replace('"cache_n":0,"prompt_n":1,"predicted_n":2', ",".join(f'"{name}":{n}' for name, n in named))


@pytest.mark.parametrize(
    ("tokens", "at"),
    [(1000, 3), (301, 3), (300, 2), (250.5, 2), (201, 2), (200, None), (1, None)],
)
def test_the_last_answer_that_leaves_room_is_found_by_the_servers_figures(tokens: float, at: int | None) -> None:
    lines = [
        START, USER, CALLS, used(0, 1, 1), RESULT, ANSWER, used(200, 10, 10), USER,  # the first leaves 220
        ANSWER, used(50, 100, 50), LOSS, USER,  # a template has dropped some: 200
        ANSWER, used(200, 90, 10), USER, CALLS, used(900, 1, 1), RESULT,  # 300, and calls that are no answer
    ]  # fmt: skip
    assert last_answer_within([line.encode() for line in lines], tokens) == at


def test_an_answer_without_figures_may_leave_room() -> None:
    lines = [START, USER, ANSWER, used(0, 100, 1), USER, ANSWER, used(None, 100, 1), USER, ANSWER, used(9, 9, 90)]
    assert last_answer_within([line.encode() for line in lines], 50) == 2
    assert last_answer_within([line.encode() for line in [START, USER, ANSWER]], 50) == 1
    assert last_answer_within([START.encode(), USER.encode()], 50) is None


def test_the_new_log_is_a_start_of_its_own_and_the_old_lines_byte_for_byte() -> None:
    odd = [START, USER.replace(",", " , "), ANSWER]  # white space that another writer may leave
    log = forked_log(cut(odd, None), raw(odd), session=B, slot=0, time=Timestamp("2026-12-01T00:00:00.000Z"))
    start = START.replace('"session":"a"', '"session":"b"').replace('"slot":3', '"slot":0')
    start = start.replace("2026-11-30T14:15:30.000Z", "2026-12-01T00:00:00.000Z")
    assert log == raw([start, *odd[1:]])


@pytest.mark.parametrize(
    ("lines", "wanted", "problem"),
    [
        ([START], None, "session a has no answer to fork at"),
        ([START, USER, CALLS, USAGE, RESULT], 1, "session a has no answer to fork at"),
        ([START, USER, ANSWER], 2, "session a has 1 answer to fork at"),
        (LINES, 4, "session a has 3 answers to fork at"),
    ],
)
def test_an_answer_that_there_is_not_is_a_bad_request(lines: list[str], wanted: int | None, problem: str) -> None:
    with pytest.raises(BadRequest) as caught:
        cut(lines, wanted)
    assert (caught.value.path, caught.value.problem) == ("$.body.from", problem)


@pytest.mark.parametrize(("lines", "line"), [([], 1), ([START, "{}"], 2), ([START, USER, USAGE], 3)])
def test_a_log_that_cannot_be_read_is_not_forked(lines: list[str], line: int) -> None:
    with pytest.raises(SessionDamaged) as caught:
        cut(lines, None)
    assert (caught.value.file, caught.value.line) == (FILE, line)
