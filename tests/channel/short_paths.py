"""A directory whose path is short: a unix socket's has at most 107 bytes, and pytest's own are long."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory of the test's own below /tmp; it goes with the test."""
    with tempfile.TemporaryDirectory(prefix="bx-", dir="/tmp") as directory:
        yield Path(directory)
