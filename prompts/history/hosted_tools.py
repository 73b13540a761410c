"""What a provider's servers did in an earlier turn, as text: searches, programs that ran, a history that was shortened.

No server here runs such tools, but a conversation may have begun where one does, and a model reads what was asked and
what came back. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def format_hosted_call(kind: str, fields: Mapping[str, Any]) -> str | None:
    """Return a line with what can be read of a block or an item; None where nothing can."""
    readable_fields = _readable_fields(fields)
    for name, value in readable_fields.items():
        if isinstance(value, dict):
            readable_fields[name] = _readable_fields(value)
        elif isinstance(value, list):
            readable_fields[name] = [_readable_fields(part) if isinstance(part, dict) else part for part in value]
    return f"[{kind}: {msgspec.json.encode(readable_fields).decode()}]" if readable_fields else None


def _readable_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without what only the provider can read, and without images."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None
        and not name.startswith("encrypted")
        and not (isinstance(value, str) and value.startswith("data:"))
    }
