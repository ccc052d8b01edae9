"""Crashes a real loopd in the middle of a conversation, and judges what is left.

Laws, for a kill and for a power loss:
* What a channel saw acknowledged (`tool_result`, `turn_done`) is in the log.
* The log loads, or is refused as torn and `bxctl session repair` brings it back.
* It holds the beginning of what the conversation leaves, and nothing else; a session whose creation was cut is
  not there.
* The next request extends every one that the server was asked, and no call is without a result in it, nor after it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import trio
from attrs import define, field

from boxmaker.channel.client import open_turn
from boxmaker.errors import ChannelClosed, NobodyListens
from boxmaker.proto.channel import ToolResult, Turn, TurnDone
from boxmaker.proto.ids import SessionId
from boxmaker.session.logs import check
from boxmaker.testing.server import Script, ScriptedServer, reply
from tests.hostile.crash.launcher import MARK, Job, Phase, Program
from tests.hostile.crash.model import Rec, Said, closing_records, messages_of, read_records, turn_records
from tests.hostile.crash.power import Journal, Tree, lay, left_by_kill, left_by_power_loss, left_without_contents
from tests.loopd.daemon_process import write_config
from tests.strict import refuse

LIMIT_S = 60
KILLED = -9
ROOT = Path(__file__).parents[3]


# -- programs --------------------------------------------------------------------------------------


@define
class Launcher:
    """A process that forks our programs, one at a time; `text` is what it and they have said."""

    process: trio.Process
    text: str = ""
    _grown: trio.Event = field(factory=trio.Event)

    async def read(self) -> None:
        """Collect what is said, to its end; cancelled by `launcher`."""
        assert self.process.stderr is not None
        async for data in self.process.stderr:
            self.text += data.decode("utf-8")
            self._grown.set()
            self._grown = trio.Event()

    async def wait_for(self, *texts: str) -> str:
        """Wait for one of these texts; give it."""
        while True:
            for text in texts:
                if text in self.text:
                    return text
            await self._grown.wait()

    async def start(self, job: Job) -> int:
        """Start a program; its pid."""
        assert self.process.stdin is not None
        self.text = ""
        await self.process.stdin.send_all(json.dumps(attrs.asdict(job)).encode() + b"\n")
        await self.wait_for(f"{MARK}pid ")
        return int(self.text.partition(f"{MARK}pid ")[2].split()[0])

    async def ended(self) -> int:
        """Wait until the program has ended; its status, negative for a signal."""
        await self.wait_for(f"{MARK}exit ")
        return int(self.text.partition(f"{MARK}exit ")[2].split()[0])


@asynccontextmanager
async def launcher() -> AsyncIterator[Launcher]:
    """Have a launcher; it ends with the block, and what it runs with it."""
    command = [sys.executable, "-m", "tests.hostile.crash.launcher"]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    made = Launcher(process)
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.read)
            with trio.fail_after(LIMIT_S):
                await made.wait_for(f"{MARK}ready")
            yield made
            nursery.cancel_scope.cancel()
    finally:
        await trio.aclose_forcefully(process.stdin)
        await trio.aclose_forcefully(process.stderr)
        with trio.move_on_after(5, shield=True):
            await process.wait()


Told: TypeAlias = dict[str, tuple[list[Rec], int]]
"""What a life of loopd leaves in the log of each session that was talked to, and how much of it was acknowledged."""


# -- a home that crashes ---------------------------------------------------------------------------


class Broken(AssertionError):
    """A law that does not hold."""


def demand(holds: bool, *what: object) -> None:
    if not holds:
        raise Broken(" ".join(map(str, what)))


@define
class Place:
    """A home below `directory`, its server, and all that is known of its sessions."""

    directory: Path
    server: ScriptedServer
    launcher: Launcher
    home: Path
    logs: dict[str, list[Rec]] = field(factory=dict)
    """The logs as they were found last; a session that is not there is not here."""
    safe: dict[str, int] = field(factory=dict)
    """How many records of them a power loss may not take: a kill leaves more, which nobody was told of."""
    asked: dict[str, list[bytes]] = field(factory=dict)
    """The requests that the server was asked, by session."""
    torn: int = 0
    """How many logs were mended."""
    _journals: int = 0
    _pid: int = 0
    _on_disk: bool = False
    """Nothing has run since a power loss: all that is there is on the disk."""
    _frames_left: int | None = None

    @property
    def root(self) -> Path:
        """What a power loss concerns."""
        return self.directory / "world"

    @property
    def sessions(self) -> Path:
        return self.home / "sessions"

    @property
    def config(self) -> Path:
        return self.directory / "config.toml"

    @property
    def journal(self) -> Path:
        return self.directory / f"journal{self._journals}"

    @property
    def keep(self) -> Path:
        return self.directory / f"keep{self._journals}"

    def lay(self, tree: Tree) -> None:
        """Be what a crash has left; from now on all of that is on the disk."""
        lay(self.root, tree)
        self._journals += 1
        # another way to go on from the same crash may have had this number: its inodes are not ours
        self.journal.unlink(missing_ok=True)
        shutil.rmtree(self.keep, ignore_errors=True)
        self._on_disk = True

    def known(self, tree: Tree, told: Told) -> str:
        """All that a judgement of a tree depends on, times and random names left out."""
        asked = [(session, [VOLATILE.sub(b"", body) for body in bodies]) for session, bodies in self.asked.items()]
        return repr((matters(tree), told, self.logs, asked))

    def copy(self) -> Place:
        """What is known, for one of several ways to go on."""
        logs = {session: list(log) for session, log in self.logs.items()}
        asked = {session: list(bodies) for session, bodies in self.asked.items()}
        return attrs.evolve(self, logs=logs, safe=dict(self.safe), asked=asked)

    async def start(
        self,
        program: Program,
        *arguments: str,
        point: int | None = None,
        phase: Phase = "before",
        watched: bool = False,
    ) -> int:
        """Start a program; its pid. If `watched`, what it does to the disk is noted, behind what was done before."""
        job = Job(program=program, arguments=[*arguments], root=str(self.root), point=point, phase=phase)
        if watched:
            self.keep.mkdir(exist_ok=True)
            job = attrs.evolve(job, journal=str(self.journal), keep=str(self.keep))
        return await self.launcher.start(job)

    async def live(
        self,
        turns: Sequence[Said],
        *,
        point: int | None = None,
        phase: Phase = "before",
        watched: bool = False,
        kill_after_frames: int | None = None,
    ) -> tuple[int, Told]:
        """Run loopd for some turns, to their end or its own; `kill_after_frames`: `kill -9` from outside.

        Gives its exit status and what was told.
        """
        self._frames_left, self._on_disk = kill_after_frames, False
        serve = ("serve", "--config", str(self.config))
        pid = await self.start("loopd", *serve, point=point, phase=phase, watched=watched)
        self._pid, told = pid, Told()
        try:
            if await self.launcher.wait_for("event=ready", f"{MARK}exit ") == "event=ready":
                for said in turns:
                    if not await self._talk(said, told):
                        break
                else:
                    if self._frames_left != 0:
                        self._kill(signal.SIGTERM)
        except Broken:  # the launcher runs one at a time
            self._kill(signal.SIGKILL)
            await self.launcher.ended()
            raise
        status = await self.launcher.ended()
        demand("Traceback" not in self.launcher.text, "a traceback:", self.launcher.text)
        return status, told

    async def _talk(self, said: Said, told: Told) -> bool:
        """Run one turn; False when loopd has gone."""
        known = self.logs.get(said.session)
        if said.session not in told:
            told[said.session] = ([("session_start",)] if known is None else closing_records(known), 0)
        expected, acknowledged = told[said.session]
        resume = known is not None or acknowledged > 0
        results = [place for place, record in enumerate(expected) if record[0] == "tool_result"]
        ahead = len(expected)
        expected = [*expected, *turn_records(said)]
        results += [place for place in range(ahead, len(expected)) if expected[place][0] == "tool_result"]
        results = [place for place in results if place >= acknowledged]
        told[said.session] = (expected, acknowledged)
        self.server.scripts[:] = scripts(said)
        first = len(self.server.completions)
        turn = Turn(session=SessionId(said.session), content=said.text, resume=resume)
        final: object = None
        try:
            async with open_turn(self.home / "run" / "loop" / "loop.sock", turn) as channel:
                while final is None:
                    frame = await channel.receive()
                    self._count_frame()
                    if isinstance(frame.answer, ToolResult):
                        told[said.session] = (expected, results.pop(0) + 1)
                    if frame.final:
                        final = frame.answer
        except (ChannelClosed, NobodyListens):
            return False
        finally:
            for request in self.server.completions[first:]:
                self.asked.setdefault(said.session, []).append(request.body)
        demand(isinstance(final, TurnDone), "the turn ended with", final)
        assert isinstance(final, TurnDone)
        demand(final.content == said.answer, "another answer:", final.content)
        told[said.session] = (expected, len(expected))
        return True

    def _count_frame(self) -> None:
        if self._frames_left is not None:
            self._frames_left -= 1
            if self._frames_left == 0:
                self._kill(signal.SIGKILL)

    def _kill(self, number: signal.Signals) -> None:
        """Send a signal, if the program still runs: it writes to the disk, and dies there, behind a turn as well."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    async def judge(self, told: Told) -> None:
        """Look at what is left of a home after a crash, mend what is torn, and know its logs again."""
        there = {path.name for path in self.sessions.iterdir()} if self.sessions.exists() else set()
        whole = {name for name in there if not name.startswith(".new-")}
        for session in sorted(self.logs.keys() | told.keys() | whole):
            expected, acknowledged = told.get(session, ([], 0))
            before = self.logs.get(session, [])
            # an append syncs what stands before it, too
            least = len(before) + acknowledged if acknowledged else self.safe.get(session, 0)
            if session not in whole:
                demand(not least, session, "is gone; acknowledged were", least)
                demand(session not in self.asked, session, "is gone, and the server has seen it")
                self.logs.pop(session, None)
                continue
            mended = await self._mend(session)
            log = read_records((self.sessions / session / "0.jsonl").read_bytes())
            demand(log == (before + expected)[: len(log)], session, "holds", log, "and not", before + expected)
            demand(len(log) >= least, session, "holds", len(log), "records, acknowledged are", least)
            demand(len(log) > 0, session, "is empty")
            for body in self.asked.get(session, []):
                demand(len(messages(body)) <= 1 + len(messages_of(log)), session, "was asked more than its log holds")
            self.logs[session] = log
            self.safe[session] = len(log) if mended or self._on_disk else least

    async def _mend(self, session: str) -> bool:
        found = check(self.sessions, SessionId(session))
        if not found:
            return False
        demand(len(found) == 1 and found[0].torn and found[0].line > 1, "damage:", *found)
        status = await self.repair(session, watched=self.journal.exists())
        demand(status == 0, "repair:", self.launcher.text)
        demand(not check(self.sessions, SessionId(session)), "a repair leaves damage")
        self.torn += 1
        return True

    async def repair(
        self, session: str, *, point: int | None = None, phase: Phase = "before", watched: bool = False
    ) -> int:
        """Run `bxctl session repair`; its exit status."""
        await self.start(
            "bxctl", "session", "repair", session, "--home", str(self.home), point=point, phase=phase, watched=watched
        )
        return await self.launcher.ended()

    async def go_on(self, sessions: Iterable[str], *, watched: bool = False) -> None:
        """Start loopd again, and say something in each session: nothing is as if there had been no crash but for it."""
        turns = [Said(session, "And now?", (), "Back again.") for session in sessions]
        before = {session: list(bodies) for session, bodies in self.asked.items()}
        status, told = await self.live(turns, watched=watched)
        demand(status == 0, "loopd does not go on:", self.launcher.text)
        demand({path.name for path in self.sessions.iterdir()} == {*self.logs, *told}, "leftovers in", self.sessions)
        for session, (expected, _) in told.items():
            (last,) = self.asked[session][len(before.get(session, [])) :]
            for body in before.get(session, []):
                demand(extends(body, last), session, "does not extend", body, "with", last)
            log = self.logs.get(session, []) + expected
            asked = [(message["role"], message["content"]) for message in messages(last)[1:]]
            demand(asked == messages_of(log)[:-1], session, "asks", asked)
            found = read_records((self.sessions / session / "0.jsonl").read_bytes())
            demand(found == log, session, "holds", found, "and not", log)
            demand(not closing_records(found), session, "has calls without a result")
            demand(not check(self.sessions, SessionId(session)), session, "is damaged")
            self.logs[session], self.safe[session] = found, len(found)


def scripts(said: Said) -> list[Script]:
    """What the server answers in a turn."""
    silent: dict[str, Any] = {"cache_n": None, "prompt_n": None, "predicted_n": None}
    made: list[Script] = []
    for calls in said.rounds:
        made.append(reply(calls=[(call.id, call.name, call.arguments) for call in calls], **silent))
    return [*made, reply(said.answer, **silent)]


def messages(body: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(body)["messages"]
    return found


def extends(body: bytes, later: bytes) -> bool:
    """Does a request extend another, to the byte?"""
    end = body.rindex(b'],"tools":')
    return later.startswith(body[:end] + b",") and later.endswith(body[end:])


def make_place(
    directory: Path, server: ScriptedServer, made: Launcher, config: str = "", *, home: str = "home"
) -> Place:
    """A place whose home is not there yet."""
    directory.mkdir(parents=True, exist_ok=True)
    file = write_config(
        directory, server.url, f"{config}[retry]\nattempts = 1\n"
    )  # a bad request is to be seen at once
    file.write_text(file.read_text("utf-8").replace('home = "home"', f'home = "world/{home}"'), "utf-8")
    (directory / "world").mkdir()
    server.refuse_history = refuse
    return Place(directory, server, made, directory / "world" / home)


def ways(root: Path, journal: Journal, keep: Path) -> dict[str, Tree]:
    """What a crash may leave, by its kind: those that differ in what matters."""
    found: dict[str, Tree] = {}
    for kind, tree in (
        ("kill", left_by_kill(root)),
        ("power loss", left_by_power_loss(root, journal, keep)),
        ("power loss, names first", left_without_contents(root, journal)),
    ):
        if all(matters(tree) != matters(other) for other in found.values()):
            found[kind] = tree
    return found


VOLATILE = re.compile(rb"\d{4}-\d\d-\d\dT[\d:.]+Z|\.new-[0-9a-f]+")


def matters(tree: Tree) -> list[tuple[bytes, bytes | None]]:
    """A tree without times and random names; `run/` is the process's own."""
    return sorted(
        (VOLATILE.sub(b"", path.encode()), None if content is None else VOLATILE.sub(b"", content))
        for path, content in tree.items()
        if not path.startswith("home/run/")
    )
