"""Generators of everything that crosses a boundary, and of things that must not."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from boxmaker.proto import channel, chat, records, tools
from boxmaker.proto.channel import ErrorCode, Turn, TurnDone, TurnEvent, WireError
from boxmaker.proto.frames import Answer
from boxmaker.proto.ids import SessionId
from boxmaker.proto.records import LogRecord
from boxmaker.proto.time import Timestamp

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Two slow cores say nothing about the code."""

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
wild_texts = st.text(st.characters(), max_size=40) | st.text(st.sampled_from("\ud800\udc00\udfff\x00a\u2028é"))
"""Texts with lone surrogates and NUL among them."""
user_texts = texts.filter(lambda text: "\x00" not in text)
flags = st.booleans()
counts = st.integers(min_value=0, max_value=10**30)
positives = st.integers(min_value=1, max_value=10**30)
figures_or_none = st.none() | counts
classes = st.sampled_from(["public", "private", "secret"])
session_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True).map(SessionId)
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
times = st.datetimes().map(lambda moment: Timestamp(moment.isoformat(timespec="milliseconds") + "Z"))

scalars = st.none() | flags | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
json_values: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
json_objects = st.dictionaries(texts, json_values, max_size=4)

calls = st.builds(chat.ToolCall, id=texts, name=texts, arguments=texts)
usage_figures = st.builds(
    chat.Figures,
    cache_n=figures_or_none,
    prompt_n=figures_or_none,
    predicted_n=figures_or_none,
    reasoning_tokens=counts,
    thinking_capped=flags,
)

log_records: st.SearchStrategy[LogRecord] = st.one_of(
    st.builds(records.SessionStart, time=times, session=session_ids, epoch=counts, slot=counts, baseline=hashes),
    st.builds(records.User, time=times, content=texts),
    st.builds(
        records.Assistant,
        time=times,
        content=st.none() | texts,
        reasoning_content=st.none() | texts,
        tool_calls=st.lists(calls, max_size=3).map(tuple),
    ),
    st.builds(
        records.Usage,
        time=times,
        cache_n=figures_or_none,
        prompt_n=figures_or_none,
        predicted_n=figures_or_none,
        reasoning_tokens=counts,
        thinking_capped=flags,
    ),
    st.builds(
        records.ToolResult,
        time=times,
        call=counts,
        tool_call_id=texts,
        content=texts,
        class_=classes,
        untrusted=flags,
        truncated=flags,
    ),
    st.builds(records.CacheLoss, time=times, expected=counts, got=counts),
    st.builds(records.EpochEnd, time=times),
)

turn_events: st.SearchStrategy[TurnEvent] = st.one_of(
    st.builds(chat.Queued, ahead=positives),
    st.builds(chat.Waiting, slot_busy=flags),
    st.builds(chat.Progress, total=counts, cache=counts, processed=counts),
    st.builds(chat.Reasoning, text=texts),
    st.builds(chat.Content, text=texts),
    st.builds(channel.ToolCallStarted, name=texts),
    st.builds(channel.ToolResult, name=texts, class_=classes, truncated=flags, untrusted=flags),
    st.builds(chat.ThinkingCapped, tokens=counts),
    st.builds(chat.Retrying, attempt=positives, after_ms=counts, error=texts),
    st.builds(channel.CacheLoss, expected=counts, got=counts),
    st.builds(channel.Cut, reason=st.sampled_from(["length", "thinking_cap"])),
    st.builds(channel.Steered, content=user_texts),
    st.builds(channel.Context, used=counts, n_ctx=positives),
)

when_busy: st.SearchStrategy[channel.WhenBusy] = st.sampled_from(["refuse", "wait", "replace"])
turns = st.builds(Turn, session=session_ids, content=user_texts, resume=flags, when_busy=when_busy)
requests: st.SearchStrategy[channel.Request] = st.one_of(
    turns,
    st.builds(channel.Steer, session=session_ids, content=user_texts),
    st.builds(channel.Cancel, session=session_ids, cause=st.just("owner")),
    st.builds(channel.Fork, session=session_ids, from_=st.none() | positives, new=session_ids),
    st.just(channel.Status()),
)
turns_done = st.builds(TurnDone, content=texts, usage=usage_figures)
wire_errors = st.builds(WireError, code=st.sampled_from(ErrorCode), message=texts, detail=json_objects)
causes: st.SearchStrategy[channel.CancelCause | None] = st.sampled_from([
    None, "owner", "replaced", "disconnect", "stalled_channel", "shutdown",
])  # fmt: skip
finals: st.SearchStrategy[channel.Final] = st.one_of(
    turns_done,
    st.just(channel.SteerDone()),
    st.builds(channel.CancelDone, ending=texts, cause=causes, slot_free=flags),
    st.builds(channel.ForkDone, session=session_ids, from_=positives),
    st.builds(
        channel.StatusDone,
        version=texts,
        pid=counts,
        server=st.builds(channel.ServerStatus, url=texts, state=st.sampled_from(["ready", "loading", "unreachable"])),
        slots=st.lists(st.builds(channel.SlotStatus, id=counts, busy=flags, ours=flags), max_size=3).map(tuple),
        sessions=st.lists(
            st.builds(
                channel.SessionStatus,
                session=session_ids,
                phase=st.sampled_from(["starting", "waiting", "model", "tools", "ending"]),
                age_ms=counts,
                waiting=counts,
            ),
            max_size=3,
        ).map(tuple),
    ),
)
answers: st.SearchStrategy[Answer] = turn_events | finals | wire_errors

tool_requests = st.builds(tools.ToolRequest, session=session_ids, call=counts, tool=texts, arguments=texts)
tool_responses: st.SearchStrategy[tools.ToolResponse] = st.one_of(
    st.builds(tools.Result, content=texts, class_=classes, untrusted=flags, truncated=flags),
    st.builds(tools.Failed, message=texts),
    st.builds(tools.Denied, reason=texts),
    st.builds(tools.PendingApproval, id=texts),
)
