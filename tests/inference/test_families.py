"""Which template of ours is for a server's: known families, their relatives, and anything."""

from __future__ import annotations

from typing import Any

import pytest

from boxmaker.inference.families import family_of, heeds_preserve_reasoning

QWEN3 = (
    """{%- if enable_thinking is false %}<|im_start|>assistant {"arguments": <args-json-object>} <think>{% endif %}"""
)
GLM = """[gMASK]<sop><|system|>{{ enable_thinking }}<arg_key>{arg-key-1}</arg_key><think></think>"""


@pytest.mark.parametrize(
    ("chat_template", "name"),
    [
        (QWEN3, "Qwen3"),
        (GLM, "GLM-4.5/4.6"),
        (QWEN3.replace("enable_thinking", ""), None),  # QwQ and the 2507 thinking models open <think> in the prompt
        (QWEN3.replace("<args-json-object>", "<function=name>"), None),  # Qwen3.5 and Qwen3-Coder have other calls
        (GLM.replace("[gMASK]<sop>", ""), None),
        ("", None),
        (None, None),
        (5, None),
    ],
)
def test_a_family_is_known_by_what_no_other_has(chat_template: object, name: str | None) -> None:
    family = family_of(chat_template)
    assert (family.name if family is not None else None) == name


@pytest.mark.parametrize(
    ("props", "heeds"),
    [
        ({"chat_template_caps": {"supports_preserve_reasoning": True}}, True),
        ({"chat_template_caps": {"supports_preserve_reasoning": False}}, False),
        ({"chat_template_caps": {"supports_preserve_reasoning": 1}}, False),
        ({"chat_template_caps": []}, False),
        ({}, False),
    ],
)
def test_what_heeds_preserve_reasoning_says_so(props: dict[str, Any], heeds: bool) -> None:
    assert heeds_preserve_reasoning(props) is heeds
