"""The daemon's own log: an event name with fields, one line each.

Law: no message text, tool arguments, results or keys ever go into a field.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_logger = logging.getLogger("boxmaker")


def log_event(event: str, **fields: object) -> None:
    """Log one event with its fields; a field that is None is left out."""
    _logger.info(event, extra={"fields": {k: v for k, v in fields.items() if v is not None}})


class KeyValueFormatter(logging.Formatter):
    """`2026-11-30T14:15:30.123Z event=turn_done session=… ms=812`: values with spaces are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        """Make the line, with the traceback below it when there is one."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [f"{stamp}.{int(record.msecs):03d}Z", f"event={record.getMessage()}"]
        fields: dict[str, object] = getattr(record, "fields", {})
        for key, value in fields.items():
            text = str(value)
            if not text or not text.isprintable() or " " in text or '"' in text:
                text = json.dumps(text)
            parts.append(f"{key}={text}")
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def log_exception(event: str, **fields: object) -> None:
    """Log a fault of ours with its traceback; call it from an except block only."""
    _logger.error(event, exc_info=True, extra={"fields": fields})


def log_to_stderr() -> None:
    """Send the log to stderr; called once, by the daemon's command."""
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(KeyValueFormatter())
    _logger.handlers[:] = [shown]
    _logger.setLevel(logging.INFO)
    _logger.propagate = False
