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
    """A group of attention layers that share one block table: a block holds the KV of all its layers."""

    kind: str
    """FULL_ATTENTION or SLIDING_WINDOW. KV cache events report it as `kv_cache_spec_kind`."""
    layer_indices: tuple[int, ...]
    """Indices of the layers in the model, in the order of the layer axis of a block."""
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    sliding_window: int | None = None
    """Number of tokens that a query sees; None for full attention."""

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
    """Shape of a model's KV cache, from which the sizes of its blocks follow.

    Every group of attention layers has its own kind of blocks, and recurrent state is the last kind. Memory is divided
    into units of equal size, each of which holds blocks of one kind.
    """

    block_size: int
    """Tokens of a block, the same in every group."""
    groups: tuple[GroupSpec, ...]
    state: StateSpec | None = None
    """The recurrent layers, such as Mamba; None if the model has none."""

    @property
    def state_kind(self) -> int:
        """Kind of the blocks that hold recurrent states: the index after the last group's."""
        return len(self.groups)

    def list_group_infos(self) -> list[GroupInfo]:
        """Return the response of /kv_cache/groups: attention groups, then recurrent state if the model has it."""
        kinds_and_windows = [(group.kind, group.sliding_window) for group in self.groups]
        if self.state is not None:
            kinds_and_windows.append((MAMBA, None))
        return [
            GroupInfo(group_idx=index, kind=kind, block_size=self.block_size, sliding_window=window)
            for index, (kind, window) in enumerate(kinds_and_windows)
        ]

    def block_bytes(self, group: int) -> int:
        return self.block_size * self.groups[group].token_bytes

    def block_bytes_by_kind(self) -> list[int]:
        """Return the bytes of a block of every kind."""
        block_bytes = [self.block_bytes(group) for group in range(len(self.groups))]
        return block_bytes if self.state is None else [*block_bytes, self.state.state_bytes]

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit, chosen so that a state, or blocks of any group, fill it with little waste."""
        return _choose_unit_bytes(self)

    def blocks_per_unit(self, group: int) -> int:
        return self.unit_bytes // self.block_bytes(group)

    def blocks_per_unit_by_kind(self) -> list[int]:
        """Return how many blocks of every kind a unit holds. Of recurrent states, it holds one."""
        block_counts = [self.blocks_per_unit(group) for group in range(len(self.groups))]
        return block_counts if self.state is None else [*block_counts, 1]

    def compute_padding_share(self, unit_bytes: int) -> float:
        """Return the share of a unit of `unit_bytes` bytes, 0 .. 1, that the kind which fits worst leaves unused."""
        padding_bytes = [unit_bytes % self.block_bytes(group) for group in range(len(self.groups))]
        if self.state is not None:
            padding_bytes.append(unit_bytes - self.state.state_bytes)
        return max(padding_bytes) / unit_bytes


_UNIT_ALIGNMENT_BYTES = 256
"""The size of a unit is a multiple of so many bytes, as vector loads of any dtype need."""
_UNIT_GROWTH_MAX = 8
"""Most of a group's blocks in a unit of a model without state, as a multiple of what holds the largest block."""


@functools.lru_cache(maxsize=64)
def _choose_unit_bytes(spec: CacheSpec) -> int:
    """Return the smallest unit size at which the kind that fits worst wastes the smallest share of the unit.

    With blocks of 300 and 400 KB, a unit of 1200 KB wastes nothing. In a model with states, a unit is no larger than
    needed for the largest block or state, in whole blocks of some group.
    """
    largest_bytes = max(spec.block_bytes_by_kind())
    growth_max = 1 if spec.state else _UNIT_GROWTH_MAX
    unit_sizes = {largest_bytes}
    for block_bytes in map(spec.block_bytes, range(len(spec.groups))):
        min_count = ceil_div(largest_bytes, block_bytes)
        unit_sizes.update(count * block_bytes for count in range(min_count, min_count * growth_max + 1))
    aligned_sizes = {ceil_div(size, _UNIT_ALIGNMENT_BYTES) * _UNIT_ALIGNMENT_BYTES for size in unit_sizes}
    return min(sorted(aligned_sizes), key=spec.compute_padding_share)
