"""Frames: 4 bytes of big-endian length, then a JSON object in UTF-8; sans-IO.

Laws:
* The length is checked before it is believed; memory grows with bytes received, not promised.
* Any chunking of the same bytes gives the same frames or the same error.
* `v` is checked before `kind`, and `kind` before `body`.
"""

from __future__ import annotations

from collections.abc import Collection
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
from json.encoder import encode_basestring
from typing import Any, TypeAlias

from attrs import frozen

from boxmaker.errors import BadFrame, BadRequest, UnsupportedVersion, ValueRefused
from boxmaker.proto.channel import (
    FINAL_KIND,
    FINALS,
    REQUEST_KIND,
    REQUESTS,
    TURN_EVENTS,
    WIRE_ERROR,
    Final,
    Request,
    TurnEvent,
    WireError,
)
from boxmaker.proto.chat import Content, Reasoning
from boxmaker.proto.codec import SURROGATE, JsonObject, dumps, found, loads

LENGTH_BYTES = 4
VERSION = 1
REQUEST_KINDS = tuple(REQUESTS)
ANSWER_KINDS = ("turn_event", *FINALS, "error")
CLIENT_MAX_FRAME = 64 * 1024 * 1024
"""What a client accepts from loopd, in bytes."""

Answer: TypeAlias = TurnEvent | Final | WireError


class FrameDecoder:
    """Cut a byte stream into frame payloads of at most `max_frame` bytes each."""

    def __init__(self, max_frame: int) -> None:
        self._max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes."""
        self._buffer += data

    def next_payload(self) -> bytes | None:
        """Take the next whole payload out; None when it is not complete yet.

        Raises:
            BadFrame: a length of 0 or over the limit; the stream is of no more use.
        """
        if len(self._buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if not 1 <= length <= self._max_frame:
            raise BadFrame(problem=f"a frame of {length} bytes; allowed are 1 to {self._max_frame}")
        end = LENGTH_BYTES + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return payload

    @property
    def buffered_bytes(self) -> int:
        """How many bytes have not been taken out yet."""
        return len(self._buffer)


@frozen(kw_only=True)
class Envelope:
    """A frame whose version is known and whose body is an object not yet looked into."""

    kind: str
    final: bool
    body: JsonObject


def open_envelope(payload: bytes, kinds: Collection[str] | None = None) -> Envelope:
    """Read the outer object of a frame; `kinds` are those that the caller knows, None for any.

    Raises:
        BadFrame: not UTF-8, not JSON, not an object.
        UnsupportedVersion: `v` is absent or not the integer 1.
        BadRequest: an unknown kind; any other key is missing, unknown or of the wrong type.
    """
    try:
        value = loads(payload)
    except ValueRefused as exc:
        raise BadFrame(problem=f"the frame is {exc.problem}") from exc
    if type(value) is not dict:
        raise BadFrame(problem=f"the frame is {found(value)}, not an object")
    version = value.get("v")
    if type(version) is not int or version != VERSION:
        raise UnsupportedVersion(found=found(version) if "v" in value else "absent")
    for key, kind, name in (("kind", str, "text"), ("final", bool, "true or false"), ("body", dict, "an object")):
        if key not in value:
            raise BadRequest(path="$", problem=f"the key {key!r} is missing")
        if type(value[key]) is not kind:
            raise BadRequest(path=f"$.{key}", problem=f"expected {name}, found {found(value[key])}")
        if key == "kind" and kinds is not None and value[key] not in kinds:
            known = ", ".join(kinds)
            raise BadRequest(path="$.kind", problem=f"unknown kind {found(value[key])}; known here: {known}")
    unknown = set(value) - {"v", "kind", "final", "body"}
    if unknown:
        raise BadRequest(path="$", problem=f"unknown key {found(min(unknown))}")
    return Envelope(kind=value["kind"], final=value["final"], body=value["body"])


def decode_request(payload: bytes) -> Request:
    """Read what a channel asks for.

    Raises:
        BadFrame, UnsupportedVersion, BadRequest: as `open_envelope`, and BadRequest for a body that is
            not the kind's, user text with NUL or a lone surrogate among it.
    """
    envelope = open_envelope(payload, REQUEST_KINDS)
    if not envelope.final:
        raise BadRequest(path="$.final", problem="a request is its channel's only frame: final must be true")
    try:
        request: Request = REQUESTS[envelope.kind].from_object(envelope.body, "$.body")
    except ValueRefused as exc:
        raise BadRequest(path=exc.path, problem=exc.problem) from exc
    return request


def decode_answer(payload: bytes) -> Answer | None:
    """Read a frame of loopd; None for an event of a type that this client does not know.

    Raises:
        BadFrame, UnsupportedVersion, BadRequest: as `open_envelope`, and BadRequest for a `final` or a
            body that is not the kind's.
    """
    return answer_of(open_envelope(payload, ANSWER_KINDS))


def answer_of(envelope: Envelope) -> Answer | None:
    """Read the body of a frame of loopd, whose kind is one of ANSWER_KINDS; else as `decode_answer`."""
    body = envelope.body
    if envelope.final is (envelope.kind == "turn_event"):
        raise BadRequest(path="$.final", problem="all kinds but turn_event are final, turn_event is not")
    try:
        if envelope.kind == "turn_event":
            return _event(body)
        codec = WIRE_ERROR if envelope.kind == "error" else FINALS[envelope.kind]
        final: Final | WireError = codec.from_object(body, "$.body")
    except ValueRefused as exc:
        raise BadRequest(path=exc.path, problem=exc.problem) from exc
    return final


def _event(body: JsonObject) -> TurnEvent | None:
    if "event" not in body:
        raise ValueRefused(path="$.body", problem="the key 'event' is missing")
    if len(body) > 1:
        raise ValueRefused(path="$.body", problem=f"unknown key {found(min(set(body) - {'event'}))}")
    event = body["event"]
    tag = event.get("type") if type(event) is dict else None
    if type(tag) is str and tag not in TURN_EVENTS.tags:
        return None
    return TURN_EVENTS.from_object(event, "$.body.event")


def frame(payload: bytes) -> bytes:
    """Put the length in front of a payload."""
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def _frame(kind: str, final: bool, body: JsonObject) -> bytes:
    return frame(dumps({"v": VERSION, "kind": kind, "final": final, "body": body}).encode("utf-8"))


def encode_request(request: Request) -> bytes:
    """Write a request as one frame; raises ValueRefused for what loopd would refuse."""
    kind = REQUEST_KIND[type(request)]
    return _frame(kind, True, REQUESTS[kind].to_object(request))


_CONTENT = '{"v":1,"kind":"turn_event","final":false,"body":{"event":{"type":"content","text":'
_REASONING = '{"v":1,"kind":"turn_event","final":false,"body":{"event":{"type":"reasoning","text":'
_CONTENT_BYTES = _CONTENT.encode("utf-8")
_REASONING_BYTES = _REASONING.encode("utf-8")
_TAIL = "}}}"


def encode_answer(answer: Answer) -> bytes:
    """Write an event or a final answer as one frame; raises ValueRefused.

    The two events that come once a token have their text written by hand: the codec costs more
    than the rest of the token's way. A test holds both ways equal.
    """
    head = _CONTENT if type(answer) is Content else _REASONING if type(answer) is Reasoning else None
    if head is not None:
        text: Any = answer.text  # type: ignore[union-attr]  # one of the two, as head says
        if type(text) is not str or SURROGATE.search(text):
            raise ValueRefused(path="$.text", problem="expected text without lone surrogates")
        return frame((head + encode_basestring(text) + _TAIL).encode("utf-8"))
    if isinstance(answer, WireError):
        return _frame("error", True, WIRE_ERROR.to_object(answer))
    if isinstance(answer, Final):
        kind = FINAL_KIND[type(answer)]
        return _frame(kind, True, FINALS[kind].to_object(answer))
    return _frame("turn_event", False, {"event": TURN_EVENTS.to_object(answer)})


def text_event(payload: bytes) -> Content | Reasoning | None:
    """Read one of the two events that come once a token, if it is written as `encode_answer` writes it.

    None for any other payload, right or wrong: that is `decode_answer`'s. A test holds both ways equal.
    """
    if payload.startswith(_CONTENT_BYTES):
        kind: type[Content | Reasoning] = Content
        begin = len(_CONTENT)
    elif payload.startswith(_REASONING_BYTES):
        kind, begin = Reasoning, len(_REASONING)
    else:
        return None
    try:
        whole = payload.decode("utf-8")
        text, end = scanstring(whole, begin + 1)
    except ValueError:
        return None
    if whole[begin] != '"' or whole[end:] != _TAIL or SURROGATE.search(text):
        return None
    return kind(text=text)
