"""The baseline: how it is put together, its bytes and its hash, and which files are refused."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boxmaker.config import BaselineConfig
from boxmaker.errors import StorageError, ValueRefused
from boxmaker.proto.chat import ToolSchema
from boxmaker.session.baseline import (
    BASELINE,
    Baseline,
    assemble_baseline,
    baseline_hash,
    encode_baseline,
    read_system_text,
)
from tests.session.kernel import open_descriptors

TOOL = ToolSchema(name="clock", description="Die Uhr – jetzt.", parameters={"type": "object", "properties": {}})


def config_for(file: Path, *, system_set: bool = True) -> BaselineConfig:
    return BaselineConfig(system=file, system_set=system_set)


def assembled(directory: Path, system: bytes, core: bytes | None) -> str:
    """The system text that these two files make."""
    (directory / "system.md").write_bytes(system)
    if core is not None:
        (directory / "memory").mkdir()
        (directory / "memory" / "core.md").write_bytes(core)
    return assemble_baseline(config_for(directory / "system.md"), directory, [TOOL]).system


# -- assembly ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "core", "whole"),
    [
        (b"Be brief.\n", None, "Be brief."),
        (b"Be brief.", None, "Be brief."),
        (b"Be brief.\n\n\n", b"I am Ada.\n", "Be brief.\n\nI am Ada."),
        (b"Be brief.", b"I am Ada.", "Be brief.\n\nI am Ada."),
        (b"Be brief.\n", b"\n\nI am Ada.\n\nI like tea.\n", "Be brief.\n\nI am Ada.\n\nI like tea."),
        (b"Be brief.\n", b"", "Be brief."),
        (b"Be brief.\n", b"\n\n", "Be brief."),
        (b"", None, ""),
        ("Größe\n".encode(), "日本\n".encode(), "Größe\n\n日本"),
    ],
)
def test_memory_follows_the_system_text_after_a_blank_line(
    tmp_path: Path, system: bytes, core: bytes | None, whole: str
) -> None:
    assert assembled(tmp_path, system, core) == whole


def test_the_tools_are_taken_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "system.md").write_text("x")
    other = ToolSchema(name="a", description="", parameters={})
    baseline = assemble_baseline(config_for(tmp_path / "system.md"), tmp_path, iter([TOOL, other]))
    assert baseline.tools == (TOOL, other)


def test_assembling_twice_gives_the_same(tmp_path: Path) -> None:
    """Nothing volatile is in a baseline."""
    (tmp_path / "system.md").write_text("x")
    made = [encode_baseline(assemble_baseline(config_for(tmp_path / "system.md"), tmp_path, [TOOL])) for _ in "ab"]
    assert made[0] == made[1]


# -- the packaged stand-in --------------------------------------------------------------------


def test_the_packaged_text_stands_in_for_a_missing_default(tmp_path: Path) -> None:
    text, stood_in = read_system_text(config_for(tmp_path / "system.md", system_set=False))
    assert stood_in
    assert text.startswith("You are Boxmaker, a personal agent working for one person, your owner. ")
    assert text == resources.files("boxmaker").joinpath("system.md").read_text("utf-8")


def test_a_default_that_is_there_is_taken(tmp_path: Path) -> None:
    (tmp_path / "system.md").write_text("mine\n")
    assert read_system_text(config_for(tmp_path / "system.md", system_set=False)) == ("mine\n", False)


def test_a_missing_file_at_a_path_that_was_set_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "mine.md"
    with pytest.raises(StorageError) as caught:
        read_system_text(config_for(file))
    assert str(caught.value) == f"cannot read {file}: no such file ([baseline] system)"
    assert caught.value.detail() == {"file": str(file), "action": "read"}


# -- files that cannot be used ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"ab\xff", "not UTF-8 at byte 2"),
        (b"\xed\xa0\x80", "not UTF-8 at byte 0"),
        (b"a\x00b", "holds a NUL character"),
    ],
)
def test_a_text_that_no_request_can_hold_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    system, core = tmp_path / "system.md", tmp_path / "memory" / "core.md"
    core.parent.mkdir()
    for file, other in ((system, core), (core, system)):
        file.write_bytes(content)
        other.write_bytes(b"fine")
        with pytest.raises(StorageError) as caught:
            assemble_baseline(config_for(system), tmp_path, [])
        assert str(caught.value) == f"cannot read {file}: {reason}"


@pytest.mark.parametrize("system_set", [True, False])
def test_a_directory_in_place_of_a_file_is_an_error(tmp_path: Path, system_set: bool) -> None:
    (tmp_path / "system.md").mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        read_system_text(config_for(tmp_path / "system.md", system_set=system_set))
    (tmp_path / "system.md").rmdir()
    (tmp_path / "system.md").write_text("x")
    (tmp_path / "memory" / "core.md").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"core\.md: Is a directory"):
        assemble_baseline(config_for(tmp_path / "system.md"), tmp_path, [])


@pytest.mark.parametrize("name", ["system.md", "memory/core.md"])
def test_a_pipe_in_place_of_a_file_is_an_error_and_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "system.md").write_text("x")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(StorageError) as caught:
        assemble_baseline(config_for(tmp_path / "system.md"), tmp_path, [])
    assert str(caught.value) == f"cannot read {tmp_path / name}: is no file"


def test_a_text_has_at_most_a_mebibyte(tmp_path: Path) -> None:
    file = tmp_path / "system.md"
    file.write_bytes(b"x" * 1_048_576)
    assert len(read_system_text(config_for(file))[0]) == 1_048_576
    file.write_bytes(b"x" * 1_048_577)
    with pytest.raises(StorageError, match="has 1048577 bytes, allowed are 1048576"):
        read_system_text(config_for(file))


def test_a_file_that_is_refused_is_not_left_open(tmp_path: Path) -> None:
    file = tmp_path / "system.md"
    make: list[Callable[[Path], object]] = [
        Path.mkdir, os.mkfifo, lambda path: path.write_bytes(b"\xff"), lambda path: path.write_bytes(b"x" * 1_048_577),
    ]  # fmt: skip
    before = open_descriptors()
    for wrong in make:
        wrong(file)
        with pytest.raises(StorageError):
            read_system_text(config_for(file))
        assert open_descriptors() == before
        file.rmdir() if file.is_dir() else file.unlink()


# -- bytes and hash ---------------------------------------------------------------------------

RAW = (
    '{"system":"Größe\\n\\n\\"x\\"","tools":[{"name":"clock","description":"Die Uhr – jetzt.",'
    '"parameters":{"type":"object","properties":{}}}]}'
).encode()


def test_the_bytes_are_compact_json_in_the_order_of_the_design() -> None:
    assert encode_baseline(Baseline(system='Größe\n\n"x"', tools=(TOOL,))) == RAW
    assert encode_baseline(Baseline(system="", tools=())) == b'{"system":"","tools":[]}'


def test_the_hash_is_sha_256_of_the_bytes_in_lower_case_hex() -> None:
    assert baseline_hash(RAW) == hashlib.sha256(RAW).hexdigest()
    assert baseline_hash(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_key_order_of_a_schema_is_kept() -> None:
    """llama-server renders it as it comes: another order is another prompt."""
    tool = ToolSchema(name="t", description="", parameters={"z": 1, "a": {"y": 2, "b": 3}})
    raw = encode_baseline(Baseline(system="", tools=(tool,)))
    assert b'"parameters":{"z":1,"a":{"y":2,"b":3}}' in raw
    assert encode_baseline(BASELINE.decode(raw)) == raw


def test_a_schema_that_json_cannot_hold_is_refused() -> None:
    for parameters in ({"a": float("nan")}, {"a": "\ud800"}):
        tool = ToolSchema(name="t", description="", parameters=parameters)
        with pytest.raises(ValueRefused):
            encode_baseline(Baseline(system="", tools=(tool,)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
schemas = st.builds(
    ToolSchema,
    name=st.text(),
    description=st.text(),
    parameters=st.dictionaries(st.text(), json_values, max_size=3),
)


@settings(deadline=None)
@given(st.builds(Baseline, system=st.text(), tools=st.lists(schemas, max_size=3).map(tuple)))
def test_what_is_written_is_what_is_read(baseline: Baseline) -> None:
    assert BASELINE.decode(encode_baseline(baseline)) == baseline
