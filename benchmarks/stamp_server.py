"""A scripted llama-server in a process of its own, whose replies say when they were written.

    python -m benchmarks.stamp_server [SLOTS]

It prints its port, and ends when stdin does. The last user message says what the reply is to be:
`bench:PIECES:EVERY_US`, and behind it perhaps `:hold` (the reply stays open until the client goes) or `:barrierN` (it
begins when N replies wait).
A piece is `w<ns>#<number>;`: CLOCK_MONOTONIC in nanoseconds just before its write, which every process of the machine
can compare with its own. The first one begins with `r<ns>,<bytes>;`: when the last byte of the body was read, and
how many there were.
"""

from __future__ import annotations

import re
import sys
import time

import trio
from attrs import define, field

from benchmarks.processes import raise_file_limit
from boxmaker.testing.server import CHAT_PATH, STREAM_HEAD, Received, ScriptedServer, delta, ending

WANTED = re.compile(rb"bench:(\d+):(\d+)(:hold)?(?::barrier(\d+))?")
MARK = b"bench:"
READ_BYTES = 1 << 18
_BEFORE, _AFTER = delta(content="@@").split(b"@@")


@define
class StampServer(ScriptedServer):
    """Answers completions as the user message says; probes as its parent does."""

    waiting: int = 0
    gate: trio.Event = field(factory=trio.Event)

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection: one request, as our client does."""
        async with stream:
            try:
                request, read_ns = await _read_request(stream)
                if request is None:
                    return
                if request.path == CHAT_PATH:
                    await self._reply(stream, request.body, read_ns)
                else:
                    await self._answer(request, stream)
            except trio.BrokenResourceError:
                pass

    async def _reply(self, stream: trio.SocketStream, body: bytes, read_ns: int) -> None:
        wanted = WANTED.match(body, body.rfind(MARK))
        assert wanted is not None, "the last user message asks for nothing that we know"
        pieces, every_s = int(wanted[1]), int(wanted[2]) / 1e6
        head = STREAM_HEAD + delta(role="assistant", content=None)
        if wanted[4] is not None:
            await stream.send_all(head)
            head = b""
            await self._barrier(int(wanted[4]))
        first = b"r%d,%d;" % (read_ns, len(body))
        if every_s == 0:
            texts = [b"%sw%d#%d;" % (first if at == 0 else b"", time.monotonic_ns(), at) for at in range(pieces)]
            head += b"".join(_BEFORE + text + _AFTER for text in texts)
            await stream.send_all(head if wanted[3] else head + ending(predicted_n=pieces))
        else:
            next_s = trio.current_time()
            for at in range(pieces):
                await stream.send_all(b"%s%s%sw%d#%d;%s" % (head, _BEFORE, first, time.monotonic_ns(), at, _AFTER))
                head = first = b""
                next_s += every_s
                if at + 1 < pieces:
                    await trio.sleep_until(next_s)
            if not wanted[3]:
                await stream.send_all(ending(predicted_n=pieces))
        if wanted[3]:
            while await stream.receive_some(4096):
                pass

    async def _barrier(self, count: int) -> None:
        gate = self.gate
        self.waiting += 1
        if self.waiting >= count:
            self.waiting = 0
            self.gate = trio.Event()
            gate.set()
        await gate.wait()


async def _read_request(stream: trio.SocketStream) -> tuple[Received | None, int]:
    """Read one request, of megabytes perhaps; and when its last byte was there."""
    raw = bytearray()
    while (end := raw.find(b"\r\n\r\n")) < 0:
        data = await stream.receive_some(READ_BYTES)
        if not data:
            return None, 0
        raw += data
    method, path, _ = raw[: raw.index(b"\r\n")].decode("latin-1").split(" ", 2)
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", raw[:end])
    whole = end + 4 + (int(length[1]) if length else 0)
    while len(raw) < whole:
        data = await stream.receive_some(READ_BYTES)
        if not data:
            return None, 0
        raw += data
    read_ns = time.monotonic_ns()
    return Received(method, path, {}, bytes(raw[end + 4 :]), trio.current_time()), read_ns


async def main(slots: int) -> None:
    """Serve until stdin ends."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1024)
    server = StampServer(port=listeners[0].socket.getsockname()[1])
    server.slots = [{"id": at, "n_ctx": 1 << 20, "is_processing": False} for at in range(slots)]
    server.props = {"default_generation_settings": {"n_ctx": 1 << 20}, "total_slots": slots, "model_alias": "scripted"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, server.serve, listeners)
        print(server.port, flush=True)
        async with trio.lowlevel.FdStream(0) as stdin:
            while await stdin.receive_some(4096):
                pass
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    raise_file_limit()
    trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)
