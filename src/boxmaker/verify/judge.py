"""Judges a session by the lines of its log alone, read as plain JSON.

It shares no code with the daemon that wrote them: a fault there would otherwise judge itself.
Source: M2b section 10 "On device"; `docs/protocol.md` for the records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from attrs import frozen

Record: TypeAlias = dict[str, Any]
State: TypeAlias = Literal["ok", "fail", "no_call"]

LABELS: dict[State, str] = {"ok": "ok", "fail": "fail", "no_call": "no call"}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@frozen(kw_only=True)
class Check:
    """One line of the verification; `no_call`: the model did not call the tool, so nothing was shown."""

    name: str
    state: State
    message: str

    def line(self) -> str:
        """The check as a person reads it."""
        return f"{LABELS[self.state]:7}  {self.name}: {self.message}"


def read_records(raw: bytes) -> list[Record]:
    """The records of a log, from its bytes."""
    return [json.loads(line) for line in raw.split(b"\n")[:-1]]


def of(records: Sequence[Record], kind: str) -> list[Record]:
    """The records of one type."""
    return [record for record in records if record["type"] == kind]


def calls_of(records: Sequence[Record]) -> list[tuple[str, str, str | None]]:
    """Name, arguments and result of each call, in order; None: it has none."""
    results = {record["call"]: record["content"] for record in of(records, "tool_result")}
    made = [call for record in of(records, "assistant") for call in record["tool_calls"]]
    first = min(results, default=0)
    return [(call["name"], call["arguments"], results.get(first + at)) for at, call in enumerate(made)]


def clock_answered(turn: Sequence[Record]) -> str | None:
    """Say what is missing for a turn to have read the clock, or None."""
    results = [result for name, _, result in calls_of(turn) if name == "clock"]
    if not results:
        return "clock was not called"
    return None if any(result and TIME.fullmatch(result) for result in results) else "clock gave no time"


def echo_answered(turn: Sequence[Record]) -> str | None:
    """Say what is missing for a turn to have reached `echo` through `find_tool` and `call_tool`, or None."""
    found = False
    for name, arguments, result in calls_of(turn):
        if name == "find_tool":
            found = found or "echo" in (result or "")
        elif name == "call_tool" and found:
            try:
                asked = json.loads(arguments)
            except ValueError:
                continue
            wanted = asked.get("arguments") if isinstance(asked, dict) and asked.get("name") == "echo" else None
            if isinstance(wanted, dict) and wanted.get("text") == result:
                return None
    return "find_tool gave echo, and call_tool did not echo a text" if found else "find_tool did not give echo"


def usage_problem(records: Sequence[Record]) -> str | None:
    """Say where a completion has not exactly one usage with the server's figures, or None."""
    for at, record in enumerate(records):
        is_usage = record["type"] == "usage"
        behind = at > 0 and records[at - 1]["type"] == "assistant"
        if is_usage != behind or (record["type"] == "assistant" and at == len(records) - 1):
            return f"line {at + 1} of the log: a completion without one usage right behind it"
        if is_usage and None in (record["cache_n"], record["prompt_n"], record["predicted_n"]):
            why = "the thinking cap closed the stream before" if record["thinking_capped"] else "the server sent no"
            return f"line {at + 1} of the log: {why} figures, so that nothing is known of the cache"
    return None if of(records, "usage") else "the log has no completion"


def result_problem(records: Sequence[Record]) -> str | None:
    """Say where a call has not exactly one result, in order, before anything else happens; or None."""
    number = 0
    open_calls: list[tuple[int, str]] = []
    for at, record in enumerate(records):
        if record["type"] in ("user", "assistant") and open_calls:
            return f"line {at + 1} of the log: call {open_calls[0][0]} has no result before it"
        if record["type"] == "assistant":
            for call in record["tool_calls"]:
                open_calls.append((number, call["id"]))
                number += 1
        elif record["type"] == "tool_result" and (
            not open_calls or (record["call"], record["tool_call_id"]) != open_calls.pop(0)
        ):
            return f"line {at + 1} of the log: a result for no open call, or out of order"
    return f"call {open_calls[0][0]} has no result at the end of the log" if open_calls else None


@frozen(kw_only=True)
class CacheFigures:
    """Tokens over a session's completions but its first, which finds an empty slot or not."""

    completions: int
    read: int
    least: int
    """What had to be read: all that the slot did not hold after the completion before."""
    losses: int
    first_loss: str


def cache_figures(records: Sequence[Record]) -> CacheFigures:
    """Work out from the server's figures what was read and what had to be.

    After a completion the slot holds its prompt and all that was generated but the last token sampled; a
    cancelled one may leave more. Every usage has figures (`usage_problem` says so).
    """
    read = least = losses = 0
    first_loss = ""
    usages = of(records, "usage")
    for before, now in pairwise(usages):
        held = before["cache_n"] + before["prompt_n"] + before["predicted_n"] - 1
        read += now["prompt_n"]
        least += min(now["prompt_n"], max(0, now["cache_n"] + now["prompt_n"] - held))
        if now["cache_n"] < held:
            losses += 1
            first_loss = first_loss or f"{held} tokens were in the slot, {now['cache_n']} were used"
    return CacheFigures(completions=len(usages), read=read, least=least, losses=losses, first_loss=first_loss)
