"""What a chat template writes around the texts of messages, kept: a chat of known roles is put together of it.

Only for templates that copy texts (prompts/template_analysis.py), and messages of a role and a text that such a
template would copy. Each skeleton was compared with what the template made of the chat that it was made for. Invariant:
the text is the template's own, or None.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MESSAGES_MAX = 16
"""Of a chat: of longer ones hardly two have the same roles one after the other."""
_ROLE_CHARS_MAX = 32
_TEMPLATE_CHARS_MAX = 65_536
"""Of a skeleton: the rest is the template's and the tools'."""
SKELETONS_MAX = 64
"""Skeletons; when there are more, all are forgotten."""
_LEFT_MARK, _RIGHT_MARK = "\x1e", "\x1f"
"""White space that no template writes, around what stands for a text: gone where the template strips it."""
Message = dict[str, Any]
SkeletonKey = tuple[object, ...]


class _TextSlot(NamedTuple):
    """Place of a message's text in a skeleton."""

    message_index: int
    strips_left: bool
    strips_right: bool
    text_after: str


class _PromptSkeleton:
    """`before`, then for each of `slots` the text of that message, stripped or not, and what follows it."""

    def __init__(self, before: str, slots: list[_TextSlot]) -> None:
        self._before = before
        self._slots = slots

    def fill(self, texts: Sequence[str]) -> str:
        parts = [self._before]
        for message_index, strips_left, strips_right, text_after in self._slots:
            text = texts[message_index]
            if strips_left or strips_right:
                text = text.strip() if strips_left and strips_right else text.lstrip() if strips_left else text.rstrip()
            parts.append(text)
            parts.append(text_after)
        return "".join(parts)


class RenderedTextCache:
    """Of one template with its variables."""

    def __init__(self, forbidden_texts: Sequence[str], forbidden_edges: str, *, content_is_parts: bool = False) -> None:
        """`forbidden_texts`, `forbidden_edges`: see prompts/template_analysis.py:CopyConditions. `content_is_parts`:
        contents are lists of parts, here of one."""
        self._content_type = list if content_is_parts else str
        self._forbidden_texts = tuple(forbidden_texts)
        self._forbidden_edges = forbidden_edges
        self._skeletons: dict[SkeletonKey, _PromptSkeleton | None] = {}

    def make_key(self, messages: Sequence[Message], variables_key: object = ()) -> SkeletonKey | None:
        """What tells the chat from those that have another skeleton; None where it has none. `variables_key`: the other
        variables of the template."""
        texts = self._read_message_texts(messages)
        return None if texts is None else (variables_key, *[message["role"] for message in messages])

    def get_cached_text(self, messages: Sequence[Message], variables_key: object = ()) -> str | None:
        """The text of a chat as it was sent, where its contents are strings and it has a kept skeleton."""
        texts = self._read_message_texts(messages) if self._content_type is str else None
        if texts is None:
            return None
        skeleton = self._skeletons.get((variables_key, *[message["role"] for message in messages]))
        return None if skeleton is None else skeleton.fill(texts)

    def _read_message_texts(self, messages: Sequence[Message]) -> list[str] | None:
        """What each message of a chat says that may have a skeleton; None of another."""
        if len(messages) > MESSAGES_MAX:
            return None
        texts: list[str] = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if len(message) != 2 or type(role) is not str or type(content) is not self._content_type:
                return None
            text = content if type(content) is str else _get_single_text(message)
            if text is None or len(role) > _ROLE_CHARS_MAX or not self._is_copied_verbatim(text):
                return None
            texts.append(text)
        return texts

    def _is_copied_verbatim(self, text: str) -> bool:
        if not text or text.isspace():
            return False
        for forbidden_text in self._forbidden_texts:
            if forbidden_text in text:
                return False
        if not self._forbidden_edges:
            return True
        stripped_text = text.strip()
        return not any(
            char in self._forbidden_edges for char in (text[0], text[-1], stripped_text[0], stripped_text[-1])
        )

    def render_with_skeleton(
        self, skeleton_key: SkeletonKey, messages: Sequence[Message], render: Callable[[list[Message]], str]
    ) -> str:
        """What `render`, which is the template, makes of the chat. Raises what that raises."""
        skeleton = self._skeletons.get(skeleton_key)
        texts = [_get_single_text(message) or "" for message in messages]
        if skeleton is not None:
            return skeleton.fill(texts)
        text = render(list(messages))
        if skeleton_key not in self._skeletons and len(text) - sum(map(len, texts)) <= _TEMPLATE_CHARS_MAX:
            if len(self._skeletons) >= SKELETONS_MAX:
                self._skeletons = {}
            self._skeletons[skeleton_key] = None
            new_skeleton = self._build_skeleton(messages, render)
            self._skeletons[skeleton_key] = (
                new_skeleton if new_skeleton is not None and new_skeleton.fill(texts) == text else None
            )
        return text

    def _build_skeleton(
        self, messages: Sequence[Message], render: Callable[[list[Message]], str]
    ) -> _PromptSkeleton | None:
        """None where it cannot be told what stands where."""
        placeholders = [f"x{number}x{secrets.token_hex(16)}x" for number in range(len(messages))]
        marked_texts = [_LEFT_MARK + placeholder + _RIGHT_MARK for placeholder in placeholders]
        if not all(map(self._is_copied_verbatim, marked_texts)):
            return None
        marked_messages: list[Message] = [
            {
                "role": message["role"],
                "content": text if self._content_type is str else [{"type": "text", "text": text}],
            }
            for message, text in zip(messages, marked_texts)
        ]
        rendered_parts = re.split(f"({_LEFT_MARK}?)({'|'.join(placeholders)})({_RIGHT_MARK}?)", render(marked_messages))
        slots = [
            _TextSlot(placeholders.index(placeholder), not left_mark, not right_mark, after)
            for left_mark, placeholder, right_mark, after in zip(
                rendered_parts[1::4], rendered_parts[2::4], rendered_parts[3::4], rendered_parts[4::4]
            )
        ]
        skeleton = _PromptSkeleton(rendered_parts[0], slots)
        return (
            None
            if any(
                mark in part
                for mark in (_LEFT_MARK, _RIGHT_MARK)
                for part in (rendered_parts[0], *rendered_parts[4::4])
            )
            else skeleton
        )


def _get_single_text(message: Message) -> str | None:
    """All that it says; None where that is not one text."""
    content: str | list[Message] = message["content"]
    if type(content) is str:
        return content
    part: Message = content[0] if len(content) == 1 else {}  # type: ignore[assignment]
    text = part.get("text")
    return text if len(part) == 2 and part.get("type") == "text" and type(text) is str else None
