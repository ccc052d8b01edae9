"""Every kind of server fault that has been reported, from the client's socket to the server's, as whole turns.

The bytes are those of `fixtures/http`; the outcomes were worked out from the reports and the design, where they
differ the design's. `endure` checks what must hold after each, whatever it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from boxmaker.proto.channel import CacheLoss, Cut, ToolCallStarted, ToolResult, WireError
from boxmaker.proto.chat import Content, Reasoning, Retrying, Waiting
from boxmaker.proto.tools import Result
from boxmaker.session.baseline import baseline_hash
from boxmaker.testing.daemon import running_daemon
from boxmaker.testing.port import ScriptedPort
from boxmaker.testing.server import STREAM_HEAD, delta, reply, scripted_server
from tests.hostile.server_world import HTTP, Aftermath, daemon_log, endure, recorded, script, voided
from tests.session.homes import BASELINE_RAW, lay_out
from tests.strict import refuse

UNKNOWN = "Unknown tool {}. The tools are clock, find_tool, call_tool; find_tool finds more, call_tool calls them."
NONE_FOUND = "No tool matches."
REPLY_CUT = "Not run: the reply was cut at its length limit. Ask again in smaller pieces."
UNPARSED = "The arguments did not parse: "
REPEATED = "Not run: this call was already made with these arguments in this turn. Its result is above."
REPEATED_AGAIN = "Not run: the same call was repeated again, so the turn was ended."
OVER = "Not run: the turn's limit of tool calls was reached."
HELLO = "Hello world."
NOTES = "Three notes: red, blue and green."


async def play(directory: Path, *names: str, empty: bool = False, text: str = "") -> Aftermath:
    return await endure(directory, *(script(name) for name in names), may_be_empty=empty, text=text)


# -- 01, 02, 03, 06, 15: calls ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["open_brace", "unterminated", "single_quotes", "trailing_text", "nan", "two_objects", "raw_newline"],
)
async def test_arguments_that_do_not_parse_run_nothing_and_poison_nothing(
    tmp_path: Path, autojump_clock: MockClock, kind: str
) -> None:
    after = await play(tmp_path, f"arguments_{kind}", "final")
    assert after.summary() == ("done", "Done.", 2)
    [result] = after.results
    assert result.startswith(UNPARSED)
    sent = after.server.completions[1].json()["messages"][2]["tool_calls"][0]
    assert sent["id"] == "call_bad1"
    assert json.loads(sent["function"]["arguments"]) == {"raw": after.said[0].tool_calls[0].arguments}


@pytest.mark.parametrize(
    ("name", "calls"),
    [("cut_call_parses_but_cut", 1), ("cut_call_does_not_parse", 1), ("cut_call_one_whole_one_cut", 2)],
)
async def test_no_call_of_a_reply_that_was_cut_is_run(
    tmp_path: Path, autojump_clock: MockClock, name: str, calls: int
) -> None:
    after = await play(tmp_path, name, "final")
    assert after.summary() == ("done", "Done.", 2)
    assert after.results == [REPLY_CUT] * calls
    assert [answer for answer in after.answers if isinstance(answer, Cut | ToolCallStarted)] == [Cut(reason="length")]


@pytest.mark.parametrize(
    "name",
    ["ids_no_id", "ids_null_and_empty_id", "ids_same_id_twice", "ids_both_index_zero", "ids_index_zero_no_ids"],
)
async def test_two_calls_are_two_calls_whatever_their_ids(tmp_path: Path, autojump_clock: MockClock, name: str) -> None:
    after = await play(tmp_path, name, "final")
    assert after.summary() == ("done", "Done.", 2)
    asked = [json.loads(call.arguments)["query"] for call in after.said[0].tool_calls]
    assert asked == ["one", "two"]
    assert after.results == [NONE_FOUND] * 2
    messages = after.server.completions[1].json()["messages"]
    ids = [call["id"] for call in messages[2]["tool_calls"]]
    assert len(set(ids)) == 2
    assert [message["tool_call_id"] for message in messages[3:]] == ids


async def test_an_id_that_was_used_before_gets_another(tmp_path: Path, autojump_clock: MockClock) -> None:
    after = await play(tmp_path, "ids_id_used_again_1", "ids_id_used_again_2", "final")
    assert after.summary() == ("done", "Done.", 3)
    assert [call.id for said in after.said for call in said.tool_calls] == ["call_0", "call_0"]
    sent = [call["id"] for m in after.server.completions[2].json()["messages"] for call in m.get("tool_calls", [])]
    assert sent == ["call_0", "c00000001"]


@pytest.mark.parametrize(
    ("name", "result", "resent"),
    [
        ("names_leading_space", NONE_FOUND, "find_tool"),
        ("names_trailing_newline", NONE_FOUND, "find_tool"),
        ("names_name_in_two_pieces", NONE_FOUND, "find_tool"),
        ("turns/names_unknown", UNKNOWN.format("'read_fiel'"), "read_fiel"),
        ("turns/names_wrong_case", UNKNOWN.format("'Find_Tool'"), "Find_Tool"),
        ("names_empty", UNKNOWN.format("''"), "unnamed"),
        ("names_null", UNKNOWN.format("''"), "unnamed"),
        ("unclean_nul_in_name", UNKNOWN.format("'find_��tool'"), "find_��tool"),
    ],
)
async def test_a_name_is_found_or_the_model_is_told(
    tmp_path: Path, autojump_clock: MockClock, name: str, result: str, resent: str
) -> None:
    after = await play(tmp_path, name, "final")
    assert after.summary() == ("done", "Done.", 2)
    assert after.results == [result]
    assert after.server.completions[1].json()["messages"][2]["tool_calls"][0]["function"]["name"] == resent


async def test_unknown_names_in_a_row_end_at_the_iteration_limit(tmp_path: Path, autojump_clock: MockClock) -> None:
    after = await endure(tmp_path, *(reply(calls=[(f"c{n}", f"tool_{n}", "{}")]) for n in range(9)))
    assert after.summary() == ("turn_limit", {"limit": "tool_iterations", "value": 8}, 9)
    assert after.results == [*(UNKNOWN.format(f"'tool_{n}'") for n in range(8)), OVER]


@pytest.mark.parametrize(
    ("kind", "asked", "detail", "results"),
    [
        # four texts of one call: each is another call until the first comes again, then the second
        ("identical", 6, ("repeat_detection", 2), [NONE_FOUND] * 4 + [REPEATED, REPEATED_AGAIN]),
        ("alternating", 4, ("repeat_detection", 2), [NONE_FOUND] * 2 + [REPEATED, REPEATED_AGAIN]),
        ("always_new", 9, ("tool_iterations", 8), [NONE_FOUND] * 8 + [OVER]),
    ],
)
async def test_a_loop_of_calls_is_stopped_and_named(
    tmp_path: Path, autojump_clock: MockClock, kind: str, asked: int, detail: tuple[str, int], results: list[str]
) -> None:
    after = await play(tmp_path, *(f"turns/loops_{kind}_{n}" for n in range(1, asked + 1)))
    assert after.summary() == ("turn_limit", {"limit": detail[0], "value": detail[1]}, asked)
    assert after.results == results


# -- 09: only reasoning ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "thoughts", "content", "cut"),
    [
        ("thinking_stop", "The user wants a greeting. I will greet.", "", []),
        ("thinking_length", "Hmm, let me think", "", [Cut(reason="length")]),
        ("thinking_empty_content_deltas", "ok", "\n", []),
        ("thinking_reasoning_key", "thinking under another key", "Hi.", []),
    ],
)
async def test_reasoning_alone_ends_the_turn_with_what_there_is(
    tmp_path: Path, autojump_clock: MockClock, name: str, thoughts: str, content: str, cut: list[Cut]
) -> None:
    after = await play(tmp_path, name, empty=True)
    assert after.summary() == ("done", content, 1)
    assert after.thoughts == thoughts
    assert [answer for answer in after.answers if isinstance(answer, Cut)] == cut


async def test_text_like_a_call_inside_reasoning_never_runs(tmp_path: Path, autojump_clock: MockClock) -> None:
    after = await play(tmp_path, "thinking_call_text_in_reasoning", empty=True)
    assert after.summary() == ("done", "", 1)
    assert "find_tool" in after.thoughts
    assert not [answer for answer in after.answers if isinstance(answer, ToolCallStarted)]


async def test_thinking_without_end_is_closed_at_the_cap(tmp_path: Path, autojump_clock: MockClock) -> None:
    thoughts = delta(reasoning_content="wait, again. ") * 3000
    after = await endure(tmp_path, STREAM_HEAD + thoughts, text="[thinking]\ncap = 100\n", may_be_empty=True)
    assert after.summary() == ("done", "", 1)
    assert Cut(reason="thinking_cap") in after.answers
    assert sum(isinstance(answer, Reasoning) for answer in after.answers) == 100 + 256


# -- 18, 19, 22: bytes and characters --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "cut"),
    [
        ("bytes_split_in_characters", "漢字 🙂 naïve e\u0301 👨\u200d👩\u200d👧.", []),
        ("bytes_invalid_bytes", "before \ufffd middle \ufffd after.", []),
        ("bytes_last_character_half", "half \ufffd", [Cut(reason="length")]),
        ("unclean_lone_surrogate", "smile \ufffd end.", []),
        ("unclean_pair_over_two_deltas", "smile 🙂 end.", []),
        ("unclean_nul_in_text", "a\ufffdb.", []),
    ],
)
async def test_a_text_is_the_same_in_the_channel_the_log_and_the_next_request(
    tmp_path: Path, autojump_clock: MockClock, name: str, content: str, cut: list[Cut]
) -> None:
    after = await play(tmp_path, name)
    assert after.summary() == ("done", content, 1)
    assert "".join(answer.text for answer in after.answers if isinstance(answer, Content)) == content
    assert after.said[0].content == content
    assert after.server.completions[1].json()["messages"][2]["content"] == content
    assert [answer for answer in after.answers if isinstance(answer, Cut)] == cut


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("unclean_surrogate_in_arguments", UNPARSED + "holds a lone surrogate"),
        ("unclean_nul_in_arguments", NONE_FOUND),
    ],
)
async def test_unclean_arguments_are_answered(
    tmp_path: Path, autojump_clock: MockClock, name: str, result: str
) -> None:
    after = await play(tmp_path, name, "final")
    assert after.summary() == ("done", "Done.", 2)
    assert after.results == [result]


BINARY = b"\x7fELF\x02\x01\x00\x00 text \xff\xfe\xed\xa0\xbd \x00 end\n"


@pytest.mark.parametrize(
    ("given", "stored", "truncated"),
    [
        # three bytes of a surrogate are three bad bytes; "surrogateescape" makes five lone surrogates of all bad ones
        (BINARY.decode("utf-8", "replace"), "\x7fELF\x02\x01�� text ����� � end\n", False),
        (BINARY.decode("utf-8", "surrogateescape"), "\x7fELF\x02\x01�� text ����� � end\n", False),
        ("x" * 16384, "x" * 16384, False),
        ("x" * 16385, "x" * 16384 + "[truncated]", True),
        ("x" * 3_000_000, "x" * 16384 + "[truncated]", True),
        ("x" * 16383 + "€", "x" * 16383 + "[truncated]", True),
        ("€" * 6000, "€" * 5461 + "[truncated]", True),
        ("x" * 16382 + "🙂", "x" * 16382 + "[truncated]", True),
    ],
    ids=["replaced", "escaped", "the cap", "one over", "huge", "euro", "three bytes each", "emoji"],
)
async def test_a_result_is_clean_cut_at_a_character_and_the_same_everywhere(
    tmp_path: Path, autojump_clock: MockClock, given: str, stored: str, truncated: bool
) -> None:
    port = ScriptedPort([Result(content=given, class_="private", untrusted=True, truncated=False)])
    after = await endure(tmp_path, reply(calls=[("a", "clock", "{}")]), recorded("final"), port=port)
    assert after.summary() == ("done", "Done.", 2)
    assert after.results == [stored]
    assert after.server.completions[1].json()["messages"][3]["content"] == stored
    assert ToolResult(name="clock", class_="private", truncated=truncated, untrusted=True) in after.answers


# -- 25, 27, 28, 31: the stream and its end --------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "dialect_crlf",
        "dialect_cr_only",
        "dialect_comments",
        "dialect_no_space_after_colon",
        "dialect_other_fields",
        "dialect_empty_data_events",
        "dialect_multi_line_data",
        "dialect_byte_order_mark",
        "dialect_no_blank_line_at_end",
        "dialect_odd_chunks",
        "dialect_done_twice",
        "turns/dialect_one_byte_at_a_time",
        "end_finish_but_no_done",
        "end_done_but_no_finish",
        "foreign_sse_with_wrong_type",
    ],
)
async def test_every_dialect_says_the_same(tmp_path: Path, autojump_clock: MockClock, name: str) -> None:
    after = await play(tmp_path, name)
    assert after.summary() == ("done", HELLO, 1)
    assert voided(after.answers) == HELLO
    assert after.events == ["turn_end"], "nothing to warn of"


@pytest.mark.parametrize(
    "name",
    [
        "end_neither",
        "end_empty_body",
        "end_only_done",
        "end_role_only",
        "end_cut_in_a_line",
        "end_cut_in_a_tool_call",
        "end_whole_call_no_finish_no_done",
    ],
)
async def test_a_stream_without_its_end_is_tried_again_and_no_call_of_it_runs(
    tmp_path: Path, autojump_clock: MockClock, name: str
) -> None:
    after = await play(tmp_path, name, "final")
    assert after.summary() == ("done", "Done.", 2)
    assert voided(after.answers) == "Done."
    assert after.results == []


@pytest.mark.parametrize("name", ["end_neither", "end_empty_body", "end_only_done", "end_role_only"])
async def test_a_stream_that_never_has_its_end_is_an_error_after_the_tries(
    tmp_path: Path, autojump_clock: MockClock, name: str
) -> None:
    after = await play(tmp_path, *[name] * 5)
    assert after.summary() == ("inference", {"attempts": 5}, 5)
    assert after.said == []


@pytest.mark.parametrize(
    "name",
    [
        "drop_after_text",
        "drop_before_text",
        "drop_in_tool_call",
        "drop_after_reasoning",
        "turns/drop_reset_after_text",
        "turns/drop_reset_before_headers",
    ],
)
async def test_a_connection_that_breaks_is_tried_again_and_no_text_stands_twice(
    tmp_path: Path, autojump_clock: MockClock, name: str
) -> None:
    after = await play(tmp_path, name, "turns/drop_full")
    assert after.summary() == ("done", NOTES, 2)
    assert voided(after.answers) == NOTES
    assert sum(isinstance(answer, Retrying) for answer in after.answers) == 1
    assert [said.content for said in after.said] == [NOTES]
    assert after.results == []


@pytest.mark.parametrize(
    ("names", "ending", "words"),
    [
        (["foreign_json_instead_of_stream"], ("inference", {}, 1), "application/json"),
        (["foreign_html_200"], ("inference", {}, 1), "text/html"),
        (["foreign_html_502"] * 5, ("inference", {"status": 502, "attempts": 5}, 5), "text/html"),
        (["foreign_empty_502"] * 5, ("inference", {"status": 502, "attempts": 5}, 5), "an empty body"),
        (["foreign_json_not_an_object_500"] * 2, ("inference", {"status": 500, "attempts": 2}, 2), "500"),
        (["foreign_latin1_error_500"] * 2, ("inference", {"status": 500, "attempts": 2}, 2), "500"),
    ],
)
async def test_a_body_that_is_no_stream_is_a_named_error(
    tmp_path: Path, autojump_clock: MockClock, names: list[str], ending: tuple[str, Any, int], words: str
) -> None:
    after = await play(tmp_path, *names)
    assert after.summary() == ending
    assert words in after.error.message
    assert "\n" not in after.error.message
    assert len(after.error.message) < 400


@pytest.mark.parametrize("name", ["foreign_html_502", "foreign_empty_502"])
async def test_a_proxy_that_fails_for_a_moment_is_tried_again(
    tmp_path: Path, autojump_clock: MockClock, name: str
) -> None:
    after = await play(tmp_path, name, "final")
    assert after.summary() == ("done", "Done.", 2)


# -- 32, 34: statuses ------------------------------------------------------------------------------


async def test_a_loading_model_is_waited_for_and_said_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    after = await play(tmp_path, "status_503_loading", "status_503_loading", "final")
    assert after.summary() == ("done", "Done.", 3)
    assert [answer for answer in after.answers if isinstance(answer, Waiting)] == [Waiting(slot_busy=False)]


@pytest.mark.parametrize(
    ("header", "after_ms"),
    [
        ("seconds_1", 1000),
        ("float", 500),
        ("seconds_3600", 10000),
        ("huge", 10000),
        ("date_2099", 10000),
        # the usual back-off at its most
        ("date_past", 500),
        ("negative", 500),
        ("word", 500),
        ("none", 500),
    ],
)
async def test_a_429_waits_as_long_as_it_says_up_to_the_cap(
    tmp_path: Path, autojump_clock: MockClock, header: str, after_ms: int
) -> None:
    after = await play(tmp_path, f"status_429_{header}", "final")
    assert after.summary() == ("done", "Done.", 2)
    assert [answer.after_ms for answer in after.answers if isinstance(answer, Retrying)] == [after_ms]


@pytest.mark.parametrize("kind", ["history_arguments", "template", "load_failed", "output_parse", "plain"])
async def test_a_500_is_retried_once_and_then_said(tmp_path: Path, autojump_clock: MockClock, kind: str) -> None:
    after = await play(tmp_path, *[f"status_500_{kind}"] * 2)
    assert after.summary() == ("inference", {"status": 500, "attempts": 2}, 2)
    assert json.loads(recorded(f"status_500_{kind}").partition(b"\r\n\r\n")[2])["error"]["message"] in (
        after.error.message
    )


@pytest.mark.parametrize(("name", "status"), [("status_400_plain", 400), ("status_401", 401), ("status_404", 404)])
async def test_what_will_not_pass_is_not_tried_again(
    tmp_path: Path, autojump_clock: MockClock, name: str, status: int
) -> None:
    after = await play(tmp_path, name)
    assert after.summary() == ("inference", {"status": status}, 1)


@pytest.mark.parametrize(
    "kind",
    [
        "typed",
        "no_type",
        "2025_wording",
        "500_while_generating",
        "shift_disabled",
        "openai_code",
        "type_only",
        "in_stream_data",
        "in_stream_error_field",
        "mid_answer",
    ],
)
async def test_a_full_context_is_said_so_in_every_form_after_one_request(
    tmp_path: Path, autojump_clock: MockClock, kind: str
) -> None:
    after = await play(tmp_path, f"full_{kind}")
    assert after.summary() == ("session_full", {}, 1)
    assert voided(after.answers) == ""
    assert after.said == []


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        ("other_400", ("inference", {"status": 400}, 1)),
        ("number_of_images", ("inference", {"status": 400}, 1)),
        ("finish_length", ("done", "cut by max_tokens", 1)),
    ],
)
async def test_what_only_looks_like_a_full_context_is_none(
    tmp_path: Path, autojump_clock: MockClock, kind: str, ending: tuple[str, Any, int]
) -> None:
    assert (await play(tmp_path, f"full_not_{kind}")).summary() == ending


# -- 38: figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence", "turns", "losses"),
    [
        ("s00", 2, {}),
        ("s01", 2, {2: CacheLoss(expected=1049, got=0)}),
        ("s02", 2, {2: CacheLoss(expected=1599, got=990)}),
        ("s03", 2, {2: CacheLoss(expected=5049, got=300)}),
        ("s04", 2, {}),
        ("s05", 2, {}),
        ("s06", 2, {}),
        ("s07", 3, {}),
        ("s08", 5, {}),
        ("s09", 3, {2: CacheLoss(expected=1019, got=1015), 3: CacheLoss(expected=1234, got=1230)}),
    ],
)
async def test_a_cache_loss_is_told_from_the_figures_that_there_are(
    tmp_path: Path, autojump_clock: MockClock, sequence: str, turns: int, losses: dict[int, CacheLoss]
) -> None:
    scripts = [recorded(f"timings_{sequence}_turn{n}") for n in range(1, turns + 1)]
    told: dict[int, CacheLoss] = {}
    with daemon_log() as events:
        async with scripted_server(*scripts) as server, running_daemon(tmp_path, server.url) as daemon:
            server.refuse_history = refuse
            for n in range(1, turns + 1):
                answers = await daemon.turn("s", f"Turn {n}.", resume=n > 1)
                assert not isinstance(answers[-1], WireError)
                for answer in answers:
                    if isinstance(answer, CacheLoss):
                        assert n not in told, "once a completion"
                        told[n] = answer
    assert told == losses
    assert [event for event in events if event != "model_changed"] == ["turn_end"] * turns


# -- 48: histories that others left behind ---------------------------------------------------------

HISTORIES = sorted((HTTP.parent / "sessions" / "history-repair").glob("*.jsonl"))
MUST_WORK = "adefgi"


@pytest.mark.parametrize("file", HISTORIES, ids=lambda file: file.stem)
async def test_a_history_left_behind_goes_on_or_is_refused_by_file_and_line(
    tmp_path: Path, autojump_clock: MockClock, file: Path
) -> None:
    raw = file.read_bytes()  # noqa: ASYNC240  # a small file, before anything runs
    log = raw.replace(b"<sha-256 of 0.baseline.json>", baseline_hash(BASELINE_RAW).encode())
    session = f"case-{file.stem[0]}"
    users = [record["content"] for record in map(json.loads, log.splitlines()) if record["type"] == "user"]
    async with scripted_server() as server, running_daemon(tmp_path, server.url) as daemon:
        server.refuse_history = refuse
        lay_out(daemon.config.paths.home, log, session=session)
        server.scripts = [recorded("final")]
        answers = await daemon.turn(session, "continue", resume=True)
        last = answers[-1]
        if isinstance(last, WireError):
            assert file.stem[0] not in MUST_WORK, last
            assert last.code.value == "session_damaged"
            assert str(last.detail["file"]).endswith(f"{session}/0.jsonl")
            assert type(last.detail["line"]) is int
            assert (daemon.store.directory / session / "0.jsonl").read_bytes() == log, "nothing was changed"
            assert server.completions == []
            return
        [request] = server.completions
        sent = [message["content"] for message in request.json()["messages"] if message["role"] == "user"]
        assert sent == [*users, "continue"]
        assert not [answer for answer in answers if isinstance(answer, ToolCallStarted)], "no tool is run again"
    async with scripted_server(recorded("final")) as server, running_daemon(tmp_path, server.url) as daemon:
        server.refuse_history = refuse
        await daemon.ask(session, "and again", resume=True)
        before = request.body[: request.body.rindex(b'],"tools":')]
        assert server.bodies[0].startswith(before), "a restart sends the same bytes"
