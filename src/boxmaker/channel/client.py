"""The client half of a connection: send one request, read its frames.

Source: M2b section 6.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio
from attrs import frozen

from boxmaker.channel.peer import peer_uid
from boxmaker.errors import ChannelClosed, NobodyListens
from boxmaker.proto.channel import SOCKET_PATH_MAX_BYTES, Request
from boxmaker.proto.chat import Content
from boxmaker.proto.codec import JsonObject
from boxmaker.proto.frames import (
    ANSWER_KINDS,
    CLIENT_MAX_FRAME,
    Answer,
    FrameDecoder,
    answer_of,
    encode_request,
    open_envelope,
    text_event,
)

READ_BYTES = 65536


@frozen(kw_only=True)
class Frame:
    """One frame of loopd: its body as it came, and what it says (None: an event unknown to us)."""

    body: JsonObject
    answer: Answer | None
    final: bool


class TurnChannel:
    """One connection that has sent its request."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._decoder = FrameDecoder(CLIENT_MAX_FRAME)

    async def receive(self) -> Frame:
        """Give the next frame.

        Raises:
            ChannelClosed: loopd went away before its final frame.
            BadFrame, BadRequest, UnsupportedVersion: loopd speaks another protocol.

        Cancellation: safe at any point; no frame is lost.
        """
        while (frame := self.received()) is None:
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except trio.BrokenResourceError as exc:
                raise ChannelClosed() from exc
            if not data:
                raise ChannelClosed()
            self._decoder.feed(data)
        return frame

    def received(self) -> Frame | None:
        """Give the next frame if it is here already; raises as `receive` does for what loopd says."""
        payload = self._decoder.next_payload()
        if payload is None:
            return None
        event = text_event(payload)
        if event is not None:
            kind = "content" if isinstance(event, Content) else "reasoning"
            return Frame(body={"event": {"type": kind, "text": event.text}}, answer=event, final=False)
        envelope = open_envelope(payload, ANSWER_KINDS)
        return Frame(body=envelope.body, answer=answer_of(envelope), final=envelope.final)


@asynccontextmanager
async def open_turn(path: Path, wanted: Request) -> AsyncIterator[TurnChannel]:
    """Connect, send one request, and give the channel to read from; leaving the block hangs up.

    Raises:
        NobodyListens: no daemon behind the path, or a path that is too long for a socket.

    Cancellation: safe at any point; loopd cancels the turn.
    """
    request = encode_request(wanted)
    stream = await _connect(path)
    try:
        with suppress(trio.BrokenResourceError):  # refused unread: the answer is there to be received
            await stream.send_all(request)
        yield TurnChannel(stream)
    finally:
        await trio.aclose_forcefully(stream)


async def ask(path: Path, wanted: Request) -> Frame:
    """Send one request, and give its final frame; events are dropped.

    Raises:
        NobodyListens: no daemon behind the path. ChannelClosed, BadFrame, BadRequest, UnsupportedVersion: as `receive`.

    Cancellation: safe at any point; what was asked for may have been done.
    """
    async with open_turn(path, wanted) as channel:
        while True:
            frame = await channel.receive()
            if frame.final:
                return frame


async def _connect(path: Path) -> trio.SocketStream:
    if len(os.fsencode(path)) > SOCKET_PATH_MAX_BYTES:
        raise NobodyListens(
            path=path,
            reason=f"the path is over {SOCKET_PATH_MAX_BYTES} bytes",
            remedy="no socket can be there; name a shorter one with --socket",
        )
    try:
        stream = await trio.open_unix_socket(path)
    except OSError as exc:
        reason = "no such socket" if exc.errno == errno.ENOENT else (exc.strerror or str(exc)).lower()
        if exc.errno in (errno.EACCES, errno.EPERM):
            remedy = "it is another user's; run bxctl as the user that loopd runs as"
            raise NobodyListens(path=path, reason=reason, remedy=remedy) from exc
        raise NobodyListens(path=path, reason=reason) from exc
    try:
        stream.socket.getpeername()
    except OSError as exc:  # the kernel said EAGAIN, and trio took it for "connecting"
        await trio.aclose_forcefully(stream)
        raise NobodyListens(path=path, reason="too busy to take a connection") from exc
    uid = peer_uid(stream)
    if uid not in (0, os.geteuid()):  # root's: a socket that systemd made
        await trio.aclose_forcefully(stream)
        remedy = "nothing was sent; put the socket where nobody else can write"
        raise NobodyListens(path=path, reason=f"it is the socket of uid {uid}", remedy=remedy)
    return stream
