"""One turn on a hostile server, and what must hold after it, whatever the server did."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from boxmaker.proto.channel import TurnDone, WireError
from boxmaker.proto.chat import Content, Reasoning, Retrying
from boxmaker.proto.frames import Answer
from boxmaker.proto.records import Assistant as AssistantRecord
from boxmaker.proto.records import LogRecord
from boxmaker.proto.records import ToolResult as ToolResultRecord
from boxmaker.session.store import LOG_NAME
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.server import Pause, Reset, Script, ScriptedServer, Send, Step, reply, scripted_server
from boxmaker.tools.port import ToolPort
from tests.naive import naive_history, naive_messages
from tests.strict import refuse

HTTP = Path(__file__).parents[2] / "fixtures" / "http"
LONGEST_S = 6000.0
"""Of the test's own clock: a silent prefill (1,800 s) and stalls (300 s) at some tries fit, no endless wait does."""
FAULTS = ("internal_error", "connection_failed", "tool_port_failed")
"""Events of the daemon's log that stand for a traceback."""


def recorded(name: str) -> bytes:
    """A raw response of `fixtures/http`."""
    return (HTTP / f"{name}.http").read_bytes()


def script(name: str) -> Script:
    """A response as its case sends it: in one write, or by its `.steps.json`."""
    raw, file = recorded(name), HTTP / f"{name}.steps.json"
    if not file.exists():
        return raw
    steps: list[Step] = []
    at = 0
    for step in json.loads(file.read_text("utf-8")):
        if "send_to" in step:
            steps.append(Send(raw[at : step["send_to"]]))
            at = step["send_to"]
        elif "sleep_ms" in step:
            steps.append(Pause(step["sleep_ms"] / 1000))
        else:
            assert step == {"reset": True}, step
            steps.append(Reset())
    return steps


@frozen(kw_only=True)
class Aftermath:
    """What a turn on a hostile server came to."""

    answers: list[Answer]
    records: list[LogRecord]
    """Without the `session_start`."""
    asked: int
    """How many completions the turn asked for."""
    server: ScriptedServer
    events: list[str]
    """What the daemon's log named in the turn, in order."""

    @property
    def final(self) -> Answer:
        return self.answers[-1]

    @property
    def text(self) -> str:
        """What the owner is left with: the final answer's content."""
        assert isinstance(self.final, TurnDone), self.final
        return self.final.content

    @property
    def error(self) -> WireError:
        assert isinstance(self.final, WireError), self.final
        return self.final

    @property
    def thoughts(self) -> str:
        return "".join(answer.text for answer in self.answers if isinstance(answer, Reasoning))

    @property
    def results(self) -> list[str]:
        return [record.content for record in self.records if isinstance(record, ToolResultRecord)]

    @property
    def said(self) -> list[AssistantRecord]:
        return [record for record in self.records if isinstance(record, AssistantRecord)]

    def summary(self) -> tuple[str, object, int]:
        """The ending, its text or detail, and the completions that were asked for: what a table can hold."""
        if isinstance(self.final, TurnDone):
            return "done", self.final.content, self.asked
        return self.error.code.value, self.error.detail, self.asked


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(record.getMessage())


@contextmanager
def daemon_log() -> Iterator[list[str]]:
    """The names of the events that the daemon logs inside the block."""
    logger, kept = logging.getLogger("boxmaker"), _Kept()
    before = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        yield kept.events
    finally:
        logger.removeHandler(kept)
        logger.setLevel(before)


def messages_part(body: bytes) -> bytes:
    """A request's messages, without the bracket that closes them: what the next request must begin with."""
    return body[: body.rindex(b'],"tools":')]


def voided(answers: Sequence[Answer]) -> str:
    """The content that stands at the end of a turn: a retry voids what came before it."""
    text = ""
    for answer in answers:
        if isinstance(answer, Retrying | WireError):
            text = ""
        elif isinstance(answer, Content):
            text += answer.text
    return text


async def endure(
    directory: Path,
    *scripts: Script,
    text: str = "",
    may_be_empty: bool = False,
    port: ToolPort | None = None,
    prepare: Callable[[ScriptedServer, Daemon], None] = lambda server, daemon: None,
) -> Aftermath:
    """Run one turn on these scripts, check all that must hold, and run a good turn after it.

    `may_be_empty`: the server sent a whole reply without text, so an empty answer is the truth.
    `text` is more of the configuration.
    """
    with daemon_log() as events:
        async with (
            scripted_server(*scripts) as server,
            running_daemon(directory, server.url, text, port=port) as daemon,
        ):
            server.refuse_history = refuse
            prepare(server, daemon)
            with trio.fail_after(LONGEST_S):
                stream, channel = await daemon.open("s", "Go.", resume=False)
                answers: list[Answer] = []
                async with stream:
                    final = False
                    while not final:
                        frame = await channel.receive()
                        assert frame.answer is not None, frame
                        answers.append(frame.answer)
                        final = frame.final
                    assert await stream.receive_some(1) == b"", "the final frame is the last"
            assert daemon.is_free("s")
            assert [answer for answer in answers[:-1] if isinstance(answer, TurnDone | WireError)] == []
            assert not set(events) & set(FAULTS), events
            asked = len(server.completions)
            last = answers[-1]
            if isinstance(last, TurnDone):
                assert last.content or may_be_empty, "an empty success"
            else:
                assert isinstance(last, WireError)
                assert last.code.value not in ("internal", "storage", "session_damaged"), last
            records, told = daemon.log("s")[1:], list(events)
            server.scripts = [reply("Still here.")]
            answered = await daemon.ask("s", "And now?", resume=True)
            assert answered.content == "Still here.", "the session stays usable"
            _check_requests(daemon, server)
            assert not set(events) & set(FAULTS), events
    return Aftermath(answers=answers, records=records, asked=asked, server=server, events=told)


def _check_requests(daemon: Daemon, server: ScriptedServer) -> None:
    """Each request extends the one before, and the last is what an independent reader makes of the log."""
    for before, after in pairwise(server.bodies):
        assert after == before or after.startswith(messages_part(before)), "a message that was sent was rewritten"
    home = daemon.store.directory / "s"
    log = (home / LOG_NAME).read_bytes()
    asked = log[: log.rindex(b'{"type":"user"')] + log[log.rindex(b'{"type":"user"') :].split(b"\n")[0] + b"\n"
    history = naive_history((home / "0.baseline.json").read_bytes(), asked)
    expected = b'{"messages":[' + naive_messages(history, daemon.rt.facts.alternate)
    assert messages_part(server.bodies[-1]) == expected


def stream(*chunks: Any, done: bool = True, head: bytes | None = None) -> bytes:
    """A raw streamed response of these chunks: JSON values, or bytes as they are."""
    made = [head or b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"]
    made += [
        chunk if isinstance(chunk, bytes) else b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks
    ]
    return b"".join([*made, b"data: [DONE]\n\n" if done else b""])


def piece(delta: Any, finish: Any = None, **more: Any) -> dict[str, Any]:
    """One chunk with one choice."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}
