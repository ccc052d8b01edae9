"""`python -m tests.fuzz`: fuzz every target for a while, or try files again.

Exit status 0: nothing found; 1: something was found, and saved; the line of each find names its file.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.campaign import run, save, save_failure
from tests.fuzz.target import CORPUS, ROOT, Target
from tests.fuzz.targets import TARGETS

BUILD = ROOT / "build" / "fuzz"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="for all targets together (default: 300)")
    parser.add_argument("--seed", type=int, help="of an earlier run, to begin as it did")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one; may be repeated")
    parser.add_argument("--save", action="store_true", help=f"put inputs of new kinds into {CORPUS.relative_to(ROOT)}")
    parser.add_argument("--build", type=Path, default=BUILD, help="where failing inputs go")
    parser.add_argument(
        "files", nargs="*", type=Path, help="inputs to try again, each in a directory named as its target"
    )
    told = parser.parse_args(arguments)
    if told.files:
        return max(replay(file) for file in told.files)
    seed = random.getrandbits(32) if told.seed is None else told.seed
    names = told.target or list(TARGETS)
    print(f"fuzzing {', '.join(names)} for {told.seconds:g} s, seed {seed}", flush=True)
    failed = [name for name in names if not fuzz(TARGETS[name], told.seconds / len(names), seed, told)]
    return 1 if failed else 0


def fuzz(target: Target, seconds: float, seed: int, told: argparse.Namespace) -> bool:
    """One target; is it whole?"""
    found = run(target, seconds, seed)
    print(found.line(), flush=True)
    if told.save:
        for kind, raw in found.kinds.items():
            save(raw, CORPUS / target.name, kind, target.suffix)
    if found.failing is None:
        return True
    file = save_failure(found, target, told.build)
    print(
        f"{found.why}\n{target.name}: {len(found.failing)} bytes saved; again: python -m tests.fuzz {file}", flush=True
    )
    return False


def replay(file: Path) -> int:
    """One saved input; the target is the name of its directory."""
    target = TARGETS.get(file.parent.name)
    if target is None:
        print(f"{file}: its directory is named for no target ({', '.join(TARGETS)})", file=sys.stderr)
        return 2
    try:
        kind = target.check(file.read_bytes())
    except Exception:
        print(f"{file}: fails\n{traceback.format_exc()}")
        return 1
    print(f"{file}: {kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
