"""How the messages of a conversation differ from those of the prompt before. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import compress
from typing import Literal

from router.prompting.chat_outline import (
    FINGERPRINT_FIELDS,
    HAS_BILLING_LINE,
    HAS_THOUGHTS,
    HAS_TOOL_CALLS,
    ROLE_BITS,
    Outline,
)

_ROLE_BY_KIND = bytes([kind & ROLE_BITS for kind in range(256)])
_POSITION_TOLERANCE = 0.1
"""A message may begin so much of the prompt earlier or later than its characters say."""

DifferenceKind = Literal[
    "billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments", "truncated",
    "edited", "re_encoded",
]  # fmt: skip


def unpack_words(outline: Outline) -> array[int]:
    """WORDS of each message."""
    return array("I", outline.messages)


def select_message_digests(outline: Outline, *, without_system: bool = False) -> Iterable[int]:
    """Its messages, in whatever place: conversations that have nothing to do with each other have none in common. With
    `without_system`, without system prompts, which many conversations share."""
    words = unpack_words(outline)
    digests, kinds = words[2::FINGERPRINT_FIELDS], words[3::FINGERPRINT_FIELDS]
    return compress(digests, bytes(kinds.tolist()).translate(_ROLE_BY_KIND)) if without_system else digests


def is_dialogue(kind: int) -> bool:
    """Whether a message of this kind is no system prompt."""
    return kind & ROLE_BITS != 0


def classify_difference(old: Outline, new: Outline, share: float) -> tuple[DifferenceKind, int | None]:
    """(how `new` is another prompt than `old`, in which message), where their tokens part after this share of the old
    one's. Where no message, tool or flag tells, the template rendered the same otherwise: it dropped a
    thought, or another encoding was chosen."""
    old_words, new_words = unpack_words(old), unpack_words(new)
    common_message_count = min(len(old_words), len(new_words)) // FINGERPRINT_FIELDS
    changed_messages = _find_changed_messages(old_words, new_words, common_message_count)
    if old.tools != new.tools:
        return "tools", None
    if changed_messages:
        message_index = _find_diverging_message(old_words, changed_messages, share)
        return _classify_message_change(old_words, new_words, message_index), message_index
    if len(new_words) < len(old_words):
        return "truncated", common_message_count
    if old.options_digest != new.options_digest:
        return "template_flag", None
    kinds = old_words[3::FINGERPRINT_FIELDS]
    last_user_message_index = max((i for i, kind in enumerate(kinds) if kind & ROLE_BITS == 1), default=-1)
    thinking_message_index = next(
        (i for i, kind in enumerate(kinds) if i > last_user_message_index and kind & HAS_THOUGHTS), None
    )
    return ("re_encoded", None) if thinking_message_index is None else ("thinking_dropped", thinking_message_index)


def is_side_request(old: Outline, new: Outline) -> bool:
    """Whether `new` was asked beside the conversation of `old`, as agents ask for titles, and does not go on from it:
    with other tools, under another system prompt, and without an answer where the one to `old` would stand."""
    if old.tools == new.tools or _find_system_prompt_digest(old) == _find_system_prompt_digest(new):
        return False
    return classify_answer_change(new, old.message_count) is None


def find_added_system_prompt(old: Outline, new: Outline) -> int | None:
    """The first message behind those of `old` that is a system prompt; None where there is none."""
    kinds = unpack_words(new)[3::FINGERPRINT_FIELDS]
    return next((i for i in range(old.message_count, len(kinds)) if kinds[i] & ROLE_BITS == 0), None)


def _find_system_prompt_digest(outline: Outline) -> int | None:
    """Digest of the first message without billing lines, if that is a system prompt."""
    words = unpack_words(outline)
    return words[2] if words and words[3] & ROLE_BITS == 0 else None


def _find_changed_messages(old_words: array[int], new_words: array[int], count: int) -> list[int]:
    """Of the first `count` messages, those that were sent otherwise."""
    last_offset = FINGERPRINT_FIELDS * (count - 1)
    if count and old_words[:last_offset] == new_words[:last_offset]:  # nearly always
        return [count - 1] if old_words[last_offset] != new_words[last_offset] else []
    return [i for i in range(count) if old_words[FINGERPRINT_FIELDS * i] != new_words[FINGERPRINT_FIELDS * i]]


def _find_diverging_message(old_words: array[int], changed_messages: list[int], share: float) -> int:
    """Of the messages that changed, the one where the tokens part: what a template drops anyway changes nothing."""
    if len(changed_messages) == 1:
        return changed_messages[0]
    sizes = old_words[4::FINGERPRINT_FIELDS]
    divergence = (share - _POSITION_TOLERANCE) * sum(sizes)
    return next((i for i in changed_messages if sum(sizes[: i + 1]) >= divergence), changed_messages[-1])


def _classify_message_change(old_words: array[int], new_words: array[int], message: int) -> DifferenceKind:
    offset = message * FINGERPRINT_FIELDS
    if new_words[offset] in old_words[offset + FINGERPRINT_FIELDS :: FINGERPRINT_FIELDS] or len(new_words) < len(
        old_words
    ):
        return "truncated"
    kind, role = old_words[offset + 3] | new_words[offset + 3], new_words[offset + 3] & ROLE_BITS
    is_same_content = old_words[offset + 2] == new_words[offset + 2]
    if kind & HAS_BILLING_LINE and is_same_content:
        return "billing_line"
    if old_words[offset + 1] == new_words[offset + 1]:
        return "tool_arguments"
    if is_same_content and kind & HAS_THOUGHTS:
        return "thinking_dropped"
    return "system_prompt" if role == 0 else "edited"


def classify_answer_change(outline: Outline, message: int) -> DifferenceKind | None:
    """How the answer that stands at `message` may have been rendered otherwise than it was generated; None where none
    stands there."""
    words, offset = unpack_words(outline), message * FINGERPRINT_FIELDS + 3
    if offset >= len(words) or words[offset] & ROLE_BITS != 2:
        return None
    kind = words[offset]
    return "thinking_dropped" if kind & HAS_THOUGHTS else "tool_arguments" if kind & HAS_TOOL_CALLS else "re_encoded"
