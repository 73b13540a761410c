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
        """Count `[` and `{` before an offset: at most so many lists and objects are in the JSON."""
        return text.count(b"[", 0, end) + text.count(b"{", 0, end)

    def digest32(data: bytes, before: int, /) -> int:
        """Return a 32-bit digest of data that follows other data with the digest `before`."""
        return xxhash.xxh3_64_intdigest(data, before) & 0xFFFF_FFFF

    def message_words(
        messages: list[Any],
        roles: dict[str, int],
        mark: bytes,
        line: bytes,
        words_of_message: Callable[[Any], tuple[int, ...]],
        /,
    ) -> bytes:
        """Return the numbers of all messages as unsigned 32-bit integers.

        `words_of_message` makes those of a message. The native function makes those of plain messages itself: a role
        and a text without `mark`, and without a line that starts with `line` if the role's number in `roles` is 0.
        """
        return array("I", [word for message in messages for word in words_of_message(message)]).tobytes()

    def digests(body: bytes, first: int, seed: int, end: int = sys.maxsize) -> list[int]:
        """Return digests of prefixes of a body, up to `end`.

        The first prefix has `first` bytes. Each doubling of the length is divided into eight steps.
        """
        hasher, view, results = xxhash.xxh3_64(seed=seed), memoryview(body), list[int]()
        offset, length, step = 0, first, first // 8
        while length <= min(len(body), end):
            hasher.update(view[offset:length])
            results.append(hasher.intdigest())
            offset, step = length, 2 * step if length == 16 * step else step
            length += step
        return results

    def digests_among(body: bytes, first: int, seed: int, among: Mapping[int, object], most: int) -> list[int]:
        """Return the `digests` of a body that are keys of `among`, at most `most`, the longest prefix first."""
        return [digest for digest in reversed(digests(body, first, seed)) if digest in among][:most]
