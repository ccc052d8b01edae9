"""The daemon's log: one line an event, values that can be told apart, and nothing that anybody said."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boxmaker.log import KeyValueFormatter, describe_fault, log_event, log_exception, log_to_stderr

SECRET = "the owner's words"


@pytest.fixture
def lines() -> Iterator[StringIO]:
    """What the log has written so far."""
    out = StringIO()
    shown = logging.StreamHandler(out)
    shown.setFormatter(KeyValueFormatter())
    logger = logging.getLogger("boxmaker")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [shown], False
    logger.setLevel(logging.INFO)
    yield out
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


def fields_of(line: str) -> dict[str, str]:
    """Read a line as a person's script would."""
    found = {}
    rest = line.partition(" ")[2]
    while rest:
        key, _, rest = rest.partition("=")
        if rest.startswith('"'):
            value, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:].removeprefix(" ")
        else:
            value, _, rest = rest.partition(" ")
        found[key] = value
    return found


def test_an_event_is_a_line_with_its_time_and_fields(lines: StringIO) -> None:
    log_event("turn_end", session="20261130-141530-x7k2qf", ending="turn_done", ms=812)
    line = lines.getvalue()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z event=turn_end "
        r"session=20261130-141530-x7k2qf ending=turn_done ms=812\n",
        line,
    )


def test_the_time_is_utc_with_milliseconds() -> None:
    record = logging.LogRecord("boxmaker", logging.INFO, "", 0, "ready", None, None)
    record.created, record.msecs = 1796048130.123, 123.0
    assert KeyValueFormatter().format(record) == "2026-11-30T14:15:30.123Z event=ready"


def test_a_field_that_is_none_is_left_out(lines: StringIO) -> None:
    log_event("selftest", check="slot", remedy=None, count=0, flag=False)
    try:
        raise ValueError
    except ValueError:
        log_exception("failed", session=None)
    first, second = lines.getvalue().splitlines()
    assert first.endswith("event=selftest check=slot count=0 flag=False")
    assert "session" not in second


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("a", "a"),
        ("é", "é"),
        ("a=b", "a=b"),
        ("C:\\x", "C:\\x"),
        ("", '""'),
        ("a b", '"a b"'),
        ('a"b', '"a\\"b"'),
        ("a\nb", '"a\\nb"'),
        ("a\tb", '"a\\tb"'),
        ("\x1b[31m", '"\\u001b[31m"'),
        ("a\u2028b", '"a\\u2028b"'),
        ("a\u202eb", '"a\\u202eb"'),
        ("\ud800", '"\\ud800"'),
        (True, "True"),
        (1.5, "1.5"),
    ],
)
def test_a_value_that_would_be_misread_is_quoted(lines: StringIO, value: object, written: str) -> None:
    log_event("e", value=value, next=1)
    assert lines.getvalue().partition(" ")[2] == f"event=e value={written} next=1\n"


@given(value=st.text(st.characters()), other=st.text(st.characters()))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_values_make_one_line_that_gives_them_back(lines: StringIO, value: str, other: str) -> None:
    lines.seek(0)
    lines.truncate()
    log_event("e", value=value, other=other)
    line = lines.getvalue()
    line.encode("utf-8")
    assert len(line.splitlines()) == 1
    assert all(char.isprintable() for char in line[:-1])
    assert fields_of(line.removesuffix("\n")) == {"event": "e", "value": value, "other": other}


def fail(text: str) -> None:
    raise KeyError(text)


def fail_further(text: str) -> None:
    try:
        fail(text)
    except KeyError as exc:
        raise ValueError(text, {"arguments": text}) from exc


def test_a_fault_is_one_line_that_names_types_and_places_and_no_text(lines: StringIO) -> None:
    try:
        fail_further(SECRET)
    except ValueError:
        log_exception("tool_port_failed", session="a", call=3)
    line = lines.getvalue()
    assert line.count("\n") == 1
    assert SECRET not in line
    fields = fields_of(line.removesuffix("\n"))
    assert {key: fields[key] for key in ("event", "session", "call")} == {
        "event": "tool_port_failed",
        "session": "a",
        "call": "3",
    }
    place = r"tests/test_log\.py:\d+"
    assert re.fullmatch(f"ValueError at {place} {place} from KeyError at {place} {place}", fields["fault"])


def test_places_go_from_the_fault_outwards() -> None:
    try:
        fail("x")
    except KeyError as exc:
        own = exc.__traceback__.tb_lineno if exc.__traceback__ is not None else 0
        text = describe_fault(exc)
    inner = fail.__code__.co_firstlineno + 1
    assert text == f"KeyError at tests/test_log.py:{inner} tests/test_log.py:{own}"


def test_a_group_names_each_of_its_faults(lines: StringIO) -> None:
    first = describe_fault(ExceptionGroup(SECRET, [ValueError(SECRET), ExceptionGroup(SECRET, [KeyError(SECRET)])]))
    assert first == "ExceptionGroup of (ValueError; ExceptionGroup of (KeyError))"


def fail_without_context(text: str) -> None:
    try:
        fail(text)
    except KeyError:
        raise TypeError(text) from None


def test_a_context_that_was_suppressed_is_left_out() -> None:
    with pytest.raises(TypeError) as caught:
        fail_without_context(SECRET)
    assert re.fullmatch(r"TypeError at tests/test_log\.py:\d+ tests/test_log\.py:\d+", describe_fault(caught.value))


def dig(depth: int) -> None:
    if depth == 0:
        raise RuntimeError(SECRET)
    dig(depth - 1)


def test_a_deep_fault_names_its_innermost_twenty_places() -> None:
    with pytest.raises(RuntimeError) as caught:
        dig(50)
    line = dig.__code__.co_firstlineno + 2
    text = describe_fault(caught.value)
    assert text.startswith(f"RuntimeError at tests/test_log.py:{line} tests/test_log.py:{line + 1} ")
    assert len(text.split()) == 2 + 20


def test_log_exception_outside_an_except_block_is_a_plain_line(lines: StringIO) -> None:
    log_exception("odd")
    assert lines.getvalue().endswith("event=odd\n")


def test_the_log_goes_to_stderr_once(lines: StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr()
    log_to_stderr()
    log_event("ready", pid=1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("event=ready pid=1\n") == 1


def test_a_log_that_nobody_reads_does_not_make_the_status_of_a_daemon() -> None:
    """Text is left over for the last flush; without letting go of it the status is 120."""
    code = (
        "import sys\n"
        "from boxmaker.log import let_go_of_stderr\n"
        "print('ready', file=sys.stderr, flush=True)\n"
        "sys.stdin.read()\n"
        "sys.stderr.buffer.write(b'left over')\n"
        "let_go_of_stderr()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stderr.readline() == b"ready\n"
        process.stderr.close()
        process.stdin.close()
        assert process.wait(60) == 0
