"""A home and its store for tests of this package, and the bytes that they must give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from boxmaker.proto.chat import ToolCall, ToolSchema
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import Assistant, LogRecord, SessionStart, ToolResult, Usage, User, encode_line
from boxmaker.proto.time import Timestamp
from boxmaker.session.baseline import Baseline, baseline_hash
from boxmaker.session.disk import Disk, InlineDisk
from boxmaker.session.store import NewSession, Store

T = Timestamp("2026-11-30T14:15:30.123Z")
S = SessionId("s")
MIB = 1024 * 1024
DEADLINE_S = 60

CLOCK = ToolSchema(name="clock", description="The time.", parameters={"type": "object"})
BASELINE = Baseline(system="Be brief.", tools=(CLOCK,))
BASELINE_RAW = (
    b'{"system":"Be brief.","tools":[{"name":"clock","description":"The time.","parameters":{"type":"object"}}]}'
)
BODY_BEGIN = b'{"messages":[{"role":"system","content":"Be brief."}'
BODY_END = (
    b'],"tools":[{"type":"function","function":{"name":"clock","description":"The time.",'
    b'"parameters":{"type":"object"}}}],"stream":true,"id_slot":0}'
)
FIXED: dict[str, Any] = {"stream": True, "id_slot": 0}


def body(*messages: str) -> bytes:
    """The whole body, given its messages after the system message as JSON text."""
    return b"".join([BODY_BEGIN, *(b"," + message.encode("utf-8") for message in messages), BODY_END])


def said(text: str) -> str:
    """A user message of a body."""
    return f'{{"role":"user","content":{json.dumps(text, ensure_ascii=False)}}}'


def new_session(baseline: Callable[[], Baseline] = lambda: BASELINE) -> NewSession:
    return NewSession(slot=0, baseline=baseline)


def make_store(home: Path, disk: Disk | None = None, *, memory_bytes: int = 64 * MIB) -> Store:
    """A store as the daemon makes it after `prepare_home`."""
    (home / "sessions").mkdir(parents=True, exist_ok=True)
    return Store(home, disk or InlineDisk(), memory_bytes=memory_bytes, fixed=FIXED, now=lambda: T)


async def say(
    store: Store, *records: LogRecord, session: str = "s", resume: bool = True, alternate: bool = False
) -> bytes:
    """Have a session for a turn, append each record by itself, and give the request's body."""
    with trio.fail_after(DEADLINE_S):
        async with store.turn(SessionId(session), resume=resume, new=new_session(), alternate=alternate) as had:
            for record in records:
                await had.append(record)
            return had.request_body()


def lay_out(home: Path, log: bytes, *, session: str = "s", baseline: bytes = BASELINE_RAW) -> Path:
    """Put a session's two files there without the store; give the log's path."""
    directory = home / "sessions" / session
    directory.mkdir(parents=True)
    (directory / "0.baseline.json").write_bytes(baseline)
    (directory / "0.jsonl").write_bytes(log)
    return directory / "0.jsonl"


def start_record(session: str = "s", baseline: bytes = BASELINE_RAW) -> SessionStart:
    return SessionStart(time=T, session=SessionId(session), epoch=0, slot=0, baseline=baseline_hash(baseline))


def lines(*records: LogRecord, session: str = "s") -> bytes:
    """A log of these records after its session_start."""
    return b"".join(encode_line(record) for record in (start_record(session), *records))


def user(content: str) -> User:
    return User(time=T, content=content)


def assistant(content: str | None, *calls: ToolCall) -> Assistant:
    return Assistant(time=T, content=content, reasoning_content=None, tool_calls=calls)


def call(call_id: str, name: str = "clock", arguments: str = "{}") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def usage() -> Usage:
    return Usage(time=T, cache_n=0, prompt_n=10, predicted_n=5, reasoning_tokens=0, thinking_capped=False)


def result(call_id: str, number: int, content: str = "noon") -> ToolResult:
    return ToolResult(
        time=T, call=number, tool_call_id=call_id, content=content, class_="public", untrusted=False, truncated=False
    )
