"""The `bxctl` command. What a subcommand needs is imported by it alone: `--help` must be quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from boxmaker import __version__
from boxmaker.errors import BoxmakerError, ValueRefused


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Talk to boxmaker's daemon, loopd."""


def default_socket() -> Path:
    """The socket of $BOXMAKER_HOME, or of the default home."""
    from boxmaker.config import DEFAULT_HOME, socket_path

    return socket_path(Path(os.environ.get("BOXMAKER_HOME") or DEFAULT_HOME))


@main.command()
@click.option("--socket", type=click.Path(path_type=Path), help="loopd's socket [default: that of $BOXMAKER_HOME].")
@click.option("--session", help="Go on with this session; it is made if there is none.")
@click.option("--no-thinking", is_flag=True, help="Do not show the model's reasoning.")
@click.option("--say", help="Run one turn, print the answer, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print every frame body as one line of JSON.")
def chat(socket: Path | None, session: str | None, no_thinking: bool, say: str | None, as_json: bool) -> None:
    """Chat: a line you type is a turn. Ctrl-D or /quit ends it."""
    from boxmaker.bxctl.chat import Options, explain, run_chat
    from boxmaker.proto.ids import parse_session_id

    try:
        wanted = parse_session_id(session) if session is not None else None
    except ValueRefused as exc:
        raise click.UsageError(f"--session {session!r}: {exc.problem}") from exc
    options = Options(
        socket=socket or default_socket(), session=wanted, reasoning=not no_thinking, say=say, as_json=as_json
    )
    try:
        status = run_chat(options, no_colour=bool(os.environ.get("NO_COLOR")))
    except BoxmakerError as exc:
        click.echo(explain(exc), err=True)
        status = exc.exit_code
    except BrokenPipeError:
        # The reader of our answers went away: nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    sys.exit(status)
