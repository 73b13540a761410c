"""Digests of a conversation, made by router/prompting/outline.py and compared by router/miss_reasons."""

from __future__ import annotations

from typing import Final, NamedTuple

FINGERPRINT_FIELDS: Final = 5
"""Numbers of a message: digest as sent, digest of normalised JSON, digest without thoughts and billing lines, kind
bits, and length."""
FIELD_BYTES: Final = 4
FINGERPRINT_BYTES: Final = FINGERPRINT_FIELDS * FIELD_BYTES
ROLE_BITS, HAS_THOUGHTS, HAS_BILLING_LINE, HAS_TOOL_CALLS = 7, 8, 16, 32
"""Kind bits of a message: its role (system 0, user 1, assistant 2, tool 3, another 4), and whether it has thoughts, a
billing line, or tool calls."""


class Outline(NamedTuple):
    """Digests of all messages of a chat, as arrays of unsigned 32-bit numbers in this machine's byte order."""

    messages: bytes
    """FINGERPRINT_FIELDS numbers for each message."""
    tools: bytes = b""
    """Two numbers for each tool: digest as sent, and digest of normalised JSON."""
    options_digest: int = 0
    """Digest of the template's inputs besides messages and tools."""

    @property
    def message_count(self) -> int:
        """Number of messages."""
        return len(self.messages) // FINGERPRINT_BYTES
