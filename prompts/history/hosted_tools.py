"""Text for what a provider's servers did in earlier turns: searches, programs that ran, a history that was shortened.

Our engine runs no such tools, but a conversation may have begun at a server that does. The model then reads the calls
and their results. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def format_hosted_call(kind: str, fields: Mapping[str, Any]) -> str | None:
    """Return a line with the readable fields of a block or an item; None if it has none."""
    readable_fields = _readable_fields(fields)
    for name, value in readable_fields.items():
        if isinstance(value, dict):
            readable_fields[name] = _readable_fields(value)
        elif isinstance(value, list):
            readable_fields[name] = [_readable_fields(part) if isinstance(part, dict) else part for part in value]
    return f"[{kind}: {msgspec.json.encode(readable_fields).decode()}]" if readable_fields else None


def _readable_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a model can read: not those that only the provider can read, and no images."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None
        and not name.startswith("encrypted")
        and not (isinstance(value, str) and value.startswith("data:"))
    }
