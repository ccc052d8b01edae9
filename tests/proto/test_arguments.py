"""Tool arguments: which texts are one JSON object, the same for every caller and after every restart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.errors import ValueRefused
from boxmaker.proto.arguments import MAX_DEPTH, object_text, parse_arguments, without_nul

from .strategies import json_objects, json_values, relaxed, texts, wild_texts


def problem_of(text: str) -> str:
    with pytest.raises(ValueRefused) as caught:
        parse_arguments(text)
    assert caught.value.path == "$"
    return caught.value.problem


def nested(depth: int, opening: str = '{"a":', closing: str = "}") -> str:
    """An object that is that many deep, itself included."""
    return '{"a":' + opening * (depth - 1) + "1" + closing * (depth - 1) + "}"


@pytest.mark.parametrize("text", ["", " ", "\n\t\r ", "\u00a0", "\u2028\u3000", "\x1f"])
def test_blank_text_means_no_arguments(text: str) -> None:
    assert parse_arguments(text) == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        (' \r\n{"a" : 1}\t', {"a": 1}),
        ('{"a":"é\u2028"}', {"a": "é\u2028"}),
        ('{"a":"\\u00e9\\n"}', {"a": "é\n"}),
        ('{"a":"\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ('{"a":"\\uD83D\\uDE00\\uD83D\\uDE00"}', {"a": "\U0001f600\U0001f600"}),
        ('{"a":"\\\\ud800"}', {"a": "\\ud800"}),
        ('{"a":"\\\\\\\\ud800"}', {"a": "\\\\ud800"}),
        ('{"\\\\ud800":"u{d800}"}', {"\\ud800": "u{d800}"}),
        ('{"a":"\\u0000"}', {"a": "\x00"}),
        ('{"a":123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ('{"a":-0.5e-3}', {"a": -0.0005}),
        ('{"a":1,"a":2}', {"a": 2}),
    ],
)
def test_the_text_of_one_object_is_read(text: str, value: object) -> None:
    assert parse_arguments(text) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("null", "null is not an object"),
        ("true", "true is not an object"),
        ("5", "5 is not an object"),
        ('"{}"', '"{}" is not an object'),
        ("[]", "an array is not an object"),
        ('[{"a":1}]', "an array is not an object"),
        ("{}{}", "not JSON: "),
        ('{"a":1} {"a":2}', "not JSON: "),
        ('{"a":1}, and then', "not JSON: "),
        ("{'a': 1}", "not JSON: "),
        ('{"a": 1', "not JSON: "),
        ('{"a": "b', "not JSON: "),
        ("{", "not JSON: "),
        ('{"a":1,}', "not JSON: "),
        ('{"a":"x\ny"}', "not JSON: "),
        ('{"a":"\\x41"}', "not JSON: "),
        ('{"a":"\\u00g0"}', "not JSON: "),
        ('{"a":01}', "not JSON: "),
        ("\ufeff{}", "not JSON: "),
        ('{"a":NaN}', "not JSON: NaN is no JSON value"),
        ('{"a":[-Infinity]}', "not JSON: -Infinity is no JSON value"),
        ('{"a":1e999}', "not JSON: the number 1e999 is out of range"),
        ('{"a":-1e999}', "not JSON: the number -1e999 is out of range"),
        ('{"a":1' + "0" * 309 + "}", "not JSON: the number 1" + "0" * 38 + "… is out of range"),
        ('{"a":' + "9" * 5000 + "}", "not JSON: the number " + "9" * 39 + "… is out of range"),
        ('{"a":1e999,"a":1}', "not JSON: the number 1e999 is out of range"),
        ('{"a":"\\ud800"}', "holds a lone surrogate"),
        ('{"a":"\\uDFFF"}', "holds a lone surrogate"),
        ('{"\\udc00":1}', "holds a lone surrogate"),
        ('{"a":["\\ude00\\ud83d"]}', "holds a lone surrogate"),
        ('{"a":"\\ud83d\\ud83d\\ude00"}', "holds a lone surrogate"),
        ('{"a":"\\ud83dx\\ude00"}', "holds a lone surrogate"),
        ('{"a":"\\\\\\ud800"}', "holds a lone surrogate"),
        ('{"a":"\\ud800","a":1}', "holds a lone surrogate"),  # hidden by a second "a", but in the text that is sent
        ('{"a":"\ud800"}', "holds a lone surrogate"),
    ],
    ids=range(35),
)
def test_anything_else_is_refused_with_its_reason(text: str, problem: str) -> None:
    assert problem_of(text).startswith(problem)
    assert len(problem_of(text)) < 120


# -- depth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]")])
def test_a_hundred_levels_are_taken_and_one_more_is_not(opening: str, closing: str) -> None:
    assert MAX_DEPTH == 100
    value: Any = parse_arguments(nested(100, opening, closing))
    depth = 0
    while value != 1:
        value = value["a"] if isinstance(value, dict) else value[0]
        depth += 1
    assert depth == 100
    assert problem_of(nested(101, opening, closing)) == "nested over 100 deep"
    assert problem_of(nested(100_000, opening, closing)) == "nested over 100 deep"


def test_brackets_beside_each_other_and_inside_text_are_no_depth() -> None:
    assert len(parse_arguments('{"a":[' + ",".join(["[]", "{}"] * 500) + "]}")["a"]) == 1000
    assert parse_arguments('{"a":"' + "[{" * 500 + '"}') == {"a": "[{" * 500}
    assert parse_arguments('{"a":"\\"' + "[" * 500 + '"}') == {"a": '"' + "[" * 500}
    assert parse_arguments('{"a":"\\\\","b":' + "[" * 99 + "]" * 99 + "}")["a"] == "\\"
    assert problem_of('{"a":"\\\\","b":' + "[" * 100 + "]" * 100 + "}") == "nested over 100 deep"


def at_depth(frames: int, call: Callable[[], object]) -> object:
    return call() if frames == 0 else at_depth(frames - 1, call)


@pytest.mark.parametrize("frames", [0, 300, 600])
def test_the_answer_does_not_depend_on_the_callers_stack(frames: int) -> None:
    assert at_depth(frames, lambda: parse_arguments(nested(100))) == parse_arguments(nested(100))
    assert at_depth(frames, lambda: problem_of(nested(101))) == "nested over 100 deep"


@pytest.mark.real
def test_the_answer_does_not_depend_on_the_limits_of_the_process() -> None:
    program = (
        "from boxmaker.proto.arguments import parse_arguments\n"
        "for digits in (308, 309, 310, 640, 700, 4300, 4301, 9000):\n"
        "    try: parse_arguments('{\"a\":' + '1' * digits + '}'); print(digits, 'taken')\n"
        "    except ValueError: print('another error')\n"
        "    except Exception as exc: print(digits, exc.problem[:9])\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-X", f"int_max_str_digits={limit}", "-c", program],
            check=True, capture_output=True, text=True, timeout=60,
        ).stdout
        for limit in (0, 640, 4300)
    }  # fmt: skip
    assert answers == {
        "308 taken\n309 taken\n310 not JSON:\n640 not JSON:\n700 not JSON:\n"
        "4300 not JSON:\n4301 not JSON:\n9000 not JSON:\n"
    }


# -- properties ----------------------------------------------------------------------------------


@given(value=json_objects, ascii_only=st.booleans(), indent=st.none() | st.integers(0, 2))
@relaxed
def test_the_text_of_any_object_is_read(value: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    assert parse_arguments(json.dumps(value, ensure_ascii=ascii_only, indent=indent)) == value


@given(text=wild_texts | st.text('{}[]":,\\u0d8cf1e \n', max_size=30))
@relaxed
def test_any_text_is_an_object_or_refused_for_the_same_reason_each_time(text: str) -> None:
    try:
        value = parse_arguments(text)
    except ValueRefused as refused:
        problem = refused.problem
    else:
        assert type(value) is dict
        assert json.loads(json.dumps(value)) == value
        json.dumps(value, ensure_ascii=False).encode("utf-8")
        return
    assert problem_of(text) == problem
    problem.encode("utf-8")


def has_lone_surrogate(units: list[int]) -> bool:
    """Decided by Python's own UTF-16 decoder."""
    try:
        b"".join(unit.to_bytes(2, "little") for unit in units).decode("utf-16-le")
    except UnicodeDecodeError:
        return True
    return False


@given(units=st.lists(st.sampled_from([0xD800, 0xDBFF, 0xDC00, 0xDFFF, 0x41, 0x5C]), max_size=6), data=st.data())
@relaxed
def test_a_lone_surrogate_is_found_behind_any_escapes(units: list[int], data: st.DataObject) -> None:
    spelled = ""
    for unit in units:
        ways = [f"\\u{unit:04x}", f"\\u{unit:04X}", *{0x41: ["A"], 0x5C: ["\\\\"]}.get(unit, [])]
        spelled += data.draw(st.sampled_from(ways))
    key_or_value = data.draw(st.sampled_from(['{{"{}":1}}', '{{"a":[{{"b":"{}"}}]}}', '{{"a":"{}","a":0}}']))
    text = key_or_value.format(spelled)
    if has_lone_surrogate(units):
        assert problem_of(text) == "holds a lone surrogate"
    else:
        assert type(parse_arguments(text)) is dict


@given(value=json_values)
@relaxed
def test_nul_is_replaced_everywhere_and_nothing_else(value: object) -> None:
    cleaned = without_nul(value)
    assert "\\u0000" not in json.dumps(cleaned).replace("\\\\", "")
    assert json.dumps(cleaned) == json.dumps(value).replace("\\\\", "\x00").replace("\\u0000", "\\ufffd").replace(
        "\x00", "\\\\"
    )


@given(key=texts, text=texts)
@relaxed
def test_the_text_of_an_object_is_compact_and_free_of_nul(key: str, text: str) -> None:
    expected = {key.replace("\x00", "\ufffd"): text.replace("\x00", "\ufffd")}
    written = object_text({key: text})
    assert written == json.dumps(expected, ensure_ascii=False, separators=(",", ":"))
    assert parse_arguments(written) == expected


def test_the_text_of_an_object_keeps_the_order_of_its_keys() -> None:
    assert object_text({"b": [1, {"z": "é", "a\x00": None}], "a": 1.5}) == '{"b":[1,{"z":"é","a\ufffd":null}],"a":1.5}'


def test_depth_is_counted_level_by_level() -> None:
    deepest = '{"a":' + "[" * 98 + "[],[]" + "]" * 98 + "}"  # 1 + 98 + 1 levels, of 101 brackets
    assert list(parse_arguments(deepest)) == ["a"]
    closed_between = '{"a":' + "[" * 60 + "[]," * 20 + "[" * 45 + "]" * 105 + "}"  # 1 + 60 + 45 levels
    with pytest.raises(ValueRefused, match="nested over 100 deep"):
        parse_arguments(closed_between)
