"""What the documents promise by name is there: keys, modules. (The table of endings has `test_endings.py`.)"""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from boxmaker import config

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "docs" / "design.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_key_of_the_configuration_is_in_the_design() -> None:
    table = section(DESIGN, "Configuration")
    for name, cls in config._TABLES.items():
        assert f"| `{name}` |" in table
        for attribute in attrs.fields(cls):
            if "check" in attribute.metadata:
                assert f"`{attribute.name}`" in table, f"{name}.{attribute.name}"


def test_the_layers_of_the_design_are_the_modules() -> None:
    table = section(DESIGN, "Layers")
    for file in (ROOT / "src" / "boxmaker").rglob("*.py"):
        name = file.stem
        if name.startswith("__") or file.parent.name == "testing":
            continue
        assert f"`{name}`" in table, file


def test_the_turn_stays_under_300_lines() -> None:
    """Task 06: "If it is not, something is being done twice." """
    for file in (ROOT / "src" / "boxmaker" / "turn").glob("*.py"):
        assert len(file.read_text("utf-8").splitlines()) < 300, file


def test_there_are_no_more_documents_than_these() -> None:
    assert sorted(file.name for file in (ROOT / "docs").iterdir()) == [
        "decisions.md", "design.md", "evidence.md", "protocol.md",
    ]  # fmt: skip


def test_no_file_names_a_particular_machine() -> None:
    """Paths of a home or of this workplace, and hosts of package registries."""
    forbidden = re.compile("/wo" + "rk/|/ro" + "ot/|pypi\\.o" + "rg|registry\\.npm")
    wrong = []
    for file in ROOT.rglob("*"):
        parts = file.relative_to(ROOT).parts
        if parts[0] in {".git", ".venv", "build"} or any(
            p.endswith((".egg-info", "_cache", "__pycache__")) for p in parts
        ):
            continue
        if file.is_file() and parts[0] != ".hypothesis" and forbidden.search(file.read_text("utf-8", "replace")):
            wrong.append(str(file.relative_to(ROOT)))
    assert wrong == []
