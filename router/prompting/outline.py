"""Outline of a chat: digests of its messages and tools, which say which message changed, and how. No I/O.

An outline contains no text. Digests have 32 bits: a collision gives a wrong reason of a cache miss, and decides
nothing.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from prompts.chat_rendering import BILLING_LINE, convert_tool_call, remove_billing_line
from prompts.chat_template import Message
from prompts.errors import RequestError
from prompts.routing import RoutingRequest, convert_source_to_chat

ROLE_BITS, HAS_THOUGHTS, HAS_BILLING_LINE, HAS_TOOL_CALLS = 7, 8, 16, 32
"""Bits of a message's kind: its role (system 0, user 1, assistant 2, tool 3, another 4), and whether it has thoughts, a
billing line, or tool calls."""
OUTLINE_BYTES: Final = 600
"""Memory of an outline besides its numbers."""
_NUMBER_BYTES: Final = 4
_ROLES: Final = {"system": 0, "developer": 0, "user": 1, "assistant": 2, "tool": 3}
_THINKING_FIELDS = frozenset(("reasoning_content", "reasoning", "thinking"))
_SPACE = re.compile(r"\s*")
_BILLING_LINE = re.compile(rf"^{BILLING_LINE}[^\n]*\n?", re.MULTILINE)
_encoder: Final = msgspec.json.Encoder()
_sorted_encoder: Final = msgspec.json.Encoder(order="sorted")


class MessageFingerprint(NamedTuple):
    """Digests by which a message is compared with another one. Each leaves out more than the one before."""

    sent_digest: int
    """Digest of the message as the client sent it."""
    json_digest: int
    """Digest that is the same if only the JSON of tool arguments is written differently."""
    content_digest: int
    """Digest without thoughts and billing lines, too."""
    kind: int
    """Role of the message, and facts such as HAS_TOOL_CALLS, as bits."""
    chars: int


class MessageFingerprints(NamedTuple):
    """Fingerprints of all messages of a chat in order, with an array of 32-bit numbers for each field."""

    sent_digests: array[int]
    json_digests: array[int]
    content_digests: array[int]
    kinds: array[int]
    chars: array[int]

    @classmethod
    def from_rows(cls, rows: Sequence[MessageFingerprint]) -> MessageFingerprints:
        """Return the fingerprints with one array for each field."""
        fields = zip(*rows) if rows else [()] * len(cls._fields)
        return cls(*[array("I", field) for field in fields])


class Outline(NamedTuple):
    """Digests of all messages and other inputs of a chat: it shows how the chat differs from another, without texts."""

    messages: MessageFingerprints
    tools_digest: int = 0
    """Digest of the tools as sent; 0 without tools."""
    options_digest: int = 0
    """Digest of the template's inputs besides messages and tools; 0 without them."""

    @property
    def message_count(self) -> int:
        return len(self.messages.kinds)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory of the outline."""
        return OUTLINE_BYTES + len(self.messages) * self.message_count * _NUMBER_BYTES

    def get_role(self, index: int) -> int:
        return self.messages.kinds[index] & ROLE_BITS

    def replace_end(self, message_count: int, new_messages: list[Message]) -> Outline:
        """Return the outline of a chat that has these messages after the first `message_count` ones."""
        new_fingerprints = fingerprint_messages(new_messages)
        fields = zip(self.messages, new_fingerprints)
        return self._replace(messages=MessageFingerprints(*[old[:message_count] + new for old, new in fields]))


def outline_chat(request: RoutingRequest) -> Outline | None:
    """Return the fingerprints of a chat; None if the request cannot be read as one, or is nested too deeply."""
    try:
        if request.source is not None:
            request = convert_source_to_chat(request, None, keeps_system_in_place=True)
        if request.messages is None:
            return None
        tools_digest = _digest(_encoder.encode(request.tools)) if request.tools else 0
        return Outline(fingerprint_messages(request.messages), tools_digest, digest_template_options(request))
    except (RequestError, RecursionError):
        return None


def fingerprint_messages(messages: Sequence[Message]) -> MessageFingerprints:
    return MessageFingerprints.from_rows([_fingerprint_message(message) for message in messages])


def digest_template_options(request: RoutingRequest) -> int:
    """Digest the template's inputs besides messages and tools."""
    options = (
        request.chat_template_kwargs, request.reasoning_effort, request.add_generation_prompt,
        request.continue_final_message or None, request.add_special_tokens or None, request.documents,
    )  # fmt: skip
    return _digest(_sorted_encoder.encode(options)) if any(value is not None for value in options) else 0


def _digest(data: bytes, previous_digest: int = 0) -> int:
    """Return a 32-bit digest of data that follows other data, whose digest is `previous_digest`."""
    return xxhash.xxh3_64_intdigest(data, previous_digest) & 0xFFFF_FFFF


def _fingerprint_message(message: Mapping[str, Any]) -> MessageFingerprint:
    """Return the fingerprint of a message. A message of only a role and a plain text needs one digest."""
    role, content = message.get("role"), message.get("content")
    role_number = _ROLES.get(role, 4) if isinstance(role, str) else 4
    is_system, has_two_fields = role_number == 0, len(message) == 2 and "role" in message
    if has_two_fields and isinstance(content, str) and not _has_hidden_text(content, is_system=is_system):
        digest = _digest_text(content)  # most messages come here
        return MessageFingerprint(digest, digest, digest, role_number, len(content))
    fields = {name: value for name, value in message.items() if name not in ("content", "role") and value is not None}
    return _fingerprint_fields(_read_text(content, is_system=is_system), fields, role_number)


def _fingerprint_fields(text: str, fields: dict[str, Any], role_number: int) -> MessageFingerprint:
    """Return the fingerprint of a message with this text, and with these `fields` besides role and content."""
    encoded_fields = _encoder.encode(fields) if fields else b""
    text_digest = _digest_text(text)
    sent_digest = _digest(encoded_fields, text_digest) if fields else text_digest

    kind = role_number
    if fields.get("tool_calls"):
        kind |= HAS_TOOL_CALLS
        if isinstance(fields["tool_calls"], list):  # two spellings of the same JSON arguments count as equal
            fields = {**fields, "tool_calls": list(map(convert_tool_call, fields["tool_calls"]))}

    visible_text, hidden_text_bits = _remove_hidden_text(text, is_system=role_number == 0)
    kind |= hidden_text_bits
    visible_fields = {name: value for name, value in fields.items() if name not in _THINKING_FIELDS}
    if len(visible_fields) < len(fields):
        kind |= HAS_THOUGHTS
    return MessageFingerprint(
        sent_digest=sent_digest,
        json_digest=_digest_fields(fields, text_digest),
        content_digest=_digest_fields(visible_fields, _digest_text(visible_text)),
        kind=kind,
        chars=len(text) + len(encoded_fields),
    )


def _has_hidden_text(text: str, *, is_system: bool) -> bool:
    return "<think>" in text or (is_system and BILLING_LINE in text)


def _remove_hidden_text(text: str, *, is_system: bool) -> tuple[str, int]:
    """Return a message's text without billing lines and thoughts, and the kind bits of what was removed."""
    visible_text, hidden_bits = text, 0
    if is_system and BILLING_LINE in text:
        visible_text = _BILLING_LINE.sub("", text)
        hidden_bits |= HAS_BILLING_LINE if visible_text != text else 0
    if "<think>" in visible_text:
        visible_text = _remove_thoughts(visible_text)
        hidden_bits |= HAS_THOUGHTS
    return visible_text, hidden_bits


def _digest_text(text: str) -> int:
    return _digest(text.encode("utf-8", "surrogatepass"))


def _digest_fields(fields: Mapping[str, Any], text_digest: int) -> int:
    """Return the digest of a message's text and its other fields with sorted keys."""
    return _digest(_sorted_encoder.encode(fields), text_digest) if fields else text_digest


def _read_text(content: Any, *, is_system: bool) -> str:
    """Return the text of a message's content, with thoughts in marks and without a leading billing line."""
    if is_system:
        content = remove_billing_line(content)
    if isinstance(content, list):
        return "".join(map(_read_part_text, content))
    return "" if content is None else _read_part_text(content)


def _read_part_text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "thinking":
        return f"<think>{part.get('thinking')}</think>"
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else _sorted_encoder.encode(part).decode()


def _remove_thoughts(text: str) -> str:
    """Remove thoughts from a text; a regular expression would take quadratic time if many thoughts have no end."""
    visible, position = [], 0
    while (start := text.find("<think>", position)) >= 0 and (end := text.find("</think>", start)) >= 0:
        visible.append(text[position:start])
        space = _SPACE.match(text, end + len("</think>"))
        position = space.end() if space is not None else len(text)
    return "".join((*visible, text[position:]))
