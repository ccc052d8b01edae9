"""The systemd units of the README: what they must say, and what systemd itself says of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from boxmaker.config import Retry

README = Path(__file__).parents[2] / "README.md"


def units() -> list[str]:
    return re.findall(r"```ini\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def settings(unit: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))


def test_there_is_a_user_unit_and_a_system_unit() -> None:
    user, system = units()
    assert "WantedBy=default.target" in user
    assert "WantedBy=multi-user.target" in system


@pytest.mark.parametrize("at", [0, 1])
def test_a_unit_waits_for_a_loading_model_and_restarts(at: int) -> None:
    found = settings(units()[at])
    assert found["Type"] == "notify"
    assert found["Restart"] == "on-failure"
    assert float(found["TimeoutStartSec"]) > Retry().loading_s


@pytest.mark.real
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("at", [0, 1])
def test_systemd_finds_nothing_wrong(tmp_path: Path, at: int) -> None:
    """The paths of programs and users are the reader's own; everything else is verified."""
    unit = re.sub(r"ExecStart=\S+ serve.*", f"ExecStart={sys.executable}", units()[at]).replace("User=boxmaker\n", "")
    file = tmp_path / "boxmaker.service"
    file.write_text(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    mine = [line for line in (done.stdout + done.stderr).splitlines() if "boxmaker.service" in line]
    assert mine == []
