"""The saved corpus: each input holds all laws, is of the kind that its name says, and cannot fill memory."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import pytest

from boxmaker.errors import BadFrame, InferenceError
from boxmaker.inference.completion import CompletionAssembler
from boxmaker.inference.sse import SseDecoder, SseEvent
from boxmaker.proto.frames import FrameDecoder
from tests.fuzz import completion, frames
from tests.fuzz.sse import with_extensions
from tests.fuzz.target import CORPUS, MAX_INPUT_BYTES
from tests.fuzz.targets import TARGETS

SAVED = [(name, file) for name, target in TARGETS.items() for file in target.saved()]


def saved(name: str, file: str) -> bytes:
    return (CORPUS / name / file).read_bytes()


def of(name: str) -> list[str]:
    return [file for target, file in SAVED if target == name]


@pytest.mark.parametrize(("name", "file"), SAVED)
def test_a_saved_input_holds_the_laws_and_is_of_its_kind(name: str, file: str) -> None:
    assert TARGETS[name].check(saved(name, file)) == TARGETS[name].kind_of_file(file)


@pytest.mark.parametrize("name", TARGETS)
def test_what_there_was_already_holds_the_laws(name: str) -> None:
    seeds = TARGETS[name].seeds()
    assert len(seeds) > 10
    for raw in seeds:
        TARGETS[name].check(raw)


def test_every_file_of_the_corpus_belongs_to_a_target() -> None:
    files = {file.relative_to(CORPUS).as_posix() for file in CORPUS.rglob("*") if file.is_file()}
    assert files == {f"{name}/{file}" for name, file in SAVED}
    assert {name for name, _ in SAVED} == set(TARGETS)


def test_saved_inputs_differ_and_are_no_larger_than_those_that_are_made() -> None:
    for name in TARGETS:
        inputs = [saved(name, file) for file in of(name)]
        assert len(set(inputs)) == len(inputs)
        assert max(map(len, inputs)) <= MAX_INPUT_BYTES


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("frames", {"turn", "bad_frame", "bad_request", "unsupported_version", "ignored", "none-then-lies", "content"}),
        ("sse", {"message", "error-extended", "foreign-nothing", "message-over", "message-replaced", "nothing"}),
        ("completion", {"text", "call", "calls", "http", "broken", "empty", "text-length", "thinking-text-capped"}),
        ("records", {"user", "assistant", "usage", "tool_result", "session_start", "refused", "refused-value"}),
        ("config", {"config", "config-with-request", "not-toml", "not-utf8", "wrong-server", "socket-too-long"}),
    ],
)
def test_the_corpus_has_the_kinds_that_matter(name: str, kinds: set[str]) -> None:
    assert kinds <= {TARGETS[name].kind_of_file(file) for file in of(name)}


# -- memory: the same input again and again ------------------------------------------------------------

AGAIN = 300
ROOM = 60_000
"""What decoders may hold, in bytes: far over their limits here, far under AGAIN times an input that they refuse."""


def grown(feed: object, raw: bytes) -> int:
    """The bytes that are held after the input came AGAIN times, one byte apart from what is held before."""
    assert callable(feed)
    feed(raw)
    tracemalloc.start()
    try:
        for _ in range(AGAIN):
            feed(raw)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("file", of("frames"))
def test_a_frame_decoder_holds_one_frame_and_what_came_with_it(file: str) -> None:
    decoder = FrameDecoder(frames.LIMITS[0])

    def feed(raw: bytes) -> None:
        try:
            decoder.feed(raw)
            while decoder.next_payload() is not None:
                pass
        except BadFrame:
            decoder.__init__(frames.LIMITS[0])  # type: ignore[misc]  # a connection ends there; another one begins

    assert grown(feed, saved("frames", file)) < ROOM


@pytest.mark.parametrize("file", of("sse"))
def test_an_sse_decoder_holds_one_event(file: str) -> None:
    decoder = SseDecoder(1000)

    def feed(raw: bytes) -> None:
        if decoder.over is None:  # after that nobody feeds it
            with suppress(InferenceError):
                decoder.feed(raw)

    assert grown(feed, saved("sse", file)) < ROOM


@pytest.mark.parametrize("file", of("completion"))
def test_an_assembler_holds_one_reply(file: str) -> None:
    events = [SseEvent(name, data) for name, data in with_extensions(saved("completion", file), 10_000).events]
    endless = [event for event in events if event.data.strip() != "[DONE]" and '"finish_reason": "' not in event.data]
    assembler = CompletionAssembler(thinking_cap=completion.LIMITS[0][0], reply_max_bytes=2000)

    def feed(_: bytes) -> None:
        for event in endless:
            with suppress(InferenceError):
                assembler.feed(event)

    assert grown(feed, b"") < ROOM
