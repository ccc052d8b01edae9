"""The frame decoder, and what is read from a frame, against `struct`, `json` and the tables of `docs/protocol.md`."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from typing import Any

import attrs
from hypothesis import strategies as st

from boxmaker.errors import BadFrame, BadRequest, UnsupportedVersion, WireableError
from boxmaker.proto.channel import WireError, wire_error
from boxmaker.proto.frames import FrameDecoder, decode_answer, decode_request, encode_answer, encode_request
from tests.fuzz.target import (
    FIXTURES,
    JSON_TOKENS,
    UNSURE_DEPTH,
    Target,
    assert_sayable,
    chunkings,
    deepest,
    exact,
    has_surrogate,
    strict_json,
)

LIMITS = (4096, 60)
ERRORS = {BadFrame: "bad_frame", BadRequest: "bad_request", UnsupportedVersion: "unsupported_version"}

# -- bytes to payloads, independently ----------------------------------------------------------------


def payloads_of(raw: bytes, limit: int) -> tuple[list[bytes], int | None, int]:
    """The payloads, the length that ends the stream with an error, and how many bytes are left over."""
    payloads: list[bytes] = []
    at = 0
    while len(raw) - at >= 4:
        (length,) = struct.unpack_from(">I", raw, at)
        if length == 0 or length > limit:
            return payloads, length, len(raw) - at
        if len(raw) - at - 4 < length:
            break
        payloads.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    return payloads, None, len(raw) - at


def decoded(pieces: list[bytes], limit: int) -> tuple[list[bytes], int | None, int]:
    """The same of the decoder, used as a connection uses it."""
    decoder = FrameDecoder(limit)
    payloads: list[bytes] = []
    for piece in pieces:
        decoder.feed(piece)
        try:
            while (payload := decoder.next_payload()) is not None:
                payloads.append(payload)
        except BadFrame as exc:
            return payloads, told_length(exc, limit), decoder.buffered_bytes
    return payloads, None, decoder.buffered_bytes


def told_length(error: BadFrame, limit: int) -> int:
    told = re.fullmatch(rf"a frame of (\d+) bytes; allowed are 1 to {limit}", str(error))
    assert told, error
    return int(told[1])


# -- what a payload says, independently --------------------------------------------------------------

Judge = Callable[[Any], bool]


def text(value: Any) -> bool:
    return type(value) is str and not has_surrogate(value)


def flag(value: Any) -> bool:
    return type(value) is bool


def count(value: Any) -> bool:
    return type(value) is int and value >= 0


def positive(value: Any) -> bool:
    return type(value) is int and value >= 1


def figure(value: Any) -> bool:
    return value is None or count(value)


def one_of(*words: str) -> Judge:
    return lambda value: type(value) is str and value in words


def fields(**judges: Judge) -> Judge:
    """An object with exactly these keys; a trailing `_` is not part of the name; those with a default are optional."""
    named = {key.removesuffix("_"): judge for key, judge in judges.items()}

    def check(value: Any) -> bool:
        if type(value) is not dict or not set(named) - {"when_busy", "untrusted"} <= set(value) <= set(named):
            return False
        return all(named[key](value[key]) for key in value)

    return check


def array_of(judge: Judge) -> Judge:
    return lambda value: type(value) is list and all(map(judge, value))


def session_id(value: Any) -> bool:
    return type(value) is str and bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value))


def user_text(value: Any) -> bool:
    return text(value) and "\0" not in value


def or_null(judge: Judge) -> Judge:
    return lambda value: value is None or judge(value)


REQUESTS: dict[str, Judge] = {
    "turn": fields(session=session_id, content=user_text, resume=flag, when_busy=one_of("refuse", "wait", "replace")),
    "steer": fields(session=session_id, content=user_text),
    "cancel": fields(session=session_id, cause=one_of("owner")),
    "fork": fields(session=session_id, from_=or_null(positive), new=session_id),
    "status": fields(),
}
EVENTS: dict[str, Judge] = {
    "queued": fields(ahead=positive),
    "waiting": fields(slot_busy=flag),
    "progress": fields(total=count, cache=count, processed=count),
    "reasoning": fields(text=text),
    "content": fields(text=text),
    "tool_call_started": fields(name=text),
    "tool_result": fields(name=text, class_=one_of("public", "private", "secret"), truncated=flag, untrusted=flag),
    "thinking_capped": fields(tokens=count),
    "retrying": fields(attempt=positive, after_ms=count, error=text),
    "cache_loss": fields(expected=count, got=count),
    "cut": fields(reason=one_of("length", "thinking_cap")),
    "steered": fields(content=user_text),
    "context": fields(used=count, n_ctx=positive),
}
FINALS: dict[str, Judge] = {
    "turn_done": fields(
        content=text,
        usage=fields(cache_n=figure, prompt_n=figure, predicted_n=figure, reasoning_tokens=count, thinking_capped=flag),
    ),
    "steered": fields(),
    "cancel_done": fields(
        ending=text,
        cause=or_null(one_of("owner", "replaced", "disconnect", "stalled_channel", "shutdown")),
        slot_free=flag,
    ),
    "fork_done": fields(session=session_id, from_=positive),
    "status_done": fields(
        version=text,
        pid=count,
        server=fields(url=text, state=one_of("ready", "loading", "unreachable")),
        slots=array_of(fields(id=count, busy=flag, ours=flag)),
        sessions=array_of(
            fields(
                session=session_id,
                phase=one_of("starting", "waiting", "model", "tools", "ending"),
                age_ms=count,
                waiting=count,
            )
        ),
    ),
}
ERROR = fields(
    code=one_of(
        "bad_frame", "bad_request", "unsupported_version", "internal", "shutting_down", "storage", "session_damaged",
        "session_full", "turn_limit", "session_busy", "no_such_session", "session_exists", "inference",
        "cancelled", "no_turn",
    ),
    message=text,
    detail=lambda value: type(value) is dict and not has_surrogate(value),
)  # fmt: skip


def opened(payload: bytes) -> tuple[str, Any]:
    """An error code, or "" and the object, as far as the version."""
    try:
        value = strict_json(payload.decode("utf-8"))
    except (ValueError, RecursionError):
        return "bad_frame", None
    if type(value) is not dict:
        return "bad_frame", None
    if type(value.get("v")) is not int or value["v"] != 1:
        return "unsupported_version", None
    if set(value) != {"v", "kind", "final", "body"} or type(value["body"]) is not dict:
        return "bad_request", None
    return "", value


def request_of(payload: bytes) -> tuple[str, Any]:
    """An error code, or the kind and the body."""
    code, value = opened(payload)
    if code:
        return code, None
    kind, final, body = value["kind"], value["final"], value["body"]
    if type(kind) is str and kind in REQUESTS and final is True and REQUESTS[kind](body):
        return kind, ({"when_busy": "refuse", **body} if kind == "turn" else body)
    return "bad_request", None


def answer_of(payload: bytes) -> tuple[str, Any]:
    """An error code, or the kind (for an event, its type; `ignored` for one that nobody knows) and what it holds."""
    code, value = opened(payload)
    if code:
        return code, None
    kind, final, body = value["kind"], value["final"], value["body"]
    if type(kind) is str and kind in FINALS and final is True and FINALS[kind](body):
        return kind, body
    if kind == "error" and final is True and ERROR(body):
        return "error", body
    if kind == "turn_event" and final is False and set(body) == {"event"} and type(body["event"]) is dict:
        event = dict(body["event"])
        name = event.pop("type", None)
        if type(name) is str and name not in EVENTS:
            return "ignored", None
        if type(name) is str and EVENTS[name](event):
            return name, ({"untrusted": False, **event} if name == "tool_result" else event)
    return "bad_request", None


# -- the check ---------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A decoded value as the JSON object that it stands for."""
    return {key.removesuffix("_"): inner for key, inner in attrs.asdict(value).items()}


def outcome(decode: Callable[[bytes], Any], payload: bytes) -> tuple[str, Any]:
    """An error code and None, or "" and the value."""
    try:
        return "", decode(payload)
    except WireableError as exc:
        return refused(exc), None


def refused(error: WireableError) -> str:
    """The code of an error; it can be told to the channel."""
    assert type(error) in ERRORS, error
    assert_sayable(str(error))
    told = decode_answer(encode_answer(wire_error(error))[4:])
    assert isinstance(told, WireError)
    assert told.code == ERRORS[type(error)]
    return ERRORS[type(error)]


def check_payload(payload: bytes) -> str:
    unsure = deepest(payload.decode("utf-8", "replace")) > UNSURE_DEPTH
    kinds = []
    code, value = outcome(decode_request, payload)
    expected, body = request_of(payload)
    if code:
        kinds.append(code)
        assert unsure or code == expected, (code, expected)
    else:
        kinds.append(expected)
        assert unsure or expected in REQUESTS, expected
        assert exact(plain(value)) == exact(body)
        raw = encode_request(value)
        assert struct.unpack(">I", raw[:4]) == (len(raw) - 4,)
        assert decode_request(raw[4:]) == value
        assert encode_request(decode_request(raw[4:])) == raw
    code, value = outcome(decode_answer, payload)
    expected, body = answer_of(payload)
    if code:
        assert unsure or code == expected, (code, expected)
    elif value is None:
        kinds.append("ignored")
        assert expected == "ignored", expected
    else:
        kinds.append(expected)
        assert exact(plain(value)) == exact(body), expected
        raw = encode_answer(value)
        assert struct.unpack(">I", raw[:4]) == (len(raw) - 4,)
        assert decode_answer(raw[4:]) == value
        assert encode_answer(value) == raw
    return kinds[-1]


def check(raw: bytes) -> str:
    kind = ""
    for limit in LIMITS:
        expected = payloads_of(raw, limit)
        for pieces in chunkings(raw):
            payloads, error, left = decoded(pieces, limit)
            assert (payloads, error) == expected[:2]
            assert error is not None or left == expected[2]
        if limit == LIMITS[0]:
            kinds = [check_payload(payload) for payload in expected[0]]
            end = "-then-lies" if expected[1] is not None else "-then-cut" if expected[2] else ""
            kind = (kinds[-1] if kinds else "none") + end
    return kind


# -- inputs ------------------------------------------------------------------------------------------


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def seeds() -> list[bytes]:
    return [file.read_bytes() for file in sorted((FIXTURES / "proto").glob("*/*.frame"))]


KEYS = (
    "v", "kind", "final", "body", "session", "content", "resume", "event", "type", "text", "usage", "code", "message",
    "detail", "name", "class", "truncated", "untrusted", "ahead", "slot_busy", "tokens", "reason", "attempt",
    "after_ms", "error",
    "cache_n", "prompt_n", "predicted_n", "reasoning_tokens", "thinking_capped", "path", "class_", "when_busy", "cause",
    "from", "new", "from_", "ending", "slot_free",
)  # fmt: skip
WORDS = (
    "turn", "turn_event", "turn_done", "error", *REQUESTS, *FINALS, *EVENTS, "wait", "replace", "owner", "public",
    "secret", "length", "bad_frame", "storage", "a",
)  # fmt: skip
TOKENS = (
    *JSON_TOKENS,
    *(f'"{key}":'.encode() for key in KEYS),
    *(f'"{word}"'.encode() for word in WORDS),
    *(struct.pack(">I", length) for length in (0, 1, 2, 5, 60, 61, 4096, 4097, 2**31, 2**32 - 1)),
)
texts = st.text(max_size=6) | st.sampled_from(WORDS)
scalars = st.none() | st.booleans() | st.integers(-2, 10**30) | st.floats() | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | texts, inner, max_size=4),
    max_leaves=6,
)
right_event = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["content", "reasoning"]), "text": st.text(max_size=8)}),
    st.fixed_dictionaries({"type": st.just("queued"), "ahead": st.integers(0, 10**20)}),
    st.fixed_dictionaries({"type": texts | scalars}, optional={"x": values, "text": values}),
    st.dictionaries(st.sampled_from(KEYS), values, max_size=4),
)
envelope = st.one_of(
    st.fixed_dictionaries({
        "v": st.just(1) | scalars,
        "kind": st.sampled_from(WORDS[:4]) | values,
        "final": st.booleans() | scalars,
        "body": values,
    }),
    st.fixed_dictionaries({
        "v": st.just(1),
        "kind": st.just("turn"),
        "final": st.just(True),
        "body": st.fixed_dictionaries({
            "session": st.sampled_from(["a", "a/b", "", "A" * 64, "a" * 65, ".a"]) | values,
            "content": st.text(max_size=8) | values,
            "resume": st.booleans() | scalars,
        }, optional={"when_busy": st.sampled_from(["refuse", "wait", "replace"]) | values}),
    }),
    st.fixed_dictionaries({
        "v": st.just(1),
        "kind": st.sampled_from([*REQUESTS, *FINALS]),
        "final": st.just(True),
        "body": st.dictionaries(st.sampled_from(["session", "content", "cause", "from", "new"]), values, max_size=3),
    }),
    st.fixed_dictionaries({
        "v": st.just(1),
        "kind": st.just("turn_event"),
        "final": st.just(False),
        "body": st.fixed_dictionaries({"event": right_event}),
    }),
    st.fixed_dictionaries({
        "v": st.just(1),
        "kind": st.just("error"),
        "final": st.just(True),
        "body": st.fixed_dictionaries({"code": st.sampled_from(WORDS), "message": texts, "detail": values}),
    }),
    values,
)  # fmt: skip
payload = envelope.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20)
one_frame = payload.map(framed) | st.builds(
    lambda length, rest: struct.pack(">I", length) + rest, st.integers(0, 80) | st.integers(0, 2**32 - 1), payload
)

TARGET = Target(
    name="frames",
    suffix=".frames",
    check=check,
    seeds=seeds,
    tokens=TOKENS,
    grammar=st.lists(one_frame, min_size=1, max_size=4).map(b"".join),
)
