"""Which prefix-stable template of ours is for a model's family, by the chat template that the server has; pure.

Only families whose own template erases reasoning at the next user message, and has no flag to keep it, need one.
The templates themselves are in `templates/` of the source: the owner gives one to llama-server.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class Family:
    """A family, the file of our template for it, and texts that its own template has and no other family's.

    `enable_thinking` tells Qwen3 from its relatives that always think: their prompt opens `<think>`, ours does not.
    """

    name: str
    template: str
    marks: tuple[str, ...]


FAMILIES = (
    Family(name="Qwen3", template="qwen3.jinja", marks=("<|im_start|>", "enable_thinking", "<args-json-object>")),
    Family(name="GLM-4.5/4.6", template="glm-4.6.jinja", marks=("[gMASK]<sop>", "enable_thinking", "<arg_key>")),
)


def family_of(chat_template: object) -> Family | None:
    """The family that a chat template is of; None when we have nothing for it."""
    if isinstance(chat_template, str):
        for family in FAMILIES:
            if all(mark in chat_template for mark in family.marks):
                return family
    return None


def heeds_preserve_reasoning(props: dict[str, Any]) -> bool:
    """Does the template keep reasoning when it is told to, by `/props`?"""
    caps = props.get("chat_template_caps")
    return isinstance(caps, dict) and caps.get("supports_preserve_reasoning") is True
