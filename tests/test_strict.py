"""The strict server of the tests, tested: a check that refuses nothing would prove nothing."""

from __future__ import annotations

from typing import Any

from tests.strict import problems


def test_the_strict_server_of_these_tests_is_strict() -> None:
    user = {"role": "user", "content": "a"}
    good = {"id": "a", "type": "function", "function": {"name": "n", "arguments": "{}"}}
    answer = {"role": "tool", "tool_call_id": "a", "content": ""}

    def asked(*calls: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": list(calls)}

    assert problems([user, asked(good), answer, user], alternate=False) == []
    for bad in (
        [asked(good)],
        [asked(good), user],
        [answer],
        [asked(good), answer, answer],
        [asked(good), answer, asked(good), answer],
        [asked()],
        [asked({**good, "id": ""}), {**answer, "tool_call_id": ""}],
        [asked({**good, "function": {"name": " n", "arguments": "{}"}}), answer],
        [asked({**good, "function": {"name": "", "arguments": "{}"}}), answer],
        [asked({**good, "function": {"name": "n", "arguments": "{"}}), answer],
        [asked({**good, "function": {"name": "n", "arguments": '{"a":NaN}'}}), answer],
        [asked({**good, "function": {"name": "n", "arguments": "[]"}}), answer],
        [asked({**good, "function": {"name": "n", "arguments": {}}}), answer],
        [user, {"role": "system", "content": ""}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "\ud83d"}],
        [{"role": "user", "content": "\x00"}],
        [{"role": "developer", "content": ""}],
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    ):
        assert problems(bad), bad
    assert problems([user, user]) == []
    assert problems([user, user], alternate=True)
    assert problems([user, asked(good), answer, user], alternate=True)
