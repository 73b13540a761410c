"""The part of each layer that one rank holds: column and row splits of tensor parallelism (Megatron-LM, 2019).

Projections into heads or channels are split by rows, so that each rank computes its own heads. The projection back is
split by columns, and its partial results are added over the ranks. Embedding and head are split by tokens of the
vocabulary. Knows no processes: the operations between ranks are arguments.
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
    """The part of one dimension of a checkpoint's tensor that a tensor-parallel rank holds."""

    total_size: int
    """Size of the dimension in the checkpoint."""
    ranges: tuple[tuple[int, int], ...]
    """Ranges [start, end) of the dimension that the rank holds, in the order of the rank's tensor."""

    @staticmethod
    def concatenate(parts: Sequence[DimShard]) -> DimShard:
        """Return what a rank holds of a dimension that is made of several, one after the other, as q, k and v are.

        If the rank holds [0, 4) of a part of 8 and [2, 4) of a part of 4, it holds [0, 4) and [10, 12) of 12.
        """
        ranges: list[tuple[int, int]] = []
        offset = 0
        for part in parts:
            for start, end in part.ranges:
                is_adjacent = bool(ranges) and ranges[-1][1] == offset + start
                if is_adjacent:
                    first_start, _ = ranges.pop()
                    ranges.append((first_start, offset + end))
                else:
                    ranges.append((offset + start, offset + end))
            offset += part.total_size
        return DimShard(total_size=offset, ranges=tuple(ranges))

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
    """This process's rank under tensor parallelism. Computes which part of each weight the rank holds."""

    rank: int = 0
    num_ranks: int = 1
    all_reduce_sum: Callable[[Tensor], Tensor] | None = None
    """Replaces a tensor by its sum over the ranks, and returns it, with the same bits on each rank. None: one rank."""
    gather: Callable[[Tensor], Tensor | None] | None = None
    """Puts [rows, n] of all ranks side by side, [rows, num_ranks * n], on rank 0; None elsewhere. None: one rank."""

    def split(self, count: int, unit_name: str, width: int = 1) -> DimShard:
        """Return the rows that this rank holds, if each rank holds equally many of `count` heads of `width` rows.

        With 8 heads of 64 rows, rank 1 of 2 holds the rows [256, 512). Raises ModelError if `count` cannot be divided;
        `unit_name` is its word for the heads, which may also be channels.
        """
        if count % self.num_ranks:
            raise ModelError(
                f"--tensor-parallel-size {self.num_ranks}: expected a divisor of the model's {unit_name} ({count})"
            )
        share = count // self.num_ranks
        return DimShard(count * width, ((self.rank * share * width, (self.rank + 1) * share * width),))

    def split_padded(self, count: int) -> DimShard:
        """Return the rows that this rank holds of `count` rows. The last ranks may have fewer than the others."""
        share = self.compute_padded_share(count)
        start = min(self.rank * share, count)
        end = min(start + share, count)
        return DimShard(count, ((start, end),))

    def compute_padded_share(self, count: int) -> int:
        """Return the number of rows that the first rank holds by `split_padded`: no rank has more."""
        return ceil_div(count, self.num_ranks)

    def split_shared(self, count: int, unit_name: str, width: int = 1) -> DimShard:
        """Return the rows that this rank holds of `count` key heads of `width` rows, which query heads share.

        With fewer key heads than ranks, neighbouring ranks hold the same one: of 2 key heads with 64 rows, ranks 0 and
        1 of 4 hold [0, 64), and ranks 2 and 3 hold [64, 128). Otherwise as `split`.
        """
        if self.num_ranks % count:
            return self.split(count, unit_name, width)
        ranks_per_head = self.num_ranks // count
        index = self.rank // ranks_per_head
        return DimShard(count * width, ((index * width, (index + 1) * width),))
