"""The record beside a saved slot, byte for byte, and the mark of a prompt by another implementation (sha256sum)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from boxmaker.errors import ValueRefused
from boxmaker.proto.ids import SessionId
from boxmaker.proto.saved import SAVED_SLOT, PromptMark, SavedSlot, ServerIdentity, prompt_mark

SAVED = SavedSlot(
    session=SessionId("s"),
    server=ServerIdentity(model_path="/m.gguf", model_bytes=None, n_ctx=4096, template="abc", build=None, lora=None),
    prompt=PromptMark(messages=2, digest="d"),
    tokens=14,
    sure=14,
    bytes=100,
)
LINE = (
    '{"session":"s","server":{"model_path":"/m.gguf","model_bytes":null,"n_ctx":4096,'
    '"template":"abc","build":null,"lora":null},"prompt":{"messages":2,"digest":"d"},"tokens":14,"sure":14,"bytes":100}'
)


def test_a_record_is_one_object() -> None:
    assert SAVED_SLOT.encode(SAVED) == LINE
    assert SAVED_SLOT.decode(LINE.encode()) == SAVED


@pytest.mark.parametrize(
    "change", [{"session": "../x"}, {"tokens": -1}, {"bytes": "100"}, {"server": None}, {"more": 1}, {"prompt": {}}]
)
def test_a_record_that_is_not_ours_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueRefused):
        SAVED_SLOT.decode(json.dumps(json.loads(LINE) | change).encode())


BODY = {
    "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "é"}],
    "tools": [{"x": 1}],
    "id_slot": 0,
    "chat_template_kwargs": {"enable_thinking": True},
}
DIGEST = "cc90e20c9af588f2751d8ced4f40434f7b78b6435ee2220fead92209ca814e95"


def test_a_prompt_is_marked_by_what_is_rendered_of_it() -> None:
    body = json.dumps(BODY).encode()
    assert prompt_mark(body) == PromptMark(messages=2, digest=DIGEST)
    assert prompt_mark(body, 3) is None
    plain = json.dumps({"messages": BODY["messages"]}).encode()
    assert prompt_mark(plain, 1) == PromptMark(
        messages=1, digest="f8966cde4e03004b8b2dc560f8a44fb33ecce6a9e04c27e28d53e063f006d000"
    )


def test_a_later_request_of_the_session_has_the_mark_of_an_earlier_one() -> None:
    later = json.loads(json.dumps(BODY)) | {"id_slot": 1, "temperature": 0}
    later["messages"].append({"role": "assistant", "content": "x"})
    assert prompt_mark(json.dumps(later).encode(), 2) == PromptMark(messages=2, digest=DIGEST)


@pytest.mark.parametrize("change", [{"tools": []}, {"chat_template_kwargs": {}}, {"messages": [{}, {}]}])
def test_another_prompt_has_another_mark(change: dict[str, Any]) -> None:
    mark = prompt_mark(json.dumps(BODY | change).encode(), 2)
    assert mark is not None
    assert mark.digest != DIGEST
