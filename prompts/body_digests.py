"""Digests and counts of request bodies and messages: native where `prompts._words` was compiled."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

try:
    from prompts._words import count_openings as count_openings
    from prompts._words import digest32 as digest32
    from prompts._words import digests as digests
    from prompts._words import digests_among as digests_among
    from prompts._words import message_words as message_words
except ImportError:

    def count_openings(text: bytes, end: int = sys.maxsize) -> int:
        """Of `[` and `{` before `end`: no JSON text has more lists and objects."""
        return text.count(b"[", 0, end) + text.count(b"{", 0, end)

    def digest32(data: bytes, before: int, /) -> int:
        """Of some bytes behind others whose digest is `before`."""
        return xxhash.xxh3_64_intdigest(data, before) & 0xFFFF_FFFF

    def message_words(
        messages: list[Any],
        roles: dict[str, int],
        mark: bytes,
        line: bytes,
        words_of_message: Callable[[Any], tuple[int, ...]],
        /,
    ) -> bytes:
        """`other` of each message, 32 bits each."""
        return array("I", [word for message in messages for word in words_of_message(message)]).tobytes()

    def digests(body: bytes, first: int, seed: int, end: int = sys.maxsize) -> list[int]:
        """Of the beginnings of `body` before `end` that have `first` bytes, an eighth more, two eighths ..., twice as
        many, an eighth of that more, and so on."""
        hasher, view, results = xxhash.xxh3_64(seed=seed), memoryview(body), list[int]()
        offset, length, step = 0, first, first // 8
        while length <= min(len(body), end):
            hasher.update(view[offset:length])
            results.append(hasher.intdigest())
            offset, step = length, 2 * step if length == 16 * step else step
            length += step
        return results

    def digests_among(body: bytes, first: int, seed: int, among: Mapping[int, object], most: int) -> list[int]:
        """Of the `digests` of the whole body the last ones that `among` has, `most` at most, the last first."""
        return [digest for digest in reversed(digests(body, first, seed)) if digest in among][:most]
