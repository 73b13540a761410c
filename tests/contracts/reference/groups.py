"""One KV cache group of a holder: what its events and its declaration say of it, and what that demands of a prefix.

Refuses to know the blocks; the arithmetic of a usable prefix is in match.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from events.types import FULL_ATTENTION_KINDS

GroupKey = int | None
"""`group_idx`; None for engines that announce no groups."""

_IGNORED_KINDS = frozenset({"encoder_only_attention", "cross_attention"})
_WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})


@dataclass(slots=True)
class Group:
    """One KV cache group of the holder. See `role` for what it demands of a prefix."""

    key: GroupKey
    kind: str | None = None
    block_size: int | None = None
    window: int | None = None
    is_declared: bool = False
    has_events: bool = False
    is_sparse: bool = False
    """It has announced fewer hashes than blocks: it does not keep a block at every boundary."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Names held by block length, over all tiers."""

    @property
    def role(self) -> str:
        """`full`, `window`, `chunk`, `state` or `ignored`. A window or chunk of unknown size is taken as full."""
        if self.kind in _IGNORED_KINDS:
            return "ignored"
        if self.kind == "mamba":
            return "state"
        if self.window is not None and self.kind in _WINDOW_KINDS:
            return "window"
        if self.window is not None and self.kind == "chunked_local_attention":
            return "chunk"
        return "full"

    @property
    def is_full_attention(self) -> bool:
        """Full attention spells out every name; other groups may leave it to do so."""
        return self.kind is None or self.kind in FULL_ATTENTION_KINDS
