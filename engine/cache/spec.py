"""The shape of a model's cache: attention groups, recurrent state, and the units that memory is cut into.

Pure arithmetic; knows no tensors. Group 0 is full attention, the others are sliding windows; state is no group.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from events.sources import GroupInfo

FULL_KIND = 0
"""The kind of the full-attention group. Every prefix has blocks of this kind."""

FULL_ATTENTION = "full_attention"
SLIDING_WINDOW = "sliding_window"
MAMBA = "mamba"


def ceil_div(count: int, size: int) -> int:
    """Return how many parts of `size` hold `count` items."""
    return -(-count // size)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Attention layers that share one block table."""

    kind: str
    """FULL_ATTENTION or SLIDING_WINDOW: the `kv_cache_spec_kind` of the group's events."""
    layer_indices: tuple[int, ...]
    """Indices of the layers in the model. Their order here is that of the layer axis of the group's blocks."""
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
    """The recurrent layers. A checkpoint holds one state of each."""

    layer_indices: tuple[int, ...]
    state_bytes: int
    """Bytes of the states of all layers: conv tails and recurrent matrices."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """All that the cache must know about a model."""

    block_size: int
    """Tokens of a block, the same in every group."""
    groups: tuple[GroupSpec, ...]
    state: StateSpec | None = None

    @property
    def state_kind(self) -> int:
        """Kind of the blocks that hold states: the number of groups. Models without state have no such block."""
        return len(self.groups)

    def list_group_infos(self) -> list[GroupInfo]:
        """Return the response of /kv_cache/groups: attention groups, then recurrent state if the model has it."""
        windows = [(group.kind, group.sliding_window) for group in self.groups]
        if self.state is not None:
            windows.append((MAMBA, None))
        return [
            GroupInfo(group_idx=index, kind=kind, block_size=self.block_size, sliding_window=window)
            for index, (kind, window) in enumerate(windows)
        ]

    def block_bytes(self, group: int) -> int:
        return self.block_size * self.groups[group].token_bytes

    def block_bytes_by_kind(self) -> list[int]:
        """Return the bytes of a block of every kind; the kind of states, if there is one, comes last."""
        block_bytes = [self.block_bytes(g) for g in range(len(self.groups))]
        return block_bytes if self.state is None else [*block_bytes, self.state.state_bytes]

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit, chosen so that a state, or blocks of any group, fill it with little waste."""
        return _choose_unit_bytes(self)

    def blocks_per_unit(self, group: int) -> int:
        return self.unit_bytes // self.block_bytes(group)

    def blocks_per_unit_by_kind(self) -> list[int]:
        """Return the blocks of every kind that a unit holds; the kind of states, if there is one, comes last."""
        return [self.blocks_per_unit(g) for g in range(len(self.groups))] + [1] * (self.state is not None)

    @property
    def padding_share(self) -> float:
        """Share of a unit, 0 .. 1, that the kind which fits worst leaves unused."""
        return self.compute_padding_share(self.unit_bytes)

    def compute_padding_share(self, unit_bytes: int) -> float:
        """Return the share of a unit of `unit_bytes` bytes, 0 .. 1, that the kind which fits worst leaves unused."""
        padding_bytes = [unit_bytes % self.block_bytes(g) for g in range(len(self.groups))]
        if self.state is not None:  # a unit holds one state, never two
            padding_bytes.append(unit_bytes - self.state.state_bytes)
        return max(padding_bytes) / unit_bytes


_UNIT_ALIGNMENT_BYTES = 256
"""Every unit starts at a multiple of so many bytes, as vector loads of any dtype need."""
_UNIT_GROWTH_MAX = 8
"""Largest unit of a model without state, in blocks of the largest group: larger units may fit all groups better."""


@functools.lru_cache(maxsize=64)
def _choose_unit_bytes(spec: CacheSpec) -> int:
    """Return the smallest unit size at which the kind that fits worst wastes the smallest share of the unit.

    With blocks of 300 and 400 KB, a unit of 1200 KB wastes nothing. In a model with states, a unit is no larger than
    needed for one state, in whole blocks of some group.
    """
    largest_bytes = max(spec.block_bytes_by_kind())
    growth_max = 1 if spec.state else _UNIT_GROWTH_MAX
    unit_sizes = {largest_bytes}
    for block_bytes in map(spec.block_bytes, range(len(spec.groups))):
        min_count = ceil_div(largest_bytes, block_bytes)
        unit_sizes.update(count * block_bytes for count in range(min_count, min_count * growth_max + 1))
    aligned_sizes = {ceil_div(size, _UNIT_ALIGNMENT_BYTES) * _UNIT_ALIGNMENT_BYTES for size in unit_sizes}
    return min(sorted(aligned_sizes), key=spec.compute_padding_share)
