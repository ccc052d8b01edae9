"""The side file: lines in order, and nothing that is wrong with it matters to anybody."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from attrs import evolve

from boxmaker.proto.ledger import CACHE_LINE
from boxmaker.session import ledger
from boxmaker.session.ledger import LEDGER_NAME, append_lines, read_lines
from tests.proto.test_ledger import LINE, TEXT

FIRST, SECOND = evolve(LINE, completion=1), evolve(LINE, completion=2)


def test_lines_are_appended_to_a_file_for_the_owner_alone(tmp_path: Path) -> None:
    append_lines(tmp_path, [FIRST])
    append_lines(tmp_path, [SECOND, LINE])
    file = tmp_path / LEDGER_NAME
    assert file.read_text("utf-8") == "".join(f"{CACHE_LINE.encode(line)}\n" for line in (FIRST, SECOND, LINE))
    assert file.read_text("utf-8").endswith(f"{TEXT}\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_lines(tmp_path) == {1: FIRST, 2: SECOND, 3: LINE}


def test_of_a_long_file_the_end_is_read_alone_where_that_is_asked_for(tmp_path: Path) -> None:
    append_lines(tmp_path, [FIRST, SECOND, LINE])
    size = len(f"{CACHE_LINE.encode(LINE)}\n")
    assert read_lines(tmp_path, size) == {3: LINE}
    assert read_lines(tmp_path, size - 1) == {}, "a line that is cut is none"
    assert read_lines(tmp_path, 10 * size) == {1: FIRST, 2: SECOND, 3: LINE}


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    append_lines(tmp_path, [FIRST])
    with (tmp_path / LEDGER_NAME).open("ab") as file:
        file.write(TEXT.encode()[:50])
    append_lines(tmp_path, [SECOND])
    assert read_lines(tmp_path) == {1: FIRST, 2: SECOND}


def test_what_cannot_be_read_is_left_out_and_the_last_line_of_a_completion_counts(tmp_path: Path) -> None:
    again = evolve(FIRST, cause="unknown")
    lines = [CACHE_LINE.encode(FIRST).encode(), b"\xff\x00", b"{}", b"", CACHE_LINE.encode(again).encode(), b'{"time":']
    (tmp_path / LEDGER_NAME).write_bytes(b"\n".join(lines))
    assert read_lines(tmp_path) == {1: again}


def test_a_file_that_is_not_there_or_is_none_holds_nothing(tmp_path: Path) -> None:
    assert read_lines(tmp_path) == {}
    assert read_lines(tmp_path / "nowhere") == {}
    (tmp_path / LEDGER_NAME).mkdir()
    assert read_lines(tmp_path) == {}


def test_nothing_is_written_through_a_link_or_into_a_pipe(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"")
    (tmp_path / LEDGER_NAME).symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        append_lines(tmp_path, [FIRST])
    assert other.read_bytes() == b""
    assert read_lines(tmp_path) == {}
    (tmp_path / LEDGER_NAME).unlink()
    os.mkfifo(tmp_path / LEDGER_NAME)
    with pytest.raises(OSError, match="no file of ours"):
        append_lines(tmp_path, [FIRST])
    assert read_lines(tmp_path) == {}


def test_a_file_that_no_daemon_of_ours_wrote_so_long_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_lines(tmp_path, [FIRST])
    size = (tmp_path / LEDGER_NAME).stat().st_size
    monkeypatch.setattr(ledger, "LEDGER_MAX_BYTES", size)
    append_lines(tmp_path, [SECOND])
    with pytest.raises(OSError, match="no file of ours"):
        append_lines(tmp_path, [LINE])
    assert read_lines(tmp_path) == {}
