"""Declarations of a model's weights: their shapes, and the tensors of the checkpoint that each is made of.

A model's constructor declares weights in a `WeightScope`; the loader allocates and fills them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.shard import DimShard, Extent, Shard, get_held_size, get_total_size
from kernels.cpu.packed import PackedMatrix, pack_matrix

Index = tuple[int | slice | None, ...]


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Tensor of a checkpoint, which is copied to `target_index` of a weight."""

    name: str
    extents: tuple[Extent, ...]
    """Shape in the checkpoint, with the part of each dimension that this rank holds."""
    target_index: Index = ()
    """Index into the weight. A smaller tensor is broadcast to it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the checkpoint."""
        return tuple(map(get_total_size, self.extents))

    def slice_tensor(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the checkpoint's tensor."""
        for dim, extent in enumerate(self.extents):
            if isinstance(extent, DimShard) and not extent.is_whole:
                tensor = extent.slice_tensor(tensor, dim)
        return tensor


@dataclass(slots=True, eq=False)
class Weight:
    """A matrix or vector of a model, which the loader fills with values from tensors of the checkpoint.

    A CPU multiplies faster by a packed matrix, which can be used for nothing else.
    """

    shape: tuple[int, ...]
    parts: tuple[CheckpointTensor, ...]
    """Tensors of the checkpoint that the weight is made of."""
    dtype: torch.dtype | None = None
    """None: the model's dtype."""
    is_linear: bool = False
    """Whether the matrix is used by `multiply`, so that it may be packed."""
    is_embedding: bool = False
    """Whether rows of the matrix are read (an embedding that is also the head), so that it is kept unpacked, too."""
    _tensor: Tensor | None = None
    _packed_matrix: PackedMatrix | None = None

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, f"{self.parts[0].name} is not loaded, or packed"
        return self._tensor

    def allocate(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the weight on a device, uninitialised, in `dtype` unless the weight has a dtype of its own."""
        self._tensor = torch.empty(self.shape, dtype=self.dtype or dtype, device=device)
        self._packed_matrix = None
        return self._tensor

    def pack(self) -> None:
        """Pack a loaded matrix for fast multiplication, if that is possible."""
        if not self.is_linear:
            return
        self._packed_matrix = pack_matrix(self.tensor)
        if self._packed_matrix is not None and not self.is_embedding:
            self._tensor = None

    def replace_values(self, other: Weight) -> None:
        """Take the values of another weight of the same shape, which must not be used afterwards.

        On a GPU they are copied in place, because CUDA graphs use the address.
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
            return self._packed_matrix.multiply(x, bias)
        return F.linear(x, self.tensor, bias)


@dataclass(slots=True)
class WeightScope:
    """Declares the weights of a part of a model, such as a layer, under a common prefix of their names.

    All parts of a model share one list of weights. A shape may have dimensions that are split over tensor-parallel
    ranks (`DimShard`): then the weight is this rank's part of the checkpoint's tensor.
    """

    prefix: str = ""
    weights: list[Weight] = field(default_factory=list)
    shard: Shard = field(default_factory=Shard)

    def enter_scope(self, name: str | int) -> WeightScope:
        return WeightScope(f"{self.prefix}{name}.", self.weights, self.shard)

    def describe_tensor(self, name: str, shape: tuple[Extent, ...], target_index: Index = ()) -> CheckpointTensor:
        """Describe a tensor of the checkpoint that the loader copies into a part of a weight; see `declare_combined`.

        `shape`: shape in the checkpoint, with the part of each dimension that this rank holds. `target_index`: index
        into the weight; (): all of it.
        """
        return CheckpointTensor(self.prefix + name, shape, target_index)

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
