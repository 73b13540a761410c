"""Classify how the messages of a prompt differ from those of the last prompt of its conversation. No I/O."""

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
"""Largest error of a message's position, as a share of the prompt, if it is estimated by characters."""

DifferenceKind = Literal[
    "billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments", "truncated",
    "edited", "re_encoded",
]  # fmt: skip


def unpack_words(outline: Outline) -> array[int]:
    """Return the fingerprints of the messages, FINGERPRINT_FIELDS numbers each."""
    return array("I", outline.messages)


def select_message_digests(outline: Outline, *, without_system: bool = False) -> Iterable[int]:
    """Return the digests of the messages. Unrelated conversations have no digest in common.

    `without_system`: leave out system prompts, which many conversations share.
    """
    words = unpack_words(outline)
    digests, kinds = words[2::FINGERPRINT_FIELDS], words[3::FINGERPRINT_FIELDS]
    return compress(digests, bytes(kinds.tolist()).translate(_ROLE_BY_KIND)) if without_system else digests


def is_dialogue(kind: int) -> bool:
    """Return whether a message of this kind is no system prompt."""
    return kind & ROLE_BITS != 0


def classify_difference(old: Outline, new: Outline, share: float) -> tuple[DifferenceKind, int | None]:
    """Return how `new` differs from `old`, and the index of the message that differs.

    `share`: share of the old prompt's tokens that both begin with. If no message, tool or flag differs, the template
    has dropped reasoning, or the same text was encoded to other tokens.
    """
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
    """Return whether `new` does not continue `old`, but is a request beside it, as agents make for titles.

    It has other tools, another system prompt, and no answer at the place of the answer to `old`.
    """
    if old.tools == new.tools or _find_system_prompt_digest(old) == _find_system_prompt_digest(new):
        return False
    return classify_answer_change(new, old.message_count) is None


def find_added_system_prompt(old: Outline, new: Outline) -> int | None:
    """Return the index of the first system prompt behind the messages of `old`; None if there is none."""
    kinds = unpack_words(new)[3::FINGERPRINT_FIELDS]
    return next((i for i in range(old.message_count, len(kinds)) if kinds[i] & ROLE_BITS == 0), None)


def _find_system_prompt_digest(outline: Outline) -> int | None:
    """Return the digest of the first message without billing lines; None if it is no system prompt."""
    words = unpack_words(outline)
    return words[2] if words and words[3] & ROLE_BITS == 0 else None


def _find_changed_messages(old_words: array[int], new_words: array[int], count: int) -> list[int]:
    """Return the indexes of the messages that differ, among the first `count`."""
    last_offset = FINGERPRINT_FIELDS * (count - 1)
    if count and old_words[:last_offset] == new_words[:last_offset]:  # nearly always
        return [count - 1] if old_words[last_offset] != new_words[last_offset] else []
    return [i for i in range(count) if old_words[FINGERPRINT_FIELDS * i] != new_words[FINGERPRINT_FIELDS * i]]


def _find_diverging_message(old_words: array[int], changed_messages: list[int], share: float) -> int:
    """Return the changed message at which the tokens diverge: a template may drop the text of earlier ones."""
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
    """Return why the answer at index `message` may be rendered otherwise than it was generated; None for no answer."""
    words, offset = unpack_words(outline), message * FINGERPRINT_FIELDS + 3
    if offset >= len(words) or words[offset] & ROLE_BITS != 2:
        return None
    kind = words[offset]
    return "thinking_dropped" if kind & HAS_THOUGHTS else "tool_arguments" if kind & HAS_TOOL_CALLS else "re_encoded"
