"""What a conversation is made of, as digests: enough to say which of its messages changed, and how. Pure.

Owns what counts as the same. No text leaves here. Everything is a digest of 32 bits: two texts that share one are taken
for the same, which names a wrong reason once in four billion times and decides nothing.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any, Literal

import msgspec
import xxhash

from prompts.errors import RequestError
from prompts.messages import BILLING_LINE
from prompts.routing import RoutingRequest, chat_of
from router.prompting.outlined import WORDS, Outline

_ROLES = {"system": 0, "developer": 0, "user": 1, "assistant": 2, "tool": 3}
_ROLE, THINKS, BILLED, CALLS = 7, 8, 16, 32
_ROLES_OF = bytes([kind & _ROLE for kind in range(256)])
_THINKING_FIELDS = frozenset(("reasoning_content", "reasoning", "thinking"))
_SPACE = re.compile(r"\s*")
_BILLING_LINE = re.compile(rf"^{BILLING_LINE}[^\n]*\n?", re.MULTILINE)
_TAIL = 0.1
"""A message may begin so much of the prompt earlier or later than its characters say."""
_encoder = msgspec.json.Encoder()
_sorted = msgspec.json.Encoder(order="sorted")

How = Literal[
    "billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments", "truncated",
    "edited", "re_encoded",
]  # fmt: skip


def outline(parsed: RoutingRequest, after: int = 0) -> Outline | None:
    """Of a chat, or what stands for one, whose first `after` messages are known already; None where it is none, or has
    fewer. Messages and Responses bodies are outlined as the chat that is rendered of them."""
    if parsed.source is not None:
        try:
            parsed = chat_of(parsed, None)
        except RequestError:
            return None
    messages = parsed.messages
    if messages is None or len(messages) < after:
        return None
    words = array("I")
    for message in messages[after:] if after else messages:
        words.extend(_message(message))
    flags = _flags(parsed)
    if after:
        return Outline(after, words, flags=flags)
    return Outline(0, words, outlined_tools(parsed), flags)


def outlined_tools(chat: RoutingRequest) -> array[int]:
    """TOOL_WORDS numbers for each of its tools."""
    tools = array("I")
    for tool in chat.tools or ():
        tools.append(_digest(_encoder.encode(tool)))
        tools.append(_digest(_sorted.encode(tool)))
    return tools


def _flags(parsed: RoutingRequest) -> int:
    told = (
        parsed.chat_template_kwargs, parsed.reasoning_effort, parsed.add_generation_prompt,
        parsed.continue_final_message, parsed.add_special_tokens, parsed.documents,
    )  # fmt: skip
    return _digest(_sorted.encode(told)) if any(value is not None for value in told) else 0


def _digest(data: bytes, before: int = 0) -> int:
    """Of `data` behind what has the digest `before`."""
    return xxhash.xxh3_64_intdigest(data, before) & 0xFFFF_FFFF


def _message(message: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    content = message.get("content")
    kind = _ROLES.get(message.get("role"), 4)  # type: ignore[arg-type]
    if type(content) is str and len(message) == 2:
        whole = _digest(content.encode("utf-8", "surrogatepass"))
        if "<think>" not in content and BILLING_LINE not in content:
            return whole, whole, whole, kind, len(content)
    text, thinks = _text(content)
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
    bare_text = _BILLING_LINE.sub("", text) if BILLING_LINE in text else text
    kind |= BILLED if bare_text is not text else 0
    if "<think>" in bare_text:
        bare_text, thinks = _without_thoughts(bare_text), True
    bare_rest = {name: value for name, value in rest.items() if name not in _THINKING_FIELDS}
    if thinks or len(bare_rest) < len(rest):
        kind |= THINKS
    bare = _digest(bare_text.encode("utf-8", "surrogatepass"))
    return whole, plain, _digest(_sorted.encode(bare_rest), bare) if bare_rest else bare, kind, size


def _text(content: Any) -> tuple[str, bool]:
    """(what a message says, whether it has parts that are thoughts), without the billing line that is not rendered."""
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(BILLING_LINE) else content, False
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
            texts.append("" if text.startswith(BILLING_LINE) else text)
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


def extended(known: Outline, new: Outline) -> Outline:
    """`known` with the messages of `new` behind its own."""
    assert new.after == known.count
    return Outline(0, known.messages + new.messages, known.tools, new.flags)


# How a conversation differs from the one before ----------------------------------------------------------------------


def contents(outline: Outline, *, said: bool = False) -> Iterable[int]:
    """Its messages, in whatever place: conversations that have nothing to do with each other have none in common. With
    `said` without system prompts, which many conversations share."""
    bare, kinds = outline.messages[2::WORDS], outline.messages[3::WORDS]
    return compress(bare, bytes(kinds.tolist()).translate(_ROLES_OF)) if said else bare


def is_said(kind: int) -> bool:
    """Whether a message of this kind is no system prompt."""
    return kind & _ROLE != 0


def difference(old: Outline, new: Outline, share: float) -> tuple[How, int | None]:
    """(how `new` is another prompt than `old`, in which message), where their tokens part after this share of the old
    one's. Both are whole. Where no message, tool or flag tells, the template rendered the same otherwise: it dropped a
    thought, or another encoding was chosen."""
    before, now = old.messages, new.messages
    count = min(len(before), len(now)) // WORDS
    changed = _changed(before, now, count)
    if old.tools != new.tools:
        return "tools", None
    if changed:
        first = _at(before, changed, share)
        return _of_message(before, now, first), first
    if len(now) < len(before):
        return "truncated", count
    if old.flags != new.flags:
        return "template_flag", None
    kinds = before[3::WORDS]
    asked = max((i for i, kind in enumerate(kinds) if kind & _ROLE == 1), default=-1)
    thought = next((i for i, kind in enumerate(kinds) if i > asked and kind & THINKS), None)
    return ("re_encoded", None) if thought is None else ("thinking_dropped", thought)


def _changed(before: array[int], now: array[int], count: int) -> list[int]:
    """Of the first `count` messages, those that were sent otherwise."""
    last = WORDS * (count - 1)
    if count and before[:last] == now[:last]:  # nearly always
        return [count - 1] if before[last] != now[last] else []
    return [i for i in range(count) if before[WORDS * i] != now[WORDS * i]]


def _at(before: array[int], changed: list[int], share: float) -> int:
    """Of the messages that changed, the one where the tokens part: what a template drops anyway changes nothing."""
    if len(changed) == 1:
        return changed[0]
    sizes = before[4::WORDS]
    parting = (share - _TAIL) * sum(sizes)
    return next((i for i in changed if sum(sizes[: i + 1]) >= parting), changed[-1])


def _of_message(before: array[int], now: array[int], first: int) -> How:
    at = first * WORDS
    if now[at] in before[at + WORDS :: WORDS] or len(now) < len(before):
        return "truncated"
    kind, role = before[at + 3] | now[at + 3], now[at + 3] & _ROLE
    same = before[at + 2] == now[at + 2]
    if kind & BILLED and same:
        return "billing_line"
    if before[at + 1] == now[at + 1]:
        return "tool_arguments"
    if same and kind & THINKS:
        return "thinking_dropped"
    return "system_prompt" if role == 0 else "edited"


def answered(outline: Outline, message: int) -> How | None:
    """How the answer that stands at `message` may have been rendered otherwise than it was generated; None where none
    stands there."""
    at = message * WORDS + 3
    if at >= len(outline.messages) or outline.messages[at] & _ROLE != 2:
        return None
    kind = outline.messages[at]
    return "thinking_dropped" if kind & THINKS else "tool_arguments" if kind & CALLS else "re_encoded"
