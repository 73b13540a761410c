"""The beginning of a conversation and what was made of it: structures, and no code.

Apart from router/prompting/known.py, which is compiled where msgspec's structures cannot be.
"""

from __future__ import annotations

from array import array

from msgspec import Struct

from prompts.routed import Kind, RoutingRequest
from prompts.schemas import Message

_MARK_BYTES = 1000
_OBJECTS_A_BYTE = 4
"""Bytes that what was decoded takes, for each byte of a body."""


class Mark(Struct, frozen=True):
    """A place between two messages of a body up to which it may be known."""

    end: int
    """Bytes of the body before it."""
    count: int
    """Messages of the chat before it."""
    ids: int
    """Token ids of the text before the last of those."""
    chars: int
    """Of that text."""
    tail: str
    """What followed: text of the last of those, up to where any text that is cut there is cut."""
    tail_ids: int
    """How many ids it has."""
    objects: int
    """Brackets in those bytes."""
    before: Message
    last: Message
    """The two messages before it, as the chat has them."""

    @property
    def ids_max(self) -> int:
        return self.ids + self.tail_ids


class Known(Struct):
    """The beginning of a conversation and what was made of it. Not changed once it is in the table."""

    kind: Kind
    start: int
    """Where the body's array of messages begins."""
    told: bytes
    """Digest of what else the template is told."""
    heads: int
    """Messages of the chat that are not from the array: 1 where there is a system text."""
    opening: list[Message]
    """The chat's messages up to the first that is not the system's."""
    words: array[int]
    """The outline (router/prompting/outline.py) of its messages."""
    marks: list[Mark]
    """The furthest last."""
    body: bytes
    ids: array[int]
    """Of the whole prompt, or up to the tail of its last mark at the least."""
    close: int = 0
    """Where the body's array of messages ends."""
    parsed: RoutingRequest | None = None
    """What a chat asks for but for its messages; None of another kind."""
    as_sent: bool = False
    """How its template was given messages."""
    back: int = 1
    """Messages at the end of a body that are not taken for known, as they may change."""
    memory: object = None
    """The index's, of a prompt that it begins."""
    memory_bytes: int = 0
    """That this takes besides `ids`."""
    model: str = ""
    """Whose tokenizer and template it was read with."""

    @property
    def cost(self) -> int:
        """Bytes that it takes, about."""
        size = len(self.body) + self.ids.itemsize * (len(self.ids) + len(self.words)) + _MARK_BYTES * len(self.marks)
        size += sum(len(mark.tail) for mark in self.marks)
        if self.parsed is not None:
            size += _OBJECTS_A_BYTE * (self.start + len(self.body) - self.close)
        return size + self.memory_bytes + 1000 + sum(len(str(message.get("content"))) for message in self.opening)
