"""The registry: the three core schemas, and what find_tool answers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boxmaker.proto.chat import ToolSchema
from boxmaker.session.baseline import Baseline, encode_baseline
from boxmaker.tools.fake import fake_registry
from boxmaker.tools.registry import RegisteredTool, Registry

NONE = "No tool matches."


def tool(name: str, description: str = "", *, core: bool = False) -> RegisteredTool:
    schema = ToolSchema(name=name, description=description, parameters={"type": "object"})
    return RegisteredTool(schema=schema, core=core)


REGISTRY = Registry([
    tool("Weather", "Sunshine in a city."),
    tool("clock", "The time in a city.", core=True),
    tool("mail.send", "Sends a Größe 😀 \"mail\"\nto .* somebody."),
])  # fmt: skip
WEATHER = '{"name":"Weather","description":"Sunshine in a city.","parameters":{"type":"object"}}'
MAIL = (
    '{"name":"mail.send","description":"Sends a Größe 😀 \\"mail\\"\\nto .* somebody.","parameters":{"type":"object"}}'
)


def found(*schemas: str) -> str:
    return f"[{','.join(schemas)}]\nCall it with call_tool."


# -- the core ---------------------------------------------------------------------------------


def test_the_core_is_exactly_these_three_in_this_order() -> None:
    registry = fake_registry()
    assert [schema.name for schema in registry.core_schemas()] == ["clock", "find_tool", "call_tool"]
    assert registry.core_names() == ("clock", "find_tool", "call_tool")


def test_the_core_schemas_say_what_the_calls_take() -> None:
    clock, find_tool, call_tool = fake_registry().core_schemas()
    assert clock.parameters == {"type": "object", "properties": {}}
    for schema, types in ((find_tool, {"query": "string"}), (call_tool, {"name": "string", "arguments": "object"})):
        assert schema.parameters["type"] == "object"
        assert {key: value["type"] for key, value in schema.parameters["properties"].items()} == types
        assert schema.parameters["required"] == list(types)
        assert schema.description
    assert "find_tool" in call_tool.description


def test_the_core_schemas_are_the_same_each_time() -> None:
    """They are in the baseline, whose bytes are the beginning of every prompt."""
    made = [encode_baseline(Baseline(system="", tools=fake_registry().core_schemas())) for _ in "ab"]
    assert made[0] == made[1]


def test_a_tool_is_core_or_callable_or_neither() -> None:
    registry = fake_registry()
    names = ["clock", "echo", "find_tool", "call_tool", "Clock", "", "other"]
    assert [name for name in names if registry.is_core(name)] == ["clock"]
    assert [name for name in names if registry.is_callable(name)] == ["echo"]


# -- find -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("", found(WEATHER, MAIL)),
        ("weather", found(WEATHER)),
        ("WEATHER", found(WEATHER)),
        ("eath", found(WEATHER)),
        ("sunshine", found(WEATHER)),
        ("in a City.", found(WEATHER)),
        ("mail.s", found(MAIL)),
        ("GRÖSSE", found(MAIL)),
        ("größe 😀", found(MAIL)),
        (".*", found(MAIL)),
        ("s", found(WEATHER, MAIL)),
        ("mailXsend", NONE),
        ("clock", NONE),
        ("find_tool", NONE),
        ("weather city", NONE),
        ("nothing like it", NONE),
    ],
)
def test_find_gives_the_schemas_whose_name_or_description_holds_the_query(query: str, answer: str) -> None:
    assert REGISTRY.find(query) == answer


def test_a_registry_without_other_tools_finds_none() -> None:
    assert Registry([tool("clock", core=True)]).find("") == NONE
    assert Registry([]).find("") == NONE


def test_the_fakes_echo_can_be_found() -> None:
    answer = fake_registry().find("ECHO")
    schemas, _, rest = answer.rpartition("\n")
    assert rest == "Call it with call_tool."
    [schema] = json.loads(schemas)
    assert list(schema) == ["name", "description", "parameters"]
    assert schema["name"] == "echo"
    assert schema["parameters"]["required"] == ["text"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3), st.booleans()), max_size=4), st.text(max_size=2))
def test_find_agrees_with_a_search_written_out(tools: list[tuple[str, str, bool]], query: str) -> None:
    tools = list({name: (name, description, core) for name, description, core in tools}.values())
    expected = []
    for name, description, core in tools:
        texts = [name.casefold(), description.casefold()]
        if not core and any(query.casefold() in text for text in texts):
            expected.append({"name": name, "description": description, "parameters": {"type": "object"}})
    answer = Registry([tool(*texts, core=core) for *texts, core in tools]).find(query)
    if expected:
        assert answer == json.dumps(expected, ensure_ascii=False, separators=(",", ":")) + "\nCall it with call_tool."
    else:
        assert answer == NONE
