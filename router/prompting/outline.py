"""Fingerprints of a chat's messages and tools: enough to say which message changed, and how. Pure.

Owns what counts as the same. No text leaves here. Digests have 32 bits: two texts with one digest are taken for the
same, which names a wrong reason once in four billion times and decides nothing.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from prompts.body_digests import digest32, message_words
from prompts.chat_rendering import BILLING_LINE
from prompts.chat_template import Message
from prompts.errors import RequestError
from prompts.routing import RoutingRequest, convert_source_to_chat
from router.prompting.chat_outline import HAS_BILLING_LINE, HAS_THOUGHTS, HAS_TOOL_CALLS, ROLE_BITS, Outline

_ROLES: Final = {"system": 0, "developer": 0, "user": 1, "assistant": 2, "tool": 3}
THINK: Final = b"<think>"
BILLING: Final = BILLING_LINE.encode()
"""A text without the one, and a system's without a line that begins with the other, says what is rendered of it."""
_THINKING_FIELDS = frozenset(("reasoning_content", "reasoning", "thinking"))
_SPACE = re.compile(r"\s*")
_BILLING_LINE = re.compile(rf"^{BILLING_LINE}[^\n]*\n?", re.MULTILINE)
_encoder: Final = msgspec.json.Encoder()
_sorted_encoder: Final = msgspec.json.Encoder(order="sorted")


def outline_chat(request: RoutingRequest) -> Outline | None:
    """Outline a chat, or what stands for one; None where it is none. Messages and Responses bodies are outlined as the
    chat that is rendered of them."""
    if request.source is not None:
        try:
            request = convert_source_to_chat(request, None, in_place=True)
        except RequestError:
            return None
    if request.messages is None:
        return None
    return Outline(fingerprint_messages(request.messages), fingerprint_tools(request), digest_template_options(request))


def fingerprint_messages(messages: list[Message]) -> bytes:
    """Return FINGERPRINT_FIELDS numbers for each message."""
    return message_words(messages, _ROLES, THINK, BILLING, _fingerprint_message)


def fingerprint_tools(chat: RoutingRequest) -> bytes:
    """Return two numbers for each tool of a chat: a digest as sent, and one normalised."""
    tools = array("I")
    for tool in chat.tools or ():
        tools.append(_digest(_encoder.encode(tool)))
        tools.append(_digest(_sorted_encoder.encode(tool)))
    return tools.tobytes()


def digest_template_options(request: RoutingRequest) -> int:
    """Digest the template's inputs besides messages and tools."""
    options = (
        request.chat_template_kwargs, request.reasoning_effort, request.add_generation_prompt,
        request.continue_final_message or None, request.add_special_tokens or None, request.documents,
    )  # fmt: skip
    return _digest(_sorted_encoder.encode(options)) if any(value is not None for value in options) else 0


def _digest(data: bytes, previous_digest: int = 0) -> int:
    """Digest `data` that follows data with the digest `previous_digest`."""
    return digest32(data, previous_digest)


def _fingerprint_message(message: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    content = message.get("content")
    kind_bits = _ROLES.get(message.get("role"), 4)  # type: ignore[arg-type]
    text, has_thoughts = _message_text(content, is_system=kind_bits == 0)
    other_fields = {
        name: value for name, value in message.items() if name not in ("content", "role") and value is not None
    }
    raw = text.encode("utf-8", "surrogatepass")
    raw_digest, size = _digest(raw), len(text)
    if other_fields:
        encoded_fields = _encoder.encode(other_fields)
        raw_digest, size = _digest(encoded_fields, raw_digest), size + len(encoded_fields)
    if other_fields.get("tool_calls"):
        kind_bits |= HAS_TOOL_CALLS
        other_fields["tool_calls"] = _decode_call_arguments(other_fields["tool_calls"])
    normalized_digest = _digest(_sorted_encoder.encode(other_fields), _digest(raw)) if other_fields else raw_digest
    visible_text = _BILLING_LINE.sub("", text) if kind_bits & ROLE_BITS == 0 and BILLING_LINE in text else text
    kind_bits |= HAS_BILLING_LINE if visible_text is not text else 0
    if "<think>" in visible_text:
        visible_text, has_thoughts = _without_thoughts(visible_text), True
    visible_fields = {name: value for name, value in other_fields.items() if name not in _THINKING_FIELDS}
    if has_thoughts or len(visible_fields) < len(other_fields):
        kind_bits |= HAS_THOUGHTS
    visible_digest = _digest(visible_text.encode("utf-8", "surrogatepass"))
    return (
        raw_digest,
        normalized_digest,
        _digest(_sorted_encoder.encode(visible_fields), visible_digest) if visible_fields else visible_digest,
        kind_bits,
        size,
    )


def _message_text(content: Any, *, is_system: bool) -> tuple[str, bool]:
    """Return the text of a message, without the billing line that is not rendered, and whether it has thoughts."""
    if isinstance(content, str):
        is_billed = is_system and content.startswith(BILLING_LINE)
        return content.partition("\n")[2] if is_billed else content, False
    if not isinstance(content, list):
        return "" if content is None else _sorted_encoder.encode(content).decode(), False
    texts, has_thoughts = [], False
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(part, dict) and part.get("type") == "thinking":
            has_thoughts = True
            texts.append(f"<think>{part.get('thinking')}</think>")
        else:
            text = text if isinstance(text, str) else _sorted_encoder.encode(part).decode()
            texts.append("" if is_system and text.startswith(BILLING_LINE) else text)
    return "".join(texts), has_thoughts


def _without_thoughts(text: str) -> str:
    """Remove the thoughts from a text. A pattern would search the whole text for each thought without an end."""
    visible, position = [], 0
    while (start := text.find("<think>", position)) >= 0 and (end := text.find("</think>", start)) >= 0:
        visible.append(text[position:start])
        space = _SPACE.match(text, end + len("</think>"))
        position = space.end() if space is not None else len(text)
    return "".join((*visible, text[position:]))


def _decode_call_arguments(calls: Any) -> Any:
    """Return calls with their arguments decoded, where those are JSON in a string."""
    if not isinstance(calls, list):
        return calls
    result = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = msgspec.json.decode(function["arguments"])
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                arguments = function["arguments"]
            call = {**call, "function": {**function, "arguments": arguments}}
        result.append(call)
    return result
