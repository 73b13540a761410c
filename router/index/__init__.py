"""The prefix index: which worker holds which prefix, exactly. `make_index` gives it, `protocol` says what it does.

It is C++ (router/index/native): the meaning of events is in holder.hpp, the arithmetic of a usable prefix in match.cpp.
tests/contracts/reference is the same in plain Python, which the tests compare it with.
"""

from __future__ import annotations

import secrets

from router.index.protocol import PrefixIndex


def make_index(seed: int | None = None) -> PrefixIndex:
    """Make an empty index. `seed`: of its digests; random where it is None."""
    try:
        from router.index._native import Index
    except ImportError as error:
        raise ImportError(
            f"the prefix index (router/index/_native) was not built for this Python: {error}. Install blockcast again: "
            "pip install . builds it, with a compiler from the registry where the machine has none"
        ) from error
    return Index(secrets.randbits(64) if seed is None else seed & (1 << 64) - 1)
