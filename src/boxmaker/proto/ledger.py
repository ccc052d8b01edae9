"""What a session's completions cost: the lines of `cache.jsonl`, and the causes of lost tokens that they name.

A line is one JSON object, then LF. The file stands beside the log; nothing that a turn does depends on it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

from boxmaker.proto.codec import Codec, Count, JsonObject, Positive, strict_converter
from boxmaker.proto.time import Timestamp, parse_timestamp

CauseName: TypeAlias = Literal[
    "template", "evicted", "model", "restarted", "foreign", "restarted_or_foreign", "reread", "unknown"
]
"""Why tokens that could have been in the cache were not; `docs/design.md` has the proof that each needs."""

REMEDY: dict[CauseName, str] = {
    "template": "Use a chat template that keeps what it rendered: `loopd selftest` names the one for your model.",
    "evicted": "Give each session a slot of its own: start llama-server with a larger -np, and list the slots in"
    " [slots] main; a session keeps the slot that it began on, a fork of it (bxctl fork) gets a free one.",
    "model": "None: another model, context or template begins with an empty cache.",
    "restarted": "Keep llama-server running: its cache is in its memory. Or set [slots] save_dir, so that it comes"
    " back.",
    "foreign": "Keep other clients off our slots: pin them to another id_slot, and start llama-server with"
    " --no-kv-unified, or it empties idle slots.",
    "restarted_or_foreign": "Start llama-server with --slots, so that the next loss can be told apart; keep other"
    " clients off our slots.",
    "reread": "The server went back to an older state of the slot: for sliding-window models start it with --swa-full"
    " or a larger --ctx-checkpoints.",
    "unknown": "The next loss may tell: the cause is looked for after each turn while the daemon runs.",
}
"""What the owner can do about each cause."""


@frozen(kw_only=True)
class CacheLine:
    """One completion, the log's number `completion` counted from 1.

    Tokens `cached`, `read` and `generated`; `expected` could have been cached, `lost` of these were not. None is what
    the server did not tell; `cause` is None when nothing was lost; `detail` says more of it, each cause its own.
    """

    time: Timestamp
    completion: Positive
    slot: Count
    cached: Count | None
    read: Count | None
    generated: Count | None
    expected: Count | None
    lost: Count | None
    prefill_ms: Count | None
    cause: CauseName | None
    detail: JsonObject


CACHE_LINE: Codec[CacheLine] = Codec(strict_converter({Timestamp: lambda value, _: parse_timestamp(value)}), CacheLine)
