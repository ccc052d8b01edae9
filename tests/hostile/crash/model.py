"""What a conversation leaves in a log, worked out from what is said in it; pure.

A record is a tuple here: its type and what is known of it beforehand. `cache_loss` is left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from attrs import field, frozen

Rec: TypeAlias = tuple[Any, ...]
INTERRUPTED = "Interrupted: boxmaker failed while the call may have been running; its outcome is unknown."
NOT_RUN = "Not run: boxmaker was stopped before this call."
RESULT_CAP = 16384


class _Anything:
    """Equal to every text: what the clock says is not known beforehand."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)

    __hash__ = None  # type: ignore[assignment]  # equal to all, so of no hash

    def __repr__(self) -> str:
        return "…"


ANYTHING: Final = _Anything()


@frozen
class Call:
    """A call of the model's, and the result that it gets."""

    id: str
    name: str
    arguments: str
    result: Any = field(eq=False)


@frozen
class Said:
    """One turn: the owner's text, rounds of calls, the answer."""

    session: str
    text: str
    rounds: tuple[tuple[Call, ...], ...]
    answer: str


def turn_records(said: Said) -> list[Rec]:
    """What a whole turn leaves."""
    found: list[Rec] = [("user", said.text)]
    for calls in said.rounds:
        found += [("assistant", None, tuple((call.id, call.name, call.arguments) for call in calls)), ("usage",)]
        found += [("tool_result", call.id, call.result) for call in calls]
    return [*found, ("assistant", said.answer, ()), ("usage",)]


def closing_records(log: Sequence[Rec]) -> list[Rec]:
    """What the next turn writes first: a result for every call that a crash left without."""
    waiting: list[str] = []
    for record in log:
        if record[0] == "assistant":
            waiting = [call[0] for call in record[2]]
        elif record[0] == "tool_result":
            waiting.remove(record[1])
    return [("tool_result", name, NOT_RUN if place else INTERRUPTED) for place, name in enumerate(waiting)]


def read_records(raw: bytes) -> list[Rec]:
    """A log's records; it must be whole."""
    *lines, rest = raw.split(b"\n")
    assert rest == b"", "the log is torn"
    found: list[Rec] = []
    for line in lines:
        record = json.loads(line)
        match record["type"]:
            case "user":
                found.append(("user", record["content"]))
            case "assistant":
                calls = tuple((call["id"], call["name"], call["arguments"]) for call in record["tool_calls"])
                found.append(("assistant", record["content"], calls))
            case "tool_result":
                found.append(("tool_result", record["tool_call_id"], record["content"]))
            case "session_start" | "usage":
                found.append((record["type"],))
            case other:
                assert other == "cache_loss", other
    return found


def messages_of(log: Sequence[Rec]) -> list[tuple[str, str]]:
    """Roles and contents of the request that a log stands for, after the system message."""
    found = []
    for record in log:
        if record[0] in ("user", "assistant"):
            found.append((record[0], record[1] or ""))
        elif record[0] == "tool_result":
            found.append(("tool", record[2]))
    return found


def random_said(chance: random.Random, session: str, number: int) -> Said:
    """A turn of any kind; no call is made twice in it, and no id in the session."""
    rounds = []
    for one in range(chance.choice([0, 0, 1, 1, 2, 3])):
        calls = []
        for place in range(chance.choice([1, 1, 2, 3])):
            calls.append(_random_call(chance, f"{number}.{one}.{place}"))
        rounds.append(tuple(calls))
    return Said(session, _random_text(chance), tuple(rounds), _random_text(chance))


def _random_call(chance: random.Random, name: str) -> Call:
    """A call of a tool that there is, of one that there is not, or one that does not parse."""
    kind = chance.choice(["clock", "clock", "echo", "echo", "find", "unknown", "unparsed"])
    if kind == "echo":
        text = f"{name} " + "x" * chance.choice([0, 10, 5000, 17000])
        result = text if len(text) <= RESULT_CAP else text[:RESULT_CAP] + "[truncated]"
        return Call(name, "call_tool", json.dumps({"name": "echo", "arguments": {"text": text}}), result)
    tool = {"find": "find_tool", "unknown": "rm"}.get(kind, "clock")
    arguments = json.dumps({"query": "echo", "of": name} if kind == "find" else {"of": name})
    return Call(name, tool, arguments[:-1] if kind == "unparsed" else arguments, ANYTHING)


def _random_text(chance: random.Random) -> str:
    letters = 'abc é\n\u2028"\\🙂'
    return "a" + "".join(chance.choices(letters, k=chance.choice([0, 3, 30, 3000, 20000])))
