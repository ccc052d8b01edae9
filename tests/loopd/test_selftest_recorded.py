"""The self-test against recordings of real llama-servers: one for each kind of chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from trio.testing import MockClock

from boxmaker.inference.client import Client
from boxmaker.loopd.selftest import Report, run_selftest
from boxmaker.testing.daemon import make_config
from boxmaker.tools.fake import fake_registry
from tests.loopd.recorded import SERVERS, TEMPLATES, replaying

GOOD = {
    "home": "ok",
    "system.md": "ok",
    "server": "ok",
    "slot": "ok",
    "template": "ok",
    "prefix": "ok",
    "baseline": "ok",
}
NO_PREFIX = {name: state for name, state in GOOD.items() if name != "prefix"}


async def report_of(kind: str, directory: Path) -> Report:
    async with replaying(kind) as url:
        config = make_config(directory, url)
        async with Client(config) as client:
            return await run_selftest(config, client, fake_registry())


@pytest.mark.parametrize(
    ("kind", "states", "alternate"),
    [
        ("prefix-stable", GOOD, False),
        ("one-slot", GOOD | {"slot": "warn"}, False),
        ("strips-old-reasoning", GOOD | {"prefix": "warn"}, False),
        ("users-alternate", GOOD, True),
        ("no-tools", NO_PREFIX | {"template": "fail"}, False),
        ("refuses-tool-results", NO_PREFIX | {"template": "fail"}, False),
        # llama-server itself puts the system text into the first user message where a template has no place for it
        ("drops-system", GOOD, False),
    ],
)
async def test_a_real_server_is_judged_by_its_template(
    tmp_path: Path, autojump_clock: MockClock, kind: str, states: dict[str, str], alternate: bool
) -> None:
    report = await report_of(kind, tmp_path)
    assert {check.name: check.state for check in report.checks} == states
    assert report.facts.alternate is alternate
    assert report.facts.model == "/models/model.gguf"
    for check in report.checks:
        assert check.remedy or check.state == "ok", f"{check.name} has a remedy"


def test_every_template_has_its_recording() -> None:
    assert {file.stem for file in SERVERS.glob("*.json")} == set(TEMPLATES)
