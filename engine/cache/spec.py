"""The shape of what a model keeps in the cache: attention groups, recurrent state, and the units they are cut into.

Pure arithmetic; knows no tensors. Group 0 is full attention, then sliding window; state stands beside the groups.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

FULL_KIND = 0
"""The kind of the full-attention group: the one whose chain of blocks carries everything else."""

FULL_ATTENTION = "full_attention"
SLIDING_WINDOW = "sliding_window"
MAMBA = "mamba"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The attention layers that share one block table."""

    kind: str
    """FULL_ATTENTION or SLIDING_WINDOW: the `kv_cache_spec_kind` of the group's events."""
    layer_indices: tuple[int, ...]
    """Model layer indices, in order; position in this tuple is the layer axis of the group's blocks."""
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    sliding_window: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over all layers of the group."""
        return 2 * len(self.layer_indices) * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The recurrent layers: one set of their states is what a checkpoint holds."""

    layer_indices: tuple[int, ...]
    state_bytes: int
    """Bytes of the states of all layers (conv tails and recurrent matrices), as the runner lays them out."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Everything the pool must know about a model. `block_size` is the hash block size, in tokens; never inflated."""

    block_size: int
    groups: tuple[GroupSpec, ...]
    state: StateSpec | None = None

    @property
    def state_kind(self) -> int:
        """The kind of states, after the groups. Models without state have no block of it."""
        return len(self.groups)

    def block_bytes(self, group: int) -> int:
        return self.block_size * self.groups[group].token_bytes

    def block_bytes_by_kind(self) -> list[int]:
        """Bytes of a block of every kind; the state's last, if there is one."""
        block_bytes = [self.block_bytes(g) for g in range(len(self.groups))]
        return block_bytes if self.state is None else [*block_bytes, self.state.state_bytes]

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit: holds the state and a block of any group, and wastes as little as possible of either."""
        block_sizes = tuple(self.block_bytes(g) for g in range(len(self.groups)))
        return _choose_unit_bytes(block_sizes, self.state.state_bytes if self.state else 0)

    def blocks_per_unit(self, group: int) -> int:
        return self.unit_bytes // self.block_bytes(group)

    def blocks_per_unit_by_kind(self) -> list[int]:
        """Blocks of every kind that a unit holds; the state's last, if there is one."""
        return [self.blocks_per_unit(g) for g in range(len(self.groups))] + [1] * (self.state is not None)

    @property
    def padding_share(self) -> float:
        """Part of a unit, 0 .. 1, that stays unused by the kind which fits worst."""
        unit_bytes = self.unit_bytes
        block_bytes = [self.block_bytes(g) for g in range(len(self.groups))]
        if self.state:
            return max(unit_bytes - self.state.state_bytes, *(unit_bytes % size for size in block_bytes)) / unit_bytes
        return max(unit_bytes % size for size in block_bytes) / unit_bytes


_UNIT_ALIGNMENT_BYTES = 256
"""Bytes: every unit starts where any dtype and any vector load may start."""
_UNIT_GROWTH_MAX = 8
"""Without state, units may grow up to so many times the largest block to let every group's blocks tile them."""


@functools.lru_cache(maxsize=64)
def _choose_unit_bytes(block_sizes: tuple[int, ...], state_bytes: int) -> int:
    """The smallest size with the least padding in the kind that fits worst.

    A unit holds one state, never two, so with state it is the state's size or the next multiple of a block above it.
    """
    largest_block_bytes = max(*block_sizes, state_bytes, 1)
    candidates = {largest_block_bytes}
    for block in block_sizes:
        blocks_min = -(-largest_block_bytes // block)
        candidates |= {
            count * block for count in range(blocks_min, blocks_min * (1 if state_bytes else _UNIT_GROWTH_MAX) + 1)
        }
    sizes = [*block_sizes, state_bytes] if state_bytes else list(block_sizes)

    def padding_share(unit_bytes: int) -> float:
        return max(
            (unit_bytes - state_bytes if size == state_bytes else unit_bytes % size) / unit_bytes for size in sizes
        )

    unit_sizes = {-(-size // _UNIT_ALIGNMENT_BYTES) * _UNIT_ALIGNMENT_BYTES for size in candidates}
    return min(sorted(unit_sizes), key=padding_share)
