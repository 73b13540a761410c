"""What a provider's servers did in an earlier turn, as text: searches, programs that ran, a history that was shortened.

No server here runs such tools, but a conversation may have begun where one does, and a model reads what was asked and
what came back. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def hosted_text(kind: str, fields: Mapping[str, Any]) -> str | None:
    """Return a line with what can be read of a block or an item; None where nothing can."""
    shown = _readable(fields)
    for name, value in shown.items():
        if isinstance(value, dict):
            shown[name] = _readable(value)
        elif isinstance(value, list):
            shown[name] = [_readable(part) if isinstance(part, dict) else part for part in value]
    return f"[{kind}: {msgspec.json.encode(shown).decode()}]" if shown else None


def _readable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without what only the provider can read, and without images."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None
        and not name.startswith("encrypted")
        and not (isinstance(value, str) and value.startswith("data:"))
    }
