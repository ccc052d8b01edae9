"""What people see of logs, as they type the commands."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from boxmaker.bxctl.logs import LogText, age, sessions_table, summary_json
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import decode_line
from boxmaker.session.logs import Summary

BASELINE = b'{"system":"You are a test.","tools":[]}'
LOG = [
    '{"type":"session_start","time":"2026-11-30T12:00:00.000Z","session":"s","epoch":0,"slot":0,"baseline":"'
    + hashlib.sha256(BASELINE).hexdigest()
    + '"}',
    '{"type":"user","time":"2026-11-30T12:00:01.000Z","content":"What time\\nis it?"}',
    '{"type":"assistant","time":"2026-11-30T12:00:02.000Z","content":null,"reasoning_content":"Hm.\\n",'
    '"tool_calls":[{"id":"a","name":" clock","arguments":"{}"},'
    '{"id":"b","name":"call_tool","arguments":"{\\"n\\": 1}"}]}',
    '{"type":"usage","time":"2026-11-30T12:00:02.000Z","cache_n":0,"prompt_n":90,"predicted_n":12,'
    '"reasoning_tokens":3,"thinking_capped":true}',
    '{"type":"tool_result","time":"2026-11-30T12:00:03.000Z","call":0,"tool_call_id":"a","content":"noon",'
    '"class":"public","untrusted":false,"truncated":false}',
    '{"type":"tool_result","time":"2026-11-30T12:00:03.000Z","call":1,"tool_call_id":"b","content":"\\u001b[31mred\\nx",'
    '"class":"private","untrusted":true,"truncated":true}',
    '{"type":"assistant","time":"2026-11-30T12:00:04.000Z","content":"Noon.","reasoning_content":null,"tool_calls":[]}',
    '{"type":"usage","time":"2026-11-30T12:00:04.000Z","cache_n":null,"prompt_n":null,"predicted_n":null,'
    '"reasoning_tokens":0,"thinking_capped":false}',
    '{"type":"cache_loss","time":"2026-11-30T12:00:04.000Z","expected":101,"got":60}',
    '{"type":"user","time":"2026-11-30T12:00:05.000Z","content":"…"}',
    '{"type":"assistant","time":"2026-11-30T12:00:06.000Z","content":"","reasoning_content":null,"tool_calls":[]}',
]
SHOWN = [
    "session s, begun 2026-11-30T12:00:00.000Z, slot 0",
    "",
    "> What time",
    "> is it?",
    "~ Hm.",
    "[calls clock {}]",
    '[calls call_tool {"n": 1}]',
    "[0 cached, 90 read, 12 generated, 3 of reasoning, thinking capped]",
    "[result 0 of clock]",
    "| noon",
    "[result 1 of call_tool, private, untrusted, truncated]",
    "| \\x1b[31mred",
    "| x",
    "Noon.",
    "[no figures]",
    "[lost 41 cached tokens: 60 of 101 were left]",
    "",
    "> …",
    "[no answer]",
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    directory = tmp_path / "sessions" / "s"
    directory.mkdir(parents=True)
    (directory / "0.jsonl").write_text("".join(f"{line}\n" for line in LOG), "utf-8")
    (directory / "0.baseline.json").write_bytes(BASELINE)
    return tmp_path


def bxctl(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "boxmaker.bxctl", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "BOXMAKER_HOME": str(home), **environment},
    )


def test_every_record_is_shown_as_a_person_reads_it() -> None:
    text = LogText()
    assert [line for raw in LOG for line in text.lines(decode_line(raw.encode()))] == SHOWN


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-5, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (86399, "23 h"),
        (864000, "10 d"),
    ],
)
def test_an_age_is_in_its_largest_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text


def summary(session: str, last_s: float, **more: object) -> Summary:
    damaged = more.get("damaged")
    return Summary(
        session=SessionId(session),
        last_s=last_s,
        turns=3,
        first_words=str(more.get("words", "hello")),
        damaged=None if damaged is None else str(damaged),
    )


def test_the_table_has_the_latest_first_and_fits_the_terminal() -> None:
    rows = [
        summary("old", 10),
        summary("a-new-one", 70, words="x\x1b" + "y" * 100),
        summary("bad", 50, damaged="0.jsonl:3"),
    ]
    assert sessions_table(rows, 100, 40) == [
        "SESSION      AGE  TURNS  FIRST WORDS",
        "a-new-one   30 s      3  x\\x1byyyyyyyyy…",
        "bad         50 s      3  damaged: 0.jso…",
        "old        1 min      3  hello",
    ]


def test_a_summary_is_a_line_of_ascii_json() -> None:
    assert summary_json(summary("s", 1_796_048_130, words="é")) == (
        '{"session":"s","last":"2026-11-30T14:15:30Z","turns":3,"first_words":"\\u00e9","damaged":null}'
    )


@pytest.mark.real
def test_the_commands_as_they_are_typed(home: Path) -> None:
    shown = bxctl(home, "log", "s")
    assert (shown.returncode, shown.stdout.splitlines()) == (0, SHOWN)
    records = bxctl(home, "log", "s", "--json")
    assert records.stdout.isascii()
    assert [json.loads(line) for line in records.stdout.splitlines()] == [json.loads(line) for line in LOG]
    listed = bxctl(home, "sessions", "--json")
    assert json.loads(listed.stdout)["turns"] == 2
    assert "What time is it?" in bxctl(home, "sessions").stdout
    checked = bxctl(home, "session", "check")
    assert (checked.returncode, checked.stdout) == (0, "1 session: nothing found\n")


@pytest.mark.real
def test_damage_is_found_mended_and_said(home: Path) -> None:
    log = home / "sessions" / "s" / "0.jsonl"
    with log.open("ab") as opened:
        opened.write(b'{"type":"user","ti')
    checked = bxctl(home, "session", "check", "s")
    assert checked.returncode == 1
    assert checked.stdout == f"{log}:12: the last line is torn: 18 bytes without an end\n"
    shown = bxctl(home, "log", "s")
    assert shown.stdout.splitlines() == SHOWN, "what can be read is shown"
    assert shown.returncode == 1
    assert shown.stderr == (
        f"bxctl: session_damaged: {log}:12: the last line is torn: 18 bytes without an end; "
        f"`bxctl session repair s --home {home}` cuts the torn end off and keeps a copy\n"
    )
    mended = bxctl(home, "session", "repair", "s")
    assert mended.returncode == 0
    assert '{"type":"user","ti\n' in mended.stdout
    assert bxctl(home, "session", "check").returncode == 0
    assert "nothing was changed" in bxctl(home, "session", "repair", "s").stdout


@pytest.mark.real
def test_what_is_not_there_is_an_error_and_what_is_no_id_a_usage_error(home: Path) -> None:
    missing = bxctl(home, "log", "nobody")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("bxctl: no_such_session: there is no session nobody")
    assert bxctl(home, "log", "../s").returncode == 2
    assert bxctl(home, "session", "check", "a/b").returncode == 2


@pytest.mark.real
def test_a_followed_log_goes_on_as_it_grows(home: Path) -> None:
    log = home / "sessions" / "s" / "0.jsonl"
    command = [sys.executable, "-m", "boxmaker.bxctl", "log", "s", "--follow", "--json", "--home", str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as follower:
        assert follower.stdout is not None
        for line in LOG:
            assert json.loads(follower.stdout.readline()) == json.loads(line)
        more = '{"type":"user","time":"2026-11-30T12:00:09.000Z","content":"more"}'
        with log.open("a") as opened:
            opened.write(more[:20])
            opened.flush()
            opened.write(more[20:] + "\n")
        assert json.loads(follower.stdout.readline())["content"] == "more"
        follower.terminate()


@pytest.mark.real
def test_a_shell_completes_session_ids(home: Path) -> None:
    (home / "sessions" / "second").mkdir()
    words = {"COMP_WORDS": "bxctl log s", "COMP_CWORD": "2", "_BXCTL_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-c", "from boxmaker.bxctl.cli import main; main(prog_name='bxctl')"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "BOXMAKER_HOME": str(home), **words},
    )
    assert sorted(done.stdout.split()) == ["plain,s", "plain,second"]
    for shell in ("bash", "zsh", "fish"):
        script = bxctl(home, "completion", shell)
        assert script.returncode == 0
        assert "_BXCTL_COMPLETE" in script.stdout


@pytest.mark.real
def test_help_imports_neither_httpx_nor_trio_nor_the_daemon(home: Path) -> None:
    code = (
        "import sys\nfrom boxmaker.bxctl.cli import main\n"
        "try:\n    main(['--help'], prog_name='bxctl')\n"
        "finally:\n    print(sorted(m for m in sys.modules if m in ('httpx', 'trio', 'cattrs') or "
        "m.startswith(('boxmaker.loopd', 'boxmaker.session', 'boxmaker.inference'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "[]"
