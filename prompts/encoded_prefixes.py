"""Beginnings of long texts and their ids: of a conversation that comes back, only what is new is cut and looked up.

Owns which beginnings are kept and how one is found; that a text may be continued there is the caller's to know
(prompts/segments.py). A beginning is looked for by a few characters at fixed places, then compared in full, which costs
a fraction of cutting it again. Bounded in bytes, least recently used first.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import NamedTuple

import msgspec

PREFIX_CHARS_MIN = 8_192
"""Characters below which a beginning is not worth keeping."""
PREFIX_CHARS_MAX = 2**24
_CANDIDATES_MAX = 4
"""Beginnings kept of those that look alike: they have the same size, within a factor of two, and the same samples."""
_SAMPLE_CHARS = 48
_ENTRY_BYTES = 300


class _LookupKey(NamedTuple):
    """Samples of a text by which prefixes that may match it are found."""

    size_class: int
    start: str
    middle: str
    end: str


class EncodedPrefix(msgspec.Struct, eq=False):
    """`text[:end]` has the ids `ids`; `text` runs on a little, as far as it must be the same again."""

    text: str
    end: int
    ids: bytes

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES + sys.getsizeof(self.text) + sys.getsizeof(self.ids)


class EncodedPrefixCache:
    """Not thread-safe: the caller has the lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._candidates_by_key: OrderedDict[_LookupKey, list[EncodedPrefix]] = OrderedDict()
        """Least recently used first; in a list, most recently used last."""
        self.used_bytes = 0

    def find(self, text: str) -> EncodedPrefix | None:
        """The longest kept beginning of `text`."""
        size_class = _size_class(len(text))
        while size_class >= PREFIX_CHARS_MIN:
            key = _make_lookup_key(text, size_class)
            candidates = self._candidates_by_key.get(key, ())
            longest_prefix = max(
                (prefix for prefix in candidates if text.startswith(prefix.text)),
                key=lambda prefix: prefix.end,
                default=None,
            )
            if longest_prefix is not None:
                self._candidates_by_key.move_to_end(key)
                self._candidates_by_key[key].remove(longest_prefix)
                self._candidates_by_key[key].append(longest_prefix)
                return longest_prefix
            size_class //= 2
        return None

    def store(self, new_prefix: EncodedPrefix) -> None:
        """Remember it; of those that look alike, what it continues and the oldest make way."""
        if (
            not PREFIX_CHARS_MIN <= len(new_prefix.text) <= PREFIX_CHARS_MAX
            or new_prefix.size_bytes > self._max_bytes // 4
        ):
            return
        key = _make_lookup_key(new_prefix.text, _size_class(len(new_prefix.text)))
        candidates = self._candidates_by_key.setdefault(key, [])
        for old_prefix in [prefix for prefix in candidates if new_prefix.text.startswith(prefix.text)] or candidates[
            : len(candidates) + 1 - _CANDIDATES_MAX
        ]:
            candidates.remove(old_prefix)
            self.used_bytes -= old_prefix.size_bytes
        candidates.append(new_prefix)
        self._candidates_by_key.move_to_end(key)
        self.used_bytes += new_prefix.size_bytes
        while self.used_bytes > self._max_bytes:
            _, oldest = self._candidates_by_key.popitem(last=False)
            self.used_bytes -= sum(prefix.size_bytes for prefix in oldest)

    def __len__(self) -> int:
        return sum(map(len, self._candidates_by_key.values()))

    def check_invariants(self) -> None:
        """For tests: counts agree with what they count; everybody stands where it is looked for."""
        assert self.used_bytes == sum(
            prefix.size_bytes for candidates in self._candidates_by_key.values() for prefix in candidates
        )
        assert self.used_bytes <= self._max_bytes
        for key, candidates in self._candidates_by_key.items():
            assert 0 < len(candidates) <= _CANDIDATES_MAX
            assert all(_make_lookup_key(prefix.text, _size_class(len(prefix.text))) == key for prefix in candidates)


def _size_class(length: int) -> int:
    """The largest power of two that is not longer."""
    return 1 << (length.bit_length() - 1) if length else 0


def _make_lookup_key(text: str, size_class: int) -> _LookupKey:
    middle = size_class // 2
    return _LookupKey(
        size_class,
        text[:_SAMPLE_CHARS],
        text[middle : middle + _SAMPLE_CHARS],
        text[size_class - _SAMPLE_CHARS : size_class],
    )
