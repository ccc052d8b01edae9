"""Sessions of a given length, written straight to disk as the daemon would have left them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from boxmaker.proto.chat import ToolCall
from boxmaker.proto.ids import parse_session_id
from boxmaker.proto.records import Assistant, LogRecord, SessionStart, ToolResult, Usage, User, encode_line
from boxmaker.proto.time import timestamp
from boxmaker.session.baseline import Baseline, baseline_hash, encode_baseline
from boxmaker.session.store import BASELINE_NAME, LOG_NAME
from boxmaker.tools.fake import fake_registry

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 3
_NOW = timestamp(1_796_048_130)


def conversation(messages: int) -> list[LogRecord]:
    """Whole turns with a call each, as a long session has them: four messages in six records, at least so many."""
    usage = Usage(time=_NOW, cache_n=9000, prompt_n=60, predicted_n=40, reasoning_tokens=12, thinking_capped=False)
    found: list[LogRecord] = []
    for number in range(-(-messages // 4)):
        call = ToolCall(id=f"c{number}", name="clock", arguments='{"zone":"UTC"}')
        found += [
            User(time=_NOW, content=TEXT),
            Assistant(time=_NOW, content=None, reasoning_content=TEXT, tool_calls=(call,)),
            usage,
            ToolResult(
                time=_NOW, call=number, tool_call_id=call.id, content=TEXT,
                class_="public", untrusted=False, truncated=False,
            ),
            Assistant(time=_NOW, content=TEXT, reasoning_content=TEXT, tool_calls=()),
            usage,
        ]  # fmt: skip
    return found


def write_session(sessions: Path, name: str, records: Iterable[LogRecord]) -> list[bytes]:
    """Make a session's directory, with its baseline and its log; give the log's lines."""
    session = parse_session_id(name)
    directory = sessions / session
    directory.mkdir(mode=0o700)
    raw = encode_baseline(Baseline(system=TEXT, tools=fake_registry().core_schemas()))
    (directory / BASELINE_NAME).write_bytes(raw)
    start = SessionStart(time=_NOW, session=session, epoch=0, slot=0, baseline=baseline_hash(raw))
    lines = [encode_line(record) for record in [start, *records]]
    (directory / LOG_NAME).write_bytes(b"".join(lines))
    return lines


def prepare_sessions(directory: Path) -> Path:
    """The place of the sessions in the home of a daemon that has not begun yet."""
    sessions = directory / "home" / "sessions"
    sessions.mkdir(mode=0o700, parents=True)
    (directory / "home").chmod(0o700)
    return sessions
