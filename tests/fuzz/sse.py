"""The SSE decoder against the standard, word for word, and against our extensions of it written a second time."""

from __future__ import annotations

import re

from attrs import frozen
from hypothesis import strategies as st

from boxmaker.errors import InferenceError
from boxmaker.inference.sse import SseDecoder, SseEvent
from tests.fuzz.target import MAX_INPUT_BYTES, Target, assert_sayable, chunkings
from tests.inference.recordings import NAMES, load

LIMITS = (1_000_000, 40)
BOM = b"\xef\xbb\xbf"


@frozen
class Read:
    """What comes of a body: events, the body when it is no stream, and whether an event was over the limit."""

    events: list[tuple[str, str]]
    foreign: bytes | None
    over: bool


def by_the_standard(body: bytes) -> list[tuple[str, str]]:
    """WHATWG HTML 9.2.6 on the whole text: decode, parse lines, dispatch; what the end cuts off is dropped."""
    stream = body.decode("utf-8", "replace").removeprefix("\ufeff")
    events = []
    data_buffer, event_type = "", ""
    for line in re.split("\r\n|\n|\r", stream)[:-1]:
        if line == "":
            if data_buffer == "":
                event_type = ""
                continue
            events.append((event_type or "message", data_buffer.removesuffix("\n")))
            data_buffer, event_type = "", ""
            continue
        if line.startswith(":"):
            continue
        field, colon, value = line.partition(":")
        if colon and value.startswith(" "):
            value = value[1:]
        if field == "event":
            event_type = value
        elif field == "data":
            data_buffer += value + "\n"
    return events


def with_extensions(body: bytes, limit: int) -> Read:
    """The standard, and what `inference/sse.py` adds to it, on the whole body at once, in bytes."""
    rest = body[len(BOM) :] if body[:3] == BOM else body
    while rest[:1] in (b" ", b"\t", b"\r", b"\n"):
        rest = rest[1:]
    if rest[:1] in (b"{", b"[", b"<"):
        return Read([], rest[:limit], False)
    events: list[tuple[str, str]] = []
    name = "message"
    data: list[bytes] = []
    lines = re.split(rb"\r\n|\n|\r", rest)
    for line in [*lines, b""]:  # the end of the body ends the last line and the last event
        if len(line) > limit:
            return Read(events, None, True)
        if line == b"":
            if data:
                events.append((name, b"\n".join(data).decode("utf-8", "replace")))
            name, data = "message", []
            continue
        field, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if line[:1] == b"{":
            data.append(line)
        elif field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace") or "message"
        elif field == b"error":
            events.append(("error", value.decode("utf-8", "replace")))
        if len(b"\n".join(data)) > limit:
            return Read(events, None, True)
    return Read(events, None, False)


def decoded(pieces: list[bytes], limit: int) -> Read:
    """The same of our decoder, used as the client uses it."""
    decoder = SseDecoder(limit)
    events: list[SseEvent] = []
    over = False
    try:
        for piece in pieces:
            events += decoder.feed(piece)
        events += decoder.eof()
    except InferenceError as exc:
        over = is_over(exc, decoder)
    assert over is (decoder.over is not None)
    assert decoder.full is (decoder.foreign is not None and len(decoder.foreign) == limit)
    return Read([(event.name, event.data) for event in events], decoder.foreign, over)


def is_over(error: InferenceError, decoder: SseDecoder) -> bool:
    assert (error.kind, error.limit) == ("limit", "event_max_bytes")
    assert_sayable(str(error))
    return error is decoder.over


def is_standard(body: bytes) -> bool:
    """Is there nothing in the body that our extensions are about?"""
    rest = body.removeprefix(BOM)
    lines = re.split(rb"\r\n|\n|\r", rest)
    return (
        rest.lstrip(b" \t\r\n") == rest.lstrip(b"\r\n")
        and not any(line.startswith(b"{") or line.partition(b":")[0] == b"error" for line in lines)
        and not rest.lstrip(b"\r\n").startswith((b"[", b"<"))
    )


def check(raw: bytes) -> str:
    for limit in LIMITS:
        expected = with_extensions(raw, limit)
        for pieces in chunkings(raw):
            assert decoded(pieces, limit) == expected
    expected = with_extensions(raw, LIMITS[0])
    standard = is_standard(raw)
    if standard:
        ended = raw + b"\n\n"
        assert by_the_standard(ended) == decoded([ended], LIMITS[0]).events
    names = {name if name in ("message", "error") else "named" for name, _ in expected.events}
    joined = "".join(data for _, data in expected.events)
    return "-".join([
        *(["foreign"] if expected.foreign is not None else []),
        *(sorted(names) or ["nothing"]),
        *(["lines"] if "\n" in joined else []),
        *(["replaced"] if "\ufffd" in joined else []),
        *([] if standard or expected.foreign is not None else ["extended"]),
        *(["over"] if with_extensions(raw, LIMITS[1]).over else []),
    ])  # fmt: skip


def seeds() -> list[bytes]:
    """The bodies of all recorded and reported responses."""
    return [body for name in NAMES if len(body := load(name).body) <= MAX_INPUT_BYTES]


TOKENS = (
    b"data: ", b"data:", b"data", b"data:  ", b"data :", b"Data: ", b"event: ", b"event:", b"event: error", b"event",
    b"event: ping", b"error: ", b"error", b"error:", b"id: 1", b"retry: 3", b": ping", b":", b"{", b"[", b"<", b"}",
    b"[DONE]", b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r", b" ", b"\t", BOM, BOM[:1], BOM[:2],
    b"\xff", b"\xc3", b"\xa9", b"\xe2\x80\xa8", b"\xe2\x80", b"\xf0\x9f\x99\x82", b"\xf0\x9f", b"\xed\xa0\x80", BOM[1:],
    b"\xc0\xaf",
    b"\xc2\x85", b"\x0b", b"\x0c", b"\x1c", b"\x00", b"x", b"x" * 41, b"data: " + b"y" * 34 + b"\n", b"data\n" * 45,
)  # fmt: skip
words = (
    st.sampled_from(TOKENS) | st.binary(max_size=4) | st.text(max_size=4).map(lambda t: t.encode("utf-8", "replace"))
)
line = st.builds(
    lambda name, colon, rest, end: name + colon + rest + end,
    st.sampled_from([b"data", b"data", b"data", b"event", b"error", b"id", b"", b"{", b" data"]),
    st.sampled_from([b":", b": ", b"", b":  "]),
    words,
    st.sampled_from([b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n"]),
)

TARGET = Target(
    name="sse",
    suffix=".sse",
    check=check,
    seeds=seeds,
    tokens=TOKENS,
    grammar=st.builds(
        lambda head, body: head + b"".join(body),
        st.sampled_from([b"", b"", BOM, BOM + b"\n", b"\n", b" ", BOM + BOM, BOM[:2]]),
        st.lists(line | words, max_size=14),
    ),
)
