"""A conversation as digests, without text. router/prompting/outline.py makes it, router/miss_reasons compares it."""

from __future__ import annotations

from typing import Final, NamedTuple

FINGERPRINT_FIELDS: Final = 5
"""Numbers of a message: digests as sent, of normalised JSON, and of that without thoughts and billing lines; kind bits;
length."""
FIELD_BYTES: Final = 4
FINGERPRINT_BYTES: Final = FINGERPRINT_FIELDS * FIELD_BYTES
ROLE_BITS, HAS_THOUGHTS, HAS_BILLING_LINE, HAS_TOOL_CALLS = 7, 8, 16, 32
"""Bits of what a message is: its role (system 0, user 1, assistant 2, tool 3, another 4), whether it has thoughts, a
billing line, calls of tools."""


class Outline(NamedTuple):
    """Digests of all messages of a chat. Numbers are of 32 bits without a sign, as this machine has them."""

    messages: bytes
    """FINGERPRINT_FIELDS numbers each."""
    tools: bytes = b""
    """Two numbers each: a tool as sent, and normalised."""
    options_digest: int = 0
    """Digest of the template's inputs besides messages and tools."""

    @property
    def message_count(self) -> int:
        """Number of messages."""
        return len(self.messages) // FINGERPRINT_BYTES
