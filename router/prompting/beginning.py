"""The beginning of a conversation and what was made of it: values. Plain, so that compiled code reads their fields at
their places. They cross between processes (router/prompting/pool.py), so each says how it is made again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from prompts.routing import Kind, RoutingRequest
from prompts.schemas import Message

_MARK_BYTES = 1000
_OBJECTS_A_BYTE = 4
"""Bytes that what was decoded takes, for each byte of a body."""


class Mark:
    """A place between two messages of a body up to which it may be known. Not changed."""

    __slots__ = ("before", "chars", "count", "end", "ids", "last", "objects", "tail", "tail_ids")

    def __init__(
        self, end: int, count: int, ids: int, chars: int, tail: str, tail_ids: int, objects: int, before: Message,
        last: Message,
    ) -> None:  # fmt: skip
        self.end = end
        """Bytes of the body before it."""
        self.count = count
        """Messages of the chat before it."""
        self.ids = ids
        """Token ids of the text before the last of those."""
        self.chars = chars
        """Of that text."""
        self.tail = tail
        """What followed: text of the last of those, up to where any text that is cut there is cut."""
        self.tail_ids = tail_ids
        """How many ids it has."""
        self.objects = objects
        """Brackets in those bytes."""
        self.before = before
        self.last = last
        """The two messages before it, as the chat has them."""

    def __reduce__(self) -> tuple[Callable[..., Mark], tuple[object, ...]]:
        return Mark, (
            self.end, self.count, self.ids, self.chars, self.tail, self.tail_ids, self.objects, self.before, self.last
        )  # fmt: skip

    @property
    def ids_max(self) -> int:
        return self.ids + self.tail_ids

    def without_tail(self) -> Mark:
        """The same, where its ids are not among those of a prompt."""
        return Mark(self.end, self.count, self.ids, self.chars, "", 0, self.objects, self.before, self.last)


class Known:
    """The beginning of a conversation and what was made of it. Not changed once it is in the table."""

    __slots__ = (
        "as_sent", "back", "body", "close", "heads", "ids", "kind", "marks", "memory", "memory_bytes", "model",
        "opening", "parsed", "start", "told", "words",
    )  # fmt: skip

    def __init__(
        self, kind: Kind, start: int, told: bytes, heads: int, opening: list[Message], words: array[int],
        marks: list[Mark], body: bytes, ids: array[int], close: int = 0, parsed: RoutingRequest | None = None,
        as_sent: bool = False, back: int = 1, model: str = "",
    ) -> None:  # fmt: skip
        self.kind = kind
        self.start = start
        """Where the body's array of messages begins."""
        self.told = told
        """Digest of what else the template is told."""
        self.heads = heads
        """Messages of the chat that are not from the array: 1 where there is a system text."""
        self.opening = opening
        """The chat's messages up to the first that is not the system's."""
        self.words = words
        """The outline (router/prompting/outline.py) of its messages."""
        self.marks = marks
        """The furthest last."""
        self.body = body
        self.ids = ids
        """Of the whole prompt, or up to the tail of its last mark at the least."""
        self.close = close
        """Where the body's array of messages ends."""
        self.parsed = parsed
        """What a chat asks for but for its messages; None of another kind."""
        self.as_sent = as_sent
        """How its template was given messages."""
        self.back = back
        """Messages at the end of a body that are not taken for known, as they may change."""
        self.memory: object = None
        """The index's, of a prompt that it begins; it stays in this process."""
        self.memory_bytes = 0
        """That this takes besides `ids`."""
        self.model = model
        """Whose tokenizer and template it was read with."""

    def __reduce__(self) -> tuple[Callable[..., Known], tuple[object, ...]]:
        return Known, (
            self.kind, self.start, self.told, self.heads, self.opening, self.words, self.marks, self.body, self.ids,
            self.close, self.parsed, self.as_sent, self.back, self.model,
        )  # fmt: skip

    @property
    def cost(self) -> int:
        """Bytes that it takes, about."""
        size = len(self.body) + self.ids.itemsize * (len(self.ids) + len(self.words)) + _MARK_BYTES * len(self.marks)
        size += sum([len(mark.tail) for mark in self.marks])
        if self.parsed is not None:
            size += _OBJECTS_A_BYTE * (self.start + len(self.body) - self.close)
        return size + self.memory_bytes + 1000 + sum([len(str(message.get("content"))) for message in self.opening])
