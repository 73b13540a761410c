"""Decode steps that are recorded once for each padded batch size and replayed: a CUDA graph instead of its launches.

Owns the inputs of fixed shape that a recorded step reads. A graph is recorded when its size is first needed, shares
its memory with the others, and is never recorded again; a batch that fits no size is computed as usual. How recording
works is an argument, so that all of this but the recording itself is tested without a GPU.

Invariant: rows past the batch are padding with no slot, no context and no state, so they change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.models import CausalLM
from engine.models.layers import LayerState, Step
from engine.models.rope import RopeTable
from kernels import Kernels, PagedKV, Ragged
from kernels.interface import FixedPlans, IntArray
from kernels.transfer import to_device

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, 513, 32))
"""Batch sizes that are recorded: padding costs less than one step in eight, but for the smallest."""

Replay = Callable[[], object]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]
"""Records a computation: (what repeats it, its result, which every repetition writes anew)."""


class CudaCapture:
    """Records CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            run()  # compiles the kernels and makes the libraries' workspaces, which must not happen while recording
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: what another thread does with CUDA (NCCL's watchdog) must not spoil the recording.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        return graph.replay, out


@dataclass(frozen=True, slots=True)
class _Recorded:
    token_ids: torch.Tensor
    positions: torch.Tensor
    step: Step
    replay: Replay
    hidden: torch.Tensor


class DecodeGraphs:
    """The recorded decode steps of one runner."""

    def __init__(
        self,
        model: CausalLM,
        ops: Kernels,
        *,
        kv: list[PagedKV],
        states: list[LayerState],
        ropes: list[RopeTable],
        blocks_max: int,
        capture: Capture,
    ) -> None:
        """`blocks_max`: the blocks of the longest sequence. `ops` must offer plans of fixed shape."""
        assert isinstance(ops, FixedPlans)
        self._plans: FixedPlans = ops
        self._model, self._ops = model, ops
        self._kv, self._states, self._ropes = kv, states, ropes
        self._blocks_max = blocks_max
        self._capture = capture
        self._recorded: dict[int, _Recorded | None] = {}

    def forward(
        self, token_ids: IntArray, batch: Ragged, tables: Sequence[IntArray], units: IntArray | None
    ) -> torch.Tensor | None:
        """Hidden states of a batch of decoding sequences; None for one that must be computed as usual."""
        count = batch.decode_count
        size = next((size for size in SIZES if size >= count), None)
        if size is None or count != len(batch.context_lens):
            return None
        if size not in self._recorded:
            self._recorded[size] = self._record(size)
        recorded = self._recorded[size]
        if recorded is None:
            return None
        inputs = np.zeros((2, size), np.int64)
        inputs[0, :count], inputs[1, :count] = token_ids, batch.positions
        both = to_device(inputs, recorded.token_ids.device)
        recorded.token_ids.copy_(both[0])
        recorded.positions.copy_(both[1])
        for plan, table, kv in zip(recorded.step.plans, tables, self._kv, strict=True):
            self._plans.refill_decode_plan(plan, batch, table, kv)
        if units is not None:
            self._plans.refill_state_plan(recorded.step.state_plan, units)
        recorded.replay()
        return recorded.hidden[:count]

    def record(self, count_max: int) -> None:
        """Record now what batches of up to so many sequences will need. Largest first: the others share its memory."""
        for size in reversed([size for i, size in enumerate(SIZES) if i == 0 or SIZES[i - 1] < count_max]):
            if size not in self._recorded:
                self._recorded[size] = self._record(size)

    def _record(self, size: int) -> _Recorded | None:
        device = self._ops.device
        token_ids, positions = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        windows = self._model.windows
        step = Step(
            ops=self._ops,
            rotary=[],
            kv=self._kv,
            plans=[
                self._plans.fixed_decode_plan(size, self._blocks_max, kv, window)
                for kv, window in zip(self._kv, windows, strict=True)
            ],
            states=self._states,
            state_plan=self._plans.fixed_state_plan(size) if self._states else None,
        )

        def run() -> torch.Tensor:
            step.rotary = [rope.at(positions) for rope in self._ropes]
            return self._model.forward(token_ids, step)

        try:
            replay, hidden = self._capture(run)
        except torch.OutOfMemoryError:
            if self._model.shard.size > 1:
                raise  # the other ranks record it, and would wait for this one
            log.warning("no memory to record the decode step of %d sequences: it is computed launch by launch", size)
            return None
        return _Recorded(token_ids, positions, step, replay, hidden)
