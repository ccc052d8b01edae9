"""The fixed texts: those with a part that varies, and that each text says whether the call ran."""

from __future__ import annotations

from boxmaker.tools import endings


def test_texts_with_a_part_that_varies() -> None:
    assert endings.unknown_tool("x", "clock, find_tool") == (
        "Unknown tool 'x'. The tools are clock, find_tool; find_tool finds more, call_tool calls them."
    )
    assert endings.unknown_to_call_tool("clock", core=True) == (
        "Unknown to call_tool: the tool 'clock' is called by its own name."
    )
    assert endings.unknown_to_call_tool("x", core=False) == (
        "Unknown tool 'x' for call_tool. find_tool with an empty query lists them all."
    )
    assert endings.bad_arguments("not an object") == "The arguments did not parse: not an object"
    assert endings.call_denied("no grant") == "The call was denied: no grant"


def test_no_two_reasons_have_the_same_text() -> None:
    texts = [text for name, text in vars(endings).items() if name.isupper()]
    assert len(texts) == len(set(texts)) == 12
