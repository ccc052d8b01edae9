"""A forced real llama-server: a proxy that makes it say what a test wants.

The server generates with its real tokenizer, slots, cache and timings; only the choice of tokens is
ours. It takes `tool_choice: "none"` with a grammar while it still renders the tools, and a grammar
may list token ids. The ids are those that the server's own tokenizer gives for the rendered prompt with
the wanted text behind it, so what is generated is what will be read again. Text in the demo
template's form is turned into reasoning, content and tool-call deltas, as the server's own parser would.

Laws:
* Only deltas and the finish reason after calls are ours; every other event passes byte for byte.
* What the real server refuses is refused in its own words, and the reply waits for the next completion.
* A reply that cannot be forced is answered with status 599, which no client tries again: one with a character that
  is no whole token (inside it such a grammar is not exact), or whose first token grows into the prompt.

Source: design.md section 11.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import h11
import trio
from attrs import define, field, frozen

from boxmaker.testing.server import (
    CHAT_PATH,
    STREAM_HEAD,
    Received,
    error_response,
    http_response,
    read_request,
)


@frozen(kw_only=True)
class ForcedReply:
    """What the model is to say; a call is `(name, arguments)`."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()


@frozen
class Segment:
    """A part of the generated text: up to where it goes, and which delta it becomes (None: markup)."""

    end: int
    kind: str | None
    call: tuple[str, str] | None = None


@frozen(kw_only=True)
class Forced:
    """One forced completion: the tokens of its prompt, and those it was made to generate."""

    prompt_tokens: list[int]
    reply_tokens: list[int]


def segments(reply: ForcedReply) -> tuple[str, list[Segment]]:
    """The text of a reply as the demo's template renders it, cut into parts."""
    text = ""
    parts: list[Segment] = []

    def add(piece: str, kind: str | None, call: tuple[str, str] | None = None) -> None:
        nonlocal text
        text += piece
        if piece:
            parts.append(Segment(len(text), kind, call))

    if reply.reasoning:
        add("<think>\n", None)
        add(f"{reply.reasoning}\n", "reasoning_content")
        add("</think>\n\n", None)
    # llama-server leaves the line end before a call in the content
    add(f"{reply.content}\n" if reply.content and reply.calls else reply.content, "content")
    for at, (name, arguments) in enumerate(reply.calls):
        written = json.dumps(arguments, ensure_ascii=False)
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'
        add(f"\n{call}" if at else call, None, (name, written))
    return text, parts


@define
class ForcedServer:
    """Stands in front of a real server; completions take their replies from `replies`, in order.

    Without a reply left a completion is passed on as it is. Everything else is always passed on.
    """

    host: str
    upstream_port: int
    port: int = 0
    replies: list[ForcedReply] = field(factory=list)
    completions: list[Received] = field(factory=list)
    forced: list[Forced] = field(factory=list)
    _calls: int = 0

    @property
    def url(self) -> str:
        """The proxy's address."""
        return f"http://127.0.0.1:{self.port}"

    async def ask(self, path: str, body: Any) -> Any:
        """Ask the real server something that is no stream; its answer, of whatever status."""
        async with await trio.open_tcp_stream(self.host, self.upstream_port) as server:
            async with aclosing(_exchange(server, "POST", path, json.dumps(body).encode())) as pieces:
                raw = b"".join([piece async for piece in pieces if isinstance(piece, bytes)])
        return json.loads(raw)

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, special tokens recognised."""
        return [token["id"] for token in await self._tokens(text)]

    async def _tokens(self, text: str) -> list[dict[str, Any]]:
        body = {"content": text, "add_special": True, "parse_special": True, "with_pieces": True}
        tokens: list[dict[str, Any]] = (await self.ask("/tokenize", body))["tokens"]
        return tokens

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection; when one side goes, so does the connection to the other."""
        async with stream:
            request = await read_request(stream)
            if request is None:
                return
            async with await trio.open_tcp_stream(self.host, self.upstream_port) as server, trio.open_nursery() as both:
                both.start_soon(_until_gone, stream, both.cancel_scope)
                if request.path == CHAT_PATH:
                    self.completions.append(request)
                with suppress(trio.BrokenResourceError, h11.RemoteProtocolError):  # one side has gone
                    if request.path == CHAT_PATH and self.replies:
                        await self._force(self.replies.pop(0), request, stream, server)
                    else:
                        await _pass_on(request, stream, server)
                both.cancel_scope.cancel()

    async def _force(
        self, reply: ForcedReply, request: Received, stream: trio.SocketStream, server: trio.SocketStream
    ) -> None:
        body = request.json()
        rendered = {key: body[key] for key in ("messages", "tools", "chat_template_kwargs") if key in body}
        prompt = (await self.ask("/apply-template", rendered)).get("prompt")
        if prompt is None:  # it says why when it is asked for the completion itself
            self.replies.insert(0, reply)
            await _pass_on(request, stream, server)
            return
        text, parts = segments(reply)
        prompt_tokens = await self.tokenize(prompt)
        whole = await self._tokens(prompt + text)
        wanted = [token["id"] for token in whole[len(prompt_tokens) :]]
        problem = _problem(prompt_tokens, whole)
        if problem:
            await stream.send_all(error_response(599, f"this reply cannot be forced: {problem}"))
            return
        body |= {"tool_choice": "none", "reasoning_format": "none", "temperature": 0}
        body["grammar"] = "root ::= " + (" ".join(f"<[{token}]>" for token in wanted) or '""')
        translator = _Translator(text, parts, bool(reply.calls), self)
        buffer = b""
        async with aclosing(_exchange(server, "POST", CHAT_PATH, json.dumps(body).encode())) as pieces:
            async for piece in pieces:
                if isinstance(piece, h11.Response):
                    if piece.status_code != 200:
                        self.replies.insert(0, reply)
                        refusal = b"".join([rest async for rest in pieces if isinstance(rest, bytes)])
                        await stream.send_all(http_response(piece.status_code, refusal))
                        return
                    self.forced.append(Forced(prompt_tokens=prompt_tokens, reply_tokens=wanted))
                    await stream.send_all(STREAM_HEAD)
                    continue
                *events, buffer = (buffer + piece).split(b"\n\n")
                for event in events:
                    await stream.send_all(translator.translate(event + b"\n\n"))
        await stream.send_all(buffer)

    def next_call_id(self) -> str:
        """An id as the server makes them, but the same in each run."""
        self._calls += 1
        return f"forced{self._calls:026d}"


class _Translator:
    """Turns the content deltas of a forced stream into what the server's own parser would have sent."""

    def __init__(self, text: str, parts: list[Segment], has_calls: bool, server: ForcedServer) -> None:
        self._text = text
        self._parts = parts
        self._has_calls = has_calls
        self._server = server
        self._seen = 0
        self._at = 0
        self._index = 0

    def translate(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return event
        chunk = json.loads(event[6:])
        if not chunk.get("choices"):
            return event
        choice = chunk["choices"][0]
        if choice.get("finish_reason") == "stop":
            assert self._seen == len(self._text), "the server stopped before it had said what it was forced to"
            if self._has_calls:
                return _event(chunk | {"choices": [choice | {"finish_reason": "tool_calls"}]})
        content = choice["delta"].get("content")
        if not content:
            return event
        deltas = self._deltas(content)
        return b"".join(_event(chunk | {"choices": [choice | {"delta": delta}]}) for delta in deltas)

    def _deltas(self, content: str) -> list[dict[str, Any]]:
        until = self._seen + len(content)
        assert self._text[self._seen : until] == content, "the server said something else than it was forced to"
        deltas: list[dict[str, Any]] = []
        while self._at < len(self._parts) and self._seen < until:
            part = self._parts[self._at]
            end = min(until, part.end)
            if part.kind is not None:
                deltas.append({part.kind: self._text[self._seen : end]})
            self._seen = end
            if end == part.end:
                self._at += 1
                if part.call is not None:
                    name, arguments = part.call
                    function = {"name": name, "arguments": arguments}
                    call = {"index": self._index, "id": self._server.next_call_id(), "type": "function"}
                    deltas.append({"tool_calls": [call | {"function": function}]})
                    self._index += 1
        return deltas


def _event(chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def _problem(prompt_tokens: list[int], whole: list[dict[str, Any]]) -> str | None:
    """Why the tokens behind the prompt cannot be forced, if they cannot."""
    if [token["id"] for token in whole[: len(prompt_tokens)]] != prompt_tokens:
        return "its first token grows into the prompt's last"
    for token in whole[len(prompt_tokens) :]:
        if not isinstance(token["piece"], str):  # bytes, because they are not UTF-8 by themselves
            return f"the bytes {bytes(token['piece']).hex(' ')} are a token and no whole characters"
    return None


async def _pass_on(request: Received, stream: trio.SocketStream, server: trio.SocketStream) -> None:
    """Send a request to the real server as it is, and its answer back as it is."""
    await server.send_all(request.raw())
    while piece := await server.receive_some(65536):
        await stream.send_all(piece)


async def _exchange(
    server: trio.SocketStream, method: str, path: str, body: bytes
) -> AsyncGenerator[bytes | h11.Response, None]:
    """Send a request, give the head of the answer, then the pieces of its body; read it to the end."""
    connection = h11.Connection(h11.CLIENT)
    headers = [
        ("Host", "llama-server"),
        ("Connection", "close"),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
    ]
    request = h11.Request(method=method, target=path, headers=headers)
    sent = [connection.send(request), connection.send(h11.Data(data=body)), connection.send(h11.EndOfMessage())]
    await server.send_all(b"".join(piece or b"" for piece in sent))
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await server.receive_some(65536))
        elif isinstance(event, h11.Response):
            yield event
        elif isinstance(event, h11.Data):
            yield bytes(event.data)
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            return


async def _until_gone(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    try:
        while await stream.receive_some(4096):
            pass
    except trio.BrokenResourceError:
        pass
    scope.cancel()


@asynccontextmanager
async def forced_server(url: str) -> AsyncIterator[ForcedServer]:
    """Put a forced server in front of a real one at `url` (`http://127.0.0.1:PORT`)."""
    host, _, port = url.removeprefix("http://").partition(":")
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    server = ForcedServer(host=host, upstream_port=int(port), port=listeners[0].socket.getsockname()[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, server.serve, listeners)
        yield server
        nursery.cancel_scope.cancel()
