"""Declarations of a model's weights: their shapes, and the tensors of the checkpoint that each is made of.

A model's constructor declares weights in a `WeightScope`; the loader allocates and fills them. So a model can be built
from its config alone, for example to size the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.shard import DimShard, Extent, Shard, get_held_size, get_total_size
from kernels.cpu.packed import PackedMatrix, multiply_packed, pack_matrix

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Tensor of a checkpoint, which is copied to `target_index` of a weight."""

    name: str
    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    target_index: Index = ()
    """Index into the weight. A smaller tensor is broadcast to it."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Function that makes the copied values, such as a rank's share; None: the tensor is copied as it is."""


@dataclass(slots=True, eq=False)
class Weight:
    """A matrix or vector of a model, and the tensors of the checkpoint that it is made of. The loader gives it
    values.
    """

    shape: tuple[int, ...]
    parts: tuple[CheckpointTensor, ...]
    dtype: torch.dtype | None = None
    """None: the model's dtype."""
    is_linear: bool = False
    """Whether the matrix is used by `multiply`, for which it may be packed."""
    is_embedding: bool = False
    """Whether rows of the matrix are read, too (a tied embedding): then the unpacked matrix is kept."""
    _tensor: Tensor | None = None
    _packed_matrix: PackedMatrix | None = None

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, f"{self.parts[0].name} is not loaded, or packed"
        return self._tensor

    def allocate(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the weight on a device, uninitialised, in `dtype` unless it has its own."""
        self._tensor = torch.empty(self.shape, dtype=self.dtype or dtype, device=device)
        self._packed_matrix = None
        return self._tensor

    def pack(self) -> None:
        """Pack a loaded matrix for fast multiplication, if there is such a layout for it."""
        if not self.is_linear:
            return
        self._packed_matrix = pack_matrix(self.tensor)
        if self._packed_matrix is not None and not self.is_embedding:
            self._tensor = None

    def replace_values(self, other: Weight) -> None:
        """Take the values of another weight of the same shape, which must not be used afterwards.

        On a GPU they are copied in place, because recorded steps use the address.
        """
        assert self.shape == other.shape
        if self._tensor is not None and self._tensor.device.type != "cpu":
            self._tensor.copy_(other.tensor)
        else:
            self._tensor, self._packed_matrix = other._tensor, other._packed_matrix

    def move_to(self, device: torch.device) -> None:
        """Move the weight to another device."""
        if self._tensor is not None:
            self._tensor = self._tensor.to(device)

    def release(self) -> None:
        """Free the weight's memory. It must be loaded again."""
        self._tensor = self._packed_matrix = None

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ W^T + bias. x: [tokens, inputs]."""
        if self._packed_matrix is not None:
            return multiply_packed(x, self._packed_matrix, bias)
        return F.linear(x, self.tensor, bias)


@dataclass(slots=True)
class WeightScope:
    """Declares the weights of one part of a model, under a prefix of their names in the checkpoint.

    All scopes of a model share one list of weights and one shard. A shape may have dimensions that are split over
    ranks: then the weight has this rank's part of the tensor.
    """

    prefix: str = ""
    weights: list[Weight] = field(default_factory=list)
    shard: Shard = field(default_factory=Shard)

    def enter_scope(self, name: str | int) -> WeightScope:
        return WeightScope(f"{self.prefix}{name}.", self.weights, self.shard)

    def describe_tensor(
        self,
        name: str,
        shape: tuple[Extent, ...],
        target_index: Index = (),
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> CheckpointTensor:
        """Describe a tensor of the checkpoint, as one of the parts that `declare_combined` takes.

        `shape`: shape in the checkpoint. `target_index`: index of the weight to which the tensor is copied.
        `transform`: function that is applied to this rank's part of the tensor before the copy.
        """
        return CheckpointTensor(
            self.prefix + name, tuple(map(get_total_size, shape)), target_index, _slice_and_transform(shape, transform)
        )

    def declare_weight(self, name: str, shape: tuple[Extent, ...], dtype: torch.dtype | None = None) -> Weight:
        """Declare a weight that is this rank's part of one tensor of the checkpoint."""
        return self.declare_combined(shape, [self.describe_tensor(name, shape)], dtype)

    def declare_combined(
        self, shape: tuple[Extent, ...], parts: list[CheckpointTensor], dtype: torch.dtype | None = None
    ) -> Weight:
        """Declare a weight that is put together from several tensors of the checkpoint, such as q, k and v."""
        weight = Weight(tuple(map(get_held_size, shape)), tuple(parts), dtype)
        self.weights.append(weight)
        return weight


def _slice_and_transform(
    shape: tuple[Extent, ...], transform: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor], Tensor] | None:
    """Return `transform` with a step before it that takes this rank's part of the tensor.

    Without dimensions that are split over ranks, `transform` is returned as it is.
    """
    shards = [(dim, extent) for dim, extent in enumerate(shape) if isinstance(extent, DimShard) and not extent.is_whole]
    if not shards:
        return transform

    def slice_and_transform(tensor: Tensor) -> Tensor:
        for dim, shard in shards:
            tensor = shard.slice_tensor(tensor, dim)
        return tensor if transform is None else transform(tensor)

    return slice_and_transform
