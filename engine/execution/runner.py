"""Computes a step: copies what the plan says, runs the model over the chunks, samples where a chunk asks for it.

Owns the pool's buffer and its layout; decides nothing about who runs or what lies where. Rows of a step are put in
the kernels' order (chunks of one token first); results are given back in the plan's order. Nothing is read from a
block or a state that the plan did not fill before.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from engine.cache.spec import CacheSpec
from engine.execution.block_tables import BlockTables
from engine.execution.decode_graphs import Capture, DecodeGraphs
from engine.execution.logprobs import LogprobTensors, read_logprobs, token_logprobs
from engine.execution.sampler import Sampler
from engine.models import CausalLM
from engine.models.layers import Step
from engine.types import BlockId, Chunk, RunnerLost, StepPlan, StepResult, TokenLogprobs, UnitId
from kernels import Kernels, PagedKV, Ragged, select
from kernels.interface import FixedPlans, IntArray
from kernels.transfer import to_device

LOGIT_SLAB_BYTES = 64 << 20
"""Logits of prompt positions are made in slabs of at most so many bytes of fp32."""


def unit_stride_bytes(spec: CacheSpec) -> int:
    """Bytes from one unit to the next: the unit, rounded up to whole token rows of every group."""
    rows = [g.num_kv_heads * g.head_dim * g.dtype_bytes for g in spec.groups]
    step = math.lcm(16, *rows)
    return -(-spec.unit_bytes // step) * step


def units_for_memory(spec: CacheSpec, memory_bytes: int) -> int:
    """How many units fit in so much memory."""
    return memory_bytes // unit_stride_bytes(spec)


class ModelRunner:
    """Runs one model on one device over one pool of units."""

    def __init__(
        self,
        model: CausalLM,
        spec: CacheSpec,
        num_units: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        kernels: Kernels | None = None,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        capture: Capture | None = None,
    ) -> None:
        """`capture`: how decode steps are recorded, where the kernels allow it; None: they are not."""
        if num_units < 1:
            raise ValueError(f"num_units {num_units}: expected at least 1")
        self.model = model
        self.spec = spec
        self.num_units = num_units
        self.device = device
        self.dtype = dtype
        self._ops = select(device) if kernels is None else kernels
        self._sampler = Sampler(model.config.vocab_size, device, eos_token_ids, seed, self._ops.draw)
        self._ropes = model.rope_tables(max_model_len, dtype, device)
        self._windows = model.windows
        self._tables = [BlockTables(g, spec.block_size) for g in range(len(spec.groups))]
        stride = unit_stride_bytes(spec)
        self._buffer = torch.empty(num_units * stride, dtype=torch.uint8, device=device)
        self._kv = [
            PagedKV(
                buffer=self._buffer.view(dtype),
                unit_elems=stride // dtype.itemsize,
                blocks_per_unit=spec.blocks_per_unit(g),
                block_size=spec.block_size,
                num_layers=len(group.layers),
                num_kv_heads=group.num_kv_heads,
                head_dim=group.head_dim,
            )
            for g, group in enumerate(spec.groups)
        ]

        layout = model.state_layout(dtype)
        self._states = layout.views(self._buffer, stride) if spec.state is not None else []
        self._graphs: DecodeGraphs | None = None
        if capture is not None and isinstance(self._ops, FixedPlans):
            self._graphs = DecodeGraphs(
                model,
                self._ops,
                kv=self._kv,
                states=self._states,
                ropes=self._ropes,
                blocks_max=-(-max_model_len // spec.block_size),
                capture=capture,
            )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Do the step. Results are in the order of `plan.chunks`. Raises RunnerLost where none can be done any more."""
        try:
            return self._execute(plan)
        except Exception as error:
            try:
                self._probe()
            except RuntimeError as fault:
                raise RunnerLost(f"{self.device} computes nothing any more: {fault}".partition("\n")[0]) from error
            raise

    def _probe(self) -> None:
        """Compute something small: a kernel's error sticks to its CUDA context, and fails whatever comes after it."""
        torch.ones(1, device=self.device).sum().item()

    def _execute(self, plan: StepPlan) -> StepResult:
        for group, source, target in plan.block_moves:
            self._move_block(group, source, target)
        self._prepare_states(plan)
        if not plan.chunks:
            return StepResult([])
        order = sorted(range(len(plan.chunks)), key=lambda i: plan.chunks[i].end - plan.chunks[i].start > 1)
        chunks = [plan.chunks[i] for i in order]
        hidden, starts = self._forward(chunks)
        result = self._sample(hidden, starts, chunks, order)
        for source_unit, target_unit in plan.state_checkpoints:
            self._copy_unit(source_unit, target_unit)
        return result

    @torch.inference_mode()
    def record_decode_steps(self, sequences_max: int) -> None:
        """Record now, not when they are first needed, the decode steps of up to so many sequences, where any are."""
        if self._graphs is not None:
            self._graphs.record(sequences_max)

    def forget_decode_steps(self) -> None:
        """Give up the recorded steps: NCCL's communicators do not end while a graph holds them."""
        self._graphs = None

    def _forward(self, chunks: list[Chunk]) -> tuple[Tensor, IntArray]:
        """Hidden states of the wanted rows, [wanted, hidden], and where each chunk's start, [chunks + 1]."""
        batch = Ragged.of([chunk.start for chunk in chunks], [chunk.end for chunk in chunks])
        tokens: list[int] = []
        for chunk in chunks:
            tokens += chunk.seq.token_ids[chunk.start : chunk.end]
        token_ids = np.array(tokens, np.int64)
        tables = [tables.of(chunks) for tables in self._tables]
        units = _state_units(chunks) if self._states else None
        rows, starts = self._wanted_rows(chunks, batch.query_starts)
        wanted = None if rows is None else to_device(rows, self.device)
        if self._graphs is not None and batch.decode_count == len(chunks):
            hidden = self._graphs.forward(token_ids, batch, tables, units)
            if hidden is not None:
                return hidden if wanted is None else hidden[wanted], starts
        positions = to_device(batch.positions, self.device)
        step = Step(
            ops=self._ops,
            rotary=[rope.at(positions) for rope in self._ropes],
            kv=self._kv,
            plans=[
                self._ops.plan_attention(batch, table, kv, self._windows[g])
                for g, (table, kv) in enumerate(zip(tables, self._kv, strict=True))
            ],
            states=self._states,
            state_plan=None if units is None else self._ops.plan_state(batch, units),
        )
        return self.model.forward(to_device(token_ids, self.device), step, wanted), starts

    @staticmethod
    def _wanted_rows(chunks: list[Chunk], query_starts: IntArray) -> tuple[IntArray | None, IntArray]:
        """Rows of the batch that logits are made of (None: all), and where each chunk's start among them."""
        if query_starts[-1] == len(chunks) and all(chunk.samples for chunk in chunks):
            return None, query_starts  # a decode step
        begins, ends = query_starts[:-1].copy(), query_starts[1:]
        for i, chunk in enumerate(chunks):
            if chunk.seq.request.params.prompt_logprobs is None or chunk.start >= chunk.seq.prompt_len - 1:
                begins[i] = ends[i] - chunk.samples
        if (begins == query_starts[:-1]).all():
            return None, query_starts
        rows = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
        return rows, np.concatenate([[0], np.cumsum(ends - begins)])

    def _sample(self, hidden: Tensor, starts: IntArray, chunks: list[Chunk], order: list[int]) -> StepResult:
        rows = [i for i, chunk in enumerate(chunks) if chunk.samples]
        result = StepResult([None] * len(chunks))
        if rows:
            last = starts[1:][rows] - 1
            everyone = len(rows) == hidden.shape[0]
            picked = hidden if everyone else hidden[to_device(last, self.device)]
            if not self.model.samples:
                self.model.lend_logits(picked)
            else:
                tokens, logprobs = self._sampler.sample(self.model.logits(picked), [chunks[i].seq for i in rows])
                for j, i in enumerate(rows):
                    result.sampled[order[i]] = tokens[j]
                for j, entry in logprobs.items():
                    result.logprobs[order[rows[j]]] = entry
        for i, chunk in enumerate(chunks):
            if chunk.seq.request.params.prompt_logprobs is not None and chunk.start < chunk.seq.prompt_len - 1:
                result.prompt_logprobs[order[i]] = self._prompt_logprobs(hidden[int(starts[i]) :], chunk)
        return result

    def _prompt_logprobs(self, hidden: Tensor, chunk: Chunk) -> list[TokenLogprobs]:
        """Logprobs of the prompt tokens start + 1 .. end; row i of `hidden` is position start + i."""
        wanted = chunk.seq.request.params.prompt_logprobs or 0
        end = min(chunk.end + 1, chunk.seq.prompt_len)
        count, slab = end - chunk.start - 1, max(1, LOGIT_SLAB_BYTES // (4 * self.model.config.vocab_size))
        slabs = [hidden[at : min(at + slab, count)] for at in range(0, count, slab)]
        if not self.model.samples:
            for rows in slabs:
                self.model.lend_logits(rows)
            return []
        tokens = to_device(np.array(chunk.seq.token_ids[chunk.start + 1 : end], np.int64), self.device)
        queued: list[LogprobTensors] = []
        for at, rows in zip(range(0, count, slab), slabs, strict=True):
            targets = tokens[at : at + slab]
            queued.append(token_logprobs(self.model.logits(rows), targets, [wanted] * len(rows)))
        return [entry for tensors in queued for entry in read_logprobs(tensors, [wanted] * len(tensors.tokens))]

    def _prepare_states(self, plan: StepPlan) -> None:
        units = self._buffer.view(self.num_units, -1)
        for unit in plan.state_resets:
            units[unit].zero_()
        for source, target in plan.state_restores:
            self._copy_unit(source, target)

    def _copy_unit(self, source: UnitId, target: UnitId) -> None:
        units = self._buffer.view(self.num_units, -1)
        units[target].copy_(units[source])

    def _move_block(self, group: int, source: BlockId, target: BlockId) -> None:
        kv = self._kv[group]
        starts = [
            (block // kv.blocks_per_unit) * kv.unit_elems + (block % kv.blocks_per_unit) * kv.block_elems
            for block in (source, target)
        ]
        old, new = (kv.buffer[start : start + kv.block_elems] for start in starts)
        new.copy_(old)


def _state_units(chunks: list[Chunk]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[chunks]: the unit of each chunk's recurrent state."""
    units = [chunk.seq.state_unit for chunk in chunks]
    assert None not in units, "a sequence without a state unit on a model that has state"
    return np.array(units, np.int64)
