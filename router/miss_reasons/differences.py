"""Classify how the messages of a prompt differ from those of the last prompt of its conversation. No I/O."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from router.prompting.outline import (
    FINGERPRINT_BYTES,
    FINGERPRINT_FIELDS,
    HAS_BILLING_LINE,
    HAS_THOUGHTS,
    HAS_TOOL_CALLS,
    ROLE_BITS,
    Outline,
)

SYSTEM, USER, ASSISTANT = 0, 1, 2
"""Roles of messages."""
_POSITION_TOLERANCE: Final = 0.1
"""Largest error of a message's position, as a share of the prompt, if it is estimated by characters."""

DifferenceKind = Literal[
    "billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments", "truncated",
    "edited", "re_encoded",
]  # fmt: skip


class MessageFingerprints(NamedTuple):
    """Digests of all messages of a chat: two messages are compared by their digests, so their text is not stored.

    Each field has one number for each message, in order.
    """

    sent_digests: array[int]
    """Digests of the messages as the client sent them."""
    json_digests: array[int]
    """Digests that are the same if only the JSON of tool arguments is written differently."""
    content_digests: array[int]
    """Digests without the reasoning and without billing lines."""
    kinds: array[int]
    """Role of each message, and facts such as HAS_TOOL_CALLS, as bits."""
    chars: array[int]
    """Length of each message in characters."""

    @property
    def message_count(self) -> int:
        return len(self.kinds)

    def get_role(self, index: int) -> int:
        """Return the role of one message."""
        return self.kinds[index] & ROLE_BITS


def unpack_fingerprints(outline: Outline, indexes: slice = slice(None)) -> MessageFingerprints:
    """Return the fingerprints of the messages of a chat, or only of those with these indexes."""
    start, stop, _ = indexes.indices(outline.message_count)
    numbers = array("I", outline.messages[start * FINGERPRINT_BYTES : stop * FINGERPRINT_BYTES])
    return MessageFingerprints(*[numbers[field::FINGERPRINT_FIELDS] for field in range(FINGERPRINT_FIELDS)])


def classify_difference(old: Outline, new: Outline, common_share: float) -> tuple[DifferenceKind, int | None]:
    """Return how two prompts of a conversation differ, and the index of the message where they do, or None.

    `common_share`: share of the old prompt's tokens with which the new prompt begins too. If no message differs, the
    chat template has dropped reasoning from an answer, or the same text was encoded to other tokens.
    """
    if old.tools != new.tools:
        return "tools", None
    old_messages, new_messages = unpack_fingerprints(old), unpack_fingerprints(new)
    digest_pairs = zip(old_messages.sent_digests, new_messages.sent_digests)
    changed_indexes = [index for index, (old_digest, new_digest) in enumerate(digest_pairs) if old_digest != new_digest]
    if changed_indexes:
        diverging_index = _find_diverging_message(old_messages, changed_indexes, common_share)
        return _classify_message_change(old_messages, new_messages, diverging_index), diverging_index
    if new_messages.message_count < old_messages.message_count:
        return "truncated", new_messages.message_count
    if old.options_digest != new.options_digest:
        return "template_flag", None
    reasoning_index = _find_droppable_reasoning(old_messages)
    if reasoning_index is not None:
        return "thinking_dropped", reasoning_index
    return "re_encoded", None


def is_side_request(old: Outline, new: Outline) -> bool:
    """Return whether `new` does not continue `old`, but is a request beside it, as agents make for titles.

    It has other tools, another system prompt, and no answer at the place of the answer to `old`.
    """
    if old.tools == new.tools or _find_system_prompt_digest(old) == _find_system_prompt_digest(new):
        return False
    return classify_answer_change(new, old.message_count) is None


def find_added_system_prompt(old: Outline, new: Outline) -> int | None:
    """Return the index of the first system prompt behind the messages of `old`; None if there is none."""
    added_messages = unpack_fingerprints(new, slice(old.message_count, None))
    added_indexes = range(added_messages.message_count)
    system_indexes = (old.message_count + index for index in added_indexes if added_messages.get_role(index) == SYSTEM)
    return next(system_indexes, None)


def classify_answer_change(outline: Outline, answer_index: int) -> DifferenceKind | None:
    """Return why a template may render an answer otherwise than the model wrote it.

    None if the message at `answer_index` is missing or is no answer.
    """
    answer = unpack_fingerprints(outline, slice(answer_index, answer_index + 1))
    if not answer.message_count or answer.get_role(0) != ASSISTANT:
        return None
    (kind,) = answer.kinds
    if kind & HAS_THOUGHTS:
        return "thinking_dropped"
    return "tool_arguments" if kind & HAS_TOOL_CALLS else "re_encoded"


def _find_system_prompt_digest(outline: Outline) -> int | None:
    """Return the content digest of the first message; None if it is no system prompt."""
    first_message = unpack_fingerprints(outline, slice(1))
    if not first_message.message_count or first_message.get_role(0) != SYSTEM:
        return None
    return first_message.content_digests[0]


def _find_droppable_reasoning(messages: MessageFingerprints) -> int | None:
    """Return the first message with reasoning behind the last user message; None if there is none.

    Templates keep the reasoning of a turn only until the next user message.
    """
    first_index = None
    for index in reversed(range(messages.message_count)):
        if messages.get_role(index) == USER:
            break
        if messages.kinds[index] & HAS_THOUGHTS:
            first_index = index
    return first_index


def _find_diverging_message(old_messages: MessageFingerprints, changed_indexes: list[int], common_share: float) -> int:
    """Return the changed message at which the tokens diverge.

    It may come after the first changed one, because a template may leave out the text of earlier messages. Characters
    tell about where it is: the messages before it have about `common_share` of them.
    """
    if len(changed_indexes) == 1:
        return changed_indexes[0]
    chars_until_end = list(accumulate(old_messages.chars))
    common_chars_min = (common_share - _POSITION_TOLERANCE) * chars_until_end[-1]
    for index in changed_indexes:
        if chars_until_end[index] >= common_chars_min:
            return index
    return changed_indexes[-1]


def _classify_message_change(
    old_messages: MessageFingerprints, new_messages: MessageFingerprints, index: int
) -> DifferenceKind:
    """Return what a client changed in the message at `index`, which is not the same in two prompts of a conversation.

    The digests of contents leave out billing lines and reasoning, those of JSON the spelling of tool arguments. So if
    they are equal, only that can have changed.
    """
    was_moved_up = new_messages.sent_digests[index] in old_messages.sent_digests[index + 1 :]
    if was_moved_up or new_messages.message_count < old_messages.message_count:
        return "truncated"  # messages before this one were removed, or some at the end
    kind = old_messages.kinds[index] | new_messages.kinds[index]
    is_same_content = old_messages.content_digests[index] == new_messages.content_digests[index]
    if is_same_content and kind & HAS_BILLING_LINE:
        return "billing_line"
    if old_messages.json_digests[index] == new_messages.json_digests[index]:
        return "tool_arguments"
    if is_same_content and kind & HAS_THOUGHTS:
        return "thinking_dropped"
    return "system_prompt" if new_messages.get_role(index) == SYSTEM else "edited"
