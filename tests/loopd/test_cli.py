"""Tests of the `loopd` command: what it prints, where, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from boxmaker.testing.server import json_response, scripted_server
from tests.loopd.daemon_process import loopd, names, write_config

pytestmark = pytest.mark.real


async def test_a_bad_configuration_is_a_line_a_problem_exit_2_and_nothing_made(short_dir: Path) -> None:
    config = short_dir / "config.toml"
    config.write_text('[server]\nurl = "ftp://x"\n[slots]\nmain = -1\n[paths]\nhome = "home"\n[nonsense]\n', "utf-8")
    runs = [await loopd(command, "--config", str(config)) for command in ("serve", "check-config", "selftest")]
    for run in runs:
        assert run.returncode == 2
        assert run.stdout == b""
        lines = run.stderr.decode().splitlines()
        assert len(lines) == 3, lines
        assert lines[0].startswith("loopd: ")
        for line in lines:
            assert str(config) in line
        for named in ("[server] url", "[slots] main", "[nonsense]"):
            assert sum(named in line for line in lines) == 1
    assert names(short_dir) == ["config.toml"]


async def test_a_missing_configuration_names_the_file_and_no_option_is_a_usage_error(short_dir: Path) -> None:
    missing = await loopd("check-config", "--config", str(short_dir / "none.toml"))
    unnamed = await loopd("serve")
    assert missing.returncode == 2
    (line,) = missing.stderr.decode().splitlines()
    assert str(short_dir / "none.toml") in line
    assert unnamed.returncode == 2
    assert "--config" in unnamed.stderr.decode()


async def test_check_config_says_what_holds_and_makes_nothing(short_dir: Path) -> None:
    config = write_config(short_dir, "http://127.0.0.1:9", "[slots]\nmain = 3")
    config.write_text(config.read_text("utf-8").replace('[paths]\nhome = "home"\n', ""), "utf-8")
    run = await loopd("check-config", "--config", str(config), environ={"BOXMAKER_HOME": f"{short_dir}/elsewhere"})
    assert run.returncode == 0
    assert run.stderr == b""
    said = run.stdout.decode()
    assert f"{config}: ok" in said
    assert "http://127.0.0.1:9, slot 3" in said
    assert f"{short_dir}/elsewhere/run/loop/loop.sock" in said
    assert names(short_dir) == ["config.toml", "system.md"]


async def test_selftest_prints_a_line_a_check_and_its_status_tells_failure(short_dir: Path) -> None:
    async with scripted_server() as server:
        config = write_config(short_dir, server.url)
        good = await loopd("selftest", "--config", str(config))
        as_json = await loopd("selftest", "--config", str(config), "--json")
        server.apply_template = json_response(500, {"error": {"code": 500, "message": "no tools", "type": "x"}})
        bad = await loopd("selftest", "--config", str(config))
        assert server.completions == []
    assert good.returncode == 0
    lines = good.stdout.decode().splitlines()
    assert lines[0] == f"ok    home: {short_dir}/home will be made"
    assert [line for line in lines if line.startswith("fail")] == []
    assert "--no-kv-unified" in lines[-1], "the flags that keep a slot warm are told"
    checks = [json.loads(line) for line in as_json.stdout.decode().splitlines()]
    assert {"home", "server", "slot", "template", "prefix", "baseline"} <= {check["name"] for check in checks}
    assert {check["state"] for check in checks} <= {"ok", "warn"}
    assert bad.returncode == 1
    assert [line.split(":")[0] for line in bad.stdout.decode().splitlines() if line.startswith("fail")] == [
        "fail  template"
    ]
    assert good.stderr == as_json.stderr == bad.stderr == b""
    assert not (short_dir / "home").exists()
