"""Tests of what an owner does while a turn runs: type, cancel, leave; on a pseudo-terminal, on a scripted loopd."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from boxmaker.bxctl.live import LiveTurn, Screen, Typed
from boxmaker.channel.client import Frame
from boxmaker.proto.channel import Turn
from boxmaker.proto.ids import SessionId
from tests.bxctl.scripted_loopd import LIMIT_S, Hang, Script, Until, Wait, done, error, event, final, scripted_loopd
from tests.bxctl.test_chat import chat
from tests.bxctl.test_terminal import PLAIN_SIZE, Terminal, terminal

pytestmark = pytest.mark.real

QUIET = ("--quiet",)
NO_TURN = error("no_turn", "the turn of session s1 ended first (turn_done)", ending="turn_done")
CANCELLED = error("cancelled", "the turn was cancelled by its owner", cause="owner")
CANCEL_DONE = final("cancel_done", ending="cancelled", cause="owner", slot_free=True)


def begin(screen: Terminal, text: str = "one") -> None:
    screen.read_until("> ")
    screen.type(f"{text}\n")


def test_a_line_typed_while_a_turn_runs_joins_it(short_dir: Path) -> None:
    script: Script = [
        event("content", text="So far"),
        Until("steer"),
        event("steered", content="rather this"),
        event("content", text="Ah."),
        done("Ah."),
    ]
    with scripted_loopd(short_dir / "s", script) as loopd:
        loopd.answers["steer"] = [[final("steered")]]
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("So far")
            screen.type("rather this\n")
            assert screen.read_until("> ") == "[joined: rather this]\nAh.\n> "
    assert loopd.asked[1] == ("steer", {"session": "s1", "content": "rather this"})
    assert [request["content"] for request in loopd.requests] == ["one"]


def test_lines_that_come_too_late_are_turns_of_their_own_in_their_order(short_dir: Path) -> None:
    script: Script = [event("content", text="So far"), Wait(), done("So far")]
    with scripted_loopd(short_dir / "s", script, [done("A.")], [done("B.")]) as loopd:
        loopd.answers["steer"] = [[Wait(), NO_TURN], [Wait(), NO_TURN]]
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("So far")
            screen.type("two\n\nthree\n")
            assert loopd.wait_for("steer", 2)
            loopd.go_on.set()
            said = screen.read_until("> ")
    assert said == (
        "[the turn had ended; sent as the next one: two]\nA.\n[the turn had ended; sent as the next one: three]\nB.\n> "
    ), "what was typed has ended the line"
    assert [request["content"] for request in loopd.requests] == ["one", "two", "three"]


def test_a_line_that_loopd_refuses_is_said_not_to_be_sent(short_dir: Path) -> None:
    script: Script = [event("content", text="So far"), Until("steer"), Wait(), done("So far")]
    with scripted_loopd(short_dir / "s", script) as loopd:
        loopd.answers["steer"] = [[error("bad_request", "no")]]
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("So far")
            screen.type("psst\n")
            screen.read_until("bxctl: bad_request: no; the line was not sent\n")
            loopd.go_on.set()
            screen.read_until("> ")


@pytest.mark.parametrize("how", ["Ctrl-C", "/cancel"])
def test_a_cancel_waits_for_the_last_word_and_says_what_was_done(short_dir: Path, how: str) -> None:
    script: Script = [
        event("tool_call_started", name="clock"),
        event("tool_result", name="clock", class_="public", truncated=False),
        event("tool_call_started", name="echo"),
        Until("cancel"),
        CANCELLED,
    ]
    with scripted_loopd(short_dir / "s", script, [done("Hi.")]) as loopd:
        loopd.answers["cancel"] = [[CANCEL_DONE]]
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("[calls echo]\n")
            screen.type("\x03" if how == "Ctrl-C" else "/cancel\n")
            assert screen.read_until("> ") == ("[cancelled; already done: clock; its outcome is not known: echo]\n> ")
            screen.type("two\n")
            assert screen.read_until("> ") == "Hi.\n> "
    assert loopd.asked[1] == ("cancel", {"session": "s1", "cause": "owner"})
    assert loopd.resumes == [True, True]


def test_what_did_not_join_a_turn_that_was_cancelled_is_not_sent_by_itself(short_dir: Path) -> None:
    cancelled = error("no_turn", "the turn of session s1 ended first (cancelled)", ending="cancelled")
    script: Script = [event("content", text="So far"), Until("cancel"), CANCELLED]
    with scripted_loopd(short_dir / "s", script) as loopd:
        loopd.answers["steer"] = [[Until("cancel"), cancelled]]
        loopd.answers["cancel"] = [[CANCEL_DONE]]
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("So far")
            screen.type("rather this\n")
            assert loopd.wait_for("steer", 1)
            screen.type("/cancel\n")
            assert screen.read_until("> ") == (
                "[the text above is withdrawn]\n[cancelled]\n[did not join, and is not sent: rather this]\n> "
            )
    assert len(loopd.requests) == 1


def test_a_line_and_then_ctrl_d_is_said_before_the_chat_ends(short_dir: Path) -> None:
    script: Script = [event("content", text="So far"), Wait(), done("So far")]
    with scripted_loopd(short_dir / "s", script, [done("Bye.")]) as loopd:
        loopd.answers["steer"] = [[Wait(), NO_TURN]]
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("So far")
            screen.type("two\n\x04")
            assert loopd.wait_for("steer", 1)
            loopd.go_on.set()
            assert screen.read_to_end().endswith("sent as the next one: two]\nBye.\n")
            assert screen.process.wait(LIMIT_S) == 0
    assert [request["content"] for request in loopd.requests] == ["one", "two"]


def test_a_loopd_that_knows_no_cancel_is_left(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [event("content", text="So far"), Hang()]) as loopd:
        loopd.answers["cancel"] = [[error("bad_request", "unknown kind")]]
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("So far")
            screen.type("\x03")
            assert screen.read_until("> ") == "\n[the text above is withdrawn]\n[cancelled]\n> "
            assert loopd.hung_up.wait(LIMIT_S)


@pytest.mark.parametrize("silent", ["a second Ctrl-C", "two seconds"])
def test_a_loopd_that_is_silent_is_left(short_dir: Path, silent: str) -> None:
    with scripted_loopd(short_dir / "s", [event("content", text="So far"), Hang()]) as loopd:
        loopd.answers["cancel"] = [[Hang()]]
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("So far")
            screen.type("\x03")
            assert loopd.wait_for("cancel", 1)
            if silent != "two seconds":
                screen.process.send_signal(signal.SIGINT)
            assert screen.read_until("> ") == "\n[the text above is withdrawn]\n[cancelled]\n> "
            assert loopd.hung_up.wait(LIMIT_S)


def test_a_turn_that_waits_in_line_is_left_and_nobody_elses_is_cancelled(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [event("queued", ahead=1), Hang()]) as loopd:
        with terminal(short_dir / "s", "--wait", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("[queued, 1 ahead]\n")
            screen.type("\x03")
            assert screen.read_until("> ") == "[cancelled]\n> "
            assert loopd.hung_up.wait(LIMIT_S)
    assert [kind for kind, _ in loopd.asked] == ["turn"]
    assert loopd.requests[0]["when_busy"] == "wait"


@pytest.mark.parametrize("how", ["/quit\n", "\x04"])
def test_leaving_while_a_turn_runs(short_dir: Path, how: str) -> None:
    """/quit ends the turn; Ctrl-D lets it have its answer."""
    end: Script = [Until("cancel"), CANCELLED] if how == "/quit\n" else [Wait(), done("So far")]
    with scripted_loopd(short_dir / "s", [event("content", text="So far"), *end]) as loopd:
        loopd.answers["cancel"] = [[CANCEL_DONE]]
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("So far")
            screen.type(how)
            loopd.go_on.set()
            screen.read_to_end()
            assert screen.process.wait(LIMIT_S) == 0
    assert [kind for kind, _ in loopd.asked] == (["turn", "cancel"] if how == "/quit\n" else ["turn"])


def test_a_fork_at_the_prompt_goes_on_in_the_new_session(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [done("Hi.")]) as loopd:
        loopd.answers["fork"] = [[final("fork_done", session="x", from_=2)], [error("bad_request", "no")]]
        loopd.answers["cancel"] = [[final("cancel_done", ending="idle", cause=None, slot_free=True)]]
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen, "/fork 2")
            said = screen.read_until("> ")
            screen.type("/fork x\n")
            assert screen.read_until("> ") == "bxctl: bad_request: /fork takes the number of an answer, from 1\n> "
            screen.type("/fork\n")
            assert screen.read_until("> ") == "bxctl: bad_request: no\n> "
            screen.type("/cancel\n")
            assert screen.read_until("> ") == "[no turn runs]\n> "
            screen.type("go on\n")
            screen.read_until("> ")
    (_, asked), (_, last), (_, cancel), _ = loopd.asked
    new = asked["new"]
    assert asked == {"session": "s1", "from": 2, "new": new}
    assert said == f"[forked s1 at answer 2]\nsession {new}\n> "
    assert (last["session"], last["from"]) == (new, None)
    assert cancel["session"] == new
    assert (loopd.requests[0]["session"], loopd.requests[0]["resume"]) == (new, True)


def test_a_program_at_a_terminal_is_told_of_forks_and_cancels_by_their_bodies(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [event("content", text="So far"), Wait(), CANCELLED]) as loopd:
        loopd.answers["fork"] = [[final("fork_done", session="x", from_=2)], [error("bad_request", "no", field="from")]]
        loopd.answers["cancel"] = [[final("cancel_done", ending="idle", cause=None, slot_free=True)], [CANCEL_DONE]]
        with terminal(short_dir / "s", "--json", environ=PLAIN_SIZE) as screen:
            screen.read_until("session s1\n")
            screen.type("/cancel\n")
            assert screen.read_until("no turn runs\n") == (
                '{"ending":"idle","cause":null,"slot_free":true}\nbxctl: no turn runs\n'
            )
            screen.type("/fork 2\n")
            assert screen.read_until("answer 2\n") == '{"session":"x","from":2}\nbxctl: forked s1 at answer 2\n'
            new = screen.read_until("\n").removeprefix("session ").removesuffix("\n")
            screen.type("/fork\n")
            assert screen.read_until("request: no\n") == (
                '{"code":"bad_request","message":"no","detail":{"field":"from"}}\nbxctl: bad_request: no\n'
            )
            screen.type("one\n")
            assert screen.read_until("}}\n") == '{"event":{"type":"content","text":"So far"}}\n'
            screen.type("/cancel\n")
            assert loopd.wait_for("cancel", 2)
            loopd.go_on.set()
            assert screen.read_until("bxctl: cancelled\n") == (
                '{"code":"cancelled","message":"the turn was cancelled by its owner","detail":{"cause":"owner"}}\n'
                "bxctl: cancelled\n"
            )
    assert (loopd.asked[1][1]["new"], loopd.asked[3][1]["session"]) == (new, new)


def test_a_cancel_in_words_that_comes_with_the_last_word_changes_nothing(short_dir: Path) -> None:
    """Who of two tasks runs first is chance: twenty times, so that both orders are there."""
    rounds = 20
    with scripted_loopd(short_dir / "s", *[[event("content", text="x"), CANCELLED]] * rounds) as loopd:
        for _ in range(rounds):
            read, write = os.pipe()
            frames: list[Frame] = []

            def show(frame: Frame, frames: list[Frame] = frames, write: int = write) -> None:
                frames.append(frame)
                if frame.final:
                    os.write(write, b"/cancel\n")

            live = LiveTurn(
                short_dir / "s",
                Turn(session=SessionId("s1"), content="one", resume=False, when_busy="refuse"),
                Screen(
                    frame=show,
                    status=pytest.fail,
                    error=lambda code, text: pytest.fail(code + text),
                    refused=lambda _, text: pytest.fail(text),
                    pause=lambda: None,
                    typed=lambda: None,
                ),
                lambda: False,
                Typed(read, 100),
            )
            trio.run(live.run)
            os.close(read)
            os.close(write)
            assert [frame.final for frame in frames] == [False, True], "shown once"
            assert not live.stopped, "so that it is not told as a cancel of ours"
    assert [kind for kind, _ in loopd.asked] == ["turn"] * rounds


def test_the_lines_of_a_pipe_are_turns_one_after_another_whatever_they_say(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [done("1")], [done("2")], [done("3")]) as loopd:
        result = chat(short_dir / "s", stdin="one\n/cancel\n/fork\n/quit\nnot read\n")
    assert result.exit_code == 0
    assert [kind for kind, _ in loopd.asked] == ["turn"] * 3
    assert [request["content"] for request in loopd.requests] == ["one", "/cancel", "/fork"]


@pytest.mark.parametrize("how", ["wait", "replace"])
def test_wait_and_replace_are_asked_for(short_dir: Path, how: str) -> None:
    with scripted_loopd(short_dir / "s", [done("1")]) as loopd:
        assert chat(short_dir / "s", "--session", "a", f"--{how}", "--say", "x").exit_code == 0
    assert loopd.requests == [{"session": "a", "content": "x", "resume": True, "when_busy": how}]
    both = chat(short_dir / "s", "--wait", "--replace", "--say", "x")
    assert both.exit_code == 2
    assert "--wait or --replace, not both" in both.stderr


def test_lines_pasted_into_a_session_that_is_not_there_yet_are_all_sent(short_dir: Path) -> None:
    """The first try is refused, and the turn is sent again as a new session's: what was read meanwhile stays."""
    missing: Script = [Wait(), error("no_such_session", "there is no session s1")]
    with scripted_loopd(short_dir / "s", missing, [done("A.")], [done("B.")], [done("C.")]) as loopd:
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen, "one\ntwo\nthree")
            assert loopd.wait_for("turn", 1)
            loopd.go_on.set()
            screen.read_until("C.\n> ")
    assert [request["content"] for request in loopd.requests] == ["one", "one", "two", "three"]
    assert {kind for kind, _ in loopd.asked} == {"turn"}


def test_before_the_turn_has_begun_nothing_is_said_to_the_one_that_runs(short_dir: Path) -> None:
    """It may be another client's: the line waits, and joins when the first event of ours has come."""
    script: Script = [
        event("queued", ahead=1),
        Wait(),
        event("content", text="So far"),
        Until("steer"),
        event("steered", content="mine"),
        done("Ah."),
    ]
    with scripted_loopd(short_dir / "s", script) as loopd:
        loopd.answers["steer"] = [[final("steered")]]
        with terminal(short_dir / "s", "--wait", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("1 ahead")
            screen.type("mine\n/fork\n")
            screen.read_until("a turn runs: /fork")  # so the line before it has been taken
            assert [kind for kind, _ in loopd.asked] == ["turn"]
            loopd.go_on.set()
            screen.read_until("[joined: mine]")
    assert [kind for kind, _ in loopd.asked] == ["turn", "steer"]


def test_a_line_that_was_typed_before_the_turn_has_begun_is_not_sent_when_the_owner_leaves(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [event("queued", ahead=1), Hang()]) as loopd:
        with terminal(short_dir / "s", "--wait", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            screen.read_until("1 ahead")
            screen.type("mine\n/cancel\n")
            screen.read_until("[did not join, and is not sent: mine]\n> ")
    assert [kind for kind, _ in loopd.asked] == ["turn"]


def test_ctrl_c_before_the_turn_has_begun_leaves_and_cancels_nobody(short_dir: Path) -> None:
    with scripted_loopd(short_dir / "s", [Hang()], [done("Hi.")]) as loopd:
        with terminal(short_dir / "s", *QUIET, environ=PLAIN_SIZE) as screen:
            begin(screen)
            assert loopd.wait_for("turn", 1)
            screen.type("\x03")
            screen.read_until("> ")
    assert [kind for kind, _ in loopd.asked] == ["turn"]
