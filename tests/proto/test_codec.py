"""Strictness at every place of every value that crosses a boundary, reading and writing."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, NewType

import attrs
import pytest
from attrs import frozen
from cattrs.errors import AttributeValidationNote, ClassValidationError
from hypothesis import given, settings
from hypothesis import strategies as st

from boxmaker.errors import ValueRefused
from boxmaker.proto.channel import TURN, TURN_DONE, TURN_EVENTS, WIRE_ERROR, ErrorCode, Turn, WireError
from boxmaker.proto.chat import Queued, ToolCallDelta
from boxmaker.proto.codec import (
    CHECKED_COUNTS,
    Codec,
    Count,
    JsonObject,
    Positive,
    Sha256,
    TaggedCodec,
    dumps,
    found,
    loads,
    refusal,
    strict_converter,
)
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import RECORDS
from boxmaker.proto.tools import TOOL_REQUEST, TOOL_RESPONSES

from .examples import FIXTURES, files, frame_object, places, put, shown
from .strategies import json_values, relaxed, wild_texts

AnyCodec = Codec[Any] | TaggedCodec[Any]


def _values() -> Iterator[tuple[str, AnyCodec, Any]]:
    """Every example as the object that its codec reads."""
    for name, file in files("records/*.jsonl").items():
        yield f"record {name}", RECORDS, json.loads(file.read_bytes())
    for name, file in files("events/*.frame").items():
        yield f"event {name}", TURN_EVENTS, frame_object(file)["body"]["event"]
    for name, file in files("errors/*.frame").items():
        yield f"error {name}", WIRE_ERROR, frame_object(file)["body"]
    yield "turn", TURN, frame_object(FIXTURES / "frames" / "turn.frame")["body"]
    yield "turn_done", TURN_DONE, frame_object(FIXTURES / "frames" / "turn_done.frame")["body"]
    for name, file in files("tools/*.json").items():
        codec: AnyCodec = TOOL_REQUEST if name == "request" else TOOL_RESPONSES
        yield f"tool {name}", codec, json.loads(file.read_bytes())


VALUES = {label: (codec, value) for label, codec, value in _values()}
WHOLE = [label for label in VALUES if not label.endswith(".null")]
"""Those whose values have the type that their key stands for."""

LARGEST = int(sys.float_info.max)
"""The largest whole number that a double holds."""

NULLABLE = {"record assistant": {"$.content", "$.reasoning_content"}} | {
    label: {f"{at}.cache_n", f"{at}.prompt_n", f"{at}.predicted_n"}
    for label, at in (("record usage", "$"), ("turn_done", "$.usage"))
}
"""Where null is allowed, from the design: absent text, and figures that the server did not send."""


def refused_at(codec: AnyCodec, value: Any) -> str:
    with pytest.raises(ValueRefused) as caught:
        codec.from_object(value)
    return caught.value.path


@pytest.mark.parametrize("label", VALUES)
def test_an_example_is_taken_as_it_is(label: str) -> None:
    codec, value = VALUES[label]
    assert codec.to_object(codec.from_object(value)) == value


@pytest.mark.parametrize("label", WHOLE)
def test_a_value_of_another_type_is_refused_at_every_place(label: str) -> None:
    codec, value = VALUES[label]
    nullable = NULLABLE.get(label.partition(".")[0], set())
    tried = 0
    wrongs: list[Any] = [True, False, 0, 1, 5, 0.0, 1.0, "5", "true", "", [], {}, None]
    for path, old in places(value):
        for wrong in wrongs:
            if type(wrong) is type(old) or (wrong is None and shown(path) in nullable):
                continue
            place = "$.type" if path == ("type",) else shown(path)
            assert refused_at(codec, put(value, path, wrong)) == place, (path, wrong)
            tried += 1
    assert tried > 20


@pytest.mark.parametrize("label", VALUES)
def test_an_unknown_key_is_refused_in_every_object(label: str) -> None:
    codec, value = VALUES[label]
    for path, old in places(value):
        if isinstance(old, dict) and path != ("detail",):
            for key in ("x", "", "Type", "class_", "ß\ud800", "k" * 1000):
                problem = refusal_of(codec, put(value, path, {**old, key: 1}))
                assert problem.path == shown(path)
                assert problem.problem.startswith("unknown key ")
                assert len(problem.problem) < 60


@pytest.mark.parametrize("label", VALUES)
def test_a_missing_key_is_refused_in_every_object(label: str) -> None:
    codec, value = VALUES[label]
    for path, old in places(value):
        if isinstance(old, dict) and path != ("detail",):
            for key in old:
                if (label, key) == ("event tool_result.untrusted", "untrusted"):
                    continue  # left out it is false
                rest = {k: v for k, v in old.items() if k != key}
                problem = refusal_of(codec, put(value, path, rest))
                assert str(problem) == f"{shown(path)}: the key '{key}' is missing"


@pytest.mark.parametrize("label", VALUES)
def test_a_lone_surrogate_is_refused_in_every_text(label: str) -> None:
    codec, value = VALUES[label]
    for path, old in places(value):
        if isinstance(old, str):
            for text in (old + "\ud800", "\udfff" + old, "\udc00\ud800"):
                problem = refusal_of(codec, put(value, path, text))
                assert problem.path == shown(path)
                str(problem).encode()


@pytest.mark.parametrize("label", VALUES)
def test_a_number_that_is_no_count_is_refused_at_every_integer(label: str) -> None:
    codec, value = VALUES[label]
    for path, old in places(value):
        if type(old) is int:
            for wrong in (-1, -(10**30), 10**400, 0.5, math.nan, math.inf, -math.inf):
                assert refused_at(codec, put(value, path, wrong)) == shown(path)
            least = 1 if path in (("ahead",), ("attempt",), ("n_ctx",)) else 0
            assert refused_at(codec, put(value, path, LARGEST + 1)) == shown(path)
            for right in (least, 1, 2**53 + 1, 2**64 + 1, 10**30, LARGEST):
                assert codec.to_object(codec.from_object(put(value, path, right))) == put(value, path, right)
            if least:
                assert refused_at(codec, put(value, path, 0)) == shown(path)


@pytest.mark.parametrize("label", WHOLE)
def test_what_would_be_refused_on_reading_is_refused_on_writing(label: str) -> None:
    codec, value = VALUES[label]
    made = codec.from_object(value)
    for field in attrs.fields(type(made)):
        if field.name == "detail":
            wrongs: list[Any] = [None, [], {1: 2}, {"a": "\ud800"}, {"a": math.nan}, {"a": {1}}, {"a": 10**400}]
        elif field.name == "tool_calls":
            wrongs = [None, 5, "a", ["a"], [{"id": "", "name": "", "arguments": ""}], (ToolCallDelta,)]
        else:
            wrongs = [object(), b"5", 1.0, "\ud800", ["a"], (5,), {}, -1, 10**400, math.nan]
            if type(getattr(made, field.name)) is not str:
                wrongs.append("x")
        for wrong in wrongs:
            with pytest.raises(ValueRefused):
                codec.encode(attrs.evolve(made, **{field.name: wrong}))


def refusal_of(codec: AnyCodec, value: Any) -> ValueRefused:
    with pytest.raises(ValueRefused) as caught:
        codec.from_object(value)
    return caught.value


@given(data=st.data())
@settings(relaxed, max_examples=500)
def test_garbage_gives_a_value_or_a_short_refusal_that_can_be_sent(data: st.DataObject) -> None:
    codec, value = VALUES[data.draw(st.sampled_from(list(VALUES)), "value")]
    path, _ = data.draw(st.sampled_from(list(places(value))), "place")
    wrong = data.draw(json_values | wild_texts, "wrong")
    try:
        codec.from_object(put(value, path, wrong))
    except ValueRefused as refused:
        text = str(refused)
    else:
        text = ""
    assert len(text) < 250
    text.encode()


@pytest.mark.parametrize(
    "value", [5, None, "user", [], True, {}, {"type": None}, {"type": []}, {"type": {}}, {"type": 5}]
)
def test_a_union_takes_only_objects_with_a_type_that_it_knows(value: object) -> None:
    expected = "$.type" if isinstance(value, dict) and value else "$"
    assert refused_at(RECORDS, value) == expected


def test_the_path_begins_where_the_caller_says() -> None:
    with pytest.raises(ValueRefused) as caught:
        RECORDS.from_object({"type": "user", "time": "2026-11-30T14:15:30.123Z", "content": 5}, "$.body.record")
    assert str(caught.value) == "$.body.record.content: expected text, found 5"


def test_a_nested_path_names_each_step() -> None:
    value = copy.deepcopy(VALUES["record assistant"][1])
    value["tool_calls"][1]["id"] = 7
    assert str(refusal_of(RECORDS, value)) == "$.tool_calls[1].id: expected text, found 7"
    value["tool_calls"] = {}
    assert str(refusal_of(RECORDS, value)) == "$.tool_calls: expected an array, found an object"


def test_the_first_thing_that_is_wrong_is_named() -> None:
    value = {"session": "a b", "content": 5, "resume": "no", "x": 1}
    assert refused_at(TURN, value) == "$.session"
    assert refused_at(TURN, {**value, "session": "a"}) == "$.content"
    assert refused_at(TURN, {**value, "session": "a", "content": ""}) == "$.resume"
    assert refused_at(TURN, {**value, "session": "a", "content": "", "resume": False}) == "$"


def test_a_value_of_another_union_is_refused_on_writing() -> None:
    with pytest.raises(ValueRefused, match="a ToolCallDelta is none of queued, waiting") as caught:
        TURN_EVENTS.encode(ToolCallDelta(index=0, id="", name="", arguments=""))  # type: ignore[arg-type]
    assert caught.value.path == "$"


def test_a_value_without_the_fields_of_its_class_is_refused_on_writing() -> None:
    with pytest.raises(ValueRefused) as caught:
        TURN.encode(None)  # type: ignore[arg-type]
    assert caught.value.path == "$"
    assert caught.value.problem.startswith("no Turn: ")


def test_a_code_that_is_a_bare_text_is_refused_on_writing() -> None:
    with pytest.raises(ValueRefused):
        WIRE_ERROR.encode(WireError(code="internal", message="", detail={}))  # type: ignore[arg-type]
    right = WireError(code=ErrorCode.INTERNAL, message="", detail={})
    assert WIRE_ERROR.encode(right) == '{"code":"internal","message":"","detail":{}}'


def test_a_key_that_is_no_text_is_refused_as_what_json_does_not_have() -> None:
    refused = refusal_of(WIRE_ERROR, {"code": "internal", "message": "", "detail": {1: 2}})
    assert refused.path == "$.detail"
    assert "JSON" in refused.problem


def test_reasons_say_what_was_expected_and_what_was_found() -> None:
    figures = {"cache_n": None, "prompt_n": None, "predicted_n": None, "reasoning_tokens": 0, "thinking_capped": 0}
    assert str(refusal_of(TURN_DONE, {"content": "", "usage": figures})) == (
        "$.usage.thinking_capped: expected true or false, found 0"
    )
    assert str(refusal_of(TURN_EVENTS, {"type": "queued", "ahead": 0})) == "$.ahead: expected an integer ≥ 1, found 0"
    assert str(refusal_of(TURN_EVENTS, {"type": "cut", "reason": "stop"})) == (
        '$.reason: expected one of length, thinking_cap, found "stop"'
    )
    assert str(refusal_of(TURN_EVENTS, {"type": "stop"})) == '$.type: unknown type "stop"'
    assert str(refusal_of(TURN_EVENTS, [1])) == "$: expected an object, found an array"
    start = {**VALUES["record session_start"][1], "baseline": "ab"}
    assert str(refusal_of(RECORDS, start)) == '$.baseline: expected 64 lower-case hex digits, found "ab"'


def test_a_value_is_read_from_its_text() -> None:
    text = '{"type":"queued","ahead":2}'
    assert TURN_EVENTS.decode(text) == TURN_EVENTS.decode(text.encode()) == Queued(ahead=2)
    assert TURN_EVENTS.encode(Queued(ahead=2)) == text
    text = '{"session":"a","content":"é","resume":true}'
    turn = Turn(session=SessionId("a"), content="é", resume=True)
    assert TURN.decode(text) == TURN.decode(text.encode()) == turn
    assert TURN.encode(turn) == text
    for codec in (TURN_EVENTS, TURN):
        with pytest.raises(ValueRefused, match="not JSON"):
            codec.decode("{")


def test_a_path_passes_over_notes_of_others() -> None:
    wrong = ValueError("expected text, found 5")
    wrong.add_note("seen while a test ran")
    wrong.add_note(AttributeValidationNote("class X @ attribute class_", "class_", str))
    assert str(refusal(ClassValidationError("", [wrong], Turn), "$.body")) == "$.body.class: expected text, found 5"
    assert str(refusal(KeyError("class"), "$.body")) == "$.body: the key 'class' is missing", (
        "an object without a group"
    )


# -- a converter of one's own ----------------------------------------------------------------------

Even = NewType("Even", int)


class Colour(Enum):
    RED = "red"


@frozen(kw_only=True)
class Part:
    name: str


@frozen(kw_only=True)
class Every:
    """A field of each kind that a boundary may use."""

    text: str
    flag: bool
    count: Count
    positive: Positive
    digest: Sha256
    free: JsonObject
    word: Literal["a", "b"]
    parts: tuple[Part, ...]
    maybe: Count | None
    colour: Colour
    class_: Even


def colour(value: object, kind: object) -> object:
    """Other words than cattrs' own: it has a way to read an Enum, which must not be taken."""
    assert kind is Colour
    if value != "red":
        raise ValueError("expected a colour")
    return Colour.RED


def even(value: object, kind: object) -> Even:
    assert kind is Even
    if type(value) is not int or value % 2:
        raise ValueError("expected an even number")
    return Even(value)


EVERY: dict[str, Any] = {
    "text": "é", "flag": False, "count": 0, "positive": 1, "digest": "0" * 32 + "f" * 32, "free": {"x": [1, None]},
    "word": "b", "parts": [{"name": "p"}, {"name": ""}], "maybe": None, "colour": "red", "class": 4,
}  # fmt: skip
WRONG: list[tuple[str, Any, str, str]] = [
    ("text", 5, "$.text", "expected text, found 5"),
    ("flag", 0, "$.flag", "expected true or false, found 0"),
    ("count", -1, "$.count", "expected an integer ≥ 0, found -1"),
    ("count", True, "$.count", "expected an integer ≥ 0, found true"),
    ("positive", 0, "$.positive", "expected an integer ≥ 1, found 0"),
    ("digest", "0" * 63, "$.digest", 'expected 64 lower-case hex digits, found "' + "0" * 38 + "…"),
    ("free", [], "$.free", "expected an object, found an array"),
    ("word", "c", "$.word", 'expected one of a, b, found "c"'),
    ("parts", {}, "$.parts", "expected an array, found an object"),
    ("parts", [{"name": "p"}, {"name": 1}], "$.parts[1].name", "expected text, found 1"),
    ("parts", [[]], "$.parts[0]", "expected an object, found an array"),
    ("maybe", "5", "$.maybe", 'expected an integer ≥ 0, found "5"'),
    ("colour", "blue", "$.colour", "expected a colour"),
    ("class", 3, "$.class", "expected an even number"),
    ("class_", 4, "$", 'unknown key "class_"'),
]


def test_a_converter_takes_each_kind_of_value_and_writes_it_again() -> None:
    codec = Codec(strict_converter({Even: even, Colour: colour}), Every)
    made = codec.from_object(EVERY)
    assert made == Every(
        text="é", flag=False, count=0, positive=1, digest="0" * 32 + "f" * 32, free={"x": [1, None]}, word="b",
        parts=(Part(name="p"), Part(name="")), maybe=None, colour=Colour.RED, class_=Even(4),
    )  # fmt: skip
    assert codec.to_object(made) == EVERY
    assert list(codec.to_object(made)) == list(EVERY), "keys stand in the order of the class"
    assert codec.from_object({**EVERY, "maybe": 7}).maybe == 7


@pytest.mark.parametrize(("key", "wrong", "path", "problem"), WRONG)
def test_a_converter_refuses_each_kind_of_wrong_value(key: str, wrong: Any, path: str, problem: str) -> None:
    codec = Codec(strict_converter({Even: even, Colour: colour}), Every)
    refused = refusal_of(codec, {**EVERY, key: wrong})
    assert (refused.path, refused.problem) == (path, problem)


def test_a_converter_needs_no_further_kinds() -> None:
    codec = Codec(strict_converter(), Part)
    assert codec.decode('{"name":"a"}') == Part(name="a")
    assert str(refusal_of(codec, [])) == "$: expected an object, found an array"


def test_a_union_has_a_tag_for_each_class_and_reads_numbers_as_it_is_told() -> None:
    converter = strict_converter()
    union: TaggedCodec[Part | Queued] = TaggedCodec(converter, {"part": Part, "queued": Queued})
    assert union.tags == ("part", "queued")
    assert union.decode('{"name":"a","type":"part"}') == Part(name="a")
    assert union.encode(Part(name="a")) == '{"type":"part","name":"a"}'
    assert union.encode(Queued(ahead=1)) == '{"type":"queued","ahead":1}'
    huge = '{"type":"queued","ahead":1' + "0" * 400 + "}"
    with pytest.raises(ValueRefused, match=r"\$: not JSON: the number 10+… is out of range"):
        union.decode(huge)
    counts: TaggedCodec[Queued] = TaggedCodec(converter, {"queued": Queued}, CHECKED_COUNTS)
    with pytest.raises(ValueRefused, match=r"\$\.ahead: expected an integer ≥ 1, found 10+…"):
        counts.decode(huge)


# -- JSON text -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"\xff", "not UTF-8 at byte 0"),
        (b'{"a":"\xc3"}', "not UTF-8 at byte 6"),
        (b'"\xed\xa0\x80"', "not UTF-8 at byte 1"),  # a surrogate, encoded
        (b"\xef\xbb\xbf{}", "not JSON: "),  # a byte order mark
        (b"", "not JSON: "),
        (b" ", "not JSON: "),
        (b"{}{}", "not JSON: "),
        (b"{'a':1}", "not JSON: "),
        (b'{"a":1,}', "not JSON: "),
        (b"[1] x", "not JSON: "),
        (b'"a\nb"', "not JSON: "),
        (b'"a\x00b"', "not JSON: "),
        (b"01", "not JSON: "),
        (b"NaN", "not JSON: NaN is no JSON value"),
        (b"[Infinity]", "not JSON: Infinity is no JSON value"),
        (b'{"a":-Infinity}', "not JSON: -Infinity is no JSON value"),
        (b"1e999", "not JSON: the number 1e999 is out of range"),
        (b"-1e999", "not JSON: the number -1e999 is out of range"),
        (b"1" + b"0" * 309, "not JSON: the number 1" + "0" * 38 + "… is out of range"),
        (b"-" + b"9" * 5000, "not JSON: the number -" + "9" * 38 + "… is out of range"),
        (b"1." + b"0" * 50 + b"e999", "not JSON: the number 1." + "0" * 37 + "… is out of range"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
    ],
    ids=range(24),
)
def test_text_that_is_no_json_is_refused(text: bytes, problem: str) -> None:
    with pytest.raises(ValueRefused) as caught:
        loads(text)
    assert caught.value.path == "$"
    assert caught.value.problem.startswith(problem)


@pytest.mark.parametrize("value", [0, -0, 2**53 + 1, -(2**63), 2**64 + 1, 10**30, 10**308, LARGEST, -LARGEST])
def test_integers_keep_every_digit(value: int) -> None:
    assert loads(str(value)) == value
    assert type(loads(str(value))) is int
    assert loads(dumps({"n": value})) == {"n": value}


def test_an_integer_stays_an_integer_and_a_float_a_float() -> None:
    assert [type(item) for item in loads("[1, 1.0, 1e2, -0.0]")] == [int, float, float, float]


@given(value=json_values)
@relaxed
def test_text_that_was_written_is_read_back(value: object) -> None:
    text = dumps(value)
    assert loads(text) == value
    assert loads(text.encode("utf-8")) == value
    assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@given(text=st.binary(max_size=40) | wild_texts)
@relaxed
def test_any_text_gives_a_value_or_a_refusal(text: bytes | str) -> None:
    try:
        loads(text)
    except ValueRefused as refused:
        problem = refused.problem
    else:
        problem = ""
    assert len(problem) < 200


def test_nothing_is_escaped_that_need_not_be() -> None:
    assert dumps({"b": "é\u2028\x7f/'", "a": '"\\\n\x01'}) == '{"b":"é\u2028\x7f/\'","a":"\\"\\\\\\n\\u0001"}'


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, [["a", {"b": "\udc00\ud800"}]]])
def test_a_lone_surrogate_is_not_written(value: object) -> None:
    with pytest.raises(ValueRefused, match=r"^\$: .*lone surrogate"):
        dumps(value)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [math.nan, [math.inf], {"a": -math.inf}, {1, 2}, b"a", object(), nested(100_000)])
def test_what_json_does_not_have_is_not_written(value: object) -> None:
    with pytest.raises(ValueRefused, match=r"^\$: (not JSON: |nested too deep)"):
        dumps(value)


@given(value=json_values | wild_texts | st.binary() | st.sampled_from([math.nan, 10**400, ErrorCode.STORAGE]))
@relaxed
def test_any_value_is_named_in_a_few_ascii_characters(value: object) -> None:
    name = found(value)
    assert 0 < len(name) <= 40
    assert name.rstrip("…").isascii()


def test_found_names_values_as_json_has_them() -> None:
    values: list[Any] = [None, True, 1.0, "é", {}, [], "x" * 99]
    assert [found(value) for value in values] == [
        "null", "true", "1.0", '"\\u00e9"', "an object", "an array", '"' + "x" * 38 + "…",
    ]  # fmt: skip
    assert [found(value) for value in (b"a", {1}, Even)] == ['"bytes"', '"set"', '"NewType"'], "what JSON does not have"
    assert found("x" * 38) == '"' + "x" * 38 + '"', "40 characters are shown whole"
    assert found("x" * 39) == '"' + "x" * 38 + "…"
