"""Request bodies: their bytes, the mending of history against a naive one, the prefix law, a strict server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.errors import ValueRefused
from boxmaker.inference.completion import BUDGET_MESSAGE
from boxmaker.inference.request import (
    ALTERNATION_NOTE,
    UNNAMED,
    HistoryMender,
    RequestEncoder,
    chat_template_kwargs,
    fixed_fields,
    tool_objects,
)
from boxmaker.proto.chat import Assistant, ChatMessage, System, Tool, ToolCall, ToolSchema, User
from boxmaker.testing.daemon import make_config
from tests.inference.recordings import REPLIES_WITH_CALLS, read_fixture, unhurried
from tests.naive import naive_messages, no_number
from tests.strict import problems

CLOCK = ToolSchema(name="clock", description="The time, now.", parameters={"type": "object", "properties": {}})
FIXED = {"stream": True, "id_slot": 0}
REST = (
    b'],"tools":[{"type":"function","function":{"name":"clock","description":"The time, now.",'
    b'"parameters":{"type":"object","properties":{}}}}],"stream":true,"id_slot":0}'
)

SYSTEM = System(content="You are a test.")
HI = User(content="hi")


def call(call_id: str, name: str = "clock", arguments: str = "{}") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def said(content: str | None, *calls: ToolCall, reasoning: str | None = None) -> Assistant:
    return Assistant(content=content, reasoning_content=reasoning, tool_calls=calls)


def result(call_id: str, content: str = "ok") -> Tool:
    return Tool(tool_call_id=call_id, content=content)


def bodies(messages: Sequence[ChatMessage], alternate: bool = False) -> list[bytes]:
    """The body after each message."""
    encoder = RequestEncoder(tools=[CLOCK], fixed=FIXED, alternate=alternate)
    made = []
    for message in messages:
        encoder.add(message)
        made.append(encoder.body())
    return made


def sent(*messages: ChatMessage, alternate: bool = False) -> list[Any]:
    """The messages of the last body."""
    made: list[Any] = json.loads(bodies(messages, alternate)[-1])["messages"]
    return made


# -- bytes ------------------------------------------------------------------------------------------


def test_the_bytes_of_a_whole_conversation() -> None:
    (*_, body) = bodies(
        [
            SYSTEM,
            User(content='Say "é"\n\u2028🙂'),
            said("Let me look.\n", call("a1", " clock ", '{"zone": "UTC"}'), reasoning="Hm.\n"),
            result("a1", "14:15"),
            said("It is 14:15.\n"),
        ]
    )
    assert body.decode() == (
        '{"messages":[{"role":"system","content":"You are a test."},'
        '{"role":"user","content":"Say \\"é\\"\\n\u2028🙂"},'
        '{"role":"assistant","content":"Let me look.","reasoning_content":"Hm.\\n","tool_calls":[{"id":"a1",'
        '"type":"function","function":{"name":"clock","arguments":"{\\"zone\\": \\"UTC\\"}"}}]},'
        '{"role":"tool","tool_call_id":"a1","content":"14:15"},'
        '{"role":"assistant","content":"It is 14:15.\\n"}' + REST.decode()
    )


def test_every_character_is_written_as_the_standard_library_writes_it() -> None:
    chars = [*map(chr, [*range(0x3000), 0xD7FF, 0xE000, 0xFEFF, 0xFFFD, 0xFFFF, 0x1F642, 0x10FFFF])]
    for content in ("".join(chars), *chars[:0x100]):
        (body,) = bodies([User(content=content)])
        expected = json.dumps({"role": "user", "content": content}, ensure_ascii=False, separators=(",", ":"))
        assert body == b'{"messages":[' + expected.encode() + REST


def test_a_body_without_messages_or_tools_is_json_too() -> None:
    assert RequestEncoder(tools=[CLOCK], fixed=FIXED, alternate=False).body() == b'{"messages":[' + REST
    empty = RequestEncoder(tools=[], fixed={"stream": True}, alternate=True)
    assert empty.body() == b'{"messages":[],"tools":[],"stream":true}'
    assert empty.alternate


def test_the_size_is_that_of_the_body_but_for_nothing() -> None:
    encoder = RequestEncoder(tools=[CLOCK], fixed=FIXED, alternate=False)
    encoder.add(HI)
    assert encoder.size_bytes == len(encoder.body())


def test_asking_for_the_body_changes_nothing() -> None:
    encoder = RequestEncoder(tools=[CLOCK], fixed=FIXED, alternate=True)
    encoder.add(HI)
    assert encoder.body() == encoder.body()
    encoder.add(HI)
    assert encoder.body() == bodies([HI, HI], alternate=True)[-1]


def test_tools_keep_their_order_and_the_keys_of_their_schemas() -> None:
    schema = {"type": "object", "required": ["b"], "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    echo = ToolSchema(name="echo", description="é", parameters=schema)
    assert json.dumps(tool_objects([echo, CLOCK])) == json.dumps(
        [
            {"type": "function", "function": {"name": "echo", "description": "é", "parameters": schema}},
            {
                "type": "function",
                "function": {"name": "clock", "description": "The time, now.", "parameters": CLOCK.parameters},
            },
        ]
    )


@pytest.mark.parametrize(
    "message",
    [
        User(content="\ud83d"),
        System(content="\ude42"),
        result("a", "\ud83d"),
        said("\ud83d"),
        said(None, reasoning="\ud83d"),
        said(None, call("b", "\ud83d")),
    ],
)
@pytest.mark.parametrize("alternate", [False, True])
def test_text_that_json_cannot_hold_is_refused_and_leaves_the_body_as_it_was(
    message: ChatMessage, alternate: bool
) -> None:
    encoder = RequestEncoder(tools=[], fixed={}, alternate=alternate)
    for before in (HI, said(None, call("a")), result("a")):
        encoder.add(before)
    encoder.add(said(None, call("a")))
    body = encoder.body()
    with pytest.raises(ValueRefused):
        encoder.add(message)
    assert encoder.body() == body


def test_a_refused_user_message_leaves_no_note_behind() -> None:
    encoder = RequestEncoder(tools=[], fixed={}, alternate=True)
    encoder.add(HI)
    body = encoder.body()
    with pytest.raises(ValueRefused):
        encoder.add(User(content="\ud83d"))
    assert encoder.body() == body


# -- the fixed fields -------------------------------------------------------------------------------


def test_the_fields_after_the_tools_stand_in_their_order(tmp_path: Path) -> None:
    config = make_config(tmp_path, "http://127.0.0.1:1")
    assert json.dumps(fixed_fields(config)) == (
        '{"stream": true, "stream_options": {"include_usage": true}, "return_progress": true, "id_slot": 0, '
        '"cache_prompt": true, "chat_template_kwargs": {"enable_thinking": true, "preserve_reasoning": true}, '
        f'"reasoning_budget_tokens": 4096, "reasoning_budget_message": "{BUDGET_MESSAGE}"}}'
    )


def test_what_the_owner_set_is_passed_through(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        "http://127.0.0.1:1",
        "[request]\nchat_template_kwargs = { date_string = '26 Jul 2024' }\ntemperature = 0.7\nmax_tokens = 12288\n"
        "[slots]\nmain = 1\n[thinking]\nenabled = false\ncap = 100\n",
    )
    assert json.dumps(fixed_fields(config)) == (
        '{"stream": true, "stream_options": {"include_usage": true}, "return_progress": true, "id_slot": 1, '
        '"cache_prompt": true, "temperature": 0.7, "max_tokens": 12288, "chat_template_kwargs": '
        '{"enable_thinking": false, "preserve_reasoning": true, "date_string": "26 Jul 2024"}, '
        f'"reasoning_budget_tokens": 100, "reasoning_budget_message": "{BUDGET_MESSAGE}"}}'
    )


def test_preserve_reasoning_is_true_unless_configured(tmp_path: Path) -> None:
    text = "[request.chat_template_kwargs]\npreserve_reasoning = false\n"
    assert chat_template_kwargs(make_config(tmp_path, "http://127.0.0.1:1", text)) == {
        "enable_thinking": True,
        "preserve_reasoning": False,
    }


# -- the rules of mending, one by one ---------------------------------------------------------------


def sent_calls(*messages: ChatMessage) -> list[tuple[str, str, str]]:
    """The calls of all messages sent: id, name, arguments."""
    return [
        (made["id"], made["function"]["name"], made["function"]["arguments"])
        for message in sent(*messages)
        for made in message.get("tool_calls", [])
    ]


def sent_answers(*messages: ChatMessage) -> list[tuple[str, str]]:
    return [(message["tool_call_id"], message["content"]) for message in sent(*messages) if message["role"] == "tool"]


@pytest.mark.parametrize("name", ["clock", " clock", "clock\n", "\tclock \r\n", "\u3000clock\xa0"])
def test_names_are_trimmed(name: str) -> None:
    assert sent_calls(said(None, call("a", name))) == [("a", "clock", "{}")]


@pytest.mark.parametrize("name", ["", " ", "\n\t"])
def test_an_empty_name_is_sent_as_unnamed(name: str) -> None:
    assert UNNAMED == "unnamed"
    assert sent_calls(said(None, call("a", name))) == [("a", "unnamed", "{}")]


def test_the_inside_of_a_name_and_its_case_are_kept() -> None:
    assert sent_calls(said(None, call("a", " Find  Tool "))) == [("a", "Find  Tool", "{}")]


@pytest.mark.parametrize("old", ["", " ", "\n"])
def test_an_empty_id_is_numbered_and_its_result_answers_it(old: str) -> None:
    messages: list[ChatMessage] = [
        said(None, call(old), call("x"), call(old)),
        result(old, "1"),
        result("x", "2"),
        result(old, "3"),
    ]
    assert [made[0] for made in sent_calls(*messages)] == ["c00000001", "x", "c00000002"]
    assert sent_answers(*messages) == [("c00000001", "1"), ("x", "2"), ("c00000002", "3")]


def test_an_id_used_before_in_the_session_is_numbered_and_its_result_answers_it() -> None:
    messages: list[ChatMessage] = [
        HI, said(None, call("a"), call("a")), result("a", "1"), result("a", "2"),
        said("x"), HI, said(None, call("b"), call("a")), result("b", "3"), result("a", "4"),
    ]  # fmt: skip
    assert [made[0] for made in sent_calls(*messages)] == ["a", "c00000001", "b", "c00000002"]
    assert sent_answers(*messages) == [("a", "1"), ("c00000001", "2"), ("b", "3"), ("c00000002", "4")]


def test_a_number_that_is_an_id_in_use_is_skipped() -> None:
    messages: list[ChatMessage] = [
        said(None, call("c00000001"), call(""), call("c00000003"), call("")),
        result("c00000001", "1"), result("", "2"), result("c00000003", "3"), result("", "4"),
    ]  # fmt: skip
    assert [made[0] for made in sent_calls(*messages)] == ["c00000001", "c00000002", "c00000003", "c00000004"]
    assert sent_answers(*messages) == [("c00000001", "1"), ("c00000002", "2"), ("c00000003", "3"), ("c00000004", "4")]


def test_an_id_that_we_gave_before_the_server_did_is_in_use() -> None:
    messages: list[ChatMessage] = [said(None, call(""), call("c00000001")), result("", "1"), result("c00000001", "2")]
    assert [made[0] for made in sent_calls(*messages)] == ["c00000001", "c00000002"]
    assert sent_answers(*messages) == [("c00000001", "1"), ("c00000002", "2")]


def test_ids_are_compared_as_they_came() -> None:
    assert [made[0] for made in sent_calls(said(None, call("a"), call(" a"), call("A")))] == ["a", " a", "A"]


def test_results_out_of_order_answer_their_own_calls() -> None:
    messages: list[ChatMessage] = [
        said(None, call("a"), call(""), call("a")),
        result("", "2"),
        result("a", "1"),
        result("a", "3"),
    ]
    assert sent_answers(*messages) == [("c00000001", "2"), ("a", "1"), ("c00000002", "3")]


def test_only_line_ends_are_taken_off_before_a_call() -> None:
    (made,) = sent(said("XX\n", call("a", "clock", "{}")))
    assert made["content"] == "XX"


def test_a_refusal_says_where_and_why() -> None:
    with pytest.raises(ValueRefused, match=r"^\$: .*lone surrogate"):
        RequestEncoder(tools=[], fixed={}, alternate=False).add(User(content="\ud83d"))


@pytest.mark.parametrize("arguments", ["", " ", "\n\t\r", "\u3000"])
def test_blank_arguments_become_an_empty_object(arguments: str) -> None:
    assert sent_calls(said(None, call("a", "clock", arguments))) == [("a", "clock", "{}")]


@pytest.mark.parametrize(
    "arguments",
    [
        "{}", " { } ", '{"a":1}', '{"a": 1, "a": 2}', '{"b":1,"a":2}', '{"a":"é\\u00e9\\u0000"}', '{"a":1.50e3}',
        '{"a":"\\ud83d\\ude42"}', '{"a":[{"b":null}]}', '{"a":123456789012345678901234567890}', '{"":""}\n',
    ],
)  # fmt: skip
def test_the_text_of_an_object_is_sent_as_it_came(arguments: str) -> None:
    assert sent_calls(said(None, call("a", "clock", arguments))) == [("a", "clock", arguments)]


BROKEN = [
    "{", "[]", "5", '"{}"', "null", "true", "{'a': 1}", '{"a":1} and', '{"a":1}{"b":2}', '{"a":NaN}', '{"a":Infinity}',
    '{"a":-Infinity}', '{"a":1e999}', '{"a":"x\ny"}', '{"a":"x\ty"}', '{"a":1,}', "{a:1}", '\ufeff{"a":1}', '{"a":01}',
    '{"a":"\\ud83d"}', '{"a":"\\ude42\\ud83d"}', '{"\\ud83d":1}', "{" + '"a":{' * 100 + "}" * 101, '{"a":"half',
    '{"a":' + "[" * 100_000 + "]" * 100_000 + "}", '{"a":1' + "0" * 400 + "}", "\xa0{}",
]  # fmt: skip


@pytest.mark.parametrize("arguments", BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_object_is_sent_inside_one(arguments: str) -> None:
    ((_, _, mended),) = sent_calls(said(None, call("a", "clock", arguments)))
    assert json.loads(mended) == {"raw": arguments}
    assert mended == '{"raw":' + json.dumps(arguments, ensure_ascii=False) + "}"


@pytest.mark.parametrize(
    ("content", "mended"),
    [("a\n", "a"), ("a\n\n\n", "a"), ("\n", ""), ("a \n", "a "), ("a\n ", "a\n "), ("\na", "\na"), ("a\r\n", "a\r")],
)
def test_content_before_calls_loses_its_trailing_newlines(content: str, mended: str) -> None:
    assert sent(said(content, call("a")))[0]["content"] == mended
    assert sent(said(content))[0]["content"] == content


def test_content_null_becomes_empty() -> None:
    assert sent(said(None)) == [{"role": "assistant", "content": ""}]
    assert sent(said(None, call("a")))[0]["content"] == ""


def test_reasoning_is_always_sent_back_as_it_came_and_left_out_when_null() -> None:
    assert sent(said("a", reasoning="r\n")) == [{"role": "assistant", "content": "a", "reasoning_content": "r\n"}]
    assert sent(said(None, call("a"), reasoning=" \n"))[0]["reasoning_content"] == " \n"
    assert sent(said("a", reasoning="")) == [{"role": "assistant", "content": "a", "reasoning_content": ""}]
    assert "reasoning_content" not in sent(said("a"))[0]


def test_no_calls_is_no_key() -> None:
    assert "tool_calls" not in sent(said("a"))[0]


NOTE = {"role": "assistant", "content": "[No answer was given.]"}


def test_a_note_stands_where_a_template_wants_an_answer() -> None:
    assert NOTE["content"] == ALTERNATION_NOTE
    hi = {"role": "user", "content": "hi"}
    assert sent(HI, HI, alternate=True) == [hi, NOTE, hi]
    assert sent(HI, HI, HI, alternate=True) == [hi, NOTE, hi, NOTE, hi]
    after_tool = sent(HI, said(None, call("a")), result("a"), HI, alternate=True)
    assert after_tool[2:] == [{"role": "tool", "tool_call_id": "a", "content": "ok"}, NOTE, hi]
    assert NOTE not in sent(SYSTEM, HI, said("a"), HI, said("b"), HI, alternate=True)
    assert NOTE not in sent(HI, said(None, call("a"), call("b")), result("a"), result("b"), said("x"), alternate=True)


def test_where_templates_do_not_mind_no_note_is_sent() -> None:
    assert NOTE not in sent(HI, HI, said(None, call("a")), result("a"), HI)


@pytest.mark.parametrize("name", REPLIES_WITH_CALLS)
def test_calls_from_fault_reports_are_sent_as_a_strict_server_takes_them(name: str) -> None:
    reply = read_fixture(name).reply()
    replied = Assistant(content=reply.content, reasoning_content=reply.reasoning_content, tool_calls=reply.tool_calls)
    results = [result(made.id) for made in reply.tool_calls]
    messages: list[ChatMessage] = [SYSTEM, HI, replied, *results, replied, *results]
    assert problems(sent(*messages)) == []
    if name == "ids_no_id":
        assert [made[0] for made in sent_calls(*messages)] == [f"c0000000{number}" for number in (1, 2, 3, 4)]
    if name == "names_null":
        assert [made[1] for made in sent_calls(*messages)] == ["unnamed", "unnamed"]


# -- a naive mender, from the design's six rules ----------------------------------------------------


def naive_body(messages: Sequence[ChatMessage], alternate: bool) -> bytes:
    """The whole body from the whole list at once."""
    return b'{"messages":[' + naive_messages(messages, alternate) + REST


# -- conversations ----------------------------------------------------------------------------------

text = st.one_of(
    st.sampled_from(["", "\n", "a\n", "a\n\n", "\r\n", '],"tools":[', "\u2028", "🙂"]),
    st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=8),
)
some_id = st.sampled_from(["", "", " ", "a", "a", "b", "call_0", "c00000001", "c00000002", "c00000003", "\n"]) | text
some_name = st.sampled_from(["clock", " clock", "find_tool\n", "", " "]) | text
json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
some_arguments = st.one_of(
    st.sampled_from(["", " ", "{}", "{", '{"a":"\\ud83d"}', '{"a":"\\ud83d","a":1}', *BROKEN[:20]]),
    st.dictionaries(st.text(max_size=4), json_value, max_size=3).map(json.dumps),
    st.dictionaries(st.text(max_size=4), json_value, max_size=3).map(
        lambda value: json.dumps(value, ensure_ascii=False, indent=1)
    ),
    json_value.map(json.dumps),
    st.text(st.sampled_from('{}[]":,\\u1ad8e. \n'), max_size=8),
    text,
)
some_calls = st.lists(st.builds(ToolCall, id=some_id, name=some_name, arguments=some_arguments), max_size=4)
some_text = st.none() | text


@st.composite
def turns(draw: st.DrawFn) -> list[ChatMessage]:
    """One turn as the log may hold it: rounds of calls, all answered, an answer or none."""
    messages: list[ChatMessage] = [User(content=draw(text))]
    for calls in draw(st.lists(some_calls.filter(bool), max_size=3)):
        messages.append(said(draw(some_text), *calls, reasoning=draw(some_text)))
        answered = draw(st.permutations(calls))
        messages += [result(made.id, draw(text)) for made in answered]
    if draw(st.booleans()):
        messages.append(said(draw(some_text), reasoning=draw(some_text)))
    return messages


conversations = st.lists(turns(), max_size=4).map(
    lambda made: [SYSTEM, *(message for turn in made for message in turn)]
)


@unhurried
@given(conversations, st.booleans())
def test_every_body_is_that_of_the_naive_mender(messages: list[ChatMessage], alternate: bool) -> None:
    made = bodies(messages, alternate)
    for count in range(1, len(messages) + 1):
        assert made[count - 1] == naive_body(messages[:count], alternate)


@unhurried
@given(conversations, st.booleans())
def test_every_body_up_to_the_end_of_its_messages_is_a_prefix_of_the_next(
    messages: list[ChatMessage], alternate: bool
) -> None:
    made = bodies(messages, alternate)
    for body, following in pairwise(made):
        assert body.endswith(REST)
        assert following.startswith(body.removesuffix(REST) + b",")
        assert following.endswith(REST)


@unhurried
@given(conversations, st.booleans())
def test_the_same_messages_give_the_same_bytes(messages: list[ChatMessage], alternate: bool) -> None:
    assert bodies(messages, alternate) == bodies([evolve(message) for message in messages], alternate)


@unhurried
@given(conversations, st.booleans())
def test_every_history_passes_a_strict_server(messages: list[ChatMessage], alternate: bool) -> None:
    made = bodies(messages, alternate)
    ends = [n for n, message in enumerate(messages) if isinstance(message, User) or last_result(messages, n)]
    for place in ends:  # where a request may be sent
        value = json.loads(made[place], parse_constant=no_number)
        assert list(value) == ["messages", "tools", *FIXED]
        assert problems(value["messages"], alternate) == []


@unhurried
@given(conversations)
def test_one_message_becomes_one_or_a_note_and_one(messages: list[ChatMessage]) -> None:
    for alternate in (False, True):
        mender = HistoryMender(alternate)
        roles = {System: "system", User: "user", Assistant: "assistant", Tool: "tool"}
        for message in messages:
            *notes, mended = mender.mend(message)
            assert mended["role"] == roles[type(message)]
            assert notes in ([], [NOTE])
            assert not notes or (alternate and isinstance(message, User))


def last_result(messages: Sequence[ChatMessage], place: int) -> bool:
    """Is this the last result of its reply?"""
    following = messages[place + 1] if place + 1 < len(messages) else None
    return isinstance(messages[place], Tool) and not isinstance(following, Tool)


def test_another_slot_changes_what_stands_behind_the_messages_alone() -> None:
    encoder = RequestEncoder(tools=[], fixed={"stream": True, "id_slot": 0, "cache_prompt": True}, alternate=False)
    encoder.add(User(content="Hi"))
    head = b'{"messages":[{"role":"user","content":"Hi"}],"tools":[],"stream":true,"id_slot":'
    for slot in (2, 2, 0):
        encoder.pin(slot)
        assert encoder.body() == head + str(slot).encode() + b',"cache_prompt":true}'


def test_a_body_without_a_slot_gets_none() -> None:
    encoder = RequestEncoder(tools=[], fixed={"stream": True}, alternate=False)
    encoder.pin(3)
    assert encoder.body() == b'{"messages":[],"tools":[],"stream":true}'
