"""Server-sent events out of bytes; sans-IO.

Laws:
* Any chunking of the same bytes gives the same events: characters, line ends and fields may be
  split anywhere. Lines end with LF, CR or CRLF and with nothing else (U+2028 stays inside JSON).
* Memory is bounded by `event_max_bytes`.
* Bytes that are not UTF-8 become U+FFFD; nothing that arrived before or after them is lost.

Three things go beyond the standard, because servers do them: a line `error: …` is an event named
`error`; an event that the end of the stream leaves without its blank line still counts; a line that
begins with `{` is data. A body that is no stream at all (JSON, HTML) is kept in `foreign`.
Source: WHATWG HTML 9.2.6; `../shared/cases/25`, `31`, `34`.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from boxmaker.errors import InferenceError

_BOM: Final = b"\xef\xbb\xbf"
_FOREIGN_STARTS: Final = b"{[<"


@frozen
class SseEvent:
    """One event: its name (`message` when it has none) and its data."""

    name: str
    data: str


class SseDecoder:
    """Decode one response body; feed it every chunk, then `eof`."""

    def __init__(self, event_max_bytes: int) -> None:
        self._max = event_max_bytes
        self._line = bytearray()
        self._after_cr = False
        self._bom_possible = True
        self._begun = False
        self._name = "message"
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._foreign: bytearray | None = None
        self.over: InferenceError | None = None
        """An event was over `event_max_bytes`: nothing more is decoded."""

    @property
    def full(self) -> bool:
        """Is the body no stream, and as long as we keep of one?"""
        return self._foreign is not None and len(self._foreign) >= self._max

    @property
    def foreign(self) -> bytes | None:
        """The body so far when it is no event stream, else None."""
        return None if self._foreign is None else bytes(self._foreign)

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Take bytes, give the events that are complete now.

        Raises:
            InferenceError: kind `limit`, when one event is over `event_max_bytes`; the events before it
                were given by an earlier call.
        """
        if self.over is not None:
            raise self.over
        if self._is_one_event(chunk):
            return [SseEvent("message", _text(chunk[6:-2]))]
        if not self._begun:
            begun = self._begin(chunk)
            if begun is None:
                return []
            chunk = begun
        if self._foreign is not None:
            self._take_foreign(chunk)
            return []
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk[:1] == b"\n":
                chunk = chunk[1:]
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events: list[SseEvent] = []
        *lines, rest = chunk.split(b"\n")
        try:
            for line in lines:
                if self._line:
                    line = bytes(self._line) + line
                    self._line.clear()
                self._take_line(line, events)
            if rest:
                self._line += rest
                self._check(len(self._line))
        except InferenceError:
            if not events:
                raise
        return events

    def _is_one_event(self, chunk: bytes) -> bool:
        """Is this what most chunks are, one event of one line of data, with nothing left over from those before?

        A CR before it may be: the LF that would belong to it could only be an empty line here.
        """
        return (
            chunk.startswith(b"data: ")
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk.endswith(b"\n")
            and b"\r" not in chunk
            and len(chunk) - 2 <= self._max
            and self._begun
            and not (self._line or self._data or self._foreign is not None)
            and self._name == "message"
        )

    def eof(self) -> list[SseEvent]:
        """Say that the body ended; give what its last lines hold. Raises as `feed` does."""
        if self.over is not None:
            raise self.over
        events: list[SseEvent] = []
        if self._foreign is None:
            if self._line:
                line = bytes(self._line)
                self._line.clear()
                self._take_line(line, events)
            self._take_line(b"", events)
        return events

    def _begin(self, chunk: bytes) -> bytes | None:
        """Drop a byte order mark and white space, then tell a stream from another body."""
        head = bytes(self._line) + chunk
        self._line.clear()
        if self._bom_possible and head:
            if len(head) < len(_BOM) and _BOM.startswith(head):
                self._line += head
                return None
            self._bom_possible = False  # it is one at the very beginning only
            head = head.removeprefix(_BOM)
        bare = head.lstrip(b" \t\r\n")
        if not bare:
            return None
        self._begun = True
        if bare[0] in _FOREIGN_STARTS:
            self._foreign = bytearray()
        return bare

    def _take_foreign(self, chunk: bytes) -> None:
        assert self._foreign is not None
        self._foreign += chunk[: self._max - len(self._foreign)]

    def _take_line(self, line: bytes, events: list[SseEvent]) -> None:
        self._check(len(line))
        if line.startswith(b"data: "):
            self._add_data(line[6:])
        elif not line:
            if self._data:
                data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                events.append(SseEvent(self._name, _text(data)))
                self._data = []
                self._data_bytes = 0
            self._name = "message"
        elif line.startswith(b":"):
            pass  # a comment: servers send it to keep the connection alive
        elif line.startswith(b"{"):
            self._add_data(line)
        else:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._add_data(value)
            elif name == b"event":
                self._name = _text(value) or "message"
            elif name == b"error":
                events.append(SseEvent("error", _text(value)))

    def _add_data(self, value: bytes) -> None:
        self._data.append(value)
        self._data_bytes += len(value) + 1  # the LF between lines: empty ones must not be free
        self._check(self._data_bytes - 1)

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self._max:
            self.over = InferenceError(
                kind="limit",
                limit="event_max_bytes",
                message=f"the server sent one event of over {self._max} bytes ([inference] event_max_bytes)",
            )
            raise self.over


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace")
