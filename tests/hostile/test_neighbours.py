"""What surrounds the daemon: its environment, its home and who else can write there, the clock, signals, limits."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from attrs import define
from trio.testing import MockClock

from boxmaker.channel.client import open_turn
from boxmaker.config import at_home
from boxmaker.errors import NobodyListens, SessionDamaged, StartError, shell_word
from boxmaker.inference.client import Client, _tls
from boxmaker.inference.retry import retry_after_ms
from boxmaker.log import log_event, log_to_stderr
from boxmaker.loopd.home import exposed_directory, prepare_home
from boxmaker.loopd.selftest import Check, run_selftest
from boxmaker.loopd.serve import _accept, _stop_signals
from boxmaker.loopd.turns import TurnService
from boxmaker.proto.channel import ErrorCode, Turn, TurnDone, WireError
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import ToolResult
from boxmaker.proto.time import Timestamp, timestamp
from boxmaker.session.logs import check
from boxmaker.testing.daemon import EPOCH_S, make_config, running_daemon
from boxmaker.testing.port import ScriptedPort, hang, public
from boxmaker.testing.server import (
    LOADING,
    STREAM_HEAD,
    Hang,
    Script,
    Send,
    delta,
    error_response,
    reply,
    scripted_server,
)
from boxmaker.tools.dispatch import cap_result
from boxmaker.tools.fake import fake_registry
from tests.loopd.daemon_process import LIMIT_S, LoopdProcess, loopd, loopd_serve, write_config

DAY_S = 86_400
ROOT = Path(__file__).parents[2]


# -- the environment -----------------------------------------------------------------------------

PROXY = "http://127.0.0.1:9"
"""Nobody answers there."""
MISLEADING = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), PROXY),
    "NO_PROXY": "",
    "no_proxy": "",
    "SSL_CERT_FILE": "/nowhere/cert.pem",
    "SSL_CERT_DIR": "/nowhere/certs",
    "SSLKEYLOGFILE": "/nowhere/keys",
    "REQUESTS_CA_BUNDLE": "/nowhere/cert.pem",
    "NETRC": "/nowhere/netrc",
    "LC_ALL": "C",
    "LISTEN_FDS": "1",  # of a manager that started somebody else
    "LISTEN_PID": "1",
    "NOTIFY_SOCKET": "/nowhere/notify",
    "COLUMNS": "1",
}


@pytest.mark.real
async def test_a_daemon_reaches_its_server_whatever_the_environment_says(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in MISLEADING.items():
        monkeypatch.setenv(name, value)
    async with scripted_server(reply("Grüße.")) as server:
        async with loopd_serve(write_config(short_dir, server.url)) as daemon:
            done = await daemon.turn("s", "hi", resume=False)
            assert await daemon.stop(signal.SIGTERM) == 0
    assert isinstance(done, TurnDone)
    assert done.content == "Grüße."


async def test_no_keys_of_an_https_server_are_written_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, "https://127.0.0.1:9")
    for file in (tmp_path / "keys", tmp_path / "nowhere" / "keys"):
        monkeypatch.setenv("SSLKEYLOGFILE", str(file))
        async with Client(config):
            assert not file.exists()
    tls = _tls()
    assert tls.verify_mode == ssl.CERT_REQUIRED
    assert tls.check_hostname
    assert len(tls.get_ca_certs()) > 50


# -- who else can write there --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "mode", "exposed"),
    [
        ("above", 0o777, True),
        ("above", 0o772, True),
        ("above", 0o1777, False),  # sticky, like /tmp: nobody can rename what is not theirs
        ("above", 0o770, False),  # a group is the owner's choice
        ("above/home", 0o777, True),
        ("above/home/sessions", 0o703, True),
        ("above/home/run/loop", 0o777, True),
    ],
)
async def test_a_directory_in_which_others_could_replace_the_home_is_told_with_what_to_do(
    short_dir: Path, place: str, mode: int, exposed: bool, autojump_clock: MockClock
) -> None:
    home = short_dir / "above" / "home"
    prepare_home(home)
    (short_dir / place).chmod(mode)
    found = short_dir.resolve() / place if exposed else None  # noqa: ASYNC240  # a temporary directory
    assert exposed_directory(home) == found
    (short_dir / "link").symlink_to(home)
    assert exposed_directory(short_dir / "link") == found
    async with scripted_server() as server:
        config = at_home(make_config(short_dir, server.url), home)
        with trio.fail_after(LIMIT_S):
            async with Client(config) as client:
                report = await run_selftest(config, client, fake_registry())
    told = next(one for one in report.checks if one.name == "home")
    assert told.state == ("warn" if exposed else "ok")
    assert told.remedy == (f"Run: chmod o-w {found}" if exposed else "")
    assert not report.failed


def test_what_the_daemon_makes_is_its_owners_alone_under_any_umask(short_dir: Path) -> None:
    before = os.umask(0)
    try:
        prepare_home(short_dir / "a" / "home")
    finally:
        os.umask(before)
    made = [short_dir / "a", *(short_dir / "a").rglob("*")]
    assert len(made) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


@pytest.mark.real
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a process of another uid")
async def test_nothing_is_said_to_a_socket_that_another_user_put_in_the_daemons_place(short_dir: Path) -> None:
    short_dir.chmod(0o777)  # noqa: ASYNC240  # a temporary directory
    path = short_dir / "s"
    code = (
        "import os, socket, sys\nos.setuid(65534)\ns = socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\n"
        "s.listen()\nprint('listening', flush=True)\nc, _ = s.accept()\nprint(c.recv(65536), flush=True)"
    )
    process = await trio.lowlevel.open_process([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        with trio.fail_after(LIMIT_S):
            assert process.stdout is not None
            async with process.stdout:
                heard = b""
                while not heard.endswith(b"\n"):
                    heard += await process.stdout.receive_some()
                assert heard == b"listening\n"
                with pytest.raises(NobodyListens, match=r"it is the socket of uid 65534\); nothing was sent"):
                    async with open_turn(path, Turn(session=SessionId("s"), content="secret", resume=True)):
                        raise AssertionError("it was taken for our daemon")
                assert b"".join([data async for data in process.stdout]) == b"b''\n"
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@pytest.mark.real
@pytest.mark.parametrize("shared", ["home", "socket"])
async def test_of_two_daemons_on_one_home_or_socket_the_second_ends_and_the_first_goes_on(
    short_dir: Path, shared: str
) -> None:
    (short_dir / "other").mkdir()
    async with scripted_server(reply("Hi."), reply("Still here.")) as server:
        first = write_config(short_dir, server.url, '[channel]\nsocket = "s"\n')
        text = '[channel]\nsocket = "../s"\n' if shared == "socket" else ""
        second = write_config(short_dir / "other", server.url, text)
        if shared == "home":
            second.write_text(second.read_text().replace('home = "home"', 'home = "../home"'))
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(str(short_dir / "s"))
        stale.close()  # what a killed daemon leaves
        async with loopd_serve(first) as daemon:
            daemon.socket = short_dir / "s"
            assert isinstance(await daemon.turn("s", "hi", resume=False), TurnDone)
            refused = await loopd("serve", "--config", str(second))
            done = await daemon.turn("s", "and now?", resume=True)
            pid = daemon.process.pid
            assert await daemon.stop(signal.SIGTERM) == 0
    last = refused.stderr.decode().splitlines()[-1]
    expected = {
        "home": f"loopd: the home {short_dir}/other/../home is served by another loopd, pid {pid}",
        "socket": f"loopd: another program answers on {short_dir}/other/../s; set [channel] socket, or end it",
    }
    assert last == expected[shared]
    assert refused.returncode == 1
    assert isinstance(done, TurnDone)
    assert done.content == "Still here."


@pytest.mark.real
async def test_a_daemon_whose_log_nobody_reads_any_more_goes_on(short_dir: Path) -> None:
    async with scripted_server(reply("Hi.")) as server:
        command = [
            sys.executable,
            "-m",
            "boxmaker.loopd",
            "serve",
            "--config",
            str(write_config(short_dir, server.url)),
        ]
        process = await trio.lowlevel.open_process(command, stderr=subprocess.PIPE)
        daemon = LoopdProcess(process, short_dir / "home" / "run" / "loop" / "loop.sock")
        try:
            with trio.fail_after(LIMIT_S):
                assert process.stderr is not None
                async with process.stderr:
                    while "event=ready" not in daemon.log:
                        daemon.log += (await process.stderr.receive_some()).decode()
                done = await daemon.turn("s", "hi", resume=False)
                assert await daemon.stop(signal.SIGTERM) == 0
        finally:
            if process.returncode is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
    assert isinstance(done, TurnDone)


# -- the home's name -----------------------------------------------------------------------------

NAMES = [
    "with spaces and Köln ☃",
    "'quotes\" and \\",
    "two\nlines",
    "escape\x1b[31m\u202e",
    os.fsdecode(b"no\xff utf-8"),
]
SHOWN = [
    "with spaces and Köln ☃",
    "'quotes\" and \\",
    r"two\nlines",
    r"escape\x1b[31m\u202e",
    r"no\udcff utf-8",
]
"""The same in a line for people: one line, nothing that a terminal would act on."""


@pytest.mark.parametrize(("name", "shown"), [*zip(NAMES, SHOWN, strict=True)])
def test_each_text_for_people_names_a_path_in_one_printable_line(name: str, shown: str) -> None:
    home = Path("/h") / name
    file = home / "sessions" / "s" / "0.jsonl"
    texts = [
        str(StartError(message=f"the home {home} is no directory")),
        str(NobodyListens(path=home, reason="no such socket")),
        Check(name="home", state="ok", message=f"{home} will be made").line(),
        str(SessionDamaged(file=file, line=3, problem="is torn")),
    ]
    assert [f"/h/{shown}" in text for text in texts] == [True] * 4
    assert [text.isprintable() for text in texts] == [True] * 4


@pytest.mark.parametrize("name", [*NAMES, "-n", "$HOME `id` $(id)", "\x01\x7f\x80'\\"])
def test_a_path_in_a_remedy_is_one_word_of_a_shell(name: str) -> None:
    word = shell_word(Path("/h") / name)
    assert word.isprintable()
    command = f"{sys.executable} -c 'import os, sys; print(os.fsencode(sys.argv[1]).hex())' {word}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=LIMIT_S)
    assert bytes.fromhex(done.stdout.decode()) == os.fsencode(Path("/h") / name)


@pytest.mark.real
@pytest.mark.parametrize(("name", "shown"), [*zip(NAMES, SHOWN, strict=True)][::2])
async def test_a_home_may_have_any_name(
    short_dir: Path, name: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = short_dir / name
    monkeypatch.setenv("BOXMAKER_HOME", str(home))
    async with scripted_server(reply("Hi."), reply("Still here.")) as server:
        config = write_config(short_dir, server.url)
        config.write_text(f'[server]\nurl = "{server.url}"\n')
        async with loopd_serve(config) as daemon:
            daemon.socket = home / "run" / "loop" / "loop.sock"
            assert isinstance(await daemon.turn("s", "hi", resume=False), TurnDone)
            refused = await loopd("serve", "--config", str(config))
            log = home / "sessions" / "s" / "0.jsonl"
            whole = log.read_bytes()
            log.write_bytes(whole + b"torn")
            damaged = await daemon.turn("s", "and now?", resume=True)
            assert isinstance(damaged, WireError)
            remedy = damaged.message.split("`")[1].replace("bxctl", f"{sys.executable} -m boxmaker.bxctl", 1)
            done = await trio.run_process(["bash", "-c", remedy], capture_stdout=True)
            assert log.read_bytes() == whole
            assert isinstance(await daemon.turn("s", "and now?", resume=True), TurnDone)
            assert await daemon.stop(signal.SIGTERM) == 0
    assert refused.stderr.decode().startswith(f"loopd: the home {short_dir}/{shown} is served by another loopd, pid ")
    assert (
        done.stdout.decode().splitlines()[-1].startswith(f"the damaged log is kept as {short_dir}/{shown}/sessions/s/")
    )
    assert damaged.code == ErrorCode.SESSION_DAMAGED
    assert all(line.isprintable() for line in daemon.log.splitlines())


# -- the clock -----------------------------------------------------------------------------------


async def test_a_clock_that_jumps_a_day_either_way_changes_neither_order_nor_session(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    jumps = itertools.cycle([0, DAY_S, -DAY_S, 2 * DAY_S, 0, -3 * DAY_S])
    told: list[str] = []

    def now() -> Timestamp:
        told.append(timestamp(EPOCH_S + next(jumps)))
        return Timestamp(told[-1])

    def script() -> list[Script]:
        return [reply(calls=[("a", "clock", "{}")]), reply("Noon.")]

    with trio.fail_after(LIMIT_S):
        async with scripted_server() as server:
            for restart in range(3):
                async with running_daemon(tmp_path, server.url, now=now) as daemon:
                    for turn in range(3):
                        server.scripts = script()
                        began = trio.current_time()
                        assert (await daemon.ask("s", "when?", resume=bool(restart or turn))).content == "Noon."
                        assert trio.current_time() - began < 1
                    kinds = [type(record).__name__ for record in daemon.log("s")]
            assert check(daemon.store.directory, SessionId("s")) == []
            times = [record.time for record in daemon.log("s")]
            heads = [body[: body.index(b'],"tools"')] for body in server.bodies]
    one = ["User", "Assistant", "Usage", "ToolResult", "Assistant", "Usage"]
    assert [kind for kind in kinds if kind != "CacheLoss"] == ["SessionStart", *one * 9]
    assert times != sorted(times), "the clock went back"
    assert set(times) <= set(told)
    assert len(heads) == 18
    assert all(later.startswith(earlier) for earlier, later in pairwise(heads))


def test_a_retry_at_a_date_is_never_further_away_than_the_cap_and_never_in_the_past() -> None:
    date = "Mon, 30 Nov 2026 14:15:40 GMT"  # ten seconds after EPOCH_S
    assert retry_after_ms(date, EPOCH_S) == 10_000
    assert retry_after_ms(date, EPOCH_S + DAY_S) is None
    assert retry_after_ms(date, EPOCH_S - DAY_S) == (DAY_S + 10) * 1000


async def test_a_server_whose_date_is_a_day_ahead_is_tried_again_after_the_cap(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    tomorrow = error_response(503, "Busy", headers="Retry-After: Tue, 01 Dec 2026 14:15:30 GMT\r\n")
    with trio.fail_after(LIMIT_S):
        async with scripted_server(tomorrow, reply("Hi.")) as server, running_daemon(tmp_path, server.url) as daemon:
            began = trio.current_time()
            assert (await daemon.ask("s", "hi", resume=False)).content == "Hi."
            assert trio.current_time() - began == pytest.approx(10), "[retry] cap_ms"


# -- signals -------------------------------------------------------------------------------------


def serve_with_a_tool_that_hangs(directory: Path, url: str) -> None:
    """In a process of its own: loopd's accept loop and signals, with a tool that never ends."""

    async def serve() -> None:
        config = make_config(directory, url, "[channel]\ngrace_s = 50")
        async with running_daemon(directory, url, "[channel]\ngrace_s = 50", port=ScriptedPort([hang])) as daemon:
            with _stop_signals() as signals:
                await _accept(config, TurnService(daemon.rt, daemon.store, daemon.causes, daemon.pins), signals, False)
        log_event("stopped")

    log_to_stderr()
    trio.run(serve)


@asynccontextmanager
async def serving_with_a_tool_that_hangs(directory: Path, url: str) -> AsyncIterator[LoopdProcess]:
    code = "import sys, pathlib, tests.hostile.test_neighbours as m\n"
    code += "m.serve_with_a_tool_that_hangs(pathlib.Path(sys.argv[1]), sys.argv[2])"
    command = [sys.executable, "-c", code, str(directory), url]
    with trio.fail_after(LIMIT_S):
        process = await trio.lowlevel.open_process(command, cwd=ROOT, stderr=subprocess.PIPE)
        daemon = LoopdProcess(process, directory / "home" / "run" / "loop" / "loop.sock")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(daemon.read_log)
                await daemon.wait_for("event=ready")
                yield daemon
                nursery.cancel_scope.cancel()
        finally:
            if process.returncode is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
            assert process.stderr is not None
            await process.stderr.aclose()


BUSY = [{"id": 0, "n_ctx": 4096, "is_processing": True}]
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@define
class Phase:
    """A moment in a daemon's life: how it comes about, and what its turn leaves in the log."""

    scripts: list[Script]
    records: list[str]
    event: str | None = None
    """The event that the channel is told at the latest when it has come about."""
    completions: int = 0
    """How many were asked for by then."""
    slots: object = None
    tool_hangs: bool = False


ASSISTANT = ["user", "assistant", "usage"]
PHASES = {
    "idle": Phase(scripts=[], records=[]),
    "waiting for the slot": Phase(scripts=[], records=["user"], event="waiting", slots=BUSY),
    "prefill": Phase(scripts=[[Hang()]], records=["user"], completions=1),
    "streaming": Phase(scripts=[[Send(STREAM_HEAD + delta(content="So ")), Hang()]], records=["user"], event="content"),
    "tool": Phase(
        scripts=[reply(calls=[("a", "clock", "{}"), ("b", "clock", '{"b":1}')])],
        records=[*ASSISTANT, "tool_result", "tool_result"],
        event="tool_call_started",
        tool_hangs=True,
    ),
    "retry back-off": Phase(
        scripts=[error_response(503, "Busy", headers="Retry-After: 60\r\n")], records=["user"], event="retrying"
    ),
}


async def both_at_once(daemon: LoopdProcess) -> None:
    """Two signals that the daemon finds at one and the same moment."""
    daemon.process.send_signal(signal.SIGSTOP)
    for number in SIGNALS:
        daemon.process.send_signal(number)
    daemon.process.send_signal(signal.SIGCONT)


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "in_grace"),
    [*((name, False) for name in PHASES), ("streaming", True), ("tool", True)],
    ids=lambda value: {True: "in the grace", False: "at once"}.get(value, value),
)
async def test_two_signals_in_any_phase_end_the_daemon_with_status_0_and_a_whole_log(
    short_dir: Path, name: str, in_grace: bool
) -> None:
    phase = PHASES[name]
    finals: list[TurnDone | WireError] = []
    async with scripted_server(*phase.scripts) as server:
        if phase.slots is not None:
            server.slots = phase.slots
        config = write_config(short_dir, server.url, "[channel]\ngrace_s = 50\n[retry]\ncap_ms = 60000\n")
        serving = serving_with_a_tool_that_hangs(short_dir, server.url) if phase.tool_hangs else loopd_serve(config)

        async def turn(daemon: LoopdProcess, reached: trio.Event) -> None:
            request = Turn(session=SessionId("s"), content="hi", resume=False)
            async with open_turn(daemon.socket, request) as channel:
                if phase.completions:
                    await server.wait_for_completions(phase.completions)
                    reached.set()
                while not (frame := await channel.receive()).final:
                    if frame.body["event"]["type"] == phase.event:
                        reached.set()
                assert isinstance(frame.answer, TurnDone | WireError)
                finals.append(frame.answer)

        async with serving as daemon, trio.open_nursery() as nursery:
            if name != "idle":
                reached = trio.Event()
                nursery.start_soon(turn, daemon, reached)
                await reached.wait()
            if in_grace:
                daemon.process.send_signal(signal.SIGTERM)
                await daemon.wait_for("event=stopping")
            await both_at_once(daemon)
            assert await daemon.process.wait() == 0
            await daemon.wait_for("event=stopped")
    assert [final.code for final in finals if isinstance(final, WireError)] == [ErrorCode.SHUTTING_DOWN] * len(finals)
    assert len(finals) == (name != "idle")
    assert "Traceback" not in daemon.log
    assert not daemon.socket.exists()
    sessions = short_dir / "home" / "sessions"
    if name != "idle":
        assert check(sessions, SessionId("s")) == []
        lines = (sessions / "s" / "0.jsonl").read_bytes().splitlines()
        assert [json.loads(line)["type"] for line in lines] == ["session_start", *phase.records]


@pytest.mark.real
async def test_two_signals_in_the_self_test_end_the_daemon_with_status_0(short_dir: Path) -> None:
    async with scripted_server() as server:
        server.props = LOADING
        async with loopd_serve(write_config(short_dir, server.url), ready=False) as daemon:
            while not server.received:  # noqa: ASYNC110  # what happens is in another process
                await trio.sleep(0.02)
            await both_at_once(daemon)
            assert await daemon.process.wait() == 0
            await daemon.wait_for("event=stopped")
    assert "Traceback" not in daemon.log
    assert "event=ready" not in daemon.log


# -- no descriptors ------------------------------------------------------------------------------


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def until_files(pid: int, count: int) -> None:
    while open_files(pid) > count:  # noqa: ASYNC110  # what happens is in another process
        await trio.sleep(0.02)


@pytest.mark.real
async def test_when_clients_hold_every_descriptor_accepting_waits_and_goes_on_and_the_log_says_it_once(
    short_dir: Path,
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with scripted_server(reply("Hi."), reply("Still here."), reply("At last.")) as server:
        text = "[retry]\nattempts = 2\nbase_ms = 1\n"
        async with loopd_serve(write_config(short_dir, server.url, text)) as daemon:
            pid = daemon.process.pid
            idle = open_files(pid)
            assert isinstance(await daemon.turn("s", "hi", resume=False), TurnDone)
            await until_files(pid, idle)

            def leave_room_for(count: int) -> None:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (idle + count, hard))

            leave_room_for(5)
            socks = []
            for _ in range(20):
                socks.append(socket.socket(socket.AF_UNIX))
                socks[-1].connect(str(daemon.socket))
            await daemon.wait_for("event=accept_waits")
            await trio.sleep(0.35)  # it has looked again and again
            for sock in socks:
                sock.close()
            assert isinstance(await daemon.turn("s", "and now?", resume=True), TurnDone)
            await until_files(pid, idle)

            leave_room_for(2)  # for the connection and the log: none for the server's
            no_server = await daemon.turn("s", "and now?", resume=True)
            await until_files(pid, idle)
            leave_room_for(1)  # for the connection
            no_log = await daemon.turn("s", "and now?", resume=True)
            await until_files(pid, idle)
            leave_room_for(100)
            done = await daemon.turn("s", "and now?", resume=True)
            assert await daemon.stop(signal.SIGTERM) == 0
    assert isinstance(no_log, WireError)
    assert no_log.code == ErrorCode.STORAGE
    assert no_log.message == f"cannot open {short_dir}/home/sessions/s/0.jsonl: Too many open files"
    assert isinstance(no_server, WireError)
    assert no_server.code == ErrorCode.INFERENCE
    assert no_server.message.endswith(" (Too many open files)"), no_server.message
    assert isinstance(done, TurnDone)
    assert done.content == "At last."
    assert daemon.log.count("event=accept_waits") == 1
    assert 'event=accept_waits reason="Too many open files"' in daemon.log
    assert "Traceback" not in daemon.log


# -- a tool that says far too much ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("char", "kept"),
    [("x", "x" * 16384), ("€", "€" * 5461), ("\U0001f600", "\U0001f600" * 4096), ("\0", "\ufffd" * 5461)],
    ids=["one byte", "three bytes", "four bytes", "NUL"],
)
async def test_a_result_of_20_mb_is_cut_at_a_character_in_log_and_prompt(
    tmp_path: Path, char: str, kept: str, autojump_clock: MockClock
) -> None:
    much = char * (20_000_000 // len(char.encode()))
    with trio.fail_after(LIMIT_S):
        async with scripted_server(reply(calls=[("a", "clock", "{}")]), reply("Much.")) as server:
            async with running_daemon(tmp_path, server.url, port=ScriptedPort([public(much)])) as daemon:
                assert (await daemon.ask("s", "hi", resume=False)).content == "Much."
                (result,) = [record for record in daemon.log("s") if isinstance(record, ToolResult)]
                longest = max(map(len, (daemon.store.directory / "s" / "0.jsonl").read_bytes().splitlines()))
    assert result.content == kept + "[truncated]"
    assert result.truncated
    assert longest < 17_000
    assert json.loads(server.bodies[1])["messages"][-1]["content"] == kept + "[truncated]"


@pytest.mark.parametrize("char", ["x", "€", "\0", "\ud800", "\ud83d\ude00"])
def test_of_a_result_of_20_mb_only_the_front_is_worked_on(char: str) -> None:
    # Every other turn waits meanwhile: cleaning all of it took seconds.
    much = char * (20_000_000 // len(char))
    cap_result(much[:10], 16_384)
    tracemalloc.start()
    try:
        _, cut = cap_result(much, 16_384)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cut
    assert peak_bytes < 2_000_000


@pytest.mark.parametrize("pad", range(4))
@pytest.mark.parametrize("char", ["a", "é", "\0", "\ud83d\ude00"])
def test_what_is_not_worked_on_would_not_have_changed_the_result(pad: int, char: str) -> None:
    # The whole text, cleaned first, is the judge; a pair of surrogates may stand on the edge of what is worked on.
    clean = {"\0": "\ufffd", "\ud83d\ude00": "\U0001f600"}.get(char, char)
    cuts = set()
    for size in range(300):
        whole = ("a" * pad + clean * size).encode()
        cut = len(whole) > 256
        expected = whole[:256].decode("utf-8", "ignore") + "[truncated]" if cut else whole.decode()
        assert cap_result("a" * pad + char * size, 256) == (expected, cut)
        cuts.add(cut)
    assert cuts == {False, True}
