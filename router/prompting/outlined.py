"""A conversation as digests: the value that router/prompting/outline.py makes and compares. No text."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

WORDS: Final = 5
"""Of a message: as sent, JSON normalised, that without thinking and billing lines, what it is, its length."""
WORD_BYTES: Final = 4
MESSAGE_BYTES: Final = WORDS * WORD_BYTES
TOOL_WORDS: Final = 2
"""Of a tool: as sent, normalised."""
Outlined: TypeAlias = tuple[int, bytes, bytes, int, bytes, int]
"""The fields of an Outline."""


class Outline(NamedTuple):
    """Of a chat's messages from `after` on. Numbers are of 32 bits without a sign, as this machine has them."""

    after: int
    messages: bytes
    """WORDS numbers each; behind those of `base`, where there are any."""
    tools: bytes = b""
    """TOOL_WORDS numbers each; of a whole outline only (`after` 0)."""
    flags: int = 0
    """What else the template is told."""
    base: bytes = b""
    kept: int = 0
    """Of a whole outline: so many of its messages are the first ones of `base`, which others have too."""

    @property
    def total(self) -> int:
        """Of all messages, those before included."""
        return self.after + self.kept + len(self.messages) // MESSAGE_BYTES

    @property
    def numbers(self) -> bytes:
        """Of all its messages."""
        return self.base[: MESSAGE_BYTES * self.kept] + self.messages
