"""Pieces of text that a chat template writes around the texts of new messages. They save rendering equal turns again.

A turn of a conversation of 40 messages is read in 49 us with pieces and in 144 us without (Qwen3's template). They are
only for messages of a role and a text that a template has no reason to change. Trials of templates and checks while
serving show whether this is so.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from prompts.chat_completions import Message
from prompts.chat_rendering import BILLING_LINE
from router.prompting.placeholder_messages import RenderedPlaceholders

TURNS_MAX = 8
"""Most messages of a `PlainTurn`."""
CHARS_MAX = 1 << 16
"""Most characters that a template may write around the texts of a turn."""
EDGE_CHARS_MAX = 16
"""Most characters of white space at one end of a message's text."""
TURNS_STORED_MAX = 1024
"""Most turns of which the pieces are stored; the oldest is dropped first."""


class MessageFrame(msgspec.Struct, frozen=True, gc=False):
    """Role of a message, and the white space at both ends of its text, which a template may trim."""

    role: str
    space_before: str
    space_after: str


class TurnKey(msgspec.Struct, frozen=True):
    """Everything by which a template decides what it writes around the texts of new messages."""

    prefix_digest: int
    """Digest of the placeholders before the messages (`RenderedPlaceholders.digest`)."""
    inputs_digest: bytes
    """Digest of the template's inputs besides messages."""
    frames: tuple[MessageFrame, ...]
    clock: tuple[str, ...]
    """Date and time as the template writes them."""


class PlainTurn(NamedTuple):
    """New messages that are each a role and a text."""

    frames: tuple[MessageFrame, ...]
    texts: list[str]
    """Text of each message, without the white space at its ends."""

    def randomize(self) -> PlainTurn:
        """Return the same turn with random texts, which no template has or changes."""
        return PlainTurn(self.frames, [f"x{secrets.token_hex(8)}x" for _ in self.texts])

    def make_messages(self) -> list[Message]:
        return [
            {"role": frame.role, "content": frame.space_before + text + frame.space_after}
            for frame, text in zip(self.frames, self.texts)
        ]


class TurnPieces(msgspec.Struct, frozen=True, eq=False):
    """Pieces of text that a chat template writes before, between and after the texts of new messages.

    For example, a template writes a question as `<user>`, its text and `</user>`: the pieces are `<user>` and
    `</user>`. With them, equal turns with other texts need not be rendered.
    """

    pieces: tuple[str, ...]
    """One piece more than there are texts."""
    cuts: dict[int, PieceCut]
    """Number of messages -> place after them at which the text may be cut."""

    def fill(self, texts: Sequence[str]) -> str:
        """Return what the template writes for messages with these texts."""
        parts = [self.pieces[0]]
        for text, piece in zip(texts, self.pieces[1:]):
            parts.append(text)
            parts.append(piece)
        return "".join(parts)

    def add_cut(self, texts: Sequence[str], message_count: int, tail_chars: int, prefix: RenderedPlaceholders) -> None:
        """Store that the prompt of `texts` may be cut after the first messages, if the cut is within a piece.

        `tail_chars`: characters after the cut. `prefix`: placeholders for the conversation before the cut.
        """
        template_chars = tail_chars - sum(map(len, texts[message_count:]))
        later_piece_chars = sum(map(len, self.pieces[message_count + 1 :]))
        if later_piece_chars < template_chars <= later_piece_chars + len(self.pieces[message_count]):
            self.cuts[message_count] = PieceCut(template_chars, prefix)


class PieceCut(NamedTuple):
    """A place in the text of a turn at which it may be cut, whatever the texts of the messages are."""

    template_chars: int
    """Characters after the cut that the template writes, besides the texts of messages."""
    prefix: RenderedPlaceholders
    """Placeholders for the conversation before the cut."""


def find_pieces(turn: PlainTurn, text: str, random_turn: PlainTurn, random_text: str) -> TurnPieces | None:
    """Find what a chat template writes around the texts of new messages.

    If the random text `x7f3ax` becomes `<user>x7f3ax</user>`, the pieces are `<user>` and `</user>`. `text`,
    `random_text`: what the template wrote for `turn`, and for the same turn with random texts. Return None if the
    pieces are too long, or do not give `text`: then the template does more than to insert the texts.
    """
    template_chars = len(text) - sum(map(len, turn.texts))
    if template_chars > CHARS_MAX:
        return None
    pieces_and_texts = re.split(f"({'|'.join(random_turn.texts)})", random_text)  # every second one is a text
    if pieces_and_texts[1::2] != random_turn.texts:
        return None
    pieces = TurnPieces(tuple(pieces_and_texts[::2]), {})
    return pieces if pieces.fill(turn.texts) == text else None


def read_plain_turn(messages: Sequence[Message], markers: Sequence[str]) -> PlainTurn | None:
    """Divide new messages into their texts, and what a template can tell of each message besides its text.

    The message {"role": "user", "content": " Hi"} has the text "Hi" and a frame of its role and the white space, which
    a template may trim. `markers`: strings for which the template searches, such as `</think>`. Return None if the
    template may change a text.
    """
    if not 0 < len(messages) <= TURNS_MAX:
        return None
    texts: list[str] = []
    frames: list[MessageFrame] = []
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
        if not text:
            return None
        text_start = len(content) - len(content.lstrip())  # faster than a search for the text
        space_before, space_after = content[:text_start], content[text_start + len(text) :]
        if len(space_before) > EDGE_CHARS_MAX or len(space_after) > EDGE_CHARS_MAX:
            return None  # a key has to stay short
        texts.append(text)
        frames.append(MessageFrame(role, space_before, space_after))
    return PlainTurn(tuple(frames), texts)
