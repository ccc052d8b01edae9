"""A scripted llama-server: real HTTP on a real socket, from inside the test's own Trio loop.

It replays raw responses byte for byte, one for each completion asked for, and keeps every request.
What it sends is a list of steps, so a test says exactly where a stream stops, pauses or breaks.
Probes (`/slots`, `/props`, `/apply-template`, …) are answered from plain attributes.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import trio
from attrs import define, field, frozen


class Step:
    """One thing that a script does."""


@frozen
class Send(Step):
    """Send these bytes in one write."""

    data: bytes


@frozen
class Pause(Step):
    """Send nothing for that many seconds."""

    seconds: float


@frozen
class Until(Step):
    """Wait for an event of the test."""

    event: trio.Event


@frozen
class Hang(Step):
    """Send nothing more until the client goes."""


@frozen
class Reset(Step):
    """Break the connection with a TCP reset."""


Script: TypeAlias = bytes | Sequence[Step]
"""What answers one completion: a whole raw response, or steps. The connection closes after it."""


@define
class Received:
    """One request as it came; `closed` is set when its connection is over, whoever ended it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    time_s: float
    closed: trio.Event = field(factory=trio.Event)
    hung_up: bool = False
    """The client went before the script was over."""

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def raw(self) -> bytes:
        """The request again, to pass it on."""
        lines = [f"{self.method} {self.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


CHAT_PATH = "/v1/chat/completions"


def http_response(status: int, body: bytes, content_type: str = "application/json", headers: str = "") -> bytes:
    """A whole raw response."""
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{headers}"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def json_response(status: int, value: Any, headers: str = "") -> bytes:
    """A whole raw JSON response."""
    return http_response(status, json.dumps(value).encode(), headers=headers)


def error_response(status: int, message: str, kind: str | None = "server_error", headers: str = "") -> bytes:
    """An error as llama-server sends it."""
    error: dict[str, Any] = {"code": status, "message": message}
    if kind is not None:
        error["type"] = kind
    return json_response(status, {"error": error}, headers)


LOADING = error_response(503, "Loading model", "unavailable_error")
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def chunk(value: Any) -> bytes:
    """One SSE event with a JSON value; a lone surrogate goes out as its escape, as some servers send it."""
    text = json.dumps(value, ensure_ascii=False)
    if any("\ud800" <= char <= "\udfff" for char in text):
        text = json.dumps(value)
    return b"data: " + text.encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    """One chunk of a reply: `delta(content="Hi")`."""
    return chunk({"choices": [{"index": 0, "finish_reason": None, "delta": fields}], "model": "scripted"})


def call_delta(index: int, call_id: str | None, name: str | None, arguments: str) -> bytes:
    """One piece of a call."""
    function: dict[str, Any] = {"arguments": arguments}
    piece: dict[str, Any] = {"index": index, "function": function}
    if name is not None:
        function["name"] = name
    if call_id is not None:
        piece["id"] = call_id
    return delta(tool_calls=[piece])


def progress(total: int, cache: int, processed: int) -> bytes:
    """A progress chunk, with the role delta that llama-server repeats in it."""
    return chunk(
        {
            "choices": [{"index": 0, "finish_reason": None, "delta": {"role": "assistant", "content": None}}],
            "prompt_progress": {"total": total, "cache": cache, "processed": processed, "time_ms": 1},
        }
    )


def ending(
    finish_reason: str = "stop", cache_n: int | None = 0, prompt_n: int | None = 10, predicted_n: int | None = 5
) -> bytes:
    """The finish chunk, the figures, and [DONE]."""
    figures = {"cache_n": cache_n, "prompt_n": prompt_n, "predicted_n": predicted_n}
    finish = chunk({"choices": [{"index": 0, "finish_reason": finish_reason, "delta": {}}], "model": "scripted"})
    last = chunk({"choices": [], "model": "scripted", "timings": {k: v for k, v in figures.items() if v is not None}})
    return finish + last + b"data: [DONE]\n\n"


def reply(
    content: str | None = None,
    *,
    reasoning: str | None = None,
    calls: Sequence[tuple[str, str, str]] = (),
    finish_reason: str | None = None,
    cache_n: int | None = 0,
    prompt_n: int | None = 10,
    predicted_n: int | None = 5,
) -> bytes:
    """A whole streamed reply; a call is `(id, name, arguments)`."""
    body = [STREAM_HEAD, delta(role="assistant", content=None)]
    if reasoning is not None:
        body.append(delta(reasoning_content=reasoning))
    if content is not None:
        body.append(delta(content=content))
    for index, (call_id, name, arguments) in enumerate(calls):
        body.append(call_delta(index, call_id, name, ""))
        body.append(call_delta(index, None, None, arguments))
    body.append(ending(finish_reason or ("tool_calls" if calls else "stop"), cache_n, prompt_n, predicted_n))
    return b"".join(body)


@define
class ScriptedServer:
    """Answers completions from `scripts`, in order; keeps what it was asked.

    `refuse_history` may refuse a completion before its script is used: given the messages, it
    returns a raw response or None. An unexpected completion is answered with status 599.
    """

    port: int = 0
    scripts: list[Script] = field(factory=list)
    received: list[Received] = field(factory=list)
    slots: Any = field(factory=lambda: [{"id": 0, "n_ctx": 4096, "is_processing": False}])
    """What `/slots` says: a JSON value, or a raw response as bytes."""
    props: Any = field(
        factory=lambda: {
            "default_generation_settings": {"n_ctx": 4096},
            "total_slots": 2,
            "model_alias": "scripted",
            "chat_template": "",
        }
    )
    apply_template: Callable[[dict[str, Any]], bytes] | bytes = field(
        factory=lambda: lambda body: json_response(200, {"prompt": render_plainly(body)})
    )
    input_tokens: Any = field(factory=lambda: {"input_tokens": 100, "object": "response.input_tokens"})
    tokenize: Any = field(factory=lambda: {"tokens": [1, 2, 3]})
    """A JSON value, or a function of the request's, as `apply_template`."""
    refuse_history: Callable[[list[Any]], bytes | None] | None = None
    models: Any = field(factory=lambda: {"data": [{"id": "scripted", "meta": {"size": 1000}}]})
    lora: Any = field(factory=list)
    on_slot_action: Callable[[str, Any], bytes] | None = None
    """What answers `POST /slots/0?action=…`: given all behind the `/slots/` and the body; without it, status 501."""
    on_probe: Callable[[str], Awaitable[None]] | None = None
    """Called with the path before each answer but a completion's: a place to wait, or to change what is said."""
    _arrived: trio.Event = field(factory=trio.Event)

    @property
    def url(self) -> str:
        """Its address, numeric: a name would be looked up in a thread."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def completions(self) -> list[Received]:
        """The completions asked for, in order."""
        return [request for request in self.received if request.path == CHAT_PATH]

    @property
    def bodies(self) -> list[bytes]:
        """Their bodies."""
        return [request.body for request in self.completions]

    async def wait_for_completions(self, count: int) -> Received:
        """Wait until that many completions were asked for; give the last of them.

        Cancellation: safe at any point.
        """
        while len(self.completions) < count:
            await self._arrived.wait()
        return self.completions[count - 1]

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection: one request, as our client does."""
        async with stream:
            request = await read_request(stream)
            if request is None:
                return
            self.received.append(request)
            self._arrived.set()
            self._arrived = trio.Event()
            try:
                await self._answer(request, stream)
            except trio.BrokenResourceError:
                request.hung_up = True
            finally:
                request.closed.set()

    async def _answer(self, request: Received, stream: trio.SocketStream) -> None:
        if request.path == CHAT_PATH:
            refused = self.refuse_history(request.json()["messages"]) if self.refuse_history else None
            if refused is not None:
                await stream.send_all(refused)
            elif self.scripts:
                await self._play(self.scripts.pop(0), request, stream)
            else:
                await stream.send_all(error_response(599, "the script has no reply left"))
            return
        if self.on_probe is not None:
            await self.on_probe(request.path)
        if request.path.startswith("/slots/"):
            refusal = error_response(501, "This server does not support slots actions.", "not_supported_error")
            act = self.on_slot_action
            await stream.send_all(act(request.path.removeprefix("/slots/"), request.json()) if act else refusal)
            return
        known: dict[str, Any] = {
            "/slots": self.slots,
            "/props": self.props,
            "/v1/models": self.models,
            "/lora-adapters": self.lora,
            "/apply-template": self.apply_template,
            "/v1/chat/completions/input_tokens": self.input_tokens,
            "/tokenize": self.tokenize,
        }
        value = known.get(request.path, error_response(404, "File Not Found", "not_found_error"))
        if callable(value):
            value = value(request.json())
        await stream.send_all(value if isinstance(value, bytes) else json_response(200, value))

    async def _play(self, script: Script, request: Received, stream: trio.SocketStream) -> None:
        """Play a script; stop as soon as the client goes."""
        steps = [Send(script)] if isinstance(script, bytes) else script
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, stream, request, nursery.cancel_scope)
            for step in steps:
                match step:
                    case Send(data=data):
                        try:
                            await stream.send_all(data)
                        except trio.BrokenResourceError:  # not through the nursery: it would come out as a group
                            request.hung_up = True
                            break
                    case Pause(seconds=seconds):
                        await trio.sleep(seconds)
                    case Until(event=event):
                        await event.wait()
                    case Hang():
                        await trio.sleep_forever()
                    case Reset():
                        linger = struct.pack("ii", 1, 0)
                        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        break
            nursery.cancel_scope.cancel()


async def _watch(stream: trio.SocketStream, request: Received, scope: trio.CancelScope) -> None:
    """Notice that the client goes, as llama-server does: a half-close counts."""
    try:
        while await stream.receive_some(4096):
            pass
    except trio.BrokenResourceError:
        pass
    request.hung_up = True
    scope.cancel()


async def read_request(stream: trio.SocketStream) -> Received | None:
    """Read one request as our client sends it; None when the peer left without one."""
    raw = bytearray()
    while b"\r\n\r\n" not in raw:
        data = await stream.receive_some(65536)
        if not data:
            return None
        raw += data
    head, _, body = bytes(raw).partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    length = int(headers.get("content-length", "0"))
    while len(body) < length:
        data = await stream.receive_some(65536)
        if not data:
            return None
        body += data
    return Received(method, path, headers, body, trio.current_time())


def render_plainly(body: dict[str, Any]) -> str:
    """What a prefix-stable template makes of a request: each message by itself, tools in front."""
    parts = [json.dumps(body.get("tools", []))]
    for message in body["messages"]:
        parts.append(json.dumps(message, ensure_ascii=False))
    return "\n".join(parts)


@asynccontextmanager
async def scripted_server(*scripts: Script) -> AsyncIterator[ScriptedServer]:
    """Run a scripted server for a test; its connections end with the block."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port: int = listeners[0].socket.getsockname()[1]
    server = ScriptedServer(port=port, scripts=list(scripts))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, server.serve, listeners)
        yield server
        nursery.cancel_scope.cancel()
