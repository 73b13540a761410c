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

    def store_cut(self, message_count: int, template_chars: int, prefix: RenderedPlaceholders) -> None:
        """Store that the text may be cut after the first messages, if the cut is in the piece after them.

        `template_chars`: characters after the cut besides the texts of messages. `prefix`: placeholders for the
        conversation before the cut.
        """
        later_piece_chars = sum(map(len, self.pieces[message_count + 1 :]))
        if later_piece_chars < template_chars <= later_piece_chars + len(self.pieces[message_count]):
            self.cuts[message_count] = PieceCut(template_chars, prefix)


class PieceCut(NamedTuple):
    """A place in the text of a turn at which it may be cut, whatever the texts of the messages are."""

    template_chars: int
    """Characters after the cut that the template writes, besides the texts of messages."""
    prefix: RenderedPlaceholders
    """Placeholders for the conversation before the cut."""


def split_at_texts(rendered_text: str, texts: list[str]) -> TurnPieces | None:
    """Split what a chat template wrote for messages at the messages' texts, and return the pieces around them.

    For example, `<user>x7f3ax</user>` with the text `x7f3ax` has the pieces `<user>` and `</user>`. Return None if a
    text is not there exactly once, or if the pieces have more than CHARS_MAX characters. `texts`: of hex digits and x.
    """
    pieces_and_texts = re.split(f"({'|'.join(texts)})", rendered_text)  # every second one is a text
    pieces = tuple(pieces_and_texts[::2])
    if pieces_and_texts[1::2] != texts or sum(map(len, pieces)) > CHARS_MAX:
        return None
    return TurnPieces(pieces, {})


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
