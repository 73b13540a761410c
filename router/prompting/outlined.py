"""A conversation as digests: the value that router/prompting/outline.py makes and compares. No text."""

from __future__ import annotations

from array import array

import msgspec

WORDS = 5
"""Of a message: as sent, JSON normalised, that without thinking and billing lines, what it is, its length."""
TOOL_WORDS = 2
"""Of a tool: as sent, normalised."""

NO_TOOLS = array("I")
"""Of a chat without any; nobody changes it."""


class Outline(msgspec.Struct):
    """Of a chat's messages from `after` on."""

    after: int
    messages: array[int]
    """WORDS numbers each."""
    tools: array[int] = NO_TOOLS
    """TOOL_WORDS numbers each; of a whole outline only (`after` 0)."""
    flags: int = 0
    """What else the template is told."""

    @property
    def count(self) -> int:
        """Of all messages, those before included."""
        return self.after + len(self.messages) // WORDS

    @property
    def size(self) -> int:
        """Bytes."""
        return 4 * (len(self.messages) + len(self.tools)) + 256
