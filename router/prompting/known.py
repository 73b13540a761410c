"""Conversations that may come back, known by the bytes of their beginning. Pure; of one event loop.

Owns what is kept of a beginning, which are kept and how a body's is found. What stands behind one is
router/prompting/returning.py's. A beginning is looked for by a digest of its first bytes, then compared in full.
Bounded in bytes, least recently used first out. What is kept is plain, so that compiled code reads its fields at their
places, and crosses between processes (router/prompting/pool.py), so it says how it is made again.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable

from prompts.routing import Kind, RoutingRequest
from prompts.schemas import Message
from prompts.words import begin_alike, digests, digests_among

LENGTH_MIN = 1024
"""Bytes of a body below which its beginning is not worth knowing."""
LENGTH_MAX = 4 << 20
ALIKE_MAX = 8
"""Conversations kept of those that begin alike, for an eighth of their length at least."""
MARKS_MAX = 4
SEEN_MAX = 65_536
"""Digests that are remembered of bodies of which nothing is known."""
_Key = int
"""Digest of a beginning: eight lengths in each doubling, from LENGTH_MIN on."""

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
        "as_sent", "back", "begins", "body", "close", "flags", "heads", "ids", "kind", "marks", "memory",
        "memory_bytes", "memory_is_own", "model", "opening", "parsed", "start", "told", "tools", "words",
    )  # fmt: skip

    def __init__(
        self, kind: Kind, start: int, told: bytes, heads: int, opening: list[Message], words: bytes,
        tools: bytes, flags: int, marks: list[Mark], body: bytes, ids: array[int], close: int = 0,
        parsed: RoutingRequest | None = None, as_sent: bool = False, back: int = 1, model: str = "",
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
        """Of its messages up to its last mark, as router/prompting/outlined.py has them."""
        self.tools, self.flags = tools, flags
        """Likewise; they are part of `told`."""
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
        self.begins: int | None = None
        """A digest of what its user said first, where somebody asked for it (router/edge/reasons.py)."""
        self.memory: object = None
        """The index's, of a prompt that it begins; it stays in this process."""
        self.memory_is_own = False
        """That prompt's ids are these."""
        self.memory_bytes = 0
        """That this takes besides `ids`."""
        self.model = model
        """Whose tokenizer and template it was read with."""

    def __reduce__(self) -> tuple[Callable[..., Known], tuple[object, ...]]:
        return Known, (
            self.kind, self.start, self.told, self.heads, self.opening, self.words, self.tools, self.flags,
            self.marks, self.body, self.ids, self.close, self.parsed, self.as_sent, self.back, self.model,
        )  # fmt: skip

    @property
    def cost(self) -> int:
        """Bytes that it takes, about."""
        size = len(self.body) + self.ids.itemsize * len(self.ids) + len(self.words) + len(self.tools)
        size += _MARK_BYTES * len(self.marks) + sum([len(mark.tail) for mark in self.marks])
        if self.parsed is not None:
            size += _OBJECTS_A_BYTE * (self.start + len(self.body) - self.close)
        return size + self.memory_bytes + 1000 + sum([len(str(message.get("content"))) for message in self.opening])


class KnownBodies:
    """The table of one process."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._seed = secrets.randbits(64)
        self._alike: dict[_Key, list[Known]] = {}
        """Whose beginning it is, the newest at the end."""
        self._kept: OrderedDict[int, tuple[Known, int, set[_Key]]] = OrderedDict()
        """id -> what is kept, what it costs, its places in `_alike`; least recently used first."""
        self._seen: set[_Key] = set()
        self._seen_before: set[_Key] = set()
        """Of bodies that might come back. When there are too many, these are forgotten and those become these."""
        self.used_bytes = 0
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, kind: Kind, body: bytes) -> tuple[Known, Mark] | None:
        """Whose beginning the body has, and the furthest place up to which it has it."""
        alike = self._alike
        for most in (1, len(body)):  # the first is it, nearly always
            keys = digests_among(body, LENGTH_MIN, self._seed, alike, most)
            for key in keys[most > 1 :]:
                for known in reversed(alike[key]):
                    for mark in reversed(known.marks):
                        if known.kind == kind and begin_alike(body, known.body, mark.end):
                            self._kept.move_to_end(id(known))
                            self.hits += 1
                            return known, mark
            if not keys:
                break
        self.misses += 1
        return None

    def comes_back(self, body: bytes) -> bool:
        """Whether a quarter of it began a body before that was asked about here."""
        found = self._digests(body)
        longest = len(found) - 1
        while longest >= 0 and found[longest] not in self._seen and found[longest] not in self._seen_before:
            longest -= 1
        if len(self._seen) + len(found) > SEEN_MAX // 2:
            self._seen_before, self._seen = self._seen, set()
        self._seen.update(found)
        return longest >= 0 and 4 * _length(longest) >= len(body)

    def _digests(self, body: bytes, end: int = LENGTH_MAX) -> list[_Key]:
        return digests(body, LENGTH_MIN, self._seed, end)

    def _keys(self, known: Known) -> set[_Key]:
        """Under which it is found by each of its marks."""
        found = [self._digests(known.body, mark.end) for mark in known.marks]
        return {keys[-1] for keys in found if keys}

    def keep(self, known: Known, instead: Known | None = None) -> None:
        """Remember it; `instead` of the one that it goes on from."""
        if instead is not None:
            self._drop(instead)
        cost, keys = known.cost, self._keys(known)
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
        listed: dict[_Key, set[int]] = {}
        for known, cost, keys in self._kept.values():
            assert (cost, keys) == (known.cost, self._keys(known))
            for key in keys:
                listed.setdefault(key, set()).add(id(known))
        assert {key: {id(known) for known in alike} for key, alike in self._alike.items()} == listed
        assert all(len(alike) <= ALIKE_MAX for alike in self._alike.values())
        assert len(self._seen) + len(self._seen_before) <= SEEN_MAX


def _length(number: int) -> int:
    """Of the beginning that a digest is of."""
    return (LENGTH_MIN << number // 8) * (8 + number % 8) // 8
