"""Declarations of a model's tensors: their shapes, and the checkpoint tensors each is put together from.

A model's constructor declares through a `WeightScope`; the loader fills. Nothing is allocated before the loader does
it, so a model can be built from its config alone (to size the cache, to print its blocks).
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
    """Tensor of the checkpoint and its place: it is copied (broadcast, where smaller) to `target_index`."""

    name: str
    shape: tuple[int, ...]
    """Its shape in the checkpoint."""
    target_index: Index = ()
    transform: Callable[[Tensor], Tensor] | None = None
    """Function of the part that is copied (a rank's share, a reordering); None: all of it, as it is."""


@dataclass(slots=True, eq=False)
class Weight:
    """Weight of a model; `tensor` is there once the model is loaded."""

    shape: tuple[int, ...]
    parts: tuple[CheckpointTensor, ...]
    dtype: torch.dtype | None = None
    """None: the model's dtype."""
    is_linear: bool = False
    """Whether inputs are multiplied with the matrix by `multiply`: it may be packed for that."""
    is_embedding: bool = False
    """Whether rows are read as well (a tied embedding): packed, it stays also as it was."""
    _tensor: Tensor | None = None
    _packed_matrix: PackedMatrix | None = None

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, f"{self.parts[0].name} is not loaded, or packed"
        return self._tensor

    def allocate(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._tensor = torch.empty(self.shape, dtype=self.dtype or dtype, device=device)
        self._packed_matrix = None
        return self._tensor

    def pack(self) -> None:
        """Lay a loaded matrix out for fast multiplication, where there is such a layout."""
        if not self.is_linear:
            return
        self._packed_matrix = pack_matrix(self.tensor)
        if self._packed_matrix is not None and not self.is_embedding:
            self._tensor = None

    def replace_values(self, other: Weight) -> None:
        """Take the values of a weight of the same shape, which is used up: on a GPU in place, as recorded steps read
        it there."""
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
        """Free the weight's memory until it is loaded again."""
        self._tensor = self._packed_matrix = None

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ W^T + bias. x: [tokens, inputs]."""
        if self._packed_matrix is not None:
            return multiply_packed(x, self._packed_matrix, bias)
        return F.linear(x, self.tensor, bias)


@dataclass(slots=True)
class WeightScope:
    """Scope in the checkpoint's names; all scopes of a model share one list of weights and one shard.

    Shapes may have dimensions that are split over ranks: the checkpoint holds all of them, the model's tensor the part
    of this rank.
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
        """Describe a tensor of the checkpoint. `transform` gets the sliced tensor."""
        return CheckpointTensor(
            self.prefix + name, tuple(map(get_total_size, shape)), target_index, _slice_and_transform(shape, transform)
        )

    def declare_weight(self, name: str, shape: tuple[Extent, ...], dtype: torch.dtype | None = None) -> Weight:
        """Declare a weight that is one tensor of the checkpoint, unchanged but for the slice."""
        return self.declare_combined(shape, [self.describe_tensor(name, shape)], dtype)

    def declare_combined(
        self, shape: tuple[Extent, ...], parts: list[CheckpointTensor], dtype: torch.dtype | None = None
    ) -> Weight:
        """Declare a weight that is put together from several tensors of the checkpoint."""
        weight = Weight(tuple(map(get_held_size, shape)), tuple(parts), dtype)
        self.weights.append(weight)
        return weight


def _slice_and_transform(
    shape: tuple[Extent, ...], transform: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor], Tensor] | None:
    """Slice the dimensions that are not whole, then `transform`."""
    shards = [(dim, extent) for dim, extent in enumerate(shape) if isinstance(extent, DimShard) and not extent.is_whole]
    if not shards:
        return transform

    def slice_and_transform(tensor: Tensor) -> Tensor:
        for dim, shard in shards:
            tensor = shard.slice_tensor(tensor, dim)
        return tensor if transform is None else transform(tensor)

    return slice_and_transform
