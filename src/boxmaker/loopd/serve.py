"""The daemon: everything wired together, from the self-test to the last connection.

    side nursery                     writes what turns have spent, and looks for causes of losses (causes.py)
    connections nursery              lives through the grace period; signals after it change nothing
    └─ accepting nursery             cancelled by SIGTERM, SIGINT, or the end of stdin if asked
       ├─ stop task
       └─ accept loop → a task a connection (channel/server.py)

Source: M2b section 8; design.md section 4.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import trio

from boxmaker.channel.server import Closing, serve_connection
from boxmaker.config import MIB, Config
from boxmaker.errors import StartError
from boxmaker.inference.client import Client
from boxmaker.inference.request import fixed_fields
from boxmaker.log import log_event
from boxmaker.loopd.causes import CauseFinder
from boxmaker.loopd.home import bound_socket, inherited_socket, lock_home, notify_systemd, prepare_home
from boxmaker.loopd.pins import Pins
from boxmaker.loopd.saving import SlotSaver
from boxmaker.loopd.selftest import Report, run_selftest
from boxmaker.loopd.turns import TurnService
from boxmaker.proto.time import Timestamp, timestamp
from boxmaker.session.disk import Disk, ThreadDisk, sweep_new
from boxmaker.session.logs import slots_in_use
from boxmaker.session.store import Store
from boxmaker.tools.fake import FakeTools, fake_registry
from boxmaker.tools.registry import Registry
from boxmaker.turn.runtime import Runtime

AFTER_GRACE_S = 10.0
"""How long cancelled turns may take to write their results and their last frame."""
AFTER_TURNS_S = 2.0
"""How long what the last turns have spent may take to be written."""
FULL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""There is no room for one more connection just now."""
FULL_LOOK_S = 0.1
FULL_TOLD_S = 60.0
"""How often the log is told of it at most."""
SIGNALS_THAT_COUNT = 2
"""One stops the daemon, one ends its grace."""


def now() -> Timestamp:
    """The time, for the log."""
    return timestamp(time.time())


async def serve(config: Config, *, until_eof: bool = False, disk: Disk | None = None) -> None:
    """Serve until a signal says stop; returns after the last connection.

    `until_eof`: the end of stdin stops it too, so that it cannot outlive the program that started it.

    Raises:
        StartError: it could not start; nothing is left behind.
    """
    registry = fake_registry()
    async with Client(config) as client:
        with ExitStack() as held, _stop_signals() as signals:
            prepare_home(config.paths.home)
            held.enter_context(lock_home(config.paths.home))
            report = await _selftest(config, client, registry, signals, until_eof)
            if report is None:
                return
            swept = sweep_new(config.paths.home / "sessions")
            if swept:
                log_event("unfinished_sessions_removed", count=swept)
            store = Store(
                config.paths.home,
                disk or ThreadDisk(),
                memory_bytes=config.session.memory_mib * MIB,
                fixed=fixed_fields(config),
                now=now,
            )
            saver = None
            # of one slot nothing need be known, unless it is saved
            known = len(config.slots.listed) > 1 or config.slots.save_dir is not None
            in_use = slots_in_use(store.directory) if known else []
            if config.slots.save_dir is not None:
                saver = SlotSaver(client, config, store.disk, config.slots.save_dir, in_use)
                await saver.sweep(store.directory)
            rt = Runtime(
                config=config,
                client=client,
                facts=report.facts,
                port=FakeTools(now),
                registry=registry,
                now=now,
                keeper=saver,
            )
            causes = CauseFinder(client, rt.facts, store.disk, store.directory)
            async with trio.open_nursery() as beside:
                beside.start_soon(causes.run)
                try:
                    pins = Pins(config.slots.listed, in_use)
                    await _accept(config, TurnService(rt, store, causes, pins), signals, until_eof)
                    if saver is not None:
                        await _drain(saver, signals)
                finally:
                    causes.close()
                    beside.cancel_scope.deadline = trio.current_time() + AFTER_TURNS_S
    log_event("stopped")


async def _selftest(
    config: Config, client: Client, registry: Registry, signals: AsyncIterator[int], until_eof: bool
) -> Report | None:
    """Run the self-test, which may wait long for a loading model; None when we were stopped meanwhile.

    Raises:
        StartError: a check failed.
    """
    found: list[Report] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop_on_signal, signals, nursery.cancel_scope)
        if until_eof:
            nursery.start_soon(_stop_on_eof, nursery.cancel_scope)
        found.append(await run_selftest(config, client, registry))
        nursery.cancel_scope.cancel()
    if not found:
        log_event("stopped")
        return None
    report = found[0]
    for check in report.checks:
        log_event("selftest", check=check.name, state=check.state, message=check.message, remedy=check.remedy or None)
    if report.failed:
        failed = "\n".join(check.line() for check in report.checks if check.state == "fail")
        raise StartError(message="the self-test failed:", more=failed)
    return report


async def _accept(config: Config, service: TurnService, signals: AsyncIterator[int], until_eof: bool) -> None:
    closing = Closing()

    async def connection(stream: trio.SocketStream) -> None:
        try:
            await serve_connection(stream, config.channel, service.run, closing, os.geteuid())
        finally:
            await trio.aclose_forcefully(stream)

    with ExitStack() as bound:
        passed = inherited_socket(os.environ)
        listening = passed or bound.enter_context(bound_socket(config.channel.socket))
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(_stop_on_signal, signals, accepting.cancel_scope)
                if until_eof:
                    accepting.start_soon(_stop_on_eof, accepting.cancel_scope)
                accepting.start_soon(_accept_all, listener, connection, connections)
                log_event("ready", socket=listening.getsockname(), pid=os.getpid())
                notify_systemd("READY=1", os.environ)
            notify_systemd("STOPPING=1", os.environ)
            bound.close()
            closing.begin()
            async with trio.open_nursery() as grace:
                grace.cancel_scope.deadline = trio.current_time() + config.channel.grace_s
                grace.start_soon(_stop_on_signal, signals, grace.cancel_scope)
                await closing.wait_no_turns()
                grace.cancel_scope.cancel()
            closing.cancel_turns()
            connections.cancel_scope.deadline = trio.current_time() + AFTER_GRACE_S


async def _drain(saver: SlotSaver, signals: AsyncIterator[int]) -> None:
    """Save what our slots hold; one more signal ends that at once."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop_on_signal, signals, nursery.cancel_scope)
        await saver.drain()
        nursery.cancel_scope.cancel()


async def _accept_all(
    listener: trio.SocketListener, serve: Callable[[trio.SocketStream], Awaitable[None]], connections: trio.Nursery
) -> None:
    """Serve every connection in a task of its own; go on accepting when there was no room for one.

    `trio.serve_listeners` would do it, and log a traceback ten times a second while there is none.

    Cancelled by: the accepting nursery; the listener is closed then.
    """
    told = -math.inf
    async with listener:
        while True:
            try:
                stream = await listener.accept()
            except OSError as exc:
                if exc.errno not in FULL_ERRNOS:
                    raise
                if trio.current_time() - told >= FULL_TOLD_S:
                    told = trio.current_time()
                    log_event("accept_waits", reason=exc.strerror)
                await trio.sleep(FULL_LOOK_S)
            else:
                connections.start_soon(serve, stream)


@contextmanager
def _stop_signals() -> Iterator[AsyncIterator[int]]:
    """SIGTERM and SIGINT as they come.

    When the block is left the daemon has ended: those that nobody took, and those that come until the process is
    gone, change nothing. (Trio's own receiver would deliver them again, and the status would be theirs.)
    """
    send, receive = trio.open_memory_channel[int](SIGNALS_THAT_COUNT)
    token = trio.lowlevel.current_trio_token()

    def note(number: int) -> None:
        with suppress(trio.WouldBlock):
            send.send_nowait(number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        signal.signal(number, lambda number, _: token.run_sync_soon(note, number))
    try:
        yield receive
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


async def _stop_on_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    """Cancel a scope at the next signal. Cancelled by: the nursery that it stops."""
    async for number in signals:
        log_event("stopping", signal=signal.Signals(number).name)
        scope.cancel()
        return


async def _stop_on_eof(scope: trio.CancelScope) -> None:
    """Cancel a scope when stdin ends. Cancelled by: the accepting nursery."""
    async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
        while await stdin.receive_some(4096):
            pass
    log_event("stopping", reason="stdin ended")
    scope.cancel()
