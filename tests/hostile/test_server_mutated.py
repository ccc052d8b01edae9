"""Recordings with bytes deleted, doubled, flipped and spliced: whatever comes of them, the session holds."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from boxmaker.proto.channel import TurnDone
from boxmaker.testing.server import Hang, Send, Step
from tests.hostile.server_world import HTTP, Aftermath, endure, recorded
from tests.inference.recordings import unhurried

RAW = {file.stem: file.read_bytes() for file in sorted(HTTP.glob("*.http"))}
EXAMPLES = max(settings.default.max_examples // 3, 5) if settings.default else 30
"""A whole daemon each: fewer than a property of one function has."""
FINAL = recorded("final")
TRIES_AND_ROUNDS = 20
"""More than a turn can ask for: eight rounds of calls, each of a reply that was tried again."""

places = st.floats(0, 1, exclude_max=True)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A recording after one to five small faults."""
    raw = draw(st.sampled_from(sorted(RAW.values())))
    for _ in range(draw(st.integers(1, 5))):
        at = int(draw(places) * (len(raw) + 1))
        to = min(len(raw), at + draw(st.sampled_from([1, 2, 7, 40, 300])))
        match draw(st.sampled_from(["delete", "double", "flip", "splice", "insert", "cut"])):
            case "delete":
                raw = raw[:at] + raw[to:]
            case "double":
                raw = raw[:to] + raw[at:]
            case "flip" if at < len(raw):
                raw = raw[:at] + bytes([raw[at] ^ (1 << draw(st.integers(0, 7)))]) + raw[at + 1 :]
            case "splice":
                other = draw(st.sampled_from(sorted(RAW.values())))
                raw = raw[:at] + other[int(draw(places) * (len(other) + 1)) :]
            case "insert":
                raw = raw[:at] + draw(st.sampled_from(INSERTED) | st.binary(max_size=4)) + raw[at:]
            case "cut":
                raw = raw[:at]
    return raw


INSERTED = [
    b"\n\n",
    b"\r",
    b"data: ",
    b"data: [DONE]\n\n",
    b'data: {"error":{"code":400,"message":"x"}}\n\n',
    b'{"choices":[{"delta":{"content":[]}}]}',
    b'"index":1,',
    b'"finish_reason":"stop",',
    b"\xef\xbb\xbf",
    b"\x00",
    b"\\ud800",
    b"null",
    b"-1e999",
    b"NaN",
    b"[" * 60,
]


def run(*scripts: bytes | list[Step]) -> Aftermath:
    with tempfile.TemporaryDirectory() as directory:
        turn = partial(endure, Path(directory), *scripts, may_be_empty=True)
        return trio.run(turn, clock=MockClock(autojump_threshold=0))


@given(raw=mutated(), hangs=st.booleans())
@settings(unhurried, max_examples=EXAMPLES)
def test_a_mutated_recording_leaves_a_session_that_works(raw: bytes, hangs: bool) -> None:
    after = run([Send(raw), *([Hang()] if hangs else [])], *[FINAL] * TRIES_AND_ROUNDS)
    assert after.asked <= TRIES_AND_ROUNDS


# with chunks, where HTTP itself says that the end is missing, and without, where only we can tell
CHUNKED = ("plain_usage_progress", "utf8", "reasoning", "parallel_calls", "dialect_odd_chunks", "drop_after_text")
UNCHUNKED = ("final", "bytes_split_in_characters", "ids_no_id", "dialect_crlf", "thinking_reasoning_key")
WHOLE = {name: RAW[name] for name in (*CHUNKED, *UNCHUNKED)}


@given(name=st.sampled_from(sorted(WHOLE)), at=st.integers(0, 999), between=st.booleans(), hangs=st.booleans())
@settings(unhurried, max_examples=EXAMPLES)
def test_a_recording_that_stops_before_its_end_is_never_an_answer(
    name: str, at: int, between: bool, hangs: bool
) -> None:
    """Cut anywhere, or between two events: nothing but the missing end tells of that."""
    raw = WHOLE[name]
    ends = [place for word in (b'"finish_reason":"', b"[DONE]") if (place := raw.find(word)) >= 0]
    cut = raw[: at * min([*ends, len(raw)]) // 1000]
    if between:
        cut = cut[: cut.rfind(b"\n\n") + 2]
    after = run([Send(cut), *([Hang()] if hangs else [])], FINAL)
    if isinstance(after.final, TurnDone):
        assert (after.final.content, after.asked) == ("Done.", 2)
    assert after.results == [], "no call of it runs"
    assert [said.content for said in after.said] in ([], ["Done."])
