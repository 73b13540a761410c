"""CUDA graphs of decode steps: each padded batch size is recorded once, and replayed instead of launching kernels.

Owns the inputs of fixed shape that a recorded step reads. A graph is recorded ahead, or when its size is first needed,
and shares its memory with the others. A batch that fits no size is computed without a graph, as is a size that cannot
be recorded. The recording itself is an argument, so that the rest is tested without a GPU.

Invariant: rows past the batch are padding with no slot, no context and no state, so they change nothing.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.models import CausalLM
from engine.models.layers import ForwardContext, LayerState
from engine.models.rope import RopeTable
from kernels import Kernels, PagedKV, RaggedBatch
from kernels.interface import BlockTable, FixedPlanKernels, IntArray
from kernels.transfer import overwrite

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, 513, 32))
"""Batch sizes that are recorded. At most an eighth of a batch is padding, except for the smallest ones."""

Replay = Callable[[], object]


class Capture(Protocol):
    """Records computations."""

    def __call__(self, compute: Callable[[], Tensor], /) -> tuple[Replay, Tensor]:
        """Record a computation. Returns (function that repeats it, its result, which every repetition overwrites)."""
        ...

    def reset(self) -> None:
        """Free the memory of all recordings. None of them may be repeated after this."""


class CudaCapture:
    """Records computations as CUDA graphs, which replay many kernels at the cost of one launch.

    All graphs share one memory pool and one stream. One stream, because cuBLAS has a workspace (32 MiB on Hopper) for
    each stream, and recorded products keep its address. Torch frees the workspaces of a stream when any graph recorded
    on it is destroyed. So all graphs are kept until `reset`, even after a failed recording.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.reset()

    def reset(self) -> None:
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Record a computation. See `Capture`."""
        outer_stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer_stream)
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        with torch.cuda.stream(self._stream):  # restores the stream even if the recording fails
            compute()  # compiles the kernels and makes the libraries' workspaces, which must not happen while recording
            # Thread-local: CUDA calls of other threads (NCCL's watchdog) must not make the recording fail.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = compute()
        outer_stream.wait_stream(self._stream)  # the streams run one after the other, because they share the tensors
        return graph.replay, result


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    """A recorded decode step: its inputs, which are overwritten before each replay, and its result.

    Token ids and positions are [size] each. Their padding has values of some earlier step.
    """

    token_ids: Tensor
    positions: Tensor
    step: ForwardContext
    replay: Replay
    hidden: Tensor


class DecodeGraphs:
    """Records decode steps of fixed sizes, and replays them for batches that are padded to a size."""

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
        """Start without recorded steps. `ops`: kernels, which must be `FixedPlanKernels`, too.

        `kv`, `states`: the cache's memory by attention group, and by recurrent layer. `ropes`: tables of the model's
        rotary settings. `blocks_max`: blocks of the longest sequence. `capture`: records steps.
        """
        assert isinstance(ops, FixedPlanKernels)
        self._plans: FixedPlanKernels = ops
        self._model, self._ops = model, ops
        self._kv, self._states, self._ropes = kv, states, ropes
        self._blocks_max = blocks_max
        self._capture = capture
        self._steps_by_size: dict[int, _RecordedStep | None] = {}

    def forward(
        self,
        token_ids: Tensor,
        batch: RaggedBatch,
        tables: Sequence[BlockTable],
        units: IntArray | None,
    ) -> Tensor | None:
        """Compute the hidden states of a batch of decodes, [sequences, hidden], by replaying a recorded step.

        The batch is copied into the inputs of the recording first. `units`: [sequences], unit of the pool that holds
        each sequence's recurrent state; None for a model without state. Returns None if the batch is too large, has
        prompts, or could not be recorded: the caller then computes it without a recording.
        """
        count = batch.decode_count
        has_prompts = count < len(batch.context_lens)
        if has_prompts or count > SIZES[-1]:
            return None
        size = SIZES[bisect_left(SIZES, count)]  # the smallest that holds the batch; the rest is padding
        recorded_step = self._get_or_record(size)
        if recorded_step is None:
            return None
        recorded_step.token_ids[:count].copy_(token_ids)
        overwrite(recorded_step.positions, batch.positions)
        for plan, table, kv in zip(recorded_step.step.plan_by_group, tables, self._kv, strict=True):
            self._plans.refill_decode_plan(plan, batch, table, kv)
        if units is not None:
            self._plans.refill_state_plan(recorded_step.step.state_plan, units)
        recorded_step.replay()
        return recorded_step.hidden[:count]

    def clear(self) -> None:
        """Forget all recorded steps, because the addresses of the cache or the weights change."""
        self._steps_by_size.clear()
        self._capture.reset()

    def record(self, count_max: int) -> None:
        """Record the steps of up to `count_max` sequences now, the largest first, as the others share its memory."""
        needed_sizes = SIZES[: bisect_left(SIZES, count_max) + 1]
        for size in reversed(needed_sizes):
            self._get_or_record(size)

    def _get_or_record(self, size: int) -> _RecordedStep | None:
        """Return the recorded step of a size. It is recorded at the first call; None if that failed."""
        if size not in self._steps_by_size:
            self._steps_by_size[size] = self._record(size)
        return self._steps_by_size[size]

    def _record(self, size: int) -> _RecordedStep | None:
        """Record the forward pass of a step that decodes `size` sequences; None, with a warning, if that fails."""
        token_ids, positions = torch.zeros(2, size, dtype=torch.int64, device=self._ops.device)
        step = self._make_fixed_step(size)
        try:
            replay, hidden = self._capture(partial(self._compute_hidden, token_ids, positions, step))
        except RuntimeError as error:  # an error of CUDA, or torch.OutOfMemoryError
            if self._model.shard.num_ranks > 1:
                raise  # the other ranks record the step, and would wait for this one
            reason = "no memory" if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {error}"
            log.warning(
                "the decode step of %d sequences is not recorded but computed launch by launch: %s", size, reason
            )
            return None
        return _RecordedStep(token_ids, positions, step, replay, hidden)

    def _make_fixed_step(self, size: int) -> ForwardContext:
        """Return the inputs of a step of `size` decodes besides tokens and positions. Their memory never moves."""
        return ForwardContext(
            ops=self._ops,
            rotary_by_rope=[],
            kv_by_group=self._kv,
            plan_by_group=[
                self._plans.make_fixed_decode_plan(size, self._blocks_max, kv, window)
                for kv, window in zip(self._kv, self._model.window_by_group, strict=True)
            ],
            state_by_layer=self._states,
            state_plan=self._plans.make_fixed_state_plan(size) if self._states else None,
        )

    def _compute_hidden(self, token_ids: Tensor, positions: Tensor, step: ForwardContext) -> Tensor:
        """Look up the rotary angles of a step's positions, and compute its hidden states."""
        step.rotary_by_rope = [rope.look_up(positions) for rope in self._ropes]
        return self._model.forward(token_ids, step)
