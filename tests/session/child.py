"""Runs a function of a test module in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60


def run_in_child(function: Callable[[Path], None], directory: Path) -> int:
    """Call a function with a directory in a new interpreter; its exit status, negative for a signal."""
    code = f"import sys, pathlib, {function.__module__} as m; m.{function.__name__}(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(directory)], cwd=ROOT, timeout=DEADLINE_S, check=False)
    return done.returncode
