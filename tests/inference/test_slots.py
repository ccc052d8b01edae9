"""The slot gate: first come, first served, and everybody knows how many are in front."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from boxmaker.inference.slots import SlotGate, SlotHold


async def nobody(_: int) -> None:
    raise AssertionError("a free gate tells nobody anything")


async def test_a_free_gate_is_taken_without_a_word() -> None:
    gate = SlotGate()
    await gate.acquire(nobody)
    assert not gate.acquire_nowait()
    gate.release()
    assert gate.acquire_nowait()


async def test_waiters_come_in_order_and_hear_of_every_change() -> None:
    gate = SlotGate()
    heard: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    got: list[str] = []
    assert gate.acquire_nowait()

    async def wait(name: str) -> None:
        async def on_ahead(ahead: int) -> None:
            heard[name].append(ahead)

        await gate.acquire(on_ahead)
        got.append(name)

    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(wait, name)
            await wait_all_tasks_blocked()
        assert heard == {"a": [1], "b": [2], "c": [3]}
        gate.release()
        await wait_all_tasks_blocked()
        assert got == ["a"]
        assert heard == {"a": [1], "b": [2, 1], "c": [3, 2]}
        gate.release()
        await wait_all_tasks_blocked()
        gate.release()
    assert got == ["a", "b", "c"]
    assert heard == {"a": [1], "b": [2, 1], "c": [3, 2, 1]}
    gate.release()
    assert gate.acquire_nowait()


async def test_one_who_gives_up_lets_the_others_move_up() -> None:
    gate = SlotGate()
    heard: list[int] = []
    assert gate.acquire_nowait()

    async def on_ahead(ahead: int) -> None:
        heard.append(ahead)

    async def nothing(_: int) -> None:
        pass

    async with trio.open_nursery() as nursery:
        leaver = trio.CancelScope()

        async def leave() -> None:
            with leaver:
                await gate.acquire(nothing)

        nursery.start_soon(leave)
        await wait_all_tasks_blocked()
        nursery.start_soon(gate.acquire, on_ahead)
        await wait_all_tasks_blocked()
        leaver.cancel()
        await wait_all_tasks_blocked()
        assert heard == [2, 1]
        assert gate.waiting == 1
        gate.release()


async def test_a_gate_handed_to_one_who_is_cancelled_goes_to_the_next() -> None:
    """The waiter is told something by a slow channel when the gate is handed over, and is cancelled there."""
    gate = SlotGate()
    assert gate.acquire_nowait()
    leaver = trio.CancelScope()
    got = trio.Event()

    async def stuck(_: int) -> None:
        await trio.sleep_forever()

    async def nothing(_: int) -> None:
        pass

    async def leave() -> None:
        with leaver:
            await gate.acquire(stuck)

    async def take() -> None:
        await gate.acquire(nothing)
        got.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        await wait_all_tasks_blocked()
        nursery.start_soon(take)
        await wait_all_tasks_blocked()
        gate.release()
        assert not got.is_set()
        leaver.cancel()
        with trio.fail_after(1):
            await got.wait()
    gate.release()
    assert gate.acquire_nowait()


async def test_a_hold_takes_and_gives_back_once() -> None:
    gate = SlotGate()
    one, other = SlotHold(gate), SlotHold(gate)
    assert one.take_nowait()
    assert one.take_nowait()
    assert not other.take_nowait()
    one.give_back()
    one.give_back()
    assert other.take_nowait()
    one.give_back()
    assert not one.take_nowait(), "what is given back twice was not somebody else's to free"
    other.give_back()
    await one.take(nobody)
    await one.take(nobody)
    assert one.held
