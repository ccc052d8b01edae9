"""A server that breaks what it can: HTTP, streams, chunks, calls, figures, errors, time; as whole turns.

Each row is what was sent and what the turn must come to, worked out from the design. `endure` checks besides what
must hold after each: one final frame, no fault of ours, a readable log, a history that a strict server takes, a
next turn that works.
"""

from __future__ import annotations

import gzip
import json
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from boxmaker.proto.channel import ToolCallStarted
from boxmaker.proto.chat import Content, Retrying
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.server import (
    STREAM_HEAD,
    Hang,
    Pause,
    Script,
    Send,
    Step,
    chunk,
    delta,
    error_response,
    json_response,
    progress,
    render_plainly,
    reply,
    scripted_server,
)
from tests.hostile.server_world import LONGEST_S, daemon_log, endure, piece, recorded, stream
from tests.strict import refuse

Ending = tuple[str, object, int]
HELLO = piece({"content": "Hello."})
STOP = piece({}, "stop")
CALLS = piece({}, "tool_calls")
BODY = stream(HELLO, STOP)[len(STREAM_HEAD) :]
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
DONE = ("done", "Hello.", 1)
"""The reply is whole, whatever stood around it."""
TRIED: Ending = ("inference", {"attempts": 5}, 5)
"""A reply that is broken, at every try."""
NONE_FOUND = "No tool matches."
NOW = "2026-11-30T14:15:30.000Z"
FULL = {"code": 400, "message": "the request exceeds the available context size", "type": "exceed_context_size_error"}


def call(index: Any, call_id: Any = None, name: Any = None, arguments: Any = None) -> dict[str, Any]:
    """One piece of a call, without the keys that are None."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    made = {"index": index, "id": call_id, "function": function}
    return {key: value for key, value in made.items() if value is not None}


def calls(*pieces: Any) -> dict[str, Any]:
    return piece({"tool_calls": list(pieces)})


# -- chunks ----------------------------------------------------------------------------------------

CHUNKS: dict[str, tuple[bytes, Ending]] = {
    "choices empty, null, absent": (stream({"choices": []}, {"choices": None}, {}, HELLO, STOP), DONE),
    "choices an object": (stream({"choices": {"0": 1}}, HELLO, STOP), TRIED),
    "choices of text": (stream({"choices": ["x"]}, HELLO, STOP), TRIED),
    "choices null inside": (stream({"choices": [None]}, HELLO, STOP), TRIED),
    "unknown keys": (
        stream(piece({"content": "Hello.", "refusal": None, "audio": {"x": [1]}}, logprobs={}), STOP),
        DONE,
    ),
    "two choices": (stream({"choices": [{"index": 1, "delta": {"content": "B"}}, HELLO["choices"][0]]}, STOP), DONE),
    "another choice alone": (
        stream(HELLO, {"choices": [{"index": 1, "delta": {"content": "B"}, "finish_reason": "stop"}]}, STOP),
        DONE,
    ),
    "content as parts": (stream(piece({"content": [{"type": "text", "text": "Hello."}]}), STOP), DONE),
    "content a number": (stream(piece({"content": 5}), STOP), TRIED),
    "content false": (stream(piece({"content": False}), STOP), TRIED),
    "content an object": (stream(piece({"content": {"text": "Hello."}}), STOP), TRIED),
    "content parts of no text": (stream(piece({"content": [{"type": "image_url"}]}), STOP), TRIED),
    "delta an array": (stream(piece([1]), STOP), TRIED),
    "delta text": (stream(piece("Hello."), STOP), TRIED),
    "delta null": (stream(HELLO, piece(None), STOP), DONE),
    "delta missing": (stream(HELLO, {"choices": [{"index": 0}]}, STOP), DONE),
    "message": (stream({"choices": [{"message": {"content": "Hello."}, "finish_reason": "stop"}]}), DONE),
    "text": (stream({"choices": [{"text": "Hello.", "finish_reason": "stop"}]}), DONE),
    "reasoning key": (stream(piece({"reasoning": "hm"}), HELLO, STOP), DONE),
    "reasoning an object": (stream(piece({"reasoning_content": {"x": 1}}), HELLO, STOP), TRIED),
    "tool calls of text": (stream(piece({"tool_calls": ["x"]}), CALLS), TRIED),
    "tool calls an object": (stream(piece({"tool_calls": call(0, "a", "clock", "{}")}), CALLS), TRIED),
    "calls that never came": (stream(CALLS), TRIED),
    "finish error": (stream(HELLO, piece({}, "error")), TRIED),
    "finish abort": (stream(HELLO, piece({}, "abort")), TRIED),
    "finish unknown": (stream(HELLO, piece({}, "because")), DONE),
    "finish a number, then [DONE]": (stream(HELLO, piece({}, 5)), DONE),
    "finish a number, and no end": (stream(HELLO, piece({}, 5), done=False), TRIED),
    "finish an object, and no end": (stream(HELLO, piece({}, {"reason": "stop"}), done=False), TRIED),
    "finish twice": (stream(HELLO, STOP, piece({"content": "B"}), CALLS), DONE),
    "[DONE] twice, and more": (stream(HELLO) + BODY.replace(b"Hello", b"B"), DONE),
    "an error after the end": (stream(HELLO, STOP) + b'data: {"error":"x"}\n\n', DONE),
    "an error after the finish": (stream(HELLO, STOP, {"error": {"code": 500, "message": "late"}}), DONE),
    "roles": (
        stream(
            piece({"role": "system", "content": "Hello."}), piece({"role": "tool"}), piece({"role": ["user"]}), STOP
        ),
        DONE,
    ),
    "NaN and Infinity": (
        stream(b'data: {"choices":[{"index":NaN,"delta":{"content":"Hello.","x":-Infinity}}]}\n\n', STOP),
        DONE,
    ),
    "keys twice": (
        stream(b'data: {"choices":[],"choices":[{"delta":{"content":"A","content":"Hello."}}]}\n\n', STOP),
        DONE,
    ),
    "a number of 10^6 digits": (stream(b'data: {"usage":' + b"9" * 10**6 + b"}\n\n", HELLO, STOP), TRIED),
    "an index of 10^6 digits": (
        stream(b'data: {"choices":[{"index":' + b"9" * 10**6 + b"}]}\n\n", HELLO, STOP),
        TRIED,
    ),
    "nested 200,000 deep": (stream(b"data: " + b"[" * 200_000 + b"\n\n", HELLO, STOP), TRIED),
    "an unknown key 200,000 deep": (
        stream(b'data: {"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n\n", HELLO, STOP),
        TRIED,
    ),
    "a raw NUL": (stream(b'data: {"choices":[{"delta":{"content":"a\x00b"}}]}\n\n', STOP), TRIED),
    "line separators": (
        stream(piece({"content": "a\u2028b\x85c\x0bd\u2029"}), STOP),
        ("done", "a\u2028b\x85c\x0bd\u2029", 1),
    ),
    "lone surrogates": (stream(piece({"content": "a\ud800b\udc00c"}), STOP), ("done", "a\ufffdb\ufffdc", 1)),
    "a lone surrogate as key": (stream(HELLO, {"\ud800": 1}, STOP), DONE),
    "figures of 10^400": (
        stream(
            HELLO, STOP, {"usage": {"prompt_tokens": 10**400}, "timings": {"cache_n": 10**400, "prompt_n": 10**400}}
        ),
        DONE,
    ),
    "figures that are none": (
        stream(HELLO, STOP, {"usage": [1], "timings": {"cache_n": -1, "prompt_n": "9", "predicted_n": 1e300}}),
        DONE,
    ),
    "progress of 10^400": (
        stream({"prompt_progress": {"total": 10**400, "cache": 10**400, "processed": 10**400}}, HELLO, STOP),
        DONE,
    ),
    "progress that is none": (
        stream(
            {"prompt_progress": [1]}, {"prompt_progress": {"total": -1, "cache": "x", "processed": 0.5}}, HELLO, STOP
        ),
        DONE,
    ),
    "a model of a megabyte": (stream({**HELLO, "model": "m" * 2**20}, STOP), DONE),
    "a model that is none": (stream({**HELLO, "model": ["m"]}, STOP), DONE),
    "not JSON": (stream(b"data: hello\n\n", HELLO, STOP), TRIED),
    "not an object": (stream([1], HELLO, STOP), TRIED),
    "null": (stream(None, HELLO, STOP), TRIED),
    "a ping that is no JSON": (stream(b"event: ping\ndata: now\n\n", HELLO, STOP), DONE),
    "nothing but [DONE]": (stream(), TRIED),
    "nothing but figures": (stream({"usage": {"prompt_tokens": 5}}), TRIED),
}


@pytest.mark.parametrize("name", CHUNKS)
async def test_a_chunk_of_any_shape_is_read_or_breaks_the_reply(
    tmp_path: Path, autojump_clock: MockClock, name: str
) -> None:
    raw, ending = CHUNKS[name]
    after = await endure(tmp_path, *[raw] * ending[2])
    assert after.summary() == ending
    if ending == DONE:
        assert [said.content for said in after.said] == ["Hello."]


async def test_figures_at_the_edge_of_a_double_make_no_record_that_cannot_be_written(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    figures = {"timings": {"cache_n": 10**308, "prompt_n": 10**308, "predicted_n": 10**308}}
    after = await endure(tmp_path, stream(calls(call(0, "a", "clock", "{}")), CALLS, figures), recorded("final"))
    assert after.summary() == ("done", "Done.", 2)


# -- errors ----------------------------------------------------------------------------------------

ONE_500: Ending = ("inference", {"status": 500, "attempts": 2}, 2)
ONE_400: Ending = ("inference", {"status": 400}, 1)
FULL_ENDING: Ending = ("session_full", {}, 1)
VLLM_FULL = {"object": "error", "message": "This model's maximum context length is 4096 tokens.", "code": 400}
SHORT_400 = b"HTTP/1.1 400 X\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n"

ERRORS: dict[str, tuple[Script, Ending, str]] = {
    "text": (stream({"error": "boom"}), ONE_500, "boom"),
    "true": (stream({"error": True}), ONE_500, "without a message"),
    "an array": (stream({"error": [1]}), ONE_500, "without a message"),
    "an empty object": (stream({"error": {}}), ONE_500, "without a message"),
    "a message that is none": (stream({"error": {"message": {"a": [1]}}}), ONE_500, '{"a":[1]}'),
    "with a code": (stream({"error": {"code": 400, "message": "bad"}}), ONE_400, "bad"),
    "in an error": (stream({"error": {"error": {"code": 400, "message": "bad"}}}), ONE_400, "bad"),
    "after text": (stream(HELLO, {"error": {"code": 400, "message": "bad"}}), ONE_400, "bad"),
    "beside choices": (stream({**HELLO, "error": {"code": 400, "message": "bad"}}), ONE_400, "bad"),
    "in a choice": (
        stream({"choices": [{"delta": {}, "finish_reason": "error", "error": {"code": 400, "message": "bad"}}]}),
        ONE_400,
        "bad",
    ),
    "an event": (stream(b'event: error\ndata: {"code":400,"message":"bad"}\n\n'), ONE_400, "bad"),
    "an event that is no JSON": (stream(b"event: error\ndata: <p>oh\n\n"), ONE_500, "<p>oh"),
    "a field": (stream(b'error: {"code":400,"message":"bad"}\n\n'), ONE_400, "bad"),
    "typed": (stream({"type": "error", "error": {"type": "x", "message": "Overloaded"}}), ONE_500, "Overloaded"),
    "an object of its own": (stream({"object": "error", "message": "bad", "code": 400}), ONE_400, "bad"),
    "an object of its own, full": (stream(VLLM_FULL), FULL_ENDING, "maximum context length"),
    "JSON for a stream": (json_response(200, {"error": {"code": 400, "message": "bad"}}), ONE_400, "bad"),
    "JSON for a stream, full": (json_response(200, {"error": FULL}), FULL_ENDING, "context size"),
    "a detail": (json_response(400, {"detail": "bad"}), ONE_400, "bad"),
    "a length that is too long": (SHORT_400 + json.dumps({"error": FULL}).encode(), FULL_ENDING, "context size"),
    "a body that never ends": (
        [Send(SHORT_400 + json.dumps({"error": FULL}).encode()), Hang()],
        FULL_ENDING,
        "context size",
    ),
    "a body that stops": (
        b'HTTP/1.1 401 X\r\nContent-Length: 500\r\n\r\n{"err',
        ("inference", {"status": 401}, 1),
        "401",
    ),
    "no body": (b"HTTP/1.1 400 X\r\n\r\n", ONE_400, "an empty body"),
    "compressed": (
        b"HTTP/1.1 400 X\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b'{"error":{"message":"bad"}}'),
        ONE_400,
        "bad",
    ),
    "compressed, not really": (b"HTTP/1.1 400 X\r\nContent-Encoding: gzip\r\n\r\nbad", ONE_400, "400"),
    "lines and escapes": (
        json_response(400, {"error": {"message": "bad\r\n\x1b[31mred\nmore"}}),
        ONE_400,
        "the server answered 400: bad",
    ),
    "a megabyte": (json_response(400, {"error": {"message": "b" * 2**20}}), ONE_400, "400"),
}


@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_in_any_form_is_said_with_its_status_in_one_line(
    tmp_path: Path, autojump_clock: MockClock, name: str
) -> None:
    raw, ending, words = ERRORS[name]
    after = await endure(tmp_path, *[raw] * ending[2])
    assert after.summary() == ending
    assert words in after.error.message
    assert "\n" not in after.error.message
    assert len(after.error.message) < 500
    assert after.said == []


# -- HTTP ------------------------------------------------------------------------------------------


def status(line: str, headers: str = "", body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {line}\r\n{headers}\r\n".encode("latin-1") + body


HTTP: dict[str, tuple[bytes, Ending]] = {
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + BODY, DONE),
    "HTTP/0.9": (BODY, TRIED),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", TRIED),
    "TLS": (b"\x15\x03\x01\x00\x02\x02\x50", TRIED),
    "nothing": (b"", TRIED),
    "1xx in front": (status("100 Continue") + status("103 Early Hints", "Link: x\r\n") + stream(HELLO, STOP), DONE),
    "101": (status("101 Switching", "Upgrade: x\r\nConnection: upgrade\r\n", BODY), TRIED),
    "status 000": (status("000 X"), TRIED),
    "status 204": (status("204 X"), ("inference", {"status": 204}, 1)),
    "status 206": (status("206 X", "", BODY), ("inference", {"status": 206}, 1)),
    "status 304": (status("304 X"), ("inference", {"status": 304}, 1)),
    "status 999": (status("999 X"), ("inference", {"status": 999}, 1)),
    "length too short": (EVENTS + b"Content-Length: 20\r\n\r\n" + BODY, TRIED),
    "length too long": (EVENTS + b"Content-Length: 99999\r\n\r\n" + BODY, DONE),
    "length too long, and cut": (
        EVENTS + b"Content-Length: 99999\r\n\r\n" + stream(HELLO)[len(STREAM_HEAD) : -16],
        TRIED,
    ),
    "length negative": (EVENTS + b"Content-Length: -5\r\n\r\n" + BODY, TRIED),
    "two lengths": (EVENTS + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY, TRIED),
    "length and chunks": (
        EVENTS + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
        DONE,
    ),
    "chunk size no number": (EVENTS + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY, TRIED),
    "chunk size negative": (EVENTS + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n" + BODY, TRIED),
    "chunk size too large": (EVENTS + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n" + BODY, DONE),
    "chunk size too small": (EVENTS + b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + BODY, TRIED),
    "chunk extension and trailers": (
        EVENTS + b"Transfer-Encoding: chunked\r\n\r\n%x;a=b\r\n%s\r\n0\r\nX: 1\r\n\r\n" % (len(BODY), BODY),
        DONE,
    ),
    "transfer gzip": (EVENTS + b"Transfer-Encoding: gzip\r\n\r\n" + gzip.compress(BODY), TRIED),
    "gzip": (EVENTS + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(BODY), DONE),
    "gzip, cut": (EVENTS + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(BODY)[:-30], TRIED),
    "gzip that is none": (EVENTS + b"Content-Encoding: gzip\r\n\r\n" + BODY, TRIED),
    "gzip unsaid": (EVENTS + b"\r\n" + gzip.compress(BODY), TRIED),
    "an encoding we do not know": (EVENTS + b"Content-Encoding: br\r\n\r\n" + b"\x00\x01\x02" * 50, TRIED),
    "cookies": (
        b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b; expires=Xyz; max-age=zz; domain=..\r\nSet-Cookie: \xff\r\n\r\n" + BODY,
        DONE,
    ),
    "a header of 50,000 bytes": (EVENTS + b"X: " + b"a" * 50_000 + b"\r\n\r\n" + BODY, DONE),
    "a header of 200,000 bytes": (EVENTS + b"X: " + b"a" * 200_000 + b"\r\n\r\n" + BODY, TRIED),
    "a header with NUL": (EVENTS + b"X: a\x00b\r\n\r\n" + BODY, TRIED),
    "a header without colon": (EVENTS + b"X\r\n\r\n" + BODY, TRIED),
    "a charset that is none": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-32\r\n\r\n" + BODY,
        DONE,
    ),
    "no content type": (b"HTTP/1.1 200 OK\r\n\r\n" + BODY, DONE),
    "a byte order mark": (EVENTS + b"\r\n\xef\xbb\xbf" + BODY, DONE),
    "UTF-16": (EVENTS + b"\r\n" + BODY.decode().encode("utf-16"), TRIED),
    "lone CR": (EVENTS + b"\r\n" + BODY.replace(b"\n", b"\r"), DONE),
    "every byte there is": (EVENTS + b"\r\n" + bytes(range(256)) * 10, TRIED),
    "plain text": (status("200 OK", "Content-Type: text/plain\r\n", b"starting up"), ("inference", {}, 1)),
    "HTML": (status("200 OK", "Content-Type: text/\xe9html\r\n", b"<p>"), ("inference", {}, 1)),
    "JSON lines": (
        status("200 OK", "Content-Type: application/x-ndjson\r\n", b'{"a":1}\n{"b":2}\n'),
        ("inference", {}, 1),
    ),
}


@pytest.mark.parametrize("name", HTTP)
async def test_http_of_any_kind_is_a_reply_or_an_error(tmp_path: Path, autojump_clock: MockClock, name: str) -> None:
    raw, ending = HTTP[name]
    after = await endure(tmp_path, *[raw] * ending[2])
    assert after.summary() == ending


@pytest.mark.parametrize(
    "location",
    [
        b"/v1/chat/completions",
        b"http://127.0.0.1:1/x",
        b"//",
        b"http://[::1",
        b"http://\xff\xfe/",
        b"http:///x",
        b"http://xn--/",
        b"http://a:99999/",
        b"javascript:1",
        b"",
        b"\x01",
        b"http://\xe2\x98\x83.net/",
        b"/" * 70_000,
    ],
    ids=lambda location: repr(location[:20]),
)
@pytest.mark.parametrize("code", [301, 307])
async def test_a_redirect_is_an_error_and_not_followed_wherever_it_leads(
    tmp_path: Path, autojump_clock: MockClock, code: int, location: bytes
) -> None:
    raw = f"HTTP/1.1 {code} X\r\nLocation: ".encode() + location + b"\r\nContent-Length: 0\r\n\r\n"
    after = await endure(tmp_path, raw)
    assert after.summary() == ("inference", {"status": code}, 1)


async def test_cookies_of_the_server_are_not_sent_back(tmp_path: Path, autojump_clock: MockClock) -> None:
    raw = reply("Hello.").replace(b"\r\n", b"\r\nSet-Cookie: a=b\r\n", 1)
    after = await endure(tmp_path, raw)
    assert after.summary() == DONE
    assert [request.headers.get("cookie") for request in after.server.received] == [None] * len(after.server.received)


# -- calls -----------------------------------------------------------------------------------------

FIND_X, FIND_Y = '{"query":"one"}', '{"query":"two"}'
PIECES: dict[str, tuple[list[Any], list[tuple[str, str, str]]]] = {
    "interleaved": (
        [
            calls(call(0, "a", "find_tool", ""), call(1, "b", "find_tool", "")),
            calls(call(1, None, None, '{"query":')),
            calls(call(0, None, None, '{"query":"one'), call(1, None, None, '"two"}')),
            calls(call(0, None, None, '"}')),
        ],
        [("a", "find_tool", FIND_X), ("b", "find_tool", FIND_Y)],
    ),
    "index as text": (
        [
            calls(call("0", "a", "find_tool", ""), call("1", "b", "find_tool", "")),
            calls(call("1", None, None, FIND_Y)),
            calls(call("0", None, None, FIND_X)),
        ],
        [("a", "find_tool", FIND_X), ("b", "find_tool", FIND_Y)],
    ),
    "index with a fraction": (
        [
            calls(call(0.0, "a", "find_tool", ""), call(1.0, "b", "find_tool", "")),
            calls(call(1.0, None, None, FIND_Y)),
            calls(call(0.0, None, None, FIND_X)),
        ],
        [("a", "find_tool", FIND_X), ("b", "find_tool", FIND_Y)],
    ),
    "index huge": ([calls(call(10**30, "a", "find_tool", FIND_X))], [("a", "find_tool", FIND_X)]),
    "index negative": ([calls(call(-1, "a", "find_tool", FIND_X))], [("a", "find_tool", FIND_X)]),
    "index missing": (
        [calls(call(None, "a", "find_tool", FIND_X)), calls(call(None, "b", "find_tool", FIND_Y))],
        [("a", "find_tool", FIND_X), ("b", "find_tool", FIND_Y)],
    ),
    "index backwards": (
        [calls(call(7, "a", "find_tool", FIND_X)), calls(call(3, "b", "find_tool", FIND_Y))],
        [("a", "find_tool", FIND_X), ("b", "find_tool", FIND_Y)],
    ),
    "the older form": (
        [
            piece({"function_call": {"name": "find_tool", "arguments": ""}}),
            piece({"function_call": {"arguments": FIND_X}}),
        ],
        [("", "find_tool", FIND_X)],
    ),
    "an id that is a number": ([calls(call(0, 5, "find_tool", FIND_X))], [("5", "find_tool", FIND_X)]),
    "an id with escapes": (
        [calls(call(0, "\x1b[31m\u202e", "find_tool", FIND_X))],
        [("\x1b[31m\u202e", "find_tool", FIND_X)],
    ),
    "arguments an object": ([calls(call(0, "a", "find_tool", {"query": "one"}))], [("a", "find_tool", FIND_X)]),
    "an id of a megabyte": ([calls(call(0, "i" * 2**20, "find_tool", FIND_X))], [("i" * 2**20, "find_tool", FIND_X)]),
}


@pytest.mark.parametrize("name", PIECES)
async def test_pieces_of_calls_find_together(tmp_path: Path, autojump_clock: MockClock, name: str) -> None:
    chunks, made = PIECES[name]
    after = await endure(tmp_path, stream(*chunks, CALLS), recorded("final"))
    assert after.summary() == ("done", "Done.", 2)
    assert [(one.id, one.name, one.arguments) for one in after.said[0].tool_calls] == made
    assert after.results == [NONE_FOUND] * len(made)


async def test_a_name_of_a_megabyte_is_answered_within_the_cap(tmp_path: Path, autojump_clock: MockClock) -> None:
    after = await endure(tmp_path, stream(calls(call(0, "a", "n" * 2**20, "{}")), CALLS), recorded("final"))
    assert after.summary() == ("done", "Done.", 2)
    assert after.results == ["Unknown tool '" + "n" * (16384 - 14) + "[truncated]"]


async def test_a_call_without_a_function_is_answered(tmp_path: Path, autojump_clock: MockClock) -> None:
    after = await endure(tmp_path, stream(calls({"index": 0, "id": "a"}), CALLS), recorded("final"))
    assert after.summary() == ("done", "Done.", 2)
    assert after.results[0].startswith("Unknown tool ''.")


async def test_hundreds_of_calls_in_one_reply_are_all_answered(tmp_path: Path, autojump_clock: MockClock) -> None:
    asked = [calls(call(n, f"i{n}", "find_tool", json.dumps({"query": f"q{n}"}))) for n in range(300)]
    after = await endure(tmp_path, stream(*asked, CALLS), recorded("final"))
    assert after.summary() == ("done", "Done.", 2)
    assert after.results == [NONE_FOUND] * 300


async def test_the_same_call_hundreds_of_times_in_one_reply_ends_the_turn(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    asked = calls(*[call(n, f"i{n}", "clock", "{}") for n in range(300)])
    after = await endure(tmp_path, stream(asked, CALLS))
    assert after.summary() == ("turn_limit", {"limit": "repeat_detection", "value": 2}, 1)
    assert after.results[0] == NOW
    assert len(after.results) == 300


# -- time and size ---------------------------------------------------------------------------------


def slowly(data: bytes, times: int, every_s: float) -> list[Step]:
    return [step for _ in range(times) for step in (Send(data), Pause(every_s))]


EMPTY_PIECE = chunk(calls(call(0, None, None, "")))
STALLED: Ending = ("inference", {"limit": "stall_s", "attempts": 2}, 2)
UNBEGUN: Ending = ("inference", {"limit": "prefill_s"}, 1)
ENDLESS: dict[str, tuple[list[Step], Ending]] = {
    "silence after text": ([Send(stream(HELLO, done=False)), Hang()], STALLED),
    "comments after text": ([Send(stream(HELLO, done=False)), *slowly(b": ping\n\n", 100, 50)], STALLED),
    "empty text after text": ([Send(stream(HELLO, done=False)), *slowly(delta(content=""), 100, 50)], STALLED),
    "empty pieces of a call": (
        [Send(stream(calls(call(0, "a", "clock", "")), done=False)), *slowly(EMPTY_PIECE, 100, 50)],
        STALLED,
    ),
    "progress after text": ([Send(stream(HELLO, done=False)), *slowly(progress(9, 0, 9), 100, 50)], STALLED),
    "silence before headers": ([Hang()], UNBEGUN),
    "headers without end": ([Send(b"HTTP/1.1 200 OK\r\n"), *slowly(b"X: y\r\n", 50, 100)], UNBEGUN),
    "1xx without end": (slowly(b"HTTP/1.1 102 X\r\n\r\n", 50, 100), UNBEGUN),
    "silence before text": ([Send(STREAM_HEAD), Hang()], UNBEGUN),
    "comments before text": ([Send(STREAM_HEAD), *slowly(b": ping\n\n", 50, 100)], UNBEGUN),
    "blank lines": ([Send(STREAM_HEAD), *slowly(b"\n" * 1000, 50, 100)], UNBEGUN),
    "half a line": ([Send(STREAM_HEAD + b"data: {"), Hang()], UNBEGUN),
    "roles": ([Send(STREAM_HEAD), *slowly(delta(role="assistant"), 50, 100)], UNBEGUN),
    "figures": ([Send(STREAM_HEAD), *slowly(chunk({"usage": {"prompt_tokens": 1}}), 50, 100)], UNBEGUN),
    "progress that stands": ([Send(STREAM_HEAD), *slowly(progress(9, 0, 5), 50, 100)], UNBEGUN),
    "a total that grows": (
        [Send(STREAM_HEAD), *(step for n in range(1, 60) for step in slowly(progress(n, 0, n), 1, 100))],
        UNBEGUN,
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_reply_that_does_not_grow_ends_in_time(tmp_path: Path, autojump_clock: MockClock, name: str) -> None:
    steps, ending = ENDLESS[name]
    began = trio.current_time()
    after = await endure(tmp_path, *[steps] * ending[2])
    assert after.summary() == ending
    assert trio.current_time() - began <= 2000


async def test_a_reply_that_has_its_end_waits_five_seconds_for_figures(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    began = trio.current_time()
    after = await endure(tmp_path, [Send(stream(HELLO, STOP, done=False)), *slowly(b": ping\n\n", 100, 1)])
    assert after.summary() == DONE
    assert trio.current_time() - began <= 6


SIZES = "[inference]\nreply_max_bytes = 100000\nevent_max_bytes = 50000\n[thinking]\ncap = 1000\n"
GREEDY: dict[str, tuple[bytes, str]] = {
    "text": (delta(content="x" * 1000), "reply_max_bytes"),
    "calls without index, each whole": (chunk(calls(call(None, None, "clock", "{}"))), "reply_max_bytes"),
    "names": (chunk(calls(call(0, "a", "n" * 1000, None))), "reply_max_bytes"),
    "ids": (chunk(calls(call(0, "i" * 1000, None, None))), "reply_max_bytes"),
    "one line": (b"data: " + b"x" * 1000, "event_max_bytes"),
    "one event": (b"data: x\n" * 200, "event_max_bytes"),
    "one event of empty lines": (b"data:\n" * 200, "event_max_bytes"),
}


@pytest.mark.parametrize("name", GREEDY)
async def test_a_reply_that_grows_without_end_is_closed_at_its_limit(
    tmp_path: Path, autojump_clock: MockClock, name: str
) -> None:
    data, limit = GREEDY[name]
    after = await endure(tmp_path, [Send(STREAM_HEAD), *[Send(data * 10)] * 500], text=SIZES)
    assert after.summary() == ("inference", {"limit": limit}, 1)


BOMB_BYTES = 64 * 2**20


@pytest.mark.parametrize("code", [200, 400])
async def test_a_small_body_that_unpacks_to_a_huge_one_meets_the_limits(
    tmp_path: Path, autojump_clock: MockClock, code: int
) -> None:
    bomb = gzip.compress(b"data: " + bytes(BOMB_BYTES), 1)
    raw = f"HTTP/1.1 {code} X\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n\r\n".encode() + bomb
    tracemalloc.start()
    try:
        after = await endure(tmp_path, raw, text=SIZES)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    detail = {"limit": "event_max_bytes"} if code == 200 else {"status": 400}
    assert after.summary() == ("inference", detail, 1)
    assert peak_bytes < BOMB_BYTES / 4


# -- before, between and beside requests -----------------------------------------------------------


@pytest.mark.parametrize("answer", [error_response(400, "too long"), reply("Hello.")], ids=["refused", "answered"])
async def test_a_server_may_answer_before_it_has_read_the_request(
    tmp_path: Path, autojump_clock: MockClock, answer: bytes
) -> None:
    """The request is larger than what sockets hold, and the server never reads it."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    hasty = True

    async def serve(connection: trio.SocketStream) -> None:
        async with connection:
            if (await connection.receive_some(16)).startswith(b"GET"):
                await connection.send_all(json_response(404, {}))
            elif hasty:
                await connection.send_all(answer)
                await trio.sleep(1)
            else:
                await connection.send_all(reply("Still here."))
                while await connection.receive_some(65536):
                    pass

    with daemon_log() as events, trio.fail_after(LONGEST_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, serve, listeners)
            async with running_daemon(
                tmp_path, f"http://127.0.0.1:{port}", "[channel]\nmax_frame = 33554432\n"
            ) as daemon:
                last = (await daemon.turn("s", "x" * 16_000_000, resume=False))[-1]
                assert type(last).__name__ == ("TurnDone" if b"Hello." in answer else "WireError"), last
                assert "attempts" not in getattr(last, "detail", {})
                hasty = False
                assert (await daemon.ask("s", "And now?", resume=True)).content == "Still here."
            nursery.cancel_scope.cancel()
    assert "internal_error" not in events


@pytest.mark.parametrize(
    "slots",
    [
        [],
        {},
        "x",
        [None, 5, [], {"id": 0}, {"id": 0, "is_processing": "no"}],
        [{"id": "0", "is_processing": True}, {"id": 0.5, "is_processing": True}],
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[[[",
        b"HTTP/1.1 404 X\r\n\r\n",
    ],
    ids=str,
)
async def test_slots_that_say_nothing_stop_nobody(tmp_path: Path, autojump_clock: MockClock, slots: Any) -> None:
    after = await endure(tmp_path, reply("Hello."), prepare=lambda server, _: setattr(server, "slots", slots))
    assert after.summary() == DONE


@pytest.mark.parametrize(
    ("slots", "detail"),
    [
        (b"HTTP/1.1 307 X\r\nLocation: javascript:1\r\n\r\n", {"status": 307}),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nnot gzip", {"attempts": 5}),
        (b"\x00\x01\x02", {"attempts": 5}),
        ([{"id": 0, "is_processing": True}], {"limit": "busy_s"}),
    ],
    ids=["redirect", "gzip", "no HTTP", "busy for ever"],
)
async def test_slots_that_fail_are_a_named_error(
    tmp_path: Path, autojump_clock: MockClock, slots: Any, detail: dict[str, object]
) -> None:
    async with scripted_server() as server, running_daemon(tmp_path, server.url, "[timeouts]\nbusy_s = 20\n") as daemon:
        server.slots = slots
        with trio.fail_after(LONGEST_S):
            error = await daemon.fail("s", "Go.", resume=False)
        assert (error.code.value, error.detail) == ("inference", detail)
        server.slots, server.scripts = [{"id": 0, "is_processing": False}], [reply("Hello.")]
        assert (await daemon.ask("s", "And now?", resume=True)).content == "Hello."


# -- another server in its place -------------------------------------------------------------------


def from_model(model: str, text: str) -> bytes:
    return stream({**piece({"content": text}), "model": model}, STOP)


def alternates(daemon: Daemon) -> bool:
    return daemon.rt.facts.alternate


def strict_template(body: dict[str, Any]) -> bytes:
    roles = [message["role"] for message in body["messages"]]
    if ("user", "user") in pairwise(roles):
        return error_response(500, "Conversation roles must alternate")
    return json_response(200, {"prompt": render_plainly(body)})


async def test_another_model_is_logged_once_and_everything_about_it_is_found_anew(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scripts = [from_model("one", "1"), *[error_response(400, "no")] * 1, from_model("two", "2"), from_model("two", "3")]
    with daemon_log() as events:
        async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
            server.slots = error_response(404, "no slots")
            await daemon.ask("s", "a", resume=False)
            assert events == ["slot_check_off", "turn_end"]
            server.refuse_history = refuse
            server.apply_template = strict_template
            server.props = {"total_slots": 1, "default_generation_settings": {"n_ctx": 512}}
            server.slots = [{"id": 0, "is_processing": False}]
            await daemon.fail("s", "b", resume=True)
            await daemon.ask("s", "c", resume=True)
            assert events.count("model_changed") == 1
            assert not alternates(daemon)
            assert [request.path for request in server.received].count("/props") == 0
            asked = len(server.received)
            await daemon.ask("s", "d", resume=True)
            paths = [request.path for request in server.received[asked:]]
            assert paths[0] == "/props"
            assert paths.count("/slots") == 1, "this one has slots to look at"
            assert alternates(daemon)
            roles = [message["role"] for message in server.completions[-1].json()["messages"]]
            assert roles == ["system", "user", "assistant", "user", "assistant", "user", "assistant", "user"]
            server.scripts = [from_model("two", "4")]
            asked = len(server.received)
            await daemon.ask("s", "e", resume=True)
            assert "/props" not in [request.path for request in server.received[asked:]]
    assert events.count("model_changed") == 1
    assert events.count("facts_refreshed") == 1
    assert events.count("alternate_changed") == 1


async def test_a_slot_that_the_new_server_does_not_have_is_logged(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [from_model(name, name) for name in ("one", "two", "two")]
    with daemon_log() as events:
        async with (
            scripted_server(*scripts) as server,
            running_daemon(tmp_path, server.url, "[slots]\nmain = 1\n") as daemon,
        ):
            server.slots = [{"id": 1, "is_processing": False}]
            server.props = {"total_slots": 1}
            for number in range(3):
                await daemon.ask("s", "x", resume=number > 0)
    assert events.count("slot_missing") == 1


@pytest.mark.parametrize(
    "props",
    [
        [],
        5,
        {"total_slots": "2", "default_generation_settings": [1]},
        {"total_slots": 10**400, "default_generation_settings": {"n_ctx": -1}},
        b"HTTP/1.1 404 X\r\n\r\n",
        b"HTTP/1.1 307 X\r\nLocation: http://xn--/\r\n\r\n",
        b"\x00",
        b"HTTP/1.1 401 X\r\n\r\n",
    ],
    ids=str,
)
async def test_props_of_any_kind_stop_nobody(tmp_path: Path, autojump_clock: MockClock, props: Any) -> None:
    scripts = [from_model(name, name) for name in ("one", "two", "two")]
    with daemon_log() as events:
        async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
            server.props = props
            for number, name in enumerate(("one", "two", "two")):
                assert (await daemon.ask("s", "x", resume=number > 0)).content == name
    assert "internal_error" not in events
    assert events.count("model_changed") == 1


async def test_a_model_that_changes_at_every_reply_is_endured(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [from_model(f"m{number % 2}", str(number)) for number in range(6)]
    async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
        server.refuse_history = refuse
        for number in range(6):
            assert (await daemon.ask("s", "x", resume=number > 0)).content == str(number)


# -- what the owner is told ------------------------------------------------------------------------


async def test_what_a_failed_try_said_is_void_and_the_answer_stands_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    broken = stream(piece({"content": "Half of "}), piece({"content": 5}))
    after = await endure(tmp_path, broken, reply("Hello."))
    assert after.summary() == ("done", "Hello.", 2)
    shown = [answer for answer in after.answers if isinstance(answer, Content | Retrying)]
    assert [type(answer).__name__ for answer in shown] == ["Content", "Retrying", "Content"]
    assert "cannot be read" in getattr(shown[1], "error", "")
    assert [said.content for said in after.said] == ["Hello."]


async def test_calls_of_a_reply_that_breaks_are_not_run(tmp_path: Path, autojump_clock: MockClock) -> None:
    broken = stream(calls(call(0, "a", "clock", "{}")), piece({}, "error"))
    after = await endure(tmp_path, broken, reply("Hello."))
    assert after.summary() == ("done", "Hello.", 2)
    assert not [answer for answer in after.answers if isinstance(answer, ToolCallStarted)]
    assert after.results == []
