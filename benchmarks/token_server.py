"""A llama-server of one trick: it streams tokens, in bursts or one a write, as fast as a client can be asked to read.

    python benchmarks/token_server.py

It prints its port. The reply is what the user says: `burst 20000`, or `paced 20000`. It runs in a process of its own,
so that what it costs is nobody else's. Chunks are those of a real server (b11434), 223 bytes each.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

PACE_S = 0.0004
"""Between two tokens, so that each is a read of its own: longer than any of the clients takes for one."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
WORDS = (" the", " quick", " brown", " fox", " jumps", " over", " a", " lazy", " dog", ".\n")
BURST_EVENTS = 64
"""Events a write when nothing is held back; a TCP read takes them as they fall."""


def _event(choice: str, tail: str = "") -> bytes:
    return (
        f'data: {{"choices":[{choice}],"created":1796048130,"id":"chatcmpl-Yl2sW5bH0qz4m1kq8c3p6v9x2j7d4f1a",'
        f'"model":"benchmark.gguf","system_fingerprint":"b11434-0a1b2c3d","object":"chat.completion.chunk"{tail}}}\n\n'
    ).encode()


TOKENS = [_event(f'{{"finish_reason":null,"index":0,"delta":{{"content":{json.dumps(word)}}}}}') for word in WORDS]


def _ending(tokens: int) -> bytes:
    finish = _event('{"finish_reason":"stop","index":0,"delta":{}}')
    timings = f',"timings":{{"cache_n":0,"prompt_n":10,"predicted_n":{tokens}}}'
    return finish + _event("", timings) + b"data: [DONE]\n\n"


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _stream(connection: socket.socket, said: str) -> None:
    mode, _, count = said.partition(" ")
    tokens = int(count)
    connection.sendall(HEAD)
    if mode == "paced":
        next_s = time.monotonic()
        for at in range(tokens):
            connection.sendall(_chunked(TOKENS[at % len(TOKENS)]))
            next_s = max(next_s + PACE_S, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
    else:
        for first in range(0, tokens, BURST_EVENTS):
            block = range(first, min(first + BURST_EVENTS, tokens))
            # a chunk an event, as the real server frames them, whatever the kernel makes of it
            connection.sendall(b"".join(_chunked(TOKENS[at % len(TOKENS)]) for at in block))
    connection.sendall(_chunked(_ending(tokens)) + b"0\r\n\r\n")


def _read_request(connection: socket.socket) -> tuple[str, bytes]:
    raw = b""
    while b"\r\n\r\n" not in raw:
        data = connection.recv(65536)
        if not data:
            return "", b""
        raw += data
    head, _, body = raw.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    while len(body) < length:
        body += connection.recv(65536)
    return head.split(b"\r\n")[0].decode(), body


def _serve(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            line, body = _read_request(connection)
            if line.startswith("POST /v1/chat/completions "):
                _stream(connection, json.loads(body)["messages"][-1]["content"])
                return
            value: object = {"error": {"code": 404, "message": "not here", "type": "not_found_error"}}
            status = 404
            if line.startswith("GET /slots"):
                status, value = 200, [{"id": 0, "n_ctx": 1 << 20, "is_processing": False}]
            elif line.startswith("GET /props"):
                status, value = 200, {"total_slots": 1, "default_generation_settings": {"n_ctx": 1 << 20}}
            elif line.startswith("GET /health"):
                status, value = 200, {"status": "ok"}
            answer = json.dumps(value).encode()
            connection.sendall(
                b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
                % (status, len(answer), answer)
            )
        except (ConnectionError, ValueError):
            pass


def main() -> None:
    """Serve until stdin ends."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        print(listener.getsockname()[1], flush=True)

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=_serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
