"""Frames: any chunking, every order of checks, examples byte for byte, and the encoder written by hand."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.errors import BadFrame, BadRequest, UnsupportedVersion, ValueRefused, WireableError
from boxmaker.proto.channel import (
    TURN_EVENTS,
    CacheLoss,
    Cancel,
    CancelDone,
    Context,
    Cut,
    ErrorCode,
    Fork,
    ForkDone,
    Request,
    ServerStatus,
    SessionStatus,
    SlotStatus,
    Status,
    StatusDone,
    Steer,
    SteerDone,
    Steered,
    ToolCallStarted,
    ToolResult,
    Turn,
    TurnDone,
    WireError,
)
from boxmaker.proto.chat import Content, Figures, Progress, Queued, Reasoning, Retrying, ThinkingCapped, Waiting
from boxmaker.proto.frames import (
    ANSWER_KINDS,
    CLIENT_MAX_FRAME,
    REQUEST_KINDS,
    Answer,
    Envelope,
    FrameDecoder,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    frame,
    open_envelope,
    text_event,
)
from boxmaker.proto.ids import SessionId

from .examples import FIXTURES, files, split_frame, tag
from .strategies import answers, json_values, relaxed, requests, session_ids, texts, wild_texts

SESSION = SessionId("20261130-141530-x7k2qf")
FORKED = SessionId("20261130-150000-a1b2c3")

REQUESTS: dict[str, Request] = {
    "turn": Turn(session=SESSION, content="Wie spät ist es?", resume=False),
    "turn.unusual": Turn(session=SessionId("A.b_c-9"), content='\u2028"\\\r\n\U0001f600', resume=True),
    "turn.wait": Turn(session=SESSION, content="Und morgen?", resume=True, when_busy="wait"),
    "steer": Steer(session=SESSION, content="Nur für Köln."),
    "cancel": Cancel(session=SESSION, cause="owner"),
    "fork": Fork(session=SESSION, from_=2, new=FORKED),
    "fork.last": Fork(session=SESSION, from_=None, new=FORKED),
    "status": Status(),
}

_BUSY = WireError(
    code=ErrorCode.SESSION_BUSY,
    message="session 20261130-141530-x7k2qf is busy with another turn; try again when that has ended",
    detail={"session": "20261130-141530-x7k2qf"},
)

ANSWERS: dict[str, Answer] = {
    "frames/turn_event": Content(text="Es ist 14:15."),
    "frames/turn_done": TurnDone(
        content="Es ist 14:15.",
        usage=Figures(cache_n=468, prompt_n=33, predicted_n=12, reasoning_tokens=0, thinking_capped=False),
    ),
    "frames/turn_done.null": TurnDone(
        content="",
        usage=Figures(cache_n=None, prompt_n=None, predicted_n=None, reasoning_tokens=4352, thinking_capped=True),
    ),
    "frames/error": _BUSY,
    "frames/steered": SteerDone(),
    "frames/cancel_done": CancelDone(ending="cancelled", cause="owner", slot_free=True),
    "frames/cancel_done.idle": CancelDone(ending="idle", cause=None, slot_free=True),
    "frames/fork_done": ForkDone(session=FORKED, from_=2),
    "frames/status_done": StatusDone(
        version="0.1.0",
        pid=4711,
        server=ServerStatus(url="http://127.0.0.1:8080", state="ready"),
        slots=(SlotStatus(id=0, busy=True, ours=True), SlotStatus(id=1, busy=False, ours=False)),
        sessions=(SessionStatus(session=SESSION, phase="tools", age_ms=2150, waiting=1),),
    ),
    "frames/status_done.idle": StatusDone(
        version="0.1.0",
        pid=4711,
        server=ServerStatus(url="unix:/run/llama/llama.sock", state="unreachable"),
        slots=(),
        sessions=(),
    ),
    "events/queued": Queued(ahead=2),
    "events/waiting": Waiting(slot_busy=True),
    "events/progress": Progress(total=445, cache=412, processed=420),
    "events/reasoning": Reasoning(text="The owner wants the time → "),
    "events/reasoning.unusual": Reasoning(text='\u2028"\\\n\U0001f600\x7f\x01'),
    "events/content": Content(text='Zwölf Grad, "heiter"'),
    "events/content.unusual": Content(text='\u2029"\\/\b\f\n\r\t\x1f\U0001f600\x7f\x01'),
    "events/tool_call_started": ToolCallStarted(name="clock"),
    "events/tool_result": ToolResult(name="clock", class_="public", truncated=False),
    "events/tool_result.untrusted": ToolResult(name="web", class_="private", truncated=True, untrusted=True),
    "events/thinking_capped": ThinkingCapped(tokens=4096),
    "events/retrying": Retrying(attempt=2, after_ms=412, error="the server answered 503: no slot is free – try later"),
    "events/cache_loss": CacheLoss(expected=1019, got=0),
    "events/cut": Cut(reason="length"),
    "events/steered": Steered(content="Nur für Köln."),
    "events/context": Context(used=6713, n_ctx=8192),
    "errors/session_busy": _BUSY,
}
"""What the frames of loopd stand for; the other errors are in test_channel.py."""


def request(**changes: Any) -> bytes:
    """A right request's payload, with changes; a change to `...` takes the key away."""
    value: dict[str, Any] = {
        "v": 1,
        "kind": "turn",
        "final": True,
        "body": {"session": "a", "content": "hi", "resume": False},
    }
    value.update(changes)
    return json.dumps({key: item for key, item in value.items() if item is not ...}).encode()


def refusal(payload: bytes) -> WireableError:
    with pytest.raises(WireableError) as caught:
        decode_request(payload)
    assert type(caught.value) in (BadFrame, UnsupportedVersion, BadRequest)
    return caught.value


# -- examples --------------------------------------------------------------------------------------


def test_every_kind_and_event_has_an_example_and_every_example_is_of_one() -> None:
    assert {tag(name) for name in files("frames/*.frame")} == {*REQUEST_KINDS, *ANSWER_KINDS}
    assert {tag(name) for name in files("events/*.frame")} == set(TURN_EVENTS.tags)
    for folder in ("frames", "events", "errors"):
        for name, file in files(f"{folder}/*.frame").items():
            value = json.loads(split_frame(file.read_bytes()))
            kind = {"events": "turn_event", "errors": "error"}.get(folder, tag(name))
            assert (value["kind"], value["final"]) == (kind, kind != "turn_event")
            if folder == "events":
                assert value["body"]["event"]["type"] == tag(name)


def test_every_example_has_the_value_that_it_stands_for() -> None:
    known = set(ANSWERS) | {f"frames/{name}" for name in REQUESTS}
    assert {f"frames/{name}" for name in files("frames/*.frame")} <= known
    assert {f"events/{name}" for name in files("events/*.frame")} <= known
    assert all((FIXTURES / f"{name}.frame").is_file() for name in known)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_read_and_written_as_its_example(name: str) -> None:
    raw = (FIXTURES / "frames" / f"{name}.frame").read_bytes()
    assert decode_request(split_frame(raw)) == REQUESTS[name]
    assert encode_request(REQUESTS[name]) == raw


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_and_written_as_its_example(name: str) -> None:
    raw = (FIXTURES / f"{name}.frame").read_bytes()
    assert decode_answer(split_frame(raw)) == ANSWERS[name]
    assert encode_answer(ANSWERS[name]) == raw


# -- bytes to payloads -------------------------------------------------------------------------------


def payloads_of(decoder: FrameDecoder) -> tuple[list[bytes], str | None]:
    """Take out all that is there; the text of the error that ended it."""
    found = []
    try:
        while (payload := decoder.next_payload()) is not None:
            found.append(payload)
    except BadFrame as exc:
        return found, str(exc)
    return found, None


def chunks_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


streams = st.lists(st.binary(min_size=1, max_size=20), max_size=6)
cuts = st.lists(st.integers(0, 150), max_size=12)


@given(payloads=streams, cuts=cuts, tail=st.binary(max_size=3))
@relaxed
def test_any_chunking_gives_the_same_payloads(payloads: list[bytes], cuts: list[int], tail: bytes) -> None:
    data = b"".join(struct.pack(">I", len(payload)) + payload for payload in payloads) + tail
    decoder = FrameDecoder(20)
    found: list[bytes] = []
    for chunk in chunks_of(data, cuts):
        decoder.feed(chunk)
        some, error = payloads_of(decoder)
        assert error is None
        found += some
    assert found == payloads
    assert decoder.buffered_bytes == len(tail)


@given(payloads=streams, cuts=cuts, length=st.just(0) | st.integers(21, 2**32 - 1), rest=st.binary(max_size=30))
@relaxed
def test_any_chunking_gives_the_same_error(payloads: list[bytes], cuts: list[int], length: int, rest: bytes) -> None:
    data = b"".join(struct.pack(">I", len(payload)) + payload for payload in payloads)
    data += struct.pack(">I", length) + rest
    decoder = FrameDecoder(20)
    found: list[bytes] = []
    errors = []
    for chunk in chunks_of(data, cuts):
        decoder.feed(chunk)
        some, error = payloads_of(decoder)
        found += some
        errors.append(error)
    assert found == payloads
    assert errors[-1] == f"a frame of {length} bytes; allowed are 1 to 20"
    assert payloads_of(decoder) == ([], errors[-1])  # the stream stays of no use


@given(data=st.binary(max_size=60), cuts=cuts)
@relaxed
def test_any_bytes_give_payloads_or_a_bad_frame(data: bytes, cuts: list[int]) -> None:
    whole, pieces = FrameDecoder(16), FrameDecoder(16)
    whole.feed(data)
    found: list[bytes] = []
    error = None
    for chunk in chunks_of(data, cuts):
        pieces.feed(chunk)
        some, error = payloads_of(pieces)
        found += some
    assert (found, error) == payloads_of(whole)


@pytest.mark.parametrize("length", [0, 101, 2**24, 2**31, 2**32 - 1])
def test_a_wrong_length_is_refused_as_soon_as_it_is_known(length: int) -> None:
    decoder = FrameDecoder(100)
    decoder.feed(struct.pack(">I", length)[:3])
    assert decoder.next_payload() is None
    decoder.feed(struct.pack(">I", length)[3:])
    with pytest.raises(BadFrame, match=f"^a frame of {length} bytes; allowed are 1 to 100$"):
        decoder.next_payload()


@pytest.mark.parametrize("length", [1, 99, 100])
def test_a_length_up_to_the_limit_is_taken(length: int) -> None:
    decoder = FrameDecoder(100)
    decoder.feed(struct.pack(">I", length) + b"x" * (length - 1))
    assert decoder.next_payload() is None
    decoder.feed(b"y")
    assert decoder.next_payload() == b"x" * (length - 1) + b"y"
    assert decoder.next_payload() is None


def test_memory_grows_with_bytes_received_not_promised() -> None:
    decoder = FrameDecoder(CLIENT_MAX_FRAME)
    decoder.feed(struct.pack(">I", CLIENT_MAX_FRAME) + b"x")
    assert decoder.next_payload() is None
    assert decoder.buffered_bytes == 5


def test_a_length_that_lies_is_no_json() -> None:
    payload = request()
    for told in (payload[:-1], payload + b"}", payload + struct.pack(">I", 5)):
        assert type(refusal(told)) is BadFrame


@given(payload=st.binary(min_size=1, max_size=300))
@relaxed
def test_a_frame_is_its_length_and_its_payload(payload: bytes) -> None:
    assert frame(payload) == struct.pack(">I", len(payload)) + payload


# -- what a request may not be -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (b"\xff", "the frame is not UTF-8 at byte 0"),
        (request().replace(b"hi", b"h\xe9"), "the frame is not UTF-8 at byte"),
        (b'"\xed\xa0\x80"', "the frame is not UTF-8 at byte 1"),
        (b"hello", "the frame is not JSON: "),
        (b"\xef\xbb\xbf" + request(), "the frame is not JSON: "),
        (request() + request(), "the frame is not JSON: "),
        (request(v=float("nan")), "the frame is not JSON: NaN is no JSON value"),
        (b'{"v":1e999}', "the frame is not JSON: the number 1e999 is out of range"),
        (b"[" * 100_000, "the frame is nested too deep"),
        (b'{"v":' * 100_000, "the frame is nested too deep"),
        (b"[1]", "the frame is an array, not an object"),
        (b"null", "the frame is null, not an object"),
        (b"1", "the frame is 1, not an object"),
        (b'"turn"', 'the frame is "turn", not an object'),
    ],
    ids=range(14),
)
def test_bytes_that_are_no_object_are_a_bad_frame(payload: bytes, problem: str) -> None:
    found = refusal(payload)
    assert type(found) is BadFrame
    assert str(found).startswith(problem)


WRONG_VERSIONS = [
    (..., "absent"), (None, "null"), (0, "0"), (2, "2"), (-1, "-1"), (True, "true"), (1.0, "1.0"), ("1", '"1"'),
    ([1], "an array"), ({"v": 1}, "an object"), (2**70, str(2**70)),
]  # fmt: skip


@pytest.mark.parametrize(("version", "named"), WRONG_VERSIONS)
def test_a_version_that_is_not_the_integer_1_is_unsupported(version: object, named: str) -> None:
    found = refusal(request(v=version))
    assert isinstance(found, UnsupportedVersion)
    assert found.found == named


@pytest.mark.parametrize(("version", "named"), WRONG_VERSIONS)
def test_the_version_is_checked_before_everything_else(version: object, named: str) -> None:
    for wrong in (
        request(v=version, kind="stop", final=False, body={}),
        request(v=version, kind=5, final=None, body=[]),
        request(v=version, kind=..., final=..., body=..., extra=1),
    ):
        assert type(refusal(wrong)) is UnsupportedVersion


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        # one thing wrong
        (request(kind=...), "$: the key 'kind' is missing"),
        (request(final=...), "$: the key 'final' is missing"),
        (request(body=...), "$: the key 'body' is missing"),
        (request(kind=5), "$.kind: expected text, found 5"),
        (request(kind=["turn"]), "$.kind: expected text, found an array"),
        (request(kind="Turn"), '$.kind: unknown kind "Turn"; known here: turn, steer, cancel, fork, status'),
        (request(kind="turn_done"), '$.kind: unknown kind "turn_done"; known here: turn, steer, cancel, fork, status'),
        (request(final=1), "$.final: expected true or false, found 1"),
        (request(final=None), "$.final: expected true or false, found null"),
        (request(final=False), "$.final: a request is its channel's only frame: final must be true"),
        (request(body=None), "$.body: expected an object, found null"),
        (request(body=[]), "$.body: expected an object, found an array"),
        (request(extra=1), '$: unknown key "extra"'),
        (request(**{"k" * 100: 1}), '$: unknown key "' + "k" * 38 + "…"),
        (request(**{"\ud800": 1}), '$: unknown key "\\ud800"'),
        (request(body={}), "$.body: the key 'session' is missing"),
        (
            request(body={"session": "a", "content": "hi", "resume": False, "x": 1}),
            '$.body: unknown key "x"',
        ),
        (
            request(body={"session": "a", "content": "hi", "resume": 0}),
            "$.body.resume: expected true or false, found 0",
        ),
        (
            request(body={"session": "a", "content": ["hi"], "resume": False}),
            "$.body.content: expected text, found an array",
        ),
        (
            request(body={"session": "a", "content": "a\x00b", "resume": False}),
            "$.body.content: text with a NUL character",
        ),
        (
            request(body={"session": "a", "content": "a\ud800b", "resume": False}),
            "$.body.content: text with a lone surrogate",
        ),
        (
            request(body={"session": "../a", "content": "hi", "resume": False}),
            "$.body.session: a session id has 1 to 64 characters of A-Z a-z 0-9 . _ - "
            "and begins with a letter or digit",
        ),
        # several: kind, then final, then body, then unknown keys, then what the body holds
        (
            request(kind="stop", final=1, body=5, extra=1),
            '$.kind: unknown kind "stop"; known here: turn, steer, cancel, fork, status',
        ),
        (
            request(kind="stop", final=..., body=...),
            '$.kind: unknown kind "stop"; known here: turn, steer, cancel, fork, status',
        ),
        (request(kind=..., final=..., body=...), "$: the key 'kind' is missing"),
        (request(final=1, body=5, extra=1), "$.final: expected true or false, found 1"),
        (request(body=5, extra=1), "$.body: expected an object, found 5"),
        (request(final=False, body={}, extra=1), '$: unknown key "extra"'),
        (request(final=False, body={}), "$.final: a request is its channel's only frame: final must be true"),
    ],
)
def test_anything_else_in_a_readable_frame_is_a_bad_request(payload: bytes, text: str) -> None:
    found = refusal(payload)
    assert isinstance(found, BadRequest)
    assert str(found) == text
    assert found.detail() == {"path": text.partition(": ")[0]}


@given(payload=st.binary(max_size=80))
@relaxed
def test_garbage_is_one_of_three_errors(payload: bytes) -> None:
    refusal(payload)
    with pytest.raises((BadFrame, UnsupportedVersion, BadRequest)):
        decode_answer(payload)


PLACES = [("v",), ("kind",), ("final",), ("body",), ("body", "session"), ("body", "content"), ("body", "resume")]


@given(place=st.sampled_from(PLACES), data=st.data())
@relaxed
def test_any_json_at_any_place_is_a_turn_or_one_of_three_errors(place: tuple[str, ...], data: st.DataObject) -> None:
    value = json.loads(request())
    inner = value if len(place) == 1 else value["body"]
    inner[place[-1]] = data.draw(json_values | wild_texts)
    payload = json.dumps(value).encode()
    for decode in (decode_request, decode_answer):
        try:
            decode(payload)
        except (BadFrame, UnsupportedVersion, BadRequest) as exc:
            text = str(exc)
        else:
            text = ""
        assert len(text) < 300
        text.encode()


@given(payload=st.binary(min_size=1, max_size=60), at=st.integers(0, 10**6))
@relaxed
def test_a_damaged_request_is_a_turn_or_one_of_three_errors(payload: bytes, at: int) -> None:
    whole = request()
    start = at % len(whole)
    try:
        turn = decode_request(whole[:start] + payload + whole[start + len(payload) :])
    except (BadFrame, UnsupportedVersion, BadRequest):
        return
    assert decode_request(split_frame(encode_request(turn))) == turn


# -- writing and reading back ------------------------------------------------------------------------


@given(request=requests)
@relaxed
def test_a_request_is_read_back(request: Request) -> None:
    assert decode_request(split_frame(encode_request(request))) == request


@given(answer=answers)
@relaxed
def test_an_answer_is_read_back(answer: Answer) -> None:
    assert decode_answer(split_frame(encode_answer(answer))) == answer


@given(answer=answers)
@relaxed
def test_an_answer_is_compact_utf8_in_the_order_of_its_keys(answer: Answer) -> None:
    payload = split_frame(encode_answer(answer))
    value = json.loads(payload)
    assert list(value) == ["v", "kind", "final", "body"]
    assert json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() == payload


@given(text=wild_texts)
@relaxed
def test_the_encoder_written_by_hand_equals_the_codec_for_any_text(text: str) -> None:
    for event in (Content(text=text), Reasoning(text=text)):
        if any("\ud800" <= char <= "\udfff" for char in text):
            for write in (TURN_EVENTS.to_object, encode_answer):
                with pytest.raises(ValueRefused) as caught:
                    write(event)
                assert caught.value.path == "$.text"
            continue
        body = {"event": TURN_EVENTS.to_object(event)}
        value = {"v": 1, "kind": "turn_event", "final": False, "body": body}
        payload = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        assert encode_answer(event) == struct.pack(">I", len(payload)) + payload


def test_the_events_of_a_token_are_written_without_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each costs several times as much, and nothing else would show it."""
    frames = {event: encode_answer(event) for event in (Content(text="é"), Reasoning(text="é"))}
    monkeypatch.delattr("boxmaker.proto.frames.TURN_EVENTS")
    assert {event: encode_answer(event) for event in frames} == frames
    with pytest.raises(NameError):
        encode_answer(Queued(ahead=1))


@pytest.mark.parametrize("text", [None, 5, b"a", True, ["a"]])
def test_the_encoder_written_by_hand_refuses_what_is_no_text(text: Any) -> None:
    for event in (Content(text=text), Reasoning(text=text)):
        with pytest.raises(ValueRefused):
            encode_answer(event)


@given(session=session_ids | texts, content=wild_texts)
@relaxed
def test_a_request_that_loopd_would_refuse_is_not_written(session: Any, content: str) -> None:
    turn = Turn(session=session, content=content, resume=True)
    try:
        read = decode_request(request(body={"session": session, "content": content, "resume": True}))
    except BadRequest:
        read = None
    if read == turn:
        assert decode_request(split_frame(encode_request(turn))) == turn
    else:  # refused, or two halves that only JSON escapes make a character of
        with pytest.raises(ValueRefused):
            encode_request(turn)


# -- what a client makes of loopd's frames -----------------------------------------------------------


def answer(kind: str, final: bool, body: Any) -> bytes:
    return json.dumps({"v": 1, "kind": kind, "final": final, "body": body}).encode()


@pytest.mark.parametrize(
    "event", [{"type": "weather"}, {"type": "weather", "text": 5, "more": [None]}, {"type": ""}, {"type": "Content"}]
)
def test_an_event_of_an_unknown_type_is_ignored_whatever_it_holds(event: object) -> None:
    assert decode_answer(answer("turn_event", False, {"event": event})) is None


NOT_FINAL = "$.final: all kinds but turn_event are final, turn_event is not"


@pytest.mark.parametrize(
    ("kind", "final", "body", "text"),
    [
        ("turn_event", False, {}, "$.body: the key 'event' is missing"),
        ("turn_event", False, {"event": {"type": "weather"}, "x": 1}, '$.body: unknown key "x"'),
        ("turn_event", False, {"event": None}, "$.body.event: expected an object, found null"),
        ("turn_event", False, {"event": []}, "$.body.event: expected an object, found an array"),
        ("turn_event", False, {"event": {}}, "$.body.event: the key 'type' is missing"),
        ("turn_event", False, {"event": {"type": 5}}, "$.body.event.type: unknown type 5"),
        ("turn_event", False, {"event": {"type": ["content"]}}, "$.body.event.type: unknown type an array"),
        ("turn_event", False, {"event": {"type": "content"}}, "$.body.event: the key 'text' is missing"),
        (
            "turn_event",
            False,
            {"event": {"type": "content", "text": "", "x": 1}},
            '$.body.event: unknown key "x"',
        ),
        (
            "turn_event",
            False,
            {"event": {"type": "queued", "ahead": True}},
            "$.body.event.ahead: expected an integer ≥ 1, found true",
        ),
        (
            "turn_event",
            True,
            {"event": {"type": "weather"}},
            NOT_FINAL,
        ),
        ("turn_done", False, {}, NOT_FINAL),
        ("error", False, {}, NOT_FINAL),
        ("turn_done", True, {"content": ""}, "$.body: the key 'usage' is missing"),
        ("turn_done", True, {"content": None, "usage": {}}, "$.body.content: expected text, found null"),
        ("error", True, {"code": "x", "message": "", "detail": {}}, '$.body.code: unknown error code "x"'),
        ("error", True, {"code": 5, "message": "", "detail": {}}, "$.body.code: unknown error code 5"),
        (
            "error",
            True,
            {"code": "internal", "message": "", "detail": []},
            "$.body.detail: expected an object, found an array",
        ),
        (
            "turn",
            True,
            {},
            '$.kind: unknown kind "turn"; known here: '
            "turn_event, turn_done, steered, cancel_done, fork_done, status_done, error",
        ),
    ],
)
def test_a_frame_of_loopd_that_is_not_its_kinds_is_refused(kind: str, final: bool, body: object, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_answer(answer(kind, final, body))
    assert str(caught.value) == text


def test_a_client_checks_frame_and_version_as_loopd_does() -> None:
    with pytest.raises(BadFrame):
        decode_answer(b"[]")
    with pytest.raises(UnsupportedVersion):
        decode_answer(b'{"v":2,"kind":"nope"}')


def test_an_envelope_can_be_opened_whatever_its_kind() -> None:
    assert open_envelope(answer("weather", False, {"a": 1})) == Envelope(kind="weather", final=False, body={"a": 1})


@given(answers)
def test_the_reader_written_by_hand_takes_what_the_encoder_writes_and_nothing_else(answer: Answer) -> None:
    payload = split_frame(encode_answer(answer))
    assert text_event(payload) == (answer if isinstance(answer, Content | Reasoning) else None)


@given(st.sampled_from(["content", "reasoning"]), wild_texts | st.sampled_from(['a"', "}}}", '"}}}', "\\"]))
def test_the_reader_written_by_hand_equals_the_codec_or_leaves_it_to_it(kind: str, written: str) -> None:
    """`written` stands between the quotes as it is, escaped or not."""
    head = f'{{"v":1,"kind":"turn_event","final":false,"body":{{"event":{{"type":"{kind}","text":'
    for text in (f'"{written}"', json.dumps(written), written, f' "{written}"'):
        payload = f"{head}{text}}}}}}}".encode("utf-8", "surrogatepass")
        event = text_event(payload)
        if event is not None:
            assert event == decode_answer(payload)


def test_what_is_not_written_as_ours_is_left_to_the_codec() -> None:
    written = split_frame(encode_answer(Content(text="a")))
    assert text_event(written) == Content(text="a")
    assert text_event(split_frame(encode_answer(Reasoning(text='"é\n')))) == Reasoning(text='"é\n')
    half, quote = b"\\ud83d", b'"a"'
    for changed in (
        written.replace(b'"v":1', b'"v":2'),
        written.replace(b"}}}", b"}} }"),
        written.replace(b"}}}", b',"x":1}}}'),
        written.replace(quote, b"7"),
        written.replace(quote, b'"a'),
        written.replace(quote, b'"' + half + b'"'),
        written.replace(quote, b'"\xff"'),
        written.replace(b"content", b"progress"),
        written[: written.index(quote)],
    ):
        assert changed != written
        assert text_event(changed) is None
