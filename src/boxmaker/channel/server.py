"""One connection of a channel: a request in, events out, one final frame.

Laws:
* Whatever the peer does, this connection alone is concerned.
* A peer that leaves (a half-close counts) cancels its turn; so does one that takes no bytes for
  `write_timeout_s`.
* Events are written in order; the final frame comes last, after session and slot are free.

Source: M2b section 6; design.md sections 4 and 6.
"""

from __future__ import annotations

import select
from collections.abc import Awaitable, Callable, Sequence

import trio

from boxmaker.channel.peer import peer_uid
from boxmaker.channel.stop import Stop
from boxmaker.config import Channel
from boxmaker.errors import BadFrame, BadRequest, InternalError, ShuttingDown, TurnCancelled, WireableError
from boxmaker.log import log_event, log_exception
from boxmaker.proto.channel import FINAL_KIND, REQUEST_KIND, Final, Request, TurnEvent, WireError, wire_error
from boxmaker.proto.frames import Answer, FrameDecoder, decode_request, encode_answer

EVENT_CAPACITY = 256
"""Events between turn and writer: enough that a burst of one network read never waits."""
READ_BYTES = 65536
AFTER_REQUEST_MAX_BYTES = 65536
"""What a peer may send after its request before that counts as hanging up."""

Emit = Callable[[Sequence[TurnEvent]], Awaitable[None]]
Answering = Callable[[Request, Emit, Stop], Awaitable[Final]]
"""Does what a request asks for: the request, where a turn's events go, and how it is ended before its time."""


class Closing:
    """The daemon's shutdown, as connections see it."""

    def __init__(self) -> None:
        self.begun = False
        self._reading: set[trio.CancelScope] = set()
        self._running: set[Stop] = set()
        self._idle = trio.Event()

    def begin(self) -> None:
        """No more turns: requests that are still being read, or wait in line, are answered `shutting_down`."""
        self.begun = True
        for scope in self._reading:
            scope.cancel()
        for stop in self._running:
            if stop.in_line:
                stop.cancel("shutdown")
        self._check_idle()

    def cancel_turns(self) -> None:
        """End the grace: running turns are cancelled and answered `shutting_down`."""
        for stop in self._running:
            stop.cancel("shutdown")

    async def wait_no_turns(self) -> None:
        """Wait, after `begin`, until no turn runs. Cancellation: safe at any point."""
        await self._idle.wait()

    def _check_idle(self) -> None:
        if self.begun and not self._running:
            self._idle.set()


class Connection:
    """Serves one connection; `closing` is the daemon's."""

    def __init__(self, stream: trio.SocketStream, config: Channel, answering: Answering, closing: Closing) -> None:
        self._stream = stream
        self._config = config
        self._answering = answering
        self._closing = closing
        self._decoder = FrameDecoder(config.max_frame)
        self._stop = Stop(self._has_left)
        self._stalled = False
        self._flooded = False

    async def serve(self) -> None:
        """Serve the connection to its end, and close it.

        Raises nothing for what the peer does; a fault of ours is logged and answered `internal`.

        Cancellation: safe at any point; the turn is cancelled, the peer gets no more frames.
        """
        async with self._stream:
            try:
                request = await self._read_request()
            except WireableError as exc:
                await self._write(encode_answer(wire_error(exc)))
                return
            if request is not None:
                await self._serve_request(request)

    async def refuse(self, error: WireableError) -> None:
        """Answer with an error, and close. Cancellation: safe at any point."""
        async with self._stream:
            await self._write(encode_answer(wire_error(error)))

    async def _read_request(self) -> Request | None:
        """Read the one request; None when the peer left without sending a byte."""
        closing = self._closing
        began = False
        with trio.move_on_after(self._config.request_s) as scope:
            closing._reading.add(scope)
            try:
                while not closing.begun:
                    payload = self._decoder.next_payload()
                    if payload is not None:
                        return decode_request(payload)
                    data = await self._stream.receive_some(READ_BYTES)
                    if not data:
                        if began:
                            raise BadFrame(problem="the connection ended inside a frame")
                        return None
                    began = True
                    self._decoder.feed(data)
            except trio.BrokenResourceError:
                return None
            finally:
                closing._reading.discard(scope)
        if closing.begun:
            raise ShuttingDown()
        raise BadFrame(problem=f"no whole frame within {self._config.request_s} s")

    async def _serve_request(self, request: Request) -> None:
        send, receive = trio.open_memory_channel[Answer](EVENT_CAPACITY)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_answers, receive, nursery.cancel_scope)
            nursery.start_soon(self._watch, nursery.cancel_scope)
            async with send:
                final = await self._final(request, send)
                await send.send(final)

    async def _final(self, request: Request, send: trio.MemorySendChannel[Answer]) -> Final | WireError:
        """Do what is asked in a scope of its own; give the last frame. A turn's session and slot are free then."""

        async def emit(events: Sequence[TurnEvent]) -> None:
            for event in events:
                try:
                    send.send_nowait(event)
                except trio.WouldBlock:
                    await send.send(event)
                except trio.BrokenResourceError:
                    # The writer has left and cancelled us; we have only not come to a checkpoint yet.
                    await trio.lowlevel.checkpoint()
                    raise

        running = self._closing._running
        began = trio.current_time()
        result: Final | WireError | None = None
        running.add(self._stop)
        try:
            with self._stop.scope:  # it takes a cancel out of a group, so faults are looked at behind it
                result = await self._answering(request, emit, self._stop)
        except WireableError as exc:
            result = wire_error(exc)
        except Exception as exc:  # the connection boundary: a fault of ours ends this turn alone
            result = _of_fault(exc)
        finally:
            running.discard(self._stop)
            self._closing._check_idle()
            log_event(
                f"{REQUEST_KIND[type(request)]}_end",
                session=getattr(request, "session", None),
                ending=_ending(result),
                cause=self._stop.cause if result is None else None,
                ms=int((trio.current_time() - began) * 1000),
            )
        if result is not None:
            return result
        if self._flooded:
            return wire_error(BadFrame(problem=f"over {AFTER_REQUEST_MAX_BYTES} bytes after the request"))
        if self._stop.cause in ("owner", "replaced"):
            return wire_error(TurnCancelled(cause=self._stop.cause))
        return wire_error(ShuttingDown())

    async def _write_answers(self, receive: trio.MemoryReceiveChannel[Answer], connection: trio.CancelScope) -> None:
        """Write everything that is there in one write; ends with the final frame, and ends the watcher.

        Cancelled by: the watcher, when the peer leaves; the daemon.
        """
        async with receive:
            async for answer in receive:
                frames = [encode_answer(answer)]
                try:
                    while True:
                        frames.append(encode_answer(receive.receive_nowait()))
                except (trio.WouldBlock, trio.EndOfChannel):
                    pass
                if not await self._write(b"".join(frames)):
                    self._stop.cancel("stalled_channel" if self._stalled else "disconnect")
                    break
            # before `receive` closes: a turn that waits for room in it is cancelled, not broken
            connection.cancel()

    async def _write(self, data: bytes) -> bool:
        """Write, within the time that a peer has to take it; False when it did not."""
        try:
            with trio.fail_after(self._config.write_timeout_s):
                await self._stream.send_all(data)
        except trio.TooSlowError:
            log_event("channel_stalled", write_timeout_s=self._config.write_timeout_s)
            self._stalled = True
            return False
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def _watch(self, connection: trio.CancelScope) -> None:
        """Drop what the peer sends after its request; cancel everything when it leaves.

        Cancelled by: the writer, after the final frame; the daemon.
        """
        extra_bytes = self._decoder.buffered_bytes
        while extra_bytes <= AFTER_REQUEST_MAX_BYTES:
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except trio.BrokenResourceError:
                data = b""
            if not data:
                self._stop.cancel("disconnect")
                connection.cancel()
                return
            extra_bytes += len(data)
        self._flooded = True
        self._stop.cancel("disconnect")

    def _has_left(self) -> bool:
        """Has the peer left, even if the watcher has not run yet? A turn of such a peer is not "busy"."""
        poll = select.poll()
        poll.register(self._stream.socket.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))


def _of_fault(exc: Exception) -> WireError:
    """The answer for an exception that nobody expected; a group with one of our errors in it is that error."""
    if isinstance(exc, ExceptionGroup):
        ours, rest = exc.split(WireableError)
        if ours is not None and rest is None:
            first: BaseException = ours
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            assert isinstance(first, WireableError)
            return wire_error(first)
    log_exception("internal_error")
    return wire_error(InternalError(message="a fault inside loopd; its log has the details"))


def _ending(result: Final | WireError | None) -> str:
    if result is None:
        return "cancelled"
    return result.code.value if isinstance(result, WireError) else FINAL_KIND[type(result)]


async def serve_connection(
    stream: trio.SocketStream, config: Channel, answering: Answering, closing: Closing, owner_uid: int | None = None
) -> None:
    """Serve one accepted connection; nothing that it does or suffers reaches the listener.

    `owner_uid`: peers with another uid are refused; None admits all, for sockets that are pairs.
    """
    try:
        connection = Connection(stream, config, answering, closing)
        if owner_uid is not None and (uid := peer_uid(stream)) != owner_uid:
            log_event("peer_refused", uid=uid)
            await connection.refuse(BadRequest(path="$", problem=f"loopd serves uid {owner_uid} alone, you are {uid}"))
            return
        await connection.serve()
    except Exception:  # the connection boundary, for what is not in a turn
        log_exception("connection_failed")
