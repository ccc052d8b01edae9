"""The HTTP client of one llama-server: completions, their retries, and probes.

Laws:
* One request in flight per slot, and none to a slot that somebody else is seen to use.
* One connection per request: the server closes after each stream although it says keep-alive.
* Every deadline is Trio's; httpx has none. Time spent on a slow channel does not count against the server.
* A stream is left by reading to its end or by cancelling, never by dropping a generator.

This is the only module that imports httpx. Source: design.md section 7; `../shared/llama-server.md`.
"""

from __future__ import annotations

import functools
import json
import math
import random
import ssl
import time
import types
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal

import certifi
import httpx
import trio
from attrs import frozen

from boxmaker.config import Config
from boxmaker.errors import InferenceError
from boxmaker.inference.cause import SlotRecord, slot_seen
from boxmaker.inference.completion import Completion, CompletionAssembler, error_of, one_line
from boxmaker.inference.request import ChatRequest
from boxmaker.inference.retry import GiveUp, RetryPolicy, is_context_full, is_loading
from boxmaker.inference.slots import SlotGate, SlotHold
from boxmaker.inference.sse import SseDecoder
from boxmaker.log import log_event
from boxmaker.proto.chat import ChatEvent, Content, Queued, Reasoning, Retrying, ToolCallDelta, Waiting

Emit = Callable[[Sequence[ChatEvent]], Awaitable[None]]
"""Takes all events of one network read, in order; may wait for a slow channel."""

AFTER_FINISH_S = 5.0
"""How long usage, timings and [DONE] are waited for once the reply is whole."""
RENEW_S = 0.001
"""How much later a deadline must come to be worth moving."""
LOOK_S = 5.0
"""A server that does not answer GET /slots within this is busy (it answers while it decodes)."""
LOADING_LOOK_S = 1.0
BUSY_LOOKS_S = (0.05, 0.2)
"""The first waits between looks; then one a second: faster would starve the server's own disconnect check."""
BUSY_LOOK_S = 1.0
ERROR_BODY_MAX_BYTES = 65536
ERROR_BODY_S = 5.0
INFLATED_BYTES = 65536
"""How much of a compressed body is unpacked at once."""
PROBE_MAX_BYTES = 64 * 1024 * 1024
NO_SLOTS_STATUSES = (401, 403, 404, 405, 501)


@frozen(kw_only=True)
class Look:
    """What one look at the slot gave; `error` when the server could not be asked."""

    state: Literal["idle", "busy", "failed"]
    error: InferenceError | None = None


@frozen(kw_only=True)
class Answer:
    """A whole response: its status, the JSON of its body (None when it is none)."""

    status: int
    value: Any
    retry_after: str | None

    def entries(self) -> list[dict[str, Any]]:
        """The objects of the list that the answer is, as `/slots` is one; none where it is no such answer."""
        listed = self.value if self.status == 200 and isinstance(self.value, list) else []
        return [entry for entry in listed if isinstance(entry, dict)]

    def error(self) -> InferenceError:
        """The answer as an error, for statuses other than 200."""
        return error_of(self.status, self.value, self.retry_after)


class Client:
    """The owner's llama-server, shared by all turns of the daemon.

    `uniform` and `now_s` are the sources of jitter and of the date for Retry-After. Use it as an
    async context manager; it has no connection open between requests.
    """

    def __init__(
        self,
        config: Config,
        *,
        uniform: Callable[[float, float], float] = random.uniform,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._uniform = uniform
        self._now_s = now_s
        self._gates: dict[int, SlotGate] = {}
        self._looks = True
        self._look_number = 0
        self._idle_at: dict[int, int] = {}
        self.record = SlotRecord()
        """Who used which slot, and how it was seen before."""
        self._http = _Http(config)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def hold(self, slot: int) -> SlotHold:
        """A place at the slot's gate, not taken yet; the turn takes it and gives it back."""
        return SlotHold(self._gates.setdefault(slot, SlotGate()))

    # -- probes ------------------------------------------------------------------------------

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Send one request and read the whole answer.

        Raises:
            InferenceError: kind `connect` (also for a connection lost in mid-answer), `limit`.

        Cancellation: safe at any point; the connection is closed. There is no deadline here.
        """
        content = b"" if body is None else json.dumps(body, ensure_ascii=False).encode("utf-8")
        raw = bytearray()
        try:
            async with self._http.open(method, path, content) as response:
                await _read(response, raw, PROBE_MAX_BYTES)
        except httpx.HTTPError as exc:
            raise _transport_error("connect", exc) from exc
        return Answer(
            status=response.status_code,
            value=_json_or_text(raw, response.headers.get("content-type", "")),
            retry_after=response.headers.get("retry-after"),
        )

    async def look(self, slot: int) -> Look:
        """Ask `/slots` whether the slot is free.

        A server that has no `/slots`, or not this slot in it, turns the looking off for the
        process; then every answer is `idle`. It never raises for what the server does.

        Cancellation: safe at any point.
        """
        if not self._looks:
            return Look(state="idle")
        self._look_number = number = self._look_number + 1
        answer = None
        try:
            with trio.move_on_after(LOOK_S):
                answer = await self.ask("GET", "/slots")
        except InferenceError as exc:
            return Look(state="failed", error=exc)
        if answer is None:
            return Look(state="busy")
        for entry in answer.entries():
            if entry.get("id") == slot and type(entry.get("is_processing")) is bool:
                if entry["is_processing"]:
                    return Look(state="busy")
                self._idle_at[slot] = number
                self.record.looked(slot, slot_seen(entry))
                return Look(state="idle")
        if answer.status not in (200, *NO_SLOTS_STATUSES):
            return Look(state="failed", error=answer.error())
        self._looks = False
        log_event("slot_check_off", slot=slot, status=answer.status)
        return Look(state="idle")

    @property
    def looks_begun(self) -> int:
        """How many looks were begun so far."""
        return self._look_number

    def was_idle(self, slot: int, since: int) -> bool:
        """Has a look found the slot free that was begun after the first `since` looks?"""
        return self._idle_at.get(slot, 0) > since

    def look_again(self) -> None:
        """Another server may have `/slots` where the one before had none."""
        self._looks = True

    # -- completions -------------------------------------------------------------------------

    async def chat(self, request: ChatRequest, emit: Emit) -> Completion:
        """Make one try of one completion; the caller holds the slot's gate.

        Raises:
            InferenceError: the try failed; what was emitted is void.

        Cancellation: safe at any point; the connection is closed, which frees the server's slot.
        """
        attempt = _Try(self._http, self._config, request, emit)
        try:
            return await attempt.run()
        finally:
            if attempt.taken:
                self.record.used(request.slot, request.session, streamed=attempt.streams)

    async def chat_with_retry(
        self, request: ChatRequest, hold: SlotHold, emit: Emit, first_look: Look | None = None
    ) -> Completion:
        """Make one completion, with every try that the policy allows.

        Takes `hold` if it is not taken, gives it back while it backs off or the model loads, and
        returns or raises with whatever state it has then: the turn gives it back. `first_look` is
        a look at the slot that was made after the gate was taken.

        Raises:
            InferenceError: the last failure, with the number of tries.

        Cancellation: safe at any point; nothing of the completion is left on the server.
        """
        policy = RetryPolicy(self._config.retry, self._uniform, self._now_s)
        loading_since: float | None = None

        async def on_ahead(ahead: int) -> None:
            await emit([Queued(ahead=ahead)])

        while True:
            await hold.take(on_ahead)
            try:
                await self._until_idle(request.slot, emit, first_look)
                if hold.prepare is not None and await hold.prepare():
                    await self._until_idle(request.slot, emit, None)
                hold.on_use()
                return await self.chat(request, emit)
            except InferenceError as error:
                first_look = None
                if is_loading(error):
                    now = trio.current_time()
                    if loading_since is None:
                        loading_since = now
                        await emit([Waiting(slot_busy=False)])
                    if now - loading_since >= self._config.retry.loading_s:
                        raise
                    hold.give_back()
                    await trio.sleep(LOADING_LOOK_S)
                    continue
                loading_since = None
                decision = policy.failed(error)
                if isinstance(decision, GiveUp):
                    error.attempts = policy.tries
                    raise
                await emit([Retrying(attempt=policy.tries + 1, after_ms=decision.after_ms, error=str(error))])
                log_event(
                    "retrying",
                    attempt=policy.tries + 1,
                    after_ms=decision.after_ms,
                    kind=error.kind,
                    status=error.status,
                )
                hold.give_back()
                await trio.sleep(decision.after_ms / 1000)

    async def _until_idle(self, slot: int, emit: Emit, look: Look | None) -> None:
        """Wait, gate in hand, for somebody else to leave the slot."""
        began = trio.current_time()
        waits = iter(BUSY_LOOKS_S)
        told = False
        while True:
            if look is None:
                look = await self.look(slot)
            if look.error is not None:
                raise look.error
            if look.state == "idle":
                return
            if not told:
                told = True
                await emit([Waiting(slot_busy=True)])
            left = self._config.timeouts.busy_s - (trio.current_time() - began)
            if left <= 0:
                raise InferenceError(
                    kind="limit",
                    limit="busy_s",
                    message=f"slot {slot} was busy with somebody else's request for {self._config.timeouts.busy_s} s",
                )
            await trio.sleep(min(left, next(waits, BUSY_LOOK_S)))
            look = None


class _Body(httpx.AsyncByteStream):
    """The bytes of a request as a plain iterator: httpx's own is a generator, which a cancel would strand."""

    def __init__(self, data: bytes) -> None:
        self._chunks = [data] if data else []

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._chunks:
            raise StopAsyncIteration
        return self._chunks.pop()


def _tls() -> ssl.SSLContext:
    """How an https server is checked: as httpx would, but for SSLKEYLOGFILE, which would have the keys written down."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificate and host name
    context.load_verify_locations(certifi.where())
    return context


class _Http:
    """How requests are sent: every header is ours, and nothing is heeded of the environment."""

    def __init__(self, config: Config) -> None:
        url = config.server.url
        unix = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._base = "http://llama-server" if unix else url
        # The few paths that we ask for are taken apart once.
        self._url = functools.cache(lambda path: httpx.URL(f"{self._base}{path}"))
        self._headers = {
            "Host": httpx.URL(self._base).netloc.decode("ascii"),
            "Connection": "close",
            "Accept": "text/event-stream, application/json",
            "Accept-Encoding": "identity",
        }
        if config.server.api_key is not None:
            self._headers["Authorization"] = f"Bearer {config.server.api_key}"
        # The transport alone: httpx's client would keep a server's cookies, and build a request of its own for each
        # Location, which some addresses make it fail at.
        self._transport = httpx.AsyncHTTPTransport(
            uds=unix,
            trust_env=False,
            verify=_tls() if url.startswith("https:") else False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self.aclose = self._transport.aclose

    @asynccontextmanager
    async def open(
        self, method: str, path: str, content: bytes, trace: Callable[[str, Any], Awaitable[None]] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a request; the response is open inside the block, its connection closed after it."""
        headers = dict(self._headers)
        if content:
            headers["Content-Type"] = "application/json"
        if content or method == "POST":
            headers["Content-Length"] = str(len(content))
        extensions: dict[str, Any] = {"timeout": httpx.Timeout(None).as_dict()}
        if trace is not None:
            extensions["trace"] = trace
        request = httpx.Request(method, self._url(path), headers=headers, stream=_Body(content), extensions=extensions)
        response = await self._transport.handle_async_request(request)
        try:
            yield response
        finally:
            await response.aclose()


class _Try:
    """One POST and its stream."""

    def __init__(self, http: _Http, config: Config, request: ChatRequest, emit: Emit) -> None:
        self._http = http
        self._timeouts = config.timeouts
        self._request = request
        self._emit = emit
        self._decoder = SseDecoder(config.inference.event_max_bytes)
        self._assembler = CompletionAssembler(
            thinking_cap=config.thinking.cap, reply_max_bytes=config.inference.reply_max_bytes
        )
        self._scope = trio.CancelScope()
        self._phase: Literal["connect", "prefill", "stall", "finished"] = "connect"
        self._processed = -1
        self._events_came = False
        self.taken = False
        """The server may have begun to work on the request: it was sent, and not refused before that."""
        self.streams = False
        """The server has begun to answer with a stream, so the slot is its."""

    async def run(self) -> Completion:
        headers_seen = False
        self._scope.deadline = trio.current_time() + self._timeouts.connect_s
        with self._scope:
            try:
                async with self._http.open(
                    "POST", "/v1/chat/completions", self._request.body, trace=self._connected
                ) as response:
                    headers_seen = True
                    if response.status_code != 200:
                        error = await self._refusal(response)
                        self.taken = _may_be_of_work(error)
                        raise error
                    self.streams = True
                    await self._stream(response)
            except InferenceError:
                if not self._assembler.finished:  # a whole reply is kept, whatever comes after it
                    raise
            except httpx.HTTPError as exc:
                if not self._assembler.finished:
                    raise _transport_error("broken" if headers_seen else "connect", exc) from exc
        if self._scope.cancelled_caught and not self._assembler.finished:
            raise self._timed_out()
        return self._assembler.completion()

    def _wait(self, phase: Literal["prefill", "stall", "finished"], seconds: float) -> None:
        """Give the server that long from now, to the millisecond: setting a deadline costs as much as a token."""
        deadline = trio.current_time() + seconds
        if phase != self._phase or deadline - self._scope.deadline >= RENEW_S:
            self._phase = phase
            self._scope.deadline = deadline

    async def _connected(self, name: str, _: Any) -> None:
        """httpcore's trace: once the connection stands, the wait is for the first delta."""
        if name in ("connection.connect_tcp.complete", "connection.connect_unix_socket.complete"):
            self.taken = True
            self._wait("prefill", self._timeouts.prefill_s)

    async def _stream(self, response: httpx.Response) -> None:
        await _each_piece(response, self._take)
        if self._decoder.foreign is not None:
            raise _foreign(self._decoder.foreign, response.headers.get("content-type", ""))
        events: list[ChatEvent] = []
        for event in self._decoder.eof():
            self._events_came = True
            events += self._assembler.feed(event)
        content_type = response.headers.get("content-type", "")
        if not self._events_came and _media_type(content_type).lower() not in ("", "text/event-stream"):
            raise _foreign(b"", content_type)
        if events:
            await self._emit(events)
        self._assembler.eof()

    async def _take(self, chunk: bytes) -> bool:
        """Take a piece of the body; say whether nothing more of it is wanted."""
        assembler = self._assembler
        events: list[ChatEvent] = []
        failure: InferenceError | None = None
        try:
            for event in self._decoder.feed(chunk):
                self._events_came = True
                events += assembler.feed(event)
            failure = self._decoder.over
        except InferenceError as exc:  # raised below: what stands before it is told, wherever reads are cut
            failure = exc
        if assembler.finished:
            if self._phase != "finished":
                self._wait("finished", AFTER_FINISH_S)
        elif assembler.begun:
            if any(_has_text(event) for event in events):
                self._wait("stall", self._timeouts.stall_s)
        elif assembler.processed > self._processed:
            self._processed = assembler.processed
            self._wait("prefill", self._timeouts.prefill_s)
        if events:
            await _off_the_clock(self._scope, self._emit(events))
        if failure is not None:
            raise failure
        return assembler.done or assembler.over_cap or self._decoder.full

    async def _refusal(self, response: httpx.Response) -> InferenceError:
        self._scope.deadline = math.inf
        raw = bytearray()
        try:
            with trio.move_on_after(ERROR_BODY_S):
                await _read(response, raw, ERROR_BODY_MAX_BYTES)
        except (httpx.HTTPError, InferenceError):
            pass  # the status is known, and what came of the body may say more
        value = _json_or_text(raw, response.headers.get("content-type", ""))
        return error_of(response.status_code, value, response.headers.get("retry-after"))

    def _timed_out(self) -> InferenceError:
        timeouts = self._timeouts
        if self._phase == "connect":
            return InferenceError(kind="connect", message=f"no connection to the server within {timeouts.connect_s} s")
        if self._phase == "stall":
            return InferenceError(
                kind="stall", limit="stall_s", message=f"the server sent nothing new for {timeouts.stall_s} s"
            )
        return InferenceError(
            kind="prefill", limit="prefill_s", message=f"the server began no reply within {timeouts.prefill_s} s"
        )


@types.coroutine
def _off_the_clock(scope: trio.CancelScope, work: Awaitable[None]) -> Generator[Any, Any, None]:
    """Await work of ours that takes nothing from the time of a scope.

    The scope's deadline is moved only when the work has to wait, which it hardly ever has: moving it each time would
    cost as much as the rest of a token's way.

    Cancellation: safe at any point; the work is cancelled.
    """
    steps = work.__await__()
    try:
        trap = next(steps)
    except StopIteration:
        return
    left = scope.deadline - trio.current_time()
    scope.deadline = math.inf
    try:
        while True:
            trap = steps.send((yield trap))
    except StopIteration:
        scope.deadline = trio.current_time() + left
    finally:
        steps.close()


def _has_text(event: ChatEvent) -> bool:
    """Has the reply grown? Empty pieces must not keep it alive."""
    if isinstance(event, ToolCallDelta):
        return bool(event.id or event.name or event.arguments)
    return type(event) in (Content, Reasoning)  # isinstance of a union is ten times as slow, and this is once a token


class _Plain:
    """Undoes the compression of a server that was asked for none, piece by piece: a bomb must meet our limits.

    httpx would do it, but a body that is not what its header says would strand httpx's own generators.
    """

    def __init__(self, response: httpx.Response) -> None:
        encoding = response.headers.get("content-encoding", "").strip().lower()
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32) if encoding in ("gzip", "x-gzip", "deflate") else None

    def feed(self, chunk: bytes) -> Iterable[bytes]:
        """Give what a chunk stands for.

        Raises:
            InferenceError: kind `broken`, when it is not compressed as it says.
        """
        return (chunk,) if self._inflate is None else self._inflated(self._inflate, chunk)

    @staticmethod
    def _inflated(inflate: zlib._Decompress, chunk: bytes) -> Iterator[bytes]:
        piece = b""
        while chunk or len(piece) == INFLATED_BYTES:
            try:
                piece = inflate.decompress(chunk, INFLATED_BYTES)
            except zlib.error as exc:
                raise InferenceError(kind="broken", message=f"the body cannot be decompressed: {exc}") from exc
            chunk = inflate.unconsumed_tail
            if piece:
                yield piece


async def _read(response: httpx.Response, raw: bytearray, limit_bytes: int) -> None:
    """Read a body to its end or to the limit; `raw` has what came of it whatever ends it."""

    async def take(piece: bytes) -> bool:
        raw.extend(piece)
        return len(raw) >= limit_bytes

    try:
        await _each_piece(response, take)
    finally:
        del raw[limit_bytes:]


async def _each_piece(response: httpx.Response, take: Callable[[bytes], Awaitable[bool]]) -> None:
    """Give a body's pieces, decompressed, until it ends or `take` says that it has enough."""
    plain = _Plain(response)
    chunks = response.aiter_raw()
    try:
        async for chunk in chunks:
            for piece in plain.feed(chunk):
                if await take(piece):
                    return
    finally:
        await _leave(chunks)


async def _leave(chunks: AsyncIterator[bytes]) -> None:
    """Unwind httpx's nested generators by one step inside a cancelled scope.

    `aclose` would close the outermost alone and strand those below it for the garbage collector.
    """
    with trio.CancelScope() as scope:
        scope.cancel()
        async for _ in chunks:
            pass


def _may_be_of_work(error: InferenceError) -> bool:
    """Does a refusal come from a server that may have begun to work on the request?

    That a prompt does not fit is found out with the slot in hand, which may have been given another state of the
    server's for it.
    """
    status = error.status
    return status is None or (status >= 500 and status != 503) or is_context_full(error)


def _transport_error(kind: Literal["connect", "broken"], exc: httpx.HTTPError) -> InferenceError:
    what = "cannot reach the server" if kind == "connect" else "the connection broke in the middle of the reply"
    reason = one_line(str(exc)) or type(exc).__name__
    system = _system_reason(exc)
    if system and system not in reason:
        reason += f" ({system})"
    return InferenceError(kind=kind, message=f"{what}: {reason}")


def _system_reason(exc: BaseException | None) -> str | None:
    """Say what the operating system gave as the reason: Trio says that all attempts failed, and not why."""
    while exc is not None:
        if isinstance(exc, OSError) and exc.strerror:
            return exc.strerror.rpartition(": ")[2]
        exc = exc.exceptions[0] if isinstance(exc, BaseExceptionGroup) else exc.__cause__ or exc.__context__
    return None


def _media_type(content_type: str) -> str:
    return one_line(content_type.partition(";")[0])


def _json_or_text(raw: bytes | bytearray, content_type: str) -> Any:
    text = raw.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return f"{_media_type(content_type) or 'no content type'}: {one_line(text) or 'an empty body'}"


def _foreign(raw: bytes, content_type: str) -> InferenceError:
    """Say what came where a stream was expected."""
    value = _json_or_text(raw, content_type)
    if isinstance(value, dict) and value.get("error") is not None:
        return error_of(200, value["error"])
    kind = _media_type(content_type) or "no content type"
    return InferenceError(kind="foreign", message=f"the server sent {kind} where an event stream was expected")
