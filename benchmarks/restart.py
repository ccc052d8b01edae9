"""What the first request after a restart of the server reads again of a session of some 3,000 tokens, as its share.

The embedded server is real, and ended between the two turns; daemon and home are new. With `[slots] save_dir` the
daemon saves the slot when it ends and restores it for the request; without, all of it is read again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import trio
from attrs import frozen
from tests.e2e.conftest import llama_server

from benchmarks.bench import Row, row
from benchmarks.cache import PAGE
from boxmaker.bxctl.cache import read_completions
from boxmaker.proto.ids import SessionId
from boxmaker.session.disk import ThreadDisk
from boxmaker.testing.daemon import running_daemon

PAGES, QUICK_PAGES = 13, 2
GOAL = 0.01


@frozen(kw_only=True)
class Restart:
    """Of `held` tokens in the slot before it `lost` were not there after it; `saved_bytes` is the file of them."""

    held: int
    lost: int
    saved_bytes: int


def rows(quick: bool) -> list[Row]:
    """Measure, and say it in rows."""
    pages = QUICK_PAGES if quick else PAGES
    found = []
    for saving in (False, True):
        one = trio.run(_restart, pages, saving)
        name = "with a saved slot" if saving else "without"
        size = f"; {one.saved_bytes / one.held / 1000:.1f} kB on disk a token" if saving else ""
        note = f"{one.lost:,} of {one.held:,} tokens{size}"
        unit = "the session's tokens"
        goal = GOAL if saving else None
        found.append(row(f"read again after a restart, {name}", unit, [one.lost / one.held], goal=goal, note=note))
    return found


async def _restart(pages: int, saving: bool) -> Restart:
    with tempfile.TemporaryDirectory(prefix="bm-") as name:
        directory = Path(name)
        kv = directory / "kv"
        kv.mkdir()
        text = (f'[slots]\nsave_dir = "{kv}"\n' if saving else "") + "[request]\nmax_tokens = 16\nseed = 7\n"
        with llama_server(directory / "log", "-", str(kv)) as url:
            async with running_daemon(directory, url, text, disk=ThreadDisk()) as daemon:
                await daemon.ask("s", " ".join([PAGE] * pages), resume=False)
                if daemon.saver is not None:
                    await daemon.saver.drain()
        saved = sum(file.stat().st_size for file in kv.glob("*.kv"))
        with llama_server(directory / "log", "-", str(kv)) as url:
            async with running_daemon(directory, url, text, disk=ThreadDisk()) as daemon:
                await daemon.ask("s", "And?", resume=True)
                last = read_completions(daemon.store.directory, SessionId("s"))[-1]
    assert last.expected is not None
    assert last.lost is not None
    return Restart(held=last.expected, lost=last.lost, saved_bytes=saved)
