"""Logging to stderr, as text lines or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class TextFormatter(logging.Formatter):
    """Formats a record as one line. Control characters are escaped, so that a client's text forges no line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _CONTROL_CHARACTER.sub(lambda match: ascii(match[0])[1:-1], super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: ts, level, logger, message, and the fields of `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(level: str, *, as_json: bool) -> None:
    """Log to stderr. Stdout is only for a program's address and generated keys."""
    handler = logging.StreamHandler(sys.stderr)
    text_formatter = TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if as_json else text_formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
