"""Conversations that may come back, known by the bytes of their beginning. Pure; of one event loop.

Owns which beginnings are kept and how a body's is found. What stands behind one is router/prompting/returning.py's. A
beginning is looked for by a digest of its first bytes, then compared in full. Bounded in bytes, least recently used
first out.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict

from prompts.routing import Kind
from prompts.words import begin_alike, digests, digests_among
from router.prompting.beginning import Known as Known
from router.prompting.beginning import Mark as Mark

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
