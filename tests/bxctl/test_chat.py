"""Tests of `bxctl chat` where stdout is no terminal, against a scripted loopd."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from boxmaker.bxctl.cli import main
from tests.bxctl.scripted_loopd import Script, done, error, event, framed, scripted_loopd

ID = re.compile(r"\d{8}-\d{6}-[a-z0-9]{6}")
HI: Script = [event("content", text="Hi."), done("Hi.")]


def chat(path: Path, *arguments: str, stdin: str | bytes = b"", environ: dict[str, str] | None = None) -> Result:
    """Run `bxctl chat` on a socket, in this process."""
    result = CliRunner(env=environ).invoke(main, ["chat", "--socket", str(path), *arguments], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def errors(result: Result) -> list[str]:
    """The lines about errors on stderr."""
    return [line for line in result.stderr.splitlines() if line.startswith("bxctl: ")]


# -- --say -------------------------------------------------------------------------------------


def test_say_prints_the_answer_and_one_lf_and_nothing_else_on_stdout(short_dir: Path) -> None:
    script: Script = [
        event("queued", ahead=1),
        event("waiting", slot_busy=True),
        event("progress", total=9, cache=1, processed=5),
        event("reasoning", text="I reason so."),
        event("content", text="Let me look."),
        event("tool_call_started", name="clock"),
        event("tool_result", name="clock", class_="private", truncated=True),
        event("retrying", attempt=2, after_ms=500, error="refused"),
        event("thinking_capped", tokens=7),
        event("cache_loss", expected=9, got=2),
        event("cut", reason="length"),
        event("content", text="It is "),
        event("content", text="noon."),
        done("It is noon."),
    ]
    with scripted_loopd(short_dir / "s", script) as loopd:
        result = chat(short_dir / "s", "--say", "Time? ⏰", stdin="not read\n")
    assert result.exit_code == 0
    assert result.stdout == "It is noon.\n"
    (request,) = loopd.requests
    assert ID.fullmatch(request["session"])
    assert request == {"session": request["session"], "content": "Time? ⏰", "resume": False}
    assert result.stderr.splitlines()[0] == f"session {request['session']}"
    assert errors(result) == []
    for told in ("1 ahead", "busy", "clock", "private", "truncated", "refused", "7 tokens", "7 cached", "length"):
        assert told in result.stderr
    assert "I reason so." not in result.stderr
    assert "Let me look." not in result.stderr


@pytest.mark.parametrize("content", ["", "\n", "two\nlines", "ends with LF\n", "tab\there", "ünï – ☃ 🐈"])
def test_say_prints_exactly_the_content_and_one_lf(short_dir: Path, content: str) -> None:
    with scripted_loopd(short_dir / "s", [done(content)]):
        result = chat(short_dir / "s", "--say", "x")
    assert result.stdout == content + "\n"
    assert result.exit_code == 0


def test_say_shows_control_and_bidi_characters_as_escapes(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [done("a\x1b[31mb\x9b\u202ec\r\x7f")]):
        result = chat(short_dir / "s", "--say", "x")
    assert result.stdout == r"a\x1b[31mb\x9b\u202ec\x0d\x7f" + "\n"


CODES = [
    "bad_frame", "bad_request", "unsupported_version", "internal", "shutting_down", "storage", "session_damaged",
    "session_full", "turn_limit", "session_busy", "no_such_session", "session_exists", "inference",
]  # fmt: skip


@pytest.mark.parametrize("mode", [(), ("--json",)])
@pytest.mark.parametrize("code", CODES)
def test_an_error_is_a_line_with_its_code_on_stderr_and_status_1(
    short_dir: Path, code: str, mode: tuple[str, ...]
) -> None:
    failing: Script = [event("content", text="so far"), error(code, "what\nhappened \x1b[0m", n=1)]
    with scripted_loopd(short_dir / "s", failing):
        result = chat(short_dir / "s", "--say", "x", *mode)
    assert result.exit_code == 1
    assert errors(result) == [rf"bxctl: {code}: what\nhappened \x1b[0m"]
    if mode:
        bodies = [json.loads(line) for line in result.stdout.splitlines()]
        assert bodies[-1] == {"code": code, "message": "what\nhappened \x1b[0m", "detail": {"n": 1}}
    else:
        assert result.stdout == "", "text that an error voids is not printed"


# -- --json ------------------------------------------------------------------------------------


def test_json_prints_every_frame_body_as_a_line_of_ascii_and_nothing_else(short_dir: Path) -> None:
    script: Script = [
        event("content", text="é\u202e\x1b\n🐈"),
        event("mood", of={"anything": [1, None]}),
        event("tool_result", name="clock", class_="public", truncated=False),
        done("é", cache_n=None),
    ]
    with scripted_loopd(short_dir / "s", script):
        result = chat(short_dir / "s", "--say", "x", "--json")
    assert result.stdout.isascii()
    assert result.stdout.splitlines() == [
        r'{"event":{"type":"content","text":"\u00e9\u202e\u001b\n\ud83d\udc08"}}',
        '{"event":{"type":"mood","of":{"anything":[1,null]}}}',
        '{"event":{"type":"tool_result","name":"clock","class":"public","truncated":false}}',
        r'{"content":"\u00e9","usage":{"cache_n":null,"prompt_n":2,"predicted_n":3,"reasoning_tokens":0,'
        '"thinking_capped":false}}',
    ]
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["session"]
    assert result.exit_code == 0


def test_json_runs_a_turn_a_line_too(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [done("one")], [done("two")]):
        result = chat(short_dir / "s", "--json", stdin="a\nb\n")
    assert [json.loads(line)["content"] for line in result.stdout.splitlines()] == ["one", "two"]


# -- sessions ----------------------------------------------------------------------------------


def test_a_session_that_exists_is_resumed(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", HI) as loopd:
        result = chat(short_dir / "s", "--session", "my.session", "--say", "x")
    assert loopd.requests == [{"session": "my.session", "content": "x", "resume": True}]
    assert result.stderr.splitlines()[0] == "session my.session"
    assert "new session" not in result.stderr


@pytest.mark.parametrize("mode", [(), ("--json",)])
def test_a_session_that_does_not_exist_is_made_and_the_refused_first_try_is_not_printed(
    short_dir: Path, mode: tuple[str, ...]
) -> None:
    scripts: list[Script] = [[error("no_such_session", session="s1")], [done("Hi.")], [done("Again.")]]
    with scripted_loopd(short_dir / "s", *scripts) as loopd:
        result = chat(short_dir / "s", "--session", "s1", *mode, stdin="one\ntwo\n")
    assert loopd.requests == [
        {"session": "s1", "content": "one", "resume": True},
        {"session": "s1", "content": "one", "resume": False},
        {"session": "s1", "content": "two", "resume": True},
    ]
    assert result.exit_code == 0
    assert result.stderr.splitlines()[:2] == ["session s1", "new session s1"]
    assert errors(result) == []
    assert len(result.stdout.splitlines()) == 2
    assert "no_such_session" not in result.stdout


def test_when_making_the_session_fails_that_error_is_told(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [error("no_such_session")], [error("storage", "disk full")]):
        result = chat(short_dir / "s", "--session", "s1", "--say", "x")
    assert errors(result) == ["bxctl: storage: disk full"]
    assert result.exit_code == 1


def test_a_session_that_could_not_be_made_is_made_by_the_next_turn(short_dir: Path) -> None:
    scripts: list[Script] = [[error("no_such_session")], [error("bad_request")], [done("Hi.")]]
    with scripted_loopd(short_dir / "s", *scripts) as loopd:
        chat(short_dir / "s", "--session", "s1", stdin="one\ntwo\n")
    assert loopd.resumes == [True, False, False]


NOT_BEGUN = ["bad_request", "unsupported_version", "session_busy", "session_exists"]


@pytest.mark.parametrize("code", sorted(set(CODES) - {"no_such_session"}))
def test_after_a_turn_that_may_have_begun_the_session_is_resumed(short_dir: Path, code: str) -> None:
    # `shutting_down` and `bad_frame` come in both cases; a session that was not made is made then.
    with scripted_loopd(short_dir / "s", [error(code)], [done("Hi.")]) as loopd:
        result = chat(short_dir / "s", stdin="one\ntwo\n")
    assert loopd.resumes == [False, code not in NOT_BEGUN]
    assert len({request["session"] for request in loopd.requests}) == 1
    assert result.stdout == "Hi.\n"
    assert result.exit_code == 1, "one of the turns has failed"


def test_after_a_connection_that_broke_the_session_is_resumed_or_made(short_dir: Path) -> None:
    scripts: list[Script] = [[event("content", text="so")], [error("no_such_session")], [done("Hi.")]]
    with scripted_loopd(short_dir / "s", *scripts) as loopd:
        result = chat(short_dir / "s", stdin="one\ntwo\n")
    assert loopd.resumes == [False, True, False]
    (line,) = errors(result)
    assert line.startswith("bxctl: channel_closed: loopd closed the connection")
    assert result.stdout == "Hi.\n"
    assert result.exit_code == 1


# -- lines -------------------------------------------------------------------------------------


def sent(short_dir: Path, stdin: bytes) -> tuple[list[str], Result]:
    """What the turns of a stdin say, and how it went."""
    with scripted_loopd(short_dir / "s", *[[done("ok")]] * 5) as loopd:
        result = chat(short_dir / "s", stdin=stdin)
    return [request["content"] for request in loopd.requests], result


@pytest.mark.parametrize(
    ("stdin", "contents"),
    [
        (b"", []),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"no final newline", ["no final newline"]),
        (b"\n\n  \t \r\n\xc2\xa0\none\n\n", ["one"]),
        (b"  kept as it is  \n", ["  kept as it is  "]),
        ("ünï ☃ 🐈\u2028x\x0by\n".encode(), ["ünï ☃ 🐈\u2028x\x0by"]),
        (b"a\rb\n", ["a\rb"]),
        (b"one\n/quit\ntwo\n", ["one"]),
        (b" /quit \r\ntwo\n", []),
        (b"/quit now\n", ["/quit now"]),
        (b"x" * 300_000 + b"\n", ["x" * 300_000]),
    ],
    ids=lambda value: None if isinstance(value, list) else repr(value[:20]),
)
def test_a_line_is_a_turn(short_dir: Path, stdin: bytes, contents: list[str]) -> None:
    found, result = sent(short_dir, stdin)
    assert found == contents
    assert result.stdout == "ok\n" * len(contents)
    assert result.exit_code == 0


def test_a_line_that_is_not_utf_8_is_told_and_the_others_are_sent(short_dir: Path) -> None:
    found, result = sent(short_dir, b"one\ncaf\xe9\ntwo\n")
    assert found == ["one", "two"]
    (line,) = errors(result)
    assert line.startswith("bxctl: bad_request: ")
    assert "UTF-8" in line
    assert result.exit_code == 1


def test_a_line_that_does_not_end_is_told_and_nothing_more_is_read(short_dir: Path) -> None:
    found, result = sent(short_dir, b"one\n" + b"x" * (16 * 1024 * 1024 + 1) + b"\ntwo\n")
    assert found == ["one"]
    (line,) = errors(result)
    assert line.startswith("bxctl: bad_request: ")
    assert result.exit_code == 1


@pytest.mark.parametrize("mode", [(), ("--json",)])
def test_text_that_no_loopd_takes_is_a_bad_request_and_is_not_sent(short_dir: Path, mode: tuple[str, ...]) -> None:
    with scripted_loopd(short_dir / "s") as loopd:
        nul = chat(short_dir / "s", *mode, stdin="a\0b\n")
        surrogate = chat(short_dir / "s", *mode, "--say", "a\udce9b")
    assert loopd.requests == []
    for result in (nul, surrogate):
        (line,) = errors(result)
        assert line.startswith("bxctl: bad_request: ")
        assert result.exit_code == 1


def test_each_completion_is_printed_when_it_is_final(short_dir: Path) -> None:
    script: Script = [
        event("content", text="Let me "),
        event("content", text="look."),
        event("tool_call_started", name="clock"),
        event("tool_result", name="clock", class_="public", truncated=False),
        event("content", text="void"),
        event("retrying", attempt=2, after_ms=10, error="broken"),
        event("content", text="It is noon.\n"),
        done("It is noon.\n"),
    ]
    with scripted_loopd(short_dir / "s", script):
        result = chat(short_dir / "s", stdin="time?\n")
    assert result.stdout == "Let me look.\nIt is noon.\n"
    assert "> " not in result.stderr, "there is nobody to prompt"


def test_an_error_in_a_later_completion_keeps_what_is_in_the_log(short_dir: Path) -> None:
    script: Script = [
        event("content", text="Let me look."),
        event("tool_call_started", name="clock"),
        event("tool_result", name="clock", class_="public", truncated=False),
        event("content", text="void"),
        error("inference", "gone"),
    ]
    with scripted_loopd(short_dir / "s", script):
        result = chat(short_dir / "s", stdin="time?\n")
    assert result.stdout == "Let me look.\n"
    assert errors(result) == ["bxctl: inference: gone"]


# -- nobody there, and others ------------------------------------------------------------------


@pytest.mark.parametrize("mode", [("--say", "x"), ("--json", "--say", "x"), ()])
def test_when_nobody_listens_the_path_is_named_and_the_status_is_1(short_dir: Path, mode: tuple[str, ...]) -> None:
    result = chat(short_dir / "none", *mode, stdin="one\ntwo\n")
    (line,) = errors(result)
    assert str(short_dir / "none") in line
    assert "loopd serve" in line
    assert line.startswith("bxctl: nobody_listens: ")
    assert result.exit_code == 1
    if "--json" in mode:
        body = json.loads(result.stdout)
        assert body == {"code": "nobody_listens", "message": body["message"], "detail": {}}
    else:
        assert result.stdout == ""


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "bad_frame"),
        (framed({"v": 2, "kind": "turn_done", "final": True, "body": {}}), "unsupported_version"),
        (framed({"v": 1, "kind": "turn_done", "final": True, "body": {}}), "bad_request"),
    ],
)
def test_a_loopd_of_another_protocol_is_an_error_with_a_code(short_dir: Path, raw: bytes, code: str) -> None:
    with scripted_loopd(short_dir / "s", [raw]):
        result = chat(short_dir / "s", "--say", "x")
    (line,) = errors(result)
    assert line.startswith(f"bxctl: {code}: ")
    assert result.exit_code == 1
