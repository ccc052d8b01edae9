"""The files of saved slots: what is there whole stays until the next is, and whatever else is there costs a cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from boxmaker.proto.ids import SessionId
from boxmaker.proto.saved import SAVED_SLOT, SavedSlot
from boxmaker.session.saved import SavedFiles
from tests.proto.test_saved import SAVED

S = SessionId("s")
STEM = "boxmaker-83340e31a43037ab22cb1e618ec27047"
"""`printf '/h\\0s' | sha256sum`, the first 32 digits."""


def files(directory: Path) -> SavedFiles:
    return SavedFiles(directory, Path("/h"))


def written(directory: Path, session: str = "s", *, tokens: int = 14, size: int = 100) -> SavedSlot:
    """As a save of the server that went well."""
    mine = files(directory)
    saved = evolve(SAVED, session=SessionId(session), tokens=tokens, bytes=size)
    mine.begin(saved)
    (directory / mine.saving_name(saved.session)).write_bytes(b"k" * size)
    mine.complete(saved)
    return saved


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_names_are_digests_of_home_and_session(tmp_path: Path) -> None:
    assert files(tmp_path).kv_name(S) == f"{STEM}.kv"
    assert files(tmp_path).saving_name(S) == f"{STEM}.saving"
    assert SavedFiles(tmp_path, Path("/other")).kv_name(S) != f"{STEM}.kv"


def test_a_save_has_a_record_before_there_is_a_file_and_is_none_until_it_is_complete(tmp_path: Path) -> None:
    mine = files(tmp_path)
    mine.begin(SAVED)
    assert names(tmp_path) == [f"{STEM}.json"]
    assert SAVED_SLOT.decode((tmp_path / f"{STEM}.json").read_bytes().rstrip()) == evolve(SAVED, tokens=0, bytes=0)
    assert (tmp_path / f"{STEM}.json").stat().st_mode & 0o777 == 0o600
    assert mine.read(S) is None
    saved = written(tmp_path)
    assert mine.read(S) == saved
    assert names(tmp_path) == [f"{STEM}.json", f"{STEM}.kv"]


def test_what_was_saved_stays_until_the_next_save_is_complete(tmp_path: Path) -> None:
    mine, saved = files(tmp_path), written(tmp_path)
    mine.begin(evolve(SAVED, tokens=28, bytes=200))
    (tmp_path / f"{STEM}.saving").write_bytes(b"k" * 150)
    assert mine.read(S) == saved
    mine.give_up(S)
    assert (mine.read(S), names(tmp_path)) == (saved, [f"{STEM}.json", f"{STEM}.kv"])
    again = written(tmp_path, tokens=28, size=200)
    assert mine.read(S) == again
    assert (tmp_path / f"{STEM}.kv").stat().st_size == 200


def test_a_first_save_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    mine = files(tmp_path)
    mine.begin(SAVED)
    (tmp_path / f"{STEM}.saving").write_bytes(b"k")
    mine.give_up(S)
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", [1, 2, 3])
def test_dying_in_the_middle_of_a_change_leaves_no_record_of_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Even when both files have the same size: the record says what is there, or that nothing is."""
    mine, saved = files(tmp_path), written(tmp_path)
    (tmp_path / f"{STEM}.saving").write_bytes(b"n" * 100)
    replace, calls = os.replace, iter(range(1, 4))

    def dying(one: Path, other: Path) -> None:
        if next(calls) == step:
            raise KeyboardInterrupt
        replace(one, other)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            mine.complete(evolve(saved, tokens=28))
    assert mine.read(S) == (saved if step == 1 else None)
    mine.sweep([S])
    assert names(tmp_path) == ([f"{STEM}.json", f"{STEM}.kv"] if step == 1 else [])


def empty_record(directory: Path) -> None:
    (directory / f"{STEM}.json").write_bytes(b"")


def shorter(directory: Path) -> None:
    (directory / f"{STEM}.kv").write_bytes(b"k" * 99)


def no_file(directory: Path) -> None:
    (directory / f"{STEM}.kv").unlink()


def no_record(directory: Path) -> None:
    (directory / f"{STEM}.json").unlink()


def link(directory: Path) -> None:
    record = directory / f"{STEM}.json"
    record.rename(directory / "elsewhere.json")
    record.symlink_to(directory / "elsewhere.json")


def pipe(directory: Path) -> None:
    (directory / f"{STEM}.json").unlink()
    os.mkfifo(directory / f"{STEM}.json")


def of_another(directory: Path) -> None:
    other = evolve(SAVED, session=SessionId("t"))
    (directory / f"{STEM}.json").write_text(SAVED_SLOT.encode(other) + "\n", "utf-8")


@pytest.mark.parametrize("damage", [empty_record, shorter, no_file, no_record, link, pipe, of_another])
def test_what_is_damaged_is_not_read_and_is_swept(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    mine = files(tmp_path)
    written(tmp_path)
    damage(tmp_path)
    assert mine.read(S) is None
    assert mine.sweep([S]) == 1
    assert [name for name in names(tmp_path) if name.startswith("boxmaker")] == []


def test_the_sweep_takes_what_no_session_has_a_use_for_and_nothing_else(tmp_path: Path) -> None:
    kept = written(tmp_path)
    written(tmp_path, "gone")
    other = SavedFiles(tmp_path, Path("/other"))
    (tmp_path / other.saving_name(S)).write_bytes(b"k")
    other.begin(SAVED)
    for suffix in ("saving", "new"):
        (tmp_path / f"{STEM}.{suffix}").write_bytes(b"left over")
    (tmp_path / "owner.kv").write_bytes(b"mine")
    (tmp_path / f"{STEM}.kv.bak").write_bytes(b"mine")
    assert files(tmp_path).sweep([S]) == 1
    assert files(tmp_path).read(S) == kept
    theirs = [f"{other.stem(S)}.json", other.saving_name(S)]
    assert names(tmp_path) == sorted([f"{STEM}.json", f"{STEM}.kv", f"{STEM}.kv.bak", "owner.kv", *theirs])


def test_what_was_of_use_longest_ago_goes_first(tmp_path: Path) -> None:
    mine = files(tmp_path)
    for at, session in enumerate("abcd"):
        written(tmp_path, session)
        os.utime(tmp_path / f"{mine.stem(SessionId(session))}.json", (at, at))
    assert mine.keep_within(400, None) == []
    mine.touch(SessionId("a"))
    assert mine.keep_within(300, None) == ["b"]
    assert mine.keep_within(100, SessionId("c")) == ["d", "a"], "c is about to be restored"
    assert mine.read(SessionId("c")) is not None


def test_what_does_not_fit_alone_goes_before_all_others(tmp_path: Path) -> None:
    for session in ("a", "b"):
        written(tmp_path, session, size=10)
    written(tmp_path, "big", size=200)
    assert files(tmp_path).keep_within(100, None) == ["big"]


def test_what_a_save_that_was_left_has_written_counts(tmp_path: Path) -> None:
    mine = files(tmp_path)
    for at, session in enumerate("ab"):
        written(tmp_path, session)
        os.utime(tmp_path / f"{mine.stem(SessionId(session))}.json", (at, at))
    (tmp_path / mine.saving_name(SessionId("a"))).write_bytes(b"k" * 50)
    assert mine.keep_within(250, None) == []
    assert mine.keep_within(249, None) == ["a"]
    assert names(tmp_path) == sorted(f"{mine.stem(SessionId('b'))}.{suffix}" for suffix in ("json", "kv"))


def test_a_save_that_is_not_there_to_be_taken_costs_no_older_one(tmp_path: Path) -> None:
    mine, saved = files(tmp_path), written(tmp_path)
    with pytest.raises(FileNotFoundError):
        mine.complete(evolve(saved, tokens=28))
    assert mine.read(S) == saved
