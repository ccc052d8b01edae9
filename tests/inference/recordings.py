"""Raw responses of fixtures/http, split into status, headers and body, and what our decoders make of them.

A name without a prefix of the list below is a recording of a real server (llama-server b11434, SmolLM2-135M).
The others are inputs from public fault reports: `arguments_`, `bytes_`, `cut_call_`, `dialect_`, `drop_`,
`end_`, `foreign_`, `full_`, `ids_`, `names_`, `status_`, `thinking_`, `timings_`, `unclean_`, and `final`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import frozen
from hypothesis import HealthCheck, settings

from boxmaker.errors import InferenceError
from boxmaker.inference.completion import Completion, CompletionAssembler, error_of
from boxmaker.inference.sse import SseDecoder, SseEvent
from boxmaker.proto.chat import ChatEvent

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For every property: a slow machine is no fault."""

HTTP = Path(__file__).parents[2] / "fixtures" / "http"


@frozen(kw_only=True)
class Recording:
    """One response; `whole` is false when its chunked body stops short."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool


def load(name: str) -> Recording:
    """Read and split one fixture; a chunked body is joined."""
    head, _, body = (HTTP / f"{name}.http").read_bytes().partition(b"\r\n\r\n")
    status_line, *lines = head.decode("ascii").split("\r\n")
    headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    whole = True
    if headers.get("transfer-encoding") == "chunked":
        body, whole = _joined(body)
    return Recording(status=int(status_line.split(" ")[1]), headers=headers, body=body, whole=whole)


def _joined(rest: bytes) -> tuple[bytes, bool]:
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            return body, True
        body += rest[:count]
        rest = rest[count + 2 :]
    return body, False


NAMES = sorted(file.stem for file in HTTP.glob("*.http"))
STREAMS = [name for name in NAMES if load(name).status == 200]
REPLIES_WITH_CALLS = [
    name for name in STREAMS if b'"tool_calls":[{' in load(name).body and not name.startswith(("end_", "drop_"))
]


def refusal(name: str) -> InferenceError:
    """The error of a response whose status is not 200, as the client makes it."""
    recording = load(name)
    text = recording.body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return error_of(recording.status, value, recording.headers.get("retry-after"))


def cut(body: bytes, points: Iterable[int]) -> list[bytes]:
    """The body in pieces, cut at these offsets; a repeated one gives an empty piece."""
    edges = [0, *sorted(points), len(body)]
    return [body[start:end] for start, end in pairwise(edges)]


def in_steps(body: bytes, size: int) -> list[bytes]:
    """The body in pieces of one size."""
    return [body[start : start + size] for start in range(0, len(body), size)]


@frozen(kw_only=True)
class Decoded:
    """What the SSE decoder made of a body."""

    events: list[SseEvent]
    foreign: bytes | None
    error: InferenceError | None


def decode(pieces: Sequence[bytes], event_max_bytes: int = 1_000_000) -> Decoded:
    """Feed the SSE decoder; events before an error count."""
    decoder = SseDecoder(event_max_bytes)
    events: list[SseEvent] = []
    try:
        for piece in pieces:
            events += decoder.feed(piece)
        events += decoder.eof()
    except InferenceError as exc:
        return Decoded(events=events, foreign=decoder.foreign, error=exc)
    return Decoded(events=events, foreign=decoder.foreign, error=None)


@frozen(kw_only=True)
class Outcome:
    """What came of a stream: its events, and a completion or an error."""

    events: list[ChatEvent]
    completion: Completion | None
    error: InferenceError | None

    def reply(self) -> Completion:
        """The completion; there must be one."""
        assert self.completion is not None, self.error
        return self.completion

    def failure(self) -> InferenceError:
        """The error; there must be one."""
        assert self.error is not None, self.completion
        return self.error


def assemble(events: Iterable[SseEvent], *, thinking_cap: int = 4096, reply_max_bytes: int = 1_000_000) -> Outcome:
    """Feed the assembler as the client does; events before an error count."""
    assembler = CompletionAssembler(thinking_cap=thinking_cap, reply_max_bytes=reply_max_bytes)
    given: list[ChatEvent] = []
    try:
        for event in events:
            given += assembler.feed(event)
            if assembler.done or assembler.over_cap:
                break
        assembler.eof()
    except InferenceError as exc:
        return Outcome(events=given, completion=None, error=exc)
    return Outcome(events=given, completion=assembler.completion(), error=None)


def read(pieces: Sequence[bytes], *, thinking_cap: int = 4096, reply_max_bytes: int = 1_000_000) -> Outcome:
    """Both decoders, one after the other."""
    decoded = decode(pieces)
    assert decoded.error is None
    return assemble(decoded.events, thinking_cap=thinking_cap, reply_max_bytes=reply_max_bytes)


def read_fixture(name: str, *, thinking_cap: int = 4096) -> Outcome:
    """Both decoders on one fixture."""
    return read([load(name).body], thinking_cap=thinking_cap)


def chunk_event(chunk: Any) -> SseEvent:
    """One chunk of a stream, as the SSE decoder gives it."""
    return SseEvent("message", json.dumps(chunk))


def delta_event(finish_reason: str | None = None, **delta: Any) -> SseEvent:
    """One delta of a reply: `delta_event(content="Hi")`."""
    return chunk_event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def call_event(*pieces: dict[str, Any]) -> SseEvent:
    """One delta with pieces of calls."""
    return delta_event(tool_calls=list(pieces))


def piece(index: Any = 0, call_id: Any = None, name: Any = None, arguments: Any = None) -> dict[str, Any]:
    """One piece of a call, without the keys that are None."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"index": index, "function": function} if call_id is None else _with_id(index, call_id, function)


def _with_id(index: Any, call_id: Any, function: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "id": call_id, "type": "function", "function": function}


END = delta_event("stop")
DONE = SseEvent("message", "[DONE]")
