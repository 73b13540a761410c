"""How an answer that must match something is brought to its end before its tokens are used up.

JSON has no bound: a text or a list that is not whole when `max_tokens` is reached is worth nothing. So while few tokens
are left, a short way to the end is looked for after each, and taken when there is just enough left for it. The walk
closes what is open and, where something must come, takes what is likely to be short; it depends on the matcher's state
alone. Where it finds no way that fits, nothing is changed and the answer is cut. Knows no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from engine.grammars import Words

LEFT_MAX = 96
"""Tokens left when the way to the end is first looked for, at most; and of such a way."""
SPARE_SHARE, SPARE_MAX = 16, 24
"""Of `max_tokens`, kept for what one token may add to the way: one part in so many, at most so many tokens."""
_CLOSING = (b"]}", b'"', b",:")
"""Tokens of one such byte, the first that may come: what ends a list or an object, begins a text, stands between."""
_TEXT = b"!"
"""Where this may come, JSON is inside of a text."""


class Endings:
    """Of a vocabulary."""

    def __init__(self, words: Words) -> None:
        texts = [words.tokens.decode_bytes([token]) for token in range(words.count)]
        self._count = words.count
        self._ends = words.ends
        of_a_byte = [[i for i, text in enumerate(texts) if len(text) == 1 and text in some] for some in _CLOSING]
        self._closing = [*self._ends, *(token for some in of_a_byte for token in some)]
        self._in_text = [i for i, text in enumerate(texts) if text == _TEXT]
        self._ends_text = [*self._ends, *of_a_byte[1]]
        lengths = [len(text) if text.strip() and not text.startswith(b" ") else 0 for text in texts]
        self._lengths: npt.NDArray[np.int32] = np.array(lengths, np.int32)
        """In bytes; 0 of what is, or begins with, white space."""

    def way(self, matcher: LLMatcher, left: int) -> list[int] | None:
        """The tokens, the end among them, that make the answer whole; None where no more than `left` are found."""
        matcher = matcher.deep_copy()
        bits = np.zeros(-(-self._count // 32), np.uint32)
        found: list[int] = []
        while len(found) < left:
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if matcher.is_error():
                return None
            token = self._shortest(bits)
            if token is None:
                return None
            found.append(token)
            if token in self._ends:
                return found
            if not matcher.consume_token(token):
                return None
        return None

    def _shortest(self, bits: npt.NDArray[np.uint32]) -> int | None:
        in_text = any(_may(bits, token) for token in self._in_text)
        for token in self._ends_text if in_text else self._closing:
            if _may(bits, token):
                return token
        may = np.unpackbits(bits.view(np.uint8), count=self._count, bitorder="little")
        if not may.any():
            return None
        lengths = self._lengths * may
        return int(lengths.argmax() if lengths.any() else may.argmax())


def _may(bits: npt.NDArray[np.uint32], token: int) -> bool:
    return bool(bits[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def spare(max_tokens: int) -> int:
    """Tokens that are left beside the way when it is taken."""
    return min(max_tokens // SPARE_SHARE, SPARE_MAX)
