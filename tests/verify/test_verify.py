"""The whole command: all holds on the forced real server, and each fault of a server is told as what it is.

The daemon and the terminals are real processes, so time is real here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import trio

from boxmaker.config import at_home
from boxmaker.testing.daemon import make_config
from boxmaker.testing.server import (
    STREAM_HEAD,
    Hang,
    Script,
    ScriptedServer,
    Send,
    delta,
    error_response,
    json_response,
    reply,
    scripted_server,
)
from boxmaker.verify.device import Verification
from boxmaker.verify.judge import Check
from tests.embedded import on_the_embedded_server

pytestmark = pytest.mark.real

LIMIT_S = 280
COMMAND = [sys.executable, "-m", "boxmaker.verify"]


async def verify(directory: Path, server: ScriptedServer, text: str = "") -> dict[str, Check]:
    """Run all checks against a scripted server; the checks by name, in order."""
    owner = make_config(directory, server.url, text)
    home = directory / "h"
    home.mkdir(mode=0o700)
    checks: list[Check] = []
    with trio.fail_after(LIMIT_S):
        held = await Verification(owner=owner, config=at_home(owner, home), say=checks.append).run()
    assert held == all(check.state == "ok" for check in checks)
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def brief(checks: dict[str, Check]) -> list[tuple[str, str]]:
    return [(check.name, check.state) for check in checks.values()]


def shows_work(server: ScriptedServer, *, for_ever: bool = False) -> None:
    """Have `/slots` say that slot 0 works while a completion is open; or from the first cancel on, for ever."""

    async def show(path: str) -> None:
        await trio.lowlevel.checkpoint()
        if path != "/slots":
            return
        busy = any(not request.closed.is_set() for request in server.completions)
        # the last one alone is cancelled: a client that has a whole reply may be seen to go, too
        stuck = for_ever and not server.scripts and server.completions[-1].hung_up
        server.slots = [{"id": 0, "n_ctx": 4096, "is_processing": busy or stuck}]

    server.on_probe = show


def cut_off() -> Script:
    """An answer that goes on for ever."""
    return [Send(STREAM_HEAD + b"".join(delta(content=f"{number} ") for number in range(5))), Hang()]


@on_the_embedded_server
def test_everything_holds_on_the_forced_embedded_server_also_in_the_background_of_a_script() -> None:
    """A shell without job control has its background commands ignore Ctrl-C; `make verify-demo` runs it as it is."""
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    done = subprocess.run([*ignoring, *COMMAND, "--demo", "--json"], capture_output=True, timeout=LIMIT_S, check=False)
    checks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(check["name"], check["state"]) for check in checks] == [
        ("prefix", "ok"),
        ("baseline", "ok"),
        ("plain turn", "ok"),
        ("clock", "ok"),
        ("echo", "ok"),
        ("restart", "ok"),
        ("cancel", "ok"),
        ("after cancel", "ok"),
        ("usage", "ok"),
        ("results", "ok"),
        ("cache", "ok"),
    ], done.stderr.decode()
    messages = {check["name"]: check["message"] for check in checks}
    # a greeting, two completions for the clock, three for echo, one after the restart, one after the cancel
    assert messages["usage"].startswith("8 completions")
    assert messages["results"].startswith("3 results")  # clock, find_tool, echo
    assert done.returncode == 0


async def test_a_model_that_calls_no_tool_and_a_server_that_forgets_are_told_apart(tmp_path: Path) -> None:
    plain = [reply("x", cache_n=n, prompt_n=4, predicted_n=3) for n in range(0, 42, 6)]  # n+4+3-1 = n+6 are held
    forgets = reply("x", cache_n=5, prompt_n=41, predicted_n=3)
    after = reply("x", cache_n=48, prompt_n=4, predicted_n=3)
    async with scripted_server(*plain, forgets, cut_off(), after) as server:
        shows_work(server)
        numbers = iter(range(1000))
        server.apply_template = lambda body: json_response(200, {"prompt": f"{next(numbers)} {json.dumps(body)}"})
        checks = await verify(tmp_path, server)
    assert brief(checks) == [
        ("prefix", "fail"),
        ("baseline", "ok"),
        ("plain turn", "ok"),
        ("clock", "no_call"),
        ("echo", "no_call"),
        ("restart", "fail"),
        ("cancel", "ok"),
        ("after cancel", "ok"),
        ("usage", "ok"),
        ("results", "ok"),
        ("cache", "fail"),
    ]
    assert checks["clock"].message == "the model did not call the tool in 3 attempts: clock was not called"
    assert checks["echo"].message == "the model did not call the tool in 3 attempts: find_tool did not give echo"
    assert checks["restart"].message == "42 tokens were in the slot, 5 were used"
    assert checks["usage"].message.startswith("9 completions")
    assert checks["cache"].message == (
        "1 losses in the log, 1 by the server's figures; the first: 42 tokens were in the slot, 5 were used"
    )


async def test_limits_missing_figures_and_a_slot_that_stays_busy_are_told(tmp_path: Path) -> None:
    clock = ("1", "clock", "{}")
    again = [reply(calls=[clock])] * 3  # the third round is the second repeat, which ends the turn
    async with scripted_server(
        reply("x", cache_n=None),
        *again * 3,
        error_response(400, "no such thing"),
        reply("x", cache_n=None),
        cut_off(),
    ) as server:
        shows_work(server, for_ever=True)
        checks = await verify(tmp_path, server, "[timeouts]\nbusy_s = 0.5\n")
    assert brief(checks) == [
        ("prefix", "ok"),
        ("baseline", "ok"),
        ("plain turn", "ok"),
        ("clock", "fail"),
        ("echo", "fail"),
        ("restart", "fail"),
        ("cancel", "fail"),
        ("after cancel", "fail"),
        ("usage", "fail"),
        ("results", "ok"),
        ("cache", "fail"),
    ]
    assert checks["clock"].message.startswith("the tool was called, and the turn ended with turn_limit: ")
    assert checks["echo"].message.startswith("inference: ")
    assert "no such thing" in checks["echo"].message
    assert "the server sent no figures" in checks["restart"].message
    assert checks["cancel"].message == "the slot was still busy 5 s after the channel left"
    assert checks["after cancel"].message.startswith("inference: ")
    assert checks["cache"].message == "cannot be judged without figures"


@pytest.mark.parametrize("slots", [error_response(501, "This server does not support slots endpoint."), ["x", 7]])
async def test_a_server_that_hides_its_slots_leaves_the_cancel_unproven(tmp_path: Path, slots: object) -> None:
    calls = [
        reply("x", cache_n=0, prompt_n=4, predicted_n=3),
        reply(calls=[("1", "clock", "{}")], cache_n=6, prompt_n=4, predicted_n=3),
        reply("x", cache_n=12, prompt_n=4, predicted_n=3),
        reply(calls=[("2", "find_tool", '{"query": "echo"}')], cache_n=18, prompt_n=4, predicted_n=3),
        reply(
            calls=[("3", "call_tool", '{"name": "echo", "arguments": {"text": "é"}}')],
            cache_n=24,
            prompt_n=4,
            predicted_n=3,
        ),
        reply("x", cache_n=30, prompt_n=4, predicted_n=3),
        reply("x", cache_n=36, prompt_n=4, predicted_n=3),
    ]
    async with scripted_server(*calls, cut_off(), reply("x", cache_n=42, prompt_n=4, predicted_n=3)) as server:
        server.slots = slots
        checks = await verify(tmp_path, server)
    assert [name for name, state in brief(checks) if state != "ok"] == ["cancel"]
    assert checks["cancel"].message.startswith("cannot be seen: the server does not show its slots")
    assert checks["restart"].message == "the first request after it found all 36 tokens in the cache"
    # six completions of 4 tokens read in each turn but the first
    assert checks["cache"].message == "no loss; 28 tokens read after the first completion, the least possible 28"


async def test_an_answer_that_is_over_before_the_cancel_is_no_proof(tmp_path: Path) -> None:
    """Its end comes before the slot is looked at, three times."""
    short = STREAM_HEAD + b"".join(delta(content="x") for _ in range(5)) + reply("x").removeprefix(STREAM_HEAD)
    calls = [reply("x")] * 8
    async with scripted_server(*calls, short, short, short) as server:
        shows_work(server)
        checks = await verify(tmp_path, server)
    assert checks["cancel"].state == "fail"
    assert checks["cancel"].message == "the answer ended before it could be cancelled, 3 times"
    assert "after cancel" not in checks


async def test_without_a_plain_answer_nothing_more_is_tried(tmp_path: Path) -> None:
    async with scripted_server(error_response(400, "no such model")) as server:
        checks = await verify(tmp_path, server)
    assert brief(checks) == [("prefix", "ok"), ("baseline", "ok"), ("plain turn", "fail")]
    assert "no such model" in checks["plain turn"].message


async def test_a_baseline_over_its_budget_is_one_failed_check_and_nothing_runs(tmp_path: Path) -> None:
    """The owner's `memory/core.md` counts: it is in every session's baseline."""
    (tmp_path / "home" / "memory").mkdir(parents=True)
    (tmp_path / "home" / "memory" / "core.md").write_text("The owner likes tea.")
    async with scripted_server() as server:
        server.input_tokens = {"input_tokens": 3001}
        checks = await verify(tmp_path, server)
        sent = [request.json() for request in server.received if request.path.endswith("input_tokens")]
    assert brief(checks) == [("prefix", "ok"), ("baseline", "fail")]
    assert checks["baseline"].message.startswith("3001 tokens, allowed are 3000.")
    assert sent[0]["messages"][0]["content"].endswith("\n\nThe owner likes tea.")
    assert server.completions == []


def test_a_server_that_is_not_there_is_a_line_and_status_1_and_the_owners_home_is_not_touched(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    home = tmp_path / "home"
    config.write_text(f'[server]\nurl = "unix:{tmp_path}/nobody.sock"\n[paths]\nhome = "{home}"\n')
    done = subprocess.run([*COMMAND, "--config", str(config), "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    checks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(check["name"], check["state"]) for check in checks] == [("server", "fail")]
    assert "Start llama-server, or mend [server] url" in checks[0]["message"]
    assert not home.exists()


async def test_what_a_server_says_reaches_the_screen_without_control_bytes(tmp_path: Path) -> None:
    async with scripted_server(error_response(400, "no \x1b[31mmodel\x07")) as server:
        make_config(tmp_path, server.url)
        done = await trio.run_process(
            [*COMMAND, "--config", str(tmp_path / "config.toml")], capture_stdout=True, capture_stderr=True, check=False
        )
    assert done.returncode == 1
    assert b"fail     plain turn: inference: " in done.stdout
    assert b"\x1b" not in done.stdout
    assert b"\x07" not in done.stdout


async def test_a_pipe_for_core_md_is_a_failed_check_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "home" / "memory").mkdir(parents=True)
    os.mkfifo(tmp_path / "home" / "memory" / "core.md")
    async with scripted_server() as server:
        checks = await verify(tmp_path, server)
    assert brief(checks) == [("daemon", "fail")]
    assert "is a named pipe" in checks["daemon"].message


@pytest.mark.parametrize("options", [[], ["--demo", "--config", "x"]])
def test_one_of_config_and_demo_is_needed(options: list[str]) -> None:
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "either --config FILE or --demo" in done.stderr


def test_a_bad_configuration_is_said_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[serve]\n")
    command = [*COMMAND, "--config", str(tmp_path / "config.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "[serve]: unknown table" in done.stderr


def with_mark(mark: str) -> list[int]:
    """Processes that have the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # another user's, or gone
                continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_no_program_outlives_it_however_it_is_ended(
    tmp_path: Path, short_dir: Path, number: signal.Signals
) -> None:
    mark = f"BOXMAKER_MARK={uuid.uuid4()}"
    async with scripted_server(cut_off()) as server:
        make_config(tmp_path, server.url)
        # a kill leaves its directory
        environment = os.environ | dict([mark.split("=")]) | {"TMPDIR": str(short_dir)}
        command = [*COMMAND, "--config", str(tmp_path / "config.toml")]
        with trio.fail_after(LIMIT_S):
            process = await trio.lowlevel.open_process(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
            request = await server.wait_for_completions(1)
            assert len(with_mark(mark)) == 3  # it, loopd, bxctl
            process.send_signal(number)
            await process.wait()
            await request.closed.wait()
            while with_mark(mark):  # noqa: ASYNC110  # other processes' ends are no event of ours
                await trio.sleep(0.05)
    assert request.hung_up
