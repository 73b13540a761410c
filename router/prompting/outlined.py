"""A conversation as digests, without text. router/prompting/outline.py makes it, router/miss_reasons compares it."""

from __future__ import annotations

from typing import Final, NamedTuple

WORDS: Final = 5
"""Of a message: as sent, JSON normalised, that without thinking and billing lines, what it is, its length."""
WORD_BYTES: Final = 4
MESSAGE_BYTES: Final = WORDS * WORD_BYTES
ROLE, THINKS, BILLED, CALLS = 7, 8, 16, 32
"""Bits of what a message is: its role (system 0, user 1, assistant 2, tool 3, another 4), whether it has thoughts, a
billing line, calls of tools."""


class Outline(NamedTuple):
    """Digests of all messages of a chat. Numbers are of 32 bits without a sign, as this machine has them."""

    messages: bytes
    """WORDS numbers each."""
    tools: bytes = b""
    """Two numbers each: a tool as sent, and normalised."""
    flags: int = 0
    """What else the template is told."""

    @property
    def total(self) -> int:
        """Number of messages."""
        return len(self.messages) // MESSAGE_BYTES
