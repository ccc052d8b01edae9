"""Commands about a running daemon: say something to a turn, end it, fork a session, see what runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import trio

from boxmaker.bxctl.render import one_visible_line
from boxmaker.channel.client import ask
from boxmaker.proto.channel import CancelDone, ForkDone, Request, StatusDone, WireError


def run_request(socket: Path, request: Request, out: TextIO, err: TextIO, *, as_json: bool = False) -> int:
    """Ask loopd for something and print what it answers; give the exit status.

    Raises:
        BoxmakerError: no daemon answers. OSError: our output cannot be written.
    """
    frame = trio.run(ask, socket, request)
    answer = frame.answer
    if isinstance(answer, WireError):
        print(f"bxctl: {answer.code.value}: {one_visible_line(answer.message)}", file=err, flush=True)
        return 1
    if as_json:
        out.write(json.dumps(frame.body, separators=(",", ":")) + "\n")
    else:
        out.writelines(f"{one_visible_line(line)}\n" for line in lines_of(answer))
    out.flush()
    return 0


def lines_of(answer: object) -> Iterator[str]:
    """An answer for a person."""
    match answer:
        case CancelDone(ending="idle"):
            yield "no turn runs"
        case CancelDone(ending=ending, cause=cause, slot_free=slot_free):
            yield f"the turn ended: {ending}" + (f" ({cause})" if cause else "")
            if not slot_free:
                yield "the server still works on it: its slot is busy"
        case ForkDone(session=session):
            yield session
        case StatusDone():
            yield from _status(answer)


def _status(status: StatusDone) -> Iterator[str]:
    yield f"loopd {status.version}, pid {status.pid}"
    yield f"server {status.server.url}: {status.server.state}"
    for slot in status.slots:
        yield f"slot {slot.id}{' (ours)' if slot.ours else ''}: {'busy' if slot.busy else 'free'}"
    for one in status.sessions:
        waiting = f", {one.waiting} waiting" if one.waiting else ""
        yield f"session {one.session}: {one.phase}, {one.age_ms / 1000:.1f} s{waiting}"
    if not status.sessions:
        yield "no turn runs"
