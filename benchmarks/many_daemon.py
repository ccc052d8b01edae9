"""A daemon with many slots: the product's connections, turns and store, with a runtime for each slot of the server.

    python -m benchmarks.many_daemon SLOTS CONFIG

Today's `[slots] main` is one slot, so turns of `loopd serve` stand in a queue. Here each connection takes a slot that
is free, for as long as its turn runs; nothing else differs, but that there is no self-test. It ends with its stdin.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio
from attrs import evolve

from benchmarks.processes import raise_file_limit
from boxmaker.channel.stop import Stop
from boxmaker.config import Config, load_config
from boxmaker.inference.client import Client
from boxmaker.inference.facts import ServerFacts
from boxmaker.inference.request import fixed_fields
from boxmaker.log import log_to_stderr
from boxmaker.loopd.home import lock_home, prepare_home
from boxmaker.loopd.serve import MIB, _accept, _stop_signals, now
from boxmaker.loopd.turns import TurnService
from boxmaker.proto.channel import Final, Request
from boxmaker.session.disk import ThreadDisk
from boxmaker.session.store import Store
from boxmaker.tools.fake import FakeTools, fake_registry
from boxmaker.turn import Runtime
from boxmaker.turn.runtime import Emit


class ManySlots(TurnService):
    """Runs each turn on a slot that is free."""

    def __init__(self, rts: list[Runtime], store: Store) -> None:
        super().__init__(rts[0], store)
        self._give, self._take = trio.open_memory_channel[TurnService](len(rts))  # there are no more slots than that
        for rt in rts:
            self._give.send_nowait(TurnService(rt, store))

    async def run(self, request: Request, emit: Emit, stop: Stop) -> Final:
        """Run one turn, as its parent does, once a slot is free."""
        service = await self._take.receive()
        try:
            return await service.run(request, emit, stop)
        finally:
            self._give.send_nowait(service)


async def main(slots: int, config: Config) -> None:
    """Serve until stdin ends or a signal says stop."""
    registry = fake_registry()
    prepare_home(config.paths.home)
    with lock_home(config.paths.home), _stop_signals() as signals:
        async with Client(config) as client:
            store = Store(
                config.paths.home,
                ThreadDisk(),
                memory_bytes=config.session.memory_mib * MIB,
                fixed=fixed_fields(config),
                now=now,
            )
            facts = ServerFacts()
            rts = [
                Runtime(
                    config=evolve(config, slots=evolve(config.slots, main=slot)),
                    client=client, facts=facts, port=FakeTools(now), registry=registry, now=now,
                )
                for slot in range(slots)
            ]  # fmt: skip
            await _accept(config, ManySlots(rts, store), signals, until_eof=True)


if __name__ == "__main__":
    raise_file_limit()
    log_to_stderr()
    trio.run(main, int(sys.argv[1]), load_config(Path(sys.argv[2]), {}))
