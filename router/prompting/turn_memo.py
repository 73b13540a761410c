"""Memo of what a template writes around new messages that are a role and a text, for a known stand-in before them.

Rendering a few messages by Jinja takes 10 to 80 us, putting their texts into what was written before takes one. Only
texts are taken that a template has no reason to change: not empty, without white space at their edges, and without
what it looks for in texts. Each entry is compared with the template's own text when it is made; that others are right
too is tried out and checked as everything else (router/prompting/template_trial.py, conversation_reader.py).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from prompts.chat_rendering import BILLING_LINE
from prompts.schemas import Message
from router.prompting.stand_in import StandIn

ENTRIES_MAX = 1024
"""Entries of each kind; when there are more, all are forgotten."""
TURNS_MAX = 8
"""New messages that are put together like this."""
_CHARS_MAX = 1 << 16
MemoKey = tuple[int, bytes, tuple[str, ...], tuple[str, ...]]
"""State of a boundary, digest of the template's inputs, roles of the new messages, what a template says of the time."""


class MemoEntry(NamedTuple):
    """Key of an entry, and the texts to be put in there."""

    key: MemoKey
    texts: list[str]


class TurnSkeleton(NamedTuple):
    """What a template writes before, between and behind texts."""

    pieces: tuple[str, ...]
    text_indices: tuple[int, ...]
    """Which text stands behind each piece but the last."""

    def fill(self, texts: Sequence[str]) -> str:
        parts = [self.pieces[0]]
        for piece, text_index in zip(self.pieces[1:], self.text_indices):
            parts.append(texts[text_index])
            parts.append(piece)
        return "".join(parts)


class NextState(NamedTuple):
    """What a boundary behind new messages has of the template."""

    stand_in: StandIn
    stand_in_text: str
    state: int


class TurnMemo:
    """The memo of one template."""

    def __init__(self) -> None:
        self._skeletons: dict[MemoKey, TurnSkeleton | None] = {}
        """None: these messages have no skeleton."""
        self._next_states: dict[tuple[MemoKey, int], NextState] = {}

    def __len__(self) -> int:
        return len(self._skeletons) + len(self._next_states)

    def fill(self, key: MemoKey, texts: Sequence[str]) -> str | None:
        """Return what the template writes of these texts, where that is known."""
        skeleton = self._skeletons.get(key)
        return None if skeleton is None else skeleton.fill(texts)

    def add(self, key: MemoKey, texts: Sequence[str], text: str, render: Callable[[list[Message]], str | None]) -> None:
        """Remember what the template wrote of these texts, unless that was tried. `render`: by the template."""
        if key in self._skeletons or len(text) - sum(map(len, texts)) > _CHARS_MAX:
            return
        placeholders = [f"x{secrets.token_hex(8)}x" for _ in texts]
        marked_text = render([{"role": role, "content": mark} for role, mark in zip(key[2], placeholders)])
        skeleton = None
        if marked_text is not None:
            parts = re.split(f"({'|'.join(placeholders)})", marked_text)
            skeleton = TurnSkeleton(tuple(parts[::2]), tuple(placeholders.index(mark) for mark in parts[1::2]))
        if len(self._skeletons) >= ENTRIES_MAX:
            self._skeletons = {}
        self._skeletons[key] = skeleton if skeleton is not None and skeleton.fill(texts) == text else None

    def find_next_state(self, key: MemoKey, message_count: int) -> NextState | None:
        """Return what a boundary has that is so many of the new messages behind the one of this key."""
        return self._next_states.get((key, message_count))

    def add_next_state(self, key: MemoKey, message_count: int, next_state: NextState) -> None:
        if len(self._next_states) >= ENTRIES_MAX:
            self._next_states = {}
        self._next_states[key, message_count] = next_state


def read_plain_texts(messages: Sequence[Message], compared_texts: Sequence[str]) -> list[str] | None:
    """Return the text of each message, if they are few, and each is a role and a text that templates only copy."""
    if not 0 < len(messages) <= TURNS_MAX:
        return None
    texts = []
    for message in messages:
        text = message.get("content")
        if type(text) is not str or not text or len(message) != 2 or type(message.get("role")) is not str:
            return None
        if text[0].isspace() or text[-1].isspace() or text.startswith(BILLING_LINE):
            return None
        for compared_text in compared_texts:
            if compared_text in text:
                return None
        texts.append(text)
    return texts
