"""A whole daemon in the test's own Trio loop, on a scripted server: store, turns, connections.

The disk is an InlineDisk, so the autojump clock may be used. Connections are socket pairs.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import define, field

from boxmaker.channel.client import Frame, TurnChannel
from boxmaker.channel.server import Closing, serve_connection
from boxmaker.config import MIB, Config, load_config
from boxmaker.inference.client import Client
from boxmaker.inference.facts import ServerFacts
from boxmaker.inference.request import fixed_fields
from boxmaker.loopd.causes import CauseFinder
from boxmaker.loopd.home import prepare_home
from boxmaker.loopd.pins import Pins
from boxmaker.loopd.saving import SlotSaver
from boxmaker.loopd.turns import TurnService
from boxmaker.proto.channel import Turn, TurnDone, WireError
from boxmaker.proto.frames import Answer, encode_request
from boxmaker.proto.ids import SessionId, parse_session_id
from boxmaker.proto.records import LogRecord, decode_line
from boxmaker.proto.time import Timestamp, timestamp
from boxmaker.session.disk import Disk, InlineDisk
from boxmaker.session.logs import slots_in_use
from boxmaker.session.store import LOG_NAME, Store
from boxmaker.tools.fake import FakeTools, fake_registry
from boxmaker.tools.port import ToolPort
from boxmaker.tools.registry import Registry
from boxmaker.turn.runtime import Runtime

EPOCH_S = 1_796_048_130.0
"""2026-11-30T14:15:30Z: where the clock of a test daemon stands."""


def fixed_now() -> Timestamp:
    """A clock that stands still, so that logs can be written out in tests."""
    return timestamp(EPOCH_S)


def make_config(directory: Path, url: str, text: str = "") -> Config:
    """A configuration with its home in a directory; `text` is more TOML."""
    file = directory / "config.toml"
    file.write_text(f'[server]\nurl = "{url}"\n[paths]\nhome = "home"\n{text}', "utf-8")
    (directory / "system.md").write_text("You are a test.\n", "utf-8")
    return load_config(file, {})


@define
class Daemon:
    """What a test has of the daemon."""

    config: Config
    client: Client
    store: Store
    rt: Runtime
    nursery: trio.Nursery
    service: TurnService
    causes: CauseFinder
    pins: Pins
    saver: SlotSaver | None
    closing: Closing = field(factory=Closing)

    async def connect(self, *, send_buffer_bytes: int | None = None) -> trio.SocketStream:
        """A raw connection; the test's end of it.

        `send_buffer_bytes`: what the kernel is asked to hold of the daemon's frames; it has a least of its own.
        """
        ours, theirs = trio.socket.socketpair()
        if send_buffer_bytes is not None:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self.nursery.start_soon(
            serve_connection, trio.SocketStream(theirs), self.config.channel, self.service.run, self.closing
        )
        return trio.SocketStream(ours)

    async def open(self, session: str, content: str, *, resume: bool) -> tuple[trio.SocketStream, TurnChannel]:
        """Send a turn; the stream to hang up with, and the channel to read from."""
        stream = await self.connect()
        turn = Turn(session=parse_session_id(session), content=content, resume=resume)
        await stream.send_all(encode_request(turn))
        return stream, TurnChannel(stream)

    async def frames(self, session: str, content: str, *, resume: bool) -> list[Frame]:
        """Run a turn to its end; all its frames."""
        stream, channel = await self.open(session, content, resume=resume)
        found: list[Frame] = []
        async with stream:
            while not found or not found[-1].final:
                found.append(await channel.receive())
        return found

    async def turn(self, session: str, content: str, *, resume: bool) -> list[Answer]:
        """Run a turn to its end; everything that it said."""
        found = [frame.answer for frame in await self.frames(session, content, resume=resume)]
        return [answer for answer in found if answer is not None]

    async def ask(self, session: str, content: str, *, resume: bool) -> TurnDone:
        """Run a turn that must have an answer."""
        last = (await self.turn(session, content, resume=resume))[-1]
        assert isinstance(last, TurnDone), last
        return last

    async def fail(self, session: str, content: str, *, resume: bool) -> WireError:
        """Run a turn that must fail."""
        last = (await self.turn(session, content, resume=resume))[-1]
        assert isinstance(last, WireError), last
        return last

    def log(self, session: str) -> list[LogRecord]:
        """The records of a session, read by the codec alone."""
        lines = (self.store.directory / session / LOG_NAME).read_bytes().split(b"\n")
        assert lines[-1] == b"", "the log ends with LF"
        return [decode_line(line) for line in lines[:-1]]

    async def until_free(self, session: str) -> None:
        """Wait until every turn of the session has ended. Cancellation: safe at any point."""
        running = self.store._running.get(SessionId(session))
        if running is not None:
            await running.done.wait()

    def is_free(self, session: str) -> bool:
        """Has every turn of the session ended?"""
        return SessionId(session) not in self.store._running


@asynccontextmanager
async def running_daemon(
    directory: Path,
    url: str,
    text: str = "",
    *,
    port: ToolPort | None = None,
    registry: Registry | None = None,
    alternate: bool = False,
    disk: Disk | None = None,
    uniform: Callable[[float, float], float] | None = None,
    now: Callable[[], Timestamp] = fixed_now,
) -> AsyncIterator[Daemon]:
    """Run a daemon for a test; leaving the block cancels what still runs, as a kill would.

    `uniform` is the jitter of back-off; by default the most that it can be, so that times are known.
    """
    config = make_config(directory, url, text)
    prepare_home(config.paths.home)
    async with Client(config, uniform=uniform or (lambda _, most: most), now_s=lambda: EPOCH_S) as client:
        store = Store(
            config.paths.home,
            disk or InlineDisk(),
            memory_bytes=config.session.memory_mib * MIB,
            fixed=fixed_fields(config),
            now=now,
        )
        save_dir = config.slots.save_dir
        in_use = slots_in_use(store.directory)
        saver = SlotSaver(client, config, store.disk, save_dir, in_use) if save_dir is not None else None
        rt = Runtime(
            config=config,
            client=client,
            facts=ServerFacts(alternate=alternate),
            port=port or FakeTools(now),
            registry=registry or fake_registry(),
            now=now,
            keeper=saver,
        )
        async with trio.open_nursery() as nursery:
            causes = CauseFinder(client, rt.facts, store.disk, store.directory)
            nursery.start_soon(causes.run)
            pins = Pins(config.slots.listed, in_use)
            service = TurnService(rt, store, causes, pins)
            yield Daemon(config, client, store, rt, nursery, service, causes, pins, saver)
            nursery.cancel_scope.cancel()
