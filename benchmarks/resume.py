"""What a cold resume costs, in units of `json.loads` of the same lines; and that a warm turn costs nothing.

Run: `.venv/bin/python benchmarks/resume.py [RECORDS]`. Pairs are interleaved, medians of seven.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from boxmaker.inference.request import RequestEncoder
from boxmaker.proto import chat
from boxmaker.proto.chat import ToolCall
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import Assistant, LogRecord, SessionStart, ToolResult, Usage, User, encode_line
from boxmaker.proto.time import timestamp
from boxmaker.session.baseline import Baseline, baseline_hash, encode_baseline
from boxmaker.session.store import open_locked, read_session

ROUNDS = 7
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 3


def conversation(records: int) -> list[LogRecord]:
    """Turns with a call each, as a long session has them."""
    now = timestamp(1_796_048_130)
    usage = Usage(time=now, cache_n=9000, prompt_n=60, predicted_n=40, reasoning_tokens=12, thinking_capped=False)
    found: list[LogRecord] = []
    while len(found) < records:
        call = ToolCall(id=f"c{len(found)}", name="clock", arguments='{"zone":"UTC"}')
        found += [
            User(time=now, content=TEXT),
            Assistant(time=now, content=None, reasoning_content=TEXT, tool_calls=(call,)),
            usage,
            ToolResult(
                time=now, call=len(found), tool_call_id=call.id, content=TEXT,
                class_="public", untrusted=False, truncated=False,
            ),
            Assistant(time=now, content=TEXT, reasoning_content=TEXT, tool_calls=()),
            usage,
        ]  # fmt: skip
    return found


def timed(work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    session = SessionId("s")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / session).mkdir()
        raw = encode_baseline(Baseline(system=TEXT, tools=()))
        (directory / session / "0.baseline.json").write_bytes(raw)
        start = SessionStart(
            time=timestamp(1_796_048_000), session=session, epoch=0, slot=0, baseline=baseline_hash(raw)
        )
        lines = [encode_line(record) for record in [start, *conversation(records)]]
        (directory / session / "0.jsonl").write_bytes(b"".join(lines))

        def floor() -> None:
            for line in lines:
                json.loads(line)

        def cold() -> None:
            fd = open_locked(directory, session)
            try:
                _, baseline, messages = read_session(directory, session, fd)
            finally:
                os.close(fd)
            encoder = RequestEncoder(tools=baseline.tools, fixed={}, alternate=False)
            encoder.add(chat.System(content=baseline.system))
            for message in messages:
                encoder.add(message)

        pairs = [(timed(floor), timed(cold)) for _ in range(ROUNDS)]
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"cold resume of {len(lines)} records: {ratio:.2f} times json.loads (goal 3); pairs: ", end="")
        print(", ".join(f"{b / a:.2f}" for a, b in pairs))


if __name__ == "__main__":
    main()
