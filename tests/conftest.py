"""Settings that hold for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# A shared machine may be slow at any moment: no example has a deadline. The failing example is printed so that
# it can be replayed.
settings.register_profile("quick", deadline=None, print_blob=True)
settings.register_profile("deep", deadline=None, print_blob=True, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
