"""The reader of config.toml against the table of `docs/design.md`: which places are wrong, and nothing else happens.

An input is the file. It is read in a directory of its own with a few files that `api_key_file` may name.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from hypothesis import strategies as st

from boxmaker.config import Config, load_config
from boxmaker.errors import ConfigError
from boxmaker.inference.request import RequestEncoder, fixed_fields
from tests.fuzz.target import Target, assert_sayable

PASSWORD = "hunter2"
LARGEST = 9_223_372_036_854_775_807
Verdict = bool | None
"""None: not said here. What a good url or path is has tests of its own."""


def integer(least: int) -> Callable[[Any], Verdict]:
    return lambda value: type(value) is int and least <= value <= LARGEST


def number(value: Any) -> Verdict:
    return type(value) in (int, float) and 0 < value <= LARGEST


def share(value: Any) -> Verdict:
    return type(value) in (int, float) and 0 < value <= 1


def slots(value: Any) -> Verdict:
    one = integer(0)
    if type(value) is not list:
        return one(value)
    return bool(value) and all(map(one, value)) and len(set(value)) == len(value)


def flag(value: Any) -> Verdict:
    return type(value) is bool


def path(value: Any) -> Verdict:
    if type(value) is not str or value == "" or "\0" in value:
        return False
    return None if value.startswith("~") else True


GOOD_URLS = {
    "http://127.0.0.1:8080", "http://h", "https://h/x", "unix:/s", "HTTP://H:1/", "http://[::1]:8080/a/", "http://h/a@b",
    "http://h//", "http://h/../a", "http://h:8080",
}  # fmt: skip
BAD_URLS = {
    "", "h", "http:", "http://", "http:///x", "ftp://h", "http://u:hunter2@h", "http://u@h", "http://[::1", "http://::1",
    "http://[fe80::1%25eth0]/", "http://h:99999", "http://h:0", "http://h:x", "http://h:8080:1", "http://h/?q",
    "http://h#f",
    "http://h\n", " http://h", "http://é", "http://h h", "http:\\\\h", "http://h%41/", "http://a..b",
    "http://" + "a" * 64,
    "unix:", "unix:x", "unix:/a\0", "https:u:hunter2@h", "http:/u:hunter2@h", "hunter2@h",
}  # fmt: skip


def url(value: Any) -> Verdict:
    if type(value) is not str:
        return False
    return False if value in BAD_URLS else True if value in GOOD_URLS else None


count, size = integer(1), integer(256)
TABLE: dict[str, dict[str, Callable[[Any], Verdict]]] = {
    "server": {"url": url, "api_key_file": path},
    "slots": {"main": slots},
    "thinking": {"enabled": flag, "cap": count},
    "retry": {"attempts": count, "base_ms": number, "cap_ms": number, "loading_s": number},
    "timeouts": {"connect_s": number, "busy_s": number, "prefill_s": number, "stall_s": number},
    "inference": {"reply_max_bytes": size, "event_max_bytes": size},
    "channel": {
        "socket": path, "request_s": number, "write_timeout_s": number, "max_frame": size, "grace_s": number,
    },
    "paths": {"home": path},
    "session": {"memory_mib": count, "warn_at": share},
    "loop": {
        "tool_iterations": count, "repeat_detection": flag, "tool_result_cap": size, "parallel_tools": count,
        "turn_s": number,
    },
    "tools": {"call_s": number},
    "baseline": {"system": path, "token_budget": count},
}  # fmt: skip
OURS = {
    "messages", "tools", "id_slot", "cache_prompt", "return_progress", "thinking_budget_tokens", "n", "grammar",
    "json_schema", "response_format", "tool_choice",
}  # fmt: skip
KEY_FILES = {"good.key": True, "open.key": False, "blank.key": False, "two.key": False, "folder": False, "none": False}


def levels(value: Any) -> int:
    """How deep a value of TOML is; beyond 200 nobody counts."""
    depth = 0
    row = [value]
    while row := [item for item in row if isinstance(item, dict | list)]:
        depth += 1
        if depth > 200:
            break
        row = [inner for item in row for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def is_json(value: Any) -> bool:
    """Can JSON and a 64-bit integer say it, at most 100 levels deep?"""
    if levels(value) > 100:
        return False
    if isinstance(value, dict | list):
        return all(map(is_json, value.values() if isinstance(value, dict) else value))
    if isinstance(value, datetime.date | datetime.time):
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or -LARGEST - 1 <= value <= LARGEST


def wrong_places(document: dict[str, Any]) -> dict[str, Verdict]:
    """The places that are wrong (False) or may be (None)."""
    found: dict[str, Verdict] = {}
    for name, value in document.items():
        if name not in TABLE and name != "request":
            found[f"?{name}"] = False
        elif type(value) is not dict:
            found[f"[{name}]"] = False
    for name, table in TABLE.items():
        given = document.get(name, {})
        for key, value in given.items() if type(given) is dict else ():
            place = f"[{name}] {key}"
            if key not in table:
                found[f"?{name}.{key}"] = False
            elif (verdict := table[key](value)) is not True:
                found[place] = verdict
            elif key == "api_key_file":
                verdict = KEY_FILES.get(value)
                if verdict is not True:
                    found[place] = verdict
    if type(document.get("server", {})) is dict and "url" not in document.get("server", {}):
        found["[server] url"] = False
    request = document.get("request", {})
    for key, value in request.items() if type(request) is dict else ():
        if key in OURS or key.startswith(("stream", "reasoning_budget")) or not is_json(value):
            found[f"?request.{key}"] = False
    if type(request) is dict and "chat_template_kwargs" in request:
        kwargs = request["chat_template_kwargs"]
        if type(kwargs) is not dict:
            found["[request] chat_template_kwargs"] = False
        elif "enable_thinking" in kwargs:
            found["[request] chat_template_kwargs.enable_thinking"] = False
    return found


@functools.cache
def place() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """The directory of the file, and what removes it when the process ends."""
    holder = tempfile.TemporaryDirectory(prefix="fuzz-")
    directory = Path(holder.name).resolve()
    for name, mode, text in (
        ("good.key", 0o600, "of-the-file\n"),
        ("open.key", 0o644, "of-the-file\n"),
        ("blank.key", 0o600, " \n"),
        ("two.key", 0o600, "a b\n"),
    ):
        (directory / name).write_text(text)
        (directory / name).chmod(mode)
    (directory / "folder").mkdir(mode=0o700)
    (directory / "config.toml").touch()
    return directory, holder


def listing(directory: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(directory))


def parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def check(raw: bytes) -> str:
    directory, _ = place()
    file = directory / "config.toml"
    file.write_bytes(raw)
    before = listing(directory)
    config: Config | None = None
    lines: tuple[str, ...] = ()
    text = ""
    try:
        config = load_config(file, {"BOXMAKER_HOME": "/x/home"})
    except ConfigError as exc:
        lines, text = exc.problems, str(exc)
    assert text == "\n".join(lines)
    assert (config is None) is bool(lines)
    assert listing(directory) == before
    for line in lines:
        assert_sayable(line, at_most=1200)
        assert line.startswith(f"{file}: ")
        assert "of-the-file" not in line
    document = parsed(raw)
    if document is None:
        assert len(lines) == 1
        return "not-toml" if "not TOML" in lines[0] else "not-utf8"
    check_password(document, [line for line in lines if line.startswith(f"{file}: [server] url: ")])
    places = wrong_places(document)
    wrong = [place for place, verdict in places.items() if verdict is False]
    said = [line.removeprefix(f"{file}: ") for line in lines]
    if config is None and not wrong and len(said) == 1 and said[0].startswith("[channel] socket: "):
        assert socket_bytes(document, directory) > 107 or None in places.values()
        return "socket-too-long"
    for where in wrong:
        assert where.startswith("?") or any(line.startswith(f"{where}: ") for line in said), where
    # A wrong chat_template_kwargs may be said twice: as no JSON, and as no table.
    assert len(wrong) <= len(said) <= len(places) + 1, (places, said)
    if config is None:
        if not wrong:
            return "wrong-somewhere"
        table = re.match(r"\??\[?([a-z]+)", wrong[0])
        return f"wrong-{table[1]}" if table and table[1] in (*TABLE, "request") else "wrong-unknown"
    check_config(config, document, directory)
    return "config-with-request" if document.get("request") else "config"


def check_password(document: dict[str, Any], lines: list[str]) -> None:
    """What stands before an @ in a url is not shown; PASSWORD is among the tokens."""
    server = document.get("server")
    given = server.get("url") if type(server) is dict else None
    if type(given) is str and PASSWORD in given.rpartition("@")[0] and PASSWORD not in given.rpartition("@")[2]:
        assert not any(PASSWORD in line for line in lines)


def socket_bytes(document: dict[str, Any], directory: Path) -> int:
    named = document.get("channel", {}).get("socket")
    home = document.get("paths", {}).get("home", "/x/home")
    socket = named if named is not None else f"{os.path.expanduser(home)}/run/loop/loop.sock"
    return len(os.fsencode(Path(directory, os.path.expanduser(socket))))


def check_config(config: Config, document: dict[str, Any], directory: Path) -> None:
    """What was said is what holds, and everything that is made of a configuration can be made."""
    for name, table in TABLE.items():
        for key in table:
            value = getattr(getattr(config, name), key)
            given = document.get(name, {}).get(key)
            if given is not None and not isinstance(value, Path) and key != "url":
                assert value == given
                assert type(value) is type(given)
    assert config.paths.home.is_absolute()
    assert config.channel.socket.is_absolute()
    assert len(os.fsencode(config.channel.socket)) <= 107
    assert config.baseline.system.is_absolute()
    assert "of-the-file" not in repr(config)
    assert config.request == document.get("request", {})
    body = RequestEncoder(tools=(), fixed=fixed_fields(config), alternate=False).body()
    sent = json.loads(body, parse_constant=lambda name: 1 / 0)
    assert sent["id_slot"] == config.slots.listed[0]
    assert sent["stream"] is True
    assert sent["chat_template_kwargs"]["enable_thinking"] is config.thinking.enabled
    if config.server.url.startswith("unix:"):
        return
    request = httpx.Request("GET", config.server.url + "/props")  # httpx can take it, and sees a host in it
    assert request.url.host
    assert request.url.scheme in ("http", "https")
    assert not request.url.userinfo
    assert request.url.path.endswith("/props")


# -- inputs ------------------------------------------------------------------------------------------


def seeds() -> list[bytes]:
    return [
        b'[server]\nurl = "http://127.0.0.1:8080"\n',
        b'[server]\nurl = "unix:/s"\napi_key_file = "good.key"\n[request]\ntemperature = 0.7\n'
        b'chat_template_kwargs = {a = [1, 2.5, true]}\n[paths]\nhome = "/x"\n',
        *(
            f'[server]\nurl = "http://h"\n[{name}]\n'.encode() + b"".join(f"{key} = 300\n".encode() for key in table)
            for name, table in TABLE.items()
            if name != "server"
        ),
    ]


LITERALS = (
    "0", "1", "255", "256", "-1", "1.5", "0.0", "-0.0", "inf", "-inf", "nan", "1e400", "true", "false", '""', '"x"',
    '"~"', '"~nobody-of-that-name/x"', "'a\\b'", '"""\na\n"""', "[]", "[1, [2, [3]]]", "{}", "{a = 1}", "{a.b.c = {}}",
    "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "0x10", "0o7", "0b1", "1_000", "9223372036854775807",
    "9223372036854775808", "1" + "0" * 400, "1" + "0" * 5000, '"\\u0000"', '"\\u001b[31m"', '"\\U0001F642"',
    '"\\uD800"',
    '"http://127.0.0.1:8080"', '"http://h"', '"https://h/x"', '"unix:/s"', '"http://u:hunter2@h"', '"HTTP://H:1/"',
    '"http://[::1]:8080/a/"', '"http://[::1"', '"http://h:99999"', '"http://h:0"', '"http://h/?q"', '"http://-"',
    '"http:u:hunter2@h"', '"http://h:8080:1"', '"http://h\\n"', '"http://é"', '"unix:"', '"unix:x"',
    '"good.key"', '"open.key"', '"blank.key"',
    '"two.key"', '"folder"', '"none"', '"a/b"', '"/x"', '"' + "p" * 120 + '"', "[" * 150 + "]" * 150, "[" * 3000,
    "{a=" * 99 + "{}" + "}" * 99, "{a=" * 120 + "{}" + "}" * 120,
)  # fmt: skip
KEYS = [key for table in TABLE.values() for key in table]
REQUEST_KEYS = [
    *sorted(OURS), "temperature", "chat_template_kwargs", "stream", "stream_options", "reasoning_budget",
    "reasoning_budget_tokens",
    "seed", "enable_thinking", "chat_template_kwargs.enable_thinking", "a.b.c", '"\\u0000"', '"a: b"', "'\\n'",
]  # fmt: skip
TOKENS = (
    *(literal.encode() for literal in LITERALS if len(literal) < 500),
    *(f"{key} = ".encode() for key in [*KEYS, *REQUEST_KEYS]),
    *(f"[{name}]\n".encode() for name in [*TABLE, "request", "[request]", "x", "request.chat_template_kwargs"]),
    b"\n", b"\r\n", b"\r", b"#", b"=", b".", b"[", b"]", b"{", b"}", b'"', b"'", b'"""', b"\\", b"\x00", b"\xff",
    b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xc2\x85", b"a." * 300,
)  # fmt: skip
literal = st.sampled_from(LITERALS) | st.integers(-(2**70), 2**70).map(str) | st.text(max_size=5).map(json.dumps)
setting = st.builds(lambda key, value: f"{key} = {value}\n", st.sampled_from([*KEYS, *REQUEST_KEYS, "x"]), literal)
matching = st.sampled_from([(name, key) for name, table in TABLE.items() for key in table])
right_place = st.builds(lambda place, value: f"{place[0]}.{place[1]} = {value}\n", matching, literal)
table = st.builds(
    lambda name, settings: f"[{name}]\n" + "".join(settings),
    st.sampled_from([*TABLE, "request", "request", "x", "[request]"]),
    st.lists(setting, max_size=3, unique_by=lambda line: line.split(" ")[0]),
)

TARGET = Target(
    name="config",
    suffix=".toml",
    check=check,
    seeds=seeds,
    tokens=TOKENS,
    grammar=st.builds(
        lambda heads, tables: "".join([*heads, *tables]).encode("utf-8", "surrogatepass"),
        st.lists(right_place, max_size=4, unique_by=lambda line: line.split(" ")[0])
        | st.just(['server.url = "http://h"\n']),
        st.lists(table, max_size=3, unique_by=lambda text: text.split("\n")[0]),
    ),
)
