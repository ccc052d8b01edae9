"""A loopd of bytes, in a thread: it answers each connection with its next script, and keeps what it was asked."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field

USAGE = {"cache_n": 1, "prompt_n": 2, "predicted_n": 3, "reasoning_tokens": 0, "thinking_capped": False}
LIMIT_S = 30
"""For anything that bxctl does; a socket that waits longer than this raises."""


def framed(value: Any) -> bytes:
    """One frame by hand."""
    payload = json.dumps(value, ensure_ascii=False).encode()
    return len(payload).to_bytes(4, "big") + payload


def event(kind: str, **fields: Any) -> bytes:
    """One event: `event("content", text="Hi.")`; the field `class_` is `class`."""
    named = {key.rstrip("_"): value for key, value in fields.items()}
    return framed({"v": 1, "kind": "turn_event", "final": False, "body": {"event": {"type": kind, **named}}})


def done(content: str, **usage: Any) -> bytes:
    """A final answer."""
    return framed({"v": 1, "kind": "turn_done", "final": True, "body": {"content": content, "usage": USAGE | usage}})


def error(code: str, message: str = "no", **detail: Any) -> bytes:
    """A final error."""
    body = {"code": code, "message": message, "detail": detail}
    return framed({"v": 1, "kind": "error", "final": True, "body": body})


@define
class Hang:
    """Say nothing more until the client goes."""


@define
class Wait:
    """Say nothing more until `go_on` is set."""


Script = Sequence[bytes | Hang | Wait]


@define
class ScriptedLoopd:
    """`requests` are the bodies of what was asked, in order; `hung_up` is set when a client left in a Hang."""

    path: Path
    scripts: list[Script]
    requests: list[dict[str, Any]] = field(factory=list)
    hung_up: threading.Event = field(factory=threading.Event)
    go_on: threading.Event = field(factory=threading.Event)

    @property
    def resumes(self) -> list[bool]:
        """What each request said of its session."""
        return [request["resume"] for request in self.requests]

    def serve(self, listener: socket.socket) -> None:
        """Serve one connection after another, until the listener is shut down."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(LIMIT_S)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as reader:
            length = reader.read(4)
            if len(length) < 4:
                return
            request = json.loads(reader.read(int.from_bytes(length, "big")))
            assert list(request) == ["v", "kind", "final", "body"], request
            assert (request["v"], request["kind"], request["final"]) == (1, "turn", True)
            self.requests.append(request["body"])
            script = self.scripts.pop(0) if self.scripts else [error("internal", "the script has no answer left")]
            for step in script:
                if isinstance(step, Hang):
                    assert reader.read(1) == b""
                    self.hung_up.set()
                elif isinstance(step, Wait):
                    assert self.go_on.wait(LIMIT_S)
                else:
                    connection.sendall(step)


@contextmanager
def scripted_loopd(path: Path, *scripts: Script) -> Iterator[ScriptedLoopd]:
    """Run a scripted loopd on a socket until the block is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    loopd = ScriptedLoopd(path, list(scripts))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=loopd.serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield loopd
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    path.unlink()
