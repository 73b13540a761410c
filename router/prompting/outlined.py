"""A conversation as digests: the value that router/prompting/outline.py makes and compares. No text."""

from __future__ import annotations

import msgspec

WORDS = 5
"""Of a message: as sent, JSON normalised, that without thinking and billing lines, what it is, its length."""
WORD_BYTES = 4
MESSAGE_BYTES = WORDS * WORD_BYTES
TOOL_WORDS = 2
"""Of a tool: as sent, normalised."""


class Outline(msgspec.Struct):
    """Of a chat's messages from `after` on. Numbers are of 32 bits without a sign, as this machine has them."""

    after: int
    messages: bytes
    """WORDS numbers each."""
    tools: bytes = b""
    """TOOL_WORDS numbers each; of a whole outline only (`after` 0)."""
    flags: int = 0
    """What else the template is told."""

    @property
    def count(self) -> int:
        """Of all messages, those before included."""
        return self.after + len(self.messages) // MESSAGE_BYTES
