"""The memory of the cache's units on a device, and the copies in it before and after a step's forward pass.

Owns the buffer and its layout. Plans name the blocks and states that are copied.
"""

from __future__ import annotations

import math

import torch

from engine.cache.spec import CacheSpec, ceil_div
from engine.execution.block_copier import BlockCopier
from engine.models.layers import LayerState
from engine.models.recurrent_state import StateLayout
from engine.types import StepPlan
from kernels import PagedKV


def compute_unit_stride(spec: CacheSpec) -> int:
    """Bytes from one unit to the next: the unit, rounded up to whole token rows of every group."""
    rows = [g.num_kv_heads * g.head_dim * g.dtype_bytes for g in spec.groups]
    step = math.lcm(16, *rows)
    return ceil_div(spec.unit_bytes, step) * step


class DevicePool:
    """Holds the units of one device's memory and of host memory. Performs the copies of a plan."""

    def __init__(
        self,
        spec: CacheSpec,
        unit_count: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        host_unit_count: int = 0,
    ) -> None:
        """Allocate the memory of the KV cache. Raises RuntimeError if there is not enough.

        `unit_count`: units on the device, at least one. A unit holds one or more blocks, or a recurrent state.
        `host_unit_count`: units of host memory. `dtype`: data type of keys and values.
        """
        assert unit_count >= 1
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self._unit_count = unit_count
        self._stride = compute_unit_stride(spec)
        self.buffer = torch.empty(unit_count * self._stride, dtype=torch.uint8, device=device)
        self.block_copier = BlockCopier(spec, self.buffer, self._stride, host_unit_count)
        self.kv = [
            PagedKV(
                buffer=self.buffer.view(dtype),
                elems_per_unit=self._stride // dtype.itemsize,
                blocks_per_unit=spec.blocks_per_unit(group_index),
                block_size=spec.block_size,
                num_layers=len(group.layer_indices),
                num_kv_heads=group.num_kv_heads,
                head_dim=group.head_dim,
            )
            for group_index, group in enumerate(spec.groups)
        ]
        """Views of the buffer as blocks, one for each group of attention layers."""

    def view_states(self, layout: StateLayout) -> list[LayerState]:
        """Return views of the recurrent states in all units, one for each layer; empty for a model without states."""
        return layout.make_layer_states(self.buffer, self._stride) if self.spec.state is not None else []

    def release(self) -> None:
        """Free the device's memory until `allocate`."""
        self.buffer.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Allocate the memory again, uninitialised. Raises RuntimeError if there is none."""
        self.buffer.untyped_storage().resize_(self.buffer.numel())

    def prepare_step(self, plan: StepPlan) -> None:
        """Perform the plan's copies of blocks and states that come before its forward pass."""
        self.block_copier.execute(plan.block_copies)
        for unit in plan.state_resets:
            self.buffer.view(self._unit_count, -1)[unit].zero_()

    def finish_step(self, plan: StepPlan) -> None:
        """Copy states to the plan's checkpoints, after its forward pass."""
        self.block_copier.execute(plan.state_checkpoints)
