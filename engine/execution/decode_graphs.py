"""CUDA graphs of decode steps: each padded batch size is recorded once, and replayed instead of launching kernels.

A batch that fits no size is computed without a graph, as is a size that cannot be recorded. The recording itself is an
argument, so that the rest is tested without a GPU.

Invariant: rows past the batch are padding with no slot, no context and no state, so they change nothing.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from engine.models import CausalLM
from engine.models.layers import ForwardContext, LayerState
from engine.models.rope import RopeTable
from kernels import Kernels, PagedKV, RaggedBatch
from kernels.host_copies import overwrite
from kernels.interface import BlockTable, IntArray

if TYPE_CHECKING:
    from kernels.triton.backend import TritonKernels

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, 513, 32))
"""Batch sizes that are recorded. For more than 32 sequences, less than a fifth of a batch is padding."""

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

    All graphs share one memory pool and one stream, because cuBLAS allocates a workspace for each stream. PyTorch frees
    that workspace when any graph of the stream is destroyed. So all graphs are kept until `reset`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.reset()

    def reset(self) -> None:
        """Free all graphs, none of which may be replayed after this."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Record a computation. Returns a function that repeats it, and the result, which is overwritten each time."""
        outer_stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer_stream)
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        with torch.cuda.stream(self._stream):  # restores the stream even if the recording fails
            compute()  # the first call compiles kernels and allocates workspaces, which must not be recorded
            # "thread_local": CUDA calls of other threads, such as NCCL's watchdog, do not disturb the recording.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = compute()
        outer_stream.wait_stream(self._stream)
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
        """Start without recorded steps. `ops`: kernels with fixed plans (`has_fixed_plans`).

        `kv`: KV cache memory of each group of attention layers. `states`: memory of each recurrent layer. `ropes`:
        tables of rotary embeddings. `blocks_max`: blocks of the longest sequence. `capture`: records a step as a graph.
        """
        assert ops.has_fixed_plans
        self._ops = cast("TritonKernels", ops)
        self._model = model
        self._kv = kv
        self._states = states
        self._ropes = ropes
        self._blocks_max = blocks_max
        self._capture = capture
        self._steps_by_size: dict[int, _RecordedStep | None] = {}
        """Recorded step of each batch size; None: it could not be recorded."""

    def forward(
        self,
        token_ids: Tensor,
        batch: RaggedBatch,
        tables: Sequence[BlockTable],
        units: IntArray | None,
    ) -> Tensor | None:
        """Compute the hidden states of a batch of decodes, [sequences, hidden], by replaying a CUDA graph.

        The batch is first copied into the inputs of the graph, which was recorded for a batch of this size or a little
        larger. `units`: [sequences], memory of each sequence's recurrent state; None for a model without state. Returns
        None if the batch is too large, has prompts, or could not be recorded: the caller then launches the kernels.
        """
        count = batch.decode_count
        has_prompts = count < len(batch.context_lens)
        largest_size = SIZES[-1]
        if has_prompts or count > largest_size:
            return None
        size = SIZES[bisect_left(SIZES, count)]  # the smallest that holds the batch; the rest is padding
        recorded_step = self._get_or_record(size)
        if recorded_step is None:
            return None
        recorded_step.token_ids[:count].copy_(token_ids)
        overwrite(recorded_step.positions, batch.positions)
        for plan, table, kv in zip(recorded_step.step.plan_by_group, tables, self._kv, strict=True):
            self._ops.refill_decode_plan(plan, batch, table, kv)
        if units is not None:
            self._ops.refill_state_plan(recorded_step.step.state_plan, units)
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
        """Record the forward pass of a step that decodes `size` sequences as a CUDA graph, to replay it later.

        If that fails, logs a warning and returns None; with several ranks, raises RuntimeError.
        """
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
                self._ops.make_fixed_decode_plan(size, self._blocks_max, kv, window)
                for kv, window in zip(self._kv, self._model.window_by_group, strict=True)
            ],
            state_by_layer=self._states,
            state_plan=self._ops.make_fixed_state_plan(size) if self._states else None,
        )

    def _compute_hidden(self, token_ids: Tensor, positions: Tensor, step: ForwardContext) -> Tensor:
        """Look up the rotary angles of a step's positions, and compute its hidden states."""
        step.rotary_by_rope = [rope.look_up(positions) for rope in self._ropes]
        return self._model.forward(token_ids, step)
