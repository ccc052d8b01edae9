"""Disks that misbehave: full, read-only, gone; logs and baselines that are not what was written.

All through real processes: loopd on its socket, bxctl on the same home.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from attrs import field, frozen

from boxmaker.channel.client import open_turn
from boxmaker.proto.channel import ErrorCode, Turn, TurnDone, WireError
from boxmaker.proto.chat import Content
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import decode_line
from boxmaker.session.logs import check
from boxmaker.testing.daemon import running_daemon
from boxmaker.testing.server import (
    STREAM_HEAD,
    Script,
    ScriptedServer,
    Send,
    Until,
    delta,
    ending,
    reply,
    scripted_server,
)
from tests.hostile.crash.harness import Launcher, extends, launcher
from tests.hostile.crash.launcher import MARK, Job
from tests.hostile.crash.model import INTERRUPTED, NOT_RUN, read_records
from tests.hostile.crash.power import left_by_kill
from tests.loopd.daemon_process import LoopdProcess, loopd_serve, names, write_config
from tests.session.homes import assistant, call, lay_out, lines, result, usage, user
from tests.strict import refuse

LIMIT_S = 120
NOBODY = 65534


async def bxctl(made: Launcher, *arguments: str) -> tuple[int, str]:
    """Run a command of bxctl's; its status and all that it said. A command that hangs is the test's failure."""
    with trio.fail_after(20):
        await made.start(Job(program="bxctl", arguments=[*arguments], root="/nowhere"))
        status = await made.ended()
    return status, said(made)


def said(made: Launcher) -> str:
    """What a program has said, without the launcher's own lines."""
    return "".join(f"{line}\n" for line in made.text.split("\n")[:-1] if not line.startswith(MARK))


@asynccontextmanager
async def serving(
    directory: Path, *scripts: Script, text: str = ""
) -> AsyncIterator[tuple[LoopdProcess, ScriptedServer]]:
    """A daemon as a process, on a server that refuses bad histories; what it logs has no traceback."""
    async with scripted_server(*scripts) as server:
        server.refuse_history = refuse
        async with loopd_serve(write_config(directory, server.url, text)) as daemon:
            yield daemon, server
            assert await daemon.stop(signal.SIGTERM) == 0
            await daemon.wait_for("event=stopped")
            assert "Traceback" not in daemon.log
            assert "internal_error" not in daemon.log


async def works(daemon: LoopdProcess, server: ScriptedServer, session: str, *, resume: bool = True) -> None:
    """A session has a normal turn, whose request extends the one before it."""
    before = len(server.completions)
    server.scripts[:] = [reply(f"Here is {session}.")]
    done = await daemon.turn(session, "Are you there?", resume=resume)
    assert isinstance(done, TurnDone), done
    assert done.content == f"Here is {session}."
    assert len(server.completions) == before + 1


# -- no space --------------------------------------------------------------------------------------

TOOLS = [
    reply(calls=[("c1", "clock", "{}"), ("c2", "find_tool", '{"query":"echo"}')]),
    reply("It is noon."),
]
APPENDS = ["user", "assistant", "tool_result", "tool_result", "assistant"]
"""What each append of that turn begins with; the usage of a completion goes with it."""


def let_files_grow(daemon: LoopdProcess, most_bytes: int | None) -> None:
    """Let no file of the daemon grow over a size: a full disk. Python ignores SIGXFSZ, so it is an error of write."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (hard if most_bytes is None else most_bytes, hard))


def kinds(log: Path) -> list[str]:
    return [record[0] for record in read_records(log.read_bytes())]


@pytest.mark.real
async def test_no_space_at_any_append_of_a_turn_is_storage_and_costs_that_append_alone(short_dir: Path) -> None:
    """The limit falls at the beginning of the append, inside it, and before its last byte."""
    directory = short_dir / "home" / "sessions"
    with trio.fail_after(LIMIT_S):
        async with serving(short_dir) as (daemon, server):

            async def begin(session: str) -> Path:
                server.scripts[:] = [reply("x" * 20_000)]  # longer than any other file
                assert isinstance(await daemon.turn(session, "Begin.", resume=False), TurnDone)
                return directory / session / "0.jsonl"

            await works(daemon, server, "other", resume=False)
            whole = await begin("w00")
            begun = whole.stat().st_size
            server.scripts[:] = TOOLS
            assert isinstance(await daemon.turn("w00", "What time is it?", resume=True), TurnDone)
            ends, added = [begun], whole.read_bytes()[begun:].splitlines(keepends=True)
            for line in added:
                if b'"type":"usage"' in line or b'"type":"cache_loss"' in line:
                    ends[-1] += len(line)
                else:
                    ends.append(ends[-1] + len(line))
            assert kinds(whole)[4:] == [
                "user",
                "assistant",
                "usage",
                "tool_result",
                "tool_result",
                "assistant",
                "usage",
            ]
            assert len(ends) == 1 + len(APPENDS)

            for place, (least, most) in enumerate(pairwise(ends)):
                for number, limit in enumerate([least, (least + most) // 2, most - 1]):
                    session = f"s{place}{number}"
                    log = await begin(session)
                    assert log.stat().st_size == begun, "as long as the first: the sizes are the same"
                    let_files_grow(daemon, limit)
                    server.scripts[:] = TOOLS
                    failed = await daemon.turn(session, "What time is it?", resume=True)
                    assert isinstance(failed, WireError), (session, limit)
                    assert failed.code == ErrorCode.STORAGE
                    assert failed.detail == {"file": str(log), "action": "append to"}
                    assert log.stat().st_size == least, "cut back to where the append began"
                    assert not check(directory, SessionId(session))
                    await works(daemon, server, "other")
                    let_files_grow(daemon, None)
                    last = server.completions[-2].body if place else b""
                    await works(daemon, server, session)
                    assert not place or extends(last, server.completions[-1].body)
                    open_results = [
                        record[2] for record in read_records(log.read_bytes()) if record[0] == "tool_result"
                    ]
                    assert (
                        open_results[place - 2 if place > 1 else 0 :]
                        == ([[], [], [INTERRUPTED, NOT_RUN], [INTERRUPTED], []][place])
                    )


@pytest.mark.real
async def test_no_space_for_a_new_session_leaves_nothing_of_it(short_dir: Path) -> None:
    directory = short_dir / "home" / "sessions"
    with trio.fail_after(LIMIT_S):
        async with serving(short_dir) as (daemon, server):
            await works(daemon, server, "other", resume=False)
            for limit in (0, 1, 100):
                let_files_grow(daemon, limit)
                failed = await daemon.turn("new", "Begin.", resume=False)
                assert isinstance(failed, WireError)
                assert failed.code == ErrorCode.STORAGE
                assert failed.detail == {"file": str(directory / "new"), "action": "create"}
                assert names(directory) == ["other"]
            let_files_grow(daemon, None)
            await works(daemon, server, "new", resume=False)
            await works(daemon, server, "other")


# -- a home that is read-only, or gone -------------------------------------------------------------


def give_to_nobody(directory: Path) -> None:
    """The superuser may write everywhere: let another be the owner."""
    if os.geteuid() == 0:
        for path in (directory, *directory.rglob("*")):
            os.lchown(path, NOBODY, NOBODY)


@asynccontextmanager
async def serving_as_nobody(directory: Path, made: Launcher, server: ScriptedServer) -> AsyncIterator[None]:
    """A daemon whose modes count; where the tests run as root, it is forked as another user."""
    config = write_config(directory, server.url)
    give_to_nobody(directory)
    uid = NOBODY if os.geteuid() == 0 else None
    pid = await made.start(Job(program="loopd", arguments=["serve", "--config", str(config)], root="/", uid=uid))
    await made.wait_for("event=ready", f"{MARK}exit ")
    try:
        yield
    finally:
        if f"{MARK}exit " not in made.text:
            os.kill(pid, signal.SIGTERM)
            await made.ended()


async def say_as_nobody(made: Launcher, socket_file: Path, session: str, text: str) -> tuple[int, str]:
    """One turn by bxctl, as the user that the daemon serves."""
    uid = NOBODY if os.geteuid() == 0 else None
    arguments = ["chat", "--socket", str(socket_file), "--session", session, "--say", text, "--quiet"]
    with trio.fail_after(20):
        await made.start(Job(program="bxctl", arguments=arguments, root="/", uid=uid))
        status = await made.ended()
    return status, said(made)


@pytest.mark.real
async def test_a_home_that_becomes_read_only_is_storage_and_what_can_be_written_works(short_dir: Path) -> None:
    home = short_dir / "home"
    socket_file = home / "run" / "loop" / "loop.sock"

    async def answers(session: str, answer: str) -> None:
        status, text = await say_as_nobody(talks, socket_file, session, "hi")
        assert status == 0, text
        assert text.endswith(f"{answer}\n")

    with trio.fail_after(LIMIT_S):
        async with launcher() as serves, launcher() as talks, scripted_server() as server:
            server.scripts[:] = [reply("One."), reply("Two."), reply("Three."), reply("Four."), reply("Five.")]
            os.chmod(short_dir, 0o300)  # a parent that cannot be read is no obstacle
            async with serving_as_nobody(short_dir, serves, server):
                await answers("s", "One.")
                await answers("t", "Two.")
                (home / "sessions").chmod(0o500)
                status, text = await say_as_nobody(talks, socket_file, "new", "hi")
                assert status == 1
                assert f"storage: cannot create {home}/sessions/new: Permission denied" in text
                (home / "sessions" / "s" / "0.jsonl").chmod(0o400)
                status, text = await say_as_nobody(talks, socket_file, "s", "hi")
                assert status == 1
                assert f"storage: cannot open {home}/sessions/s/0.jsonl: Permission denied" in text
                await answers("t", "Three.")
                (home / "sessions").chmod(0o700)
                (home / "sessions" / "s" / "0.jsonl").chmod(0o600)
                await answers("new", "Four.")
                await answers("s", "Five.")
            assert names(home / "sessions") == ["new", "s", "t"]
            assert "Traceback" not in serves.text
            os.chmod(short_dir, 0o700)
            home.chmod(0o500)
            async with serving_as_nobody(short_dir, serves, server):
                assert f"loopd: the home {home} is not writable" in serves.text
                assert f"{MARK}exit 1" in serves.text


@pytest.mark.real
async def test_a_home_that_vanishes_is_an_error_and_the_daemon_goes_on_when_it_is_back(short_dir: Path) -> None:
    home, away = short_dir / "home", short_dir / "away"
    log = home / "sessions" / "s" / "0.jsonl"
    go = trio.Event()
    slow: Script = [Send(STREAM_HEAD + delta(content="So ")), Until(go), Send(delta(content="long.") + ending())]
    turn = Turn(session=SessionId("s"), content="Take your time.", resume=True)
    with trio.fail_after(LIMIT_S):
        async with serving(short_dir, text='[channel]\nsocket = "s"') as (daemon, server), launcher() as made:
            daemon.socket = short_dir / "s"
            await works(daemon, server, "s", resume=False)
            server.scripts[:] = [slow]
            async with open_turn(daemon.socket, turn) as channel:
                assert (await channel.receive()).answer == Content(text="So ")
                home.rename(away)
                go.set()
                while not (frame := await channel.receive()).final:
                    pass
            assert isinstance(frame.answer, WireError)
            assert frame.answer.code == ErrorCode.STORAGE
            assert frame.answer.detail == {"file": str(log), "action": "append to"}
            gone = await daemon.turn("s", "Are you there?", resume=True)
            assert isinstance(gone, WireError)
            assert gone.code == ErrorCode.NO_SUCH_SESSION
            new = await daemon.turn("new", "hi", resume=False)
            assert isinstance(new, WireError)
            assert new.code == ErrorCode.STORAGE
            assert new.detail == {"file": str(home / "sessions" / "new"), "action": "create"}
            for command in (["sessions"], ["session", "check"]):
                status, text = await bxctl(made, *command, "--home", str(home))
                assert status == 1
                assert text.startswith(f"bxctl: storage: cannot list {home}/sessions: No such file or directory")
            away.rename(home)
            assert [record[0] for record in read_records(log.read_bytes())][-1] == "user", (
                "the lost answer is not in it"
            )
            await works(daemon, server, "s")
            await works(daemon, server, "new", resume=False)


# -- logs and baselines that are not what was written ----------------------------------------------

GOOD = lines(user("hi"), assistant("ho", call("c1")), usage(), result("c1", 0), assistant("So."), usage())
COUNT = GOOD.count(b"\n")
HUGE = 1 << 40
"""A sparse file; nobody has the memory to read it whole."""


def write(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def do(file: Path) -> None:
        file.write_bytes(change(file.read_bytes()))

    return do


def directory_there(file: Path) -> None:
    file.unlink()
    file.mkdir()


def link_there(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def dangling_there(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def loop_there(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def fifo_there(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def socket_there(file: Path) -> None:
    file.unlink()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(file))


def device_there(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def nothing_there(file: Path) -> None:
    file.unlink()


def huge(file: Path) -> None:
    os.truncate(file, HUGE)


NO_FILES = [
    directory_there, link_there, dangling_there, loop_there, fifo_there, socket_there, device_there, nothing_there,
    huge,
]  # fmt: skip


@frozen
class Damage:
    """What is done to a session's file, and the line that is named for it; `torn` can be repaired."""

    name: str
    do: Callable[[Path], None] = field(eq=False)
    line: int = 0
    torn: bool = False
    file: str = "0.jsonl"
    shown: bool = False
    """`bxctl log` shows it: each line is a record, and it judges no more."""


def second(line: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the second line of a log."""

    def change(raw: bytes) -> bytes:
        every = raw.splitlines(keepends=True)
        return b"".join([every[0], line(every[1]), *every[2:]])

    return write(change)


DAMAGE = [
    Damage("torn", write(lambda raw: raw + b'{"type":"us'), COUNT + 1, torn=True),
    Damage("torn-by-one", write(lambda raw: raw[:-1]), COUNT, torn=True),
    Damage("nul-tail", write(lambda raw: raw + b"\0" * 4096), COUNT + 1, torn=True),
    Damage("nul-tail-lf", write(lambda raw: raw + b"\0" * 4096 + b"\n"), COUNT + 1),
    Damage("nul-line", second(lambda line: b"\0" * len(line)), 2),
    Damage("nul-block", second(lambda line: b"\0" * 4096 + line), 2),
    Damage("nul-all", write(lambda raw: b"\0" * len(raw)), 1),
    Damage("flipped", second(lambda line: bytes([line[0] ^ 1]) + line[1:]), 2),
    Damage("not-utf8", second(lambda line: line.replace(b"hi", b"\xff")), 2),
    Damage("cr", write(lambda raw: raw.replace(b"\n", b"\r")), 1),
    Damage("empty", write(lambda raw: b""), 1),
    Damage("lost-first", write(lambda raw: raw[raw.index(b"\n") + 1 :]), 1, shown=True),
    *(Damage(f"log-{make.__name__.replace('_', '-')}", make) for make in NO_FILES),
    *(Damage(f"base-{make.__name__.replace('_', '-')}", make, file="0.baseline.json") for make in NO_FILES),
    Damage("base-empty", write(lambda raw: b""), file="0.baseline.json"),
    Damage("base-other", write(lambda raw: raw.replace(b"brief", b"loud!")), file="0.baseline.json"),
    Damage("base-nul", write(lambda raw: b"\0" * len(raw)), file="0.baseline.json"),
]


@pytest.mark.real
async def test_whatever_is_found_in_place_of_a_session_is_named_and_stops_no_other(short_dir: Path) -> None:
    home = short_dir / "home"
    wrong: list[str] = []

    def demand(holds: bool, *what: object) -> None:
        if not holds:
            wrong.append(" ".join(map(str, what)))

    with trio.fail_after(LIMIT_S):
        async with serving(short_dir) as (daemon, server), launcher() as made:
            await works(daemon, server, "healthy", resume=False)
            for one in DAMAGE:
                log = lay_out(
                    home, GOOD.replace(b'"session":"s"', f'"session":"{one.name}"'.encode()), session=one.name
                )
                file = log.with_name(one.file)
                one.do(file)
                before = left_by_kill(log.parent) if one.do is not huge else {}
                where = f"{file}:{one.line}: " if one.line else f"{file}: "

                with trio.move_on_after(20) as waited:
                    found = await daemon.turn(one.name, "Are you there?", resume=True)
                assert not waited.cancelled_caught, f"{one.name}: loopd hangs"
                demand(isinstance(found, WireError) and found.code == ErrorCode.SESSION_DAMAGED, one.name, found)
                assert isinstance(found, WireError)
                demand(found.detail == {"file": str(file), "line": one.line}, one.name, found)
                demand(found.message.startswith(where), one.name, found)
                taken = await daemon.turn(one.name, "Are you there?", resume=False)
                demand(isinstance(taken, WireError) and taken.code == ErrorCode.SESSION_EXISTS, one.name, taken)
                await works(daemon, server, "healthy")

                at = (one.name, "--home", str(home))
                status, text = await bxctl(made, "session", "check", *at)
                demand(status == 1 and text.startswith(where), one.name, "check", status, text)
                status, text = await bxctl(made, "log", *at)
                if one.file == "0.jsonl" and not one.shown:
                    demand(status == 1 and f"bxctl: session_damaged: {where}" in text, one.name, "log", status, text)
                else:
                    demand(status == 0 and "So." in text, one.name, "log", status, text)
                status, text = await bxctl(made, "session", "repair", *at)
                if one.torn:
                    demand(status == 0 and f"line {one.line} was torn" in text, one.name, "repair", status, text)
                    kept = [path for path in log.parent.iterdir() if path.name.startswith("0.damaged-")]
                    demand([path.read_bytes() for path in kept] == [before["0.jsonl"]], one.name, "keeps", kept)
                    await works(daemon, server, one.name)
                else:
                    demand(status == 1 and f"session_damaged: {where}" in text, one.name, "repair", status, text)
                    demand(one.do is huge or left_by_kill(log.parent) == before, one.name, "is changed")

            damaged = [one for one in DAMAGE if not one.torn]
            status, text = await bxctl(made, "sessions", "--home", str(home))
            demand(status == 0, "sessions", text)
            demand(text.count("  damaged: ") == len(damaged), "sessions", text)
            for session in ["healthy", *(one.name for one in DAMAGE)]:
                demand(any(line.startswith(f"{session} ") for line in text.splitlines()), session, "is not listed")
            status, text = await bxctl(made, "session", "check", "--home", str(home))
            demand(status == 1, "check", text)
            demand(all(f"{home}/sessions/{one.name}/{one.file}:" in text for one in damaged), "check", text)
            demand(f"{home}/sessions/healthy" not in text, "check", text)
            demand(f"{home}/sessions/torn/" not in text, "check", text)
            await works(daemon, server, "healthy")
    assert not wrong, "\n".join(wrong)


@pytest.mark.real
async def test_a_log_with_cr_lf_is_read_and_nothing_is_found_in_it(short_dir: Path) -> None:
    home = short_dir / "home"
    with trio.fail_after(LIMIT_S):
        async with serving(short_dir) as (daemon, server), launcher() as made:
            log = lay_out(home, GOOD.replace(b"\n", b"\r\n"))
            assert (await bxctl(made, "session", "check", "s", "--home", str(home)))[0] == 0
            status, text = await bxctl(made, "session", "repair", "s", "--home", str(home))
            assert (status, text) == (0, "the log has no torn end; nothing was changed\n")
            await works(daemon, server, "s")
            assert log.read_bytes().startswith(GOOD.replace(b"\n", b"\r\n"))


async def test_a_byte_flipped_anywhere_is_refused_in_its_line_or_is_another_text(tmp_path: Path) -> None:
    """Daemon and `session check` say the same; another session works all the while."""
    small = lines(user("hi"), assistant("ho", call("c1")), usage(), result("c1", 0))
    refused = 0
    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
            server.refuse_history = refuse
            log = lay_out(daemon.config.paths.home, small)
            sessions = log.parent.parent
            for place in range(len(small)):
                raw = small[:place] + bytes([small[place] ^ 1]) + small[place + 1 :]
                log.write_bytes(raw)
                found = check(sessions, SessionId("s"))
                server.scripts[:] = [reply("Yes.")]
                answer = (await daemon.turn("s", "Are you there?", resume=True))[-1]
                if not found:
                    assert isinstance(answer, TurnDone), (place, answer)
                    assert [decode_line(line) for line in raw.splitlines()] == daemon.log("s")[: small.count(b"\n")]
                    continue
                refused += 1
                assert isinstance(answer, WireError), place
                assert answer.code == ErrorCode.SESSION_DAMAGED
                assert answer.detail == {"file": str(found[0].file), "line": found[0].line}
                own_line = small[:place].count(b"\n") + 1
                if found[0].file == log:
                    assert own_line <= found[0].line, (place, answer)
                else:
                    assert (found[0].file, own_line) == (log.with_name("0.baseline.json"), 1)
                assert log.read_bytes() == raw
                if place % 50 == 0:
                    server.scripts[:] = [reply("Yes.")]
                    await daemon.ask("other", "And you?", resume=(sessions / "other").exists())
    assert refused > len(small) // 2


@pytest.mark.real
async def test_what_is_no_file_in_place_of_a_prompts_text_is_storage_and_nothing_hangs(short_dir: Path) -> None:
    """The owner's own files are read at each new session; sessions that there are do not need them."""
    kinds_of = [directory_there, fifo_there, socket_there, device_there, loop_there, huge]
    with trio.fail_after(LIMIT_S):
        async with serving(short_dir) as (daemon, server):
            await works(daemon, server, "old", resume=False)
            core = short_dir / "home" / "memory" / "core.md"
            core.parent.mkdir()
            for file in (short_dir / "system.md", core):
                for number, make in enumerate(kinds_of):
                    file.write_text("Be brief.\n")
                    make(file)
                    with trio.move_on_after(20) as waited:
                        failed = await daemon.turn(f"new{number}", "hi", resume=False)
                    assert not waited.cancelled_caught, f"{make.__name__}: loopd hangs"
                    assert isinstance(failed, WireError), make.__name__
                    assert failed.code == ErrorCode.STORAGE
                    assert failed.detail == {"file": str(file), "action": "read"}
                    await works(daemon, server, "old")
                    assert names(short_dir / "home" / "sessions") == ["old"]
                    if make is directory_there:
                        file.rmdir()
                    else:
                        file.unlink()
                file.write_text("Be brief.\n")
            await works(daemon, server, "new", resume=False)
