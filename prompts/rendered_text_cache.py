"""What a chat template writes around the texts of messages, kept: a chat of known roles is put together of it.

Only for templates that copy texts (prompts/template_analysis.py), and messages of a role and a text that such a
template would copy. Each skeleton was compared with what the template made of the chat that it was made for. Invariant:
the text is the template's own, or None.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

MESSAGES_MAX = 16
"""Of a chat: of longer ones hardly two have the same roles one after the other."""
_ROLE_CHARS_MAX = 32
_CHARS_MAX = 65_536
"""Of a skeleton: the rest is the template's and the tools'."""
_KEPT_MAX = 64
"""Skeletons; when there are more, all are forgotten."""
_LEFT, _RIGHT = "\x1e", "\x1f"
"""White space that no template writes, around what stands for a text: gone where the template strips it."""
Message = dict[str, Any]
Key = tuple[object, ...]


class _PromptSkeleton:
    """`before`, then for each of `places` the text of that message, stripped or not, and what follows it."""

    def __init__(self, before: str, places: list[tuple[int, bool, bool, str]]) -> None:
        self._before = before
        self._places = places

    def fill(self, texts: Sequence[str]) -> str:
        parts = [self._before]
        for number, left, right, after in self._places:
            text = texts[number]
            if left or right:
                text = text.strip() if left and right else text.lstrip() if left else text.rstrip()
            parts.append(text)
            parts.append(after)
        return "".join(parts)


class RenderedTextCache:
    """Of one template with its variables."""

    def __init__(self, lacks: Sequence[str], edges: str, *, parts: bool = False) -> None:
        """`lacks`, `edges`: what texts must be like (prompts/template_analysis.py:Copies). `parts`: contents are lists
        of parts, here of one."""
        self._form = list if parts else str
        self._lacks = tuple(lacks)
        self._edges = edges
        self._kept: dict[Key, _PromptSkeleton | None] = {}

    def key(self, messages: Sequence[Message], told: object = ()) -> Key | None:
        """What tells the chat from those that have another skeleton; None where it has none. `told`: what else the
        template is told."""
        texts = self._texts(messages)
        return None if texts is None else (told, *[message["role"] for message in messages])

    def known(self, messages: Sequence[Message], told: object = ()) -> str | None:
        """The text of a chat as it was sent, where its contents are strings and it has a kept skeleton."""
        texts = self._texts(messages) if self._form is str else None
        if texts is None:
            return None
        skeleton = self._kept.get((told, *[message["role"] for message in messages]))
        return None if skeleton is None else skeleton.fill(texts)

    def _texts(self, messages: Sequence[Message]) -> list[str] | None:
        """What each message of a chat says that may have a skeleton; None of another."""
        if len(messages) > MESSAGES_MAX:
            return None
        texts: list[str] = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if len(message) != 2 or type(role) is not str or type(content) is not self._form:
                return None
            text = content if type(content) is str else _text(message)
            if text is None or len(role) > _ROLE_CHARS_MAX or not self._copied(text):
                return None
            texts.append(text)
        return texts

    def _copied(self, text: str) -> bool:
        if not text or text.isspace():
            return False
        for lacked in self._lacks:
            if lacked in text:
                return False
        if not self._edges:
            return True
        bare = text.strip()
        return not any(char in self._edges for char in (text[0], text[-1], bare[0], bare[-1]))

    def text(self, key: Key, messages: Sequence[Message], render: Callable[[list[Message]], str]) -> str:
        """What `render`, which is the template, makes of the chat. Raises what that raises."""
        skeleton = self._kept.get(key)
        texts = [_text(message) or "" for message in messages]
        if skeleton is not None:
            return skeleton.fill(texts)
        text = render(list(messages))
        if key not in self._kept and len(text) - sum(map(len, texts)) <= _CHARS_MAX:
            if len(self._kept) >= _KEPT_MAX:
                self._kept = {}
            self._kept[key] = None
            made = self._made(messages, render)
            self._kept[key] = made if made is not None and made.fill(texts) == text else None
        return text

    def _made(self, messages: Sequence[Message], render: Callable[[list[Message]], str]) -> _PromptSkeleton | None:
        """None where it cannot be told what stands where."""
        names = [f"x{number}x{secrets.token_hex(16)}x" for number in range(len(messages))]
        stands = [_LEFT + name + _RIGHT for name in names]
        if not all(map(self._copied, stands)):
            return None
        shown: list[Message] = [
            {"role": m["role"], "content": text if self._form is str else [{"type": "text", "text": text}]}
            for m, text in zip(messages, stands)
        ]
        parts = re.split(f"({_LEFT}?)({'|'.join(names)})({_RIGHT}?)", render(shown))
        places = [
            (names.index(name), not left, not right, after)
            for left, name, right, after in zip(parts[1::4], parts[2::4], parts[3::4], parts[4::4])
        ]
        made = _PromptSkeleton(parts[0], places)
        return None if any(edge in part for edge in (_LEFT, _RIGHT) for part in (parts[0], *parts[4::4])) else made


def _text(message: Message) -> str | None:
    """All that it says; None where that is not one text."""
    content: str | list[Message] = message["content"]
    if type(content) is str:
        return content
    only: Message = content[0] if len(content) == 1 else {}  # type: ignore[assignment]
    text = only.get("text")
    return text if len(only) == 2 and only.get("type") == "text" and type(text) is str else None
