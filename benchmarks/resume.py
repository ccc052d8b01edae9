"""What a cold resume costs, in units of `json.loads` of the same lines.

A cold resume is what a restarted daemon does for the first turn of a session: take the lock, read and check the log and
its baseline, and make the request's bytes. What a warm turn costs at that length is in `added_time.py`.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from benchmarks.bench import Row, interleaved, milliseconds, ratios, row, timed
from benchmarks.sessions import conversation, write_session
from boxmaker.inference.request import RequestEncoder
from boxmaker.proto import chat
from boxmaker.proto.ids import SessionId
from boxmaker.session.store import open_locked, read_session

MESSAGES = 6_668
"""About 10,000 records: four messages are six."""
QUICK_MESSAGES = 668
ROUNDS = 15
"""A round is half a second."""


def rows(quick: bool) -> list[Row]:
    """Measure, and say it in rows."""
    session = SessionId("s")
    with tempfile.TemporaryDirectory(prefix="bm-") as name:
        directory = Path(name)
        lines = write_session(directory, session, conversation(QUICK_MESSAGES if quick else MESSAGES))

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

        loads, resumed = interleaved(ROUNDS, lambda: timed(floor), lambda: timed(cold))
    note = f"{milliseconds(resumed)} and {milliseconds(loads)}"
    return [row(f"cold resume, {len(lines):,} records", "json.loads", ratios(resumed, loads), goal=3, note=note)]
