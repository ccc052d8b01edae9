"""The codec of the log's records, its quick way included, against the tables of `docs/protocol.md`.

An input is one or more lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import attrs
from hypothesis import strategies as st

from boxmaker.errors import ValueRefused
from boxmaker.proto.records import RECORDS, LogRecord, decode_line, encode_line
from tests.fuzz.frames import count, fields, figure, flag, one_of, text
from tests.fuzz.target import (
    FIXTURES,
    JSON_TOKENS,
    UNSURE_DEPTH,
    Target,
    assert_sayable,
    deepest,
    exact,
    has_surrogate,
    strict_json,
)
from tests.naive import Pairs


def time(value: Any) -> bool:
    if type(value) is not str or not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\.[0-9]{3}Z", value):
        return False
    try:
        datetime.strptime(value, "%Y-%m-%dT%H:%M:%S.%fZ")
    except ValueError:
        return False
    return bool(re.fullmatch(r".{11}\d\d:\d\d:\d\d\.\d{3}Z", value))


def calls(value: Any) -> bool:
    return type(value) is list and all(fields(id=text, name=text, arguments=text)(call) for call in value)


def text_or_none(value: Any) -> bool:
    return value is None or text(value)


TABLE = {
    "session_start": fields(
        time=time,
        session=lambda value: type(value) is str and bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value)),
        epoch=count,
        slot=count,
        baseline=lambda value: type(value) is str and bool(re.fullmatch("[0-9a-f]{64}", value)),
    ),
    "user": fields(time=time, content=text),
    "assistant": fields(time=time, content=text_or_none, reasoning_content=text_or_none, tool_calls=calls),
    "usage": fields(
        time=time, cache_n=figure, prompt_n=figure, predicted_n=figure, reasoning_tokens=count, thinking_capped=flag
    ),
    "tool_result": fields(
        time=time,
        call=count,
        tool_call_id=text,
        content=text,
        class_=one_of("public", "private", "secret"),
        untrusted=flag,
        truncated=flag,
    ),
    "cache_loss": fields(time=time, expected=count, got=count),
    "epoch_end": fields(time=time),
}


def judged(line: bytes) -> tuple[str, Any]:
    """The type of the record in a line and its object, or `refused`."""
    try:
        value = strict_json(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return "refused", None
    name = value.get("type") if type(value) is dict else None
    if type(name) is not str or name not in TABLE:
        return "refused", None
    rest = {key: inner for key, inner in value.items() if key != "type"}
    return (name, value) if TABLE[name](rest) else ("refused", None)


def hides_something(line: bytes) -> bool:
    """Does a key of the line stand twice? The reader may look at a value that another hides, or not."""
    found = []

    def look(pairs: list[tuple[str, Any]]) -> Pairs:
        found.append(len({key for key, _ in pairs}) < len(pairs))
        return Pairs(pairs)

    try:
        json.loads(line.decode("utf-8"), object_pairs_hook=look, parse_int=float)
    except ValueError:
        return False
    return any(found)


def outcome(decode: Callable[[bytes], LogRecord], line: bytes) -> LogRecord | str:
    try:
        return decode(line)
    except ValueRefused as exc:
        return refused(exc)


def refused(error: ValueRefused) -> str:
    assert error.path.startswith("$")
    assert_sayable(str(error))
    return str(error)


def plain(record: LogRecord) -> dict[str, Any]:
    tag = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(record).__name__).lower()
    return {"type": tag, **{key.removesuffix("_"): value for key, value in attrs.asdict(record).items()}}


def check_line(line: bytes) -> str:
    unsure = deepest(line.decode("utf-8", "replace")) > UNSURE_DEPTH
    record = outcome(decode_line, line)
    if not unsure:
        by_codec = outcome(RECORDS.decode, line)
        assert record == by_codec
        assert type(record) is type(by_codec)
        with_end = outcome(decode_line, line + b"\n")
        assert with_end == record or isinstance(record, str) is isinstance(with_end, str) is True
    name, value = judged(line)
    if isinstance(record, str):
        assert unsure or name == "refused", (name, record)
        return "refused" if record.startswith(("$: not", "$: nested")) else "refused-value"
    assert unsure or name != "refused" or hides_something(line), record
    if name != "refused":
        assert exact(plain(record)) == exact(value)
    written = encode_line(record)
    assert written.count(b"\n") == 1
    assert written.endswith(b"\n")
    assert list(json.loads(written)) == list(plain(record))
    assert not has_surrogate(json.loads(written))
    assert decode_line(written) == RECORDS.decode(written) == record
    assert encode_line(decode_line(written)) == written
    return str(plain(record)["type"])


def check(raw: bytes) -> str:
    kinds = [check_line(line) for line in raw.split(b"\n")]
    return kinds[0] + ("-and-more" if len(kinds) > 1 else "")


def seeds() -> list[bytes]:
    lines = [file.read_bytes().removesuffix(b"\n") for file in sorted((FIXTURES / "proto" / "records").iterdir())]
    logs = [file.read_bytes() for file in sorted((FIXTURES / "sessions").glob("**/0.jsonl"))]
    return [*lines, *(line for log in logs for line in log.split(b"\n")[:12] if line)]


KEYS = (
    "type", "time", "content", "reasoning_content", "tool_calls", "id", "name", "arguments", "call", "tool_call_id",
    "class", "class_", "untrusted", "truncated", "cache_n", "prompt_n", "predicted_n", "reasoning_tokens",
    "thinking_capped", "session", "epoch", "slot", "baseline", "expected", "got",
)  # fmt: skip
TIMES = (
    "2026-11-30T14:15:30.123Z", "2024-02-29T23:59:59.999Z", "2023-02-29T00:00:00.000Z", "2026-11-30T24:00:00.000Z",
    "2026-11-30T14:15:60.000Z", "0000-01-01T00:00:00.000Z", "2026-11-30T14:15:30.123456Z", "2026-11-30 14:15:30.123Z",
    "2026-11-30T14:15:30.123z", "٢٠٢٦-11-30T14:15:30.123Z", "2026-11-30T14:15:30.123Z\n", "2026-W48-1T14:15:30.123Z",
)  # fmt: skip
TOKENS = (
    *JSON_TOKENS,
    *(f'"{key}":'.encode() for key in KEYS),
    *(f'"{name}"'.encode() for name in TABLE),
    *(json.dumps(moment, ensure_ascii=False).encode() for moment in TIMES),
    b'"public"', b'"secret"', b"\n", b'{"id":"","name":"","arguments":""}', b'"' + b"0" * 64 + b'"', b'"a"',
)  # fmt: skip
texts = st.text(max_size=5) | st.sampled_from(["\u2028", "\x00", "\x7f", "\ud800", "\ud83d\ude42", "a\nb"])
figures = st.none() | st.integers(-1, 10) | st.sampled_from([2**64, 10**308, 10**309]) | st.booleans() | st.floats()
moments = st.sampled_from([TIMES[0], TIMES[0], TIMES[0], *TIMES])
one_call = st.fixed_dictionaries({"id": texts, "name": texts, "arguments": texts}, optional={"x": texts})
record: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"type": st.just("user"), "time": moments, "content": texts | figures}),
    st.fixed_dictionaries({
        "type": st.just("assistant"),
        "time": moments,
        "content": texts | figures,
        "reasoning_content": st.none() | texts,
        "tool_calls": st.lists(one_call | figures, max_size=2) | texts,
    }),
    st.fixed_dictionaries({
        "type": st.just("usage"),
        "time": moments,
        "cache_n": figures,
        "prompt_n": figures,
        "predicted_n": figures,
        "reasoning_tokens": st.integers(-1, 3) | figures,
        "thinking_capped": st.booleans() | figures,
    }),
    st.fixed_dictionaries({
        "type": st.just("tool_result"),
        "time": moments,
        "call": st.integers(-1, 3) | figures,
        "tool_call_id": texts,
        "content": texts,
        "class": st.sampled_from(["public", "private", "secret", "Public", None, []]),
        "untrusted": st.booleans(),
        "truncated": st.booleans() | figures,
    }),
    st.fixed_dictionaries(
        {"type": st.sampled_from([*TABLE, "x", None])},
        optional={"time": moments, "expected": figures, "got": figures, "session": texts, "epoch": figures},
    ),
)  # fmt: skip
line = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, separators=(indent, ":")).encode(
        "utf-8", "surrogatepass"
    ),
    record,
    st.booleans(),
    st.sampled_from([",", ", ", ",\t"]),
)

TARGET = Target(name="records", suffix=".jsonl", check=check, seeds=seeds, tokens=TOKENS, grammar=line)
