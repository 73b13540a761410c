"""Keys of token prefixes: one number for "these tokens, in this scope", whatever blocks an engine cuts them into.

Owns the polynomial hash and the derivation of its constants from a seed. Refuses to know blocks, workers and events.
Rabin's fingerprint over the prime field of 2^61 - 1 with a base drawn at random per process: two different prefixes
of L tokens share a key with probability at most (L + 1) / 2^61, and a collision can only send a request to a worker
that has to compute it. router/index/native/digest.hpp computes the same numbers; the two must agree, seed for seed.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import lru_cache

from router.index.protocol import Scope

PRIME = (1 << 61) - 1
"""Modulus of every digest."""
_MASK_64 = (1 << 64) - 1
_NONE, _TEXT, _BYTES = 1, 2, 3
"""Tags in front of the parts of a digest of texts, so that no two part lists spell the same field elements."""

SaltKey = str | bytes | None


def _splitmix(state: int) -> int:
    """Steele, Lea and Flood's SplitMix64 output function: spreads a seed over 64 bits."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


class Digester:
    """The digest function of one seed. Immutable; equal seeds give equal digests in every process."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed & _MASK_64
        self.base = _splitmix(self.seed) % PRIME
        self.text_base = _splitmix(self.seed ^ 0x5851F42D4C957F2D) % PRIME
        self.fingerprint = _splitmix(self.seed ^ 0x14057B7EF767814F)
        """Tells whether two indexes share a seed without giving it away."""
        self.start = lru_cache(maxsize=4096)(self._start)

    def text(self, *parts: str | bytes | None) -> int:
        """Field element of a list of optional texts."""
        base, h = self.text_base, len(parts)
        for part in parts:
            if part is None:
                h = (h * base + _NONE) % PRIME
                continue
            data = part.encode() if isinstance(part, str) else part
            h = (h * base + (_TEXT if isinstance(part, str) else _BYTES)) % PRIME
            h = (h * base + len(data)) % PRIME
            for at in range(0, len(data), 4):
                h = (h * base + int.from_bytes(data[at : at + 4], "little") + 1) % PRIME
        return h

    def name(self, engine_hash: int | bytes) -> int:
        """64-bit name of a block as its engine calls it: ints modulo 2^64, raw bytes as their text digest."""
        if isinstance(engine_hash, int):
            return engine_hash & _MASK_64
        return self.text(engine_hash)

    def _start(self, model: str, salt: SaltKey, lora: str | None) -> int:
        """Digest of the empty prefix in a scope. (`start` is this, memoised.)"""
        return self.text(model, salt, lora)

    def make_opaque(self, digest: int) -> int:
        """Return a digest that no prompt has, nor anything that continues it."""
        return (digest * self.base + self.text("opaque", None)) % PRIME

    def extend(self, digest: int, token_ids: Sequence[int]) -> list[int]:
        """Return the digests after each of `token_ids`."""
        digests = []
        for token in token_ids:
            digest = (digest * self.base + token + 1) % PRIME
            digests.append(digest)
        return digests

    def prefixes(self, token_ids: Sequence[int], scope: Scope) -> list[int]:
        """Digests of [0, p) for p = 0..len(token_ids): len(token_ids) + 1 numbers."""
        start = self.start(scope.model, scope.salt, scope.lora)
        return [start, *self.extend(start, token_ids)]
