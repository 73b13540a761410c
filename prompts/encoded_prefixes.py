"""Beginnings of long texts and their ids: of a conversation that comes back, only what is new is cut and looked up.

Owns which beginnings are kept and how one is found; that a text may be continued there is the caller's to know
(prompts/segments.py). A beginning is looked for by a few characters at fixed places, then compared in full, which costs
a fraction of cutting it again. Bounded in bytes, least recently used first.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import msgspec

LENGTH_MIN = 8_192
"""Characters below which a beginning is not worth keeping."""
LENGTH_MAX = 2**24
_ALIKE_MAX = 4
"""Beginnings kept of those that look alike: they have the same size, within a factor of two, and the same samples."""
_SAMPLE = 48
_ENTRY_BYTES = 300

_Key = tuple[int, str, str, str]


class EncodedPrefix(msgspec.Struct, eq=False):
    """`text[:end]` has the ids `ids`; `text` runs on a little, as far as it must be the same again."""

    text: str
    end: int
    ids: bytes

    @property
    def cost(self) -> int:
        return _ENTRY_BYTES + sys.getsizeof(self.text) + sys.getsizeof(self.ids)


class EncodedPrefixCache:
    """Not thread-safe: the caller has the lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._alike: OrderedDict[_Key, list[EncodedPrefix]] = OrderedDict()
        """Least recently used first; in a list, most recently used last."""
        self.used_bytes = 0

    def find(self, text: str) -> EncodedPrefix | None:
        """The longest kept beginning of `text`."""
        level = _level(len(text))
        while level >= LENGTH_MIN:
            key = _key(text, level)
            alike = self._alike.get(key, ())
            found = max((it for it in alike if text.startswith(it.text)), key=lambda it: it.end, default=None)
            if found is not None:
                self._alike.move_to_end(key)
                self._alike[key].remove(found)
                self._alike[key].append(found)
                return found
            level //= 2
        return None

    def keep(self, fresh: EncodedPrefix) -> None:
        """Remember it; of those that look alike, what it continues and the oldest make way."""
        if not LENGTH_MIN <= len(fresh.text) <= LENGTH_MAX or fresh.cost > self._max_bytes // 4:
            return
        key = _key(fresh.text, _level(len(fresh.text)))
        alike = self._alike.setdefault(key, [])
        for old in [it for it in alike if fresh.text.startswith(it.text)] or alike[: len(alike) + 1 - _ALIKE_MAX]:
            alike.remove(old)
            self.used_bytes -= old.cost
        alike.append(fresh)
        self._alike.move_to_end(key)
        self.used_bytes += fresh.cost
        while self.used_bytes > self._max_bytes:
            _, oldest = self._alike.popitem(last=False)
            self.used_bytes -= sum(it.cost for it in oldest)

    def __len__(self) -> int:
        return sum(map(len, self._alike.values()))

    def check_invariants(self) -> None:
        """For tests: counts agree with what they count; everybody stands where it is looked for."""
        assert self.used_bytes == sum(it.cost for alike in self._alike.values() for it in alike)
        assert self.used_bytes <= self._max_bytes
        for key, alike in self._alike.items():
            assert 0 < len(alike) <= _ALIKE_MAX
            assert all(_key(it.text, _level(len(it.text))) == key for it in alike)


def _level(length: int) -> int:
    """The largest power of two that is not longer."""
    return 1 << (length.bit_length() - 1) if length else 0


def _key(text: str, level: int) -> _Key:
    middle = level // 2
    return level, text[:_SAMPLE], text[middle : middle + _SAMPLE], text[level - _SAMPLE : level]
