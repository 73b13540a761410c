"""Classify how the messages of a prompt differ from those of the last prompt of its conversation. No I/O."""

from __future__ import annotations

from struct import Struct
from typing import Final, Literal, NamedTuple

from router.prompting.chat_outline import (
    FINGERPRINT_FIELDS,
    HAS_BILLING_LINE,
    HAS_THOUGHTS,
    HAS_TOOL_CALLS,
    ROLE_BITS,
    Outline,
)

SYSTEM, USER, ASSISTANT = 0, 1, 2
"""Roles of messages."""
_FINGERPRINT_STRUCT: Final = Struct(f"={FINGERPRINT_FIELDS}I")
_POSITION_TOLERANCE: Final = 0.1
"""Largest error of a message's position, as a share of the prompt, if it is estimated by characters."""

DifferenceKind = Literal[
    "billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments", "truncated",
    "edited", "re_encoded",
]  # fmt: skip


class MessageFingerprint(NamedTuple):
    """Digests of one message of a chat. Equal digests mean equal text, so the text need not be stored."""

    sent_digest: int
    """Digest of the message as the client sent it."""
    json_digest: int
    """Digest that is the same if only the JSON of tool arguments is written differently."""
    content_digest: int
    """Digest without the reasoning and without billing lines."""
    kind: int
    """Role and further facts, as bits."""
    chars: int

    @property
    def role(self) -> int:
        return self.kind & ROLE_BITS


def unpack_fingerprints(outline: Outline) -> list[MessageFingerprint]:
    """Return the fingerprint of each message of a chat."""
    return [MessageFingerprint._make(fields) for fields in _FINGERPRINT_STRUCT.iter_unpack(outline.messages)]


def classify_difference(old: Outline, new: Outline, common_share: float) -> tuple[DifferenceKind, int | None]:
    """Return how `new` differs from `old`, and the index of the message that differs; None if it is no message.

    `common_share`: share of the old prompt's tokens with which the new prompt begins too. If the digests are equal,
    the template has dropped reasoning, or the same text was encoded to other tokens.
    """
    if old.tools != new.tools:
        return "tools", None
    old_messages, new_messages = unpack_fingerprints(old), unpack_fingerprints(new)
    changed_indexes = [
        index
        for index, (old_message, new_message) in enumerate(zip(old_messages, new_messages))
        if old_message.sent_digest != new_message.sent_digest
    ]
    if changed_indexes:
        diverging_index = _find_diverging_message(old_messages, changed_indexes, common_share)
        return _classify_message_change(old_messages, new_messages, diverging_index), diverging_index
    if len(new_messages) < len(old_messages):
        return "truncated", len(new_messages)
    if old.options_digest != new.options_digest:
        return "template_flag", None
    thinking_index = _find_droppable_thoughts(old_messages)
    return ("re_encoded", None) if thinking_index is None else ("thinking_dropped", thinking_index)


def is_side_request(old: Outline, new: Outline) -> bool:
    """Return whether `new` does not continue `old`, but is a request beside it, as agents make for titles.

    It has other tools, another system prompt, and no answer at the place of the answer to `old`.
    """
    if old.tools == new.tools or _find_system_prompt_digest(old) == _find_system_prompt_digest(new):
        return False
    return classify_answer_change(new, old.message_count) is None


def find_added_system_prompt(old: Outline, new: Outline) -> int | None:
    """Return the index of the first system prompt behind the messages of `old`; None if there is none."""
    new_messages = unpack_fingerprints(new)
    added_indexes = range(old.message_count, len(new_messages))
    return next((index for index in added_indexes if new_messages[index].role == SYSTEM), None)


def classify_answer_change(outline: Outline, answer_index: int) -> DifferenceKind | None:
    """Return why a template may render an answer otherwise than the model wrote it.

    None if the message at `answer_index` is missing or is no answer.
    """
    messages = unpack_fingerprints(outline)
    if answer_index >= len(messages) or messages[answer_index].role != ASSISTANT:
        return None
    kind = messages[answer_index].kind
    if kind & HAS_THOUGHTS:
        return "thinking_dropped"
    return "tool_arguments" if kind & HAS_TOOL_CALLS else "re_encoded"


def _find_system_prompt_digest(outline: Outline) -> int | None:
    """Return the content digest of the first message; None if it is no system prompt."""
    first_messages = unpack_fingerprints(outline)[:1]
    return next((message.content_digest for message in first_messages if message.role == SYSTEM), None)


def _find_droppable_thoughts(messages: list[MessageFingerprint]) -> int | None:
    """Return the first message with reasoning behind the last user message; None if there is none.

    Templates keep the reasoning of a turn only until the next user message.
    """
    last_user_index = max((index for index, message in enumerate(messages) if message.role == USER), default=-1)
    for index, message in enumerate(messages):
        if index > last_user_index and message.kind & HAS_THOUGHTS:
            return index
    return None


def _find_diverging_message(
    old_messages: list[MessageFingerprint], changed_indexes: list[int], common_share: float
) -> int:
    """Return the changed message at which the tokens diverge.

    It may come after the first changed one, because a template may leave out the text of earlier messages. Characters
    tell about where it is: the messages before it have about `common_share` of them.
    """
    if len(changed_indexes) == 1:
        return changed_indexes[0]
    total_chars = sum(message.chars for message in old_messages)
    common_chars_min = (common_share - _POSITION_TOLERANCE) * total_chars
    for index in changed_indexes:
        if sum(message.chars for message in old_messages[: index + 1]) >= common_chars_min:
            return index
    return changed_indexes[-1]


def _classify_message_change(
    old_messages: list[MessageFingerprint], new_messages: list[MessageFingerprint], index: int
) -> DifferenceKind:
    """Return how the message at `index`, which is not the same in both chats, was changed."""
    old_message, new_message = old_messages[index], new_messages[index]
    is_later_message = any(later.sent_digest == new_message.sent_digest for later in old_messages[index + 1 :])
    if is_later_message or len(new_messages) < len(old_messages):
        return "truncated"
    kind = old_message.kind | new_message.kind
    is_same_content = old_message.content_digest == new_message.content_digest
    if is_same_content and kind & HAS_BILLING_LINE:
        return "billing_line"
    if old_message.json_digest == new_message.json_digest:
        return "tool_arguments"
    if is_same_content and kind & HAS_THOUGHTS:
        return "thinking_dropped"
    return "system_prompt" if new_message.role == SYSTEM else "edited"
