"""The part of each layer that one rank holds: column and row splits of tensor parallelism (Megatron-LM, 2019).

Projections into heads or channels are split by rows, so that each rank computes its own heads. The projection back is
split by columns, and its partial results are added over the ranks. Embedding and head are split by tokens of the
vocabulary. A `DimShard` says which rows or columns of a checkpoint's tensor a rank holds. With one rank every shard is
whole. Knows no processes: the operations between ranks are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.spec import ceil_div
from engine.models.hf_config import ModelError


@dataclass(frozen=True, slots=True)
class DimShard:
    """The part of one dimension of a checkpoint's tensor that a rank holds."""

    total_size: int
    """Size of the dimension in the checkpoint."""
    ranges: tuple[tuple[int, int], ...]
    """Ranges [start, end) of the dimension that the rank holds, in the order of the rank's tensor."""

    @staticmethod
    def concatenate(parts: Sequence[DimShard]) -> DimShard:
        """Return the shard of a dimension that is made of consecutive sections, which are split as `parts`.

        If the rank holds [0, 4) of a section of 8 and [2, 4) of a section of 4, it holds [0, 4) and [10, 12) of 12.
        """
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
"""A dimension of a tensor: its size, or the part of it that a rank holds."""


def get_total_size(extent: Extent) -> int:
    return extent.total_size if isinstance(extent, DimShard) else extent


def get_held_size(extent: Extent) -> int:
    return extent.held_size if isinstance(extent, DimShard) else extent


@dataclass(frozen=True, slots=True)
class Shard:
    """Says which rank of several this is, and computes which part of each dimension the rank holds."""

    rank: int = 0
    num_ranks: int = 1
    all_reduce_sum: Callable[[Tensor], Tensor] | None = None
    """Replaces a tensor by its sum over the ranks, and returns it, with the same bits on each rank. None: one rank."""
    gather: Callable[[Tensor], Tensor | None] | None = None
    """Puts [rows, n] of all ranks side by side, [rows, num_ranks * n], on rank 0; None elsewhere. None: one rank."""

    def split(self, count: int, unit_name: str, width: int = 1) -> DimShard:
        """Return this rank's equal share of `count` things, such as heads, of `width` rows each.

        With 8 heads of 64 rows, rank 1 of 2 holds the rows [256, 512). `unit_name`: name of the things for the
        ModelError that is raised if they cannot be shared equally.
        """
        if count % self.num_ranks:
            raise ModelError(
                f"--tensor-parallel-size {self.num_ranks}: expected a divisor of the model's {unit_name} ({count})"
            )
        share = count // self.num_ranks
        return DimShard(count * width, ((self.rank * share * width, (self.rank + 1) * share * width),))

    def split_padded(self, count: int) -> DimShard:
        """Return this rank's share of `count` rows. The last ranks may have fewer rows than the others."""
        start, end = (min(rank * self.compute_padded_share(count), count) for rank in (self.rank, self.rank + 1))
        return DimShard(count, ((start, end),))

    def compute_padded_share(self, count: int) -> int:
        """Return the number of rows of the first rank, which has the most."""
        return ceil_div(count, self.num_ranks)

    def split_shared(self, count: int, unit_name: str, width: int = 1) -> DimShard:
        """Return this rank's share of key heads or groups, which consecutive query heads share.

        A rank gets those of its own query heads. With fewer of them than ranks, neighbouring ranks hold the same: of 2
        key heads with 64 rows, ranks 0 and 1 of 4 hold [0, 64), and ranks 2 and 3 hold [64, 128). Else as `split`.
        """
        if self.num_ranks % count:
            return self.split(count, unit_name, width)
        index = self.rank // (self.num_ranks // count)
        return DimShard(count * width, ((index * width, (index + 1) * width),))
