"""The calls of one reply: what overlaps, the order of events and results, deadlines, faults, and what a kill leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from boxmaker.proto import records
from boxmaker.proto.channel import Cancel, Cut, ToolCallStarted, ToolResult, TurnDone, TurnEvent, WireError
from boxmaker.proto.chat import ToolCall
from boxmaker.proto.frames import Answer, encode_request
from boxmaker.proto.ids import SessionId
from boxmaker.proto.tools import Failed, ToolRequest, ToolResponse
from boxmaker.session.store import NewSession
from boxmaker.testing.daemon import Daemon, running_daemon
from boxmaker.testing.port import public
from boxmaker.testing.server import reply, scripted_server
from boxmaker.turn.loop import run_turn
from boxmaker.turn.runtime import tell_nobody

S = SessionId("s")
KILLED = "Interrupted: boxmaker failed while the call may have been running; its outcome is unknown."
INTERRUPTED = "Interrupted: the call was running when the turn ended; its outcome is unknown."
STOPPED = "Not run: boxmaker was stopped before this call."
NOT_RUN = "Not run: the turn ended before this call."
OVER_TIME = "Not run: the turn's time was over before this call."


def calls(*names: str) -> bytes:
    """A reply with a call for each name: `p1` may run beside others, `x1` may not, `?` is a tool that there is not."""
    made = [(name, "clock" if name != "?" else "nope", f'{{"name":"{name}"}}') for name in names]
    return reply(calls=made, cache_n=None, prompt_n=None, predicted_n=None)


ANSWER = reply("Done.", cache_n=None, prompt_n=None, predicted_n=None)


@define
class Port:
    """Each call ends when the test says so; `trace` has what began and what ended, in order."""

    trace: list[str] = field(factory=list)
    numbers: dict[str, int] = field(factory=dict)
    asked: dict[str, int] = field(factory=dict)
    """The number that a call had when the port was asked whether it runs beside others."""
    _ends: dict[str, trio.Event] = field(factory=dict)
    _gives: dict[str, ToolResponse] = field(factory=dict)
    at_once: bool = False

    def runs_beside(self, request: ToolRequest) -> bool:
        self.asked[request.arguments.split('"')[3]] = request.call
        if "pbad" in request.arguments:
            raise RuntimeError("the port does not know")
        return '"name":"p' in request.arguments

    async def call(self, request: ToolRequest) -> ToolResponse:
        name = request.arguments.split('"')[3]
        self.numbers[name] = request.call
        self.trace.append(f"+{name}")
        await trio.lowlevel.checkpoint()
        if not self.at_once:
            await self._ends.setdefault(name, trio.Event()).wait()
        self.trace.append(f"-{name}")
        return self._gives.get(name, public(f"of {name}"))

    async def end(self, *names: str, response: ToolResponse | None = None) -> None:
        """Let calls end, and everybody go on."""
        for name in names:
            if response is not None:
                self._gives[name] = response
            self._ends.setdefault(name, trio.Event()).set()
            await wait_all_tasks_blocked()


@define
class Running:
    """A turn that runs: what its channel was told so far."""

    answers: list[Answer] = field(factory=list)
    over: trio.Event = field(factory=trio.Event)

    @property
    def told(self) -> str:
        """`+` for a call that started, `-` for a result, in order."""
        signs = {ToolCallStarted: "+", ToolResult: "-"}
        return "".join(signs.get(type(answer), "") for answer in self.answers)


async def begin(daemon: Daemon, nursery: trio.Nursery) -> Running:
    running = Running()
    stream, channel = await daemon.open("s", "go", resume=False)

    async def read() -> None:
        async with stream:
            while not running.answers or isinstance(running.answers[-1], TurnEvent):
                answer = (await channel.receive()).answer
                assert answer is not None
                running.answers.append(answer)
        running.over.set()

    nursery.start_soon(read)
    await wait_all_tasks_blocked()
    return running


def results(daemon: Daemon) -> list[tuple[str, str]]:
    return [(one.tool_call_id, one.content) for one in daemon.log("s") if isinstance(one, records.ToolResult)]


async def test_calls_that_are_safe_overlap_and_keep_the_models_order(tmp_path: Path, autojump_clock: MockClock) -> None:
    port = Port()
    async with scripted_server(calls("p0", "p1", "p2"), ANSWER) as server:
        async with running_daemon(tmp_path, server.url, port=port) as daemon, trio.open_nursery() as nursery:
            running = await begin(daemon, nursery)
            assert sorted(port.trace) == ["+p0", "+p1", "+p2"]
            assert running.told == "+++"
            await port.end("p2", "p1")
            assert running.told == "+++", "a result waits for those before it"
            assert results(daemon) == []
            await port.end("p0")
            await running.over.wait()
            assert running.told == "+++---"
            assert results(daemon) == [("p0", "of p0"), ("p1", "of p1"), ("p2", "of p2")]
            assert port.numbers == {"p0": 0, "p1": 1, "p2": 2}
            numbers = [one.call for one in daemon.log("s") if isinstance(one, records.ToolResult)]
            assert numbers == [0, 1, 2]


async def test_calls_are_numbered_through_the_session(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The number of a call is its place among all of the log, for a port that keeps approvals by it."""
    port = Port(at_once=True)
    async with scripted_server(calls("p0", "x1"), calls("x2", "p3"), ANSWER, ANSWER) as server:
        async with running_daemon(tmp_path, server.url, port=port) as daemon:
            await daemon.ask("s", "go", resume=False)
            assert port.numbers == port.asked == {"p0": 0, "x1": 1, "x2": 2, "p3": 3}
            new = NewSession(slot=0, baseline=daemon.service._baseline)
            async with daemon.store.turn(S, resume=True, new=new, alternate=False) as session:
                now = daemon.rt.now()
                made = ToolCall(id="a", name="clock", arguments='{"name":"p4"}')
                await session.append(records.User(time=now, content="again"))
                await session.append(
                    records.Assistant(time=now, content=None, reasoning_content=None, tool_calls=(made,))
                )
            await daemon.ask("s", "and now?", resume=True)
            assert port.asked["p4"] == 4, "also when it is asked after a kill"
            assert "p4" not in port.numbers


async def test_the_pool_rolls_a_new_call_starts_when_any_ends(tmp_path: Path, autojump_clock: MockClock) -> None:
    port = Port()
    text = "[loop]\nparallel_tools = 2\n"
    async with scripted_server(calls("p0", "p1", "p2", "p3"), ANSWER) as server:
        async with running_daemon(tmp_path, server.url, text, port=port) as daemon, trio.open_nursery() as nursery:
            running = await begin(daemon, nursery)
            assert sorted(port.trace) == ["+p0", "+p1"]
            await port.end("p1")
            assert port.trace[2:] == ["-p1", "+p2"], "although p0 still runs"
            await port.end("p2")
            assert port.trace[4:] == ["-p2", "+p3"]
            assert running.told == "++++"
            await port.end("p3", "p0")
            await running.over.wait()
            assert running.told == "++++----"


async def test_one_at_a_time_is_as_if_the_port_knew_nothing(tmp_path: Path, autojump_clock: MockClock) -> None:
    port = Port(at_once=True)
    async with scripted_server(calls("p0", "p1"), ANSWER) as server:
        text = "[loop]\nparallel_tools = 1\n"
        async with running_daemon(tmp_path, server.url, text, port=port) as daemon, trio.open_nursery() as nursery:
            running = await begin(daemon, nursery)
            await running.over.wait()
    assert port.trace == ["+p0", "-p0", "+p1", "-p1"]
    assert running.told == "+-+-"


async def test_any_other_call_is_a_barrier(tmp_path: Path, autojump_clock: MockClock) -> None:
    port = Port()
    async with scripted_server(calls("p0", "p1", "x", "p2", "p3"), ANSWER) as server:
        async with running_daemon(tmp_path, server.url, port=port) as daemon, trio.open_nursery() as nursery:
            running = await begin(daemon, nursery)
            await port.end("p1")
            assert "+x" not in port.trace
            await port.end("p0")
            assert port.trace[-1] == "+x"
            assert running.told == "++--+"
            await port.end("x")
            assert sorted(port.trace[-2:]) == ["+p2", "+p3"]
            await port.end("p2", "p3")
            await running.over.wait()
            assert running.told == "++--+-++--"


async def test_a_port_that_cannot_say_gets_a_barrier(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "boxmaker")
    port = Port()
    async with scripted_server(calls("p0", "pbad"), ANSWER) as server:
        async with running_daemon(tmp_path, server.url, port=port) as daemon, trio.open_nursery() as nursery:
            running = await begin(daemon, nursery)
            assert port.trace == ["+p0"]
            await port.end("p0", "pbad")
            await running.over.wait()
    assert isinstance(running.answers[-1], TurnDone)
    (told,) = (one for one in caplog.records if one.getMessage() == "tool_port_failed")
    assert vars(told)["fields"] == {"session": "s", "call": 1}


async def test_our_own_answers_wait_their_turn_and_hold_nobody_up(tmp_path: Path, autojump_clock: MockClock) -> None:
    port = Port()
    async with scripted_server(calls("p0", "?", "p1"), ANSWER) as server:
        async with running_daemon(tmp_path, server.url, port=port) as daemon, trio.open_nursery() as nursery:
            running = await begin(daemon, nursery)
            assert sorted(port.trace) == ["+p0", "+p1"]
            assert running.told == "+++"
            await port.end("p1", "p0")
            await running.over.wait()
            assert [name for name, _ in results(daemon)] == ["p0", "?", "p1"]


async def test_a_second_repeat_lets_those_that_run_finish(tmp_path: Path, autojump_clock: MockClock) -> None:
    port = Port()
    async with scripted_server(calls("p0", "p0", "p0", "p1")) as server:
        async with running_daemon(tmp_path, server.url, port=port) as daemon, trio.open_nursery() as nursery:
            running = await begin(daemon, nursery)
            assert port.trace == ["+p0"]
            await port.end("p0")
            await running.over.wait()
            assert [text.partition(":")[0] for _, text in results(daemon)] == ["of p0", "Not run", "Not run", "Not run"]
    assert running.told == "++--+--"
    assert isinstance(running.answers[-1], WireError)
    assert running.answers[-1].detail == {"limit": "repeat_detection", "value": 2}


async def test_a_call_over_its_time_gets_its_result_and_the_turn_goes_on(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    port = Port()
    async with scripted_server(calls("x"), ANSWER) as server:
        text = "[tools]\ncall_s = 7\n"
        async with running_daemon(tmp_path, server.url, text, port=port) as daemon:
            began = trio.current_time()
            done = await daemon.ask("s", "go", resume=False)
            assert trio.current_time() - began == pytest.approx(7)
            late = "Interrupted: the call took longer than it may; its outcome is unknown."
            assert results(daemon) == [("x", late)]
    assert done.content == "Done."


async def test_a_turn_over_its_time_keeps_what_tools_have_answered(tmp_path: Path, autojump_clock: MockClock) -> None:
    port = Port()
    async with scripted_server(calls("p0", "p1", "x")) as server:
        text = "[loop]\nturn_s = 60\n"
        async with running_daemon(tmp_path, server.url, text, port=port) as daemon, trio.open_nursery() as nursery:
            began = trio.current_time()
            running = await begin(daemon, nursery)
            await port.end("p1", response=Failed(message="no luck"))
            await running.over.wait()
            assert trio.current_time() - began == pytest.approx(60)
            over = "Not run: the turn's time was over before this call."
            assert results(daemon) == [("p0", INTERRUPTED), ("p1", "The tool failed: no luck"), ("x", over)]
    assert isinstance(running.answers[-1], WireError)
    assert (running.answers[-1].code, running.answers[-1].detail) == ("turn_limit", {"limit": "turn_s"})


@pytest.mark.parametrize(("how", "not_run"), [("cancel", NOT_RUN), ("stop", STOPPED)])
async def test_what_a_cancelled_pool_leaves(tmp_path: Path, autojump_clock: MockClock, how: str, not_run: str) -> None:
    port = Port()
    async with scripted_server(calls("p0", "p1", "x")) as server:
        async with running_daemon(tmp_path, server.url, port=port) as daemon, trio.open_nursery() as nursery:
            running = await begin(daemon, nursery)
            await port.end("p1")
            if how == "stop":
                daemon.closing.begin()
                daemon.closing.cancel_turns()
            else:
                stream = await daemon.connect()
                await stream.send_all(encode_request(Cancel(session=S, cause="owner")))
                await running.over.wait()
                await stream.aclose()
            await running.over.wait()
            assert results(daemon) == [("p0", INTERRUPTED), ("p1", "of p1"), ("x", not_run)]
    assert port.trace == ["+p0", "+p1", "-p1"] or port.trace == ["+p1", "+p0", "-p1"]


async def test_a_fault_of_the_scheduler_invents_no_results(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The next turn gives them: those that may have run beside the first have an unknown outcome too."""
    port = Port()
    async with scripted_server(calls("p0", "p1", "x", "p2"), ANSWER) as server:
        async with running_daemon(tmp_path, server.url, port=port) as daemon:
            new = NewSession(slot=0, baseline=daemon.service._baseline)

            async def emit(events: Sequence[TurnEvent]) -> None:
                await wait_all_tasks_blocked()
                if port.trace and isinstance(events[0], ToolCallStarted):
                    raise RuntimeError("a fault of ours")

            async with daemon.store.turn(S, resume=False, new=new, alternate=False) as session:
                with pytest.raises(RuntimeError, match="a fault of ours"):
                    await run_turn(session, daemon.rt, "go", emit)
            assert port.trace == ["+p0"]
            assert results(daemon) == []
            assert len(session.state.open_calls) == 4
            await daemon.ask("s", "and now?", resume=True)
            assert results(daemon) == [("p0", KILLED), ("p1", KILLED), ("x", STOPPED), ("p2", STOPPED)]


@pytest.mark.parametrize(
    ("names", "running"),
    [
        (("x", "p0"), "+-"),
        (("p0", "x", "p1"), "+--"),
        (("p0", "p1", "?", "p2"), "++-+"),
        (("?", "p0"), "+-"),
        (("x", "x1"), "+-"),
    ],
)
async def test_after_a_kill_a_call_that_may_have_begun_is_not_said_not_to_have(
    tmp_path: Path, autojump_clock: MockClock, names: tuple[str, ...], running: str
) -> None:
    async with scripted_server(calls(*names)) as server:
        async with running_daemon(tmp_path, server.url, port=Port()) as daemon:
            # as a kill leaves it: the calls are in the log, and none has a result
            new = NewSession(slot=0, baseline=daemon.service._baseline)
            async with daemon.store.turn(S, resume=False, new=new, alternate=False) as session:
                now = daemon.rt.now()
                await session.append(records.User(time=now, content="go"))
                made = tuple(
                    ToolCall(id=name, name="clock" if name != "?" else "nope", arguments=f'{{"name":"{name}"}}')
                    for name in names
                )
                await session.append(records.Assistant(time=now, content=None, reasoning_content=None, tool_calls=made))
            server.scripts = [ANSWER]
            await daemon.ask("s", "and now?", resume=True)
            texts = [text for _, text in results(daemon)]
            assert texts == [KILLED if sign == "+" else STOPPED for sign in running]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("how", "text", "ending"),
    [
        ("owner", "", "cancelled"),
        ("call_s", "[tools]\ncall_s = 5\n", "turn_done"),
        ("turn_s", "[loop]\nturn_s = 5\n", "turn_limit"),
    ],
)
async def test_a_port_that_fails_while_it_is_cancelled_changes_nothing(
    tmp_path: Path, autojump_clock: MockClock, how: str, text: str, ending: str, beside: bool
) -> None:
    """Its own nursery gives the cancel and its fault as one group."""

    class Failing:
        def runs_beside(self, request: ToolRequest) -> bool:
            return beside

        async def call(self, request: ToolRequest) -> ToolResponse:
            async def fails() -> None:
                try:
                    await trio.sleep_forever()
                finally:
                    raise ValueError("its clean-up")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(fails)
                await trio.sleep_forever()
            raise AssertionError("it ends by a cancel alone")

    async with scripted_server(calls("p1", "p2"), ANSWER) as server:
        async with running_daemon(tmp_path, server.url, text, port=Failing()) as daemon:
            async with trio.open_nursery() as nursery:
                running = await begin(daemon, nursery)
                if how == "owner":
                    stream = await daemon.connect()
                    async with stream:
                        await stream.send_all(encode_request(Cancel(session=S, cause="owner")))
                        await running.over.wait()
                await running.over.wait()
            last = running.answers[-1]
            assert (last.code.value if isinstance(last, WireError) else "turn_done") == ending
            unknown = ["Interrupted: the call took longer than it may; its outcome is unknown."] * 2
            if how != "call_s":
                other = INTERRUPTED if beside else {"owner": NOT_RUN, "turn_s": OVER_TIME}[how]
                unknown = [INTERRUPTED, other]
            assert [content for _, content in results(daemon)] == unknown


async def test_a_port_that_ends_the_process_is_not_answered_for(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Ctrl-C inside a nursery of a port's is no fault of a tool."""

    class Interrupted:
        async def call(self, request: ToolRequest) -> ToolResponse:
            raise BaseExceptionGroup("a nursery's", [KeyboardInterrupt()])

    async with scripted_server(calls("x")) as server:
        async with running_daemon(tmp_path, server.url, port=Interrupted()) as daemon:
            new = NewSession(slot=0, baseline=daemon.service._baseline)
            async with daemon.store.turn(S, resume=False, new=new, alternate=False) as session:
                with pytest.raises(BaseExceptionGroup) as raised:
                    await run_turn(session, daemon.rt, "go", tell_nobody)
            assert raised.value.subgroup(KeyboardInterrupt) is not None
            assert results(daemon) == []


async def test_calls_that_are_in_the_log_and_not_yet_begun_have_results_after_a_cancel(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The cancel comes while the channel is told of the reply that asks for them."""
    cut = reply(calls=[("a", "clock", "{}"), ("b", "clock", "{}")], finish_reason="length", cache_n=None)
    told: list[TurnEvent] = []
    async with scripted_server(cut) as server, running_daemon(tmp_path, server.url) as daemon:
        new = NewSession(slot=0, baseline=daemon.service._baseline)

        async def emit(events: Sequence[TurnEvent]) -> None:
            told.extend(events)
            if events and isinstance(events[-1], Cut):
                scope.cancel()
                await trio.sleep_forever()

        async with daemon.store.turn(S, resume=False, new=new, alternate=False) as session:
            with trio.CancelScope() as scope:
                await run_turn(session, daemon.rt, "go", emit)
        assert scope.cancelled_caught
        assert isinstance(told[-1], Cut), "a channel that has gone is told nothing more"
        assert results(daemon) == [("a", NOT_RUN), ("b", NOT_RUN)]
