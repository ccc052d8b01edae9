"""The record beside a saved slot: whose it is, and of which server and prompt; pure.

A record is one JSON object. The first one of a session is written before the server is asked to save, and again with
`tokens` and `bytes` when the file is there: a record without them is of a save that was cut off.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from attrs import frozen

from boxmaker.proto.codec import Codec, Count, dumps, strict_converter
from boxmaker.proto.ids import SessionId, parse_session_id


@frozen(kw_only=True)
class ServerIdentity:
    """What must be the same for a saved slot to be of use; `template` and `lora` are digests."""

    model_path: str
    model_bytes: Count | None
    n_ctx: Count
    template: str | None
    build: str | None
    lora: str | None


@frozen(kw_only=True)
class PromptMark:
    """A prompt by its first `messages` messages and all else that is rendered, as a digest."""

    messages: Count
    digest: str


@frozen(kw_only=True)
class SavedSlot:
    """One saved slot of a session: `tokens` it held, `bytes` of its file, 0 while there is none.

    The session's next request begins with the first `sure` of the tokens: all of them after a completion, those of the
    completion before after a reply that was broken off.
    """

    session: SessionId
    server: ServerIdentity
    prompt: PromptMark
    tokens: Count
    sure: Count
    bytes: Count


SAVED_SLOT: Codec[SavedSlot] = Codec(strict_converter({SessionId: lambda value, _: parse_session_id(value)}), SavedSlot)


def prompt_mark(body: bytes, messages: int | None = None) -> PromptMark | None:
    """Mark what a request body renders, or its first `messages` messages; None when it has fewer.

    A later request of the session begins with the same messages and has the same tools and template arguments, so the
    mark of an earlier one is found in it.
    """
    value: dict[str, Any] = json.loads(body)
    asked = value["messages"]
    count = len(asked) if messages is None else messages
    if count > len(asked):
        return None
    rendered = [asked[:count], value.get("tools"), value.get("chat_template_kwargs")]
    return PromptMark(messages=count, digest=hashlib.sha256(dumps(rendered).encode("utf-8")).hexdigest())
