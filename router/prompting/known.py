"""Conversations that may come back, known by the bytes of their beginning. Pure; of one event loop.

Owns what is kept of a beginning, which are kept and how a body's is found. What stands behind one is
router/prompting/returning.py's. A beginning is looked for by a digest of its first bytes, then compared in full.
Bounded in bytes, least recently used first out. What is kept crosses between processes (router/prompting/pool.py).
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable

import msgspec

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

FIELDS_OF_THIS_PROCESS = 4
"""Fields of `Known`, its last, that do not cross to another one."""
_MARK_BYTES = 1000
_OBJECTS_A_BYTE = 4
"""Bytes that what was decoded takes, for each byte of a body."""


class Mark(msgspec.Struct, frozen=True, eq=False):
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

    def without_tail(self) -> Mark:
        """The same, where its ids are not among those of a prompt."""
        return msgspec.structs.replace(self, tail="", tail_ids=0)


class Known(msgspec.Struct, eq=False):
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
    words: bytes
    """Of its messages up to its last mark, as router/prompting/outlined.py has them."""
    tools: bytes
    """Likewise, and so are the flags; they are part of `told`."""
    flags: int
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
    model: str = ""
    """Whose tokenizer and template it was read with."""
    begins: int | None = None
    """Digest of what its user said first (router/prompting/turn.py)."""
    memory: object = None
    """The index's, of a prompt that it begins; it stays in this process."""
    memory_is_own: bool = False
    """That prompt's ids are these."""
    memory_bytes: int = 0
    """That this takes besides `ids`."""

    def __reduce__(self) -> tuple[Callable[..., Known], tuple[object, ...]]:
        """Without what stays in this process: what comes last, from `begins` on."""
        return Known, msgspec.structs.astuple(self)[:-FIELDS_OF_THIS_PROCESS]

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
