"""The daemon's own log: an event name with fields, one line each.

Laws:
* No message text, tool arguments, results or keys ever go into a line.
* An event is one line, whatever its values hold.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path

_logger = logging.getLogger("boxmaker")
_PLACES = 20
"""How many places of a traceback are named, from the fault upwards."""


def log_event(event: str, **fields: object) -> None:
    """Log one event with its fields; a field that is None is left out."""
    _logger.info(event, extra={"fields": _known(fields)})


def _known(fields: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in fields.items() if value is not None}


class KeyValueFormatter(logging.Formatter):
    """`2026-11-30T14:15:30.123Z event=turn_done session=… ms=812`: values with spaces are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        """Make the line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [f"{stamp}.{int(record.msecs):03d}Z", f"event={record.getMessage()}"]
        fields: dict[str, object] = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            fields["fault"] = describe_fault(record.exc_info[1])
        for key, value in fields.items():
            text = str(value)
            if not text or not text.isprintable() or " " in text or '"' in text:
                text = json.dumps(text)
            parts.append(f"{key}={text}")
        return " ".join(parts)


def describe_fault(exc: BaseException) -> str:
    """Name an exception, the places it came through (innermost first), and what is behind it.

    Its text is left out: it may quote a message, arguments or a result.
    """
    places = [
        f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{line}"
        for frame, line in traceback.walk_tb(exc.__traceback__)
    ]
    text = type(exc).__name__
    if places:
        text += " at " + " ".join(places[: -_PLACES - 1 : -1])
    if isinstance(exc, BaseExceptionGroup):
        text += f" of ({'; '.join(describe_fault(one) for one in exc.exceptions)})"
    behind = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
    return f"{text} from {describe_fault(behind)}" if behind is not None else text


def log_exception(event: str, **fields: object) -> None:
    """Log a fault of ours with the places it came through; call it from an except block only."""
    _logger.error(event, exc_info=True, extra={"fields": _known(fields)})


def log_to_stderr() -> None:
    """Send the log to stderr; called once, by the daemon's command."""
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(KeyValueFormatter())
    _logger.handlers[:] = [shown]
    _logger.setLevel(logging.INFO)
    _logger.propagate = False


def let_go_of_stderr() -> None:
    """The daemon has ended: what its log could not take any more is dropped.

    Python flushes stderr once more as it exits, and makes the status 120 when nobody reads it.
    """
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
