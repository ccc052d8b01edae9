"""The model's side of a conversation: values that cannot change, and which of its events a channel gets."""

from __future__ import annotations

import inspect
from typing import get_args

import attrs
import pytest

from boxmaker.proto import channel, chat, records, tools
from boxmaker.proto.channel import TurnEvent
from boxmaker.proto.chat import ChatEvent, Content, ToolCallDelta
from boxmaker.proto.time import Timestamp

VALUES = [
    cls
    for module in (chat, records, tools, channel)
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if attrs.has(cls) and cls.__module__ == module.__name__
]


def test_a_channel_gets_every_event_of_a_completion_but_pieces_of_calls() -> None:
    of_completion, of_turn = set(get_args(ChatEvent)), set(get_args(TurnEvent))
    assert of_completion - of_turn == {ToolCallDelta}
    assert {cls.__name__ for cls in of_turn - of_completion} == {
        "ToolCallStarted", "ToolResult", "CacheLoss", "Cut", "Steered", "Context",
    }  # fmt: skip


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_a_value_is_frozen_and_takes_keywords_alone(cls: type[attrs.AttrsInstance]) -> None:
    fields = attrs.fields(cls)
    assert all(field.kw_only for field in fields)
    defaults = [field.name for field in fields if field.default is not attrs.NOTHING]
    later = {channel.Turn: ["when_busy"], channel.ToolResult: ["untrusted"]}
    assert defaults == later.get(cls, []), "a default is for a key that M2b does not know"
    made = cls(**{field.name.removeprefix("_"): "x" for field in fields})
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(made, fields[0].name if fields else "anything", "y")


def test_values_of_different_classes_are_never_equal() -> None:
    same: list[tuple[object, object]] = [
        (chat.User(content="a"), chat.System(content="a")),
        (Content(text="a"), chat.Reasoning(text="a")),
        (channel.CacheLoss(expected=1, got=0), records.CacheLoss(time=Timestamp("x"), expected=1, got=0)),
    ]
    assert not any(one == other for one, other in same)
    assert Content(text="a") == Content(text="a")
