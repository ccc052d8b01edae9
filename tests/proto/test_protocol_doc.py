"""docs/protocol.md: its examples are the fixtures, its tables are the code's values."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs
import pytest

from boxmaker import config
from boxmaker.channel.server import AFTER_REQUEST_MAX_BYTES
from boxmaker.errors import InferenceError, TurnLimit
from boxmaker.proto import channel, chat, records
from boxmaker.proto.channel import FINALS, SOCKET_PATH_MAX_BYTES, TURN_EVENTS, ErrorCode, wire_error
from boxmaker.proto.frames import ANSWER_KINDS, CLIENT_MAX_FRAME, REQUEST_KINDS, VERSION
from boxmaker.proto.records import RECORDS
from boxmaker.tools import dispatch, endings
from boxmaker.tools.dispatch import Local, cap_result
from boxmaker.tools.fake import fake_registry

from .examples import FIXTURES, frame_object, split_frame
from .test_channel import ERRORS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "protocol.md").read_bytes().decode("utf-8")
BLOCKS: list[str] = re.findall(r"^```.*?\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def section(heading: str) -> str:
    """What stands below a heading, up to the next of the same or a higher level."""
    level = heading.partition(" ")[0]
    _, found, rest = f"\n{TEXT}".partition(f"\n{heading}\n")
    assert found, heading
    assert f"\n{heading}\n" not in rest, heading
    return re.split(rf"^#{{1,{len(level)}}} (?!fixtures/)", rest, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without their heads."""
    lines = text.split("\n")
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line, following in pairwise([*lines, ""])
        if line.startswith("| ") and not line.startswith("| ---") and not following.startswith("| ---")
    ]


def keys(text: str) -> list[str]:
    """The names in the first column, free of back-ticks."""
    return [row[0].strip("`") for row in rows(text)]


def ticked(cell: str) -> set[str]:
    return set(re.findall("`([^`]+)`", cell))


# -- examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_example_is_the_content_of_the_fixture_that_it_names(block: str) -> None:
    name, _, shown = block.partition("\n")
    file = ROOT / name.removeprefix("# ")
    assert file.is_relative_to(FIXTURES)
    raw = file.read_bytes()
    if file.suffix == ".frame":
        length, _, text = shown.partition("\n")
        assert re.fullmatch("[0-9a-f]{2}( [0-9a-f]{2}){3}", length)
        assert bytes.fromhex(length) + text.removesuffix("\n").encode("utf-8") == raw
    elif file.suffix == ".jsonl":
        assert shown.encode("utf-8") == raw
    else:
        assert shown.removesuffix("\n").encode("utf-8") == raw


def test_every_fixture_of_channel_log_and_baseline_is_shown_once() -> None:
    shown = [block.partition("\n")[0].removeprefix("# ") for block in BLOCKS]
    wanted = [
        str(file.relative_to(ROOT))
        for file in FIXTURES.rglob("*.*")
        if ".unusual." not in file.name and file.parent.name != "tools"
    ]
    assert sorted(shown) == sorted(wanted)


def test_an_example_stands_in_the_section_that_it_belongs_to() -> None:
    for tag in TURN_EVENTS.tags:
        assert f"# fixtures/proto/events/{tag}.frame\n" in event_section(tag)
    for tag in RECORDS.tags:
        assert f"# fixtures/proto/records/{tag}.jsonl\n" in record_section(tag)
    for code in ErrorCode:
        assert f"# fixtures/proto/errors/{code}.frame\n" in section("### `error`")


# -- tables of keys --------------------------------------------------------------------------------


def _parts(heading: str) -> dict[str, str]:
    pieces = re.split("^### `([a-z_]+)`(?: \\(final\\))?$", section(heading), flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def event_section(tag: str) -> str:
    return _parts("## Events")[tag]


def record_section(tag: str) -> str:
    return _parts("## The log: `0.jsonl`")[tag]


def class_of(tag: str, *modules: Any) -> type[attrs.AttrsInstance]:
    name = "".join(word.capitalize() for word in tag.split("_"))
    found: type[attrs.AttrsInstance] = next(getattr(module, name) for module in modules if hasattr(module, name))
    return found


def fields(cls: type[attrs.AttrsInstance]) -> list[str]:
    return [field.name.removesuffix("_") for field in attrs.fields(cls)]


def test_the_sections_are_the_events_and_the_records() -> None:
    assert sorted(_parts("## Events")) == sorted(TURN_EVENTS.tags)
    assert sorted(_parts("## The log: `0.jsonl`")) == sorted(RECORDS.tags)
    assert list(_parts("## Final frames")) == [*FINALS, "error"]


@pytest.mark.parametrize("tag", TURN_EVENTS.tags)
def test_an_events_table_has_its_keys_in_order(tag: str) -> None:
    assert keys(event_section(tag)) == fields(class_of(tag, channel, chat))


@pytest.mark.parametrize("tag", RECORDS.tags)
def test_a_records_table_has_its_keys_in_order(tag: str) -> None:
    assert ["time", *keys(record_section(tag))] == fields(class_of(tag, records))


def test_the_tables_of_frames_have_their_keys_in_order() -> None:
    assert keys(section("## Frames")) == list(frame_object(FIXTURES / "frames" / "turn.frame"))
    assert keys(section("## The request: `turn`")) == fields(channel.Turn)
    usage = [f"usage.{name}" for name in fields(chat.Figures)]
    assert keys(section("### `turn_done`")) == [*fields(channel.TurnDone), *usage]
    assert keys(section("### `error`"))[:3] == fields(channel.WireError)
    for name in ("steer", "cancel", "fork"):
        assert keys(section(f"### The request `{name}`")) == fields(class_of(name, channel)), name
    for name in ("cancel_done", "fork_done"):
        assert keys(section(f"### `{name}`")) == fields(class_of(name, channel)), name
    below = {"server": channel.ServerStatus, "slots": channel.SlotStatus, "sessions": channel.SessionStatus}
    wanted = [
        key
        for name in fields(channel.StatusDone)
        for key in [name, *(f"{name}.{inner}" for inner in (fields(below[name]) if name in below else ()))]
    ]
    assert keys(section("### `status_done`")) == wanted


def test_kinds_and_version_are_the_codes() -> None:
    table = {row[0].strip("`"): row[1] for row in rows(section("## Frames"))}
    assert table["v"] == f"the integer {VERSION}"
    assert ticked(table["kind"]) == {*REQUEST_KINDS, *ANSWER_KINDS}


def test_the_words_of_a_choice_are_the_codes() -> None:
    reasons = {row[0].strip("`"): row[1] for row in rows(event_section("cut"))}["reason"]
    assert ticked(reasons) == {"length", "thinking_cap"}
    busy = {row[0].strip("`"): row[1] for row in rows(section("## The request: `turn`"))}["when_busy"]
    assert ticked(busy) == set(get_args(channel.WhenBusy))
    causes = {row[0].strip("`"): row[1] for row in rows(section("### `cancel_done`"))}["cause"]
    assert ticked(causes) == set(get_args(channel.CancelCause))
    phases = {row[0].strip("`"): row[1] for row in rows(section("### `status_done`"))}["sessions.phase"]
    assert ticked(phases) == set(get_args(channel.Phase))
    for text in (event_section("tool_result"), record_section("tool_result")):
        assert ticked({row[0].strip("`"): row[1] for row in rows(text)}["class"]) == {"public", "private", "secret"}


# -- errors ----------------------------------------------------------------------------------------


def error_rows() -> Iterator[tuple[str, list[str]]]:
    for row in rows(section("### `error`")):
        if len(row) == 4:
            yield row[0].strip("`"), row


def test_the_table_of_errors_has_every_code_once() -> None:
    assert sorted(code for code, _ in error_rows()) == sorted(ErrorCode)


def test_the_table_of_errors_has_the_keys_of_every_detail() -> None:
    every = InferenceError(kind="http", message="", status=500, limit="busy_s", attempts=2)
    for code, row in error_rows():
        detail = wire_error(every if code == "inference" else ERRORS[code]).detail
        named = ticked(row[2])
        assert set(detail) <= named, code
        if code in ("cancelled", "no_turn"):
            assert named & {"cause", "ending"} == set(detail), code
        elif code not in ("inference", "turn_limit"):
            assert named == set(detail), code


def test_the_table_of_errors_names_every_limit() -> None:
    table = {code: ticked(row[2]) for code, row in error_rows()}
    source = "".join(file.read_text("utf-8") for file in (ROOT / "src/boxmaker/inference").glob("*.py"))
    limits = set(re.findall(r'\blimit="(\w+)"', source))
    assert limits
    assert table["inference"] - {"status", "attempts", "limit"} == limits
    assert table["turn_limit"] - {"limit", "value"} == set(get_args(get_type_hints(TurnLimit)["limit"]))


# -- limits ----------------------------------------------------------------------------------------

TABLES = {
    "channel": config.Channel,
    "loop": config.Loop,
    "tools": config.Tools,
    "timeouts": config.Timeouts,
    "retry": config.Retry,
    "inference": config.Inference,
}


def test_the_limits_are_the_configurations_defaults() -> None:
    found = rows(section("## Limits and timeouts"))
    assert len(found) > 10
    for setting, default, _ in found:
        parts = re.fullmatch(r"`\[(\w+)\] (\w+)`", setting)
        assert parts is not None, setting
        cls: type[attrs.AttrsInstance] = TABLES[parts[1]]
        assert attrs.fields_dict(cls)[parts[2]].default == (None if default == "off" else int(default)), setting


def test_every_setting_of_the_channel_is_among_the_limits() -> None:
    named = {setting for setting, _, _ in rows(section("## Limits and timeouts"))}
    assert {f"`[channel] {name}`" for name in fields(config.Channel) if name != "socket"} <= named
    assert {f"`[timeouts] {name}`" for name in fields(config.Timeouts)} <= named
    assert {f"`[inference] {name}`" for name in fields(config.Inference)} <= named


def test_the_fixed_limits_are_the_codes() -> None:
    text = " ".join(section("## Limits and timeouts").split())
    assert f"dropped up to {AFTER_REQUEST_MAX_BYTES:,};" in text
    assert f"frames of loopd of up to {CLIENT_MAX_FRAME:,} bytes" in text
    assert f"has at most {SOCKET_PATH_MAX_BYTES} bytes" in text


# -- texts that the model sees ---------------------------------------------------------------------


def text_rows() -> list[list[str]]:
    return rows(section("### Other fixed texts"))


def test_the_fixed_texts_are_the_codes_word_for_word() -> None:
    listed = {name.strip("`"): text.strip("`") for name, text in text_rows() if re.match(r"`[a-z_]+\.[a-z_]+\.", name)}
    assert len(listed) == 3
    for name, text in listed.items():
        module, _, constant = name.rpartition(".")
        assert getattr(importlib.import_module(f"boxmaker.{module}"), constant) == text, name


def local(name: str, arguments: str) -> str:
    answer = dispatch.dispatch(fake_registry(), name, arguments)
    assert isinstance(answer, Local)
    return answer.text


def test_the_endings_of_calls_are_the_codes_word_for_word() -> None:
    found = [(name.strip("`"), text.strip("`")) for name, _, text in rows(section("### Endings of calls"))]
    constants = {name: text for name, text in vars(endings).items() if name.isupper()}
    assert dict(found[: len(constants)]) == constants
    reason = local("clock", "[]").rpartition(": ")[2]
    assert found[len(constants) :] == [
        ("unknown_tool", local("NAME", "{}")),
        ("unknown_to_call_tool", local("call_tool", '{"name":"NAME","arguments":{}}')),
        ("unknown_to_call_tool", local("call_tool", '{"name":"clock","arguments":{}}')),
        ("bad_arguments", local("clock", "[]").replace(reason, "REASON")),
        ("call_denied", endings.call_denied("REASON")),
    ]
    functions = {name for name, value in vars(endings).items() if inspect.isfunction(value)}
    assert functions == {name for name, _ in found[len(constants) :]}


def test_an_ending_says_whether_the_call_ran() -> None:
    for name, reason, text in rows(section("### Endings of calls")):
        if name.strip("`").isupper() and name != "`NO_APPROVAL`":
            begins = "`Not run: " if reason.startswith("not run: ") else "`Interrupted: "
            assert text.startswith(begins), name
            assert ("unknown" in text) == reason.startswith("unknown: "), name


def test_the_texts_with_a_part_that_varies_are_the_codes() -> None:
    found = local("find_tool", "{}").rpartition("\n")[2]
    assert [text.strip("`") for name, text in text_rows() if not name.startswith("`") or "." not in name] == [
        dispatch.tool_failed("MESSAGE"),
        local("find_tool", '{"query":"no such thing"}'),
        found,
        cap_result("ab", 1)[0].removeprefix("a"),
    ]


def test_the_frame_examples_are_whole_frames() -> None:
    for file in FIXTURES.rglob("*.frame"):
        split_frame(file.read_bytes())
