"""Record sequences as our writer makes them, for properties of this package."""

from __future__ import annotations

from hypothesis import strategies as st

from boxmaker.proto.chat import ToolCall
from boxmaker.proto.records import Assistant, CacheLoss, LogRecord, ToolResult, Usage, User
from boxmaker.proto.time import Timestamp

T = Timestamp("2026-11-30T14:15:30.123Z")

texts = st.text(max_size=12) | st.sampled_from(["", "\n\n", "x\n", "\u2028", '"\\', "\x00", "😀"])
ids = st.sampled_from(["a", "b", "", " ", "c00000001", "c00000002"]) | st.text(max_size=3)
names = st.sampled_from(["clock", "echo", " clock\n", ""])
arguments = st.sampled_from(["", " ", "{}", '{"q":"ä"}', "{", "null", "[1]", '{"a":NaN}', "{} {}", '{"a":"\\ud800"}'])
calls = st.builds(ToolCall, id=ids, name=names, arguments=arguments | texts)
figures = st.none() | st.integers(0, 5000)


@st.composite
def writer_records(draw: st.DrawFn) -> list[LogRecord]:
    """What turns append after session_start: whole, failed, cancelled or killed, in any number."""
    records: list[LogRecord] = []
    number = 0
    for _ in range(draw(st.integers(0, 4))):
        records.append(User(time=T, content=draw(texts)))
        for _ in range(draw(st.integers(0, 3))):
            wanted = tuple(draw(st.lists(calls, max_size=3)))
            records.append(
                Assistant(
                    time=T,
                    content=draw(st.none() | texts),
                    reasoning_content=draw(st.none() | texts),
                    tool_calls=wanted,
                )
            )
            if draw(st.integers(0, 5)):  # else a crash between the lines of one append
                records.append(
                    Usage(
                        time=T,
                        cache_n=draw(figures),
                        prompt_n=draw(figures),
                        predicted_n=draw(figures),
                        reasoning_tokens=draw(st.integers(0, 9)),
                        thinking_capped=draw(st.booleans()),
                    )
                )
                if draw(st.booleans()):
                    records.append(CacheLoss(time=T, expected=9, got=draw(st.integers(0, 8))))
            for call in wanted:
                records.append(
                    ToolResult(
                        time=T,
                        call=number,
                        tool_call_id=call.id,
                        content=draw(texts),
                        class_=draw(st.sampled_from(["public", "private", "secret"])),
                        untrusted=draw(st.booleans()),
                        truncated=draw(st.booleans()),
                    )
                )
                number += 1
            if not wanted:
                break
    if draw(st.booleans()):  # a kill -9 between two appends
        del records[draw(st.integers(0, len(records))) :]
    return records
