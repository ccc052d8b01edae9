"""config.toml: every key, its default, and one line for everything that is wrong."""

from __future__ import annotations

import datetime
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from boxmaker.config import Config, at_home, load_config, request_field_problem
from boxmaker.errors import BoxmakerError, ConfigError

MINIMAL = '[server]\nurl = "http://127.0.0.1:8080"\n'


def load(directory: Path, text: str, environ: Mapping[str, str] | None = None) -> Config:
    file = directory / "config.toml"
    file.write_text(text, "utf-8")
    return load_config(file, environ or {})


def problems(directory: Path, text: str) -> list[str]:
    """The lines of the refusal, each without the file's name, which each must have."""
    before = set(directory.rglob("*")) | {directory / "config.toml"}
    with pytest.raises(ConfigError) as caught:
        load(directory, text)
    assert set(directory.rglob("*")) == before, "nothing is created"
    start = f"{directory / 'config.toml'}: "
    lines = str(caught.value).split("\n")
    assert len(lines) == len(caught.value.problems)
    assert all(line.startswith(start) for line in lines)
    return [line.removeprefix(start) for line in lines]


def with_key(table: str, key: str, value: str) -> str:
    """A document that sets one key beside what is required."""
    if table == "server":
        return f"{MINIMAL}{key} = {value}\n" if key != "url" else f"[server]\nurl = {value}\n"
    return f"{MINIMAL}[{table}]\n{key} = {value}\n"


# -- defaults ---------------------------------------------------------------------------------


def test_every_key_but_the_url_has_the_default_of_the_design(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL)
    assert config.file == tmp_path / "config.toml"
    assert config.server.url == "http://127.0.0.1:8080"
    assert config.server.api_key_file is None
    assert config.server.api_key is None
    assert config.request == {}
    assert config.slots.main == 0
    assert config.thinking.enabled is True
    assert config.thinking.cap == 4096
    assert config.retry.attempts == 5
    assert config.retry.base_ms == 500
    assert config.retry.cap_ms == 10_000
    assert config.retry.loading_s == 600
    assert config.timeouts.connect_s == 5
    assert config.timeouts.busy_s == 1800
    assert config.timeouts.prefill_s == 1800
    assert config.timeouts.stall_s == 300
    assert config.inference.reply_max_bytes == 8_388_608
    assert config.inference.event_max_bytes == 4_194_304
    assert config.channel.socket == Path("/var/lib/boxmaker/run/loop/loop.sock")
    assert config.channel.request_s == 10
    assert config.channel.write_timeout_s == 30
    assert config.channel.max_frame == 1_048_576
    assert config.channel.grace_s == 10
    assert config.paths.home == Path("/var/lib/boxmaker")
    assert config.session.memory_mib == 64
    assert config.session.warn_at == 0.8
    assert config.loop.tool_iterations == 8
    assert config.loop.repeat_detection is True
    assert config.loop.tool_result_cap == 16_384
    assert config.loop.parallel_tools == 4
    assert config.loop.turn_s is None
    assert config.tools.call_s is None
    assert (config.slots.save_dir, config.slots.save_s, config.slots.save_mib) == (None, 10, 8192)
    assert config.baseline.system == tmp_path / "system.md"
    assert config.baseline.system_set is False
    assert config.baseline.token_budget == 3000


def test_slots_are_saved_beside_the_file_where_no_other_place_is_named(tmp_path: Path) -> None:
    assert load(tmp_path, with_key("slots", "save_dir", '"kv"')).slots.save_dir == tmp_path / "kv"
    assert load(tmp_path, with_key("slots", "save_dir", '"/var/kv"')).slots.save_dir == Path("/var/kv")


def test_another_home_saves_no_slots(tmp_path: Path) -> None:
    """It is soon gone, and nobody would sweep what it leaves."""
    config = load(tmp_path, with_key("slots", "save_dir", '"kv"'))
    assert at_home(config, tmp_path / "other").slots.save_dir is None


def test_an_empty_file_lacks_the_url_alone(tmp_path: Path) -> None:
    assert problems(tmp_path, "") == ["[server] url: is missing, and has no default"]
    assert problems(tmp_path, "[server]\n") == ["[server] url: is missing, and has no default"]


# -- one key at a time ------------------------------------------------------------------------

SECONDS = [
    ("retry", "base_ms"),
    ("retry", "cap_ms"),
    ("retry", "loading_s"),
    ("timeouts", "connect_s"),
    ("timeouts", "busy_s"),
    ("timeouts", "prefill_s"),
    ("timeouts", "stall_s"),
    ("channel", "request_s"),
    ("channel", "write_timeout_s"),
    ("channel", "grace_s"),
    ("loop", "turn_s"),
    ("tools", "call_s"),
    ("slots", "save_s"),
]
COUNTS = [
    ("thinking", "cap"),
    ("retry", "attempts"),
    ("session", "memory_mib"),
    ("slots", "save_mib"),
    ("loop", "tool_iterations"),
    ("loop", "parallel_tools"),
    ("baseline", "token_budget"),
]
SIZES = [
    ("inference", "reply_max_bytes"),
    ("inference", "event_max_bytes"),
    ("channel", "max_frame"),
    ("loop", "tool_result_cap"),
]
FLAGS = [("thinking", "enabled"), ("loop", "repeat_detection")]
PATHS = [
    ("server", "api_key_file"),
    ("channel", "socket"),
    ("paths", "home"),
    ("baseline", "system"),
    ("slots", "save_dir"),
]
SLOTS = [("slots", "main")]
SHARES = [("session", "warn_at")]
ALL_KEYS = [("server", "url"), *SECONDS, *COUNTS, *SIZES, *FLAGS, *PATHS, *SLOTS, *SHARES]

NOT_A_NUMBER = [
    ("true", "True"),
    ('"5"', "'5'"),
    ("[5]", "[5]"),
    ("{ a = 1 }", "{'a': 1}"),
    ("2026-11-30", "datetime.date(2026, 11, 30)"),
]


@pytest.mark.parametrize(("table", "key"), SECONDS)
@pytest.mark.parametrize(
    ("value", "shown"),
    [*NOT_A_NUMBER, ("0", "0"), ("-1", "-1"), ("0.0", "0.0"), ("-0.5", "-0.5"), ("nan", "nan"), ("inf", "inf")],
)
def test_a_time_is_a_number_over_zero(tmp_path: Path, table: str, key: str, value: str, shown: str) -> None:
    assert problems(tmp_path, with_key(table, key, value)) == [
        f"[{table}] {key}: found {shown}, allowed is a number > 0"
    ]


@pytest.mark.parametrize(
    ("value", "listed", "text"),
    [("0", (0,), "slot 0"), ("3", (3,), "slot 3"), ("[1]", (1,), "slot 1"), ("[2, 0, 1]", (2, 0, 1), "slots 2, 0, 1")],
)
def test_our_slots_are_one_or_a_list(tmp_path: Path, value: str, listed: tuple[int, ...], text: str) -> None:
    slots = load(tmp_path, with_key("slots", "main", value)).slots
    assert slots.listed == listed
    assert str(slots) == text


@pytest.mark.parametrize(
    ("value", "shown", "allowed"),
    [
        *((value, shown, "an integer ≥ 0") for value, shown in NOT_A_NUMBER if value != "[5]"),
        *((value, value, "an integer ≥ 0") for value in ("0.0", "-1", "-7")),
        *(
            (value, value, "an integer ≥ 0, or a list of different ones")
            for value in ("[]", "[0, 0]", "[0, -1]", "[1.0]", "[[1]]")
        ),
        ("[0, true]", "[0, True]", "an integer ≥ 0, or a list of different ones"),
    ],
)
def test_what_names_no_slots_is_refused(tmp_path: Path, value: str, shown: str, allowed: str) -> None:
    assert problems(tmp_path, with_key("slots", "main", value)) == [
        f"[slots] main: found {shown}, allowed is {allowed}"
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [*NOT_A_NUMBER, ("0", "0"), ("-1", "-1"), ("1.01", "1.01"), ("2", "2"), ("nan", "nan"), ("inf", "inf")],
)
def test_a_share_is_a_number_up_to_one(tmp_path: Path, value: str, shown: str) -> None:
    assert problems(tmp_path, with_key("session", "warn_at", value)) == [
        f"[session] warn_at: found {shown}, allowed is a number > 0 and ≤ 1"
    ]


@pytest.mark.parametrize(("value", "share"), [("1", 1), ("0.001", 0.001), ("1.0", 1.0)])
def test_a_share_is_taken(tmp_path: Path, value: str, share: float) -> None:
    assert load(tmp_path, with_key("session", "warn_at", value)).session.warn_at == share


@pytest.mark.parametrize(("table", "key"), SECONDS)
def test_a_time_may_be_a_fraction(tmp_path: Path, table: str, key: str) -> None:
    config = load(tmp_path, with_key(table, key, "0.25"))
    assert getattr(getattr(config, table), key) == 0.25


@pytest.mark.parametrize(
    ("keys", "least", "allowed"),
    [
        (COUNTS, 1, "an integer ≥ 1"),
        (SIZES, 256, "an integer number of bytes ≥ 256"),
    ],
)
def test_an_integer_has_its_least_value(tmp_path: Path, keys: list[tuple[str, str]], least: int, allowed: str) -> None:
    wrong = [*NOT_A_NUMBER, (f"{least}.0", f"{least}.0"), (str(least - 1), str(least - 1)), ("-7", "-7")]
    for table, key in keys:
        for value, shown in wrong:
            assert problems(tmp_path, with_key(table, key, value)) == [
                f"[{table}] {key}: found {shown}, allowed is {allowed}"
            ]
        config = load(tmp_path, with_key(table, key, str(least)))
        assert getattr(getattr(config, table), key) == least


@pytest.mark.parametrize(("table", "key"), FLAGS)
def test_a_flag_is_true_or_false(tmp_path: Path, table: str, key: str) -> None:
    for value, shown in [("0", "0"), ("1", "1"), ('"true"', "'true'"), ("[]", "[]")]:
        assert problems(tmp_path, with_key(table, key, value)) == [
            f"[{table}] {key}: found {shown}, allowed is true or false"
        ]
    assert getattr(getattr(load(tmp_path, with_key(table, key, "false")), table), key) is False
    assert getattr(getattr(load(tmp_path, with_key(table, key, "true")), table), key) is True


@pytest.mark.parametrize(("table", "key"), PATHS)
def test_a_path_is_text(tmp_path: Path, table: str, key: str) -> None:
    for value, shown in [("5", "5"), ("true", "True"), ('""', "''"), ("[]", "[]"), ('"a\\u0000b"', "'a\\x00b'")]:
        assert problems(tmp_path, with_key(table, key, value)) == [
            f"[{table}] {key}: found {shown}, allowed is a path as text"
        ]


@pytest.mark.parametrize(("table", "key"), PATHS)
def test_a_path_of_an_unknown_user_is_refused(tmp_path: Path, table: str, key: str) -> None:
    [line] = problems(tmp_path, with_key(table, key, '"~no-such-user-here/x"'))
    assert line.startswith(f"[{table}] {key}: found '~no-such-user-here/x', allowed is a path")


@pytest.mark.parametrize(("table", "key"), ALL_KEYS)
def test_an_unknown_key_is_named_with_the_keys_of_its_table(tmp_path: Path, table: str, key: str) -> None:
    [line] = problems(tmp_path, f"{MINIMAL}{'' if table == 'server' else f'[{table}]'}\n{key}x = 1\n")
    where, _, allowed = line.partition(": unknown key; allowed are ")
    assert where == f"[{table}] {key}x"
    assert set(allowed.split(", ")) == {other for its_table, other in ALL_KEYS if its_table == table}


@pytest.mark.parametrize("key", ["api_key", "system_set"])
def test_what_we_work_out_ourselves_is_no_key(tmp_path: Path, key: str) -> None:
    table = "server" if key == "api_key" else "baseline"
    [line] = problems(tmp_path, with_key(table, key, '"sk-123"'))
    assert line.startswith(f"[{table}] {key}: unknown key; allowed are ")
    assert "sk-123" not in line, "a key at the wrong place is not for the journal"


def test_an_unknown_table_is_named_with_the_known_ones(tmp_path: Path) -> None:
    known = (
        "request, server, slots, thinking, retry, timeouts, inference, channel, paths, session, loop, tools, baseline"
    )
    assert problems(tmp_path, MINIMAL + "[servers]\nurl = 1\n") == [f"[servers]: unknown table; known are {known}"]
    assert problems(tmp_path, MINIMAL + "[[x]]\ny = 1\n") == [f"[x]: unknown table; known are {known}"]
    assert problems(tmp_path, "main = 1\n" + MINIMAL) == [
        f"main: unknown key outside of the tables; known tables are {known}"
    ]


@pytest.mark.parametrize("table", sorted({table for table, _ in ALL_KEYS} | {"request"}))
def test_a_table_that_is_none_is_one_problem(tmp_path: Path, table: str) -> None:
    rest = "" if table == "server" else MINIMAL
    assert problems(tmp_path, f"{table} = 5\n{rest}") == [f"[{table}]: found 5, allowed is a table"]
    assert problems(tmp_path, f"{rest}[[{table}]]\n") == [f"[{table}]: found [{{}}], allowed is a table"]


def test_several_problems_are_several_lines(tmp_path: Path) -> None:
    text = """
        [server]
        url = "ftp://h"
        [slots]
        main = -1
        mian = 0
        [request]
        n = 2
        [lop]
        [thinking]
        cap = "many"
    """
    assert problems(tmp_path, text) == [
        "[lop]: unknown table; known are request, server, slots, thinking, retry, timeouts, inference, channel, paths, "
        "session, loop, tools, baseline",
        '[server] url: found \'ftp://h\', allowed is text like "http://127.0.0.1:8080" or "unix:/run/llama/llama.sock"',
        "[slots] main: found -1, allowed is an integer ≥ 0",
        "[slots] mian: unknown key; allowed are main, save_dir, save_s, save_mib",
        "[thinking] cap: found 'many', allowed is an integer ≥ 1",
        "[request] n: may not be set: a turn has one reply",
    ]


def test_a_refusal_ends_a_command_with_status_2(tmp_path: Path) -> None:
    with pytest.raises(BoxmakerError) as caught:
        load(tmp_path, "")
    assert caught.value.exit_code == 2


def test_a_wrong_value_however_large_is_one_short_line(tmp_path: Path) -> None:
    """Python refuses to write out integers of thousands of digits, and nests no deeper than its stack."""
    huge = "0x" + "f" * 5000
    deep = "a." * 3000
    for line in [
        *problems(tmp_path, with_key("slots", "main", huge)),
        *problems(tmp_path, with_key("thinking", "enabled", huge)),
        *problems(tmp_path, with_key("timeouts", "connect_s", huge)),
        *problems(tmp_path, with_key("request", "seed", huge)),
        *problems(tmp_path, f"{MINIMAL}[slots]\nmain.{deep}x = 1\n"),
        *problems(tmp_path, f"{MINIMAL}[request]\nlogit_bias.{deep}x = 1\n"),
    ]:
        assert "found a value too large to show, allowed is " in line
        assert len(line) < 200
    [line] = problems(tmp_path, with_key("slots", "main", '"' + "x" * 10_000 + '"'))
    assert len(line) < 200


@pytest.mark.parametrize(("table", "key"), [*COUNTS, *SIZES, *SLOTS, *SECONDS])
def test_a_number_has_at_most_64_bits(tmp_path: Path, table: str, key: str) -> None:
    config = load(tmp_path, with_key(table, key, "9223372036854775807"))
    assert getattr(getattr(config, table), key) == 2**63 - 1
    [line] = problems(tmp_path, with_key(table, key, "9223372036854775808"))
    assert line.startswith(f"[{table}] {key}: found 9223372036854775808, allowed is a")
    assert line.endswith("≤ 9223372036854775807")


def test_an_odd_key_does_not_break_its_line(tmp_path: Path) -> None:
    assert problems(tmp_path, MINIMAL + '[slots]\n"a\\n\\u001b[31m" = 1\n') == [
        "[slots] 'a\\n\\x1b[31m': unknown key; allowed are main, save_dir, save_s, save_mib"
    ]
    [line] = problems(tmp_path, MINIMAL + '["x\\ny"]\n')
    assert line.startswith("['x\\ny']: unknown table; ")
    [line] = problems(tmp_path, MINIMAL + '[request]\n"a\\nb" = inf\n')
    assert line.startswith("[request] 'a\\nb': found inf, ")


def test_an_odd_file_name_does_not_break_its_line(tmp_path: Path) -> None:
    key = tmp_path / "a\\n\\x1b[31m"
    assert problems(tmp_path, MINIMAL + 'api_key_file = "a\\n\\u001b[31m"\n') == [
        f"[server] api_key_file: {key} cannot be read: No such file or directory"
    ]


# -- the url ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
        ("http://localhost", "http://localhost"),
        ("http://box.local.:1", "http://box.local.:1"),
        ("http://my_box:65535", "http://my_box:65535"),
        ("https://example.org/llama/", "https://example.org/llama"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("HTTPS://Example.org", "https://Example.org"),
        ("unix:/run/llama/llama.sock", "unix:/run/llama/llama.sock"),
        ("unix:/run/with space/é", "unix:/run/with space/é"),
    ],
)
def test_these_urls_are_taken(tmp_path: Path, written: str, kept: str) -> None:
    assert load(tmp_path, f'[server]\nurl = "{written}"\n').server.url == kept


@pytest.mark.parametrize(
    "written",
    [
        "",
        "127.0.0.1:8080",
        "localhost:8080",
        "ftp://h",
        "http:/h",
        "http://",
        "http://:8080",
        "http:///path",
        "http://h:0",
        "http://h:65536",
        "http://h:80a",
        "http://h:-1",
        "http://h?a=b",
        "http://h?",
        "http://h#f",
        "http://h#",
        "http://h h",
        " http://h",
        "http://h\\n",
        "http://h\\t",
        "http://h\\u0000",
        "http://h/\\u0001",
        "http://é.example",
        "http://a..b",
        "http://..",
        "http://*",
        "http://h%41",
        "http://" + "a" * 64,
        "http://" + ".".join(["a" * 63] * 4),
        "http://[::1",
        "http://::1",
        "http://[1.2.3.4]",
        "http://[v1.x]",
        "http://h[::1]",
        "http://[::1]h",
        "unix:",
        "unix:run/llama.sock",
        "unix:~/llama.sock",
        "unix:/run/\\u0000",
    ],
)
def test_these_urls_are_refused(tmp_path: Path, written: str) -> None:
    [line] = problems(tmp_path, f'[server]\nurl = "{written}"\n')
    assert line.startswith("[server] url: found '")
    assert line.endswith(', allowed is text like "http://127.0.0.1:8080" or "unix:/run/llama/llama.sock"')


@pytest.mark.parametrize(("value", "shown"), [("5", "5"), ("true", "True"), ("[]", "an array"), ("nan", "nan")])
def test_a_url_is_text(tmp_path: Path, value: str, shown: str) -> None:
    [line] = problems(tmp_path, f"[server]\nurl = {value}\n")
    assert line.startswith(f"[server] url: found {shown}, allowed is text like ")


@pytest.mark.parametrize(
    "written",
    ["http://me:hunter2@h", "http://hunter2@h/", "http://:hunter2@h", "http://me:hunter2@h h", "x://hunter2@"],
)
def test_a_password_in_the_url_is_refused_without_showing_it(tmp_path: Path, written: str) -> None:
    [line] = problems(tmp_path, f'[server]\nurl = "{written}"\n')
    assert line.startswith("[server] url: found ")
    assert "hunter2" not in line


def test_a_user_in_the_url_is_told_where_the_key_belongs(tmp_path: Path) -> None:
    assert problems(tmp_path, '[server]\nurl = "http://me:secret@h:80"\n') == [
        "[server] url: found 'http://…@h:80', allowed is a url without user and password; put the key into api_key_file"
    ]


PIECES = st.sampled_from(
    ["http://", "https://", "HTTP://", "127.0.0.1", "[::1]", "80", "xn--", *"[]:/p%@.-_é。\u200d ?#\\*~'|\n"]
)


@settings(deadline=None)  # a slow disk is no fault
@given(st.lists(PIECES, min_size=1, max_size=8).map("".join) | st.text(max_size=20).map("http://".__add__))
@example("http://[::1]:80/p")
def test_a_url_that_is_taken_is_one_that_the_client_can_use(
    tmp_path_factory: pytest.TempPathFactory, written: str
) -> None:
    directory = tmp_path_factory.getbasetemp()
    try:
        url = load(directory, f"[server]\nurl = {toml(written)}\n").server.url
    except ConfigError:
        return
    used = httpx.URL(url)
    assert used.scheme in ("http", "https")
    assert url.startswith(used.scheme + ":"), "the client looks at certificates when it begins with https:"
    assert used.raw_host
    assert not used.userinfo
    assert not used.query
    used.raw_host.decode("ascii").encode("idna")  # what a name look-up does first


# -- the key ----------------------------------------------------------------------------------


def key_file(directory: Path, content: bytes, mode: int = 0o600) -> Path:
    file = directory / "key"
    file.write_bytes(content)
    file.chmod(mode)
    return file


WITH_KEY = MINIMAL + 'api_key_file = "key"\n'


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_the_key_is_what_its_file_holds(tmp_path: Path, mode: int) -> None:
    file = key_file(tmp_path, b"  sk-abc~!\r\n", mode)
    config = load(tmp_path, WITH_KEY)
    assert config.server.api_key == "sk-abc~!"
    assert config.server.api_key_file == file


def test_the_key_is_never_shown(tmp_path: Path) -> None:
    key_file(tmp_path, b"sk-hunter2")
    assert "hunter2" not in repr(load(tmp_path, WITH_KEY))


@pytest.mark.parametrize(
    ("mode", "shown"),
    [(0o644, "0644"), (0o640, "0640"), (0o604, "0604"), (0o660, "0660"), (0o620, "0620"), (0o601, "0601")],
)
def test_a_key_that_others_can_use_is_refused(tmp_path: Path, mode: int, shown: str) -> None:
    file = key_file(tmp_path, b"sk-hunter2", mode)
    assert problems(tmp_path, WITH_KEY) == [
        f"[server] api_key_file: {file} has mode {shown}, others can use it; run: chmod 600 {file}"
    ]


@pytest.mark.parametrize(
    "content", [b"", b" \n", b"two\nlines", b"two words", b"\xff\xfe", "schlüssel".encode(), b"a\x00b", b"a\x7fb"]
)
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    file = key_file(tmp_path, content)
    assert problems(tmp_path, WITH_KEY) == [
        f"[server] api_key_file: {file} must hold the key alone, on one line of printable ASCII"
    ]


def test_a_key_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    assert problems(tmp_path, WITH_KEY) == [f"[server] api_key_file: {file} cannot be read: No such file or directory"]
    file.mkdir()
    assert problems(tmp_path, WITH_KEY) == [f"[server] api_key_file: {file} is no file"]


# -- [request] --------------------------------------------------------------------------------


def test_request_fields_are_kept_as_they_are_written(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + """
        [request]
        max_tokens = 12288
        temperature = 0.7
        stop = ["a", "b"]
        cache_reuse = false
        [request.chat_template_kwargs]
        preserve_reasoning = false
        x = { y = [1, { z = "ü" }] }
    """
    )
    config = load(tmp_path, text)
    assert list(config.request) == ["max_tokens", "temperature", "stop", "cache_reuse", "chat_template_kwargs"]
    assert config.request == {
        "max_tokens": 12288,
        "temperature": 0.7,
        "stop": ["a", "b"],
        "cache_reuse": False,
        "chat_template_kwargs": {"preserve_reasoning": False, "x": {"y": [1, {"z": "ü"}]}},
    }


@pytest.mark.parametrize(
    "field",
    [
        "messages",
        "tools",
        "stream",
        "stream_options",
        "id_slot",
        "cache_prompt",
        "return_progress",
        "reasoning_budget",
        "reasoning_budget_tokens",
        "reasoning_budget_message",
        "n",
        "grammar",
        "json_schema",
        "response_format",
        "tool_choice",
    ],
)
def test_a_field_that_the_client_sets_may_not_be_set(tmp_path: Path, field: str) -> None:
    [line] = problems(tmp_path, with_key("request", field, "1"))
    assert line.startswith(f"[request] {field}: may not be set: ")
    assert request_field_problem(field)


def test_a_field_that_the_server_knows_is_no_problem() -> None:
    for field in ("temperature", "max_tokens", "seed", "top_k", "reasoning_format", "chat_template_kwargs", "nn"):
        assert request_field_problem(field) is None


def test_thinking_is_switched_in_one_place(tmp_path: Path) -> None:
    text = MINIMAL + "[request.chat_template_kwargs]\nenable_thinking = true\n"
    assert problems(tmp_path, text) == [
        "[request] chat_template_kwargs.enable_thinking: may not be set: set [thinking] enabled"
    ]


def test_template_arguments_are_a_table(tmp_path: Path) -> None:
    assert problems(tmp_path, with_key("request", "chat_template_kwargs", "5")) == [
        "[request] chat_template_kwargs: found 5, allowed is a table"
    ]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "2026-11-30", "12:00:00", "[1, [inf]]", "{ a = [nan] }"])
def test_a_request_field_is_what_json_can_say(tmp_path: Path, value: str) -> None:
    [line] = problems(tmp_path, with_key("request", "x", value))
    assert line.startswith("[request] x: found ")
    assert ", allowed is what JSON can say" in line


def test_request_fields_nest_100_deep(tmp_path: Path) -> None:
    load(tmp_path, with_key("request", "x", "[" * 100 + "]" * 100))
    [line] = problems(tmp_path, with_key("request", "x", "[" * 101 + "]" * 101))
    assert line.endswith("at most 100 levels")


# -- paths ------------------------------------------------------------------------------------


def test_the_home_is_the_files_then_the_environments_then_the_default(tmp_path: Path) -> None:
    environ = {"BOXMAKER_HOME": "/srv/box"}
    assert load(tmp_path, with_key("paths", "home", '"/opt/box"'), environ).paths.home == Path("/opt/box")
    assert load(tmp_path, MINIMAL, environ).paths.home == Path("/srv/box")
    assert load(tmp_path, MINIMAL, {"BOXMAKER_HOME": ""}).paths.home == Path("/var/lib/boxmaker")
    assert load(tmp_path, MINIMAL, {}).paths.home == Path("/var/lib/boxmaker")


def test_the_socket_is_in_the_home_that_was_chosen(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, {"BOXMAKER_HOME": "/srv/box"})
    assert config.channel.socket == Path("/srv/box/run/loop/loop.sock")
    config = load(tmp_path, with_key("channel", "socket", '"/run/box.sock"'), {"BOXMAKER_HOME": "/srv/box"})
    assert config.channel.socket == Path("/run/box.sock")


def test_a_socket_path_has_at_most_107_bytes(tmp_path: Path) -> None:
    assert load(tmp_path, with_key("channel", "socket", f'"/{"s" * 106}"')).channel.socket == Path("/" + "s" * 106)
    for key, value in (("socket", "/" + "s" * 107), ("socket", "/" + "ü" * 54)):
        (line,) = problems(tmp_path, with_key("channel", key, f'"{value}"'))
        bytes_ = len(value.encode())
        assert line == f"[channel] socket: {value} has {bytes_} bytes, allowed are 107; set it to a shorter path"
    (line,) = problems(tmp_path, with_key("paths", "home", f'"/{"h" * 100}"'))
    assert "[channel] socket" in line, "the socket of a home that is too long has to be set"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ('"http://u:hunter2@h"', "'http://…@h'"),
        ('"http:/u:hunter2@h"', "'http:/…@h'"),
        ('"https:u:hunter2@h"', "'…@h'"),
        ('"u:hunter2@h"', "'…@h'"),
        ('"ftp://u:hunter2@h"', "'ftp://…@h'"),
        ('"http://u:hunter2\\n@h"', "'http://…@h'"),
        ('"http://u:hunter2@evil@h/?q"', "'http://…@h/?q'"),
        ('"http://u:hunter2' + "x" * 90 + '@h"', "'http://…@h'"),
        ('["http://u:hunter2@h"]', "an array"),
        ('{a = "http://u:hunter2@h"}', "a table"),
    ],
)
def test_a_password_in_a_url_is_never_shown_however_the_url_is_wrong(tmp_path: Path, url: str, shown: str) -> None:
    (line,) = problems(tmp_path, with_key("server", "url", url))
    assert line.startswith(f"[server] url: found {shown}, allowed is ")
    assert "hunter2" not in line


@pytest.mark.parametrize("key", ["channel.socket", "server.api_key_file"])
def test_a_path_that_no_file_system_takes_is_cut_in_its_line(tmp_path: Path, key: str) -> None:
    table, _, name = key.partition(".")
    (line,) = problems(tmp_path, with_key(table, name, f'"/{"p" * 3000}"'))
    assert line.startswith(f"[{table}] {name}: /{'p' * 398}… ")
    assert len(line) < 600
    with pytest.raises(ConfigError) as caught:
        at_home(load(tmp_path, MINIMAL), Path("/" + "p" * 3000))
    (line,) = caught.value.problems
    assert f"home: /{'p' * 398}… has 3020 bytes" in line


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    key_file(tmp_path, b"k")
    text = (
        WITH_KEY
        + """
        [channel]
        socket = "run/x.sock"
        [paths]
        home = "home"
        [baseline]
        system = "prompts/me.md"
    """
    )
    config = load(tmp_path, text)
    assert config.server.api_key_file == tmp_path / "key"
    assert config.channel.socket == tmp_path / "run" / "x.sock"
    assert config.paths.home == tmp_path / "home"
    assert config.baseline.system == tmp_path / "prompts" / "me.md"
    assert config.baseline.system_set is True


def test_a_path_may_begin_with_the_owners_home(tmp_path: Path) -> None:
    config = load(tmp_path, with_key("paths", "home", '"~/box"'))
    assert config.paths.home == Path.home() / "box"


def test_a_relative_file_gives_absolute_paths(tmp_path: Path) -> None:
    load(tmp_path, with_key("paths", "home", '"home"') + '\n[channel]\nsocket = "/run/s"\n')
    relative = Path("..").joinpath(*[".."] * len(Path.cwd().parts), *(tmp_path / "config.toml").parts[1:])
    assert load_config(relative, {}).paths.home.is_absolute()


def test_nothing_is_created(tmp_path: Path) -> None:
    load(tmp_path, with_key("paths", "home", '"home"'))
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


# -- what is no configuration -----------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "no.toml"
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    assert caught.value.problems == (f"{file}: cannot be read: No such file or directory",)


def test_text_that_is_no_toml_is_named_with_its_line(tmp_path: Path) -> None:
    [line] = problems(tmp_path, "[server]\nurl = \n")
    assert line.startswith("not TOML: ")
    assert "line 2" in line


def test_bytes_that_are_no_utf8_are_named_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(b"# \xff\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    assert caught.value.problems == (f"{file}: not UTF-8 at byte 2",)


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "[" * 5000 + "]" * 5000, "x = " + "9" * 5000])
def test_toml_that_python_cannot_follow_is_one_line(tmp_path: Path, text: str) -> None:
    [line] = problems(tmp_path, text)
    assert line.startswith("not TOML")


# -- everything at once -----------------------------------------------------------------------


def toml(value: object) -> str:
    """A value in TOML's inline form; TOML has the escapes of JSON, and wants DEL escaped too."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            return f"{{{', '.join(f'{toml(key)} = {toml(item)}' for key, item in value.items())}}}"
        case datetime.date() | datetime.time():
            return value.isoformat()
    return str(value)


SCALARS = (
    st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["http://h", "unix:/s", "~", "key", "\x7f"])
    | st.dates()
    | st.times().map(lambda time: time.replace(fold=0))
    | st.datetimes()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TABLE_NAMES = sorted({table for table, _ in ALL_KEYS} | {"request"})
KEY_NAMES = [key for _, key in ALL_KEYS] + ["n", "seed", "chat_template_kwargs", "enable_thinking"]
DOCUMENTS = st.dictionaries(
    st.sampled_from(TABLE_NAMES) | st.text(max_size=4),
    st.dictionaries(st.sampled_from(KEY_NAMES) | st.text(max_size=4), VALUES, max_size=4) | VALUES,
    max_size=5,
)


def outcome(file: Path, raw: bytes) -> tuple[Config | None, tuple[str, ...]]:
    """The configuration, or the lines of the refusal, each fit for a terminal."""
    file.write_bytes(raw)
    try:
        return load_config(file, {}), ()
    except ConfigError as refused:
        lines = refused.problems
    assert all(line.isprintable() and line.startswith(f"{file}: ") for line in lines)
    return None, lines


@settings(deadline=None)  # a slow disk is no fault
@given(DOCUMENTS)
def test_any_toml_gives_a_config_or_lines_that_say_why_not(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    directory = tmp_path_factory.getbasetemp()
    document.setdefault("server", {"url": "http://h"})
    text = "".join(f"{toml(key)} = {toml(value)}\n" for key, value in document.items())
    tomllib.loads(text)
    before = set(directory.iterdir()) | {directory / "config.toml"}
    config, lines = outcome(directory / "config.toml", text.encode("utf-8"))
    if config is not None:
        json.dumps(config.request, allow_nan=False).encode("utf-8")
        assert config.paths.home.is_absolute()
    else:
        assert lines
    assert set(directory.iterdir()) == before


@settings(deadline=None)  # a slow disk is no fault
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_give_a_config_or_lines_that_say_why_not(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    config, lines = outcome(tmp_path_factory.getbasetemp() / "config.toml", raw)
    assert config is None, "a url is required, and does not come by chance"
    assert lines


def test_another_home_takes_the_socket_with_it_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[server]\nurl = "http://h"\n[paths]\nhome = "a"\n[channel]\nsocket = "s.sock"\ngrace_s = 3\n')
    before = load_config(file, {})
    after = at_home(before, Path("/x/other"))
    assert after.paths.home == Path("/x/other")
    assert after.channel.socket == Path("/x/other/run/loop/loop.sock")
    assert after.channel.grace_s == 3
    assert before.paths.home == tmp_path / "a"
    assert attrs.evolve(after, paths=before.paths, channel=before.channel) == before


def test_another_home_whose_socket_would_be_too_long_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[server]\nurl = "http://h"\n[paths]\nhome = "/a"\n')
    config = load_config(file, {})
    # "/" + name + "/run/loop/loop.sock" (19 characters): 107 bytes are the most
    assert at_home(config, Path("/" + "x" * 87)).paths.home == Path("/" + "x" * 87)
    with pytest.raises(ConfigError, match="has 108 bytes, allowed are 107; take a shorter path"):
        at_home(config, Path("/" + "x" * 88))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_key_file_that_is_no_file_is_said_and_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "key")
    (line,) = problems(tmp_path, '[server]\nurl = "http://h"\napi_key_file = "key"\n')
    assert line == f"[server] api_key_file: {tmp_path / 'key'} is no file"
