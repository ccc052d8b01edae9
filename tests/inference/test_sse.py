"""The SSE decoder: any chunking, the standard's rules, the three extensions, foreign bodies, limits."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.errors import InferenceError
from boxmaker.inference.sse import SseDecoder, SseEvent
from tests.inference.recordings import NAMES, cut, decode, in_steps, load, unhurried

BOM = b"\xef\xbb\xbf"


def messages(*data: str) -> list[SseEvent]:
    return [SseEvent("message", text) for text in data]


def events_of(*pieces: bytes) -> list[SseEvent]:
    decoded = decode(pieces)
    assert decoded.error is None
    assert decoded.foreign is None
    return decoded.events


# -- chunking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_fixture_read_in_small_steps_gives_the_events_of_one_read(name: str) -> None:
    body = load(name).body
    at_once = decode([body])
    for size in (1, 2, 3, 7, 64):
        assert decode(in_steps(body, size)) == at_once


@unhurried
@given(st.data())
def test_a_fixture_cut_anywhere_gives_the_events_of_one_read(data: st.DataObject) -> None:
    body = load(data.draw(st.sampled_from(NAMES))).body
    points = data.draw(st.lists(st.integers(0, len(body)), max_size=20))
    assert decode(cut(body, points)) == decode([body])


def test_a_fixture_split_inside_every_character_keeps_its_characters() -> None:
    body = load("bytes_split_in_characters").body
    inside = [at for at in range(len(body)) if body[at] & 0xC0 == 0x80]
    assert len(inside) > 20
    events = events_of(*cut(body, inside))
    assert events == events_of(body)
    assert "\ufffd" not in "".join(event.data for event in events)
    assert '"content":"漢字 "' in events[1].data


# A chunk that is one whole event has a quicker way: it may be taken only when nothing came before it that changes it.
ONE = b"data: b\n\n"


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ([], [], messages("b")),
        ([], [b"{}\n\n"], messages("b", "{}")),
        ([b"data: a\n\n"], [], messages("a", "b")),
        ([b"data: a\n\nda"], [], messages("a")),  # a line `dadata: b`, which no reader knows
        ([b"data: a\n\n: c"], [], messages("a")),
        ([b"data: a\n"], [], messages("a\nb")),
        ([b"data: a\n\n", b"event: ping\n"], [], [*messages("a"), SseEvent("ping", "b")]),
        ([b"data: a\r\n\r"], [b"data: c", b"\n\n", b"data: d"], messages("a", "b", "c", "d")),
        ([b"data: a\r\n\r"], [b"\ndata: c\n\n"], messages("a", "b", "c")),
        ([b"data: a\n\n", b"data: c\rdata: d\n\n"], [], messages("a", "c\nd", "b")),
        ([b"data: a\n\n", b"data: c\r\n\n"], [], messages("a", "c", "b")),
    ],
)
def test_a_chunk_of_one_event_means_what_it_does_where_it_stands(
    before: list[bytes], after: list[bytes], found: list[SseEvent]
) -> None:
    assert events_of(*before, ONE, *after) == found
    assert events_of(b"".join([*before, ONE, *after])) == found


def test_a_chunk_of_one_event_is_foreign_in_a_foreign_body_and_refused_over_the_limit() -> None:
    foreign = decode([b'{"x":', ONE])
    assert (foreign.events, foreign.foreign) == ([], b'{"x":' + ONE)
    fits, over = b"data: 1234\n\n", b"data: 12345\n\n"
    assert decode([b"data: a\n\n", fits], event_max_bytes=10).error is None
    refused = decode([b"data: a\n\n", fits, over], event_max_bytes=10)
    assert (refused.events, refused.error is None) == (messages("a", "1234"), False)


LINES = [*rb"data: |data:|data|event: error|event:|error: x|:|{|}|[|<".split(b"|"), b"\n", b"\n\n", b"\r", b"\r\n"]
garbage = st.one_of(
    st.binary(max_size=200),
    st.lists(
        st.sampled_from([*LINES, BOM, BOM[:1], BOM[1:], b" ", b"\t", b"\xff", b"\xe2\x80", b"\xa8", b"\x00", b"xyz"]),
        max_size=30,
    ).map(b"".join),
)


@unhurried
@given(garbage, st.lists(st.integers(0, 200), max_size=20), st.sampled_from([1, 8, 40, 1000]))
def test_garbage_gives_events_or_the_named_error_however_it_is_cut(
    body: bytes, points: list[int], max_bytes: int
) -> None:
    at_once = decode([body], max_bytes)
    in_pieces = decode(cut(body, [min(point, len(body)) for point in points]), max_bytes)
    assert in_pieces.foreign == at_once.foreign
    if at_once.error is None:
        assert in_pieces == at_once
    else:
        assert in_pieces.error is not None
        assert (in_pieces.error.kind, in_pieces.error.limit) == ("limit", "event_max_bytes")
        assert in_pieces.events[: len(at_once.events)] == at_once.events
    for event in at_once.events:
        event.data.encode("utf-8")
        assert len(event.data) <= max_bytes


# -- the standard -----------------------------------------------------------------------------------


def by_the_standard(body: bytes) -> list[SseEvent]:
    """WHATWG HTML 9.2.6, word for word, on the whole text at once."""
    text = body.decode("utf-8", "replace").removeprefix("\ufeff")
    events = []
    data, kind = "", ""
    for line in re.split("\r\n|\n|\r", text):
        if line == "":
            if data != "":
                events.append(SseEvent(kind or "message", data.removesuffix("\n")))
            data, kind = "", ""
        elif not line.startswith(":"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                data += value + "\n"
            elif field == "event":
                kind = value
    return events


line_text = st.one_of(
    st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12).map(str.encode),
    st.binary(max_size=6).map(lambda raw: raw.replace(b"\r", b"").replace(b"\n", b"")),
)
standard_line = st.one_of(
    st.just(b""),
    line_text.map(lambda text: b":" + text),
    st.sampled_from([b"data", b"event", b"id", b"retry", b"dat", b"datum"]),
    st.tuples(
        st.sampled_from([b"data", b"data", b"data", b"event", b"id", b"retry", b"foo", b"Data", b"data "]),
        st.sampled_from([b":", b": ", b":  "]),
        line_text,
    ).map(b"".join),
)


@unhurried
@given(
    st.sampled_from([b"", BOM]),
    st.lists(st.tuples(standard_line, st.sampled_from([b"\n", b"\r", b"\r\n"])), max_size=30),
    st.lists(st.integers(0, 500), max_size=20),
)
def test_a_standard_stream_is_read_as_the_standard_says(
    bom: bytes, lines: list[tuple[bytes, bytes]], points: list[int]
) -> None:
    body = bom + b"".join(line + end for line, end in lines) + b"\n\n"
    assert events_of(*cut(body, [min(point, len(body)) for point in points])) == by_the_standard(body)


def test_the_real_stream_is_read_as_the_standard_says() -> None:
    body = load("plain_usage_progress").body
    events = events_of(body)
    assert events == by_the_standard(body)
    assert len(events) == 12  # 2 progress, role, 6 pieces of text, finish, usage, [DONE]
    assert events[-1] == SseEvent("message", "[DONE]")


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_each_line_end_of_the_standard_ends_a_line(end: bytes) -> None:
    body = end.join([b"data: a", b"data: b", b"", b"data: c", b"", b""])
    assert events_of(body) == messages("a\nb", "c")
    assert events_of(*in_steps(body, 1)) == messages("a\nb", "c")


def test_a_cr_at_the_end_of_a_read_and_an_lf_at_the_start_of_the_next_are_one_line_end() -> None:
    assert events_of(b"data: a\r", b"\ndata: b\r\n\r", b"\n") == messages("a\nb")
    assert events_of(b"data: a\r", b"", b"\n", b"data: b\r", b"\r", b"data: c\r\r") == messages("a\nb", "c")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"])
def test_what_python_calls_a_line_end_stays_inside_the_data(separator: str) -> None:
    assert events_of(f"data: a{separator}b\n\n".encode()) == messages(f"a{separator}b")


def test_one_blank_after_the_colon_is_dropped_and_no_more() -> None:
    assert events_of(b"data:a\n\ndata: a\n\ndata:  a\n\ndata:\ta\n\n") == messages("a", "a", " a", "\ta")
    assert events_of(b"event:  x\ndata: a\n\nerror:  b\n") == [SseEvent(" x", "a"), SseEvent("error", " b")]


def test_comments_ids_retries_and_unknown_fields_say_nothing() -> None:
    assert events_of(b":\n\n: ping\n\nretry: 3000\nid: 7\nfoo: bar\nfoo\ndata: a\n: b\n\n") == messages("a")


def test_empty_data_is_an_event_and_no_data_is_none() -> None:
    assert events_of(b"data\n\ndata:\n\ndata:\ndata:\n\nevent: x\n\n\n\n") == messages("", "", "\n")


def test_a_name_holds_for_its_own_event_alone() -> None:
    body = b"event: ping\ndata: a\n\ndata: b\n\nevent: lost\n\ndata: c\n\nevent: x\nevent:\ndata: d\n\n"
    assert events_of(body) == [SseEvent("ping", "a"), *messages("b", "c", "d")]


# -- byte order mark and white space ----------------------------------------------------------------


def test_a_byte_order_mark_is_dropped_however_it_is_cut() -> None:
    body = BOM + b"data: a\n\n"
    assert events_of(body) == messages("a")
    assert events_of(*in_steps(body, 1)) == messages("a")
    assert events_of(BOM, b"data: a\n\n") == messages("a")


@pytest.mark.parametrize("before", [b"\n", b" ", BOM])
def test_a_byte_order_mark_that_is_not_at_the_very_beginning_is_no_mark_however_it_is_cut(before: bytes) -> None:
    # The second mark is part of a field's name, which nobody knows.
    body = before + BOM + b"data: a\n\ndata: b\n\n"
    assert events_of(body) == messages("b")
    assert events_of(before, body.removeprefix(before)) == messages("b")
    assert events_of(*in_steps(body, 1)) == messages("b")


def test_the_start_of_a_byte_order_mark_alone_says_nothing() -> None:
    assert events_of(BOM[:2]) == []
    assert events_of(BOM[:2], b"data: a\n\n") == []
    assert events_of(BOM[:1], b"\ndata: a\n\n") == messages("a")


def test_white_space_before_the_stream_is_dropped() -> None:
    assert events_of(b" \t\r\n\r\n data: a\n\n") == messages("a")


# -- bytes that are not UTF-8 -----------------------------------------------------------------------


def test_bytes_that_are_not_utf8_cost_only_themselves() -> None:
    assert events_of(b"data: a\xffb\n\ndata: \xe9\x82\n\ndata: c\n\n") == messages("a\ufffdb", "\ufffd", "c")
    assert events_of(b"event: \xff\ndata: a\n\n") == [SseEvent("\ufffd", "a")]


def test_half_a_character_before_a_line_end_takes_nothing_of_the_next_line() -> None:
    assert events_of(b"data: \xf0\x9f\x99\ndata: \x82\n\n") == messages("\ufffd\n\ufffd")


# -- beyond the standard ----------------------------------------------------------------------------


def test_a_line_error_is_an_event_at_once() -> None:
    decoder = SseDecoder(100)
    assert decoder.feed(b'error: {"code":400}\n') == [SseEvent("error", '{"code":400}')]
    assert events_of(b"data: a\nerror:b\n\n") == [SseEvent("error", "b"), *messages("a")]


def test_an_event_named_error_has_that_name() -> None:
    assert events_of(b"event: error\ndata: {}\n\n") == [SseEvent("error", "{}")]


def test_an_event_that_the_end_leaves_without_its_blank_line_counts() -> None:
    assert events_of(b"data: a") == messages("a")
    assert events_of(b"data: a\n") == messages("a")
    assert events_of(b"data: a\r") == messages("a")
    assert events_of(b"event: x\ndata: a\ndata: b") == [SseEvent("x", "a\nb")]
    assert events_of(b"data: a\n\nevent: x") == messages("a")
    assert events_of(b"") == []


def test_a_line_that_begins_with_a_brace_is_data() -> None:
    assert events_of(b'data: a\n\n{"error":1}\n\n') == messages("a", '{"error":1}')
    assert events_of(b':\n\n{"error":1}') == messages('{"error":1}')


# -- foreign bodies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b'{"a":\n\n1}', b"[1,2]", b"<!DOCTYPE html>\n\ndata: a\n\n"])
@pytest.mark.parametrize("before", [b"", BOM, b"\r\n \t", BOM + b"\n"])
def test_a_body_that_is_no_stream_is_kept_and_gives_no_event(before: bytes, body: bytes) -> None:
    for pieces in ([before + body], in_steps(before + body, 1), [before, body]):
        decoded = decode(pieces)
        assert decoded.events == []
        assert decoded.error is None
        assert decoded.foreign == body


@pytest.mark.parametrize("body", [b"", b" \n\r\t", BOM, b": ping\n\n", b"data: a\n\n", b"oops"])
def test_a_stream_and_an_empty_body_are_not_foreign(body: bytes) -> None:
    assert decode([body]).foreign is None


# -- limits -----------------------------------------------------------------------------------------


@unhurried
@given(st.integers(1, 50), st.integers(1, 200))
def test_a_line_without_an_end_is_given_up_one_byte_over_the_limit(step: int, max_bytes: int) -> None:
    *pieces, last = in_steps(b"x" * (max_bytes + 1), step)
    decoder = SseDecoder(max_bytes)
    for piece in pieces:
        assert decoder.feed(piece) == []
    with pytest.raises(InferenceError) as caught:
        decoder.feed(last)
    assert (caught.value.kind, caught.value.limit) == ("limit", "event_max_bytes")


@pytest.mark.parametrize("step", [1, 1000])
def test_an_event_of_the_limit_passes_and_one_byte_more_does_not(step: int) -> None:
    line = b"data: " + b"x" * 94
    assert decode(in_steps(line + b"\n\n", step), 100).events == messages("x" * 94)
    assert decode(in_steps(line + b"y\n\n", step), 100).error is not None
    lines = (b"data: " + b"x" * 49 + b"\n") * 2  # 99 characters with the LF between them
    assert decode(in_steps(lines + b"\n", step), 99).events == messages("x" * 49 + "\n" + "x" * 49)
    assert decode(in_steps(lines + b"\n", step), 98).error is not None


@pytest.mark.parametrize("line", [b"data\n", b"data:\n", b"data: \n", b"data: a\n", b"{\n"])
def test_an_event_without_an_end_is_given_up_whatever_its_lines_hold(line: bytes) -> None:
    error = decode([b":\n"] + [line] * 200, 100).error
    assert error is not None
    assert error.limit == "event_max_bytes"


def test_the_limit_is_for_one_event_and_not_for_the_stream() -> None:
    assert decode([b"data: 0123456789\n\n" * 1000], 20).events == messages(*["0123456789"] * 1000)
    assert decode([b": 0123456789\n" * 1000], 20).error is None


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_no_more_of_a_foreign_body_is_kept_than_the_limit(step: int) -> None:
    assert decode(in_steps(b"<" + b"x" * 5000, step), 100).foreign == b"<" + b"x" * 99


def test_after_an_event_over_the_limit_nothing_is_decoded() -> None:
    decoder = SseDecoder(20)
    assert decoder.feed(b"data: a\n\ndata: " + b"x" * 20) == messages("a"), "what came whole before it counts"
    for chunk in (b"\n\ndata: b\n\n", b"", None):
        with pytest.raises(InferenceError) as caught:
            decoder.eof() if chunk is None else decoder.feed(chunk)
        assert caught.value.limit == "event_max_bytes"


@pytest.mark.parametrize("last", [b"data:678901", b"{345678901", b"data: 67890"])
def test_an_event_that_the_end_of_the_body_puts_over_the_limit_is_over_for_good(last: bytes) -> None:
    decoder = SseDecoder(11)
    assert decoder.feed(b"data:012345\n") == []
    assert decoder.feed(last) == []
    for more in (None, None, b"\n\n"):
        with pytest.raises(InferenceError) as caught:
            decoder.eof() if more is None else decoder.feed(more)
        assert caught.value.limit == "event_max_bytes"
        assert caught.value is decoder.over


def test_a_foreign_body_is_full_at_the_limit() -> None:
    decoder = SseDecoder(10)
    for piece, full in ((b"", False), (b"<12345678", False), (b"9", True), (b"0", True)):
        decoder.feed(piece)
        assert decoder.full is full
    assert decoder.foreign == b"<123456789"
    stream = SseDecoder(10)
    stream.feed(b": " + b"x" * 8 + b"\n")
    assert stream.full is False


def test_an_lf_right_after_a_cr_is_its_own_and_no_later_one_is() -> None:
    assert events_of(b"data: a\r", b"\ndata: b\n\n") == messages("a\nb")
    assert events_of(b"data: a\r", b"", b"\ndata: b\n\n") == messages("a\nb")
    assert events_of(b"data: a\r", b"data: b", b"\n", b"\ndata: c\n\n") == messages("a\nb", "c")
    assert events_of(b"data: a\r", b"\r", b"\ndata: b\n\n") == messages("a", "b")


@pytest.mark.parametrize("before", [b"\x0b", b"\x0c", b"\x00", b"\xc2\xa0", b"X", b"\n\x0b"])
def test_only_blanks_and_line_ends_may_stand_before_the_first_line(before: bytes) -> None:
    assert events_of(before + b"data: a\n\ndata: b\n\n") == messages("b")


def test_an_error_line_that_the_end_leaves_open_is_an_event() -> None:
    assert events_of(b"data: a\n\nerror: no") == [*messages("a"), SseEvent("error", "no")]


def test_each_event_has_the_whole_limit_for_itself() -> None:
    lines = (b"data: " + b"x" * 49 + b"\n") * 2 + b"\n"  # 99 characters with the LF between them
    assert decode([b"data: a\n\n" + lines + lines], 99).events == messages("a", *["x" * 49 + "\n" + "x" * 49] * 2)


def test_the_refusal_of_an_event_names_the_limit_and_its_key() -> None:
    error = decode([b"data: " + b"x" * 2000], 1234).error
    assert error is not None
    assert "1234" in error.message
    assert "event_max_bytes" in error.message
