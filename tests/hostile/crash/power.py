"""What a disk holds after a crash: the tree as a kill leaves it, or what a power loss leaves of it.

Law: a power loss takes what was not synced. Here it takes all of that, or only what was in files, or a part.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from pathlib import Path
from typing import Any, TypeAlias

from attrs import define, field

Tree: TypeAlias = dict[str, bytes | None]
"""Every file and directory (None) below a root, by its path; sockets and the like are left out."""


@define
class Journal:
    """The launcher's journal, read: what is synced, and which calls were made."""

    lengths: dict[int, int] = field(factory=dict)
    names: dict[int, dict[str, list[Any]]] = field(factory=dict)
    calls: list[tuple[str, str, bool]] = field(factory=list)
    """Each call that was counted: its name, its path below the root, and whether it can be cut in half."""


def read_journal(file: Path) -> Journal:
    found = Journal()
    for line in file.read_bytes().splitlines():
        note = json.loads(line)
        if "call" in note:
            found.calls.append((note["call"], note["path"], note["cut"]))
        elif "file" in note:
            found.lengths[note["file"]] = note["length"]
        else:
            found.names[note["directory"]] = note["names"]
    return found


def left_by_kill(root: Path) -> Tree:
    """The tree as it is: the kernel goes on."""
    found: Tree = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            found[str(path.relative_to(root))] = None
        elif stat.S_ISREG(mode):
            found[str(path.relative_to(root))] = path.read_bytes()
    return found


def left_by_power_loss(root: Path, journal: Journal, keep: Path) -> Tree:
    """Only what is certain: names as at their directory's last sync, files as long as at theirs."""
    found: Tree = {}

    def walk(directory: int, above: str) -> None:
        for name, (inode, kind) in sorted(journal.names.get(directory, {}).items()):
            path = f"{above}{name}"
            if kind == "directory":
                found[path] = None
                walk(inode, f"{path}/")
            else:
                found[path] = (keep / str(inode)).read_bytes()[: journal.lengths.get(inode, 0)]

    walk(root.stat().st_ino, "")
    return found


def left_without_contents(root: Path, journal: Journal) -> Tree:
    """All names as they are, files as long as at their last sync: names were quicker than contents."""
    found = left_by_kill(root)
    for path, content in found.items():
        if content is not None:
            found[path] = content[: journal.lengths.get((root / path).stat().st_ino, 0)]
    return found


def left_in_part(root: Path, journal: Journal, keep: Path, chance: random.Random) -> Tree:
    """Names all or none, and each file cut somewhere between its last sync and its end."""
    synced = left_by_power_loss(root, journal, keep)
    found = left_by_kill(root)
    if chance.random() < 0.5:
        return synced
    for path, content in found.items():
        if content is not None:
            least = min(journal.lengths.get((root / path).stat().st_ino, 0), len(content))
            found[path] = content[: chance.randint(least, len(content))]
    return found


def lay(root: Path, tree: Tree) -> None:
    """Put a tree in the place of what is there."""
    shutil.rmtree(root)
    root.mkdir(mode=0o700)
    for path, content in tree.items():
        if content is None:
            (root / path).mkdir(mode=0o700)
        else:
            fd = os.open(root / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(content)
