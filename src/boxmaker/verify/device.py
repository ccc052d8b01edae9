"""Drives the real programs against the server that the configuration names, a check a claim.

    baseline, template     the self-test's own probes
    plain, clock, echo     `bxctl chat --say` against `loopd serve`
    usage, results, cache  from the log
    restart                SIGTERM, start again, a turn that resumes
    cancel                 Ctrl-C in mid-generation; the slot; a turn after it

Laws:
* Everything that is written is written in a temporary home; the owner's is read for `memory/core.md` alone.
* Nothing is judged by what the daemon says of itself alone: the log is read as plain JSON.

Source: M2b section 10 "On device".
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence

import trio
from attrs import define, field

from boxmaker.config import Config
from boxmaker.errors import InferenceError, StartError
from boxmaker.inference.client import Client
from boxmaker.inference.facts import probe
from boxmaker.loopd.selftest import run_selftest
from boxmaker.tools.fake import fake_registry
from boxmaker.verify.judge import (
    Check,
    Record,
    State,
    cache_figures,
    clock_answered,
    echo_answered,
    of,
    result_problem,
    usage_problem,
)
from boxmaker.verify.programs import LOOK_EVERY_S, Programs, end

ATTEMPTS = 3
"""How often a small model is asked before it counts as one that does not call the tool, or answers too soon."""
SLOT_FREE_S = 5.0
"""How long the slot may stay busy after the channel went; the server looks between batches."""
DELTAS_BEFORE_CANCEL = 3

PLAIN = "Say hello in one short sentence."
CLOCK = (
    "What time is it? Call the tool clock.",
    "You have a tool named clock. Call it now, then tell me the time.",
    "Call clock. Nothing else.",
)
ECHO = (
    "First call find_tool with the query echo. Then call call_tool with the name echo and the arguments "
    '{"text": "boxmaker"}. Then tell me what it said.',
    'Use find_tool to find the tool named echo, and call_tool to give it the text "boxmaker".',
    'Call find_tool with {"query": "echo"}, then call_tool with {"name": "echo", "arguments": {"text": "boxmaker"}}.',
)
RESUMED = "Say in one short sentence what we have done so far."
LONG = "Count from 1 to 500 in words, one number a line."
AFTER_CANCEL = "Never mind. Say done."


@define
class Verification:
    """All checks, in order, on a home of its own; each goes to `say` as soon as it is known."""

    owner: Config
    config: Config
    """The owner's, on our home."""
    say: Callable[[Check], None]
    programs: Programs = field(init=False)
    failed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.programs = Programs(config=self.config)

    def _note(self, name: str, state: State, message: str) -> None:
        self.failed = self.failed or state != "ok"
        self.say(Check(name=name, state=state, message=message))

    def _judge(self, name: str, problem: str | None, message: str) -> None:
        self._note(name, "fail" if problem else "ok", problem or message)

    async def run(self) -> bool:
        """Run every check that can be run; True when all hold.

        Cancellation: safe at any point; the programs are ended.
        """
        try:
            await self._run()
        except StartError as exc:
            self._note("daemon", "fail", str(exc))
        except InferenceError as exc:
            self._note("server", "fail", str(exc))
        return not self.failed

    async def _run(self) -> None:
        core = self.owner.paths.home / "memory" / "core.md"
        if core.exists():
            (self.config.paths.home / "memory").mkdir()
            try:
                shutil.copyfile(core, self.config.paths.home / "memory" / "core.md")
            except OSError as exc:
                raise StartError(message=f"{core} cannot be read: {exc.strerror or exc}") from exc
        async with Client(self.config) as client:
            if not await self._server(client):
                return
            async with self.programs.daemon():
                if not await self._turns():
                    return
            before = self.programs.records()
            async with self.programs.daemon():
                await self._restart(before)
                await self._cancel(client)
        self._log()

    async def _server(self, client: Client) -> bool:
        """The self-test; False when the rest cannot be run."""
        report = await run_selftest(self.config, client, fake_registry())
        for check in report.checks:
            if check.name in ("baseline", "prefix"):
                proven = check.state == "ok"
                self._note(
                    check.name, "ok" if proven else "fail", check.message + ("" if proven else f". {check.remedy}")
                )
            elif check.state == "fail":
                self._note(check.name, "fail", f"{check.message}. {check.remedy}")
        if report.failed:
            return False
        for name in {"baseline", "prefix"} - {check.name for check in report.checks}:
            self._note(name, "fail", "cannot be checked: the server does not render templates for us (/apply-template)")
        return True

    async def _turns(self) -> bool:
        """Three turns; False when not even a plain one has an answer."""
        said = await self.programs.say(PLAIN)
        self._judge("plain turn", said.problem(), "a turn without tools has an answer")
        if said.problem():
            return False
        await self._tool_turn("clock", CLOCK, clock_answered, "clock was called, and its result went to the model")
        await self._tool_turn("echo", ECHO, echo_answered, "echo was found by find_tool and reached through call_tool")
        return True

    async def _tool_turn(
        self, name: str, asked: Sequence[str], missing: Callable[[Sequence[Record]], str | None], message: str
    ) -> None:
        missed = limit = None
        for text in asked:
            said = await self.programs.say(text)
            limit = said.problem()
            if limit and not said.at_limit:
                self._note(name, "fail", limit)
                return
            missed = missing(said.records)
            if not (missed or limit):
                self._note(name, "ok", message)
                return
        if missed:
            self._note(name, "no_call", f"the model did not call the tool in {len(asked)} attempts: {missed}")
        else:
            self._note(name, "fail", f"the tool was called, and the turn ended with {limit}")

    async def _restart(self, before: Sequence[Record]) -> None:
        said = await self.programs.say(RESUMED)
        usages = [*of(before, "usage")[-1:], *of(said.records, "usage")[:1]]
        problem = said.problem() or usage_problem(said.records) or usage_problem(before)
        if problem:
            self._note("restart", "fail", problem)
            return
        figures = cache_figures(usages)
        got = usages[1]["cache_n"]
        self._judge("restart", figures.first_loss, f"the first request after it found all {got} tokens in the cache")

    async def _cancel(self, client: Client) -> None:
        for _ in range(ATTEMPTS):
            outcome = await self._cancel_once(client)
            if outcome is not None:
                break
        else:
            self._note("cancel", "fail", f"the answer ended before it could be cancelled, {ATTEMPTS} times")
            return
        self._judge("cancel", *outcome)
        said = await self.programs.say(AFTER_CANCEL)
        self._judge("after cancel", said.problem(), "the session goes on")

    async def _cancel_once(self, client: Client) -> tuple[str | None, str] | None:
        """Cancel a turn in mid-generation; None when the answer was over before."""
        records = len(self.programs.records())
        process = await trio.lowlevel.open_process(
            self.programs.chat_command(LONG), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            assert process.stdout is not None
            buffer, deltas = b"", 0
            while deltas < DELTAS_BEFORE_CANCEL:
                piece = await process.stdout.receive_some(65536)
                if not piece:
                    failed = await process.wait() != 0
                    return ("the turn failed before it could be cancelled", "") if failed else None
                *lines, buffer = (buffer + piece).split(b"\n")
                deltas += sum(_is_delta(line) for line in lines)
            busy = await self._busy(client)
            if busy is None:
                return "cannot be seen: the server does not show its slots; start llama-server with --slots", ""
            if not busy:
                return None
            process.send_signal(signal.SIGINT)
            began = trio.current_time()
            status = await process.wait()
        finally:
            await end(process)
        while await self._busy(client):
            if trio.current_time() - began > SLOT_FREE_S:
                return f"the slot was still busy {SLOT_FREE_S:.0f} s after the channel left", ""
            await trio.sleep(LOOK_EVERY_S)
        took_s = trio.current_time() - began
        left = [record["type"] for record in self.programs.records()[records:]]
        if left == ["user", "assistant", "usage"]:  # a whole answer: it was over before the signal was heard
            return None
        if left != ["user"]:
            return f"the cancelled turn left {', '.join(left)} in the log, where only its message belongs", ""
        if status != 130:
            return f"bxctl ended with status {status}, not 130", ""
        return None, f"left in mid-generation, the slot was idle within {took_s:.2f} s"

    async def _busy(self, client: Client) -> bool | None:
        """Is our slot at work? None: the server does not say."""
        answer = await probe(client, "GET", "/slots")
        for entry in answer.entries():
            if entry.get("id") == self.owner.slots.listed[0]:
                return bool(entry.get("is_processing"))
        return None

    def _log(self) -> None:
        """What the whole log says, the restart and the cancel included."""
        records = self.programs.records()
        problem = usage_problem(records)
        completions = len(of(records, "assistant"))
        self._judge("usage", problem, f"{completions} completions, one usage each, with the server's figures")
        results = len(of(records, "tool_result"))
        self._judge("results", result_problem(records), f"{results} results, one a call, in order")
        if problem:
            self._note("cache", "fail", "cannot be judged without figures")
            return
        figures = cache_figures(records)
        if of(records, "cache_loss") or figures.losses:
            lost = f"{len(of(records, 'cache_loss'))} losses in the log, {figures.losses} by the server's figures"
            self._note("cache", "fail", f"{lost}; the first: {figures.first_loss}")
        else:
            message = (
                f"no loss; {figures.read} tokens read after the first completion, the least possible {figures.least}"
            )
            self._note("cache", "ok", message)


def _is_delta(line: bytes) -> bool:
    event = json.loads(line).get("event", {})
    return event.get("type") in ("content", "reasoning")
