"""The tool port: the contract that every port keeps, real or fake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from boxmaker.proto.ids import SessionId
from boxmaker.proto.time import timestamp
from boxmaker.proto.tools import TOOL_RESPONSES, Denied, Failed, PendingApproval, Result, ToolRequest
from boxmaker.testing.port import ScriptedPort, public
from boxmaker.tools.fake import FakeTools
from boxmaker.tools.port import ToolPort


def fake() -> ToolPort:
    return FakeTools(lambda: timestamp(0))


def scripted() -> ToolPort:
    return ScriptedPort([public("a"), Failed(message="b"), Denied(reason="c"), PendingApproval(id="d")])


PORTS = [fake, scripted]


def request(tool: str, arguments: str = "{}", call: int = 0) -> ToolRequest:
    return ToolRequest(session=SessionId("s"), call=call, tool=tool, arguments=arguments)


@pytest.mark.parametrize("make", PORTS)
async def test_a_call_gives_a_response_that_can_cross_a_socket(make: Callable[[], ToolPort]) -> None:
    port = make()
    for number, tool in enumerate(["clock", "echo", "no_such", "clock"]):
        with trio.fail_after(10):
            response = await port.call(request(tool, '{"text":"hi"}', number))
        assert isinstance(response, Result | Failed | Denied | PendingApproval)
        assert TOOL_RESPONSES.decode(TOOL_RESPONSES.encode(response)) == response


@pytest.mark.parametrize("make", PORTS)
async def test_a_call_stops_at_its_next_checkpoint_when_cancelled(make: Callable[[], ToolPort]) -> None:
    with trio.fail_after(10), trio.CancelScope() as scope:
        scope.cancel()
        await make().call(request("clock"))
    assert scope.cancelled_caught


@pytest.mark.parametrize("make", PORTS)
async def test_a_call_lets_other_tasks_run(make: Callable[[], ToolPort]) -> None:
    with trio.testing.assert_checkpoints():
        await make().call(request("clock"))


@pytest.mark.parametrize("make", PORTS)
async def test_calls_at_once_each_get_a_response(make: Callable[[], ToolPort]) -> None:
    """Turns of several sessions share one port."""
    port = make()
    responses: list[object] = []

    async def ask() -> None:
        responses.append(await port.call(request("clock")))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
    assert len(responses) == 4


@pytest.mark.parametrize("make", PORTS)
@settings(deadline=None)
@given(
    tool=st.sampled_from(["clock", "echo"]) | st.text(max_size=5),
    arguments=st.text(st.characters(exclude_categories=()), max_size=20)
    | st.sampled_from(["null", "[]", '{"text":"\\ud800"}', '{"text":"\\u0000"}', '{"text":NaN}', "[" * 100_000]),
)
def test_a_failure_of_a_tool_is_a_response_and_no_exception(
    make: Callable[[], ToolPort], tool: str, arguments: str
) -> None:
    response = trio.run(make().call, request(tool, arguments))
    assert isinstance(response, Result | Failed | Denied | PendingApproval)
