"""The error tree: its drawing, exit codes and details, and that each text says what, where and what to do."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from pathlib import Path

import attrs
import pytest

from boxmaker import errors
from boxmaker.errors import (
    BadFrame,
    BadRequest,
    BoxmakerError,
    ChannelClosed,
    ConfigError,
    InferenceError,
    InternalError,
    NobodyListens,
    NoSuchSession,
    NoTurn,
    SessionBusy,
    SessionDamaged,
    SessionExists,
    SessionFull,
    ShuttingDown,
    StartError,
    StorageError,
    TurnCancelled,
    TurnLimit,
    UnsupportedVersion,
    ValueRefused,
    WireableError,
)

LOG = Path("/home/jürgen/sessions/a/0.jsonl")

CHECK = (
    "; `bxctl session check a --home '/home/jürgen'` lists all damage; mend the file by hand, or begin a new session"
)
TEXTS: list[tuple[BoxmakerError, str, dict[str, object] | None]] = [
    (ConfigError(problems=("config.toml: [loop] tool_iterations: found 0, allowed is an integer ≥ 1", "two")),
     "config.toml: [loop] tool_iterations: found 0, allowed is an integer ≥ 1\ntwo", None),
    (ValueRefused(path="$.calls[0].id", problem="expected text, found 5"),
     "$.calls[0].id: expected text, found 5", None),
    (StartError(message="the self-test failed"), "the self-test failed", None),
    (ChannelClosed(),
     "loopd closed the connection before the answer was complete; its log on stderr says why", None),
    (NobodyListens(path=Path("/run/é.sock"), reason="no such socket"),
     "no loopd answers on /run/é.sock (no such socket); start it with `loopd serve`, or name its socket with --socket",
     None),
    (BadFrame(problem="a frame of 0 bytes; allowed are 1 to 1048576"),
     "a frame of 0 bytes; allowed are 1 to 1048576", {}),
    (BadRequest(path="$.body.resume", problem="expected true or false, found 0"),
     "$.body.resume: expected true or false, found 0", {"path": "$.body.resume"}),
    (UnsupportedVersion(found="absent"),
     "protocol version 1 is spoken here, the frame says v = absent; use one release on both ends", {"supported": [1]}),
    (InternalError(message="a fault inside loopd; its log has the details"),
     "a fault inside loopd; its log has the details", {}),
    (ShuttingDown(), "loopd is shutting down; send the turn again when it is back", {}),
    (NoSuchSession(session="a"), "there is no session a; a turn with resume: false begins it", {"session": "a"}),
    (NoSuchSession(session="a", directory=Path("/srv/box/sessions")),
     "there is no session a in /srv/box/sessions; name the daemon's home with --home or BOXMAKER_HOME",
     {"session": "a"}),
    (SessionExists(session="a"), "session a exists already; resume it, or choose another id", {"session": "a"}),
    (SessionBusy(session="a"),
     "session a is busy with another turn; try again when that has ended", {"session": "a"}),
    (SessionDamaged(file=LOG, line=3, problem="$.content: expected text, found 5"),
     "/home/jürgen/sessions/a/0.jsonl:3: $.content: expected text, found 5" + CHECK,
     {"file": str(LOG), "line": 3}),
    (SessionDamaged(file=LOG, line=9, problem="the last line is torn", torn=True),
     "/home/jürgen/sessions/a/0.jsonl:9: the last line is torn; "
     "`bxctl session repair a --home '/home/jürgen'` cuts the torn end off and keeps a copy",
     {"file": str(LOG), "line": 9}),
    (SessionDamaged(file=LOG, line=1, problem="the last line is torn", torn=True),
     "/home/jürgen/sessions/a/0.jsonl:1: the last line is torn; it has no whole line: remove /home/jürgen/sessions/a",
     {"file": str(LOG), "line": 1}),
    (SessionDamaged(file=LOG, line=0, problem="is no log file: Is a directory"),
     "/home/jürgen/sessions/a/0.jsonl: is no log file: Is a directory" + CHECK,
     {"file": str(LOG), "line": 0}),
    (StorageError(action="append to", file=LOG, reason="No space left on device"),
     "cannot append to /home/jürgen/sessions/a/0.jsonl: No space left on device",
     {"file": str(LOG), "action": "append to"}),
    (InferenceError(kind="connect", message="cannot reach the server: refused"),
     "cannot reach the server: refused", {}),
    (InferenceError(kind="http", message="the server answered 503: busy", status=503, attempts=5),
     "the server answered 503: busy", {"status": 503, "attempts": 5}),
    (InferenceError(kind="limit", message="slot 0 was busy", limit="busy_s"), "slot 0 was busy", {"limit": "busy_s"}),
    (SessionFull(message="the server answered 400: too long"),
     "the session no longer fits the server's context: the server answered 400: too long; go on in a new session", {}),
    (SessionFull(message="the server answered 400: too long", fork="a"),
     "the session no longer fits the server's context: the server answered 400: too long; go on without this message: "
     "bxctl fork a (--at N keeps less), or in a new session", {}),
    (SessionFull(message="the server answered 400: too long", fork="a", at=3),
     "the session no longer fits the server's context: the server answered 400: too long; go on with what was said up "
     "to answer 3: bxctl fork a --at 3, or in a new session", {}),
    (TurnLimit(limit="tool_iterations", value=8),
     "the turn was ended after 8 rounds of tool calls ([loop] tool_iterations)",
     {"limit": "tool_iterations", "value": 8}),
    (TurnLimit(limit="repeat_detection", value=2),
     "the turn was ended because the model repeated the same tool calls ([loop] repeat_detection)",
     {"limit": "repeat_detection", "value": 2}),
    (TurnLimit(limit="turn_s", value=600), "the turn was ended after 600 s ([loop] turn_s)", {"limit": "turn_s"}),
    (TurnCancelled(cause="owner"), "the turn was cancelled by its owner", {"cause": "owner"}),
    (TurnCancelled(cause="replaced"),
     "the turn was cancelled: a newer message took its place", {"cause": "replaced"}),
    (NoTurn(session="a", ending="idle"), "no turn of session a runs; send the text as a turn", {"ending": "idle"}),
    (NoTurn(session="a", ending="turn_limit"),
     "the turn of session a ended first (turn_limit); send the text as a turn", {"ending": "turn_limit"}),
]  # fmt: skip
"""An instance, its text, and its detail for the channel (None: it never goes there)."""

FAMILIES = {BoxmakerError, WireableError}
CLASSES: dict[str, type[BoxmakerError]] = {
    name: cls
    for name, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, BoxmakerError) and cls.__module__ == errors.__name__
}


def test_every_class_that_can_be_raised_has_its_text_here() -> None:
    assert {type(error) for error, _, _ in TEXTS} == set(CLASSES.values()) - FAMILIES


@pytest.mark.parametrize(("error", "text", "detail"), TEXTS)
def test_a_text_says_what_where_and_what_to_do(error: BoxmakerError, text: str, detail: object) -> None:
    assert str(error) == text
    assert isinstance(error, WireableError) == (detail is not None)


@pytest.mark.parametrize(("error", "text", "detail"), TEXTS)
def test_a_detail_is_a_json_object_with_what_a_program_needs(error: BoxmakerError, text: str, detail: object) -> None:
    if isinstance(error, WireableError):
        assert error.detail() == detail
        assert json.loads(json.dumps(error.detail())) == detail


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/home/jürgen", "'/home/jürgen'"),
        ("/srv/box", "/srv/box"),
        ("/a b'c", "'/a b'\"'\"'c'"),
        ("/a\nb", "$'/a\\x0ab'"),
        ("/a\x1b'\\", "$'/a\\x1b\\x27\\x5c'"),
        ("/\udce9 é", "$'/\\xe9 \\xc3\\xa9'"),
    ],
)
def test_a_path_is_a_word_that_a_shell_reads_as_that_path(path: str, word: str) -> None:
    assert errors.shell_word(Path(path)) == word
    printed = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
    assert printed == os.fsencode(path)


def test_the_tree_is_drawn_as_it_is() -> None:
    drawn = (errors.__doc__ or "").partition("\n\n")[2].partition("\n\n")[0]
    parents: dict[str, str] = {}
    for line in drawn.splitlines():
        branch = max(line.find("├─"), line.find("└─"))
        if branch < 0:
            continue  # the root
        parent = "BoxmakerError" if branch == 4 else "WireableError"
        for word in line[branch + 2 :].split():
            if word not in CLASSES:
                break  # the remark beside the names
            parents[word] = parent
    assert parents == {name: cls.__bases__[0].__name__ for name, cls in CLASSES.items() if cls is not BoxmakerError}


def test_exit_codes_are_2_for_a_configuration_and_1_for_all_others() -> None:
    assert {name: cls.exit_code for name, cls in CLASSES.items() if cls.exit_code != 1} == {"ConfigError": 2}


def test_each_error_of_the_wire_has_a_code_of_its_own() -> None:
    codes = [cls.code for cls in CLASSES.values() if issubclass(cls, WireableError) and cls is not WireableError]
    assert len(set(codes)) == len(codes)
    assert BoxmakerError.code not in codes


@pytest.mark.parametrize(("error", "text", "detail"), TEXTS)
def test_an_error_is_raised_caught_and_told_apart_as_itself(error: BoxmakerError, text: str, detail: object) -> None:
    with pytest.raises(BoxmakerError) as caught:
        raise error
    assert caught.value is error
    assert error == error
    assert len({error}) == 1
    cls: type = type(error)
    if attrs.has(cls):
        assert error != attrs.evolve(error)  # type: ignore[misc]  # two failures are two, even with the same fields
