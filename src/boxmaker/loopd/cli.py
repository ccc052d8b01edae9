"""The `loopd` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from boxmaker import __version__
from boxmaker.errors import BoxmakerError, printable

_config_option = click.option(
    "--config",
    "config_file",
    required=True,
    type=click.Path(path_type=Path),
    help="The configuration, a TOML file.",
)


@click.group()
@click.version_option(__version__)
def main() -> None:
    """The boxmaker daemon: keeps sessions and runs turns on your llama-server."""


@main.command()
@_config_option
@click.option("--home", type=click.Path(path_type=Path), help="Another home than the configuration's, socket and all.")
@click.option("--until-eof", is_flag=True, help="Stop, as SIGTERM does, when stdin ends.")
def serve(config_file: Path, home: Path | None, until_eof: bool) -> None:
    """Run the self-test, then serve the socket until SIGTERM or SIGINT."""
    import trio

    from boxmaker.config import at_home, load_config
    from boxmaker.log import let_go_of_stderr, log_to_stderr
    from boxmaker.loopd.serve import serve as run

    log_to_stderr()
    try:
        with ending():
            config = load_config(config_file, os.environ)
            if home is not None:
                config = at_home(config, home)
            trio.run(lambda: run(config, until_eof=until_eof))
    finally:
        let_go_of_stderr()


@main.command("check-config")
@_config_option
def check_config(config_file: Path) -> None:
    """Read a configuration and say what is wrong with it; nothing is created or asked."""
    from boxmaker.config import load_config

    with ending():
        config = load_config(config_file, os.environ)
    click.echo(printable(f"{config_file}: ok"))
    click.echo(printable(f"server  {config.server.url}, {config.slots}"))
    click.echo(printable(f"home    {config.paths.home}"))
    click.echo(printable(f"socket  {config.channel.socket}"))


@main.command()
@_config_option
@click.option("--json", "as_json", is_flag=True, help="A line of JSON a check.")
def selftest(config_file: Path, as_json: bool) -> None:
    """Check server, slot, template, baseline and home; a line a check. Runs no completion."""
    import json

    import attrs
    import trio

    from boxmaker.config import Config, load_config
    from boxmaker.inference.client import Client
    from boxmaker.loopd.selftest import Report, run_selftest, warm_flags
    from boxmaker.tools.fake import fake_registry

    async def run(config: Config) -> Report:
        async with Client(config) as client:
            return await run_selftest(config, client, fake_registry())

    with ending():
        config = load_config(config_file, os.environ)
        report = trio.run(run, config)
    for check in report.checks:
        click.echo(json.dumps(attrs.asdict(check)) if as_json else check.line())
    if not as_json:
        click.echo(f"llama-server flags that keep a pinned slot warm: {warm_flags(config.slots.listed)}")
    if report.failed:
        sys.exit(1)


@main.command()
@click.option("--say", help="One turn, as `bxctl chat --say` does.")
def demo(say: str | None) -> None:
    """Start the embedded server and a daemon on it, chat, and end both again."""
    from boxmaker.demo.run import run_demo

    with ending():
        sys.exit(run_demo(os.environ, say))


class ending:  # a statement's name: `with ending():`
    """The one place that turns our errors into a line on stderr and an exit status."""

    def __init__(self, program: str = "loopd") -> None:
        self._program = program

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        ours = exc
        while isinstance(ours, BaseExceptionGroup) and len(ours.exceptions) == 1:
            ours = ours.exceptions[0]
        if isinstance(ours, BoxmakerError):
            click.echo(f"{self._program}: {ours}", err=True)
            sys.exit(ours.exit_code)
