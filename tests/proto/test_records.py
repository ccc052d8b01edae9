"""The records of a log: their lines byte for byte, their keys in order, and nothing else accepted."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.errors import ValueRefused
from boxmaker.proto import records
from boxmaker.proto.chat import ToolCall
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import (
    RECORDS,
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
from boxmaker.session.baseline import BASELINE, encode_baseline

from .examples import FIXTURES, files, places, put, tag
from .strategies import json_values, log_records, relaxed, wild_texts

LINES = files("records/*.jsonl")

EXPECTED: dict[str, LogRecord] = {
    "session_start": SessionStart(
        time=Timestamp("2026-11-30T14:15:30.123Z"),
        session=SessionId("20261130-141530-x7k2qf"),
        epoch=0,
        slot=0,
        baseline=hashlib.sha256((FIXTURES / "baseline.json").read_bytes()).hexdigest(),
    ),
    "user": User(
        time=Timestamp("2026-11-30T14:15:30.124Z"),
        content='Wie spät ist es? Sag nur "HH:MM".',
    ),
    "user.unusual": User(
        time=Timestamp("2024-02-29T23:59:59.999Z"),
        content="a\u2028b\u2029c\u0085d\x7fe\U0001f600f\\g\th\ni\x01j/k\ufffdl\ufeff",
    ),
    "assistant": Assistant(
        time=Timestamp("2026-11-30T14:15:32.000Z"),
        content="",
        reasoning_content="The owner wants the time → clock.",
        tool_calls=(
            ToolCall(id="call_1", name="clock", arguments="{}"),
            ToolCall(id="", name=" call_tool\n", arguments='{"name": "echo", "arguments": {"text": "é"}}'),
        ),
    ),
    "assistant.null": Assistant(
        time=Timestamp("2026-11-30T14:15:32.000Z"), content=None, reasoning_content=None, tool_calls=()
    ),
    "usage": Usage(
        time=Timestamp("2026-11-30T14:15:32.000Z"),
        cache_n=0,
        prompt_n=412,
        predicted_n=57,
        reasoning_tokens=31,
        thinking_capped=False,
    ),
    "usage.null": Usage(
        time=Timestamp("2026-11-30T14:15:32.000Z"),
        cache_n=None,
        prompt_n=None,
        predicted_n=None,
        reasoning_tokens=4352,
        thinking_capped=True,
    ),
    "tool_result": ToolResult(
        time=Timestamp("2026-11-30T14:15:32.010Z"),
        call=0,
        tool_call_id="call_1",
        content="2026-11-30T14:15:32.005Z",
        class_="public",
        untrusted=False,
        truncated=False,
    ),
    "tool_result.unusual": ToolResult(
        time=Timestamp("2026-11-30T14:15:32.010Z"),
        call=123456789012345678901234567890,
        tool_call_id="",
        content='<script>\u2028"</script>[truncated]',
        class_="secret",
        untrusted=True,
        truncated=True,
    ),
    "cache_loss": CacheLoss(time=Timestamp("2026-11-30T14:15:40.500Z"), expected=1019, got=0),
    "epoch_end": EpochEnd(time=Timestamp("2026-12-01T00:00:00.000Z")),
}

KEYS = {
    "session_start": ["type", "time", "session", "epoch", "slot", "baseline"],
    "user": ["type", "time", "content"],
    "assistant": ["type", "time", "content", "reasoning_content", "tool_calls"],
    "usage": ["type", "time", "cache_n", "prompt_n", "predicted_n", "reasoning_tokens", "thinking_capped"],
    "tool_result": ["type", "time", "call", "tool_call_id", "content", "class", "untrusted", "truncated"],
    "cache_loss": ["type", "time", "expected", "got"],
    "epoch_end": ["type", "time"],
}
"""From the table of M2b section 2."""


def test_every_record_has_an_example_and_every_example_is_of_a_record() -> None:
    assert {tag(name) for name in LINES} == set(RECORDS.tags) == set(KEYS)
    assert set(EXPECTED) == set(LINES)


@pytest.mark.parametrize("name", LINES)
def test_an_example_is_read_as_the_record_that_it_stands_for(name: str) -> None:
    assert decode_line(LINES[name].read_bytes()) == EXPECTED[name]


@pytest.mark.parametrize("name", LINES)
def test_a_record_is_written_as_its_example_byte_for_byte(name: str) -> None:
    assert encode_line(EXPECTED[name]) == LINES[name].read_bytes()


@given(record=log_records)
@relaxed
def test_a_record_is_read_back_from_its_line(record: LogRecord) -> None:
    assert decode_line(encode_line(record)) == record


@given(record=log_records)
@relaxed
def test_a_line_is_one_line_of_compact_utf8_with_all_keys_in_order(record: LogRecord) -> None:
    line = encode_line(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    value = json.loads(line)
    assert list(value) == KEYS[value["type"]]
    assert json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n" == line


def test_a_call_has_its_keys_in_order() -> None:
    value = json.loads(LINES["assistant"].read_bytes())
    assert [list(call) for call in value["tool_calls"]] == [["id", "name", "arguments"]] * 2
    assert encode_line(EXPECTED["assistant"]) == LINES["assistant"].read_bytes()


@given(name=st.sampled_from(sorted(LINES)), indent=st.integers(0, 3), order=st.randoms(use_true_random=False))
@relaxed
def test_a_reader_takes_any_white_space_and_any_order_of_keys(name: str, indent: int, order: object) -> None:
    items = list(json.loads(LINES[name].read_bytes()).items())
    order.shuffle(items)  # type: ignore[attr-defined]  # a random.Random
    text = json.dumps(dict(items), indent=indent, separators=(" ,\t", "\r\n: "))
    assert decode_line(b" \n" + text.encode() + b"\r\n") == EXPECTED[name]


def test_a_line_is_read_with_or_without_its_lf() -> None:
    assert decode_line(LINES["user"].read_bytes().removesuffix(b"\n")) == EXPECTED["user"]


@given(line=st.binary(max_size=60))
@relaxed
def test_garbage_is_refused_by_the_one_named_error(line: bytes) -> None:
    with pytest.raises(ValueRefused):
        decode_line(line)


@given(name=st.sampled_from(sorted(LINES)), data=st.data())
@relaxed
def test_a_torn_or_damaged_line_is_a_record_or_refused(name: str, data: st.DataObject) -> None:
    line = bytearray(LINES[name].read_bytes())
    del line[data.draw(st.integers(1, len(line)), "torn at") :]
    at = data.draw(st.integers(0, len(line) - 1), "damaged at")
    line[at] = data.draw(st.integers(0, 255), "byte")
    try:
        record = decode_line(bytes(line))
    except ValueRefused:
        return
    assert decode_line(encode_line(record)) == record


@pytest.mark.parametrize(
    ("name", "key", "value", "path"),
    [
        ("session_start", "baseline", "A" * 64, "$.baseline"),
        ("session_start", "baseline", "a" * 63, "$.baseline"),
        ("session_start", "baseline", "a" * 64 + "\n", "$.baseline"),
        ("session_start", "session", "../a", "$.session"),
        ("session_start", "time", "2026-11-30 14:15:30.123Z", "$.time"),
        ("session_start", "epoch", -1, "$.epoch"),
        ("usage", "cache_n", -1, "$.cache_n"),
        ("usage", "reasoning_tokens", None, "$.reasoning_tokens"),
        ("tool_result", "class", "Public", "$.class"),
        ("tool_result", "class", "", "$.class"),
        ("assistant", "tool_calls", None, "$.tool_calls"),
    ],
)
def test_a_value_out_of_its_range_is_refused_with_its_path(name: str, key: str, value: object, path: str) -> None:
    record = json.loads(LINES[name].read_bytes())
    record[key] = value
    with pytest.raises(ValueRefused) as caught:
        decode_line(json.dumps(record).encode())
    assert caught.value.path == path


def test_python_names_of_keys_are_no_keys() -> None:
    line = LINES["tool_result"].read_bytes().replace(b'"class"', b'"class_"')
    with pytest.raises(ValueRefused) as caught:
        decode_line(line)
    assert str(caught.value) == "$: the key 'class' is missing"


def test_the_baseline_file_is_read_and_written_back_identically() -> None:
    raw = (FIXTURES / "baseline.json").read_bytes()
    baseline = BASELINE.decode(raw)
    assert [tool.name for tool in baseline.tools] == ["clock", "find_tool", "call_tool"]
    assert baseline.system.endswith("\n\nThe owner lives in Köln.")
    assert encode_baseline(baseline) == raw


# -- the way that is written by hand -----------------------------------------------------------------


def outcome(decode: Callable[[bytes], LogRecord], line: bytes) -> LogRecord | str:
    try:
        return decode(line)
    except ValueRefused as refused:
        return str(refused)


def line_of(value: object) -> bytes:
    """JSON with nothing escaped but what has to be: an escape alone leads to the codec."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def assert_same_by_hand_and_by_codec(line: bytes) -> None:
    by_hand, by_codec = outcome(decode_line, line), outcome(RECORDS.decode, line)
    assert by_hand == by_codec
    assert type(by_hand) is type(by_codec)


@given(record=log_records, ascii_only=st.booleans())
@relaxed
def test_a_record_is_the_same_by_hand_and_by_codec(record: LogRecord, ascii_only: bool) -> None:
    value = json.loads(encode_line(record))
    assert decode_line(json.dumps(value, ensure_ascii=ascii_only).encode()) == record
    assert_same_by_hand_and_by_codec(json.dumps(value, ensure_ascii=ascii_only).encode())


@pytest.mark.parametrize("name", LINES)
def test_a_wrong_value_at_any_place_is_the_same_by_hand_and_by_codec(name: str) -> None:
    value = json.loads(LINES[name].read_bytes())
    wrongs = [None, True, 0, -1, 1.0, 10**30, 10**400, "", "x", "public", "é\ud800", [], ["id"], {}, {"id": ""}]
    for path, old in places(value):
        for wrong in wrongs:
            assert_same_by_hand_and_by_codec(line_of(put(value, path, wrong)))
        if isinstance(old, dict):
            for key in old:
                rest = {k: v for k, v in old.items() if k != key}
                assert_same_by_hand_and_by_codec(line_of(put(value, path, rest)))
                assert_same_by_hand_and_by_codec(line_of(put(value, path, {**rest, "x": 1})))
            assert_same_by_hand_and_by_codec(line_of(put(value, path, {**old, "x": 1})))


@given(name=st.sampled_from(sorted(LINES)), wrong=json_values | wild_texts, data=st.data())
@relaxed
def test_any_json_at_any_place_is_the_same_by_hand_and_by_codec(name: str, wrong: object, data: st.DataObject) -> None:
    value = json.loads(LINES[name].read_bytes())
    path, _ = data.draw(st.sampled_from(list(places(value))), "place")
    assert_same_by_hand_and_by_codec(line_of(put(value, path, wrong)))


@pytest.mark.parametrize(
    "hidden",
    [b"1e999", b"NaN", b"-Infinity", b"1" + b"0" * 400, b"9" * 5000, b"[" * 5000 + b"]" * 5000, b"1.5", b'"\\ud800"'],
)
@pytest.mark.parametrize("name", LINES)
def test_a_value_hidden_by_a_second_key_is_the_same_by_hand_and_by_codec(name: str, hidden: bytes) -> None:
    line = LINES[name].read_bytes().replace(b'"time":', b'"time":' + hidden + b',"time":', 1)
    assert_same_by_hand_and_by_codec(line)


@pytest.mark.parametrize(
    "line", [b"\xff{}", b"\xef\xbb\xbf{}", b'"type"', b"[]", b'{"type":["user"]}', b"", b"[" * 5000]
)
def test_what_is_no_record_is_the_same_by_hand_and_by_codec(line: bytes) -> None:
    assert_same_by_hand_and_by_codec(line)
    assert_same_by_hand_and_by_codec(b"\xef\xbb\xbf" + LINES["user"].read_bytes())


@pytest.mark.parametrize("tail", [b"x", b"{}", b",", b"\x00", b"\n{}", b"\nx", b" ", b"\n\n", b"\r\n", b"\xc2\xa0"])
@pytest.mark.parametrize("name", LINES)
def test_what_follows_a_record_is_white_space_or_refused(name: str, tail: bytes) -> None:
    line = LINES[name].read_bytes().removesuffix(b"\n") + tail
    if tail.strip(b" \r\n"):
        with pytest.raises(ValueRefused):
            decode_line(line)
    else:
        assert decode_line(line) == EXPECTED[name]
    assert_same_by_hand_and_by_codec(line)


@pytest.mark.parametrize("name", ["user", "assistant", "assistant.null", "usage", "tool_result", "tool_result.unusual"])
def test_a_usual_line_is_read_without_the_codec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it costs several times as much, and nothing else would show it."""
    line = LINES[name].read_bytes()
    monkeypatch.delattr(records, "RECORDS")
    assert decode_line(line) == EXPECTED[name]
    assert decode_line(line.removesuffix(b"\n")) == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "key"),
    [("tool_result", "call"), *(("usage", key) for key in ("cache_n", "prompt_n", "predicted_n", "reasoning_tokens"))],
)
def test_a_count_is_taken_by_hand_from_0_to_the_largest(name: str, key: str) -> None:
    value = json.loads(LINES[name].read_bytes())
    largest = int(sys.float_info.max)
    for count in (0, 1, largest):
        made = records._QUICK[name]({**value, key: count})
        assert getattr(made, key) == count
    for wrong in (-1, largest + 1, True, 1.0, "1"):
        assert records._QUICK[name]({**value, key: wrong}) is None
