"""Conversations that may come back, known by the bytes of their beginning. Pure; of one event loop.

Owns which beginnings are kept and how a body's is found. What stands behind one is router/prompting/returning.py's. A
beginning is looked for by a digest of its first bytes, then compared in full. Bounded in bytes, least recently used
first out.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict

import xxhash
from msgspec import Struct

from prompts.routing import Kind
from prompts.schemas import Message

LENGTH_MIN = 8192
"""Bytes of a body below which its beginning is not worth knowing."""
LENGTH_MAX = 4 << 20
ALIKE_MAX = 8
"""Conversations kept of those that begin alike, for an eighth of their length at least."""
MARKS_MAX = 4
_MARK_BYTES = 1000
_LENGTHS = [length for power in range(13, 23) for length in range(1 << power, 2 << power, 1 << (power - 3))]
"""Of the beginnings that are digested: eight in each doubling, from LENGTH_MIN on."""


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
    objects: int
    """Brackets in those bytes."""
    before: Message
    last: Message
    """The two messages before it, as the chat has them."""


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
    """Of the whole prompt, or up to its last mark at the least."""
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
        return size + self.memory_bytes + 1000 + sum(len(str(message.get("content"))) for message in self.opening)


class KnownBodies:
    """The table of one process."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._alike: dict[tuple[Kind, int], list[Known]] = {}
        """(kind, digest of a beginning) -> whose beginning that is, the newest at the end."""
        self._kept: OrderedDict[int, tuple[Known, int, set[tuple[Kind, int]]]] = OrderedDict()
        """id -> what is kept, what it costs, its places in `_alike`; least recently used first."""
        self.used_bytes = 0
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, kind: Kind, body: bytes) -> tuple[Known, Mark] | None:
        """Whose beginning the body has, and the furthest place up to which it has it."""
        for digest in reversed(_digests(body)):
            for known in reversed(self._alike.get((kind, digest), ())):
                for mark in reversed(known.marks):
                    if body.startswith(memoryview(known.body)[: mark.end]):
                        self._kept.move_to_end(id(known))
                        self.hits += 1
                        return known, mark
        self.misses += 1
        return None

    def keep(self, known: Known, instead: Known | None = None) -> None:
        """Remember it; `instead` of the one that it goes on from."""
        if instead is not None:
            self._drop(instead)
        cost, keys = known.cost, _keys(known)
        if cost > self.max_bytes // 4 or not keys:
            return
        self._kept[id(known)] = known, cost, keys
        self.used_bytes += cost
        for key in keys:
            alike = self._alike.setdefault(key, [])
            alike.append(known)
            if len(alike) > ALIKE_MAX:
                self._drop(alike[0])
        while self.used_bytes > self.max_bytes:
            self._drop(next(iter(self._kept.values()))[0])

    def _drop(self, known: Known) -> None:
        kept = self._kept.pop(id(known), None)
        if kept is None:
            return
        _, cost, keys = kept
        self.used_bytes -= cost
        for key in keys:
            alike = self._alike[key]
            alike[:] = [one for one in alike if one is not known]
            if not alike:
                del self._alike[key]

    def check_invariants(self) -> None:
        """For tests: the sum is right and bounded; who is kept is found by each of its keys, and nobody else."""
        assert self.used_bytes == sum(cost for _, cost, _ in self._kept.values()) <= self.max_bytes
        listed: dict[tuple[Kind, int], set[int]] = {}
        for known, cost, keys in self._kept.values():
            assert (cost, keys) == (known.cost, _keys(known))
            for key in keys:
                listed.setdefault(key, set()).add(id(known))
        assert {key: {id(known) for known in alike} for key, alike in self._alike.items()} == listed
        assert all(len(alike) <= ALIKE_MAX for alike in self._alike.values())


def _keys(known: Known) -> set[tuple[Kind, int]]:
    """Under which it is found by each of its marks."""
    digests = _digests(memoryview(known.body)[: known.marks[-1].end])
    places = [bisect_right(_LENGTHS, mark.end) for mark in known.marks]
    return {(known.kind, digests[place - 1]) for place in places if place}


def _digests(body: bytes | memoryview) -> list[int]:
    """Of the beginnings of these lengths that a body has."""
    whole, at, view, found = xxhash.xxh3_64(), 0, memoryview(body), []
    for length in _LENGTHS[: bisect_right(_LENGTHS, len(body))]:
        whole.update(view[at:length])
        at = length
        found.append(whole.intdigest())
    return found
