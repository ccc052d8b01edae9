"""The baseline: system text and core tool schemas, fixed for a session's epoch.

Laws:
* Nothing volatile is in it: no time, no date, no counters.
* What is sent is what `0.baseline.json` says; `system.md` is read for new sessions only.

Source: M2b section 2 "The baseline".
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from attrs import frozen

from boxmaker.config import BaselineConfig
from boxmaker.errors import StorageError
from boxmaker.proto.chat import ToolSchema
from boxmaker.proto.codec import Codec, strict_converter

TEXT_MAX_BYTES = 1 << 20
"""Of `system.md` and of `core.md`: far more than any token budget allows."""


@frozen(kw_only=True)
class Baseline:
    """What every request of a session begins with."""

    system: str
    tools: tuple[ToolSchema, ...]


BASELINE: Codec[Baseline] = Codec(strict_converter(), Baseline)


def encode_baseline(baseline: Baseline) -> bytes:
    """The bytes of `0.baseline.json`; raises ValueRefused."""
    return BASELINE.encode(baseline).encode("utf-8")


def baseline_hash(raw: bytes) -> str:
    """SHA-256 of the file's bytes, lower-case hex."""
    return hashlib.sha256(raw).hexdigest()


def read_system_text(config: BaselineConfig) -> tuple[str, bool]:
    """Read `system.md`; say whether the packaged one had to stand in for a missing default.

    Raises:
        StorageError: a file that cannot be read, is not UTF-8 or holds NUL; also a missing file at a
            path that the owner has set.
    """
    try:
        return _read_text(config.system), False
    except FileNotFoundError as exc:
        if config.system_set:
            raise StorageError(action="read", file=config.system, reason="no such file ([baseline] system)") from exc
    return resources.files("boxmaker").joinpath("system.md").read_text("utf-8"), True


def assemble_baseline(config: BaselineConfig, home: Path, tools: Iterable[ToolSchema]) -> Baseline:
    """Make the baseline of a new session from the files as they are now.

    `memory/core.md` of the home, when it is there, follows the system text after a blank line.

    Raises:
        StorageError: as `read_system_text`.
    """
    system, _ = read_system_text(config)
    system = system.rstrip("\n")
    try:
        core = _read_text(home / "memory" / "core.md").strip("\n")
    except FileNotFoundError:
        core = ""
    return Baseline(system=f"{system}\n\n{core}" if core else system, tools=tuple(tools))


def _read_text(file: Path) -> str:
    try:
        text = _read_file(file).decode("utf-8")
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise StorageError(action="read", file=file, reason=exc.strerror or str(exc)) from exc
    except UnicodeDecodeError as exc:
        raise StorageError(action="read", file=file, reason=f"not UTF-8 at byte {exc.start}") from exc
    if "\x00" in text:
        raise StorageError(action="read", file=file, reason="holds a NUL character")
    return text


def _read_file(file: Path) -> bytes:
    """Read a file that the owner edits; a pipe or a device in its place would be waited for without end."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(action="read", file=file, reason="is no file")
        if found.st_size > TEXT_MAX_BYTES:
            reason = f"has {found.st_size} bytes, allowed are {TEXT_MAX_BYTES}"
            raise StorageError(action="read", file=file, reason=reason)
        with open(fd, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(fd)
