"""One embedded llama-server for all tests that need a real one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from boxmaker.demo.server import find_model


@contextmanager
def child(*command: str, log: Path, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours; ended by its own id."""
    with log.open("ab") as sink:
        process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stderr=sink, **more)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


@contextmanager
def llama_server(log: Path, *more: str) -> Iterator[str]:
    """An embedded server, `more` as the demo's takes it: the file of another chat template, where slots are saved."""
    with child("-m", "boxmaker.demo.server", *more, log=log, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        address = server.stdout.readline().decode().strip()
        assert address.startswith("http://127.0.0.1:"), log.read_text()
        yield address


@pytest.fixture(scope="session")
def llama() -> Iterator[str]:
    """The embedded server's address."""
    assert find_model().exists()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        with llama_server(log) as address:
            yield address
