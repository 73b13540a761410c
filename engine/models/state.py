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
    """Byte offsets of each layer's state from the start of a unit, the memory that holds the state of one sequence."""

    shapes: tuple[StateShape, ...]
    tail_dtype: torch.dtype
    recurrent_state_starts: tuple[int, ...]
    conv_tail_starts: tuple[int, ...]
    state_bytes: int
    """Bytes of the states of all layers together."""

    @staticmethod
    def from_shapes(shapes: Sequence[StateShape], tail_dtype: torch.dtype) -> StateLayout:
        """Lay out the matrices of all layers one after the other, and then the conv tails of all layers."""
        recurrent_starts, tail_starts, offset = [], [], 0
        for shape in shapes:
            recurrent_starts.append(offset)
            has_matrix = bool(shape.recurrent_state)
            element_count = math.prod(shape.recurrent_state) if has_matrix else 0
            offset += _round_up_to_alignment(element_count * RECURRENT_DTYPE.itemsize)
        for shape in shapes:
            tail_starts.append(offset)
            offset += _round_up_to_alignment(math.prod(shape.conv_tail) * tail_dtype.itemsize)
        return StateLayout(tuple(shapes), tail_dtype, tuple(recurrent_starts), tuple(tail_starts), offset)

    def make_layer_states(self, buffer: Tensor, unit_bytes: int) -> list[LayerState]:
        """Return each layer's state in every unit. buffer: [units * unit_bytes] uint8."""
        return [
            LayerState(
                conv_tail=_make_strided_view(buffer, unit_bytes, tail_start, shape.conv_tail, self.tail_dtype),
                recurrent_state=_make_strided_view(
                    buffer, unit_bytes, recurrent_start, shape.recurrent_state or (0,), RECURRENT_DTYPE
                ),
            )
            for shape, recurrent_start, tail_start in zip(
                self.shapes, self.recurrent_state_starts, self.conv_tail_starts, strict=True
            )
        ]


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
