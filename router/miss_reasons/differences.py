"""How the messages of a conversation differ from those of the prompt before. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import compress
from typing import Literal

from router.prompting.outlined import BILLED, CALLS, ROLE, THINKS, WORDS, Outline

_ROLE_BY_KIND = bytes([kind & ROLE for kind in range(256)])
_POSITION_TOLERANCE = 0.1
"""A message may begin so much of the prompt earlier or later than its characters say."""

DifferenceKind = Literal[
    "billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments", "truncated",
    "edited", "re_encoded",
]  # fmt: skip


def unpack_words(outline: Outline) -> array[int]:
    """WORDS of each message."""
    return array("I", outline.messages)


def message_digests(outline: Outline, *, said: bool = False) -> Iterable[int]:
    """Its messages, in whatever place: conversations that have nothing to do with each other have none in common. With
    `said` without system prompts, which many conversations share."""
    words = unpack_words(outline)
    bare, kinds = words[2::WORDS], words[3::WORDS]
    return compress(bare, bytes(kinds.tolist()).translate(_ROLE_BY_KIND)) if said else bare


def is_dialogue(kind: int) -> bool:
    """Whether a message of this kind is no system prompt."""
    return kind & ROLE != 0


def classify_difference(old: Outline, new: Outline, share: float) -> tuple[DifferenceKind, int | None]:
    """(how `new` is another prompt than `old`, in which message), where their tokens part after this share of the old
    one's. Where no message, tool or flag tells, the template rendered the same otherwise: it dropped a
    thought, or another encoding was chosen."""
    before, now = unpack_words(old), unpack_words(new)
    count = min(len(before), len(now)) // WORDS
    changed = _changed_messages(before, now, count)
    if old.tools != new.tools:
        return "tools", None
    if changed:
        first = _diverging_message(before, changed, share)
        return _classify_message_change(before, now, first), first
    if len(now) < len(before):
        return "truncated", count
    if old.flags != new.flags:
        return "template_flag", None
    kinds = before[3::WORDS]
    asked = max((i for i, kind in enumerate(kinds) if kind & ROLE == 1), default=-1)
    thought = next((i for i, kind in enumerate(kinds) if i > asked and kind & THINKS), None)
    return ("re_encoded", None) if thought is None else ("thinking_dropped", thought)


def is_side_request(old: Outline, new: Outline) -> bool:
    """Whether `new` was asked beside the conversation of `old`, as agents ask for titles, and does not go on from it:
    with other tools, under another system prompt, and without an answer where the one to `old` would stand."""
    if old.tools == new.tools or _system_prompt_digest(old) == _system_prompt_digest(new):
        return False
    return classify_answer_change(new, old.total) is None


def find_added_system_prompt(old: Outline, new: Outline) -> int | None:
    """The first message behind those of `old` that is a system prompt; None where there is none."""
    kinds = unpack_words(new)[3::WORDS]
    return next((at for at in range(old.total, len(kinds)) if kinds[at] & ROLE == 0), None)


def _system_prompt_digest(outline: Outline) -> int | None:
    """Digest of the first message without billing lines, if that is a system prompt."""
    words = unpack_words(outline)
    return words[2] if words and words[3] & ROLE == 0 else None


def _changed_messages(before: array[int], now: array[int], count: int) -> list[int]:
    """Of the first `count` messages, those that were sent otherwise."""
    last = WORDS * (count - 1)
    if count and before[:last] == now[:last]:  # nearly always
        return [count - 1] if before[last] != now[last] else []
    return [i for i in range(count) if before[WORDS * i] != now[WORDS * i]]


def _diverging_message(before: array[int], changed: list[int], share: float) -> int:
    """Of the messages that changed, the one where the tokens part: what a template drops anyway changes nothing."""
    if len(changed) == 1:
        return changed[0]
    sizes = before[4::WORDS]
    parting = (share - _POSITION_TOLERANCE) * sum(sizes)
    return next((i for i in changed if sum(sizes[: i + 1]) >= parting), changed[-1])


def _classify_message_change(before: array[int], now: array[int], first: int) -> DifferenceKind:
    at = first * WORDS
    if now[at] in before[at + WORDS :: WORDS] or len(now) < len(before):
        return "truncated"
    kind, role = before[at + 3] | now[at + 3], now[at + 3] & ROLE
    same = before[at + 2] == now[at + 2]
    if kind & BILLED and same:
        return "billing_line"
    if before[at + 1] == now[at + 1]:
        return "tool_arguments"
    if same and kind & THINKS:
        return "thinking_dropped"
    return "system_prompt" if role == 0 else "edited"


def classify_answer_change(outline: Outline, message: int) -> DifferenceKind | None:
    """How the answer that stands at `message` may have been rendered otherwise than it was generated; None where none
    stands there."""
    words, at = unpack_words(outline), message * WORDS + 3
    if at >= len(words) or words[at] & ROLE != 2:
        return None
    kind = words[at]
    return "thinking_dropped" if kind & THINKS else "tool_arguments" if kind & CALLS else "re_encoded"
