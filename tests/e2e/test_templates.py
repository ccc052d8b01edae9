"""The chat templates of `templates/`, rendered by the real server: a first turn is the family's own, later ones extend.

What a family's own template makes of a first turn is written here by hand, from its published format.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boxmaker.inference.families import FAMILIES
from tests.e2e.conftest import llama_server
from tests.embedded import EMBEDDED

pytestmark = EMBEDDED

TEMPLATES = Path(__file__).parents[2] / "templates"
TOOL = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
TOOL_JSON = (
    '{"type": "function", "function": {"name": "clock", "description": "Tells the time.", "parameters": '
    '{"type": "object", "properties": {"zone": {"type": "string"}}}}}'
)


def call(**arguments: Any) -> dict[str, Any]:
    return {
        "id": "call00001",
        "type": "function",
        "function": {"name": "clock", "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


FIRST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The time?"}]
IN_A_TOOL = [
    *FIRST,
    {"role": "assistant", "content": "Let me look.", "reasoning_content": "Two zones.",
     "tool_calls": [call(zone="UTC", n=1), call(zone="CET")]},
    {"role": "tool", "tool_call_id": "call00001", "content": "14:15"},
    {"role": "tool", "tool_call_id": "call00001", "content": "15:15"},
]  # fmt: skip
ONE_CALL = [
    *FIRST,
    {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [call(zone="UTC")]},
    {"role": "tool", "tool_call_id": "call00001", "content": "14:15"},
]

QWEN3_TOOLS = (
    "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    + TOOL_JSON
    + "\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\nThe time?<|im_end|>\n"
)
GLM_TOOLS = (
    "[gMASK]<sop><|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    + TOOL_JSON
    + "\n</tools>\n\n"
    "For each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
    "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
    "<|system|>\nBe brief.<|user|>\nThe time?"
)
QWEN3_CALL = '<tool_call>\n{"name": "clock", "arguments": '
GLM_CALL = "<tool_call>clock\n<arg_key>zone</arg_key>\n<arg_value>"

FIRST_TURNS: list[tuple[str, list[Any], bool, bool, str]] = [
    ("qwen3", FIRST, False, True,
     "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nThe time?<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen3", FIRST, True, True, QWEN3_TOOLS + "<|im_start|>assistant\n"),
    ("qwen3", FIRST, True, False, QWEN3_TOOLS + "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ("qwen3", IN_A_TOOL, True, True,
     QWEN3_TOOLS + "<|im_start|>assistant\n<think>\nTwo zones.\n</think>\n\nLet me look.\n" + QWEN3_CALL
     + '{"zone": "UTC", "n": 1}}\n</tool_call>\n' + QWEN3_CALL + '{"zone": "CET"}}\n</tool_call><|im_end|>\n'
     "<|im_start|>user\n<tool_response>\n14:15\n</tool_response>\n<tool_response>\n15:15\n</tool_response><|im_end|>\n"
     "<|im_start|>assistant\n"),
    ("qwen3", ONE_CALL, True, True,
     QWEN3_TOOLS + "<|im_start|>assistant\n<think>\nI look.\n</think>\n\n" + QWEN3_CALL
     + '{"zone": "UTC"}}\n</tool_call><|im_end|>\n'
     "<|im_start|>user\n<tool_response>\n14:15\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    ("glm-4.6", FIRST, False, True, "[gMASK]<sop><|system|>\nBe brief.<|user|>\nThe time?<|assistant|>"),
    ("glm-4.6", FIRST, True, True, GLM_TOOLS + "<|assistant|>"),
    ("glm-4.6", FIRST, True, False, GLM_TOOLS + "/nothink<|assistant|>\n<think></think>"),
    ("glm-4.6", IN_A_TOOL, True, True,
     GLM_TOOLS + "<|assistant|>\n<think>Two zones.</think>\nLet me look.\n" + GLM_CALL + "UTC</arg_value>\n"
     "<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n" + GLM_CALL + "CET</arg_value>\n</tool_call>"
     "<|observation|>\n<tool_response>\n14:15\n</tool_response>\n<tool_response>\n15:15\n</tool_response><|assistant|>"),
    ("glm-4.6", ONE_CALL, True, True,
     GLM_TOOLS + "<|assistant|>\n<think>I look.</think>\n" + GLM_CALL + "UTC</arg_value>\n</tool_call>"
     "<|observation|>\n<tool_response>\n14:15\n</tool_response><|assistant|>"),
]  # fmt: skip
"""Family, messages, with tools, with thinking, the family's own rendering."""


@frozen
class Renderer:
    """A server with one of our templates."""

    name: str
    client: httpx.Client

    def render(self, messages: list[Any], *, tools: bool, thinking: bool) -> str:
        body = {
            "messages": messages,
            "tools": [TOOL] if tools else [],
            "chat_template_kwargs": {"enable_thinking": thinking, "preserve_reasoning": True},
        }
        answer = self.client.post("/apply-template", json=body)
        assert answer.status_code == 200, answer.text
        prompt: str = answer.json()["prompt"]
        return prompt


@pytest.fixture(scope="module", params=sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def renderer(request: pytest.FixtureRequest) -> Iterator[Renderer]:
    with tempfile.TemporaryDirectory() as directory:
        with llama_server(Path(directory) / "log", str(TEMPLATES / f"{request.param}.jinja")) as url:
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
                yield Renderer(request.param, client)


def test_a_first_turn_is_the_familys_own(renderer: Renderer) -> None:
    tried = 0
    for family, messages, tools, thinking, expected in FIRST_TURNS:
        if family == renderer.name:
            assert renderer.render(messages, tools=tools, thinking=thinking) == expected
            tried += 1
    assert tried == 5


def test_the_server_of_a_template_alone_saves_no_slots(renderer: Renderer) -> None:
    """What it is given is one argument; the place for slots would be the second."""
    assert renderer.client.post("/slots/0?action=none", json={}).status_code == 501


# -- a longer conversation extends a shorter one, and what was answered to it ---------------------------


def said_by_qwen3(message: dict[str, Any], *, thinking: bool) -> str:
    """What the model generated for a message: the block that stands in the prompt is not generated."""
    text: str = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if message["reasoning_content"] else ""
    text += str(message["content"])
    for at, made in enumerate(message.get("tool_calls", [])):
        arguments = json.dumps(json.loads(made["function"]["arguments"]), ensure_ascii=False)
        text += "\n" if at or message["content"] else ""
        text += f'<tool_call>\n{{"name": "{made["function"]["name"]}", "arguments": {arguments}}}\n</tool_call>'
    return text + "<|im_end|>"


def said_by_glm(message: dict[str, Any], *, thinking: bool) -> str:
    """The same in GLM's form; the end token is the next message's first."""
    text = f"\n<think>{message['reasoning_content']}</think>" if thinking else ""
    text += f"\n{message['content']}" if message["content"] else ""
    for made in message.get("tool_calls", []):
        text += f"\n<tool_call>{made['function']['name']}\n"
        for key, value in json.loads(made["function"]["arguments"]).items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n"
        text += "</tool_call>"
    return text


SAID: dict[str, Callable[..., str]] = {"qwen3": said_by_qwen3, "glm-4.6": said_by_glm}

# As a model says it: the server's parser takes white space off the ends. Angle brackets would be markup to that parser.
WORDS = st.text(st.sampled_from("aZ é世🙂\n\"\\{}'0/&"), max_size=12).map(str.strip)
ARGUMENTS = st.dictionaries(st.sampled_from(["zone", "n", "ü"]), st.one_of(WORDS, st.integers(-9, 9), st.booleans()))


@st.composite
def turns(draw: st.DrawFn) -> tuple[bool, list[dict[str, Any]]]:
    """Some whole turns: a user's text, replies with calls and their results, a reply without."""
    thinking = draw(st.booleans())
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        for _ in range(draw(st.integers(0, 2))):
            made = [call(**draw(ARGUMENTS)) for _ in range(draw(st.integers(1, 2)))]
            reasoning = draw(WORDS) if thinking else ""
            reply = {"role": "assistant", "content": draw(WORDS), "reasoning_content": reasoning, "tool_calls": made}
            results = [{"role": "tool", "tool_call_id": "call00001", "content": draw(WORDS)} for _ in made]
            messages += [reply, *results]
        reasoning = draw(WORDS) if thinking else ""
        messages.append({"role": "assistant", "content": draw(WORDS), "reasoning_content": reasoning})
    return thinking, messages


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(drawn=turns())
def test_every_prompt_goes_on_with_the_one_before_and_its_reply(
    renderer: Renderer, drawn: tuple[bool, list[dict[str, Any]]]
) -> None:
    thinking, messages = drawn
    written = ""
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = renderer.render(messages[:at], tools=True, thinking=thinking)
            assert prompt.startswith(written)
            written = prompt + SAID[renderer.name](message, thinking=thinking)
    longer = [*messages, {"role": "user", "content": "And now?"}]
    assert renderer.render(longer, tools=True, thinking=thinking).startswith(written)


def test_every_family_has_its_template_and_every_template_its_family() -> None:
    assert {family.template for family in FAMILIES} == {path.name for path in TEMPLATES.glob("*.jinja")}
    assert {name for name, *_ in FIRST_TURNS} == set(SAID) == {path.stem for path in TEMPLATES.glob("*.jinja")}
