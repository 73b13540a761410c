"""Classify how the messages of a prompt differ from those of the last prompt of its conversation. No I/O."""

from __future__ import annotations

from itertools import accumulate
from typing import Final, Literal, NamedTuple

from router.prompting.outline import HAS_BILLING_LINE, HAS_THOUGHTS, HAS_TOOL_CALLS, Outline

SYSTEM, USER, ASSISTANT = 0, 1, 2
_POSITION_TOLERANCE: Final = 0.1
"""Largest error of a message's position, as a share of the prompt, if it is estimated by characters."""

DifferenceKind = Literal[
    "billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments", "truncated",
    "edited", "re_encoded",
]  # fmt: skip


class PromptDifference(NamedTuple):
    """How a prompt differs from the one before in its conversation: ("edited", 3) if its fourth message was changed."""

    kind: DifferenceKind
    message_index: int | None = None
    """Index of the message that differs; None if no message does."""


def classify_difference(old: Outline, new: Outline, common_share: float) -> PromptDifference:
    """Return how two prompts of a conversation differ: in a message, or in the tools and other template inputs.

    `common_share`: share of the old prompt's tokens with which the new prompt begins too. If no message differs, the
    chat template has dropped reasoning from an answer, or the same text was encoded to other tokens.
    """
    if old.tools_digest != new.tools_digest:
        return PromptDifference("tools")
    digest_pairs = zip(old.messages.sent_digests, new.messages.sent_digests)
    changed_indexes = [index for index, (old_digest, new_digest) in enumerate(digest_pairs) if old_digest != new_digest]
    if changed_indexes:
        diverging_index = _find_diverging_message(old, changed_indexes, common_share)
        return PromptDifference(_classify_message_change(old, new, diverging_index), diverging_index)
    if new.message_count < old.message_count:
        return PromptDifference("truncated", new.message_count)
    if old.options_digest != new.options_digest:
        return PromptDifference("template_flag")
    reasoning_index = _find_droppable_reasoning(old)
    if reasoning_index is not None:
        return PromptDifference("thinking_dropped", reasoning_index)
    return PromptDifference("re_encoded")


def is_side_request(old: Outline, new: Outline) -> bool:
    """Return whether `new` does not continue `old`, but is a request beside it, as agents make for titles.

    It has other tools, another system prompt, and no answer at the place of the answer to `old`.
    """
    if old.tools_digest == new.tools_digest or _find_system_prompt_digest(old) == _find_system_prompt_digest(new):
        return False
    return classify_answer_change(new, old.message_count) is None


def find_added_system_prompt(old: Outline, new: Outline) -> int | None:
    """Return the index of the first system prompt behind the messages of `old`; None if there is none."""
    added_indexes = range(old.message_count, new.message_count)
    return next((index for index in added_indexes if new.get_role(index) == SYSTEM), None)


def classify_answer_change(outline: Outline, answer_index: int) -> DifferenceKind | None:
    """Return why a template may render an answer otherwise than the model wrote it; None if no answer is there."""
    if answer_index >= outline.message_count or outline.get_role(answer_index) != ASSISTANT:
        return None
    kind = outline.messages.kinds[answer_index]
    if kind & HAS_THOUGHTS:
        return "thinking_dropped"
    return "tool_arguments" if kind & HAS_TOOL_CALLS else "re_encoded"


def _find_system_prompt_digest(outline: Outline) -> int | None:
    """Return the content digest of the first message; None if it is no system prompt."""
    is_system_first = outline.message_count > 0 and outline.get_role(0) == SYSTEM
    return outline.messages.content_digests[0] if is_system_first else None


def _find_droppable_reasoning(outline: Outline) -> int | None:
    """Return the first message with reasoning behind the last user message; None if there is none.

    Templates keep the reasoning of a turn only until the next user message.
    """
    first_index = None
    for index in reversed(range(outline.message_count)):
        if outline.get_role(index) == USER:
            break
        if outline.messages.kinds[index] & HAS_THOUGHTS:
            first_index = index
    return first_index


def _find_diverging_message(old: Outline, changed_indexes: list[int], common_share: float) -> int:
    """Return the changed message at which the tokens diverge.

    It may come after the first changed one, because a template may leave out the text of earlier messages. Characters
    tell about where it is: the messages before it have about `common_share` of them.
    """
    if len(changed_indexes) == 1:
        return changed_indexes[0]
    chars_until_end = list(accumulate(old.messages.chars))
    common_chars_min = (common_share - _POSITION_TOLERANCE) * chars_until_end[-1]
    for index in changed_indexes:
        if chars_until_end[index] >= common_chars_min:
            return index
    return changed_indexes[-1]


def _classify_message_change(old: Outline, new: Outline, index: int) -> DifferenceKind:
    """Return what a client changed in the message at `index`, which is not the same in two prompts of a conversation.

    The digests of contents leave out billing lines and reasoning, those of JSON the spelling of tool arguments. So if
    they are equal, only that can have changed.
    """
    was_moved_up = new.messages.sent_digests[index] in old.messages.sent_digests[index + 1 :]
    if was_moved_up or new.message_count < old.message_count:
        return "truncated"  # messages before this one were removed, or some at the end
    kind = old.messages.kinds[index] | new.messages.kinds[index]
    is_same_content = old.messages.content_digests[index] == new.messages.content_digests[index]
    if is_same_content and kind & HAS_BILLING_LINE:
        return "billing_line"
    if old.messages.json_digests[index] == new.messages.json_digests[index]:
        return "tool_arguments"
    if is_same_content and kind & HAS_THOUGHTS:
        return "thinking_dropped"
    return "system_prompt" if new.get_role(index) == SYSTEM else "edited"
