"""The HTTP client against a scripted llama-server, on the autojump clock with exact times."""

from __future__ import annotations

import gc
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock

from boxmaker.errors import InferenceError
from boxmaker.inference.client import Client, Look
from boxmaker.inference.completion import BUDGET_MESSAGE, Completion
from boxmaker.inference.request import ChatRequest
from boxmaker.inference.slots import SlotHold
from boxmaker.proto.chat import (
    ChatEvent,
    Content,
    Progress,
    Queued,
    Reasoning,
    Retrying,
    ThinkingCapped,
    ToolCall,
    ToolCallDelta,
    Waiting,
)
from boxmaker.testing.daemon import EPOCH_S, make_config
from boxmaker.testing.server import (
    LOADING,
    STREAM_HEAD,
    Hang,
    Pause,
    Reset,
    Script,
    ScriptedServer,
    Send,
    Step,
    Until,
    call_delta,
    chunk,
    delta,
    ending,
    error_response,
    http_response,
    json_response,
    progress,
    reply,
    scripted_server,
)


async def tell_nobody(_: Sequence[ChatEvent]) -> None:
    """Take events that nobody asks for."""


HTTP = Path(__file__).parents[2] / "fixtures" / "http"
BODY = b'{"messages":[{"role":"user","content":"hi"}]}'
REQUEST = ChatRequest(slot=0, body=BODY)
PLAIN_END = ending()
BUSY = [{"id": 0, "n_ctx": 4096, "is_processing": True}]
IDLE = [{"id": 0, "n_ctx": 4096, "is_processing": False}]


@define
class Asking:
    """A client and what it emitted, with the virtual time of each event."""

    client: Client
    hold: SlotHold
    events: list[ChatEvent] = field(factory=list)
    times: list[tuple[float, str]] = field(factory=list)

    async def emit(self, events: Sequence[ChatEvent]) -> None:
        now = trio.current_time()
        self.events += events
        self.times += [(round(now, 6), type(event).__name__) for event in events]

    async def ask(self, first_look: Look | None = None) -> Completion:
        return await self.client.chat_with_retry(REQUEST, self.hold, self.emit, first_look)

    async def fail(self) -> InferenceError:
        with pytest.raises(InferenceError) as caught:
            await self.ask()
        return caught.value


@asynccontextmanager
async def asking(directory: Path, server: ScriptedServer, text: str = "") -> AsyncIterator[Asking]:
    config = make_config(directory, server.url, text)
    async with Client(config, uniform=lambda _, most: most, now_s=lambda: EPOCH_S) as client:
        yield Asking(client, client.hold(0))


async def test_a_reply_gives_its_events_and_a_completion(tmp_path: Path, autojump_clock: MockClock) -> None:
    stream = (
        STREAM_HEAD
        + progress(25, 6, 6)
        + progress(25, 6, 25)
        + delta(role="assistant", content=None)
        + delta(reasoning_content="Hm.")
        + delta(content="Hel")
        + delta(content="lo")
        + ending("stop", cache_n=6, prompt_n=19, predicted_n=4)
    )
    async with scripted_server(stream) as server, asking(tmp_path, server) as it:
        completion = await it.ask()
    assert it.events == [
        Progress(total=25, cache=6, processed=6),
        Progress(total=25, cache=6, processed=25),
        Reasoning(text="Hm."),
        Content(text="Hel"),
        Content(text="lo"),
    ]
    assert completion == Completion(
        content="Hello",
        reasoning_content="Hm.",
        tool_calls=(),
        cut=None,
        cache_n=6,
        prompt_n=19,
        predicted_n=4,
        reasoning_tokens=1,
        thinking_capped=False,
        model="scripted",
    )
    assert it.hold.held


async def test_pieces_of_calls_are_events_and_calls_are_whole(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(reply(calls=[("c1", "clock", "{}")])) as server, asking(tmp_path, server) as it:
        completion = await it.ask()
    assert completion.tool_calls == (ToolCall(id="c1", name="clock", arguments="{}"),)
    assert it.events == [
        ToolCallDelta(index=0, id="c1", name="clock", arguments=""),
        ToolCallDelta(index=0, id="", name="", arguments="{}"),
    ]


async def test_a_request_has_the_bytes_and_headers_that_the_design_wants(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    key = tmp_path / "key"
    key.write_text("sekret\n")
    key.chmod(0o600)
    async with scripted_server(reply("x")) as server:
        config = make_config(tmp_path, server.url)
        text = config.file.read_text().replace("[paths]", 'api_key_file = "key"\n[paths]')
        config.file.write_text(text)
        from boxmaker.config import load_config

        async with Client(load_config(config.file, {})) as client:
            await client.chat(REQUEST, _ignore)
    sent = server.completions[0]
    assert sent.body == BODY
    assert sent.method == "POST"
    assert sent.headers["connection"] == "close"
    assert sent.headers["authorization"] == "Bearer sekret"
    assert sent.headers["accept-encoding"] == "identity"
    assert "x-conversation-id" not in sent.headers


async def _ignore(_: Sequence[ChatEvent]) -> None:
    pass


async def test_proxy_variables_of_the_environment_are_not_heeded(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    async with scripted_server(reply("x")) as server, asking(tmp_path, server) as it:
        assert (await it.ask()).content == "x"


async def test_a_server_on_a_unix_socket_is_reached(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    listener = trio.socket.socket(trio.socket.AF_UNIX)
    await listener.bind(str(path))
    listener.listen(5)
    server = ScriptedServer(scripts=[reply("over a file")])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, server.serve, [trio.SocketListener(listener)])
        async with Client(make_config(tmp_path, f"unix:{path}")) as client:
            with trio.fail_after(5):
                completion = await client.chat(REQUEST, _ignore)
        nursery.cancel_scope.cancel()
    assert completion.content == "over a file"


# -- the busy check ----------------------------------------------------------------------------


async def test_a_busy_slot_is_looked_at_after_50_ms_200_ms_and_then_each_second(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server(reply("x")) as server, asking(tmp_path, server) as it:
        looks: list[float] = []

        async def look(path: str) -> None:
            assert path == "/slots"
            looks.append(round(trio.current_time(), 6))
            server.slots = BUSY if len(looks) < 6 else IDLE

        server.on_probe = look
        await it.ask()
    assert looks == [0, 0.05, 0.25, 1.25, 2.25, 3.25]
    assert it.events[0] == Waiting(slot_busy=True)
    assert [type(event) for event in it.events] == [Waiting, Content]
    assert server.completions[0].time_s == pytest.approx(3.25)


async def test_a_slot_that_stays_busy_ends_with_busy_s_and_sends_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server() as server, asking(tmp_path, server, "[timeouts]\nbusy_s = 10\n") as it:
        server.slots = BUSY
        error = await it.fail()
        assert trio.current_time() == pytest.approx(10)
    assert error.detail() == {"limit": "busy_s"}
    assert server.completions == []


async def test_the_slot_is_looked_at_before_every_request_and_every_retry(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with (
        scripted_server(error_response(502, "x"), error_response(502, "x"), reply("x")) as server,
        asking(tmp_path, server) as it,
    ):
        await it.ask()
    assert [request.path for request in server.received] == ["/slots", "/v1/chat/completions"] * 3


async def test_a_first_look_that_was_made_already_is_not_made_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(reply("x")) as server, asking(tmp_path, server) as it:
        await it.ask(Look(state="idle"))
    assert [request.path for request in server.received] == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    "slots",
    [
        error_response(404, "File Not Found"),
        error_response(501, "This server does not support slots endpoint."),
        error_response(401, "Invalid API Key"),
        [],
        [{"id": 1, "is_processing": True}],
        [{"id": 0}],
        {"slots": []},
        http_response(200, b"<html>", "text/html"),
    ],
    ids=["404", "501", "401", "none", "another", "no state", "no list", "html"],
)
async def test_a_server_that_cannot_say_is_asked_once(
    tmp_path: Path, autojump_clock: MockClock, slots: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "boxmaker")
    async with scripted_server(reply("x"), reply("y")) as server, asking(tmp_path, server) as it:
        server.slots = slots
        await it.ask()
        await it.ask()
    assert [request.path for request in server.received].count("/slots") == 1
    assert [record.message for record in caplog.records] == ["slot_check_off"]


async def test_a_server_that_does_not_answer_slots_in_5_s_is_busy(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server(reply("x")) as server, asking(tmp_path, server) as it:
        asked = 0

        async def first_in_vain(path: str) -> None:
            nonlocal asked
            assert path == "/slots"
            asked += 1
            if asked == 1:
                await trio.sleep(60)

        server.on_probe = first_in_vain
        await it.ask()
        assert trio.current_time() == pytest.approx(5.05)
    assert it.events[0] == Waiting(slot_busy=True)


# -- retries -----------------------------------------------------------------------------------


async def test_back_off_doubles_up_to_its_cap_and_gives_the_gate_back(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    text = "[retry]\nattempts = 6\nbase_ms = 500\ncap_ms = 3000\n"
    bad = error_response(503, "overloaded")
    async with scripted_server(bad, bad, bad, bad, bad, reply("x")) as server, asking(tmp_path, server, text) as it:
        completion = await it.ask()
    assert completion.content == "x"
    waits = [event.after_ms for event in it.events if isinstance(event, Retrying)]
    assert waits == [500, 1000, 2000, 3000, 3000]
    assert [event.attempt for event in it.events if isinstance(event, Retrying)] == [2, 3, 4, 5, 6]
    assert [round(request.time_s, 3) for request in server.completions] == [0, 0.5, 1.5, 3.5, 6.5, 9.5]
    assert {request.body for request in server.completions} == {BODY}


async def test_attempts_count_the_first_try(tmp_path: Path, autojump_clock: MockClock) -> None:
    bad = error_response(502, "bad gateway")
    async with (
        scripted_server(bad, bad, bad, bad) as server,
        asking(tmp_path, server, "[retry]\nattempts = 3\n") as it,
    ):
        error = await it.fail()
    assert len(server.completions) == 3
    assert error.detail() == {"status": 502, "attempts": 3}


async def test_retry_after_is_honoured_up_to_the_cap(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [
        error_response(429, "slow down", headers="Retry-After: 2\r\n"),
        error_response(429, "slow down", headers="Retry-After: 3600\r\n"),
        reply("x"),
    ]
    async with scripted_server(*scripts) as server, asking(tmp_path, server) as it:
        await it.ask()
    assert [event.after_ms for event in it.events if isinstance(event, Retrying)] == [2000, 10_000]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 302, 501])
async def test_a_status_that_will_not_pass_is_asked_once(
    tmp_path: Path, autojump_clock: MockClock, status: int
) -> None:
    async with scripted_server(error_response(status, "no")) as server, asking(tmp_path, server) as it:
        error = await it.fail()
    assert len(server.completions) == 1
    assert error.detail() == {"status": status}


async def test_a_500_is_tried_twice_in_all(tmp_path: Path, autojump_clock: MockClock) -> None:
    bad = error_response(500, "template error")
    async with scripted_server(bad, bad, bad) as server, asking(tmp_path, server) as it:
        error = await it.fail()
    assert len(server.completions) == 2
    assert error.detail() == {"status": 500, "attempts": 2}


async def test_context_full_is_asked_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    full = error_response(500, "Context size has been exceeded.")
    async with scripted_server(full) as server, asking(tmp_path, server) as it:
        await it.fail()
    assert len(server.completions) == 1


async def test_a_refused_connection_is_retried(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        url = server.url
    server.port = int(url.rpartition(":")[2])
    async with asking(tmp_path, server, "[retry]\nattempts = 2\n") as it:
        error = await it.fail()
    assert error.kind == "connect"
    assert [type(event) for event in it.events] == [Retrying]


BROKEN: dict[str, list[Step]] = {
    "reset before the headers": [Reset()],
    "close before the headers": [Send(b"")],
    "reset after text": [Send(STREAM_HEAD + delta(content="Three")), Pause(0.1), Reset()],
    "end after text": [Send(STREAM_HEAD + delta(content="Three"))],
    "end after reasoning": [Send(STREAM_HEAD + delta(reasoning_content="Hm"))],
    "end in a line": [Send(STREAM_HEAD + b'data: {"choices":[{"delta":{"con')],
    "end in a call": [Send(STREAM_HEAD + call_delta(0, "c1", "clock", '{"a"'))],
    "a whole call but no end": [Send(STREAM_HEAD + call_delta(0, "c1", "clock", "{}"))],
    "an empty body": [Send(STREAM_HEAD)],
    "only the end mark": [Send(STREAM_HEAD + b"data: [DONE]\n\n")],
    "a chunk that is no JSON": [Send(STREAM_HEAD + b"data: {nope\n\n")],
    "a short chunked body": [
        Send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n40\r\ndata")
    ],
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_stream_is_tried_again(tmp_path: Path, autojump_clock: MockClock, name: str) -> None:
    async with scripted_server(BROKEN[name], reply("whole")) as server, asking(tmp_path, server) as it:
        completion = await it.ask()
    assert completion.content == "whole"
    assert completion.tool_calls == ()
    assert sum(isinstance(event, Retrying) for event in it.events) == 1
    after = it.events[[isinstance(event, Retrying) for event in it.events].index(True) + 1 :]
    assert after == [Content(text="whole")]


async def test_json_or_html_in_place_of_a_stream_is_not_tried_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    for script, named in (
        (json_response(200, {"choices": [{"message": {"content": "x"}}]}), "application/json"),
        (http_response(200, b"<!DOCTYPE html>\n<html>", "text/html; charset=utf-8"), "text/html"),
    ):
        async with scripted_server(script, reply("x")) as server, asking(tmp_path, server) as it:
            error = await it.fail()
        assert error.kind == "foreign"
        assert named in str(error)
        assert len(server.completions) == 1


async def test_a_stream_with_the_wrong_content_type_is_read(tmp_path: Path, autojump_clock: MockClock) -> None:
    script = reply("x").replace(b"text/event-stream", b"application/json")
    async with scripted_server(script) as server, asking(tmp_path, server) as it:
        assert (await it.ask()).content == "x"


async def test_an_error_inside_a_200_counts_as_its_own_status(tmp_path: Path, autojump_clock: MockClock) -> None:
    scripts = [
        STREAM_HEAD + delta(content="So") + chunk({"error": {"code": 503, "message": "busy", "type": "x"}}),
        json_response(200, {"error": {"code": 429, "message": "slow"}}),
        STREAM_HEAD + chunk({"error": "bad luck"}),
        STREAM_HEAD + b'error: {"code":400,"message":"wrong"}\n\n',
    ]
    async with scripted_server(*scripts) as server, asking(tmp_path, server) as it:
        error = await it.fail()
    assert len(server.completions) == 4
    assert error.detail() == {"status": 400, "attempts": 4}


async def test_a_loading_model_is_looked_at_each_second_without_a_retry(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with scripted_server(LOADING, LOADING, LOADING, reply("x")) as server, asking(tmp_path, server) as it:
        await it.ask()
    assert it.events == [Waiting(slot_busy=False), Content(text="x")]
    assert [round(request.time_s, 3) for request in server.completions] == [0, 1, 2, 3]


async def test_a_model_that_loads_too_long_is_an_error_with_503(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server, asking(tmp_path, server, "[retry]\nloading_s = 5\n") as it:
        server.slots = LOADING
        error = await it.fail()
        assert trio.current_time() == pytest.approx(5)
    assert error.detail() == {"status": 503}
    assert server.completions == []


# -- deadlines ---------------------------------------------------------------------------------


async def test_a_connection_that_does_not_stand_within_connect_s_is_retried(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A listener whose queue is full drops what comes, as a host that is down does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        with socket.create_connection(address), ExitStack() as held:
            for _ in range(3):
                filler = held.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(address)
            server = ScriptedServer(port=address[1], slots=[])
            async with asking(tmp_path, server, "[retry]\nattempts = 2\n[timeouts]\nconnect_s = 7\n") as it:
                with pytest.raises(InferenceError, match=r"no connection to the server within 7 s"):
                    await it.client.chat(REQUEST, _ignore)
                assert trio.current_time() == pytest.approx(7)


async def test_no_headers_within_prefill_s_is_final(tmp_path: Path, autojump_clock: MockClock) -> None:
    text = "[timeouts]\nprefill_s = 100\n"
    async with scripted_server([Hang()], reply("x")) as server, asking(tmp_path, server, text) as it:
        error = await it.fail()
        assert trio.current_time() == pytest.approx(100)
        with trio.fail_after(1):
            await server.completions[0].closed.wait()
    assert error.detail() == {"limit": "prefill_s"}
    assert server.completions[0].hung_up
    assert len(server.completions) == 1


async def test_progress_that_grows_renews_prefill_s_and_progress_that_stands_does_not(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    text = "[timeouts]\nprefill_s = 100\n"
    script = [
        Send(STREAM_HEAD + progress(900, 0, 0)),
        Pause(90),
        Send(progress(900, 0, 300)),
        Pause(90),
        Send(progress(900, 0, 300)),
        Pause(90),
        Send(PLAIN_END),
    ]
    async with scripted_server(script) as server, asking(tmp_path, server, text) as it:
        error = await it.fail()
        assert trio.current_time() == pytest.approx(190)
    assert error.kind == "prefill"


async def test_a_stall_between_deltas_is_retried_once_and_comments_do_not_renew_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    text = "[timeouts]\nstall_s = 60\n[retry]\nbase_ms = 1000\n"
    stall = [Send(STREAM_HEAD + delta(content="So")), *[Pause(25), Send(b":\n\n")] * 8]
    async with scripted_server(stall, stall, reply("x")) as server, asking(tmp_path, server, text) as it:
        error = await it.fail()
        assert trio.current_time() == pytest.approx(60 + 1 + 60)
    assert error.detail() == {"limit": "stall_s", "attempts": 2}
    assert len(server.completions) == 2


async def test_a_delta_renews_stall_s(tmp_path: Path, autojump_clock: MockClock) -> None:
    text = "[timeouts]\nstall_s = 60\n"
    script = [Send(STREAM_HEAD), *[Send(delta(content="a")), Pause(50)] * 4, Send(PLAIN_END)]
    async with scripted_server(script) as server, asking(tmp_path, server, text) as it:
        assert (await it.ask()).content == "aaaa"
        assert trio.current_time() == pytest.approx(200)


async def test_time_on_a_slow_channel_is_not_the_servers(tmp_path: Path, autojump_clock: MockClock) -> None:
    text = "[timeouts]\nstall_s = 60\nprefill_s = 60\n"
    script = [Send(STREAM_HEAD + progress(9, 0, 3)), Pause(50), Send(delta(content="a")), Pause(1), Send(PLAIN_END)]

    async def slow(_: Sequence[ChatEvent]) -> None:
        await trio.sleep(1000)

    async with scripted_server(script) as server:
        async with Client(make_config(tmp_path, server.url, text)) as client:
            assert (await client.chat(REQUEST, slow)).content == "a"


async def test_figures_are_waited_for_five_seconds_after_the_end(tmp_path: Path, autojump_clock: MockClock) -> None:
    finish = chunk({"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}]})
    timings = chunk({"choices": [], "timings": {"cache_n": 1, "prompt_n": 2, "predicted_n": 3}})
    late = [Send(STREAM_HEAD + delta(content="a") + finish), Pause(4.9), Send(timings), Hang()]
    never = [Send(STREAM_HEAD + delta(content="b") + finish), Hang()]
    async with scripted_server(late, never) as server, asking(tmp_path, server) as it:
        first = await it.ask()
        assert trio.current_time() == pytest.approx(5)
        second = await it.ask()
        assert trio.current_time() == pytest.approx(10)
    assert (first.content, first.cache_n, first.prompt_n, first.predicted_n) == ("a", 1, 2, 3)
    assert (second.content, second.cache_n) == ("b", None)


async def test_a_break_after_the_end_does_not_hurt(tmp_path: Path, autojump_clock: MockClock) -> None:
    finish = chunk({"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}]})
    script = [Send(STREAM_HEAD + delta(content="a") + finish), Pause(0.1), Reset()]
    async with scripted_server(script) as server, asking(tmp_path, server) as it:
        assert (await it.ask()).content == "a"
    assert len(server.completions) == 1


async def test_a_limit_after_the_end_does_not_hurt(tmp_path: Path, autojump_clock: MockClock) -> None:
    finish = chunk({"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}]})
    script = STREAM_HEAD + delta(content="a") + finish + b":" + b"x" * 2000 + b"\n"
    text = "[inference]\nevent_max_bytes = 1000\n"
    async with scripted_server(script) as server, asking(tmp_path, server, text) as it:
        assert (await it.ask()).content == "a"


async def test_a_named_event_that_is_no_json_is_none_of_ours(tmp_path: Path, autojump_clock: MockClock) -> None:
    script = STREAM_HEAD + delta(content="a") + b"event: ping\ndata: keepalive\n\n" + delta(content="b") + ending()
    async with scripted_server(script) as server, asking(tmp_path, server) as it:
        assert (await it.ask()).content == "ab"
    assert len(server.completions) == 1


async def test_the_end_mark_ends_the_reading_though_the_server_stays(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server([Send(reply("a")), Hang()]) as server, asking(tmp_path, server) as it:
        assert (await it.ask()).content == "a"
        assert trio.current_time() == 0
        with trio.fail_after(1):
            await server.completions[0].closed.wait()


async def test_a_refusal_whose_body_does_not_come_keeps_its_status_and_is_tried_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    head = b"HTTP/1.1 503 Busy\r\nContent-Type: text/plain\r\nContent-Length: 100\r\n\r\n"
    async with scripted_server([Send(head), Hang()], reply("x")) as server, asking(tmp_path, server) as it:
        assert (await it.ask()).content == "x"
        assert trio.current_time() == pytest.approx(5.5)
    retry = it.events[0]
    assert isinstance(retry, Retrying)
    assert retry.error == "the server answered 503: text/plain: an empty body"


async def test_an_endless_error_body_is_cut_off(tmp_path: Path, autojump_clock: MockClock) -> None:
    head = b"HTTP/1.1 400 Bad\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    script = [Send(head + b"no "), *[Pause(1), Send(b"x" * 1000)] * 50]
    async with scripted_server(script) as server, asking(tmp_path, server) as it:
        with trio.fail_after(20):
            error = await it.fail()
        assert trio.current_time() <= 5
    assert error.detail() == {"status": 400}


# -- the thinking cap and the limits -------------------------------------------------------------


async def test_a_server_that_ignores_the_cap_is_left_at_cap_plus_256(tmp_path: Path, autojump_clock: MockClock) -> None:
    text = "[thinking]\ncap = 10\n"
    script = [Send(STREAM_HEAD + delta(reasoning_content="x") * 3000), Hang()]
    async with scripted_server(script) as server, asking(tmp_path, server, text) as it:
        completion = await it.ask()
        with trio.fail_after(1):
            await server.completions[0].closed.wait()
    assert server.completions[0].hung_up
    assert completion.reasoning_tokens == 266
    assert completion.thinking_capped
    assert completion.cut == "thinking_cap"
    assert (completion.cache_n, completion.prompt_n, completion.predicted_n) == (None, None, None)
    assert it.events[-1] == ThinkingCapped(tokens=266)
    assert it.events[:-1] == [Reasoning(text="x")] * 266


async def test_a_server_that_keeps_the_cap_says_so_with_our_own_text(tmp_path: Path, autojump_clock: MockClock) -> None:
    half = len(BUDGET_MESSAGE) // 2
    stream = (
        STREAM_HEAD
        + delta(reasoning_content="so much ")
        + delta(reasoning_content=BUDGET_MESSAGE[:half])
        + delta(reasoning_content=BUDGET_MESSAGE[half:] + "\n")
        + delta(content="Yes.")
        + ending()
    )
    async with scripted_server(stream) as server, asking(tmp_path, server) as it:
        completion = await it.ask()
    assert completion.thinking_capped
    assert completion.cut is None
    assert it.events[-2:] == [ThinkingCapped(tokens=3), Content(text="Yes.")]


async def test_a_reply_over_reply_max_bytes_is_final(tmp_path: Path, autojump_clock: MockClock) -> None:
    text = "[inference]\nreply_max_bytes = 300\n"
    script = STREAM_HEAD + delta(content="é" * 100) + delta(reasoning_content="x" * 101) + ending()
    async with scripted_server(script) as server, asking(tmp_path, server, text) as it:
        error = await it.fail()
    assert error.detail() == {"limit": "reply_max_bytes"}
    assert len(server.completions) == 1


async def test_an_event_over_event_max_bytes_is_final(tmp_path: Path, autojump_clock: MockClock) -> None:
    text = "[inference]\nevent_max_bytes = 1000\n"
    async with (
        scripted_server([Send(STREAM_HEAD + b"data: " + b"x" * 2000), Hang()]) as server,
        asking(tmp_path, server, text) as it,
    ):
        error = await it.fail()
    assert error.detail() == {"limit": "event_max_bytes"}


# -- leaving -----------------------------------------------------------------------------------


async def test_a_cancel_closes_the_connection_and_strands_no_generator(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """pytest turns the warning that a stranded generator gives into an error."""
    places: list[list[Step]] = [
        [Hang()],
        [Send(STREAM_HEAD), Hang()],
        [Send(STREAM_HEAD + delta(reasoning_content="x")), Hang()],
        [Send(STREAM_HEAD + call_delta(0, "c", "clock", "{")), Hang()],
    ]
    for script in places:
        async with scripted_server(script) as server, asking(tmp_path, server) as it:
            with trio.move_on_after(1) as scope:
                await it.ask()
            assert scope.cancelled_caught
            with trio.fail_after(1):
                await server.completions[0].closed.wait()
            assert server.completions[0].hung_up
        gc.collect()


async def test_a_channel_that_breaks_in_emit_closes_the_connection(tmp_path: Path, autojump_clock: MockClock) -> None:
    async def gone(_: Sequence[ChatEvent]) -> None:
        raise trio.BrokenResourceError("the consumer left")

    script = [Send(STREAM_HEAD + delta(content="a")), Hang()]
    async with scripted_server(script) as server:
        async with Client(make_config(tmp_path, server.url)) as client:
            with pytest.raises(trio.BrokenResourceError):
                await client.chat(REQUEST, gone)
        with trio.fail_after(1):
            await server.completions[0].closed.wait()
    gc.collect()


async def test_a_turn_that_waits_does_not_hold_the_gate(tmp_path: Path, autojump_clock: MockClock) -> None:
    """While one backs off, another completes; then the first goes on in its turn."""
    scripts = [error_response(503, "overloaded"), reply("second"), reply("first")]
    async with scripted_server(*scripts) as server, asking(tmp_path, server) as one:
        other = Asking(one.client, one.client.hold(0))
        results: dict[str, str | None] = {}

        async def run(name: str, it: Asking) -> None:
            results[name] = (await it.ask()).content
            it.hold.give_back()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "one", one)
            await server.wait_for_completions(1)
            nursery.start_soon(run, "other", other)
    assert results == {"one": "first", "other": "second"}
    assert Queued(ahead=1) in other.events or other.events == [Content(text="second")]


async def test_only_one_request_of_ours_is_on_its_way_to_a_slot(tmp_path: Path, autojump_clock: MockClock) -> None:
    release = trio.Event()
    scripts: list[Script] = [
        [Send(STREAM_HEAD + delta(content="1")), Until(release), Send(PLAIN_END)],
        reply("2"),
        reply("3"),
    ]
    async with scripted_server(*scripts) as server, asking(tmp_path, server) as first:
        others = [Asking(first.client, first.client.hold(0)) for _ in range(2)]

        async def run(it: Asking) -> None:
            await it.ask()
            it.hold.give_back()

        async with trio.open_nursery() as nursery:
            for it in (first, *others):
                nursery.start_soon(run, it)
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(30)
            assert len(server.completions) == 1
            release.set()
    assert len(server.completions) == 3
    assert others[0].events == [Queued(ahead=1), Content(text="2")]
    assert others[1].events == [Queued(ahead=2), Queued(ahead=1), Content(text="3")]


async def test_many_streams_through_one_client_give_each_its_own_reply(tmp_path: Path) -> None:
    """More than httpx's default pool of connections; real time, because nothing waits."""
    count = 150
    async with scripted_server() as server:
        async with Client(make_config(tmp_path, server.url)) as client:
            server.scripts = [reply("same") for _ in range(count)]
            async with trio.open_nursery() as nursery:
                nursery.cancel_scope.deadline = trio.current_time() + 60
                for _ in range(count):
                    nursery.start_soon(client.chat, REQUEST, _ignore)
    assert len(server.completions) == count


def test_the_jitter_is_full_by_default() -> None:
    """The default source is random.uniform: daemons that failed together do not come back together."""
    assert (Client.__init__.__kwdefaults__ or {})["uniform"] == random.uniform


# -- what a try has done to its slot -------------------------------------------------------------

IN_STREAM = b'data: {"error":{"code":400,"message":"no","type":"invalid_request_error"}}\n\n'


@pytest.mark.parametrize(
    ("script", "taken"),
    [
        (reply("Hi"), True),
        (error_response(400, "no"), False),
        (error_response(400, "the request exceeds the available context size"), True),  # found out in the slot
        (error_response(503, "busy"), False),
        (error_response(500, "failed at it"), True),
        (STREAM_HEAD + IN_STREAM, True),
        (STREAM_HEAD + delta(content="Hi"), True),
        ([Reset()], True),  # it was sent: the server, or what stands before it, may have worked for minutes
    ],
)  # fmt: skip
async def test_a_request_that_was_not_begun_has_not_used_its_slot(
    tmp_path: Path, autojump_clock: MockClock, script: Script, taken: bool
) -> None:
    async with scripted_server(script) as server, asking(tmp_path, server, "[retry]\nattempts = 1\n") as it:
        it.client.record.used(0, "a")
        it.client.record.completed(0, "a")
        with suppress(InferenceError):
            await it.client.chat(ChatRequest(slot=0, body=BODY, session="b"), it.emit)
        it.client.record.used(0, "a")
        assert it.client.record.completed(0, "a").other == ("b" if taken else None)


async def test_a_cancel_before_a_connection_stands_has_not_used_the_slot(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A socket that does not accept: its queue of one is full."""
    with ExitStack() as held:
        listening = held.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for _ in range(4):
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        async with Client(make_config(tmp_path, url), now_s=lambda: EPOCH_S) as client:
            client.record.used(0, "a")
            client.record.completed(0, "a")
            with trio.move_on_after(1):
                await client.chat(ChatRequest(slot=0, body=BODY, session="b"), tell_nobody)
            client.record.used(0, "a")
            assert client.record.completed(0, "a").other is None


async def test_a_request_that_was_never_sent_has_not_used_its_slot(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with scripted_server() as server:
        url = server.url
    async with Client(make_config(tmp_path, url), now_s=lambda: EPOCH_S) as client:
        client.record.used(0, "a")
        client.record.completed(0, "a")
        with pytest.raises(InferenceError, match="cannot reach"):
            await client.chat(ChatRequest(slot=0, body=BODY, session="b"), tell_nobody)
        client.record.used(0, "a")
        assert client.record.completed(0, "a").other is None
