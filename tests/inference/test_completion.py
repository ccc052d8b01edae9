"""Chunks to events and one completion: whole fixtures, each rule by itself, and arbitrary chunks."""

from __future__ import annotations

import json
import sys
import tracemalloc
from itertools import pairwise
from types import FrameType
from typing import Any, Literal

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.errors import InferenceError
from boxmaker.inference.completion import (
    BUDGET_MESSAGE,
    CALL_BYTES,
    CAP_MARGIN_TOKENS,
    Completion,
    CompletionAssembler,
    clean_text,
    error_of,
    one_line,
)
from boxmaker.inference.sse import SseEvent
from boxmaker.proto.chat import Content, Progress, Reasoning, ThinkingCapped, ToolCall, ToolCallDelta
from tests.inference.recordings import (
    DONE,
    END,
    STREAMS,
    Outcome,
    assemble,
    call_event,
    chunk_event,
    decode,
    delta_event,
    in_steps,
    load,
    piece,
    read,
    read_fixture,
    refusal,
    unhurried,
)

SMOLLM2 = "/srv/llamacpp/models/SmolLM2-135M-Instruct.Q4_1.gguf"
Cut = Literal["length", "thinking_cap"]
Figures = tuple[int | None, int | None, int | None]
NO_FIGURES: Figures = (None, None, None)


def whole(
    content: str | None = None,
    *,
    reasoning: str | None = None,
    reasoning_tokens: int = 0,
    calls: tuple[tuple[str, str, str], ...] = (),
    cut: Cut | None = None,
    figures: Figures = (236, 18, 12),
    capped: bool = False,
    model: str | None = "test-model",
) -> Completion:
    """A completion; the defaults are what most inputs from fault reports have."""
    return Completion(
        content=content,
        reasoning_content=reasoning,
        tool_calls=tuple(ToolCall(id=id_, name=name, arguments=arguments) for id_, name, arguments in calls),
        cut=cut,
        cache_n=figures[0],
        prompt_n=figures[1],
        predicted_n=figures[2],
        reasoning_tokens=reasoning_tokens,
        thinking_capped=capped,
        model=model,
    )


def recorded(content: str | None, figures: Figures, **fields: Any) -> Completion:
    return whole(content, figures=figures, model=SMOLLM2, **fields)


def find(call_id: str, arguments: str, name: str = "find_tool") -> Completion:
    return whole(calls=((call_id, name, arguments),))


ONE_AND_TWO = ('{"query":"one"}', '{"query":"two"}')
ABC = '{"query":"abc"}'


def one_and_two(first_id: str, second_id: str) -> Completion:
    return whole(calls=((first_id, "find_tool", ONE_AND_TWO[0]), (second_id, "find_tool", ONE_AND_TWO[1])))


REPLIES = {
    # recordings of a real server
    "plain_usage_progress": recorded("There are no three colours.", (6, 19, 7)),
    "plain_minimal": recorded("Hello, welcome to my little corner of the world!", (0, 36, 12)),
    "progress_many": recorded("The original", (24, 1497, 2), cut="length"),
    "sse_ping": recorded("The original", (24, 1497, 2), cut="length"),
    "verbose": recorded("Hello!", (31, 1, 2), cut="length"),
    "utf8": recorded("日本語 🚀 é ü — naïve café ✓ Ω", (24, 26, 24)),
    "unicode_line_separators": recorded("a\u2028b\x85c\u2029d \x1c e\x0bf", (0, 31, 19)),
    "reasoning": recorded(
        "It is 4 (四).",
        (0, 36, 50),
        reasoning="The user wants a sum; 2+2 is 4 — trivial ✓.\n",
        reasoning_tokens=27,
    ),
    "reasoning_then_call": recorded(
        None,
        (0, 477, 60),
        reasoning="Now I need the files tool, so I call find_tool.\n",
        reasoning_tokens=15,
        calls=(("exZF5Ng9kZu4zv5mQ4kN7fKORQvnoLo3", "find_tool", '{"query": "file", "limit": 2}'),),
    ),
    "budget_message": recorded(  # fired with another message than ours, so nobody can tell
        'The answer to the question "2+2" is "3"',
        (35, 1, 39),
        reasoning='In this context, "2+2" is [budget exhausted, answer now]\n',
        reasoning_tokens=18,
    ),
    "find_tool": recorded(
        None,
        (0, 368, 36),
        calls=(("OKvGkoXSTPEszknBiDm7gfvXTFCdYF90", "find_tool", '{"query": "files", "limit": 2}'),),
    ),
    "call_tool": recorded(
        None,
        (66, 485, 65),
        calls=(
            (
                "zlv1HVUcQMSXorZnJvbZiw2GK9O013Uz",
                "call_tool",
                '{"name": "fs.write", "arguments": {"path": "/tmp/a b.txt",'
                ' "options": {"encoding": "latin-1", "limit": 4}}}',
            ),
        ),
    ),
    "parallel_calls": recorded(
        None,
        (225, 333, 73),
        calls=(
            ("2ytPGemSskLMxsouffKlZ9vTOpiYTYGQ", "find_tool", '{"query": "file", "limit": 2}'),
            ("qDMZVYtOmaKj9mNazv0CtMALNLsuecwM", "find_tool", '{"query": "file api", "limit": 2}'),
        ),
    ),
    "content_then_call": recorded(
        "I will look that up now.\n",
        (225, 204, 44),
        calls=(("6QOwDsdeihwlUXXSbBuP0jSiVMb0fLsO", "find_tool", '{"query": "file", "limit": 2}'),),
    ),
    "cut_in_text": recorded("Once upon a time, in", (24, 14, 6), cut="length"),
    "cut_in_reasoning": recorded(
        None,
        (35, 1, 16),
        reasoning='In this context, "2+2" is a mathematical operation that represents',
        reasoning_tokens=15,
        cut="length",
    ),
    "cut_in_call": recorded(
        None,
        (550, 1, 24),
        calls=(("jEWqWjxumLxtI3sual7c3zzDsxKUIBTt", "call_tool", '{"name": "fs.write'),),
        cut="length",
    ),
    "cut_before_call": recorded(None, (550, 1, 2), cut="length"),
    # inputs from fault reports
    "final": whole("Done."),
    "arguments_open_brace": find("call_bad1", "{"),
    "arguments_unterminated": find("call_bad1", '{"query":"half of a str'),
    "arguments_single_quotes": find("call_bad1", "{'query': 'abc'}"),
    "arguments_trailing_text": find("call_bad1", '{"query":"abc"} and then some'),
    "arguments_nan": find("call_bad1", '{"query":"abc","limit":NaN}'),
    "arguments_two_objects": find("call_bad1", '{"query":"a"}{"query":"b"}'),
    "arguments_raw_newline": find("call_bad1", '{"query":"line one\nline two"}'),
    "cut_call_parses_but_cut": whole(
        calls=(("call_cut1", "call_tool", '{"name":"write_note","arguments":{"text":"first half of"}}'),), cut="length"
    ),
    "cut_call_does_not_parse": whole(
        calls=(("call_cut2", "call_tool", '{"name":"write_note","arguments":{"text":"first ha'),), cut="length"
    ),
    "cut_call_one_whole_one_cut": whole(
        calls=(
            ("call_cut3", "find_tool", '{"query":"notes"}'),
            ("call_cut4", "call_tool", '{"name":"write_note","argum'),
        ),
        cut="length",
    ),
    "ids_no_id": one_and_two("", ""),
    "ids_null_and_empty_id": one_and_two("", ""),
    "ids_same_id_twice": one_and_two("call_same", "call_same"),
    "ids_both_index_zero": one_and_two("call_i1", "call_i2"),
    "ids_index_zero_no_ids": one_and_two("", ""),
    "ids_id_used_again_1": find("call_0", ONE_AND_TWO[0]),
    "ids_id_used_again_2": find("call_0", ONE_AND_TWO[1]),
    "names_leading_space": find("call_nm1", ABC, " find_tool"),
    "names_trailing_newline": find("call_nm1", ABC, "find_tool\n"),
    "names_empty": find("call_nm1", ABC, ""),
    "names_null": find("call_nm1", ABC, ""),
    "names_name_in_two_pieces": find("call_nm2", ABC),
    "thinking_stop": whole(reasoning="The user wants a greeting. I will greet.", reasoning_tokens=3),
    "thinking_length": whole(reasoning="Hmm, let me think", reasoning_tokens=3, cut="length"),
    "thinking_call_text_in_reasoning": whole(
        reasoning="I should search. <tool_call>\n<function=find_tool>\n<parameter=query>\nabc\n"
        "</parameter>\n</function>\n</tool_call>",
        reasoning_tokens=2,
    ),
    "thinking_empty_content_deltas": whole("\n", reasoning="ok", reasoning_tokens=1),
    "thinking_reasoning_key": whole("Hi.", reasoning="thinking under another key", reasoning_tokens=2),
    "bytes_split_in_characters": whole("漢字 🙂 naïve e\u0301 👨\u200d👩\u200d👧."),
    "bytes_invalid_bytes": whole("before \ufffd middle \ufffd after."),
    "bytes_last_character_half": whole("half \ufffd", cut="length"),
    "unclean_lone_surrogate": whole("smile \ufffd end."),
    "unclean_pair_over_two_deltas": whole("smile 🙂 end."),
    "unclean_surrogate_in_arguments": find("call_su1", '{"query":"x\\udc97y"}'),
    "unclean_nul_in_text": whole("a\ufffdb."),
    "unclean_nul_in_name": find("call_nu1", ABC, "find_\ufffd\ufffdtool"),
    "unclean_nul_in_arguments": find("call_nu2", '{"query":"a\\u0000b"}'),
    "dialect_crlf": whole("Hello world."),
    "dialect_cr_only": whole("Hello world."),
    "dialect_comments": whole("Hello world."),
    "dialect_no_space_after_colon": whole("Hello world."),
    "dialect_other_fields": whole("Hello world."),
    "dialect_empty_data_events": whole("Hello world."),
    "dialect_multi_line_data": whole("Hello world."),
    "dialect_byte_order_mark": whole("Hello world."),
    "dialect_no_blank_line_at_end": whole("Hello world."),
    "dialect_odd_chunks": whole("Hello world."),
    "dialect_done_twice": whole("Hello world."),
    "foreign_sse_with_wrong_type": whole("Hello world."),
    "end_finish_but_no_done": whole("Hello world."),
    "end_done_but_no_finish": whole("Hello world.", figures=NO_FIGURES),
    "full_not_finish_length": whole("cut by max_tokens", cut="length"),
}

BROKEN = [
    "end_neither",
    "end_empty_body",
    "end_only_done",
    "end_role_only",
    "end_cut_in_a_line",
    "end_cut_in_a_tool_call",
    "end_whole_call_no_finish_no_done",
    "drop_after_text",
    "drop_before_text",
    "drop_in_tool_call",
    "drop_after_reasoning",
]
"""Streams that stop before their end."""

ERRORS = {
    "midstream_error": (
        500,
        "server_error",
        "The model produced output that does not match the expected peg-native format",
    ),
    "full_in_stream_data": (
        400,
        "exceed_context_size_error",
        "request (9001 tokens) exceeds the available context size (8192 tokens), try increasing it",
    ),
    "full_in_stream_error_field": (
        400,
        "invalid_request_error",
        "the request exceeds the available context size. try increasing the context size or enable context shift",
    ),
    "full_mid_answer": (500, "server_error", "Context size has been exceeded."),
}
"""Streams that hold an error: its status, type and words."""

FOREIGN = ["foreign_html_200", "foreign_json_instead_of_stream", "whole_json"]
TIMINGS = [name for name in STREAMS if name.startswith("timings_")]  # in test_cache.py


# -- whole fixtures ---------------------------------------------------------------------------------


def test_every_stream_among_the_fixtures_has_its_outcome_written_out() -> None:
    assert sorted([*REPLIES, *BROKEN, *ERRORS, *FOREIGN, *TIMINGS]) == STREAMS


@pytest.mark.parametrize("name", REPLIES)
def test_a_whole_stream_gives_its_reply(name: str) -> None:
    reply = evolve(read_fixture(name).reply(), prefill_ms=None)  # a time of its own for each recording
    assert reply == REPLIES[name]


@pytest.mark.parametrize(
    ("prompt_ms", "prefill_ms"),
    [
        *((654.149, 654), (654.5, 654), (655.5, 656), (0, 0), (12, 12), (2**53 - 1, 2**53 - 1)),
        *((None, None), ("7", None), (True, None), (-0.1, None), (2**53, None)),
    ],
)
def test_the_time_of_the_prefill_is_whole_milliseconds(prompt_ms: object, prefill_ms: int | None) -> None:
    last = chunk_event({"choices": [], "timings": {"prompt_n": 3, "prompt_ms": prompt_ms}})
    assert assemble([delta_event(content="a"), END, last]).reply().prefill_ms == prefill_ms


def test_a_recorded_time_of_the_prefill_is_taken() -> None:
    assert read_fixture("end_finish_but_no_done").reply().prefill_ms == 31


def test_a_stream_that_we_close_has_no_time_of_a_prefill() -> None:
    flood = [delta_event(reasoning_content="x")] * (2 + 256)
    late = chunk_event({"choices": [], "timings": {"prompt_ms": 5}})
    assert assemble([late, *flood], thinking_cap=2).reply().prefill_ms is None


@pytest.mark.parametrize("name", REPLIES)
def test_the_events_joined_are_the_reply(name: str) -> None:
    outcome = read_fixture(name)
    check_laws(outcome)
    check_calls(outcome)


@pytest.mark.parametrize("name", sorted({*STREAMS} - {*FOREIGN}))
def test_a_stream_read_byte_by_byte_gives_the_same_events_and_the_same_reply(name: str) -> None:
    body = load(name).body
    assert without_error(read(in_steps(body, 1))) == without_error(read([body]))


@pytest.mark.parametrize("name", BROKEN)
def test_a_stream_that_stops_before_its_end_is_broken(name: str) -> None:
    error = read_fixture(name).failure()
    assert (error.kind, error.status) == ("broken", None)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_in_the_stream_counts_as_the_status_in_its_code(name: str) -> None:
    status, error_type, message = ERRORS[name]
    error = read_fixture(name).failure()
    assert error.kind == "http"
    assert (error.status, error.error_type, error.server_message) == (status, error_type, message)
    assert str(error) == f"the server answered {status}: {message}"
    assert error.detail() == {"status": status}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_body_in_place_of_a_stream_gives_no_event(name: str) -> None:
    body = load(name).body
    decoded = decode([body])
    assert (decoded.events, decoded.foreign) == ([], body)


def test_nothing_of_the_reply_is_given_after_the_first_done() -> None:
    assert read_fixture("dialect_done_twice").events == [Content(text="Hello"), Content(text=" world.")]


def test_what_a_real_server_sends_becomes_events_one_by_one() -> None:
    assert read_fixture("plain_usage_progress").events == [
        Progress(total=25, cache=6, processed=6),
        Progress(total=25, cache=6, processed=25),
        *(Content(text=text) for text in ("There", " are", " no", " three", " colours", ".")),
    ]


def test_a_call_after_text_becomes_pieces_of_a_call() -> None:
    events = read_fixture("content_then_call").events
    call_id = "6QOwDsdeihwlUXXSbBuP0jSiVMb0fLsO"
    assert events[:9] == [
        *(Content(text=text) for text in ("I", " will", " look", " that", " up", " now", ".", "\n")),
        ToolCallDelta(index=0, id=call_id, name="find_tool", arguments="{"),
    ]
    assert events[9:] == [
        ToolCallDelta(index=0, id="", name="", arguments=text)
        for text in ('"', "query", '":', ' "', "file", '",', ' "', "limit", '":', " 2", "}")
    ]


def test_progress_is_given_batch_by_batch() -> None:
    progress = [event for event in read_fixture("progress_many").events if isinstance(event, Progress)]
    assert [event.processed for event in progress] == [*range(24, 1497, 64), 1521]
    assert {(event.total, event.cache) for event in progress} == {(1521, 24)}


# -- the end ----------------------------------------------------------------------------------------


def test_stop_with_nothing_at_all_is_a_normal_empty_reply() -> None:
    outcome = assemble([END])
    assert outcome.reply() == whole(figures=NO_FIGURES, model=None)
    assert outcome.events == []


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "content_filter", "eos"])
def test_only_the_reason_length_is_a_cut(reason: str) -> None:
    assert assemble([delta_event(content="a"), delta_event(reason)]).reply().cut is None
    assert assemble([delta_event(content="a"), delta_event("length")]).reply().cut == "length"


@pytest.mark.parametrize("reason", [None, "", 0, False, ["stop"]])
def test_a_finish_reason_that_is_no_text_ends_nothing(reason: Any) -> None:
    chunk = chunk_event({"choices": [{"delta": {"content": "a"}, "finish_reason": reason}]})
    assert assemble([chunk]).failure().kind == "broken"


@pytest.mark.parametrize(
    "delta",
    [delta_event(content="a"), delta_event(reasoning_content="a"), call_event(piece(0, "x", "clock", "{}"))],
)
def test_done_after_a_delta_is_an_end_and_before_any_is_a_broken_stream(delta: SseEvent) -> None:
    assert assemble([delta, DONE]).reply().cut is None
    assert assemble([DONE, delta]).failure().kind == "broken"


@pytest.mark.parametrize(
    "nothing",
    [
        delta_event(role="assistant", content=None),
        delta_event(role="assistant", content=""),
        delta_event(reasoning_content=""),
        delta_event(tool_calls=[]),
        chunk_event({"prompt_progress": {"total": 2, "cache": 0, "processed": 1}}),
        SseEvent("message", ""),
        SseEvent("message", " \n"),
    ],
)
def test_what_is_no_delta_begins_nothing(nothing: SseEvent) -> None:
    assembler = CompletionAssembler(thinking_cap=10, reply_max_bytes=1000)
    assembler.feed(nothing)
    assert not assembler.begun
    assert assemble([nothing, DONE]).failure().kind == "broken"
    assert assemble([nothing]).failure().kind == "broken"


def test_after_the_end_only_figures_are_read() -> None:
    usage = chunk_event({"choices": [{"delta": {"content": "late"}}], "timings": {"cache_n": 5}})
    outcome = assemble([delta_event(content="a"), END, usage, delta_event("length", reasoning_content="late")])
    assert outcome.events == [Content(text="a")]
    assert outcome.reply() == whole("a", figures=(5, None, None), model=None)


@pytest.mark.parametrize(
    "late",
    [
        SseEvent("message", '{"choices":[],"usa'),
        SseEvent("message", "oops"),
        SseEvent("message", "[1]"),
        SseEvent("message", "[" * 5000),
        SseEvent("error", '{"code":500}'),
        chunk_event({"error": {"code": 500, "message": "late"}}),
        chunk_event({"usage": [], "timings": 7}),
    ],
)
def test_a_whole_reply_is_not_lost_for_what_comes_after_its_end(late: SseEvent) -> None:
    assert assemble([delta_event(content="a"), END, late]).reply() == whole("a", figures=NO_FIGURES, model=None)


def test_a_connection_cut_inside_the_figures_loses_the_figures_alone() -> None:
    body = load("final").body
    cut_at = body.index(b'"timings":{"cache_n":')
    assert read([body[:cut_at]]).reply() == whole("Done.", figures=NO_FIGURES)


def test_the_finish_may_ride_on_the_last_delta() -> None:
    outcome = assemble(
        [delta_event("length", reasoning_content="r", content="c", tool_calls=[piece(0, "i", "n", "{}")])]
    )
    assert outcome.events == [
        Reasoning(text="r"),
        Content(text="c"),
        ToolCallDelta(index=0, id="i", name="n", arguments="{}"),
    ]
    assert outcome.reply().cut == "length"


# -- fields -----------------------------------------------------------------------------------------


def test_a_field_is_null_when_no_string_came_for_it_and_empty_when_an_empty_one_did() -> None:
    reply = assemble([delta_event(role="assistant", content=None), delta_event(reasoning_content=""), END]).reply()
    assert (reply.content, reply.reasoning_content) == (None, "")
    reply = assemble([delta_event(content=""), delta_event(content=""), END]).reply()
    assert (reply.content, reply.reasoning_content) == ("", None)


@pytest.mark.parametrize("odd", [0, 5, False, True, 0.5, {}, {"text": "a"}, [5], [None], [{"type": "image"}]])
@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning"])
def test_text_of_a_kind_that_cannot_be_read_is_never_left_out(key: str, odd: Any) -> None:
    assert assemble([delta_event(content="a"), delta_event(**{key: odd}), END]).failure().kind == "broken"


@pytest.mark.parametrize(
    "odd",
    [
        chunk_event({"choices": {"0": "a"}}),
        chunk_event({"choices": "a"}),
        chunk_event({"choices": ["a"]}),
        chunk_event({"choices": [None]}),
        chunk_event({"choices": [{"delta": "a"}]}),
        chunk_event({"choices": [{"delta": ["a"]}]}),
        chunk_event({"choices": [{"text": 5}]}),
        delta_event(tool_calls={"id": "a"}),
        delta_event(tool_calls="a"),
        delta_event(tool_calls=[None]),
        delta_event(tool_calls=["a"]),
    ],
)
def test_a_chunk_of_a_shape_that_cannot_be_read_is_never_left_out(odd: SseEvent) -> None:
    assert assemble([delta_event(content="a"), odd, END]).failure().kind == "broken"


@pytest.mark.parametrize(
    ("parts", "text"),
    [([], ""), (["a", "b"], "ab"), ([{"type": "text", "text": "a"}, {"text": "b"}], "ab")],
)
def test_a_list_of_parts_is_its_texts(parts: Any, text: str) -> None:
    assert assemble([delta_event(content="x"), delta_event(content=parts), END]).reply().content == "x" + text


def test_a_reply_may_come_as_a_message_or_a_text() -> None:
    whole = {"role": "assistant", "content": "a", "tool_calls": [piece(None, "c", "w", "{}")]}
    reply = assemble([chunk_event({"choices": [{"message": whole, "finish_reason": "stop"}]})]).reply()
    assert (reply.content, [(call.id, call.name) for call in reply.tool_calls]) == ("a", [("c", "w")])
    assert assemble([chunk_event({"choices": [{"text": "a", "finish_reason": "stop"}]})]).reply().content == "a"
    twice = {"choices": [{"delta": {}, "message": {"content": "a"}, "finish_reason": "stop"}]}
    assert assemble([delta_event(content="a"), chunk_event(twice)]).reply().content == "a"


def test_another_choice_is_not_ours() -> None:
    def choice(index: Any, text: str, reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "finish_reason": reason}

    both = chunk_event({"choices": [choice(1, "x"), choice(0, "a")]})
    other = chunk_event({"choices": [choice(1, "x", "stop")]})
    assert assemble([both, other, delta_event(content="b"), END]).reply().content == "ab"
    assert assemble([other]).failure().kind == "broken"
    assert assemble([chunk_event({"choices": [choice(None, "a"), choice(0, "x")]}), END]).reply().content == "a"


def test_the_older_form_of_a_call_is_a_call() -> None:
    events = [delta_event(function_call={"name": "w", "arguments": "{"}), delta_event(function_call={"arguments": "}"})]
    for reason in ("function_call", "stop"):
        assert assemble([*events, delta_event(reason)]).reply().tool_calls == (
            ToolCall(id="", name="w", arguments="{}"),
        )


@pytest.mark.parametrize("reason", ["tool_calls", "function_call", "TOOL_CALLS"])
def test_an_end_with_calls_that_never_came_is_no_empty_answer(reason: str) -> None:
    assert assemble([delta_event(reason)]).failure().kind == "broken"
    assert assemble([delta_event(content=" \n"), delta_event(reason)]).failure().kind == "broken"
    assert assemble([delta_event(content="a"), delta_event(reason)]).reply().content == "a"
    assert calls(piece(0, "a", "w", "{}")) == [("a", "w", "{}")]


@pytest.mark.parametrize("reason", ["error", "abort", "aborted", "cancelled", "canceled", "ERROR"])
def test_a_reply_that_the_server_gave_up_is_no_answer(reason: str) -> None:
    assert assemble([delta_event(content="a"), delta_event(reason)]).failure().kind == "broken"
    told = chunk_event({"choices": [{"delta": {}, "finish_reason": reason, "error": {"code": 400, "message": "no"}}]})
    assert (assemble([told]).failure().status, assemble([told]).failure().server_message) == (400, "no")


@pytest.mark.parametrize("reason", ["length", "max_tokens", "model_length", "MAX_TOKENS"])
def test_every_word_for_the_length_limit_is_a_cut(reason: str) -> None:
    assert assemble([delta_event(content="a"), delta_event(reason)]).reply().cut == "length"


@pytest.mark.parametrize("reason", ["stop", "eos", "content_filter", "x"])
def test_any_other_word_is_an_end(reason: str) -> None:
    assert assemble([delta_event(content="a"), delta_event(reason)]).reply().cut is None


def test_the_role_chunk_may_be_missing_or_repeated() -> None:
    role = delta_event(role="assistant", content=None)
    assert assemble([delta_event(content="a"), END]).reply().content == "a"
    assert assemble([role, role, delta_event(content="a"), role, delta_event(content="b"), END]).reply().content == "ab"


def test_reasoning_under_its_other_key_is_reasoning_and_the_first_key_wins() -> None:
    assert assemble([delta_event(reasoning="r"), END]).events == [Reasoning(text="r")]
    assert assemble([delta_event(reasoning="x", reasoning_content="r"), END]).events == [Reasoning(text="r")]


def test_the_model_is_the_first_name_that_the_stream_gives() -> None:
    chunks = [chunk_event({"model": model}) for model in (None, 5, "m\x00", "other")]
    assert assemble([*chunks, END]).reply().model == "m\ufffd"


# -- lone surrogates and NUL ------------------------------------------------------------------------


def test_a_high_surrogate_waits_for_the_next_delta_of_its_field() -> None:
    outcome = assemble(
        [
            delta_event(reasoning_content="r\ud83d"),
            delta_event(content="c\ud83d"),
            delta_event(content=""),
            delta_event(reasoning_content="\ude42"),
            delta_event(content="\ude00"),
            END,
        ]
    )
    assert outcome.events == [
        Reasoning(text="r"),
        Content(text="c"),
        Reasoning(text="🙂"),
        Content(text="😀"),
    ]
    assert (outcome.reply().reasoning_content, outcome.reply().content) == ("r🙂", "c😀")


@pytest.mark.parametrize("end", [END, DONE])
def test_a_half_that_waits_in_vain_is_replaced_in_the_events_as_in_the_reply(end: SseEvent) -> None:
    outcome = assemble([delta_event(reasoning_content="r\ud83d"), delta_event(content="c\ud83d"), end])
    assert outcome.events == [
        Reasoning(text="r"),
        Content(text="c"),
        Reasoning(text="\ufffd"),
        Content(text="\ufffd"),
    ]
    assert (outcome.reply().reasoning_content, outcome.reply().content) == ("r\ufffd", "c\ufffd")


def test_lone_halves_and_nul_are_replaced_one_by_one() -> None:
    reply = assemble([delta_event(content="\ude42a\ud83d\ud83d"), delta_event(content="\ude42\x00"), END]).reply()
    assert reply.content == "\ufffda\ufffd🙂\ufffd"


def test_ids_names_and_arguments_are_cleaned_too() -> None:
    event = call_event(piece(0, "i\x00\ud83d", "n\ud83d", '{"a":"\udc00'), piece(0, None, None, '\ud83d"}'))
    (call,) = assemble([event, END]).reply().tool_calls
    assert call == ToolCall(id="i\ufffd\ufffd", name="n\ufffd", arguments='{"a":"\ufffd\ufffd"}')


def test_a_pair_split_over_pieces_of_arguments_is_one_character() -> None:
    event = call_event(piece(0, "i", "n", '{"a":"\ud83d'), piece(0, None, None, '\ude42"}'))
    assert assemble([event, END]).reply().tool_calls[0].arguments == '{"a":"🙂"}'


@unhurried
@given(st.text(st.characters(exclude_categories=()), max_size=20))
def test_clean_text_holds_no_surrogate_and_no_nul_and_changes_nothing_else(text: str) -> None:
    expected = "".join(
        "\ufffd" if 0xD800 <= ord(char) <= 0xDFFF or char == "\x00" else char
        for char in text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    )
    assert clean_text(text) == expected
    assert clean_text(expected) == expected


# -- calls ------------------------------------------------------------------------------------------


def calls(*pieces: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The calls of a reply made of these pieces, a delta each, checked against all in one delta."""
    by_one = assemble([*(call_event(one) for one in pieces), END]).reply()
    assert assemble([call_event(*pieces), END]).reply() == by_one
    return [(call.id, call.name, call.arguments) for call in by_one.tool_calls]


def test_pieces_are_joined_by_index_and_calls_stand_in_the_order_of_their_first_piece() -> None:
    assert calls(
        piece(7, "a", "first", '{"x"'),
        piece(2, "b", "second", "{"),
        piece(7, None, None, ":1}"),
        piece(2, None, None, "}"),
    ) == [("a", "first", '{"x":1}'), ("b", "second", "{}")]


def test_an_id_or_name_may_come_late_or_be_repeated() -> None:
    assert calls(piece(0, None, "clock"), piece(0, "a"), piece(0, "a", None, "{}")) == [("a", "clock", "{}")]
    assert calls(piece(0, "a", "w", '{"t":'), piece(0, "a", "w", '"x"'), piece(0, "a", "w", "}")) == [
        ("a", "w", '{"t":"x"}')
    ]
    assert calls(piece(0, "", "w", '{"t":'), piece(0, "", "w", '"}'), piece(0, "", "w", '"}')) == [
        ("", "w", '{"t":"}"}')
    ]
    blank_first = (piece(0, None, "w", " "), piece(0, None, None, '\n{"t":'), piece(0, None, "w", "1}"))
    assert calls(*blank_first) == [("", "w", ' \n{"t":1}')]
    in_two = (piece(0, None, "clo"), piece(0, None, "ck", '{"t":'), piece(0, None, "clock", "1}"))
    assert calls(*in_two) == [("", "clock", '{"t":1}')]


def test_another_id_on_a_known_index_begins_another_call() -> None:
    assert calls(
        piece(0, "a", "clock", ""), piece(0, "b", "clock", ""), piece(0, None, None, "{}"), piece(0, "b", None, " ")
    ) == [("a", "clock", ""), ("b", "clock", "{} ")]


@pytest.mark.parametrize("name", ["f\x00", "f\ud83d", "\udc00f", "\ud83d\ude42\x00"])
def test_a_name_that_is_cleaned_is_the_same_name_when_it_comes_again(name: str) -> None:
    pieces = [piece(0, None, name, '{"a"'), piece(0, None, name, ":"), piece(0, None, name, "1}")]
    assert calls(*pieces) == [("", clean_text(name), '{"a":1}')]


@unhurried
@given(
    st.lists(
        st.one_of(
            st.dictionaries(st.text(max_size=3), st.text('\\"{}[] a', max_size=6), max_size=2),
            st.recursive(st.lists(st.integers()), lambda inner: st.lists(inner, max_size=3), max_leaves=4),
            st.text('\\"{}[] a\n', max_size=6),
        ).map(json.dumps),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 5),
    st.sampled_from(["", " ", "\n\t"]),
)
def test_a_repeated_name_begins_another_call_when_the_arguments_are_whole_and_not_before(
    texts: list[str], size: int, blank: str
) -> None:
    pieces = []
    for text in texts:  # none of these has a beginning that is JSON too
        whole = blank + text
        pieces += [piece(0, None, "f", whole[at : at + size]) for at in range(0, len(whole), size)]
    assert calls(*pieces) == [("", "f", blank + text) for text in texts]


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        (["5", "6"], True),
        (["nul", "l"], False),
        (["-", "1"], False),
        (["1" * 400, "2"], True),
        (["1" * 401, "2"], False),  # nobody means a number of 401 digits
        (["{}x", "{}"], False),
        (["{'a'}", " "], False),
        (["}", "{}"], False),
        (["{}\ud83d", "x"], False),
        (["{}", " "], True),
        (['"a\\', '"', '"'], False),
        (['"a\\', "\\", '"'], False),
    ],
)
def test_what_whole_arguments_are(arguments: list[str], whole: bool) -> None:
    assert (len(calls(*(piece(0, None, "f", text) for text in arguments))) > 1) is whole


@pytest.mark.parametrize("first", ['{"a":"', ' {"a":"', '"', "x"])
def test_arguments_are_not_read_again_for_every_piece_that_repeats_the_name(first: str) -> None:
    """Else the work grows with the square of the reply, and every turn waits: 100,000 pieces took a minute."""
    pieces = [piece(0, None, "f", first), *[piece(0, None, "f", "}")] * 2000]
    events = [*map(call_event, pieces), END]
    parsed = 0

    def count(frame: FrameType, what: str, _: Any) -> None:
        nonlocal parsed
        parsed += what == "call" and frame.f_code is json.loads.__code__

    sys.setprofile(count)
    try:
        (call,) = assemble(events, reply_max_bytes=1_000_000).reply().tool_calls
    finally:
        sys.setprofile(None)
    assert len(call.arguments) == len(first) + 2000
    assert len(events) <= parsed <= len(events) + 450  # each event itself; a bare word as long as it is short


def test_without_ids_a_name_after_whole_arguments_begins_another_call() -> None:
    assert calls(piece(0, None, "w", '{"a":1}'), piece(0, None, "w", '{"a":2}')) == [
        ("", "w", '{"a":1}'),
        ("", "w", '{"a":2}'),
    ]
    assert calls(piece(0, None, "w", '{"a":1}\n'), piece(0, None, None, " "), piece(0, None, "w", "{}")) == [
        ("", "w", '{"a":1}\n '),
        ("", "w", "{}"),
    ]
    assert calls(piece(0, None, "w", "null"), piece(0, None, "w", "{}")) == [("", "w", "null"), ("", "w", "{}")]
    assert calls(piece(0, None, "w", '{"a'), piece(0, None, "v", "{}")) == [("", "w", '{"a'), ("", "v", "{}")]


@pytest.mark.parametrize("index", [None, -1, True, 0.0, 0.5, "0", "-1", "x", "", "1" * 5000, float("inf"), [], {}])
def test_an_index_that_is_none_is_index_zero(index: Any) -> None:
    assert calls(piece(0, "a", "w", "{"), piece(index, None, None, "}")) == [("a", "w", "{}")]


@pytest.mark.parametrize("one", [1, 1.0, "1", "01"])
def test_an_index_may_be_text_or_have_a_fraction_of_zero(one: Any) -> None:
    pieces = (
        piece(0, None, "w", ""),
        piece(one, None, "v", ""),
        piece(0, None, None, "{}"),
        piece(one, None, None, "[]"),
    )
    assert calls(*pieces) == [("", "w", "{}"), ("", "v", "[]")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"a": 1, "b": ["é"]}, '{"a":1,"b":["é"]}'),
        ({}, "{}"),
        ([1, 2], "[1,2]"),
        (5, "5"),
        (False, "false"),
        (None, ""),
        ("", ""),
        ("null", "null"),
    ],
)
def test_arguments_sent_as_a_value_are_stored_as_its_text(arguments: Any, text: str) -> None:
    event = call_event({"index": 0, "id": "a", "function": {"name": "w", "arguments": arguments}})
    assert assemble([event, END]).reply().tool_calls == (ToolCall(id="a", name="w", arguments=text),)


@pytest.mark.parametrize("function", [None, "x", [], 5, {}])
def test_a_call_without_a_function_is_a_call_without_a_name(function: Any) -> None:
    event = call_event({"index": 0, "id": 5, "function": function})
    assert assemble([event, END]).reply().tool_calls == (ToolCall(id="5", name="", arguments=""),)
    assert assemble([call_event({}), END]).reply().tool_calls == (ToolCall(id="", name="", arguments=""),)


@unhurried
@given(st.data())
def test_calls_are_the_same_however_their_arguments_are_cut_and_mixed(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text(st.sampled_from('{}":a🙂 \n'), min_size=1, max_size=12), min_size=1, max_size=4))
    streams = []
    for index, text in enumerate(texts):
        points = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
        edges = [0, *sorted(points), len(text)]
        parts = [text[start:end] for start, end in pairwise(edges)]
        streams.append(
            [piece(index, f"id{index}", "w", parts[0]), *(piece(index, None, None, part) for part in parts[1:])]
        )
    order = data.draw(st.permutations([index for index, stream in enumerate(streams) for _ in stream]))
    pieces = [streams[index].pop(0) for index in order]
    assert sorted(calls(*pieces)) == sorted((f"id{i}", "w", text) for i, text in enumerate(texts))


# -- figures ----------------------------------------------------------------------------------------


def figures_of(**chunk: Any) -> Figures:
    reply = assemble([delta_event(content="a"), END, chunk_event(chunk)]).reply()
    return (reply.cache_n, reply.prompt_n, reply.predicted_n)


USAGE = {"prompt_tokens": 25, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 6}}


def test_timings_come_before_usage_figure_by_figure() -> None:
    timings = {"cache_n": 1, "prompt_n": 2, "predicted_n": 3}
    assert figures_of(timings=timings, usage=USAGE) == (1, 2, 3)
    assert figures_of(usage=USAGE) == (6, 19, 7)
    assert figures_of(timings={"cache_n": 1}, usage=USAGE) == (1, 19, 7)
    assert figures_of(timings={"cache_n": 0, "prompt_n": 0, "predicted_n": 0}, usage=USAGE) == (0, 0, 0)


def test_a_figure_that_the_server_did_not_send_is_null() -> None:
    assert figures_of() == NO_FIGURES
    assert figures_of(usage={"prompt_tokens": 25, "completion_tokens": 7}) == (None, None, 7)
    assert figures_of(usage={"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}}) == (6, None, None)
    assert figures_of(usage={"prompt_tokens_details": None}) == NO_FIGURES


def test_a_prompt_that_was_all_in_the_cache_was_read_with_0_tokens() -> None:
    assert figures_of(usage={"prompt_tokens": 6, "prompt_tokens_details": {"cached_tokens": 6}}) == (6, 0, None)


@pytest.mark.parametrize("odd", [None, -1, "12", 3.0, True, [], {}, 2**53, 10**400])
def test_a_figure_that_is_no_count_is_null(odd: Any) -> None:
    assert figures_of(timings={"cache_n": odd, "prompt_n": odd, "predicted_n": odd}) == NO_FIGURES
    usage = {"prompt_tokens": odd, "completion_tokens": odd, "prompt_tokens_details": {"cached_tokens": odd}}
    assert figures_of(usage=usage) == NO_FIGURES


@pytest.mark.parametrize(
    "progress",
    [
        None,
        [],
        "x",
        {},
        {"total": 5, "cache": 0},
        {"total": 5, "cache": 0, "processed": -1},
        {"total": 5.0, "cache": 0, "processed": 1},
    ],
)
def test_progress_that_is_none_says_nothing(progress: Any) -> None:
    assert assemble([chunk_event({"prompt_progress": progress}), END]).events == []


def test_the_last_progress_is_remembered() -> None:
    assembler = CompletionAssembler(thinking_cap=10, reply_max_bytes=1000)
    assert assembler.processed == -1
    assembler.feed(chunk_event({"prompt_progress": {"total": 5, "cache": 0, "processed": 0, "time_ms": 1}}))
    assert (assembler.processed, assembler.begun) == (0, False)
    assembler.feed(chunk_event({"prompt_progress": {"total": 5, "cache": 0, "processed": 5, "time_ms": 2}}))
    assert assembler.processed == 5


# -- the thinking cap -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_budget_message_is_recognised_however_it_is_cut(size: int) -> None:
    text = "Hm. " + BUDGET_MESSAGE + "\n"
    deltas = [delta_event(reasoning_content=text[at : at + size]) for at in range(0, len(text), size)]
    outcome = assemble([*deltas, delta_event(content=""), delta_event(content="4"), delta_event(content="!"), END])
    assert outcome.events[-3:] == [ThinkingCapped(tokens=len(deltas)), Content(text="4"), Content(text="!")]
    assert outcome.reply() == whole(
        "4!", reasoning=text, reasoning_tokens=len(deltas), capped=True, figures=NO_FIGURES, model=None
    )


def test_the_cap_is_told_before_a_call_and_at_the_end_when_nothing_follows() -> None:
    capped = delta_event(reasoning_content=BUDGET_MESSAGE)
    call = piece(0, "a", "clock", "{}")
    assert assemble([capped, call_event(call), END]).events[1:] == [
        ThinkingCapped(tokens=1),
        ToolCallDelta(index=0, id="a", name="clock", arguments="{}"),
    ]
    assert assemble([capped, END]).events[1:] == [ThinkingCapped(tokens=1)]
    assert assemble([capped, DONE]).events[1:] == [ThinkingCapped(tokens=1)]
    assert assemble([capped, delta_event("stop", content="a")]).events[1:] == [
        ThinkingCapped(tokens=1),
        Content(text="a"),
    ]


def test_the_budget_message_in_the_answer_is_no_cap() -> None:
    outcome = assemble([delta_event(reasoning_content=BUDGET_MESSAGE[:-1]), delta_event(content=BUDGET_MESSAGE), END])
    assert not outcome.reply().thinking_capped
    assert outcome.events == [Reasoning(text=BUDGET_MESSAGE[:-1]), Content(text=BUDGET_MESSAGE)]


def test_a_server_that_ignores_the_cap_is_left_at_256_deltas_over_it() -> None:
    assert CAP_MARGIN_TOKENS == 256
    thinking = [delta_event(reasoning_content="wait, ")] * 265
    assert assemble([*thinking, END], thinking_cap=10).reply().cut is None
    last = {"choices": [{"delta": {"reasoning_content": "x", "content": "no"}, "finish_reason": "length"}]}
    call, text = call_event(piece(0, "a", "clock", "{}")), delta_event(content="Hm.")
    timings = {"cache_n": 1, "prompt_n": 1, "predicted_n": 1}
    outcome = assemble([call, text, *thinking, chunk_event({**last, "timings": timings}), text, END], thinking_cap=10)
    assert outcome.reply() == whole(
        "Hm.",
        reasoning="wait, " * 265 + "x",
        reasoning_tokens=266,
        capped=True,
        cut="thinking_cap",
        figures=NO_FIGURES,
        model=None,
    )
    assert outcome.events[-2:] == [Reasoning(text="x"), ThinkingCapped(tokens=266)]


def test_over_the_cap_nothing_more_is_taken_and_the_stream_was_not_at_its_end() -> None:
    assembler = CompletionAssembler(thinking_cap=1, reply_max_bytes=10_000)
    for _ in range(257):
        assert not assembler.over_cap
        assembler.feed(delta_event(reasoning_content="x"))
    assert (assembler.over_cap, assembler.finished, assembler.done) == (True, False, False)
    assert assembler.feed(END) == []
    assert (assembler.finished, assembler.done) == (False, False)
    assembler.eof()
    assert assembler.completion().cut == "thinking_cap"


def test_empty_reasoning_deltas_do_not_count() -> None:
    reply = assemble(
        [delta_event(reasoning_content="")] * 300 + [delta_event(reasoning_content="a"), END], thinking_cap=1
    )
    assert reply.reply().reasoning_tokens == 1


# -- errors -----------------------------------------------------------------------------------------

Error = dict[str, Any] | str


@pytest.mark.parametrize(
    "form",
    [
        lambda error: SseEvent("error", json.dumps(error)),
        lambda error: SseEvent("error", json.dumps({"error": error})),
        lambda error: chunk_event({"error": error}),
        lambda error: chunk_event({"error": error, "choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}),
    ],
)
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        ({"code": 503, "message": "busy", "type": "t"}, 503, "busy"),
        ({"message": "no code"}, 500, "no code"),
        ({"code": "text", "message": "m"}, 500, "m"),
        ({"code": 200, "message": "m"}, 500, "m"),
        ({"code": 503.0, "message": "m"}, 500, "m"),
        ({"code": 400}, 400, ""),
        ({}, 500, ""),
        ("only text", 500, "only text"),
    ],
)
def test_an_error_in_whatever_form_is_an_error_whatever_follows(
    form: Any, error: Error, status: int, message: str
) -> None:
    found = assemble([delta_event(content="a"), form(error), delta_event(content="b"), END]).failure()
    assert (found.kind, found.status, found.server_message) == ("http", status, message)


def test_an_error_event_of_plain_text_is_an_error_of_that_text() -> None:
    found = assemble([SseEvent("error", "something went wrong")]).failure()
    assert (found.kind, found.status, found.server_message) == ("http", 500, "something went wrong")


@pytest.mark.parametrize("nothing", [None, False, 0])
def test_an_error_key_that_says_there_is_none_is_no_error(nothing: Any) -> None:
    chunk = chunk_event({"error": nothing, "choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]})
    assert assemble([chunk]).reply().content == "a"


@pytest.mark.parametrize("data", ["{", "oops", '{"choices":[', "[1]", "5", "null", '"text"', "[" * 5000, "1" * 5000])
def test_a_chunk_that_is_no_json_object_is_a_broken_stream(data: str) -> None:
    assert assemble([delta_event(content="a"), SseEvent("message", data), END]).failure().kind == "broken"


def test_a_value_nested_as_deep_as_can_be_read_is_no_other_exception() -> None:
    for depth in range(500, 1100):
        nested = "[" * depth + "]" * depth
        for text in (
            f'{{"error":{{"message":{nested}}}}}',
            f'{{"choices":[{{"delta":{{"tool_calls":[{{"function":{{"arguments":{nested}}}}}]}}}}]}}',
        ):
            outcome = assemble([SseEvent("message", text)])
            assert outcome.failure().kind in ("http", "broken")


def test_the_fields_of_an_error_are_the_servers_own_words() -> None:
    error = error_of(429, {"error": {"code": "slow_down", "type": "rate_limit", "message": "a\x00\nb"}}, "7")
    assert (error.status, error.error_type, error.error_code) == (429, "rate_limit", "slow_down")
    assert (error.server_message, error.retry_after) == ("a\ufffd\nb", "7")
    assert str(error) == "the server answered 429: a\ufffd"


@pytest.mark.parametrize(
    ("code", "status"),
    [(400, 400), (599, 599), (399, 500), (600, 500), (0, 500), ("429", 500), (429.0, 500), (None, 500)],
)
def test_inside_a_stream_the_code_is_the_status_when_it_is_one(code: object, status: int) -> None:
    assert error_of(200, {"code": code}).status == status
    assert error_of(503, {"code": code}).status == 503


def test_a_chunk_that_calls_itself_an_error_is_one() -> None:
    chunk = chunk_event({"object": "error", "message": "too many", "type": "rate_limit", "code": 429})
    found = assemble([delta_event(content="a"), chunk, END]).failure()
    assert (found.status, found.error_type, found.server_message) == (429, "rate_limit", "too many")
    assert assemble([delta_event(content="a"), END, chunk]).reply().content == "a"


def test_the_words_of_an_error_may_be_its_detail() -> None:
    assert error_of(404, {"detail": "Not Found"}).server_message == "Not Found"
    assert error_of(404, {"message": "no", "detail": "Not Found"}).server_message == "no"


@pytest.mark.parametrize(("code", "kept"), [("slow_down", "slow_down"), (429, None), (None, None), ({}, None)])
def test_a_code_that_is_no_text_is_no_code_of_the_server(code: object, kept: str | None) -> None:
    assert error_of(500, {"code": code}).error_code == kept


@pytest.mark.parametrize("value", [None, 5, [1, 2, 3], {"error": 5}, {"message": None}, {"type": 5}, "", "\n"])
def test_an_answer_without_words_says_so(value: Any) -> None:
    assert str(error_of(500, value)) == "the server answered 500: without a message"


def test_an_error_page_gives_at_most_a_line_of_itself() -> None:
    error = refusal("foreign_html_502")
    assert (error.status, str(error)) == (502, "the server answered 502: <!DOCTYPE html>")
    assert str(refusal("foreign_empty_502")) == "the server answered 502: without a message"
    assert str(refusal("foreign_json_not_an_object_500")) == "the server answered 500: without a message"
    assert str(refusal("foreign_latin1_error_500")) == "the server answered 500: d\ufffdfaut"


def test_one_line_is_the_first_one_cut_to_its_limit() -> None:
    assert one_line("\n  a\u2028b\n") == "a"
    assert one_line("x" * 300) == "x" * 300
    assert one_line("x" * 301) == "x" * 299 + "…"
    assert one_line("") == ""


# -- limits -----------------------------------------------------------------------------------------


def test_the_limit_of_a_reply_is_over_all_its_fields_in_bytes_of_utf8() -> None:
    events = [
        delta_event(reasoning_content="é"),  # 2 bytes
        delta_event(content="🙂"),  # 4
        call_event(piece(0, "ab", "cde", "{}")),  # 7 and the call itself
        END,
    ]
    size = 13 + CALL_BYTES
    assert assemble(events, reply_max_bytes=size).reply().content == "🙂"
    error = assemble(events, reply_max_bytes=size - 1).failure()
    assert (error.kind, error.limit, error.detail()) == ("limit", "reply_max_bytes", {"limit": "reply_max_bytes"})


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_a_reply_without_end_is_given_up(field: str) -> None:
    error = assemble([delta_event(**{field: "0123456789"})] * 11, reply_max_bytes=100).failure()
    assert error.limit == "reply_max_bytes"


def test_a_reply_of_empty_calls_without_end_is_given_up() -> None:
    events = [call_event(piece(index)) for index in range(1000)]
    assert len(assemble([*events[:10], END], reply_max_bytes=10 * CALL_BYTES).reply().tool_calls) == 10
    assert assemble(events, reply_max_bytes=10 * CALL_BYTES).failure().limit == "reply_max_bytes"


def test_empty_deltas_without_end_take_no_memory() -> None:
    assembler = CompletionAssembler(thinking_cap=10, reply_max_bytes=100)
    empty = delta_event(content="", reasoning_content="")
    assembler.feed(empty)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            assembler.feed(empty)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 20_000  # a pointer a delta and field would be 160,000


# -- arbitrary chunks -------------------------------------------------------------------------------

odd_text = st.text(st.sampled_from(["a", "\x00", "\ud83d", "\ude42", "é", "🙂", "\n", '"', "{", "}"]), max_size=5)
json_value = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 400) | st.floats() | odd_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_text, inner, max_size=3),
    max_leaves=6,
)


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


call_piece = objects(
    index=st.integers(-1, 2) | json_value,
    id=odd_text | json_value,
    function=objects(name=odd_text | json_value, arguments=odd_text | json_value) | json_value,
)
counts = st.integers(-1, 9) | json_value
odd_delta = objects(
    content=odd_text | json_value,
    reasoning_content=odd_text | json_value,
    reasoning=odd_text,
    tool_calls=st.lists(call_piece | json_value, max_size=3) | json_value,
)
choice = objects(
    delta=odd_delta | json_value, finish_reason=st.sampled_from([None, None, None, "stop", "length"]) | json_value
)
chunk = objects(
    choices=st.lists(choice | json_value, max_size=2) | json_value,
    usage=objects(prompt_tokens=counts, completion_tokens=counts, prompt_tokens_details=objects(cached_tokens=counts)),
    timings=objects(cache_n=counts, prompt_n=counts, predicted_n=counts) | json_value,
    prompt_progress=objects(total=counts, cache=counts, processed=counts) | json_value,
    model=json_value,
)
odd_chunk = st.one_of(
    chunk,
    odd_delta.map(lambda delta: {"choices": [{"delta": delta}]}),
    odd_text.map(lambda text: {"choices": [{"delta": {"content": text}}]}),
    st.lists(call_piece, max_size=2).map(lambda pieces: {"choices": [{"delta": {"tool_calls": pieces}}]}),
).map(chunk_event)
noise = st.one_of(
    st.builds(SseEvent, st.sampled_from(["message", "error", "ping"]), odd_text | st.just("[DONE]")),
    st.dictionaries(st.sampled_from(["error", "choices", "x"]), json_value).map(chunk_event),
    json_value.map(chunk_event),
)


@unhurried
@given(
    st.lists(odd_chunk, max_size=8),
    st.lists(noise, max_size=1),
    st.sampled_from([[], [END], [END], [END]]),
    st.sampled_from([20, 400, 10_000]),
)
def test_arbitrary_chunks_give_events_and_a_reply_or_the_named_error(
    chunks: list[SseEvent], odd: list[SseEvent], end: list[SseEvent], max_bytes: int
) -> None:
    outcome = assemble([*chunks, *odd, *end], thinking_cap=1, reply_max_bytes=max_bytes)
    if outcome.error is None:
        check_laws(outcome)
        check_size(outcome.reply(), max_bytes)


@unhurried
@given(st.lists(odd_text, max_size=8), st.lists(odd_text, max_size=8), st.lists(odd_text, max_size=8))
def test_a_reply_of_odd_texts_is_what_was_sent_cleaned(
    content: list[str], reasoning: list[str], arguments: list[str]
) -> None:
    outcome = assemble(
        [delta_event(reasoning_content=text) for text in reasoning]
        + [delta_event(content=text) for text in content]
        + [call_event(piece(0, "a", None, text)) for text in arguments]
        + [END],
    )
    check_laws(outcome)
    reply = outcome.reply()
    assert reply.reasoning_content == (clean_text("".join(reasoning)) if reasoning else None)
    assert reply.content == (clean_text("".join(content)) if content else None)
    assert [call.arguments for call in reply.tool_calls] == ([clean_text("".join(arguments))] if arguments else [])
    assert reply.reasoning_tokens == sum(1 for text in reasoning if text)


# One chunk as many servers write it, and what may make it another one although its text stands between the same words.
written_text = st.sampled_from(
    ['"a"', '"b"', '""', r'"\n"', r'"\u00e9"', r'"\ud83d"', r'"\ude42"', r'"\u0000"', "null", "7", '["a"]']
)
told_once = [
    '{"choices":[{"index":0,"delta":{"content":%s},"finish_reason":null}],"model":"m"}',
    '{"choices":[{"index":0,"delta":{"reasoning_content":%s},"finish_reason":null}],"model":"m"}',
    '{"choices":[{"delta":{"content": %s, "tool_calls": null}}]}',
    '{"choices":[{"delta":{"content":%s}}]}',
    '{"choices":[{"message":{"content":%s}}]}',
    '{"choices":[{"text":%s}]}',
    '{"choices":[{"delta":{"content":"x","content":%s}}]}',
    '{"choices":[{"delta":{"content":%s,"content":"x"}}]}',
    '{"choices":[{"delta":{"content":%s},"finish_reason":"stop"}]}',
    '{"choices":[{"delta":{"content":%s}},{"delta":{"content":"y"}}]}',
    '{"choices":[{"index":1,"delta":{"content":%s}}]}',
    '{"choices":[{"index":1,"delta":{"content":%s}},{"index":0,"delta":{"content":"y"}}]}',
    '{"choices":[{"delta":{"content":%s,"reasoning_content":"r"}}]}',
    '{"choices":[{"delta":{"content":%s}}],"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}}',
    '{"choices":[{"delta":{"content":%s}}],"timings":{"cache_n":1}}',
    '{"choices":[{"delta":{"content":%s}}],"prompt_progress":{"total":9,"cache":1,"processed":2}}',
    '{"choices":[{"delta":{"content":%s}}],"error":{"message":"no"}}',
    '{"choices":[{"delta":{"content":%s}}],"x":"\\"content\\":\\"a\\""}',
    '{"x":{"content":"a"},"choices":[{"delta":{"content":%s}}]}',
    '{"choices":[{"delta":{"content":%s}}]',
]


@unhurried
@given(
    st.lists(st.tuples(st.sampled_from(told_once), st.lists(written_text, min_size=1, max_size=4)), max_size=6),
    st.booleans(),
    st.sampled_from([30, 10_000]),
)
def test_chunks_that_share_what_stands_around_their_text_say_what_each_says_by_itself(
    runs: list[tuple[str, list[str]]], ended: bool, max_bytes: int
) -> None:
    """One more space in front of each, and no two share it any more."""
    chunks = [form % text for form, texts in runs for text in texts]
    if ended:
        chunks += ['{"choices":[{"delta":{},"finish_reason":"stop"}]}', *chunks[-1:], "[DONE]"]
    shared = assemble([SseEvent("message", data) for data in chunks], thinking_cap=1, reply_max_bytes=max_bytes)
    single = assemble(
        [SseEvent("message", " " * spaces + data) for spaces, data in enumerate(chunks)],
        thinking_cap=1,
        reply_max_bytes=max_bytes,
    )
    assert shared.events == single.events
    assert shared.completion == single.completion
    assert (shared.error is None) == (single.error is None)


@pytest.mark.parametrize("form", [form for form in told_once if "stop" not in form])
def test_of_two_chunks_of_one_form_the_second_says_its_own_text(form: str) -> None:
    """By another reader: each chunk in a reply of its own."""
    first, second = form % '"a"', form % '"b"'
    alone = assemble([SseEvent("message", second)])
    both = assemble([SseEvent("message", first), SseEvent("message", first), SseEvent("message", second)])
    told = len(alone.events)
    assert both.events[len(both.events) - told :] == alone.events
    assert (both.error is None) == (alone.error is None)


def test_a_text_in_a_known_envelope_is_what_its_json_says() -> None:
    """Written out by hand: an escape, half a pair in each of two chunks, chunks that only begin like the others."""
    form = '{"choices":[{"delta":{"content":%s}}]}'
    chunks = [
        SseEvent("message", form.replace("%s", text))
        for text in ('"a"', r'"\n\""', r'"\ud83d"', r'"\ude42"', '"b","index":0')
    ]
    assert assemble([*chunks, END]).reply().content == 'a\n"🙂b'
    torn = SseEvent("message", '{"choices":[{"delta":{"content":"c')
    assert assemble([*chunks[:2], torn, END]).failure().kind == "broken"
    failed = SseEvent("message", '{"choices":[{"delta":{"content":"c"}}],"error":{"message":"no"}}')
    assert assemble([*chunks[:2], failed, END]).failure().server_message == "no"


def test_figures_that_come_with_each_text_are_those_of_the_last_chunk_that_has_some() -> None:
    def told(choices: str, prompt: int) -> SseEvent:
        usage = f'{{"prompt_tokens":{prompt},"prompt_tokens_details":{{"cached_tokens":1}}}}'
        return SseEvent("message", f'{{"choices":[{choices}],"usage":{usage}}}')

    first, last = ('{"delta":{"content":"%s"}}'.replace("%s", text) for text in "ab")
    reply = assemble([told(first, 3), told("", 9), told(last, 3), END]).reply()
    assert (reply.content, reply.cache_n, reply.prompt_n) == ("ab", 1, 2)


def without_error(outcome: Outcome) -> tuple[Any, ...]:
    """An outcome that can be compared: exceptions are equal only to themselves."""
    error = outcome.error
    return (outcome.events, outcome.completion, error and (error.kind, error.status, error.message))


def check_laws(outcome: Outcome) -> None:
    """What holds of every reply and the events that it came with."""
    reply = outcome.reply()
    texts = [event.text for event in outcome.events if isinstance(event, Content)]
    assert "" not in texts
    assert "".join(texts) == (reply.content or "")
    thoughts = [event.text for event in outcome.events if isinstance(event, Reasoning)]
    assert "" not in thoughts
    assert "".join(thoughts) == (reply.reasoning_content or "")
    told = [event.tokens for event in outcome.events if isinstance(event, ThinkingCapped)]
    assert told == ([reply.reasoning_tokens] if reply.thinking_capped else [])
    strings = [reply.content or "", reply.reasoning_content or "", reply.model or ""]
    for call in reply.tool_calls:
        strings += [call.id, call.name, call.arguments]
    for event in outcome.events:
        if isinstance(event, ToolCallDelta):
            strings += [event.id, event.name, event.arguments]
    for text in strings:
        assert "\x00" not in text
        text.encode("utf-8")


def check_calls(outcome: Outcome) -> None:
    """The pieces of calls, joined by index, are the calls; not where half a character waited to the end."""
    joined: dict[int, list[str]] = {}
    for event in outcome.events:
        if isinstance(event, ToolCallDelta):
            call = joined.setdefault(event.index, ["", "", ""])
            call[0] = call[0] or event.id
            call[1] += event.name
            call[2] += event.arguments
    assert [joined[index] for index in range(len(joined))] == [
        [call.id, call.name, call.arguments] for call in outcome.reply().tool_calls
    ]


def check_size(reply: Completion, max_bytes: int) -> None:
    """Bytes are counted as they come: U+FFFD for NUL takes two more than was counted."""
    texts = [reply.content or "", reply.reasoning_content or ""]
    for call in reply.tool_calls:
        texts += [call.id, call.name, call.arguments]
    assert sum(len(text.replace("\ufffd", "?").encode()) for text in texts) <= max_bytes
    assert len(reply.tool_calls) * CALL_BYTES <= max_bytes


def test_feeding_after_the_end_gives_nothing() -> None:
    assembler = CompletionAssembler(thinking_cap=1, reply_max_bytes=100)
    assembler.feed(delta_event(content="a"))
    assembler.feed(DONE)
    assert (assembler.done, assembler.finished) == (True, True)
    assert assembler.feed(delta_event(content="b")) == []
    assert assembler.feed(SseEvent("error", "x")) == []
    assert assembler.completion().content == "a"
    with pytest.raises(InferenceError):
        CompletionAssembler(thinking_cap=1, reply_max_bytes=100).eof()
