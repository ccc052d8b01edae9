"""M2b's first claim: every request of a session is a strict extension of the one before.

Generated sessions run through connection, store, client and tools against the scripted server, and are
interrupted at any step in every way there is. The judges know nothing of our code: the bodies that the server
recorded, a reader of the log that rebuilds each of them to the byte (`naive.py`), and the script itself, which
says what the log may hold. What is printed for a failing story can be pasted into `stories.py`, or as an `@example`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from attrs import define, evolve, field, frozen
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

import tests.stories
from boxmaker.channel.client import TurnChannel
from boxmaker.errors import BadFrame, ChannelClosed
from boxmaker.inference.request import RequestEncoder
from boxmaker.proto import chat
from boxmaker.proto.channel import ErrorCode, ToolResult, TurnDone, WireError
from boxmaker.proto.channel import Turn as TurnRequest
from boxmaker.proto.chat import ChatMessage, Figures, ToolSchema
from boxmaker.proto.frames import Answer, encode_request
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import Assistant as AssistantRecord
from boxmaker.proto.records import LogRecord, encode_line
from boxmaker.proto.records import ToolResult as ToolResultRecord
from boxmaker.proto.records import User as UserRecord
from boxmaker.proto.tools import ToolRequest, ToolResponse
from boxmaker.session.disk import InlineDisk
from boxmaker.session.logs import repair
from boxmaker.session.replay import messages
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.port import Response, ScriptedPort, hang
from boxmaker.testing.server import ScriptedServer, error_response, scripted_server
from boxmaker.tools import dispatch, endings
from boxmaker.tools.registry import RegisteredTool, Registry
from tests import naive
from tests.naive import naive_body, naive_history, naive_records, naive_rest
from tests.session.homes import BASELINE, BASELINE_RAW, FIXED
from tests.session.strategies import writer_records
from tests.stories import (
    BUDGET_MESSAGE,
    FINAL,
    PASSING,
    RESULT_CAP_BYTES,
    STORIES,
    THINKING_CAP,
    TOOL_ITERATIONS,
    Call,
    Endless,
    Failing,
    How,
    Interrupt,
    Played,
    PortResponse,
    Reply,
    Story,
    Tear,
    Turn,
    stories,
)
from tests.strict import problems
from tests.test_layering import imports, modules

T = TypeVar("T")

CONFIG = f"""
[loop]
tool_iterations = {TOOL_ITERATIONS}
tool_result_cap = {RESULT_CAP_BYTES}
[thinking]
cap = {THINKING_CAP}
[request]
temperature = 0.5
[retry]
attempts = 3
base_ms = 100
loading_s = 3
[timeouts]
stall_s = 10
[inference]
reply_max_bytes = 8000
"""
TAIL = (
    '"stream":true,"stream_options":{"include_usage":true},"return_progress":true,"id_slot":0,"cache_prompt":true,'
    '"temperature":0.5,"chat_template_kwargs":{"enable_thinking":true,"preserve_reasoning":true},'
    f'"reasoning_budget_tokens":{THINKING_CAP},"reasoning_budget_message":"{BUDGET_MESSAGE}"}}'
)
"""What follows `tools` in every body, from design.md section 7."""
PATIENCE_S = 1000
"""No turn lasts so long on the tests' clock, save one that waits in a tool that hangs."""
SEEN: Counter[str] = Counter()
"""In how many generated stories of this run each kind of thing really happened."""
NO_SLOTS = error_response(404, "File Not Found", "not_found_error")


# -- playing one ---------------------------------------------------------------------------------


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks of a daemon, and does something before the step `at`."""

    def __init__(self, daemon: Daemon) -> None:
        self.seen = 0
        self.at = 0
        self.action: Callable[[], None] = lambda: None
        self.failure: Exception | None = None
        self._nursery = daemon.nursery

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        nursery = task.parent_nursery
        while nursery is not None and nursery is not self._nursery:
            nursery = nursery.parent_task.parent_nursery
        if nursery is None:
            return
        self.seen += 1
        if self.seen == self.at:
            try:
                self.action()
            except Exception as exc:  # Trio would log it and drop us
                self.failure = exc


@define
class TearingDisk:
    """An InlineDisk; the piece of work at which `left` comes to 0 is done by `tear`."""

    left: int = 0
    tear: Callable[[Callable[[], Any]], Any] | None = None
    _inline: InlineDisk = field(factory=InlineDisk)

    async def run(self, work: Callable[[], T]) -> T:
        self.left -= 1
        if self.left != 0 or self.tear is None:
            return await self._inline.run(work)
        await trio.lowlevel.checkpoint()
        done: T = self.tear(work)
        return done


def registry_of(life: int) -> Registry:
    """The tools of a daemon; every second one has more core tools, which the older sessions must not see."""
    names = [("clock", True), ("echo", False), *[("new", True)] * (life % 2)]
    return Registry(
        RegisteredTool(schema=ToolSchema(name=name, description="…", parameters={"type": "object"}), core=core)
        for name, core in names
    )


TOOL_S = 0.2
"""How long a tool takes: some steps, and time to be interrupted in."""


def port_response(response: PortResponse) -> Response:
    async def answer(request: ToolRequest) -> ToolResponse:
        await trio.sleep(TOOL_S)
        if response == "hang":
            return await hang(request)
        if response == "raise":
            raise RuntimeError("a fault in the port")
        return response

    return answer


@frozen
class Asked:
    """A completion that the server was asked for, with the session's files as they were at that moment."""

    body: bytes
    baseline: bytes
    log: bytes


@define
class Happened:
    """What was seen of a turn: interruptions, the final answer, results told, completions asked for."""

    interruptions: list[str] = field(factory=list)
    answer: Answer | None = None
    results_told: int = 0
    asked: int = 0


@define
class Player:
    """Plays a story in a directory, and checks after each turn what the log may hold by then."""

    directory: Path
    story: Story
    server: ScriptedServer
    asked: dict[str, list[Asked]] = field(factory=dict)
    """By session."""
    happened: Happened = field(factory=Happened)
    turn: Turn | None = None
    seen: set[str] = field(factory=set)
    """The kinds of things that really happened."""
    _busy: int = 0

    async def play(self) -> None:
        self.server.refuse_history = self._note
        if self.story.looks:
            self.server.on_probe = self._look
        else:
            self.server.slots = NO_SLOTS
        names = sorted({turn.session for turn in self.story.turns})
        closing = [Turn("And now?", (Reply("Fine."),), session=name) for name in names]
        todo = deque([*self.story.turns, *closing])
        async with trio.open_nursery() as nursery:
            life = 0
            while todo:
                disk, port, ended = TearingDisk(), ScriptedPort(), trio.Event()
                daemon: Daemon = await nursery.start(partial(self._live, life, disk, port, ended))
                lives = True
                while todo and lives:
                    turn = todo.popleft()
                    before = self._log(turn.session)
                    await self._take(turn, daemon, disk, port)
                    lives = set(self.happened.interruptions) <= {"hang up"} and bool(todo)
                    if not lives:
                        daemon.nursery.cancel_scope.cancel()
                        await ended.wait()
                        await wait_all_tasks_blocked()
                        self._take_over()
                    assert all(request.closed.is_set() for request in self.server.completions)
                    log = whole_lines(self._log(turn.session))
                    check_log(turn, self.happened, before, log)
                    self.seen |= {*kinds_of(turn, self.happened, before, log, turn.replies[: self.happened.asked])}
                life += 1

    async def _live(
        self,
        life: int,
        disk: TearingDisk,
        port: ScriptedPort,
        ended: trio.Event,
        *,
        task_status: trio.TaskStatus[Daemon],
    ) -> None:
        """Run one daemon. Cancelled by: its interruption, or the end of the story."""
        core = self.directory / "home" / "memory" / "core.md"
        core.parent.mkdir(parents=True, exist_ok=True)
        core.write_text(f"Life {life}.", "utf-8")
        more: dict[str, Any] = {"port": port, "registry": registry_of(life), "disk": disk}
        alternate = self.story.alternate
        try:
            async with running_daemon(self.directory, self.server.url, CONFIG, alternate=alternate, **more) as daemon:
                await self._mend(daemon)
                task_status.started(daemon)
                await trio.sleep_forever()
        finally:
            ended.set()

    async def _take(self, turn: Turn, daemon: Daemon, disk: TearingDisk, port: ScriptedPort) -> None:
        """Run one turn, interrupted as it says; when this returns, nothing of it runs any more."""
        self.turn, self.happened, self._busy = turn, Happened(), turn.busy
        self.server.scripts = [played.script() for played in turn.replies]
        port.responses = [port_response(response) for response in turn.responses]
        stream = await daemon.connect()
        ours = stream.socket
        steps = Steps(daemon)

        def interrupt(how: How) -> None:
            self.happened.interruptions.append(how)
            if how == "hang up":
                if ours.fileno() != -1:
                    ours.shutdown(socket.SHUT_RDWR)
            elif how == "stop":
                daemon.closing.begin()
                daemon.closing.cancel_turns()
            else:
                if how == "kill":
                    self._copy_home()
                daemon.nursery.cancel_scope.cancel()

        def interrupt_at_step() -> None:
            assert isinstance(end, Interrupt)
            interrupt(end.how)
            if end.then_kill is not None:
                steps.at, steps.action = steps.seen + end.then_kill, lambda: interrupt("kill")

        def tear(work: Callable[[], T]) -> T:
            assert isinstance(end, Tear)
            log = self._log(turn.session)
            done = work()
            self.happened.interruptions.append("tear")
            self._copy_home()
            if log:  # not when the session has just been made, which is one step
                added = re.findall(rb"[^\n]*\n", self._log(turn.session)[len(log) :])
                kept = b"".join(added[: end.lines]) + b"".join(added[end.lines :])[: end.more_bytes]
                (self.directory / "killed" / "sessions" / turn.session / "0.jsonl").write_bytes(log + kept)
            daemon.nursery.cancel_scope.cancel()
            return done

        async def interrupt_later(seconds: float, how: How) -> None:
            await trio.sleep(seconds)
            interrupt(how)

        end = turn.end
        trio.lowlevel.add_instrument(steps)
        async with trio.open_nursery() as nursery:
            if isinstance(end, Tear):
                disk.left, disk.tear = end.work, tear
            elif end is not None and end.step is not None:
                steps.at, steps.action = end.step, interrupt_at_step
            elif end is not None and end.after_s is not None:
                nursery.start_soon(interrupt_later, end.after_s, end.how)
            with trio.move_on_after(PATIENCE_S) as patience:
                await self._listen(turn, stream)
            nursery.cancel_scope.cancel()
        if patience.cancelled_caught:
            assert "hang" in turn.responses, "a turn does not end"
            self.happened.interruptions.append("hang up")
        await stream.aclose()
        await daemon.until_free(turn.session)
        await wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(steps)
        disk.tear = None
        if steps.failure is not None:
            raise steps.failure
        if not self.happened.interruptions and end is not None:  # the turn was over before: then between two turns
            interrupt("kill" if isinstance(end, Tear) else end.how)
            self.seen.add("an interruption between two turns")

    async def _listen(self, turn: Turn, stream: trio.SocketStream) -> None:
        request = TurnRequest(session=SessionId(turn.session), content=turn.text, resume=self._log(turn.session) != b"")
        frames = TurnChannel(stream)
        with suppress(trio.BrokenResourceError, ChannelClosed, BadFrame):
            await stream.send_all(encode_request(request))
            while True:
                frame = await frames.receive()
                self.happened.results_told += isinstance(frame.answer, ToolResult)
                if frame.final:
                    self.happened.answer = frame.answer
                    return

    # -- the disk --------------------------------------------------------------------------------

    def _log(self, session: str) -> bytes:
        file = self.directory / "home" / "sessions" / session / "0.jsonl"
        return file.read_bytes() if file.exists() else b""

    def _copy_home(self) -> None:
        """What a kill at this moment leaves."""
        if not (self.directory / "killed").exists():  # a second kill comes too late
            shutil.copytree(self.directory / "home", self.directory / "killed")

    def _take_over(self) -> None:
        """Once the daemon is gone: go on with what its kill has left."""
        if (self.directory / "killed").exists():
            shutil.rmtree(self.directory / "home")
            (self.directory / "killed").rename(self.directory / "home")

    async def _mend(self, daemon: Daemon) -> None:
        """Cut a torn line off, as the owner would, once the daemon has refused the session."""
        sessions = daemon.store.directory
        for file in sessions.glob("?/0.jsonl"):
            torn = file.read_bytes()
            if torn.endswith(b"\n"):
                continue
            refused = await daemon.fail(file.parent.name, "x", resume=True)
            assert refused.code == ErrorCode.SESSION_DAMAGED
            assert file.read_bytes() == torn
            repair(sessions, SessionId(file.parent.name))
            assert file.read_bytes() == whole_lines(torn)
            self.seen.add("a torn line")

    # -- the server ------------------------------------------------------------------------------

    async def _look(self, path: str) -> None:
        if path == "/slots":
            self.server.slots = [{"id": 0, "is_processing": self._busy > 0}]
            self._busy -= 1

    def _note(self, _: list[Any]) -> None:
        """A completion is asked for: the request is read whole, and nothing answered yet."""
        assert self.turn is not None
        session = self.turn.session
        baseline = (self.directory / "home" / "sessions" / session / "0.baseline.json").read_bytes()
        self.asked.setdefault(session, []).append(Asked(self.server.bodies[-1], baseline, self._log(session)))
        self.happened.asked += 1


# -- the judges ----------------------------------------------------------------------------------


def whole_lines(log: bytes) -> bytes:
    return log[: log.rfind(b"\n") + 1]


def in_short(record: dict[str, Any]) -> tuple[str, Any]:
    """What the script knows of a record."""
    match record["type"]:
        case "assistant":
            return ("assistant", {key: record[key] for key in ("content", "reasoning_content", "tool_calls")})
        case "tool_result":
            return ("tool_result", record["tool_call_id"])
    return (record["type"], record["content"])


def open_calls(log: bytes) -> list[str]:
    """The ids of the calls that have no result."""
    waiting: list[str] = []
    for record in naive_records(log):
        if record["type"] == "assistant":
            waiting += [call["id"] for call in record["tool_calls"]]
        elif record["type"] == "tool_result":
            waiting.remove(record["tool_call_id"])
    return waiting


def check_log(turn: Turn, happened: Happened, before: bytes, after: bytes) -> None:
    """A turn has added to the log what the script says, as far as it came."""
    assert after.startswith(before), "the log only grows"
    torn = "tear" in happened.interruptions
    added = naive_records(after[len(before) :])
    if added and not before:
        assert added.pop(0)["type"] == "session_start"
    for record, following in pairwise([*added, {"type": "the end"}]):
        assert record["type"] != "assistant" or following["type"] == "usage" or torn, "a reply with its figures"
        if record["type"] == "tool_result":
            kept = record["content"].removesuffix("[truncated]")
            assert len(kept.encode()) <= RESULT_CAP_BYTES, "a result is capped"
    taken = turn.replies[: happened.asked]
    expected: list[tuple[str, Any]] = [("tool_result", call_id) for call_id in open_calls(before)]
    expected.append(("user", turn.text))
    for played in taken:
        if not isinstance(played, Failing):
            logged = played.logged()
            expected.append(("assistant", logged))
            expected += [("tool_result", call["id"]) for call in logged["tool_calls"]]
    told = [in_short(record) for record in added if record["type"] in ("user", "assistant", "tool_result")]
    assert told == expected[: len(told)], "what is appended is what the script says, in its order"
    if not happened.interruptions or isinstance(happened.answer, TurnDone):
        assert told == expected, "what was answered is in the log"
    whole = sum(not isinstance(played, Failing) for played in taken[:-1])  # the last may not have come to its end
    assert sum(kind == "assistant" for kind, _ in told) >= whole, "no whole reply is lost"
    assert sum(kind == "tool_result" for kind, _ in told) >= happened.results_told, "what is told is in the log"
    if not torn and "kill" not in happened.interruptions:
        assert open_calls(after) == [] or after == before, "every call has a result"
    if not happened.interruptions:
        check_answer(happened.answer, taken)


def check_answer(answer: Answer | None, taken: Sequence[Played]) -> None:
    """The final answer of a turn that nobody interrupted is what its last completion says."""
    last = taken[-1]
    if isinstance(last, Failing):
        assert isinstance(answer, WireError)
        assert answer.code == (ErrorCode.SESSION_FULL if last.how.startswith("full") else ErrorCode.INFERENCE)
    elif last.logged()["tool_calls"]:
        assert isinstance(answer, WireError)
        assert answer.code == ErrorCode.TURN_LIMIT
        rounds = sum(isinstance(played, Reply) and bool(played.calls) for played in taken)
        assert (answer.detail["limit"] == "tool_iterations") == (rounds == TOOL_ITERATIONS + 1)
    else:
        assert isinstance(answer, TurnDone)
        assert answer.content == (last.logged()["content"] or "")


def check_bodies(asked: Sequence[Asked], alternate: bool) -> None:
    """The laws over all bodies of one session."""
    for each in asked:
        assert each.body == naive_body(each.baseline, each.log, TAIL, alternate), "the body is what the log says"
        assert problems(json.loads(each.body)["messages"], alternate) == []
    check_growth([(each.body, naive_rest(each.baseline, TAIL)) for each in asked])


def check_growth(bodies: Sequence[tuple[bytes, bytes]]) -> None:
    """Each body, given with what follows its messages, is a strict extension of the one before."""
    for (before, rest), (after, _) in pairwise(bodies):
        old, new = json.loads(before), json.loads(after)
        assert new["messages"][: len(old["messages"])] == old["messages"]
        assert new["messages"][0] == old["messages"][0]
        assert new["tools"] == old["tools"]
        assert before.endswith(rest)
        assert after.startswith(before.removesuffix(rest)), "a byte prefix"


async def play(directory: Path, story: Story) -> Player:
    async with scripted_server() as server:
        player = Player(directory, story, server)
        await player.play()
    for asked in player.asked.values():
        check_bodies(asked, story.alternate)
    if any(b"[No answer was given.]" in each.body for asked in player.asked.values() for each in asked):
        player.seen.add("an alternation note")
    return player


# -- what happened, for the statistics -----------------------------------------------------------

BY_TEXT = {
    "a result over the cap": "[truncated]",
    "a failed tool": dispatch.tool_failed(""),
    "a fault in the port": "an error inside the tool port",
    "a denied tool": endings.call_denied(""),
    "a call that needs approval": endings.NO_APPROVAL,
    "a repeated call": endings.ALREADY_CALLED,
    "a second repeat": endings.REPEATED_AGAIN,
    "a call over the iterations": endings.OVER_ITERATIONS,
    "a call of a cut reply": endings.REPLY_CUT,
    "an interrupted call": endings.INTERRUPTED,
    "a call that was not reached": endings.NOT_RUN,
    "a call of a killed daemon": endings.KILLED,
    "a call that a killed daemon had not reached": endings.STOPPED,
    "arguments that do not parse": "The arguments did not parse",
    "an unknown tool": "Unknown tool",
    "a tool that was found": "Call it with call_tool.",
}


def kinds_of(turn: Turn, happened: Happened, before: bytes, after: bytes, taken: Sequence[Played]) -> Iterator[str]:
    """The kinds of things that happened in a turn."""
    added = naive_records(after[len(before) :])
    of_type = Counter(record["type"] for record in added)
    results = [record["content"] for record in added if record["type"] == "tool_result"]
    yield from (kind for kind, text in BY_TEXT.items() if any(text in result for result in results))
    if of_type["user"]:
        yield "user text: " + ("empty" if not turn.text else "ASCII" if turn.text.isascii() else "beyond ASCII")
        if open_calls(before):
            yield "calls answered by the next turn"
    used = {call["id"] for record in naive_records(before) for call in record.get("tool_calls", ())}
    for record, following in pairwise([*added, {"type": "the end"}]):
        if record["type"] == "assistant":
            content = record["content"]
            yield "content: " + ("null" if content is None else "some" if content else "empty")
            yield "reasoning: " + ("some" if record["reasoning_content"] else "none")
            yield f"calls in a reply: {len(record['tool_calls'])}"
            if following["type"] != "usage":
                yield "a reply without its usage"
        elif record["type"] == "usage" and record["thinking_capped"]:
            yield "a thinking cap"
        elif record["type"] == "cache_loss":
            yield "a cache loss"
        for call in record.get("tool_calls", ()):
            if not call["id"].strip() or call["id"] in used:
                yield "an id used before" if call["id"].strip() else "a call without an id"
            used.add(call["id"])
    for played in taken:
        if isinstance(played, Failing):
            yield f"a try that failed: {played.how}"
        elif isinstance(played, Endless):
            yield "thinking that goes on over the cap"
    if any(isinstance(played, Failing) for played in taken[:-1]):
        yield "a retry"
    if turn.busy and taken:
        yield "a busy slot"
    if isinstance(happened.answer, WireError):
        yield f"ends with {happened.answer.code.value} {happened.answer.detail.get('limit', '')}".rstrip()
    if happened.interruptions:
        unfinished = {endings.INTERRUPTED, endings.NOT_RUN} & {*results[len(open_calls(before)) :]}
        place = (
            "after its answer" if isinstance(happened.answer, TurnDone)
            else "before its user text" if not of_type["user"]
            else "before its first request" if not happened.asked
            else "in its tools" if open_calls(after) or unfinished
            else "in a completion"
        )  # fmt: skip
        yield f"{happened.interruptions[0]} {place}"
        if len(happened.interruptions) > 1:
            yield f"{happened.interruptions[0]}, then {happened.interruptions[1]}"


NEEDED = {
    *BY_TEXT,
    *(f"user text: {text}" for text in ("empty", "ASCII", "beyond ASCII")),
    *(f"content: {content}" for content in ("null", "empty", "some")),
    *("reasoning: some", "reasoning: none"),
    *(f"calls in a reply: {count}" for count in range(4)),
    *(f"a try that failed: {how}" for how in (*PASSING, *FINAL)),
    *(f"ends with {why}" for why in (
        "inference", "inference stall_s", "inference reply_max_bytes", "session_full", "turn_limit tool_iterations",
        "turn_limit repeat_detection", "shutting_down",
    )),
    *(f"{how} {place}" for how in ("hang up", "stop", "abort", "kill", "tear") for place in (
        "before its user text", "before its first request", "in a completion", "in its tools",
    )),
    *(f"{how} after its answer" for how in ("hang up", "stop", "abort", "kill")),
    *("hang up, then kill", "stop, then kill", "an interruption between two turns", "a torn line"),
    *("calls answered by the next turn", "a reply without its usage", "a thinking cap", "a cache loss", "a retry"),
    *("an id used before", "a call without an id", "thinking that goes on over the cap", "a busy slot"),
    "an alternation note",
}  # fmt: skip
"""What a deep run must have seen."""


# -- the property --------------------------------------------------------------------------------

DEEP = settings.get_current_profile_name() == "deep"
ROUNDS = {"deep": 500, "few": 1}.get(settings.get_current_profile_name(), 6)
SHRINKING_S = 60.0
"""Pytest's own limit would end a run that shrinks longer, and nothing would be printed."""
FINISHED: set[int] = set()
"""The rounds that are over."""
SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""In memory, where there is such a place: a slow disk shows nothing that a kill here could leave."""


def play_through(story: Story) -> Player:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        return trio.run(play, Path(name), story, clock=MockClock(autojump_threshold=0))


@define
class Patience:
    """Lets the shrinking of a failing story end: after a time only what has failed before is played again."""

    ends_s: float = float("inf")
    failed: set[Story] = field(factory=set)

    def run(self, check: Callable[[], object], story: Story) -> None:
        if time.monotonic() > self.ends_s and story not in self.failed:
            return
        try:
            check()
        except Exception:
            self.failed.add(story)
            self.ends_s = min(self.ends_s, time.monotonic() + SHRINKING_S)
            raise


PATIENCE = Patience()


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """The daemon's log of all stories would bury the one that is printed."""
    log = logging.getLogger("boxmaker")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(before)


@pytest.fixture(scope="module", params=range(ROUNDS))
def rounds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rounds of ten stories: after ten of a run Hypothesis mostly copies parts of those it has, and few are new."""
    yield
    FINISHED.add(request.param)


@pytest.mark.usefixtures("rounds")
@settings(max_examples=10, phases=[phase for phase in Phase if phase is not Phase.explain])  # which traces each line
@given(stories)
def test_every_request_extends_the_previous_one(story: Story) -> None:
    PATIENCE.run(lambda: SEEN.update(play_through(story).seen), story)


@pytest.mark.parametrize("story", STORIES)
def test_every_request_of_these_extends_the_previous_one(story: Story) -> None:
    play_through(story)


@pytest.fixture(scope="module", autouse=True)
def nothing_was_left_out(pytestconfig: pytest.Config) -> Iterator[None]:
    """A whole deep run shows what its stories were made of, and fails if a kind of thing never happened."""
    yield
    if DEEP and len(FINISHED) == ROUNDS:
        table = "\n".join(f"{SEEN[kind]:6} {kind}" for kind in sorted({*SEEN, *NEEDED}))
        capture = pytestconfig.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            print(f"\nin how many of {10 * ROUNDS} stories:\n{table}")
        assert NEEDED - set(SEEN) == set()


# -- the law on `messages(baseline, records)` alone ----------------------------------------------


def request_points(records: Sequence[LogRecord]) -> Iterator[int]:
    """After how many records a request can be sent: a user's text or a result came last, and no call is open."""
    waiting = 0
    for count, record in enumerate(records, start=1):
        if isinstance(record, AssistantRecord):
            waiting = len(record.tool_calls)
        elif isinstance(record, ToolResultRecord):
            waiting -= 1
        if waiting == 0 and isinstance(record, UserRecord | ToolResultRecord):
            yield count


FIXED_TAIL = '"stream":true,"id_slot":0}'


@given(writer_records(), st.booleans())
def test_the_messages_of_a_growing_log_extend_those_before(records: list[LogRecord], alternate: bool) -> None:
    """Each time from nothing, as after a restart, and without a daemon."""
    before: list[ChatMessage] = []
    bodies: list[bytes] = []
    for count in request_points(records):
        made = messages(BASELINE, records[:count])
        assert made[0] == chat.System(content=BASELINE.system)
        assert made[: len(before)] == before
        log = b"".join(encode_line(record) for record in records[:count])
        assert made == naive_history(BASELINE_RAW, log)
        encoder = RequestEncoder(tools=BASELINE.tools, fixed=FIXED, alternate=alternate)
        for message in made:
            encoder.add(message)
        assert encoder.body() == naive_body(BASELINE_RAW, log, FIXED_TAIL, alternate)
        bodies.append(encoder.body())
        before = made
    check_growth([(body, naive_rest(BASELINE_RAW, FIXED_TAIL)) for body in bodies])


# -- the judges, judged ---------------------------------------------------------------------------


def test_the_independent_reader_shares_no_code_with_session_and_request() -> None:
    """Of ours it has the classes of the messages, and what these are made of."""
    known = modules()
    used, todo = set[str](), imports(Path(naive.__file__))
    while todo:
        used |= todo
        todo = {found for name in todo & set(known) for found in imports(known[name])} - used
    ours = used & set(known)
    assert "proto.chat" in ours
    assert {name for name in ours if not name.startswith("proto.")} == {"errors"}


PLAYED = Story((Turn("a", (Reply("b", None, (Call("c", "clock", "{}"),)), Reply("d"))), Turn("e", (Reply("f"),))))


@cache
def asked_of_it() -> tuple[Asked, ...]:
    return tuple(play_through(PLAYED).asked["s"])


def tampered(before: bytes, after: bytes) -> Callable[[list[Asked]], list[Asked]]:
    """Change the second body: one place in it."""

    def change(asked: list[Asked]) -> list[Asked]:
        assert asked[1].body.count(before) == 1
        return [asked[0], evolve(asked[1], body=asked[1].body.replace(before, after)), *asked[2:]]

    return change


def with_log_of(place: int) -> Callable[[list[Asked]], list[Asked]]:
    return lambda asked: [*asked[:place], evolve(asked[place], log=asked[place + 1].log), *asked[place + 1 :]]


@pytest.mark.parametrize(
    "change",
    [
        tampered(b'"content":"a"', b'"content":"A"'),
        tampered(b'"content":"a"', b'"content": "a"'),
        tampered(b'"id":"c"', b'"id":"C"'),
        tampered(b'"name":"find_tool"', b'"name":"find_tools"'),
        tampered(b"0.5", b"0.50"),
        lambda asked: asked[::-1],
        lambda asked: [*asked, asked[0]],
        with_log_of(0),
    ],
)
def test_the_judge_of_bodies_finds_a_fault(change: Callable[[list[Asked]], list[Asked]]) -> None:
    asked = list(asked_of_it())
    assert len(asked) == 4
    check_bodies(asked, False)
    with pytest.raises(AssertionError):
        check_bodies(change(asked), False)


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'"content":"a"', b'"content":"A"'), (b'"system"', b'"System"'), (b'"name":"find_tool"', b'"name":"find_tools"')],
)
def test_the_judge_of_growth_finds_a_fault(before: bytes, after: bytes) -> None:
    """Also where no log is asked."""
    bodies = [(each.body, naive_rest(each.baseline, TAIL)) for each in asked_of_it()]
    check_growth(bodies)
    bodies[1:] = [(body.replace(before, after), rest.replace(before, after)) for body, rest in bodies[1:]]
    with pytest.raises(AssertionError):
        check_growth(bodies)


LINES_OF_LOG: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a result is lost": lambda log: [*log[:4], *log[5:]],
    "a result is given twice": lambda log: [*log[:5], *log[4:]],
    "a result is another call's": lambda log: [*log[:4], log[4].replace(b'"c"', b'"d"'), *log[5:]],
    "a result is over the cap": lambda log: [*log[:4], log[4].replace(b'"content":"', b'"content":"' + b"x" * 400)],
    "the user's text is lost": lambda log: [log[0], *log[2:]],
    "the user's text comes later": lambda log: [log[0], *log[2:4], log[1], *log[4:]],
    "a reply is changed": lambda log: [*log[:2], log[2].replace(b'"b"', b'"B"'), *log[3:]],
    "a reply has lost its call": lambda log: [*log[:2], re.sub(rb"\[.*\]", b"[]", log[2]), log[3], *log[5:]],
    "a reply has lost its figures": lambda log: [*log[:3], *log[4:]],
    "the last reply is lost": lambda log: log[:5],
    "a reply was not whole": lambda log: [*log, log[5], log[6]],
}


@pytest.mark.parametrize("fault", LINES_OF_LOG)
def test_the_judge_of_the_log_finds_a_fault(fault: str) -> None:
    turn = PLAYED.turns[0]
    usage = Figures(cache_n=None, prompt_n=None, predicted_n=None, reasoning_tokens=0, thinking_capped=False)
    happened = Happened(answer=TurnDone(content="d", usage=usage), asked=2)
    log = asked_of_it()[2].log.splitlines(keepends=True)[:-1]  # but the next turn's text
    assert [json.loads(line)["type"] for line in log] == [
        "session_start", "user", "assistant", "usage", "tool_result", "assistant", "usage",
    ]  # fmt: skip
    check_log(turn, happened, b"", b"".join(log))
    with pytest.raises(AssertionError):
        check_log(turn, happened, b"", b"".join(LINES_OF_LOG[fault](log)))


def test_what_is_printed_for_a_failing_story_can_be_pasted() -> None:
    failed: list[Story] = []

    @settings(max_examples=50, database=None, phases=[Phase.generate])
    @given(stories)
    def fails(story: Story) -> None:
        if any(isinstance(turn.end, Interrupt) and turn.responses for turn in story.turns):
            failed.append(story)
            raise AssertionError("planted")

    with pytest.raises(AssertionError, match="planted") as caught:
        fails()
    shown = re.search(r"story=(Story\(.*\)),\n\)", "\n".join(caught.value.__notes__), re.DOTALL)
    assert shown is not None
    assert eval(shown[1], vars(tests.stories)) == failed[-1]
