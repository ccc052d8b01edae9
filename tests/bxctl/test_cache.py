"""`bxctl why` and `bxctl cache`, as they are typed: figures worked out by hand from a log written out."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from boxmaker.bxctl.cache import cache_table, totals_of, why_lines
from boxmaker.proto.ids import SessionId
from boxmaker.proto.ledger import REMEDY, CacheLine, CauseName
from boxmaker.proto.time import Timestamp
from boxmaker.session.ledger import LEDGER_NAME, append_lines

T = Timestamp("2026-11-30T12:00:00.000Z")
BASELINE = b'{"system":"You are a test.","tools":[]}'
S = SessionId("s")


def said(cached: int | None, read: int | None, generated: int | None, lost: tuple[int, int] | None = None) -> list[str]:
    lines = [
        f'{{"type":"user","time":"{T}","content":"?"}}',
        f'{{"type":"assistant","time":"{T}","content":"!","reasoning_content":null,"tool_calls":[]}}',
        json.dumps({
            "type": "usage", "time": T, "cache_n": cached, "prompt_n": read, "predicted_n": generated,
            "reasoning_tokens": 0, "thinking_capped": False,
        }),
    ]  # fmt: skip
    if lost is not None:
        lines.append(f'{{"type":"cache_loss","time":"{T}","expected":{lost[0]},"got":{lost[1]}}}')
    return lines


LOG = [
    f'{{"type":"session_start","time":"{T}","session":"s","epoch":0,"slot":1,"baseline":"{hashlib.sha256(BASELINE).hexdigest()}"}}',
    *said(0, 100, 21),  # leaves 120 tokens
    *said(120, 40, 11),  # leaves 170
    *said(20, 180, 1, lost=(170, 20)),  # of 200 tokens 30 were new; leaves 200
    *said(None, None, None),
    *said(90, 10, 5),
]  # fmt: skip


def line(completion: int, cached: int | None, read: int | None, generated: int | None, **more: Any) -> CacheLine:
    fields: dict[str, Any] = {
        "expected": None, "lost": 0, "prefill_ms": None, "cause": None, "detail": {}, "slot": 1, "time": T, **more
    }  # fmt: skip
    return CacheLine(completion=completion, cached=cached, read=read, generated=generated, **fields)


FIRST = line(1, 0, 100, 21, prefill_ms=1000)
SECOND = line(2, 120, 40, 11, expected=120)
THIRD = line(3, 20, 180, 1, expected=170, lost=150, prefill_ms=9000, cause="evicted", detail={"session": "other"})
WITHOUT_FIGURES = line(4, None, None, None, expected=200, lost=None)
AFTER_NONE = line(5, 90, 10, 5, expected=None, lost=None)
ALL = [FIRST, SECOND, THIRD, WITHOUT_FIGURES, AFTER_NONE]


def lay_out(home: Path, session: str = "s", log: list[str] = LOG) -> Path:
    directory = home / "sessions" / session
    directory.mkdir(parents=True)
    (directory / "0.baseline.json").write_bytes(BASELINE)
    (directory / "0.jsonl").write_text("".join(f"{text}\n" for text in log), "utf-8")
    return directory


def bxctl(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "boxmaker.bxctl", *arguments, "--home", str(home)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)


def printed(home: Path, *arguments: str) -> list[str]:
    done = bxctl(home, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.real
def test_why_tells_the_last_loss_with_cost_cause_and_remedy(tmp_path: Path) -> None:
    append_lines(lay_out(tmp_path), [FIRST, SECOND, THIRD])
    assert printed(tmp_path, "why", "s") == [
        "session s, completion 3 of 5, 2026-11-30T12:00:00.000Z",
        "lost 150 cached tokens: 20 of 170 were left, about 7.5 s",  # 9 s for 180 tokens
        "cause: evicted: session other used slot 1 since",
        f"remedy: {REMEDY['evicted']}",
    ]


@pytest.mark.real
def test_without_the_side_file_the_loss_stays_and_its_cause_is_unknown(tmp_path: Path) -> None:
    lay_out(tmp_path)
    assert printed(tmp_path, "why") == [
        "session s, completion 3 of 5, 2026-11-30T12:00:00.000Z",
        "lost 150 cached tokens: 20 of 170 were left",
        "cause: unknown",
        f"remedy: {REMEDY['unknown']}",
    ]


@pytest.mark.real
def test_the_table_as_json_has_a_line_a_completion_and_the_totals(tmp_path: Path) -> None:
    append_lines(lay_out(tmp_path), ALL)
    rows = [json.loads(text) for text in printed(tmp_path, "cache", "s", "--json")]
    kept = ("completion", "cached", "read", "generated", "lost", "cause", "prefill_ms")
    assert [tuple(row[key] for key in kept) for row in rows[:-1]] == [
        (1, 0, 100, 21, 0, None, 1000),
        (2, 120, 40, 11, 0, None, None),
        (3, 20, 180, 1, 150, "evicted", 9000),
        (4, None, None, None, None, None, None),
        (5, 90, 10, 5, None, None, None),
    ]
    # 330 read, of which 150 again: 330 / 180
    assert rows[-1] == {
        "totals": {
            "completions": 5, "cached": 230, "read": 330, "generated": 38, "lost": 150, "least": 180, "ratio": 1.833,
            "bound": False, "prefill_ms": 10000,
        }
    }  # fmt: skip


@pytest.mark.real
def test_the_table_has_bars_and_totals_of_the_newest_session(tmp_path: Path) -> None:
    lay_out(tmp_path, "old", [LOG[0].replace('"s"', '"old"')])
    directory = lay_out(tmp_path)
    os.utime(tmp_path / "sessions" / "old" / "0.jsonl", (1, 1))
    append_lines(directory, ALL)
    assert printed(tmp_path, "cache") == [
        "session s",
        "#  CACHED  READ  GENERATED  LOST  SECONDS",
        "1       0   100         21     0      1.0  " + "░" * 12,
        "2     120    40         11     0        -  " + "█" * 14 + "░" * 5,
        "3      20   180          1   150      9.0  " + "██" + "▓" * 18 + "░" * 4 + " evicted",
        "4       -     -          -     -        -",
        "5      90    10          5     -        -  " + "█" * 11 + "░",
        "█ cached  ░ read  ▓ read again",
        "330 tokens read, 180 at least, 1.83 times as much; 150 lost, 230 cached",
    ]


@pytest.mark.real
def test_a_home_without_sessions_a_damaged_log_and_an_unknown_id_are_told(tmp_path: Path) -> None:
    (tmp_path / "sessions").mkdir()
    none = bxctl(tmp_path, "why")
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr.startswith("bxctl: storage: ")
    assert "there is none" in none.stderr
    assert bxctl(tmp_path, "cache", "nobody").stderr.startswith("bxctl: no_such_session: ")
    lay_out(tmp_path, log=[LOG[0], "{}"])
    assert bxctl(tmp_path, "cache").stderr.startswith("bxctl: session_damaged: ")


@pytest.mark.real
def test_an_append_under_way_is_left_out(tmp_path: Path) -> None:
    directory = lay_out(tmp_path)
    with (directory / "0.jsonl").open("a") as log:
        log.write('{"type":"user"')
    assert len(printed(tmp_path, "cache", "--json")) == 6


def test_a_session_without_a_loss_says_so() -> None:
    assert list(why_lines(S, [FIRST])) == ["session s: no cached tokens were lost in 1 completion"]
    assert list(why_lines(S, [])) == ["session s: no cached tokens were lost in 0 completions"]


def test_a_session_without_a_completion_has_no_bars() -> None:
    assert list(cache_table(S, [])) == [
        "session s",
        "#  CACHED  READ  GENERATED  LOST  SECONDS",
        "0 tokens read, 0 at least; 0 lost, 0 cached",
    ]


def test_a_prompt_that_shrank_is_read_to_one_token_at_least() -> None:
    # 600 of 700 were lost, but the prompt had only 400 tokens: all that was read was read again
    shrunk = line(2, 100, 300, 5, expected=700, lost=600, prefill_ms=3000, cause="template")
    totals = totals_of([shrunk])
    assert (totals.read, totals.least, totals.ratio) == (300, 1, 300.0)
    assert totals_of([line(1, 5, 0, 5)]).ratio is None


@pytest.mark.parametrize(
    ("loss", "bound"),
    [
        # the template left reasoning out: nobody knows how many of the lost tokens were read again
        (line(2, 100, 300, 5, expected=700, lost=600, prefill_ms=3000, cause="template"), True),
        (line(2, 100, 300, 5, expected=200, lost=100, prefill_ms=9000, cause="template"), True),
        # nor when more was lost than was read, whatever the cause
        (line(2, 100, 300, 5, expected=400, lost=300, prefill_ms=3000), True),
        (line(2, 100, 300, 5, expected=399, lost=299, prefill_ms=3010, cause="evicted"), False),
        (line(2, 100, 0, 5, lost=0, cause=None), False),
    ],
)
def test_what_may_have_left_the_prompt_is_not_called_read_again(loss: CacheLine, bound: bool) -> None:
    assert totals_of([FIRST, loss]).bound is bound
    assert (", at most " in list(cache_table(S, [FIRST, loss]))[-1]) is bound
    if loss.lost:
        assert list(why_lines(S, [loss]))[1].endswith(", at most about 3.0 s" if bound else ", about 3.0 s")


@pytest.mark.real
def test_a_fork_is_not_charged_with_what_the_session_before_it_has_read(tmp_path: Path) -> None:
    later = "2026-11-30T12:00:01.000Z"
    own = [text.replace(T, later) for text in said(60, 90, 5, lost=(120, 60))]
    lay_out(tmp_path, log=[LOG[0].replace(T, later), *LOG[1:4], *own])
    first, totals = (json.loads(text) for text in printed(tmp_path, "cache", "--json"))
    assert (first["completion"], first["expected"], first["lost"]) == (2, 120, 60)
    assert (totals["totals"]["completions"], totals["totals"]["read"], totals["totals"]["least"]) == (1, 90, 30)
    assert printed(tmp_path, "why")[0] == f"session s, completion 2 of 2, {later}"


@pytest.mark.real
def test_an_output_without_blocks_has_bars_of_ascii(tmp_path: Path) -> None:
    append_lines(lay_out(tmp_path), ALL)
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "boxmaker.bxctl", "cache", "s", "--home", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[4].endswith("##" + "!" * 18 + "." * 4 + " evicted")
    assert lines[-2] == "# cached  . read  ! read again"


@pytest.mark.real
def test_a_line_that_is_nested_too_deep_explains_nothing(tmp_path: Path) -> None:
    directory = lay_out(tmp_path)
    append_lines(directory, [THIRD])
    file = directory / LEDGER_NAME
    deep = '{"session":' + "[" * 900 + "]" * 900 + "}"
    file.write_text(file.read_text("utf-8").replace('{"session":"other"}', deep), "utf-8")
    assert deep in file.read_text("utf-8")
    assert json.loads(printed(tmp_path, "cache", "--json")[2])["cause"] == "unknown"
    assert printed(tmp_path, "why")[2] == "cause: unknown"


CAUSES: list[tuple[CauseName, dict[str, Any], list[str]]] = [
    (
        "template",
        {"message": 3, "role": "assistant", "was": "a\x1b[1m\nb", "now": "c"},
        [
            "cause: template: the chat template renders message 3 (assistant) otherwise than before",
            "       before: a\\x1b[1m\\nb",
            "       now:    c",
        ],
    ),
    (
        "evicted",
        {"session": None, "slot_before": 0},
        ["cause: evicted: the session runs on slot 1 now, its cache was left in slot 0"],
    ),
    (
        "model",
        {"what": "n_ctx", "was": 512, "now": 2048},
        ["cause: model: the server has another n_ctx: 2048, before 512"],
    ),
    ("restarted", {}, ["cause: restarted: the server has begun anew, with an empty cache"]),
    ("foreign", {"held": 64}, ["cause: foreign: somebody else's request took slot 1; it held 64 tokens"]),
    (
        "restarted_or_foreign",
        {},
        ["cause: restarted_or_foreign: the server was restarted, or somebody else's request took the slot"],
    ),
    (
        "reread",
        {},
        ["cause: reread: the slot held all of it and the prompt goes on from there; the server read it again"],
    ),
    ("unknown", {}, ["cause: unknown"]),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "detail", "shown"), CAUSES)
def test_each_cause_has_its_words_and_its_remedy(cause: CauseName, detail: dict[str, Any], shown: list[str]) -> None:
    lines = list(why_lines(S, [FIRST, evolve(THIRD, cause=cause, detail=detail)]))
    assert lines[2:-1] == shown
    assert lines[-1] == f"remedy: {'None: it is lost once.' if 'slot_before' in detail else REMEDY[cause]}"


def test_several_losses_are_counted_and_the_last_one_is_told() -> None:
    lines = list(why_lines(S, [THIRD, evolve(THIRD, completion=4, lost=1, cause="reread")]))
    assert lines[1].startswith("lost 1 cached tokens")
    assert lines[-1] == "2 losses in all (bxctl cache s)"


@pytest.mark.parametrize(("cached", "told"), [(49, ", which did not help"), (50, "")])
def test_a_restore_is_told_and_whether_it_helped(cached: int, told: str) -> None:
    last = line(2, cached, 100, 5, expected=120, lost=120 - cached, cause="template", detail={"restored": 100})
    assert list(why_lines(S, [FIRST, last]))[-2] == f"restored 100 from disk{told}"


@pytest.mark.real
def test_a_line_of_other_figures_explains_nothing(tmp_path: Path) -> None:
    append_lines(lay_out(tmp_path), [evolve(THIRD, read=181)])
    assert (tmp_path / "sessions" / "s" / LEDGER_NAME).exists()
    assert printed(tmp_path, "why")[2] == "cause: unknown"
