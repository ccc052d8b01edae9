"""Clients that cost next to nothing: blocking sockets, and a stamp beside each thing that comes or goes.

All times are CLOCK_MONOTONIC in nanoseconds, as the server's stamps are.
"""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

from attrs import field, frozen

from boxmaker.channel.client import Frame
from boxmaker.proto.channel import Turn, TurnDone
from boxmaker.proto.chat import Content
from boxmaker.proto.frames import ANSWER_KINDS, CLIENT_MAX_FRAME, FrameDecoder, answer_of, encode_request, open_envelope
from boxmaker.proto.ids import parse_session_id
from boxmaker.testing.server import CHAT_PATH

WAIT_S = 60.0
READ_BYTES = 1 << 18
READ = re.compile(r"r(\d+),(\d+);")
WRITTEN = re.compile(r"w(\d+)#(\d+);")


@frozen(kw_only=True)
class TurnTimes:
    """One turn as its client saw it; what the server stamped is taken from the text."""

    sent_ns: int
    """Just before the `turn` frame was handed to the kernel."""
    read_ns: int
    """When the server had the last byte of the request."""
    body_bytes: int
    """How long that request was."""
    delays_ns: tuple[int, ...] = field(repr=False)
    """For each piece: from its write at the server to its frame here."""
    last_written_ns: int
    done_ns: int
    """When the final frame was here."""

    @property
    def before_s(self) -> float:
        """From the `turn` frame to the last byte of the request at the server."""
        return (self.read_ns - self.sent_ns) / 1e9

    @property
    def after_s(self) -> float:
        """From a piece at the server to its frame here: the middle one of the turn."""
        return sorted(self.delays_ns)[len(self.delays_ns) // 2] / 1e9

    @property
    def end_s(self) -> float:
        """From the last piece at the server to the final frame here."""
        return (self.done_ns - self.last_written_ns) / 1e9

    @property
    def whole_s(self) -> float:
        """From the `turn` frame to the final frame."""
        return (self.done_ns - self.sent_ns) / 1e9


def connect(path: Path) -> socket.socket:
    """Connect to a daemon."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(WAIT_S)
    stream.connect(os.fspath(path))
    return stream


def open_turn(path: Path, session: str, content: str) -> socket.socket:
    """Begin a turn of a new session, whose events nobody has read yet; closing the socket cancels it."""
    stream = connect(path)
    try:
        stream.sendall(request(session, content, resume=False))
    except BaseException:
        stream.close()
        raise
    return stream


def read_until(stream: socket.socket, text: bytes) -> None:
    """Read frames until a text has come.

    Raises:
        RuntimeError: the connection ended without it.
    """
    came = b""
    while text not in came:
        data = stream.recv(READ_BYTES)
        if not data:
            raise RuntimeError(f"the turn ended without {text!r}: {came[-400:]!r}")
        came += data


def request(session: str, content: str, *, resume: bool) -> bytes:
    """A `turn` frame."""
    return encode_request(Turn(session=parse_session_id(session), content=content, resume=resume))


def run_turn(path: Path, session: str, content: str, *, resume: bool) -> TurnTimes:
    """Run one turn of the stamping server.

    Raises:
        RuntimeError: it has no answer.
    """
    frame = request(session, content, resume=resume)
    came: list[tuple[int, bytes]] = []
    decoder = FrameDecoder(CLIENT_MAX_FRAME)
    with connect(path) as stream:
        sent_ns = time.monotonic_ns()
        stream.sendall(frame)
        while data := stream.recv(READ_BYTES):
            now_ns = time.monotonic_ns()
            decoder.feed(data)
            while (payload := decoder.next_payload()) is not None:
                came.append((now_ns, payload))
    return _times(sent_ns, [(now_ns, _frame(payload)) for now_ns, payload in came])


def _frame(payload: bytes) -> Frame:
    envelope = open_envelope(payload, ANSWER_KINDS)
    return Frame(body=envelope.body, answer=answer_of(envelope), final=envelope.final)


def _times(sent_ns: int, came: list[tuple[int, Frame]]) -> TurnTimes:
    if not came or not isinstance(came[-1][1].answer, TurnDone):
        raise RuntimeError(f"the turn has no answer: {came[-1:]}")
    stamps = [
        (now_ns, int(found[1]))
        for now_ns, frame in came
        if isinstance(frame.answer, Content)
        for found in WRITTEN.finditer(frame.answer.text)
    ]
    read = READ.search(came[-1][1].answer.content)
    assert read is not None
    assert stamps
    return TurnTimes(
        sent_ns=sent_ns,
        read_ns=int(read[1]),
        body_bytes=int(read[2]),
        delays_ns=tuple(now_ns - written_ns for now_ns, written_ns in stamps),
        last_written_ns=stamps[-1][1],
        done_ns=came[-1][0],
    )


def http(port: int, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Make one request as any bare client would; when it began, and the whole answer."""
    text = f"{head} HTTP/1.1\r\nHost: llama-server\r\nConnection: close\r\n"
    if body:
        text += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    began_ns = time.monotonic_ns()
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.sendall(f"{text}\r\n".encode())
        if body:
            stream.sendall(body)
        answer = b""
        while data := stream.recv(READ_BYTES):
            answer += data
    return began_ns, answer


def bare_slots_s(port: int) -> float:
    """Seconds that one `GET /slots` takes, its answer read to the end."""
    began_ns, _ = http(port, "GET /slots")
    return (time.monotonic_ns() - began_ns) / 1e9


def bare_post_s(port: int, size_bytes: int) -> float:
    """Seconds from the beginning of a POST of that size to its last byte at the server."""
    began_ns, answer = http(port, f"POST {CHAT_PATH}", post_body(size_bytes))
    return (read_stamp(answer) - began_ns) / 1e9


def post_body(size_bytes: int) -> bytes:
    """A body of that size, which asks the server for one piece."""
    wanted = b'{"messages":[{"role":"user","content":"%sbench:1:0"}]}'
    return wanted % (b"x" * (size_bytes - len(wanted) + 2))


def read_stamp(answer: bytes) -> int:
    """When the server had the last byte of a request, as its answer says."""
    found = READ.search(answer.decode("utf-8"))
    assert found is not None, answer[:200]
    return int(found[1])
