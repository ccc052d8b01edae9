"""Where a home and its socket are."""

from __future__ import annotations

from pathlib import Path

import pytest

from boxmaker.places import default_home, socket_path


@pytest.mark.parametrize(
    ("environ", "home"),
    [
        ({}, "/var/lib/boxmaker"),
        ({"BOXMAKER_HOME": ""}, "/var/lib/boxmaker"),
        ({"BOXMAKER_HOME": "here"}, "here"),
        ({"BOXMAKER_HOME": "/srv/box", "HOME": "/root"}, "/srv/box"),
    ],
)
def test_the_home_is_what_the_environment_says_or_the_default(environ: dict[str, str], home: str) -> None:
    assert default_home(environ) == Path(home)


def test_the_socket_is_where_m2b_puts_it() -> None:
    assert socket_path(Path("/srv/box")) == Path("/srv/box/run/loop/loop.sock")
