"""Memo of the text that a chat template writes around the texts of new messages, which saves rendering them.

A turn of a conversation of 40 messages is read in 49 us with the memo and in 144 us without (Qwen3's template). The
memo is only for messages of a role and a text that a template has no reason to change. An entry is compared with the
template's own text when it is made. That other texts are right too is tried out when a tokenizer is loaded
(template_trial.py) and checked while serving (conversation_reader.py).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence

import msgspec

from prompts.chat_rendering import BILLING_LINE
from prompts.schemas import Message
from router.prompting.placeholder_messages import RenderedPlaceholders

ENTRIES_MAX = 1024
"""Entries of each kind; all are dropped when there are more."""
TURNS_MAX = 8
"""Most messages of a `PlainTurn`."""
_CHARS_MAX = 1 << 16
EDGE_CHARS_MAX = 16
"""Most characters of white space at one end of a message's text."""

Edges = tuple[str, str]
"""White space before and after the text of a message."""


class MemoKey(msgspec.Struct, frozen=True):
    """Everything by which a template decides what it writes around the texts of new messages."""

    prefix_digest: int
    """Digest of the placeholders before the messages (`RenderedPlaceholders.digest`)."""
    inputs_digest: bytes
    """Digest of the template's inputs besides messages."""
    roles: tuple[str, ...]
    edges: tuple[Edges, ...]
    clock: tuple[str, ...]
    """Date and time as the template writes them."""


class PlainTurn(msgspec.Struct, frozen=True, eq=False):
    """New messages that are each a role and a text, with the key under which the memo knows them."""

    key: MemoKey
    texts: list[str]
    """Text of each message, without the white space at its edges."""

    def after(self, count: int, prefix_digest: int) -> PlainTurn:
        """Return the messages after the first `count`, after the placeholders of this digest."""
        key = self.key
        tail_key = MemoKey(prefix_digest, key.inputs_digest, key.roles[count:], key.edges[count:], key.clock)
        return PlainTurn(tail_key, self.texts[count:])


class _TurnPieces(msgspec.Struct, frozen=True, eq=False):
    """Pieces of text that a template writes before, between and after the texts of new messages.

    For example, a template writes a user's question as `<user>`, the question and `</user>`. The pieces are `<user>`
    and `</user>`, and between them comes the text with index 0.
    """

    pieces: tuple[str, ...]
    text_indices: tuple[int, ...]
    """Index of the text that follows each piece but the last."""

    def fill(self, texts: Sequence[str]) -> str:
        """Return the prompt of these texts."""
        parts = [self.pieces[0]]
        for piece, text_index in zip(self.pieces[1:], self.text_indices):
            parts.append(texts[text_index])
            parts.append(piece)
        return "".join(parts)


Render = Callable[[list[Message]], str | None]
"""Renders messages in place of those of a turn; None if the template refuses them."""


class TurnMemo:
    """Memo of what one template writes around the texts of a few new messages, which saves rendering them.

    For example, a question is written as `<|im_start|>user\\n`, its text and `<|im_end|>\\n`. If the next question
    comes with the same key, its text is put between these two pieces. Each kind of entry is bounded by ENTRIES_MAX.
    """

    def __init__(self) -> None:
        self._pieces_by_key: dict[MemoKey, _TurnPieces | None] = {}
        """None: the template changes the texts of these messages."""
        self._next_placeholders: dict[tuple[MemoKey, int], RenderedPlaceholders] = {}
        """(key, number of the new messages before a boundary) -> placeholders of that boundary."""

    def fill(self, turn: PlainTurn) -> str | None:
        """Return what the template writes for a turn; None if that is unknown."""
        pieces = self._pieces_by_key.get(turn.key)
        return None if pieces is None else pieces.fill(turn.texts)

    def fill_or_render(self, turn: PlainTurn, messages: list[Message], render: Render) -> str | None:
        """Return what the template writes for the messages of a turn; None if it refuses them. Remember what is new."""
        text = self.fill(turn)
        if text is None:
            text = render(messages)
            if text is not None:
                self.add(turn, text, render)
        return text

    def add(self, turn: PlainTurn, text: str, render: Render) -> None:
        """Remember what the template writes around the texts of a turn; `text` is what it wrote for the turn.

        Pieces that do not give `text` for this turn are wrong, and the turns with its key are then always rendered.
        """
        if turn.key in self._pieces_by_key or len(text) - sum(map(len, turn.texts)) > _CHARS_MAX:
            return
        pieces = _find_pieces(turn.key, render)
        if len(self._pieces_by_key) >= ENTRIES_MAX:
            self._pieces_by_key = {}
        is_right = pieces is not None and pieces.fill(turn.texts) == text
        self._pieces_by_key[turn.key] = pieces if is_right else None

    def find_next_placeholders(self, key: MemoKey, message_count: int) -> RenderedPlaceholders | None:
        """Return the placeholders for a conversation up to the first `message_count` new messages; None if unknown."""
        return self._next_placeholders.get((key, message_count))

    def add_next_placeholders(self, key: MemoKey, message_count: int, placeholders: RenderedPlaceholders) -> None:
        if len(self._next_placeholders) >= ENTRIES_MAX:
            self._next_placeholders = {}
        self._next_placeholders[key, message_count] = placeholders


def _find_pieces(key: MemoKey, render: Render) -> _TurnPieces | None:
    """Return what a template writes around texts, found by rendering random texts; None if it refuses them.

    If the random text `x7f3ax` becomes `<user>x7f3ax</user>`, the pieces are `<user>` and `</user>`.
    """
    random_texts = [f"x{secrets.token_hex(8)}x" for _ in key.roles]
    messages: list[Message] = [
        {"role": role, "content": before + random_text + after}
        for role, random_text, (before, after) in zip(key.roles, random_texts, key.edges)
    ]
    rendered_text = render(messages)
    if rendered_text is None:
        return None
    parts = re.split(f"({'|'.join(random_texts)})", rendered_text)
    return _TurnPieces(tuple(parts[::2]), tuple(random_texts.index(random_text) for random_text in parts[1::2]))


def read_plain_turn(
    messages: Sequence[Message],
    markers: Sequence[str],
    *,
    prefix_digest: int,
    inputs_digest: bytes,
    clock: tuple[str, ...],
) -> PlainTurn | None:
    """Split new messages into the memo's key and their texts; return None if a template may change a text.

    For example, the message {"role": "user", "content": " Hi"} has the role "user", the edges (" ", "") and the text
    "Hi". The edges are part of the key, as a template may trim a text. `markers`: strings for which the template
    searches. The other keyword arguments become fields of the key.
    """
    if not 0 < len(messages) <= TURNS_MAX:
        return None
    roles, texts, edges = list[str](), list[str](), list[Edges]()
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if type(content) is not str or len(message) != 2 or type(role) is not str:
            return None  # a template may read other fields, or parts of the content
        if content.startswith(BILLING_LINE):
            return None  # a billing line is removed before the template gets the text
        for marker in markers:
            if marker in content:
                return None
        text = content.strip()
        text_start = len(content) - len(content.lstrip())
        before, after = content[:text_start], content[text_start + len(text) :]
        if not text or len(before) > EDGE_CHARS_MAX or len(after) > EDGE_CHARS_MAX:
            return None  # a key has to stay short
        roles.append(role)
        texts.append(text)
        edges.append((before, after))
    return PlainTurn(MemoKey(prefix_digest, inputs_digest, tuple(roles), tuple(edges), clock), texts)
