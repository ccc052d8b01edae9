"""All targets by name."""

from __future__ import annotations

from tests.fuzz import completion, config, frames, records, sse
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    module.TARGET.name: module.TARGET for module in (frames, sse, completion, records, config)
}  # fmt: skip
