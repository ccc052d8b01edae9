"""What crosses the tool port: examples byte for byte, and every value read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from boxmaker.errors import ValueRefused
from boxmaker.proto.ids import SessionId
from boxmaker.proto.tools import (
    TOOL_REQUEST,
    TOOL_RESPONSES,
    Denied,
    Failed,
    PendingApproval,
    Result,
    ToolRequest,
    ToolResponse,
)

from .examples import FIXTURES, files
from .strategies import relaxed, tool_requests, tool_responses

REQUEST = ToolRequest(session=SessionId("20261130-141530-x7k2qf"), call=1, tool="echo", arguments='{"text": "Grüße"}')
RESPONSES: dict[str, ToolResponse] = {
    "result": Result(content='Grüße\u2028"\n', class_="private", untrusted=True, truncated=False),
    "failed": Failed(message="echo needs a text"),
    "denied": Denied(reason="no grant for “mail.send”"),
    "pending_approval": PendingApproval(id="approval-17"),
}


def test_every_value_has_an_example_and_every_example_is_of_a_value() -> None:
    assert set(files("tools/*.json")) == {"request", *TOOL_RESPONSES.tags}
    assert set(RESPONSES) == set(TOOL_RESPONSES.tags) == {"result", "failed", "denied", "pending_approval"}


def test_a_request_is_read_and_written_as_its_example() -> None:
    raw = (FIXTURES / "tools" / "request.json").read_bytes()
    assert TOOL_REQUEST.decode(raw) == REQUEST
    assert TOOL_REQUEST.encode(REQUEST).encode("utf-8") == raw


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_read_and_written_as_its_example(name: str) -> None:
    raw = (FIXTURES / "tools" / f"{name}.json").read_bytes()
    assert TOOL_RESPONSES.decode(raw) == RESPONSES[name]
    assert TOOL_RESPONSES.encode(RESPONSES[name]).encode("utf-8") == raw


@given(request=tool_requests)
@relaxed
def test_a_request_is_read_back(request: ToolRequest) -> None:
    assert TOOL_REQUEST.decode(TOOL_REQUEST.encode(request)) == request


@given(response=tool_responses)
@relaxed
def test_a_response_is_read_back(response: ToolResponse) -> None:
    assert TOOL_RESPONSES.decode(TOOL_RESPONSES.encode(response)) == response


@pytest.mark.parametrize("class_", ["", "Public", "PUBLIC", "public ", "top", None, True, ["public"], "\ud800"])
def test_a_class_is_one_of_three_words(class_: object) -> None:
    value = {"type": "result", "content": "", "class": class_, "untrusted": False, "truncated": False}
    with pytest.raises(ValueRefused) as caught:
        TOOL_RESPONSES.decode(json.dumps(value))
    assert caught.value.path == "$.class"
    str(caught.value).encode()
