"""A loopd of bytes, in a thread: it answers each connection with its next script, and keeps what it was asked."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
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


@define
class Until:
    """Say nothing more until a request of that kind has come, on a connection of its own."""

    kind: str


Script = Sequence[bytes | Hang | Wait | Until]


def final(kind: str, **body: Any) -> bytes:
    """A final frame of any kind; the field `from_` is `from`."""
    named = {key.rstrip("_"): value for key, value in body.items()}
    return framed({"v": 1, "kind": kind, "final": True, "body": named})


@define
class ScriptedLoopd:
    """`requests` are the bodies of the turns, in order; `hung_up` is set when a client left in a Hang.

    What controls a turn comes on connections of its own, also while one is answered: `asked` are its kinds and bodies,
    `answers` what each kind gets, in order.
    """

    path: Path
    scripts: list[Script]
    answers: dict[str, list[Script]] = field(factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(factory=list)
    _news: threading.Condition = field(factory=threading.Condition)
    requests: list[dict[str, Any]] = field(factory=list)
    hung_up: threading.Event = field(factory=threading.Event)
    go_on: threading.Event = field(factory=threading.Event)

    @property
    def resumes(self) -> list[bool]:
        """What each request said of its session."""
        return [request["resume"] for request in self.requests]

    def serve(self, listener: socket.socket) -> None:
        """Serve each connection, until the listener is shut down."""
        threads = []
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                break
            threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()

    def _was_asked(self, wanted: str, times: int = 1) -> bool:
        return sum(kind == wanted for kind, _ in self.asked) >= times

    def wait_for(self, kind: str, times: int) -> bool:
        """Wait until that many requests of a kind have come."""
        with self._news:
            return self._news.wait_for(partial(self._was_asked, kind, times), LIMIT_S)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(LIMIT_S)
            with suppress(ConnectionError):  # who cancels a turn leaves with its end, whatever the cancel's answer is
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as reader:
            length = reader.read(4)
            if len(length) < 4:
                return
            request = json.loads(reader.read(int.from_bytes(length, "big")))
            assert list(request) == ["v", "kind", "final", "body"], request
            assert (request["v"], request["final"]) == (1, True)
            kind = request["kind"]
            if kind == "turn":
                self.requests.append(request["body"])
            scripts = self.scripts if kind == "turn" else self.answers.get(kind, [])
            script = scripts.pop(0) if scripts else [error("internal", "the script has no answer left")]
            with self._news:
                self.asked.append((kind, request["body"]))
                self._news.notify_all()
            for step in script:
                if isinstance(step, Hang):
                    assert reader.read(1) == b""
                    self.hung_up.set()
                elif isinstance(step, Until):
                    with self._news:
                        assert self._news.wait_for(partial(self._was_asked, step.kind), LIMIT_S)
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
