"""What a conversation is made of, as digests: enough to say which of its messages changed, and how. Pure.

Owns what counts as the same. No text leaves here. Everything is a digest of 32 bits: two texts that share one are taken
for the same, which names a wrong reason once in four billion times and decides nothing.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from prompts.bpe_encoder import digest32, message_words
from prompts.chat_rendering import BILLING_LINE
from prompts.chat_template import Message
from prompts.errors import RequestError
from prompts.routing import RoutingRequest, chat_of
from router.prompting.outlined import BILLED, CALLS, ROLE, THINKS, Outline

_ROLES: Final = {"system": 0, "developer": 0, "user": 1, "assistant": 2, "tool": 3}
THINK: Final = b"<think>"
BILLING: Final = BILLING_LINE.encode()
"""A text without the one, and a system's without a line that begins with the other, says what is rendered of it."""
_THINKING_FIELDS = frozenset(("reasoning_content", "reasoning", "thinking"))
_SPACE = re.compile(r"\s*")
_BILLING_LINE = re.compile(rf"^{BILLING_LINE}[^\n]*\n?", re.MULTILINE)
_encoder: Final = msgspec.json.Encoder()
_sorted: Final = msgspec.json.Encoder(order="sorted")


def outline(parsed: RoutingRequest) -> Outline | None:
    """Outline a chat, or what stands for one; None where it is none. Messages and Responses bodies are outlined as the
    chat that is rendered of them."""
    if parsed.source is not None:
        try:
            parsed = chat_of(parsed, None, in_place=True)
        except RequestError:
            return None
    if parsed.messages is None:
        return None
    return Outline(words_of(parsed.messages), outlined_tools(parsed), flags_of(parsed))


def words_of(messages: list[Message]) -> bytes:
    """WORDS numbers for each message."""
    return message_words(messages, _ROLES, THINK, BILLING, _message)


def outlined_tools(chat: RoutingRequest) -> bytes:
    """Two numbers for each of its tools."""
    tools = array("I")
    for tool in chat.tools or ():
        tools.append(_digest(_encoder.encode(tool)))
        tools.append(_digest(_sorted.encode(tool)))
    return tools.tobytes()


def flags_of(parsed: RoutingRequest) -> int:
    """A digest of what else the template is told."""
    told = (
        parsed.chat_template_kwargs, parsed.reasoning_effort, parsed.add_generation_prompt,
        parsed.continue_final_message or None, parsed.add_special_tokens or None, parsed.documents,
    )  # fmt: skip
    return _digest(_sorted.encode(told)) if any(value is not None for value in told) else 0


def _digest(data: bytes, before: int = 0) -> int:
    """Of `data` behind what has the digest `before`."""
    return digest32(data, before)


def _message(message: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    content = message.get("content")
    kind = _ROLES.get(message.get("role"), 4)  # type: ignore[arg-type]
    text, thinks = _text(content, is_system=kind == 0)
    rest = {name: value for name, value in message.items() if name not in ("content", "role") and value is not None}
    raw = text.encode("utf-8", "surrogatepass")
    whole, size = _digest(raw), len(text)
    if rest:
        said = _encoder.encode(rest)
        whole, size = _digest(said, whole), size + len(said)
    if rest.get("tool_calls"):
        kind |= CALLS
        rest["tool_calls"] = _parsed_calls(rest["tool_calls"])
    plain = _digest(_sorted.encode(rest), _digest(raw)) if rest else whole
    bare_text = _BILLING_LINE.sub("", text) if kind & ROLE == 0 and BILLING_LINE in text else text
    kind |= BILLED if bare_text is not text else 0
    if "<think>" in bare_text:
        bare_text, thinks = _without_thoughts(bare_text), True
    bare_rest = {name: value for name, value in rest.items() if name not in _THINKING_FIELDS}
    if thinks or len(bare_rest) < len(rest):
        kind |= THINKS
    bare = _digest(bare_text.encode("utf-8", "surrogatepass"))
    return whole, plain, _digest(_sorted.encode(bare_rest), bare) if bare_rest else bare, kind, size


def _text(content: Any, *, is_system: bool) -> tuple[str, bool]:
    """(what a message says, whether it has parts that are thoughts), without the billing line that is not rendered."""
    if isinstance(content, str):
        is_billed = is_system and content.startswith(BILLING_LINE)
        return content.partition("\n")[2] if is_billed else content, False
    if not isinstance(content, list):
        return "" if content is None else _sorted.encode(content).decode(), False
    texts, thinks = [], False
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(part, dict) and part.get("type") == "thinking":
            thinks = True
            texts.append(f"<think>{part.get('thinking')}</think>")
        else:
            text = text if isinstance(text, str) else _sorted.encode(part).decode()
            texts.append("" if is_system and text.startswith(BILLING_LINE) else text)
    return "".join(texts), thinks


def _without_thoughts(text: str) -> str:
    """A pattern would look to the end of the text for the end of each thought that has none."""
    kept, at = [], 0
    while (start := text.find("<think>", at)) >= 0 and (end := text.find("</think>", start)) >= 0:
        kept.append(text[at:start])
        space = _SPACE.match(text, end + len("</think>"))
        at = space.end() if space is not None else len(text)
    return "".join((*kept, text[at:]))


def _parsed_calls(calls: Any) -> Any:
    """Calls whose arguments are JSON in a string, with what that means."""
    if not isinstance(calls, list):
        return calls
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = msgspec.json.decode(function["arguments"])
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                arguments = function["arguments"]
            call = {**call, "function": {**function, "arguments": arguments}}
        found.append(call)
    return found
