"""The channel's values: the error codes, what each of our errors says to a channel, and the list of events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from boxmaker import errors
from boxmaker.errors import ValueRefused, WireableError
from boxmaker.proto.channel import REQUESTS, TURN, TURN_EVENTS, WIRE_ERROR, ErrorCode, WireError, wire_error
from boxmaker.proto.frames import decode_answer, encode_answer

from .examples import FIXTURES, files, frame_object, split_frame, tag

LOG = Path("/home/jürgen/boxmaker/sessions/a/0.jsonl")

ERRORS: dict[str, WireableError] = {
    "bad_frame": errors.BadFrame(problem="a frame of 2097152 bytes; allowed are 1 to 1048576"),
    "bad_request": errors.BadRequest(path="$.body.resume", problem="expected true or false, found 0"),
    "unsupported_version": errors.UnsupportedVersion(found="2"),
    "internal": errors.InternalError(message="a fault inside loopd; its log has the details"),
    "shutting_down": errors.ShuttingDown(),
    "storage": errors.StorageError(action="append to", file=LOG, reason="No space left on device"),
    "session_damaged": errors.SessionDamaged(
        file=Path("/var/lib/boxmaker/sessions/a/0.jsonl"), line=7, problem="$.content: expected text, found 5"
    ),
    "session_full": errors.SessionFull(
        message="the server answered 400: the request exceeds the available context size"
    ),
    "turn_limit": errors.TurnLimit(limit="tool_iterations", value=8),
    "session_busy": errors.SessionBusy(session="20261130-141530-x7k2qf"),
    "no_such_session": errors.NoSuchSession(session="a"),
    "session_exists": errors.SessionExists(session="a"),
    "inference": errors.InferenceError(
        kind="http", status=503, message="the server answered 503: overloaded", attempts=5
    ),
    "cancelled": errors.TurnCancelled(cause="owner"),
    "no_turn": errors.NoTurn(session="a", ending="turn_done"),
}
"""One of our errors for each example."""

CODES = {
    "bad_frame", "bad_request", "unsupported_version", "internal", "shutting_down", "storage", "session_damaged",
    "session_full", "turn_limit", "session_busy", "no_such_session", "session_exists", "inference",
    "cancelled", "no_turn",
}  # fmt: skip
"""From design.md section 6: seven of its own, then M2b's six; then those of what controls a turn."""


def test_the_codes_are_those_of_the_design() -> None:
    assert {code.value for code in ErrorCode} == CODES


def test_every_wireable_error_has_one_code_and_every_code_one_error() -> None:
    codes = [cls.code for cls in WireableError.__subclasses__()]
    assert sorted(codes) == sorted(ErrorCode)
    assert len(set(codes)) == len(codes)


def test_every_code_has_an_example_and_every_example_is_of_a_code() -> None:
    assert {tag(name) for name in files("errors/*.frame")} == CODES == set(ERRORS)
    for name, file in files("errors/*.frame").items():
        assert frame_object(file)["body"]["code"] == tag(name)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_said_as_its_example_byte_for_byte(name: str) -> None:
    raw = (FIXTURES / "errors" / f"{name}.frame").read_bytes()
    said = wire_error(ERRORS[name])
    assert encode_answer(said) == raw
    assert decode_answer(split_frame(raw)) == said


@pytest.mark.parametrize("name", ERRORS)
def test_any_error_can_be_said_even_about_a_file_whose_name_is_not_utf8(name: str) -> None:
    odd = "a\udce9\x00\u2028"
    error = ERRORS[name]
    cls: type = type(error)
    names = [field.name for field in attrs.fields(cls)] if attrs.has(cls) else []
    texts: dict[str, Any] = {key: odd for key in names if key in ("session", "message", "problem", "reason", "found")}
    if "file" in names:
        texts["file"] = Path(odd)
    if texts:
        error = attrs.evolve(error, **texts)  # type: ignore[misc]  # all but ShuttingDown are attrs classes
    body = json.loads(split_frame(encode_answer(wire_error(error))))["body"]
    assert body["code"] == name
    shown = "\\udce9" if name in ("storage", "session_damaged") else "\ufffd"  # these two name a file, in one line
    assert shown in body["message"] or name in ("shutting_down", "turn_limit", "cancelled")


def test_half_a_character_is_said_as_one_replacement() -> None:
    assert wire_error(errors.BadRequest(path="$", problem="a\udce9b")).message == "$: a\ufffdb"
    said = wire_error(errors.StorageError(action="read", file=Path("/a\udce9b"), reason="x"))
    assert said.detail == {"file": "/a\ufffdb", "action": "read"}


def test_a_detail_keeps_what_a_program_needs() -> None:
    limit = errors.TurnLimit(limit="repeat_detection", value=2)
    assert wire_error(limit) == WireError(
        code=ErrorCode.TURN_LIMIT,
        message="the turn was ended because the model repeated the same tool calls ([loop] repeat_detection)",
        detail={"limit": "repeat_detection", "value": 2},
    )


def test_the_events_are_those_of_the_design() -> None:
    assert set(TURN_EVENTS.tags) == {
        "queued", "waiting", "progress", "reasoning", "content", "tool_call_started", "tool_result",
        "thinking_capped", "retrying", "cache_loss", "cut", "steered", "context",
    }  # fmt: skip


@pytest.mark.parametrize("code", ["", "timeout", "BAD_FRAME", 5, None, ["internal"]])
def test_a_code_that_is_none_of_ours_is_refused(code: object) -> None:
    assert WIRE_ERROR.from_object({"code": "internal", "message": "", "detail": {}}).code is ErrorCode.INTERNAL
    with pytest.raises(ValueRefused) as caught:
        WIRE_ERROR.from_object({"code": code, "message": "", "detail": {}})
    assert caught.value.path == "$.code"


def test_user_text_is_any_text_without_nul() -> None:
    said = {"session": "a", "content": "\u2028 \x01 🙂", "resume": False}
    assert TURN.to_object(TURN.from_object(said)) == said
    for wrong in ("a\x00b", "\x00", "\ud800", 5):
        with pytest.raises(ValueRefused) as caught:
            TURN.from_object({**said, "content": wrong})
        assert caught.value.path == "$.content"


def test_the_time_of_a_turn_is_a_limit_without_a_value() -> None:
    said = wire_error(errors.TurnLimit(limit="turn_s", value=90.0))
    assert said.message == "the turn was ended after 90 s ([loop] turn_s)"
    assert said.detail == {"limit": "turn_s"}


def test_who_took_the_place_of_a_turn_is_named() -> None:
    said = wire_error(errors.TurnCancelled(cause="replaced"))
    assert said.message == "the turn was cancelled: a newer message took its place"
    assert said.detail == {"cause": "replaced"}


def test_a_session_that_nothing_runs_for_has_no_turn() -> None:
    said = wire_error(errors.NoTurn(session="a", ending="idle"))
    assert said.message == "no turn of session a runs; send the text as a turn"
    assert said.detail == {"ending": "idle"}


def test_a_turn_that_refuses_when_busy_is_written_as_m2b_wrote_it() -> None:
    plain = {"session": "a", "content": "hi", "resume": True}
    turn = TURN.from_object(plain)
    assert turn.when_busy == "refuse"
    assert TURN.from_object({**plain, "when_busy": "refuse"}) == turn
    assert list(TURN.to_object(turn)) == ["session", "content", "resume"]
    for other in ("wait", "replace"):
        assert TURN.to_object(TURN.from_object({**plain, "when_busy": other})) == {**plain, "when_busy": other}
    with pytest.raises(ValueRefused) as caught:
        TURN.from_object({**plain, "when_busy": "queue"})
    assert str(caught.value) == '$.when_busy: expected one of refuse, wait, replace, found "queue"'


def test_a_fork_counts_answers_from_1_or_takes_the_last() -> None:
    fork = REQUESTS["fork"]
    for at in (None, 1, 7):
        body = {"session": "a", "from": at, "new": "b"}
        assert fork.to_object(fork.from_object(body)) == body
    for wrong in (0, -1, "1", True):
        with pytest.raises(ValueRefused) as caught:
            fork.from_object({"session": "a", "from": wrong, "new": "b"})
        assert caught.value.path == "$.from"


def test_an_owner_is_the_only_cause_that_can_be_asked_for() -> None:
    with pytest.raises(ValueRefused):
        REQUESTS["cancel"].from_object({"session": "a", "cause": "shutdown"})
