"""Where a home is, and its socket, when nothing says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DEFAULT_HOME = Path("/var/lib/boxmaker")


def default_home(environ: Mapping[str, str]) -> Path:
    """$BOXMAKER_HOME, or the default home."""
    return Path(environ.get("BOXMAKER_HOME") or DEFAULT_HOME)


def socket_path(home: Path) -> Path:
    """Where a home's socket is unless `[channel] socket` says otherwise."""
    return home / "run" / "loop" / "loop.sock"
