"""The scripted server: it sends what the script says and when, and keeps what it was asked.

The client here is a bare socket, so that every byte and every end of a connection is seen.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from boxmaker.testing.server import (
    CHAT_PATH,
    STREAM_HEAD,
    Hang,
    Pause,
    Received,
    Reset,
    ScriptedServer,
    Send,
    Until,
    call_delta,
    chunk,
    delta,
    ending,
    error_response,
    progress,
    reply,
    scripted_server,
)

LIMIT_S = 1000


async def dial(server: ScriptedServer, path: str = CHAT_PATH, body: bytes = b'{"messages":[]}') -> trio.SocketStream:
    """A connection that has sent one request."""
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    await stream.send_all(request(path, body))
    return stream


def request(path: str, body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nX-Key: a: b\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


async def rest(stream: trio.SocketStream) -> bytes:
    """Everything up to the end of the connection."""
    raw = b""
    async with stream:
        while piece := await stream.receive_some(65536):
            raw += piece
    return raw


async def answer(server: ScriptedServer, path: str, body: Any = None) -> tuple[int, bytes]:
    """Status and body of a whole response."""
    raw = await rest(await dial(server, path, json.dumps(body).encode()))
    head, _, content = raw.partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(content) in head.lower() + b"\r\n"
    return int(head.split()[1]), content


async def test_completions_get_their_scripts_in_order_byte_for_byte_and_then_an_error(
    autojump_clock: MockClock,
) -> None:
    raw = b"HTTP/1.1 299 Odd\r\n\r\n\x00\xff no HTTP at all"
    with trio.fail_after(LIMIT_S):
        async with scripted_server(raw, [Send(b"a"), Send(b""), Send(b"\r\nb")], b"") as server:
            assert await rest(await dial(server)) == raw
            assert await rest(await dial(server)) == b"a\r\nb"
            assert await rest(await dial(server)) == b""
            status, body = await answer(server, CHAT_PATH, {})
    assert status == 599
    assert json.loads(body)["error"]["message"] == "the script has no reply left"


async def test_a_request_is_kept_whole_however_it_arrives(autojump_clock: MockClock) -> None:
    body = json.dumps({"messages": ["é"]}, ensure_ascii=False).encode()
    raw = request(CHAT_PATH, body)
    with trio.fail_after(LIMIT_S):
        async with scripted_server(b"one", b"two") as server:
            for size in (1, len(raw)):
                stream = await trio.open_tcp_stream("127.0.0.1", server.port)
                for at in range(0, len(raw), size):
                    await stream.send_all(raw[at : at + size])
                    await trio.sleep(0.5)
                assert await rest(stream)
    first, second = server.received
    assert (first.method, first.path, first.body) == ("POST", CHAT_PATH, body)
    assert first.headers == {"x-key": "a: b", "content-length": str(len(body))}
    assert first.json() == {"messages": ["é"]}
    assert (second.method, second.path, second.headers, second.body) == (*first_line(first), first.headers, body)
    assert server.bodies == [body, body]
    # the first was whole after its last byte, the second at once; each byte before took half a second
    assert second.time_s - first.time_s == pytest.approx(0.5)
    assert first.raw() == b"POST %b HTTP/1.1\r\nx-key: a: b\r\ncontent-length: %d\r\n\r\n%b" % (
        CHAT_PATH.encode(),
        len(body),
        body,
    )


def first_line(received: Received) -> tuple[str, str]:
    return received.method, received.path


@pytest.mark.parametrize("sent", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nabc"])
async def test_a_client_that_leaves_in_its_request_has_asked_nothing(sent: bytes, autojump_clock: MockClock) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server(b"one") as server:
            async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
                await stream.send_all(sent)
                await trio.sleep(1)
            await trio.sleep(1)
            assert server.received == []
            assert await rest(await dial(server)) == b"one"


async def test_pauses_and_events_are_waited_for(autojump_clock: MockClock) -> None:
    gate = trio.Event()
    with trio.fail_after(LIMIT_S):
        async with scripted_server([Send(b"a"), Pause(7), Send(b"b"), Until(gate), Send(b"c")]) as server:
            began = trio.current_time()
            async with await dial(server) as stream:
                assert await stream.receive_some(9) == b"a"
                assert trio.current_time() == began
                assert await stream.receive_some(9) == b"b"
                assert trio.current_time() == began + 7
                with trio.move_on_after(50) as waiting:
                    await stream.receive_some(9)
                assert waiting.cancelled_caught
                gate.set()
                assert await stream.receive_some(9) == b"c"
                assert await stream.receive_some(9) == b""
            assert server.received[0].closed.is_set()
            assert not server.received[0].hung_up


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("step", [Hang(), Pause(500), Until(trio.Event())], ids=["hang", "pause", "until"])
async def test_a_client_that_goes_ends_the_script_also_by_half(
    step: Any, half: bool, autojump_clock: MockClock
) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server([Send(b"a"), step, Send(b"never")]) as server:
            async with await dial(server) as stream:
                assert await stream.receive_some(9) == b"a"
                asked = server.received[0]
                with trio.move_on_after(100):
                    await asked.closed.wait()
                assert not asked.closed.is_set(), "it stays while the client does"
                if half:
                    await stream.send_eof()
                    assert await stream.receive_some(9) == b""
            await asked.closed.wait()
            assert asked.hung_up
            assert trio.current_time() < 500


async def test_a_reset_is_a_reset_and_comes_after_what_was_sent(autojump_clock: MockClock) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server([Send(b"a"), Pause(1), Reset(), Send(b"never")]) as server:
            async with await dial(server) as stream:
                assert await stream.receive_some(9) == b"a"
                with pytest.raises(trio.BrokenResourceError):
                    await stream.receive_some(9)
            await server.received[0].closed.wait()
            assert not server.received[0].hung_up


async def test_a_client_that_resets_while_much_is_sent_ends_the_script_quietly(autojump_clock: MockClock) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server([Send(b"x" * 20_000_000), Send(b"never")], b"next") as server:
            async with await dial(server) as stream:
                await stream.receive_some(9)
            await server.received[0].closed.wait()
            assert server.received[0].hung_up
            assert await rest(await dial(server)) == b"next"


async def test_completions_can_be_waited_for(autojump_clock: MockClock) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server(b"one", b"two") as server, trio.open_nursery() as nursery:
            found: list[bytes] = []

            async def wait(count: int) -> None:
                found.append((await server.wait_for_completions(count)).body)

            nursery.start_soon(wait, 2)
            await rest(await dial(server, body=b'{"messages":1}'))
            await rest(await dial(server, "/tokenize"))
            await trio.testing.wait_all_tasks_blocked()
            assert found == [], "a probe is no completion"
            await rest(await dial(server, body=b'{"messages":2}'))
    assert found == [b'{"messages":2}']
    assert [received.path for received in server.received] == [CHAT_PATH, "/tokenize", CHAT_PATH]


async def test_probes_are_answered_from_plain_attributes(autojump_clock: MockClock) -> None:
    paths = {
        "/slots": "slots",
        "/props": "props",
        "/apply-template": "apply_template",
        "/v1/chat/completions/input_tokens": "input_tokens",
        "/tokenize": "tokenize",
    }
    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server:
            for path, name in paths.items():
                assert (await answer(server, path, {"messages": []}))[0] == 200
                setattr(server, name, {"mine": ["é"]})
                status, body = await answer(server, path, {"messages": []})
                assert (status, json.loads(body)) == (200, {"mine": ["é"]})
                setattr(server, name, error_response(501, "no such thing"))
                status, body = await answer(server, path, {"messages": []})
                assert (status, json.loads(body)["error"]["message"]) == (501, "no such thing")
                setattr(server, name, lambda body: error_response(418, body["say"]))
                status, body = await answer(server, path, {"say": "short"})
                assert (status, json.loads(body)["error"]["message"]) == (418, "short")
            assert (await answer(server, "/nothing"))[0] == 404
            assert server.completions == []


async def test_each_probe_can_be_held_and_changed(autojump_clock: MockClock) -> None:
    looks: list[int] = []

    async def hold(path: str) -> None:
        if path == "/slots":
            await trio.sleep(3)
            looks.append(len(looks))
            server.slots = looks

    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server:
            server.on_probe = hold
            began = trio.current_time()
            assert [json.loads((await answer(server, "/slots"))[1]) for _ in range(2)] == [[0], [0, 1]]
            assert trio.current_time() == began + 6
            await answer(server, "/props")
            assert trio.current_time() == began + 6


async def test_a_refused_history_uses_no_script(autojump_clock: MockClock) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server(b"one") as server:
            server.refuse_history = lambda messages: error_response(500, "bad") if messages == ["bad"] else None
            assert (await answer(server, CHAT_PATH, {"messages": ["bad"]}))[0] == 500
            assert await rest(await dial(server, body=b'{"messages":["good"]}')) == b"one"
    assert len(server.completions) == 2


async def test_leaving_the_block_ends_every_connection(autojump_clock: MockClock) -> None:
    with trio.fail_after(LIMIT_S):
        async with scripted_server([Send(b"a"), Hang()]) as server:
            stream = await dial(server)
            assert await stream.receive_some(9) == b"a"
        async with stream:
            assert await stream.receive_some(9) == b""
        assert server.received[0].closed.is_set()
        with pytest.raises(OSError, match="connect"):
            await trio.open_tcp_stream("127.0.0.1", server.port)


def test_a_reply_is_the_stream_that_llama_server_sends() -> None:
    raw = reply("Hi é.", reasoning="Hm.", calls=[("i1", "clock", "{}")], cache_n=7, prompt_n=None)
    assert raw.startswith(STREAM_HEAD)
    assert raw.removeprefix(STREAM_HEAD).decode().split("\n\n") == [
        'data: {"choices": [{"index": 0, "finish_reason": null, "delta": {"role": "assistant", "content": null}}],'
        ' "model": "scripted"}',
        'data: {"choices": [{"index": 0, "finish_reason": null, "delta": {"reasoning_content": "Hm."}}],'
        ' "model": "scripted"}',
        'data: {"choices": [{"index": 0, "finish_reason": null, "delta": {"content": "Hi é."}}], "model": "scripted"}',
        'data: {"choices": [{"index": 0, "finish_reason": null, "delta": {"tool_calls": [{"index": 0, "function":'
        ' {"arguments": "", "name": "clock"}, "id": "i1"}]}}], "model": "scripted"}',
        'data: {"choices": [{"index": 0, "finish_reason": null, "delta": {"tool_calls": [{"index": 0, "function":'
        ' {"arguments": "{}"}}]}}], "model": "scripted"}',
        'data: {"choices": [{"index": 0, "finish_reason": "tool_calls", "delta": {}}], "model": "scripted"}',
        'data: {"choices": [], "model": "scripted", "timings": {"cache_n": 7, "predicted_n": 5}}',
        "data: [DONE]",
        "",
    ]
    assert reply() == STREAM_HEAD + delta(role="assistant", content=None) + ending("stop")
    assert b'"finish_reason": "length"' in reply("Hi", calls=[("", "a", "")], finish_reason="length")


def test_pieces_are_events_of_their_own() -> None:
    assert chunk({"a": "\u2028é"}) == 'data: {"a": "\u2028é"}\n\n'.encode()
    assert chunk({"a": "é\ud800"}) == b'data: {"a": "\\u00e9\\ud800"}\n\n', "such a half has no bytes of its own"
    assert json.loads(call_delta(2, None, None, "x")[6:])["choices"][0]["delta"] == {
        "tool_calls": [{"index": 2, "function": {"arguments": "x"}}]
    }
    assert json.loads(progress(9, 2, 5)[6:])["prompt_progress"] == {
        "total": 9, "cache": 2, "processed": 5, "time_ms": 1
    }  # fmt: skip
