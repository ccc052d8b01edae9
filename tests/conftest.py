"""Settings that hold for all tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Begun in the background of a script: the programs that tests start would inherit that, and hear no Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The programs that tests start buffer as an owner's do: set in a workplace, it hid that a daemon whose log nobody reads
# ended with status 120.
os.environ.pop("PYTHONUNBUFFERED", None)

# A shared machine may be slow at any moment: no example has a deadline. The failing example is printed so that
# it can be replayed.
settings.register_profile("quick", deadline=None, print_blob=True)
settings.register_profile("deep", deadline=None, print_blob=True, max_examples=3000)
# The same examples every time: what runs the tests for each of thousands of mutants compares runs (`make mutants`).
settings.register_profile("few", deadline=None, print_blob=True, max_examples=15, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(params=["UTC", "America/New_York", "Asia/Kathmandu"])
def local_zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The zone of the machine, which may decide nothing."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()
