"""The command `python -m boxmaker.verify`."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import attrs
import click
import trio

from boxmaker.config import at_home, load_config
from boxmaker.errors import printable
from boxmaker.loopd.cli import ending
from boxmaker.loopd.home import lock_holder
from boxmaker.verify.device import Verification
from boxmaker.verify.judge import Check


@click.command()
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="The daemon's configuration: its server is verified, its home is not touched.",
)
@click.option("--demo", is_flag=True, help="Verify the embedded server instead, forced to say what a script wants.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON a check.")
def main(config_file: Path | None, demo: bool, as_json: bool) -> None:
    """Check what boxmaker promises on a real server; a line a check. Status 0 only when all hold.

    It takes eight turns or more on the configured slot, in a home of its own that is removed afterwards.
    """
    if (config_file is None) != demo:
        raise click.UsageError("either --config FILE or --demo")

    def say(check: Check) -> None:
        lines = check.line().split("\n")  # what a server or a program said may hold anything
        click.echo(json.dumps(attrs.asdict(check)) if as_json else "\n".join(map(printable, lines)))
        sys.stdout.flush()

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Begun in the background of a script: the terminals that it starts would inherit that, and hear no Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with ending("verify"), tempfile.TemporaryDirectory(prefix="boxmaker-verify-") as directory:
        if config_file is None:
            from boxmaker.verify.demo import verify_demo

            held = trio.run(verify_demo, Path(directory), say)
        else:
            config = load_config(config_file, os.environ)
            slot = f"slot {config.slots.listed[0]} of {config.server.url}"
            click.echo(f"verify: uses {slot}; what your session has cached there is read again afterwards", err=True)
            if holder := lock_holder(config.paths.home):
                click.echo(f"verify: a loopd ({holder}) serves this home; do not talk to it meanwhile", err=True)
            held = trio.run(Verification(owner=config, config=at_home(config, Path(directory)), say=say).run)
    sys.exit(0 if held else 1)
