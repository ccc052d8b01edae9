"""What crosses the tool port: a request, and one of four responses.

Source: M2b section 4. In M3 these cross `broker.sock`, so they have a codec now.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from boxmaker.proto.chat import ResultClass
from boxmaker.proto.codec import Codec, Count, TaggedCodec, strict_converter
from boxmaker.proto.ids import SessionId, parse_session_id


@frozen(kw_only=True)
class ToolRequest:
    """One call; `arguments` is the text of a JSON object."""

    session: SessionId
    call: Count
    tool: str
    arguments: str


@frozen(kw_only=True)
class Result:
    """The tool ran; `truncated` says that it has cut its own output."""

    content: str
    class_: ResultClass
    untrusted: bool
    truncated: bool


@frozen(kw_only=True)
class Failed:
    """The tool ran, or could not be run, and has no result."""

    message: str


@frozen(kw_only=True)
class Denied:
    """The owner's grants do not allow the call."""

    reason: str


@frozen(kw_only=True)
class PendingApproval:
    """The owner would have to approve first."""

    id: str


ToolResponse: TypeAlias = Result | Failed | Denied | PendingApproval

_converter = strict_converter({SessionId: lambda value, _: parse_session_id(value)})

TOOL_REQUEST: Codec[ToolRequest] = Codec(_converter, ToolRequest)
TOOL_RESPONSES: TaggedCodec[ToolResponse] = TaggedCodec(
    _converter, {"result": Result, "failed": Failed, "denied": Denied, "pending_approval": PendingApproval}
)
