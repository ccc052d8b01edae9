"""config.toml to one frozen Config.

Laws:
* Every problem of a file is reported, one line each: file, table, key, what was found, what is allowed.
* Nothing is created, and the server is not asked: a configuration is checked by itself.
* Paths in the file are relative to the file.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
from attrs import field, frozen

from boxmaker.errors import ConfigError, printable
from boxmaker.places import default_home, socket_path
from boxmaker.proto.channel import SOCKET_PATH_MAX_BYTES

MIN_SIZE_BYTES = 256
MAX_INTEGER = 2**63 - 1
"""TOML's own limit; `tomllib` takes more, and neither JSON nor a clock does."""
MAX_DEPTH = 100
"""Nesting in `[request]` that is taken; dotted keys nest further than Python can follow."""
SHOWN_CHARACTERS = 80
"""How much of a wrong value an error line shows."""
SHOWN_PATH_CHARACTERS = 400
"""The same for a path: the longest name in it is 255 bytes."""

RESERVED_REQUEST_FIELDS = {
    "messages": "it is the session",
    "tools": "it is the session's baseline",
    "id_slot": "set [slots] main",
    "cache_prompt": "boxmaker always asks for the cache",
    "return_progress": "boxmaker always asks for progress",
    "reasoning_budget_tokens": "set [thinking] cap",
    "thinking_budget_tokens": "set [thinking] cap",
    "reasoning_budget_message": "boxmaker needs its own to see that the cap fired",
    "n": "a turn has one reply",
    "grammar": "it would forbid tool calls",
    "json_schema": "it would forbid tool calls",
    "response_format": "it would forbid tool calls",
    "tool_choice": "the model chooses",
}
"""Fields of a request that the client sets itself, with the reason that the owner is told."""


def request_field_problem(name: str) -> str | None:
    """Say why a field may not stand in `[request]`, or None."""
    if name.startswith("stream"):
        return "boxmaker always streams"
    if name.startswith("reasoning_budget"):
        return RESERVED_REQUEST_FIELDS.get(name, "set [thinking] cap")
    return RESERVED_REQUEST_FIELDS.get(name)


class _Bad(Exception):
    """What was found is not allowed; the text says what is. `found` stands for a value that is not to be shown."""

    def __init__(self, allowed: str, found: str | None = None) -> None:
        super().__init__(allowed)
        self.found = found


MIB = 1024 * 1024
"""What a key that ends in `_mib` counts."""
Check = Callable[[Any], Any]


def _shown(value: object) -> str:
    """Name a value in one short line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of levels
        return "a value too large to show"
    return _clipped(text, SHOWN_CHARACTERS)


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _shown_key(key: str) -> str:
    """Name a key: a quoted one may hold anything, line ends included."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]{1,80}", key) else _shown(key)


def _shown_path(path: Path) -> str:
    """Name a path that cannot be: longer ones than a file system takes are cut."""
    return _clipped(str(path), SHOWN_PATH_CHARACTERS)


def _line(file: Path, problem: str) -> str:
    """One problem, one line, whatever a key or a file is called."""
    return printable(f"{file}: {problem}")


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise _Bad("a number > 0")
    if value > MAX_INTEGER:
        raise _Bad(f"a number ≤ {MAX_INTEGER}")
    return value


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise _Bad("a number > 0 and ≤ 1")
    return value


def _at_least(minimum: int, what: str) -> Check:
    def check(value: object) -> int:
        if type(value) is not int or value < minimum:
            raise _Bad(f"{what} ≥ {minimum}")
        if value > MAX_INTEGER:
            raise _Bad(f"{what} ≤ {MAX_INTEGER}")
        return value

    return check


_count = _at_least(1, "an integer")
_slot = _at_least(0, "an integer")
_size = _at_least(MIN_SIZE_BYTES, "an integer number of bytes")


def _slots(value: object) -> int | tuple[int, ...]:
    if type(value) is not list:
        return int(_slot(value))
    try:
        slots = tuple(int(_slot(one)) for one in value)
    except _Bad:
        slots = ()
    if not slots or len(set(slots)) < len(slots):
        raise _Bad("an integer ≥ 0, or a list of different ones")
    return slots


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise _Bad("true or false")
    return value


def _path(value: object) -> str:
    if type(value) is not str or not value or "\x00" in value:
        raise _Bad("a path as text")
    try:
        return str(Path(value).expanduser())
    except RuntimeError:
        raise _Bad("a path; there is no such user, or no home of theirs") from None


_LABEL = "[A-Za-z0-9_-]{1,63}"
_AUTHORITY = re.compile(rf"(\[[0-9A-Fa-f:.]+\]|(?![^:]{{254}}){_LABEL}(\.{_LABEL})*\.?)(:[0-9]*)?")


def _without_password(value: object) -> str:
    """Name a wrong url: what may be a password, in whatever form it was written, is not for the journal."""
    if type(value) is str:
        return _shown(re.sub(r"^([A-Za-z]+:(?=/))?(/*).*@", r"\1\2…@", value, flags=re.DOTALL))
    return "an array" if isinstance(value, list) else "a table" if isinstance(value, dict) else _shown(value)


def _url(value: object) -> str:
    """Check a url for everything that would only fail later, in a name look-up or in httpx."""
    text = value if type(value) is str else ""
    found = _without_password(value)
    allowed = _Bad('text like "http://127.0.0.1:8080" or "unix:/run/llama/llama.sock"', found)
    if text.startswith("unix:/") and "\x00" not in text:
        return text
    if not re.fullmatch(r"[!-~]+", text):  # urlsplit would drop a line end, and httpx refuse it
        raise allowed
    try:
        parts = urlsplit(text)
        if "@" in parts.netloc:
            raise _Bad("a url without user and password; put the key into api_key_file", found)
        if "[" in parts.netloc:
            ipaddress.IPv6Address(parts.hostname or "")
        port = parts.port
    except ValueError:
        raise allowed from None
    if parts.scheme not in ("http", "https") or not _AUTHORITY.fullmatch(parts.netloc) or port == 0:
        raise allowed
    if "?" in text or "#" in text:
        raise allowed
    # The client asks whether it begins with "https:" before it looks at certificates.
    return parts.scheme + text[len(parts.scheme) :].rstrip("/")


def _key(default: Any, check: Check) -> Any:
    return field(default=default, metadata={"check": check})


@frozen(kw_only=True)
class Server:
    """Where the owner's llama-server is; `api_key` is what `api_key_file` holds, never shown."""

    url: str = field(metadata={"check": _url})
    api_key_file: Path | None = _key(None, _path)
    api_key: str | None = field(default=None, repr=False)


@frozen(kw_only=True)
class Slots:
    """Which slots of the server are ours, `main` as it was written; and where and how long they may be saved."""

    main: int | tuple[int, ...] = _key(0, _slots)
    save_dir: Path | None = _key(None, _path)
    save_s: float = _key(10, _seconds)
    save_mib: int = _key(8192, _count)

    @property
    def listed(self) -> tuple[int, ...]:
        """The slots, in the order in which new sessions take them."""
        return self.main if isinstance(self.main, tuple) else (self.main,)

    def __str__(self) -> str:
        plural = "s" if len(self.listed) > 1 else ""
        return f"slot{plural} {', '.join(map(str, self.listed))}"


@frozen(kw_only=True)
class Thinking:
    """Reasoning: whether, and how many tokens a completion."""

    enabled: bool = _key(True, _flag)
    cap: int = _key(4096, _count)


@frozen(kw_only=True)
class Retry:
    """How often and how fast a failed completion is tried again."""

    attempts: int = _key(5, _count)
    base_ms: float = _key(500, _seconds)
    cap_ms: float = _key(10_000, _seconds)
    loading_s: float = _key(600, _seconds)


@frozen(kw_only=True)
class Timeouts:
    """How long the server may be silent, by phase."""

    connect_s: float = _key(5, _seconds)
    busy_s: float = _key(1800, _seconds)
    prefill_s: float = _key(1800, _seconds)
    stall_s: float = _key(300, _seconds)


@frozen(kw_only=True)
class Inference:
    """How much one completion may send us."""

    reply_max_bytes: int = _key(8_388_608, _size)
    event_max_bytes: int = _key(4_194_304, _size)


@frozen(kw_only=True)
class Channel:
    """The socket, and what its clients may do."""

    socket: Path = _key(Path(), _path)
    request_s: float = _key(10, _seconds)
    write_timeout_s: float = _key(30, _seconds)
    max_frame: int = _key(1_048_576, _size)
    grace_s: float = _key(10, _seconds)


@frozen(kw_only=True)
class Paths:
    """Where everything that we write is."""

    home: Path = _key(Path(), _path)


@frozen(kw_only=True)
class Session:
    """What is kept in memory between turns, and at which share of the context its end is told."""

    memory_mib: int = _key(64, _count)
    warn_at: float = _key(0.8, _share)


@frozen(kw_only=True)
class Loop:
    """Limits of one turn; without `turn_s` it may take any time."""

    tool_iterations: int = _key(8, _count)
    repeat_detection: bool = _key(True, _flag)
    tool_result_cap: int = _key(16_384, _size)
    parallel_tools: int = _key(4, _count)
    turn_s: float | None = _key(None, _seconds)


@frozen(kw_only=True)
class Tools:
    """How tools run; without `call_s` a call may take any time."""

    call_s: float | None = _key(None, _seconds)


@frozen(kw_only=True)
class BaselineConfig:
    """What every session begins with; `system_set` says that the owner named the file."""

    system: Path = _key(Path("system.md"), _path)
    token_budget: int = _key(3000, _count)
    system_set: bool = False


@frozen(kw_only=True)
class Config:
    """The whole configuration; one value, passed down."""

    file: Path
    server: Server
    request: Mapping[str, Any]
    slots: Slots
    thinking: Thinking
    retry: Retry
    timeouts: Timeouts
    inference: Inference
    channel: Channel
    paths: Paths
    session: Session
    loop: Loop
    tools: Tools
    baseline: BaselineConfig


_TABLES: dict[str, type[Any]] = {
    "server": Server,
    "slots": Slots,
    "thinking": Thinking,
    "retry": Retry,
    "timeouts": Timeouts,
    "inference": Inference,
    "channel": Channel,
    "paths": Paths,
    "session": Session,
    "loop": Loop,
    "tools": Tools,
    "baseline": BaselineConfig,
}


def load_config(file: Path, environ: Mapping[str, str]) -> Config:
    """Read and check a configuration file.

    `environ` gives BOXMAKER_HOME, the home when the file names none.

    Raises:
        ConfigError: with every problem found, one line each.
    """
    try:
        text = file.read_bytes().decode("utf-8")
        document = tomllib.loads(text)
    except OSError as exc:
        raise ConfigError(problems=(_line(file, f"cannot be read: {exc.strerror}"),)) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(problems=(_line(file, f"not UTF-8 at byte {exc.start}"),)) from exc
    except ValueError as exc:  # TOMLDecodeError is one, so is a number of thousands of digits
        raise ConfigError(problems=(_line(file, f"not TOML: {exc}"),)) from exc
    except RecursionError as exc:
        raise ConfigError(problems=(_line(file, "not TOML that can be read: nested too deep"),)) from exc
    return _Reader(file, document).config(environ)


class _Reader:
    def __init__(self, file: Path, document: dict[str, Any]) -> None:
        self._file = file
        self._document = document
        self._problems: list[str] = []

    def config(self, environ: Mapping[str, str]) -> Config:
        unknown = sorted(set(self._document) - set(_TABLES) - {"request"})
        for name in unknown:
            known = ", ".join(["request", *_TABLES])
            if isinstance(self._document[name], dict | list):
                self._say(f"[{_shown_key(name)}]", f"unknown table; known are {known}")
            else:
                self._say(_shown_key(name), f"unknown key outside of the tables; known tables are {known}")
        tables = {name: self._table(name, cls) for name, cls in _TABLES.items()}
        request = self._request()
        key = self._api_key(tables["server"].get("api_key_file"))
        if self._problems:
            raise ConfigError(problems=tuple(self._problems))
        home = tables["paths"].get("home")
        home = self._resolve(home) if home else default_home(environ).absolute()
        socket = tables["channel"].get("socket")
        tables["channel"]["socket"] = self._resolve(socket) if socket else socket_path(home)
        if too_long := _too_long(tables["channel"]["socket"]):
            self._say("[channel] socket", f"{too_long}; set it to a shorter path")
            raise ConfigError(problems=tuple(self._problems))
        tables["paths"]["home"] = home
        tables["server"]["api_key"] = key
        if "api_key_file" in tables["server"]:
            tables["server"]["api_key_file"] = self._resolve(tables["server"]["api_key_file"])
        if "save_dir" in tables["slots"]:
            tables["slots"]["save_dir"] = self._resolve(tables["slots"]["save_dir"])
        baseline = tables["baseline"]
        baseline["system_set"] = "system" in baseline
        baseline["system"] = self._resolve(baseline.get("system", "system.md"))
        made = {name: cls(**tables[name]) for name, cls in _TABLES.items()}
        return Config(file=self._file, request=request, **made)

    def _say(self, where: str, problem: str) -> None:
        self._problems.append(_line(self._file, f"{where}: {problem}"))

    def _resolve(self, path: str) -> Path:
        return (self._file.parent / path).absolute()

    def _table(self, name: str, cls: type[Any]) -> dict[str, Any]:
        raw = self._document.get(name, {})
        if not isinstance(raw, dict):
            self._say(f"[{name}]", f"found {_shown(raw)}, allowed is a table")
            return {}
        fields = {a.name: a for a in attrs.fields(cls) if "check" in a.metadata}
        values: dict[str, Any] = {}
        for key, value in raw.items():
            if key not in fields:
                self._say(f"[{name}] {_shown_key(key)}", f"unknown key; allowed are {', '.join(fields)}")
                continue
            try:
                values[key] = fields[key].metadata["check"](value)
            except _Bad as exc:
                self._say(f"[{name}] {key}", f"found {exc.found or _shown(value)}, allowed is {exc}")
        for key, attribute in fields.items():
            if attribute.default is attrs.NOTHING and key not in raw:
                self._say(f"[{name}] {key}", "is missing, and has no default")
        return values

    def _request(self) -> dict[str, Any]:
        raw = self._document.get("request", {})
        if not isinstance(raw, dict):
            self._say("[request]", f"found {_shown(raw)}, allowed is a table")
            return {}
        for key, value in raw.items():
            problem = request_field_problem(key)
            if problem:
                self._say(f"[request] {_shown_key(key)}", f"may not be set: {problem}")
            elif not _is_json(value):
                allowed = f"what JSON can say, integers of 64 bits, at most {MAX_DEPTH} levels"
                self._say(f"[request] {_shown_key(key)}", f"found {_shown(value)}, allowed is {allowed}")
        kwargs = raw.get("chat_template_kwargs", {})
        if not isinstance(kwargs, dict):
            self._say("[request] chat_template_kwargs", f"found {_shown(kwargs)}, allowed is a table")
        elif "enable_thinking" in kwargs:
            self._say("[request] chat_template_kwargs.enable_thinking", "may not be set: set [thinking] enabled")
        return raw

    def _api_key(self, name: str | None) -> str | None:
        if name is None:
            return None
        file = self._resolve(name)
        where = "[server] api_key_file"
        try:
            if not stat.S_ISREG(file.stat().st_mode):  # a pipe would be waited for
                self._say(where, f"{file} is no file")
                return None
            with file.open("rb") as opened:
                mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
                if mode & 0o077:
                    self._say(where, f"{file} has mode {mode:04o}, others can use it; run: chmod 600 {file}")
                    return None
                key = opened.read(65536).decode("utf-8").strip()
        except OSError as exc:
            self._say(where, f"{_shown_path(file)} cannot be read: {exc.strerror}")
            return None
        except UnicodeDecodeError:
            key = ""
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            self._say(where, f"{file} must hold the key alone, on one line of printable ASCII")
            return None
        return key


def _is_json(value: object, depth: int = 1) -> bool:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return depth <= MAX_DEPTH and all(_is_json(item, depth + 1) for item in items)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -MAX_INTEGER - 1 <= value <= MAX_INTEGER
    return isinstance(value, str)


def _too_long(socket: Path) -> str | None:
    """Say that a path has more bytes than a socket's may have, or None."""
    size_bytes = len(os.fsencode(socket))
    if size_bytes <= SOCKET_PATH_MAX_BYTES:
        return None
    return f"{_shown_path(socket)} has {size_bytes} bytes, allowed are {SOCKET_PATH_MAX_BYTES}"


def at_home(config: Config, home: Path) -> Config:
    """The same configuration on another home, with the socket in its usual place there.

    No slots are saved for it: such a home is soon gone, and nobody would sweep the files.

    Raises:
        ConfigError: the home's path is too long for a socket in it.
    """
    home = home.absolute()
    socket = socket_path(home)
    if too_long := _too_long(socket):
        raise ConfigError(problems=(_line(config.file, f"home: {too_long}; take a shorter path"),))
    paths = attrs.evolve(config.paths, home=home)
    slots = attrs.evolve(config.slots, save_dir=None)
    return attrs.evolve(config, paths=paths, slots=slots, channel=attrs.evolve(config.channel, socket=socket))
