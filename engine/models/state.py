"""Layout of a sequence's recurrent state in a unit of the cache: the matrices of all layers (fp32), then conv tails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.spec import ceil_div
from engine.models.layers import LayerState, StateShape

RECURRENT_DTYPE = torch.float32
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of the recurrent state of one sequence: byte offsets of each layer's state in a memory unit of the cache.

    A layer's state is the last inputs of its convolution ("conv tail") and, in most layers, a matrix in fp32.
    """

    shapes: tuple[StateShape, ...]
    tail_dtype: torch.dtype
    recurrent_state_starts: tuple[int, ...]
    """Byte offset of each layer's matrix."""
    conv_tail_starts: tuple[int, ...]
    """Byte offset of each layer's conv tail."""
    state_bytes: int
    """Bytes of the states of all layers together."""

    @staticmethod
    def from_shapes(shapes: Sequence[StateShape], tail_dtype: torch.dtype) -> StateLayout:
        """Lay out the matrices of all layers one after the other, and then the conv tails of all layers."""
        recurrent_starts, tail_starts = [], []
        offset = 0
        for shape in shapes:
            recurrent_starts.append(offset)
            element_count = math.prod(shape.recurrent_state) if shape.recurrent_state else 0
            offset += _round_up_to_alignment(element_count * RECURRENT_DTYPE.itemsize)
        for shape in shapes:
            tail_starts.append(offset)
            offset += _round_up_to_alignment(math.prod(shape.conv_tail) * tail_dtype.itemsize)
        return StateLayout(tuple(shapes), tail_dtype, tuple(recurrent_starts), tuple(tail_starts), offset)

    def make_layer_states(self, buffer: Tensor, unit_bytes: int) -> list[LayerState]:
        """View each layer's state in all units of the cache. buffer: [units * unit_bytes] uint8."""
        states = []
        starts = zip(self.recurrent_state_starts, self.conv_tail_starts, strict=True)
        for shape, (matrix_start, tail_start) in zip(self.shapes, starts, strict=True):
            tail = _make_strided_view(buffer, unit_bytes, tail_start, shape.conv_tail, self.tail_dtype)
            matrix_shape = shape.recurrent_state or (0,)
            matrix = _make_strided_view(buffer, unit_bytes, matrix_start, matrix_shape, RECURRENT_DTYPE)
            states.append(LayerState(conv_tail=tail, recurrent_state=matrix))
        return states


def _round_up_to_alignment(size_bytes: int) -> int:
    return ceil_div(size_bytes, ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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
