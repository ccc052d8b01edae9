"""The measure of own coverage: its map names every pure module, and it finds what is missed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.own_coverage import OWN, TESTS
from tests.test_layering import imports, modules

ROOT = TESTS.parent
IMPURE = {"trio", "time", "random", "secrets", "os", "socket", "select", "httpx", "log", "demo.run"}
PACKAGES = {"", "proto", "inference", "session", "tools", "verify"}
"""Those with pure modules; `""` is the top."""


def marked_pure() -> set[str]:
    """What the design's table of layers calls pure: a whole row, or the one module where it says a thing of each."""
    table = (ROOT / "docs" / "design.md").read_text("utf-8").split("\n## Layers\n", 1)[1].split("\n## ", 1)[0]
    found, package = set(), ""
    for line in table.splitlines():
        if line.count("|") == 4:
            _, first, names, what, _ = (cell.strip() for cell in line.split("|"))
            if directory := re.fullmatch(r"`(\w+)/`", first):
                package = f"{directory[1]}."
            row, said = re.findall(r"`(\w+)`", names), what.split(";")
            each = zip(row, said, strict=True) if len(row) == len(said) else [(name, what) for name in row]
            found |= {package + name for name, text in each if "pure" in (first, *re.findall(r"\w+", text))}
    return found


def test_every_module_that_the_design_calls_pure_is_measured() -> None:
    marked = marked_pure()
    assert {"proto.time", "inference.sse", "inference.request", "session.replay", "tools.dispatch"} <= marked
    assert not {"inference.client", "session.store", "tools.fake"} & marked
    assert marked - set(OWN) == set()


def test_every_module_without_clock_loop_or_chance_is_measured() -> None:
    found = {
        name
        for name, file in modules().items()
        if name.rpartition(".")[0] in PACKAGES and not name.endswith("__") and not imports(file) & IMPURE
    }
    assert len(found) > 15
    assert found - set(OWN) == set()


def test_the_map_names_what_there_is() -> None:
    assert set(OWN) - set(modules()) == set()
    assert {file for file in OWN.values() if not (TESTS / file).is_file()} == set()
    assert len(set(OWN.values())) == len(OWN), "each has a test module of its own"


def measured(directory: Path, tests: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What is missed of two modules, one of which calls the other, with these tests."""
    (directory / "box").mkdir()
    (directory / "box" / "__init__.py").touch()
    (directory / "box" / "a.py").write_text(
        "def sign(n):\n    if n < 0:\n        n = -1\n    return n\n\n\nA = sign(-5)\n"
    )
    (directory / "box" / "b.py").write_text("from box.a import sign\n\n\ndef twice(n):\n    return sign(n) * 2\n")
    for name, text in tests.items():
        (directory / name).write_text(text)
    program = (
        "import json, pathlib, sys; from tests.own_coverage import missed; here = pathlib.Path(sys.argv[1]);"
        "sys.path.insert(0, sys.argv[1]);"
        "json.dump(missed({'a': 'test_a.py', 'b': 'test_b.py'}, 'box', here), (here / 'missed').open('w'))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(directory)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_what_only_the_test_of_another_module_reaches_is_missed(tmp_path: Path) -> None:
    run = measured(
        tmp_path,
        {
            "test_a.py": "import box.b\n\n\ndef test_a():\n    box.b.twice(-1)\n",
            "test_b.py": "from box import a\n\n\ndef test_b():\n    a.sign(1)\n",
        },
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # The import of `a` reaches the branch for negative numbers, and no test of its own the other one.
    assert json.loads((tmp_path / "missed").read_text()) == {"a": ["2->4"], "b": ["5"]}


def test_a_test_that_fails_leaves_nothing_to_measure(tmp_path: Path) -> None:
    run = measured(
        tmp_path,
        {
            "test_a.py": "def test_a():\n    assert False\n",
            "test_b.py": "def test_b():\n    pass\n",
        },
    )
    assert run.returncode == 1
    assert "the tests did not pass" in run.stderr
    assert not (tmp_path / "missed").exists()
