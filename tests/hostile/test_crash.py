"""Crashes: a daemon that is killed, or loses its power, at every call to the disk of a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from boxmaker.proto.ids import SessionId
from boxmaker.session.logs import check
from boxmaker.testing.server import scripted_server
from tests.hostile.crash.campaign import random_run
from tests.hostile.crash.harness import KILLED, Broken, Place, Told, launcher, make_place, matters, ways
from tests.hostile.crash.launcher import Phase
from tests.hostile.crash.model import ANYTHING, Call, Said, read_records
from tests.hostile.crash.power import (
    Journal,
    lay,
    left_by_kill,
    left_by_power_loss,
    left_without_contents,
    read_journal,
)

WORKERS = 2
PHASES: tuple[Phase, ...] = ("before", "inside", "after")

ECHO = json.dumps({"name": "echo", "arguments": {"text": "once"}})
TURNS = [
    Said(
        "s",
        "What time is it?",
        ((Call("c1", "clock", "{}", ANYTHING), Call("c2", "call_tool", ECHO, "once")),),
        "It is noon.",
    ),
    Said("s", "Thanks.", (), "You are welcome."),
]


def points_of(journal: Journal) -> list[tuple[int, Phase, str]]:
    """Every place where a run with these calls can be killed."""
    return [
        (number, phase, f"{name} {path}")
        for number, (name, path, cut) in enumerate(journal.calls, start=1)
        for phase in PHASES
        if cut or phase != "inside"
    ]


@pytest.mark.real
async def test_every_call_to_the_disk_of_a_conversation_can_be_the_last(short_dir: Path) -> None:
    failures: list[str] = []
    judged: set[str] = set()

    async def go_on(place: Place, told: Told, where: str) -> None:
        """Judge all that the crash may have left; what was judged at another point is not judged again."""
        journal = read_journal(place.journal)
        synced = left_by_power_loss(place.root, journal, place.keep)
        for kind, tree in ways(place.root, journal, place.keep).items():
            known = place.known(tree, told)
            if kind == "kill":  # the next power loss depends on it, too
                known += repr(matters(synced))
            if known in judged:
                continue
            judged.add(known)
            after = place.copy()
            if kind != "kill":
                after.lay(tree)
            try:
                await after.judge(told)
                await after.go_on(["s"], watched=True)
                after.lay(left_by_power_loss(after.root, read_journal(after.journal), after.keep))
                await after.judge({})
            except Broken as broken:
                failures.append(f"{where}, {kind}: {broken}")

    async def work(points: Iterator[tuple[int, Phase, str]]) -> None:
        async with launcher() as made:
            for point, phase, what in points:
                async with scripted_server() as server:
                    place = make_place(short_dir / f"{phase} {point}", server, made)
                    status, told = await place.live(TURNS, point=point, phase=phase, watched=True)
                    assert status == KILLED, f"{phase} {point} was not reached: {made.text}"
                    await go_on(place, told, f"{phase} {point} ({what})")

    with trio.fail_after(180):
        async with launcher() as made, scripted_server() as server:
            place = make_place(short_dir / "whole", server, made)
            status, told = await place.live(TURNS, watched=True)
            assert status == 0
            await place.judge(told)
            points = points_of(read_journal(place.journal))
        waiting = iter(points)
        async with trio.open_nursery() as nursery:
            for _ in range(WORKERS):
                nursery.start_soon(work, waiting)
    assert not failures, "\n".join(failures)
    appends = [what for _, phase, what in points if phase == "inside" and what == "write home/sessions/s/0.jsonl"]
    assert len(appends) == 7, "two users, three assistants, two results"
    assert len(points) >= 65
    assert len(judged) >= 25


@pytest.mark.real
async def test_every_call_to_the_disk_of_a_repair_can_be_the_last(short_dir: Path) -> None:
    """Whatever is left of it, the next repair brings every whole line back."""

    lost: list[str] = []

    async def torn(name: str) -> Place:
        place = make_place(short_dir / name, server, made)
        place.lay({**tree, "home/sessions/s/0.jsonl": whole + b'{"type":"us'})
        return place

    with trio.fail_after(60):
        async with launcher() as made, scripted_server() as server:
            first = make_place(short_dir / "whole", server, made)
            await first.live(TURNS)
            tree = left_by_kill(first.root)
            whole = tree["home/sessions/s/0.jsonl"] or b""
            place = await torn("mended")
            assert await place.repair("s", watched=True) == 0
            points = points_of(read_journal(place.journal))
            assert [what.split()[0] for _, phase, what in points if phase == "before"] == [
                "unlink", "write", "fdatasync", "link", "rename", "fsync",
            ]  # fmt: skip
            for point, phase, what in points:
                place = await torn(f"{phase} {point}")
                assert await place.repair("s", point=point, phase=phase, watched=True) == KILLED
                for kind, left in ways(place.root, read_journal(place.journal), place.keep).items():
                    if kind != "kill":
                        place.lay(left)
                    log = (place.sessions / "s" / "0.jsonl").read_bytes()
                    assert log in (whole, whole + b'{"type":"us'), f"{kind} {phase} {what}"
                    assert await place.repair("s", watched=True) == 0
                    assert not check(place.sessions, SessionId("s"))
                    assert (place.sessions / "s" / "0.jsonl").read_bytes() == whole
                    if kind == "kill":  # what is said now is not lost with a name that the repair did not sync
                        place.logs["s"] = read_records(whole)
                        await place.go_on(["s"], watched=True)
                        later = left_by_power_loss(place.root, read_journal(place.journal), place.keep)
                        if later["home/sessions/s/0.jsonl"] != (place.sessions / "s" / "0.jsonl").read_bytes():
                            lost.append(f"{phase} {point} {what}")
    assert not lost, "\n".join(lost)


@pytest.mark.real
async def test_a_home_whose_making_was_cut_is_on_the_disk_when_it_serves(short_dir: Path) -> None:
    """The start after a kill finds directories that nobody has synced; a power loss comes later."""
    with trio.fail_after(60):
        async with launcher() as made, scripted_server() as server:
            for point in range(1, 6):
                place = make_place(short_dir / str(point), server, made, home="above/home")
                assert (await place.live([], point=point, phase="after", watched=True))[0] == KILLED
                status, told = await place.live(TURNS, watched=True)
                assert status == 0
                place.lay(left_by_power_loss(place.root, read_journal(place.journal), place.keep))
                await place.judge(told)
                await place.go_on(["s"])


@pytest.mark.real
async def test_a_mended_log_keeps_what_comes_after_the_repair(short_dir: Path) -> None:
    with trio.fail_after(60):
        async with launcher() as made, scripted_server() as server:
            place = make_place(short_dir, server, made)
            status, told = await place.live(TURNS, watched=True)
            assert status == 0
            await place.judge(told)
            with (place.sessions / "s" / "0.jsonl").open("ab") as log:
                log.write(b'{"type":"us')
            assert await place.repair("s", watched=True) == 0
            _, told = await place.live([Said("s", "Still there?", (), "Always.")], watched=True)
            place.lay(left_by_power_loss(place.root, read_journal(place.journal), place.keep))
            await place.judge(told)
            await place.go_on(["s"])


@pytest.mark.real
async def test_random_crashes_as_make_crash_tries_them(short_dir: Path) -> None:
    with trio.fail_after(60):
        async with launcher() as made:
            for number in range(4):
                await random_run(short_dir / str(number), f"test:{number}", made)


# -- the judge itself ----------------------------------------------------------------------------


def test_a_power_loss_takes_names_and_bytes_that_were_not_synced(tmp_path: Path) -> None:
    root, keep = tmp_path / "root", tmp_path / "keep"
    (root / "synced").mkdir(parents=True)
    keep.mkdir()
    (root / "synced" / "log").write_bytes(b"one two")
    (root / "new").write_bytes(b"three")
    (root / "gone").write_bytes(b"four")
    number = {name: (root / name).stat().st_ino for name in ("", "synced", "synced/log", "new", "gone")}
    for name in ("synced/log", "gone"):
        (keep / str(number[name])).hardlink_to(root / name)
    (root / "gone").unlink()
    journal = Journal(
        lengths={number["synced/log"]: 3, number["gone"]: 4},
        names={
            number[""]: {"synced": [number["synced"], "directory"], "gone": [number["gone"], "file"]},
            number["synced"]: {"log": [number["synced/log"], "file"]},
        },
    )
    assert left_by_kill(root) == {"synced": None, "synced/log": b"one two", "new": b"three"}
    assert left_by_power_loss(root, journal, keep) == {"synced": None, "synced/log": b"one", "gone": b"four"}
    assert left_without_contents(root, journal) == {"synced": None, "synced/log": b"one", "new": b""}


def test_what_is_laid_is_what_is_left(tmp_path: Path) -> None:
    tree = {"a": None, "a/b": b"text", "c": None}
    (tmp_path / "root" / "before").mkdir(parents=True)
    lay(tmp_path / "root", tree)
    assert left_by_kill(tmp_path / "root") == tree
