"""Random crashes: any conversation, any place, any kind of crash, several of them in a row.

`make crash` runs it; `--seed S --only N` runs one again.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import trio

from boxmaker.testing.server import scripted_server
from tests.hostile.crash.harness import KILLED, Broken, Launcher, Place, demand, launcher, make_place
from tests.hostile.crash.launcher import Phase
from tests.hostile.crash.model import Said, random_said
from tests.hostile.crash.power import left_by_power_loss, left_in_part, left_without_contents, read_journal

WORKERS = 2
RUN_S = 120
PHASES: list[Phase] = ["before", "inside", "after"]
KINDS = ["kill", "kill", "power loss", "power loss, names first", "power loss in part", "kill from outside"]


async def random_run(directory: Path, seed: str, made: Launcher) -> Counter[str]:
    """Crash one home one to three times, then go on; what happened, counted.

    Raises:
        Broken: a law did not hold.
    """
    happened: Counter[str] = Counter()
    broken: Broken | None = None
    async with scripted_server() as server:
        try:
            await _crash_and_go_on(make_place(directory, server, made, "[session]\nmemory_mib = 1\n"), seed, happened)
        except Broken as exc:  # not through the server's nursery: it would come out as a group
            broken = exc
    if broken is not None:
        raise broken
    return happened


async def _crash_and_go_on(place: Place, seed: str, happened: Counter[str]) -> None:
    chance = random.Random(seed)
    names = chance.choice([["s"], ["s"], ["s", "t"]])
    number = 0

    def some_turns() -> list[Said]:
        nonlocal number
        made_up = []
        for _ in range(chance.choice([1, 1, 2, 3])):
            number += 1
            made_up.append(random_said(chance, chance.choice(names), number))
        return made_up

    if chance.random() < 0.5:  # a home that has lived
        status, told = await place.live(some_turns(), watched=True)
        demand(status == 0, "loopd ended with", status)
        await place.judge(told)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        turns = some_turns()
        # A start makes about 9 calls, a session 8, an append 2; at a point behind the last the daemon ends well.
        appends = sum(2 + sum(1 + len(calls) for calls in said.rounds) for said in turns)
        point, frames = chance.randint(1, 18 + 2 * appends), chance.randint(1, 2 + 3 * appends)
        phase, kind = chance.choice(PHASES), chance.choice(KINDS)
        if kind == "kill from outside":
            status, told = await place.live(turns, watched=True, kill_after_frames=frames)
        else:
            status, told = await place.live(turns, watched=True, point=point, phase=phase)
        demand(status in (0, KILLED), "loopd ended with", status, place.launcher.text)
        journal = read_journal(place.journal)
        if kind == "power loss":
            place.lay(left_by_power_loss(place.root, journal, place.keep))
        elif kind == "power loss, names first":
            place.lay(left_without_contents(place.root, journal))
        elif kind == "power loss in part":
            place.lay(left_in_part(place.root, journal, place.keep, chance))
        happened[kind if status == KILLED or kind.startswith("power") else "no crash"] += 1
        await place.judge(told)
    await place.go_on(names, watched=True)
    place.lay(left_by_power_loss(place.root, read_journal(place.journal), place.keep))
    await place.judge({})
    happened["torn and repaired"] += place.torn


async def campaign(seed: str, numbers: Iterator[int], seconds: float, directory: Path) -> int:
    """Run many, two at a time; the number of those that failed."""
    happened: Counter[str] = Counter()
    failed: list[int] = []
    began = time.monotonic()

    async def work() -> None:
        async with launcher() as made:
            for number in numbers:
                if time.monotonic() - began > seconds:
                    return
                place = directory / str(number)
                try:
                    with trio.fail_after(RUN_S):
                        happened.update(await random_run(place, f"{seed}:{number}", made))
                except (Broken, AssertionError, trio.TooSlowError) as exc:
                    failed.append(number)
                    print(f"run {number}: {exc!r}", flush=True)
                    if not isinstance(exc, Broken):
                        traceback.print_exc()
                        return  # the launcher may still run something
                happened["runs"] += 1
                shutil.rmtree(place, ignore_errors=True)
                if happened["runs"] % 50 == 0:
                    print(f"{happened['runs']} runs, {time.monotonic() - began:.0f} s", flush=True)

    async with trio.open_nursery() as nursery:
        for _ in range(WORKERS):
            nursery.start_soon(work)
    print(f"seed {seed}: {time.monotonic() - began:.0f} s; " + ", ".join(f"{n} {what}" for what, n in happened.items()))
    print(f"failed: {', '.join(map(str, sorted(failed))) or 'none'}")
    return len(failed)


def main() -> None:
    """`python -m tests.hostile.crash.campaign`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1800, help="no run is begun after that")
    parser.add_argument("--seed", default=secrets.token_hex(4))
    parser.add_argument("--only", type=int, help="this run of the seed alone")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    numbers = iter(range(given.count) if given.only is None else [given.only])
    with tempfile.TemporaryDirectory(prefix="bx-", dir="/tmp") as directory:
        failed = trio.run(partial(campaign, given.seed, numbers, given.seconds, Path(directory)))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
