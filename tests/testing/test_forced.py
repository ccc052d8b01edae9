"""The forced server: what it cuts replies into, and that the real server says what it is told to."""

from __future__ import annotations

import pytest

from boxmaker.testing.forced import ForcedReply, segments


def parts(reply: ForcedReply) -> list[tuple[str, str | None]]:
    """Each part's text and kind."""
    text, found = segments(reply)
    begin = 0
    cut = []
    for part in found:
        cut.append((text[begin : part.end], part.kind))
        begin = part.end
    assert begin == len(text)
    return cut


def test_a_plain_reply_is_content() -> None:
    assert parts(ForcedReply(content="Hi.")) == [("Hi.", "content")]
    assert parts(ForcedReply()) == []


def test_reasoning_stands_between_its_tags() -> None:
    assert parts(ForcedReply(content="Hi.", reasoning="Hm.")) == [
        ("<think>\n", None),
        ("Hm.\n", "reasoning_content"),
        ("</think>\n\n", None),
        ("Hi.", "content"),
    ]


@pytest.mark.parametrize(("content", "shown"), [("", []), ("Look.", [("Look.\n", "content")])])
def test_calls_follow_the_content_with_a_line_end_between(content: str, shown: list[tuple[str, str | None]]) -> None:
    reply = ForcedReply(content=content, calls=[("clock", {}), ("echo", {"text": "a"})])
    assert parts(reply) == [
        *shown,
        ('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>', None),
        ('\n<tool_call>\n{"name": "echo", "arguments": {"text": "a"}}\n</tool_call>', None),
    ]
    assert [part.call for part in segments(reply)[1] if part.call] == [("clock", "{}"), ("echo", '{"text": "a"}')]
