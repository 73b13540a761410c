"""The prefix index: exactly which worker has which prefix cached. `make_index` makes one, `protocol` describes it.

The index is written in C++ (router/index/native): holder.hpp applies events, match.cpp computes usable prefixes. Tests
compare it with the same index in plain Python, tests/contracts/reference.
"""

from __future__ import annotations

import secrets

from router.index.protocol import PrefixIndex


def make_index(seed: int | None = None) -> PrefixIndex:
    """Make an empty index. `seed`: seed of its digests; None: random."""
    try:
        from router.index._native import Index
    except ImportError as error:
        raise ImportError(
            f"the prefix index (router/index/_native) was not built for this Python: {error}. Install blockcast again: "
            "pip install . builds it, with a compiler from the registry where the machine has none"
        ) from error
    return Index(secrets.randbits(64) if seed is None else seed & (1 << 64) - 1)
