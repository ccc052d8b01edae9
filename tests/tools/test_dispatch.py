"""Dispatch: what answers a call in every form that a model gives it, and the cap of a result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from boxmaker.proto.chat import ToolSchema
from boxmaker.tools.dispatch import Local, Port, cap_result, dispatch, tool_failed
from boxmaker.tools.endings import call_denied
from boxmaker.tools.fake import fake_registry
from boxmaker.tools.registry import RegisteredTool, Registry

REGISTRY = fake_registry()
UNPARSED = "The arguments did not parse: "


def local(name: str, arguments: str) -> str:
    """The text that answers a call; the port must not see it."""
    answer = dispatch(REGISTRY, name, arguments)
    assert isinstance(answer, Local)
    return answer.text


def inner(name: str, arguments: str) -> Any:
    """What becomes of a call_tool whose inner arguments are this JSON text."""
    return dispatch(REGISTRY, "call_tool", f'{{"name":{json.dumps(name)},"arguments":{arguments}}}')


# -- a core tool of the port ------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["", " ", "\n\t", "{}"])
def test_no_arguments_are_an_empty_object(arguments: str) -> None:
    assert dispatch(REGISTRY, "clock", arguments) == Port(tool="clock", arguments="{}")


@pytest.mark.parametrize("arguments", ['{"a":1}', ' { "b" : [1, 2] } ', '{"ö":"\\u00e4"}', '{"a":{"b":{"c":null}}}'])
def test_arguments_reach_the_port_as_the_model_wrote_them(arguments: str) -> None:
    assert dispatch(REGISTRY, "clock", arguments) == Port(tool="clock", arguments=arguments)


BROKEN = [
    "{",
    '{"a":"b',
    "{'a': 1}",
    '{"a":1} and more',
    '{"a":NaN}',
    '{"a":Infinity}',
    '{"a":1e999}',
    "{}{}",
    '{"a":"x\ny"}',
    "null",
    "[]",
    '"{}"',
    "5",
    "true",
    '{"a":"\\ud800"}',
    '{"\\udfff":1}',
    '{"a":' * 200 + "1" + "}" * 200,
    "[" * 100_000,
    '{"a":' + "9" * 5000 + "}",
    "\ufeff{}",
    '{"a":"\x00"}',
]


@pytest.mark.parametrize("arguments", BROKEN)
@pytest.mark.parametrize("name", ["clock", "find_tool", "call_tool"])
def test_arguments_that_are_no_object_are_answered_and_nothing_runs(name: str, arguments: str) -> None:
    text = local(name, arguments)
    assert text.startswith(UNPARSED)
    assert len(text) > len(UNPARSED)
    assert len(text) < 300, "the model is told why, not everything again"


def test_a_nul_in_arguments_never_reaches_the_port() -> None:
    answer = dispatch(REGISTRY, "clock", '{"a\\u0000":["\\u0000x",{"b":"\\u0000"}],"c":"ö"}')
    assert answer == Port(tool="clock", arguments='{"a\ufffd":["\ufffdx",{"b":"\ufffd"}],"c":"ö"}')


# -- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "echo", "Clock", "clocks", "functions.clock", "a\nb", "x" * 1000])
@pytest.mark.parametrize("arguments", ["{}", "{"])
def test_a_tool_that_is_not_in_tools_is_unknown(name: str, arguments: str) -> None:
    """Echo too: it is called with call_tool."""
    text = local(name, arguments)
    assert repr(name) in text
    for core in ("clock", "find_tool", "call_tool"):
        assert core in text
    assert "\n" not in text


# -- find_tool --------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["", "{}", '{"query":null}', '{"query":""}', '{"query":"echo"}', '{"q":5}'])
def test_find_tool_searches_and_no_query_matches_all(arguments: str) -> None:
    assert local("find_tool", arguments) == REGISTRY.find("")
    assert '"name":"echo"' in REGISTRY.find("")


def test_find_tool_says_when_nothing_matches() -> None:
    assert local("find_tool", '{"query":"no such tool"}') == "No tool matches."
    assert local("find_tool", '{"query":"clock"}') == "No tool matches.", "core tools are in `tools` already"


@pytest.mark.parametrize("query", ["5", "true", "false", "0", "[]", '["echo"]', "{}"])
def test_a_query_that_is_no_text_does_not_parse(query: str) -> None:
    assert local("find_tool", f'{{"query":{query}}}') == f"{UNPARSED}query is not text"


# -- call_tool --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"text":"hi"}', '{"text":"hi"}'),
        ('{ "text" : "hi", "b": [1, 2.5, null] }', '{"text":"hi","b":[1,2.5,null]}'),
        ('{"z":1,"a":2}', '{"z":1,"a":2}'),
        ('{"text":"\\u00f6\\u2028"}', '{"text":"ö\u2028"}'),
        ("{}", "{}"),
        ("null", "{}"),
        ('""', "{}"),
        ('" "', "{}"),
        ('"{}"', "{}"),
        ('"{\\"text\\": \\"hi\\"}"', '{"text": "hi"}'),
        ('" {\\"text\\":1} "', ' {"text":1} '),
    ],
)
def test_inner_arguments_reach_the_port_as_the_text_of_an_object(arguments: str, text: str) -> None:
    assert inner("echo", arguments) == Port(tool="echo", arguments=text)


def test_absent_inner_arguments_are_an_empty_object() -> None:
    assert dispatch(REGISTRY, "call_tool", '{"name":"echo"}') == Port(tool="echo", arguments="{}")


@pytest.mark.parametrize(
    "arguments", ["5", "0", "true", "false", "[]", '[{"text":"hi"}]', *(json.dumps(text) for text in BROKEN)]
)
def test_inner_arguments_that_are_no_object_are_answered_and_nothing_runs(arguments: str) -> None:
    answer = inner("echo", arguments)
    assert isinstance(answer, Local)
    assert answer.text.startswith(UNPARSED)
    if not arguments.startswith('"'):  # a text that holds no object has the reason why it does not parse
        assert answer.text == f"{UNPARSED}arguments is not an object"


def test_a_nul_in_inner_arguments_never_reaches_the_port() -> None:
    cleaned = Port(tool="echo", arguments='{"text":"a\ufffdb"}')
    assert inner("echo", '{"text":"a\\u0000b"}') == cleaned
    assert inner("echo", json.dumps('{"text":"a\\u0000b"}')) == cleaned


@pytest.mark.parametrize("name", ["echo", " echo", "echo\n", "\techo "])
def test_the_inner_name_is_trimmed(name: str) -> None:
    assert inner(name, "{}") == Port(tool="echo", arguments="{}")


@pytest.mark.parametrize("name", ["", "Echo", "no_such", "\x00", "echo clock"])
def test_an_unknown_inner_tool_never_reaches_the_port(name: str) -> None:
    answer = inner(name, '{"text":"hi"}')
    assert isinstance(answer, Local)
    assert repr(name) in answer.text
    assert "find_tool" in answer.text


@pytest.mark.parametrize("name", ["clock", "find_tool", "call_tool"])
def test_call_tool_runs_no_tool_that_has_its_own_name_in_tools(name: str) -> None:
    answer = inner(name, "{}")
    assert isinstance(answer, Local)
    assert repr(name) in answer.text
    assert "own name" in answer.text


@pytest.mark.parametrize(
    "arguments", ["", "{}", '{"arguments":{}}', '{"name":null}', '{"name":5}', '{"name":["echo"]}']
)
def test_call_tool_without_a_name_runs_nothing(arguments: str) -> None:
    assert local("call_tool", arguments) == f"{UNPARSED}name is not text"


# -- any call ---------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=5),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(st.text(max_size=3), inside, max_size=2),
    max_leaves=5,
)
call_arguments = st.builds(
    lambda name, inside, as_text: json.dumps({"name": name, "arguments": json.dumps(inside) if as_text else inside}),
    st.sampled_from(["echo", "clock", " echo ", "x"]),
    json_values,
    st.booleans(),
)
any_arguments = st.text(max_size=20) | json_values.map(json.dumps) | call_arguments | st.sampled_from(BROKEN)


def refuse(name: str) -> None:
    raise ValueError(name)


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in [*value, *value.values()]:
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(["clock", "echo", "find_tool", "call_tool"]) | st.text(max_size=5), any_arguments)
@example("call_tool", '{"name":"echo","arguments":"{\\"a\\":\\"\\\\u0000\\"}"}')
def test_any_call_has_an_answer_and_the_port_sees_clean_objects_for_its_own_tools(name: str, arguments: str) -> None:
    answer = dispatch(REGISTRY, name, arguments)
    assert dispatch(REGISTRY, name, arguments) == answer
    if isinstance(answer, Local):
        answer.text.encode("utf-8")
        assert "\x00" not in answer.text
        assert answer.text
        return
    assert (name, answer.tool) in {("clock", "clock"), ("call_tool", "echo")}
    value = json.loads(answer.arguments, parse_constant=refuse)
    assert isinstance(value, dict)
    for text in texts(value):
        text.encode("utf-8")
        assert "\x00" not in text


def test_a_registry_with_other_tools_offers_those() -> None:
    def registered(name: str, *, core: bool) -> RegisteredTool:
        return RegisteredTool(schema=ToolSchema(name=name, description="", parameters={}), core=core)

    registry = Registry([registered("mail", core=False), registered("weather", core=True)])
    assert dispatch(registry, "weather", "{}") == Port(tool="weather", arguments="{}")
    assert dispatch(registry, "call_tool", '{"name":"mail"}') == Port(tool="mail", arguments="{}")
    unknown = dispatch(registry, "clock", "{}")
    assert isinstance(unknown, Local)
    assert "weather, find_tool, call_tool" in unknown.text


def test_a_tool_without_a_result_is_answered_in_task_06s_words() -> None:
    assert tool_failed("no such city") == "The tool failed: no such city"
    assert call_denied("not at night") == "The call was denied: not at night"


# -- the cap ----------------------------------------------------------------------------------

CUT = Path(__file__).parents[2] / "fixtures" / "tools" / "cut"
EXPECTED: dict[str, dict[str, Any]] = json.loads((CUT / "expected.json").read_bytes())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_result_is_cut_at_the_last_whole_character_within_the_cap(name: str) -> None:
    expected = EXPECTED[name]
    raw = b"x" * 3_000_000 if name.startswith("f-") else (CUT / name).read_bytes()
    assert len(raw) == expected["bytes"]
    kept = raw[: expected["longest_allowed_prefix_bytes"]].decode("utf-8")
    assert cap_result(raw.decode("utf-8"), 16_384) == (
        kept + ("[truncated]" if expected["cut"] else ""),
        expected["cut"],
    )


def test_every_file_of_the_cap_is_tried() -> None:
    assert {file.name for file in CUT.glob("*.txt")} == {name for name in EXPECTED if not name.startswith("f-")}


@pytest.mark.parametrize(
    ("text", "cap_bytes", "kept", "cut"),
    [
        ("", 4, "", False),
        ("abcd", 4, "abcd", False),
        ("abcde", 4, "abcd[truncated]", True),
        ("ab€", 4, "ab[truncated]", True),
        ("a€", 4, "a€", False),
        ("€€", 4, "€[truncated]", True),
        ("😀", 4, "😀", False),
        ("😀", 3, "[truncated]", True),
        ("e\u0301e\u0301", 4, "e\u0301e[truncated]", True),
        ("\x00\x00", 4, "\ufffd[truncated]", True),
        ("\ud800x", 4, "\ufffdx", False),
        ("\ud83d\ude00", 4, "😀", False),
        ("\ude00\ud83d", 6, "\ufffd\ufffd", False),
    ],
)
def test_a_result_is_cleaned_and_then_cut(text: str, cap_bytes: int, kept: str, cut: bool) -> None:
    assert cap_result(text, cap_bytes) == (kept, cut)


def naive_cap(text: str, cap_bytes: int) -> tuple[str, bool]:
    """The cap as the design says it, one character after the other."""
    clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\x00", "\ufffd")
    kept, used = "", 0
    for char in clean:
        used += len(char.encode("utf-8"))
        if used > cap_bytes:
            return kept + "[truncated]", True
        kept += char
    return kept, False


@settings(deadline=None)
@given(
    st.text(st.characters(exclude_categories=()), max_size=30) | st.text("aé€😀\x00\ud83d\ude00", max_size=30),
    st.integers(1, 60),
)
def test_the_cap_agrees_with_a_naive_one(text: str, cap_bytes: int) -> None:
    assert cap_result(text, cap_bytes) == naive_cap(text, cap_bytes)
