"""Which part of each layer one process holds: column and row splits of tensor parallelism (Megatron-LM, 2019).

Projections into heads or channels are split by rows, so that each rank computes its own heads; the projection back is
split by columns, and its partial results are added over the ranks. Embedding and head are split by tokens of the
vocabulary. A `DimShard` says which rows or columns of a tensor of the checkpoint a rank holds; with one rank every
shard is whole, and nothing is sliced or added. Knows no processes: how ranks add is given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.hf_config import ModelError


@dataclass(frozen=True, slots=True)
class DimShard:
    """The part of one dimension of a tensor that a rank holds: half-open ranges of it, in the order they are held."""

    total_size: int
    ranges: tuple[tuple[int, int], ...]

    @staticmethod
    def concatenate(parts: Sequence[DimShard]) -> DimShard:
        """Return the cut of a tensor whose sections, one after another, are cut as `parts`."""
        ranges: list[tuple[int, int]] = []
        offset = 0
        for part in parts:
            for start, end in part.ranges:
                if ranges and ranges[-1][1] == offset + start:
                    ranges[-1] = (ranges[-1][0], offset + end)
                else:
                    ranges.append((offset + start, offset + end))
            offset += part.total_size
        return DimShard(offset, tuple(ranges))

    @property
    def held_size(self) -> int:
        return sum(end - start for start, end in self.ranges)

    @property
    def is_whole(self) -> bool:
        return self.ranges == ((0, self.total_size),)

    def slice_tensor(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the part of `tensor` that this rank holds."""
        return torch.cat([tensor.narrow(dim, start, end - start) for start, end in self.ranges], dim)


Extent = int | DimShard
"""A dimension of a tensor: whole, or cut."""


def get_total_size(extent: Extent) -> int:
    return extent.total_size if isinstance(extent, DimShard) else extent


def get_held_size(extent: Extent) -> int:
    return extent.held_size if isinstance(extent, DimShard) else extent


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of several that compute a model together."""

    rank: int = 0
    num_ranks: int = 1
    all_reduce_sum: Callable[[Tensor], Tensor] | None = None
    """Replaces a tensor by its sum over the ranks, in place, and returns it, with the same bits on each rank. None: one
    rank."""
    gather: Callable[[Tensor], Tensor | None] | None = None
    """Gathers [rows, n] of all ranks side by side as [rows, num_ranks * n] on rank 0; returns None elsewhere. None: one
    rank."""

    def split(self, count: int, unit_name: str, width: int = 1) -> DimShard:
        """Return this rank's equal share of `count` things, each `width` wide. Raises ModelError if they cannot be
        shared."""
        if count % self.num_ranks:
            raise ModelError(
                f"--tensor-parallel-size {self.num_ranks}: expected a divisor of the model's {unit_name} ({count})"
            )
        share = count // self.num_ranks
        return DimShard(count * width, ((self.rank * share * width, (self.rank + 1) * share * width),))

    def split_padded(self, count: int) -> DimShard:
        """Return this rank's share of `count` rows; where they cannot be shared equally the last ranks have fewer."""
        start, end = (min(rank * self.compute_padded_share(count), count) for rank in (self.rank, self.rank + 1))
        return DimShard(count, ((start, end),))

    def compute_padded_share(self, count: int) -> int:
        """Return the rows of a rank that is not one of the last."""
        return -(-count // self.num_ranks)

    def split_shared(self, count: int, unit_name: str, width: int = 1) -> DimShard:
        """Return this rank's share as `split` does; with fewer things than ranks, neighbouring ranks hold the same one.

        For key heads or groups that are shared by consecutive query heads: a rank gets what its own heads need.
        """
        if self.num_ranks % count:
            return self.split(count, unit_name, width)
        index = self.rank // (self.num_ranks // count)
        return DimShard(count * width, ((index * width, (index + 1) * width),))
