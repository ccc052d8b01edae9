"""The `bxctl` command. What a subcommand needs is imported by it alone: `--help` must be quick."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import click

from boxmaker import __version__
from boxmaker.errors import BoxmakerError, ValueRefused, printable
from boxmaker.places import default_home, socket_path
from boxmaker.proto.ids import SessionId

if TYPE_CHECKING:
    from boxmaker.proto.channel import Request


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Talk to boxmaker's daemon, loopd."""
    if sys.stderr is None:  # `2>&-`: what is said there is lost, the answer is not
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the rest of the process
    if sys.stdout is None:
        click.echo("bxctl: output: stdout is closed, there is nowhere to print to", err=True)
        sys.exit(1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: nothing is lost to the locale


def default_socket() -> Path:
    """The socket of the default home."""
    return socket_path(default_home(os.environ))


def sessions_of(home: Path | None) -> Path:
    """Where the sessions of a home are; None is the default one."""
    return (home or default_home(os.environ)) / "sessions"


def complete_session(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Ids of the home's sessions, for the shell's completion; nothing where there is no home."""
    from boxmaker.session.logs import session_ids

    try:
        found = session_ids(sessions_of(context.params.get("home")))
        return [session for session in found if session.startswith(incomplete)]
    except BoxmakerError:
        return []


class Ending:
    """The one place that turns our errors, and a reader that has gone, into an exit status."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        if isinstance(exc, BoxmakerError):
            click.echo(f"bxctl: {exc.code}: {exc}", err=True)
            sys.exit(exc.exit_code)
        if isinstance(exc, OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still held back would fail again at the exit
            if not isinstance(exc, BrokenPipeError):  # of a reader that went away nobody is left to be told
                click.echo(f"bxctl: output: {exc.strerror}; what was printed is not complete", err=True)
            sys.exit(1)
        if isinstance(exc, KeyboardInterrupt):
            sys.exit(130)


def parse_id(text: str) -> SessionId:
    """A session id from the command line; a usage error for anything else."""
    from boxmaker.proto.ids import parse_session_id

    try:
        return parse_session_id(text)
    except ValueRefused as exc:
        raise click.UsageError(f"{text!r}: {exc.problem}") from exc


def session_or_newest(text: str | None, sessions: Path) -> SessionId:
    """A session id from the command line, or the session whose log was written last; raises StorageError for none."""
    from boxmaker.session.logs import newest_session

    return parse_id(text) if text is not None else newest_session(sessions)


_home_option = click.option(
    "--home",
    type=click.Path(path_type=Path),
    help="The daemon's home [default: $BOXMAKER_HOME, else /var/lib/boxmaker].",
)
_socket_option = click.option(
    "--socket", type=click.Path(path_type=Path), help="loopd's socket [default: that of $BOXMAKER_HOME]."
)
_session_argument = click.argument("session", shell_complete=complete_session)
_maybe_session_argument = click.argument("session", required=False, shell_complete=complete_session)


@main.command()
@_socket_option
@click.option(
    "--session", shell_complete=complete_session, help="Go on with this session; it is made if there is none."
)
@click.option("--no-thinking", is_flag=True, help="Do not show the model's reasoning.")
@click.option("--say", help="Run one turn, print the answer, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print every frame body as one line of JSON.")
@click.option("--quiet", is_flag=True, help="No line of figures after each answer.")
@click.option("--wait", is_flag=True, help="When another turn has the session, wait in line for its end.")
@click.option("--replace", is_flag=True, help="When another turn has the session, end that one and go first.")
def chat(
    socket: Path | None,
    session: str | None,
    no_thinking: bool,
    say: str | None,
    as_json: bool,
    quiet: bool,
    wait: bool,
    replace: bool,
) -> None:
    """Chat: a line you type is a turn; one that you type while a turn runs joins it.

    Ctrl-C or /cancel ends the turn that runs, /fork [N] goes on in a copy of the session up to its answer N, Ctrl-D or
    /quit ends the chat.
    """
    from boxmaker.bxctl.chat import Options, run_chat

    if say is not None and not say.strip():
        raise click.UsageError("--say: white space alone is no turn")
    if wait and replace:
        raise click.UsageError("--wait or --replace, not both")
    wanted = parse_id(session) if session is not None else None
    options = Options(
        when_busy="wait" if wait else "replace" if replace else "refuse",
        socket=socket or default_socket(),
        session=wanted,
        reasoning=not no_thinking,
        say=say,
        as_json=as_json,
        figures=not quiet,
    )
    with Ending():
        sys.exit(run_chat(options, no_colour=bool(os.environ.get("NO_COLOR"))))


def _request(socket: Path | None, request: Request, *, as_json: bool = False) -> None:
    from boxmaker.bxctl.control import run_request

    with Ending():
        sys.exit(run_request(socket or default_socket(), request, sys.stdout, sys.stderr, as_json=as_json))


@main.command()
@_session_argument
@click.argument("text")
@_socket_option
def steer(session: str, text: str, socket: Path | None) -> None:
    """Say TEXT to the turn of a session that runs; returns when it has joined, status 1 when it has not."""
    from boxmaker.proto.channel import Steer

    if not text.strip():
        raise click.UsageError("white space alone says nothing")
    _request(socket, Steer(session=parse_id(session), content=text))


@main.command()
@_session_argument
@_socket_option
def cancel(session: str, socket: Path | None) -> None:
    """End the turn of a session that runs; returns when it is over."""
    from boxmaker.proto.channel import Cancel

    _request(socket, Cancel(session=parse_id(session), cause="owner"))


@main.command()
@_session_argument
@click.option("--at", type=click.IntRange(min=1), help="After which answer, counted from 1 [default: the last].")
@_socket_option
def fork(session: str, at: int | None, socket: Path | None) -> None:
    """Begin a new session with what another one holds up to an answer; its id goes to stdout."""
    from boxmaker.bxctl.chat import new_session_id
    from boxmaker.proto.channel import Fork

    _request(socket, Fork(session=parse_id(session), from_=at, new=new_session_id()))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@_socket_option
def status(as_json: bool, socket: Path | None) -> None:
    """What the daemon does: its server, its slots, the turns that run and those that wait."""
    from boxmaker.proto.channel import Status

    _request(socket, Status(), as_json=as_json)


@main.command()
@_home_option
@click.option("--json", "as_json", is_flag=True, help="A line of JSON a session.")
def sessions(home: Path | None, as_json: bool) -> None:
    """List the sessions: id, age, turns, first words; the latest first."""
    import shutil
    import time

    from boxmaker.bxctl.logs import sessions_table, summary_json
    from boxmaker.session.logs import session_ids, summarize

    directory = sessions_of(home)
    with Ending():
        found = [summarize(directory, session) for session in session_ids(directory)]
        if as_json:
            lines = [summary_json(one) for one in sorted(found, key=lambda s: s.last_s, reverse=True)]
        else:
            columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100_000
            lines = sessions_table(found, time.time(), columns)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()


@main.command()
@_session_argument
@_home_option
@click.option("--json", "as_json", is_flag=True, help="Print the records, a line of ASCII JSON each.")
@click.option("--follow", is_flag=True, help="Go on as the log grows; Ctrl-C ends it.")
def log(session: str, home: Path | None, as_json: bool, follow: bool) -> None:
    """Print a session's conversation: tool calls, results and losses too."""
    from boxmaker.bxctl.logs import show_log
    from boxmaker.bxctl.output import reader_watch

    with Ending():
        show_log(
            sessions_of(home),
            parse_id(session),
            sys.stdout,
            as_json=as_json,
            follow=follow,
            reader_gone=reader_watch(sys.stdout),
        )


@main.command()
@_maybe_session_argument
@_home_option
def why(session: str | None, home: Path | None) -> None:
    """Say why the last cached tokens were lost, what that cost, and what to do; of the newest session without an ID."""
    from boxmaker.bxctl.cache import read_completions, why_lines

    directory = sessions_of(home)
    with Ending():
        wanted = session_or_newest(session, directory)
        lines = why_lines(wanted, read_completions(directory, wanted))
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()


@main.command()
@_maybe_session_argument
@_home_option
@click.option("--json", "as_json", is_flag=True, help="A line of JSON a completion, and a last one with the totals.")
def cache(session: str | None, home: Path | None, as_json: bool) -> None:
    """Show what each completion took from the cache, read and lost; of the newest session without an ID."""
    from boxmaker.bxctl.cache import ASCII, BLOCKS, cache_json, cache_table, read_completions
    from boxmaker.bxctl.output import can_print

    directory = sessions_of(home)
    with Ending():
        wanted = session_or_newest(session, directory)
        found = read_completions(directory, wanted)
        parts = BLOCKS if can_print(BLOCKS, sys.stdout) else ASCII
        lines = cache_json(found) if as_json else cache_table(wanted, found, parts)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()


@main.group("session")
def session_group() -> None:
    """Check and mend logs, without the daemon."""


@session_group.command("check")
@_maybe_session_argument
@_home_option
def session_check(session: str | None, home: Path | None) -> None:
    """Read a session's files, or those of all sessions; a line a finding, status 1 when there is one."""
    from boxmaker.session.logs import check, session_ids

    directory = sessions_of(home)
    with Ending():
        wanted = [parse_id(session)] if session is not None else session_ids(directory)
        findings = [finding for one in wanted for finding in check(directory, one)]
        for finding in findings:
            click.echo(str(finding))
        if not findings:
            click.echo(f"{len(wanted)} session{'' if len(wanted) == 1 else 's'}: nothing found")
        sys.exit(1 if findings else 0)


@session_group.command("repair")
@_session_argument
@_home_option
def session_repair(session: str, home: Path | None) -> None:
    """Cut a torn last line off a log; the damaged file is kept beside it."""
    from boxmaker.bxctl.render import visible
    from boxmaker.session.logs import repair

    with Ending():
        done = repair(sessions_of(home), parse_id(session))
        if done is None:
            click.echo("the log has no torn end; nothing was changed")
            return
        click.echo(f"line {done.line} was torn; dropped {len(done.dropped)} bytes:")
        click.echo(visible(done.dropped.decode("utf-8", "replace")))
        click.echo(printable(f"the damaged log is kept as {done.kept}"))


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell's completion script: `eval "$(bxctl completion bash)"`."""
    from click.shell_completion import get_completion_class

    cls = get_completion_class(shell)
    assert cls is not None
    click.echo(cls(main, {}, "bxctl", "_BXCTL_COMPLETE").source())
