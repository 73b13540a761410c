"""Layout of a sequence's recurrent state in a unit of the cache: the matrices of all layers (fp32), then conv tails."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.spec import ceil_div
from engine.models.layers import LayerState, StateShape

RECURRENT_DTYPE = torch.float32
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of the recurrent state of one sequence in a memory unit of the cache.

    A layer's state is the last inputs of its convolution ("conv tail") and, in most layers, a matrix in fp32. The
    matrices of all layers come first, and then the conv tails.
    """

    shapes: tuple[StateShape, ...]
    tail_dtype: torch.dtype

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all layers together."""
        return sum(_count_bytes(shape, dtype) for shape, dtype in self._list_parts())

    def make_layer_states(self, buffer: Tensor, unit_bytes: int) -> list[LayerState]:
        """View each layer's state in all units of the cache. buffer: [units * unit_bytes] uint8."""
        views = []
        start = 0
        for shape, dtype in self._list_parts():
            views.append(_make_strided_view(buffer, unit_bytes, start, shape, dtype))
            start += _count_bytes(shape, dtype)
        layer_count = len(self.shapes)
        tails, matrices = views[layer_count:], views[:layer_count]
        return [LayerState(tail, matrix) for tail, matrix in zip(tails, matrices, strict=True)]

    def _list_parts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the tensors of all layers in their order in memory."""
        matrices = [(shape.recurrent_state or (0,), RECURRENT_DTYPE) for shape in self.shapes]
        return [*matrices, *((shape.conv_tail, self.tail_dtype) for shape in self.shapes)]


def _count_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in a unit, up to the next multiple of ALIGNMENT_BYTES."""
    return ceil_div(math.prod(shape) * dtype.itemsize, ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _make_strided_view(
    buffer: Tensor, unit_bytes: int, start_bytes: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """View [units, *shape] of `dtype`, `start_bytes` into each unit."""
    assert unit_bytes % ALIGNMENT_BYTES == 0
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    unit_count = buffer.numel() // unit_bytes
    elements = buffer.view(dtype)
    return elements.as_strided(
        (unit_count, *shape),
        (unit_bytes // dtype.itemsize, *strides),
        elements.storage_offset() + start_bytes // dtype.itemsize,
    )
