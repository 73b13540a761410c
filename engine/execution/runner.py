"""Computes a step: copies what the plan says, runs the model over the chunks, samples where a chunk asks for it.

Owns the pool's buffer and its layout; decides nothing about who runs or what lies where. Rows of a step are put in
the kernels' order (chunks of one token first); results are given back in the plan's order. Nothing is read from a
block or a state that the plan did not fill before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.cache.spec import CacheSpec
from engine.execution.block_moves import BlockMoves
from engine.execution.block_tables import BlockTables, Seats
from engine.execution.decode_graphs import Capture, DecodeGraphs
from engine.execution.logprobs import TENSORS, read_logprobs, token_logprobs
from engine.execution.masks import Masks
from engine.execution.prepared import Company, Order, PreparedStep, is_scored, state_units, wanted_rows
from engine.execution.sampler import Sampler
from engine.grammars import Grammars
from engine.models import CausalLM
from engine.models.layers import Step
from engine.types import Chunk, RunnerLostError, StepPlan, StepResult, UnitId
from kernels import Kernels, PagedKV, Ragged, select
from kernels.interface import FixedPlans
from kernels.transfer import to_device, to_host

Result = TypeVar("Result")

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
        overlap: bool = False,
        grammars: Grammars | None = None,
        mask_threads: int = 1,
        host_units: int = 0,
    ) -> None:
        """`capture`: how decode steps are recorded, where the kernels allow it; None: they are not.

        `overlap`: steps may have tokens that the step before draws. Where no device queues steps, a thread does them.
        `grammars`: of constrained answers; None: there are none. `mask_threads`: for what they allow. `host_units`: of
        host memory under the cache.
        """
        if num_units < 1:
            raise ValueError(f"num_units {num_units}: expected at least 1")
        self.model = model
        self.spec = spec
        self.num_units = num_units
        self.device = device
        self.dtype = dtype
        self._ops = select(device) if kernels is None else kernels
        vocab_size = model.config.vocab_size
        self._masks = None if grammars is None else Masks(grammars, vocab_size, device, mask_threads)
        self._sampler = Sampler(vocab_size, device, eos_token_ids, seed, self._ops, self._masks)
        self._ropes = model.rope_tables(max_model_len, dtype, device)
        self._windows = model.windows
        stride = unit_stride_bytes(spec)
        self._buffer = torch.empty(num_units * stride, dtype=torch.uint8, device=device)
        self.moves = BlockMoves(spec, self._buffer, stride, host_units)
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

        self._last = torch.zeros(0, dtype=torch.int64, device=device) if overlap else None
        """[rows]: the token drawn last for the sequence in each row."""
        self._before: Callable[[], dict[int, int]] = dict
        """What waits for the tokens that the last step that was begun has drawn, by row."""
        self._fixed = self._ops if isinstance(self._ops, FixedPlans) else None
        # Kept tables are read when a step is queued on their device: in the order of the steps, on this thread.
        self._worker = ThreadPoolExecutor(1, "step") if overlap and self._fixed is None else None
        self._seats = Seats()
        self._company: Company | None = None
        self._batch: Ragged | None = None
        """Of the last step, both."""
        blocks_max = -(-max_model_len // spec.block_size)
        self._tables = [
            BlockTables(g, kv, blocks_max, None if self._fixed is None else device) for g, kv in enumerate(self._kv)
        ]
        layout = model.state_layout(dtype)
        self._states = layout.views(self._buffer, stride) if spec.state is not None else []
        self._graphs: DecodeGraphs | None = None
        if capture is not None and self._fixed is not None:
            self._graphs = DecodeGraphs(
                model,
                self._ops,
                kv=self._kv,
                states=self._states,
                ropes=self._ropes,
                blocks_max=blocks_max,
                capture=capture,
            )

    @property
    def records(self) -> bool:
        """Decode steps are recorded: they read and write where the pool and the weights were then."""
        return self._graphs is not None

    def free_pool(self) -> None:
        """Give the pool's memory back. No step may be out, and none may come before `take_pool`."""
        self._seats.clear()
        self._buffer.untyped_storage().resize_(0)

    def take_pool(self) -> None:
        """Have a pool again, in which nothing is. Raises RuntimeError where there is no memory for it."""
        self._buffer.untyped_storage().resize_(self._buffer.numel())

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the step. Results are in the order of `plan.chunks`. Raises RunnerLostError where no step can be done."""
        return self.submit(plan)()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin the step, behind those that were begun before; what is returned waits for its result.

        Either may raise, RunnerLostError too. The plan is not read after this returns.
        """
        return self._guarded(partial(self._submit, plan))

    def _submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        step = self._prepare(plan)
        read = self._compute(step) if self._worker is None else self._worker.submit(self._work, step).result
        return lambda: self._guarded(lambda: self._result(step, read()))

    @torch.inference_mode()
    def _work(self, step: PreparedStep) -> list[list[Any]]:
        """On the thread that computes."""
        return self._compute(step)()

    def _guarded(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except Exception as error:
            self._seats.clear()
            self._batch = None
            self._sampler.forget()
            try:
                self._probe()
            except RuntimeError as fault:
                raise RunnerLostError(f"{self.device} computes nothing any more: {fault}".partition("\n")[0]) from error
            raise

    def _probe(self) -> None:
        """Compute something small: a kernel's error sticks to its CUDA context, and fails whatever comes after it."""
        torch.ones(1, device=self.device).sum().item()

    def _prepare(self, plan: StepPlan) -> PreparedStep:
        """All that the host decides and sends up."""
        follows = self._following(plan)
        chunks, order, batch = follows or _in_order(plan.chunks)
        company, new = self._company_of(chunks, known=follows is not None)
        self._batch = batch
        ends, rows = batch.context_lens, company.rows
        self._sampler.forget(new)
        for tables in self._tables:
            tables.update(chunks, ends, rows, new, self._seats.count, plan.table_version)
        scored = [i for i, chunk in enumerate(chunks) if is_scored(chunk)] if company.scores else []
        token_ids, fed = self._inputs(chunks, batch.token_count, company, all_fed=follows is not None)
        wanted, starts = None, batch.query_starts
        drawn: Order = range(len(chunks))
        if follows is None:
            wanted, starts = wanted_rows(chunks, batch.query_starts, scored)
            drawn = [i for i, chunk in enumerate(chunks) if chunk.should_sample]
        sequences, drawn_ends, drawn_rows = company.sequences, ends, company.row_list
        if len(drawn) < len(chunks):
            sequences, drawn_rows = [sequences[i] for i in drawn], [drawn_rows[i] for i in drawn]
            drawn_ends = ends[drawn]
        draft = None
        if drawn and self.model.samples:
            draft = self._sampler.draft(sequences, drawn_ends, drawn_rows, self._seats.count)
        return PreparedStep(
            plan, chunks, order, batch,
            token_ids=token_ids,
            tables=[
                tables.array(ends, rows) if self._fixed is None else tables.kept(rows) for tables in self._tables
            ],
            units=state_units(chunks) if self._states else None,
            wanted=None if wanted is None else to_device(wanted, self.device),
            starts=starts,
            drawn=drawn,
            rows=drawn_rows,
            last=to_device(starts[1:][drawn] - 1, self.device) if len(drawn) < starts[-1] else None,
            draft=draft,
            row_count=self._seats.count,
            fed=fed,
            scored=scored,
            drawn_rows=None if self._last is None or draft is None
            else company.there if len(drawn) == len(rows) else to_device(rows[drawn], self.device),
        )  # fmt: skip

    def _company_of(self, chunks: Items[Chunk], *, known: bool) -> tuple[Company, list[int]]:
        """And the rows that are new to their sequences. `Seats` gives the same array while the same ones come."""
        if known and self._company is not None:
            return self._company, []
        rows, new = self._seats.of(chunks)
        if self._company is None or self._company.rows is not rows:
            self._company = Company.of(chunks, rows, self.device)
        return self._company, new

    def _following(self, plan: StepPlan) -> tuple[Items[Chunk], Order, Ragged] | None:
        """As `_in_order`, where every chunk is what the same chunk of the step before draws: nobody is looked at."""
        before, chunks = self._batch, plan.chunks
        if before is None or not plan.continues_previous:
            return None
        count, starts = len(chunks), before.context_lens
        assert (chunks[0].start, chunks[-1].start) == (starts[0], starts[-1])
        query_starts = before.query_starts if before.decode_count == count else np.arange(count + 1)
        return chunks, range(count), Ragged(query_starts, starts + 1, starts, count)

    def _inputs(
        self, chunks: Items[Chunk], token_count: int, company: Company, *, all_fed: bool
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor] | None]:
        """The tokens that are known, and `PreparedStep.fed`."""
        if all_fed:
            return torch.empty(token_count, dtype=torch.int64, device=self.device), (None, company.there)
        fed = [
            i for i, chunk in enumerate(chunks) if chunk.token_on_device
        ]  # alone, so these are places among the tokens too
        tokens: list[int] = []
        for chunk in chunks:
            tokens += (0,) if chunk.token_on_device else chunk.seq.token_ids[chunk.start : chunk.end]
        there = to_device(np.array(tokens, np.int64), self.device)
        if not fed:
            return there, None
        return there, (to_device(np.array(fed), self.device), to_device(company.rows[fed], self.device))

    def _compute(self, step: PreparedStep) -> Callable[[], list[list[Any]]]:
        """Have the device do it; what waits for what there is to read."""
        plan = step.plan
        if step.draft is not None:
            self._sampler.begin(step.draft, self._before)
        if plan.block_copies:
            self.moves.do(plan.block_copies)
        self._prepare_states(plan)
        found: list[Tensor] = []
        if self._last is not None and (more := step.row_count - len(self._last)) > 0:
            self._last = torch.cat([self._last, self._last.new_zeros(more)])
        if step.fed is not None:
            assert self._last is not None
            at, rows = step.fed
            if at is None:
                torch.index_select(self._last, 0, rows, out=step.token_ids)
            else:
                step.token_ids.index_copy_(0, at, self._last.index_select(0, rows))
        if step.chunks:
            hidden = self._forward(step)
            found += self._draw(hidden, step)
            for i in step.scored:
                found += self._prompt_logprobs(hidden[step.starts[i] :], step.chunks[i])
        for source_unit, target_unit in plan.state_checkpoints:
            self._copy_unit(source_unit, target_unit)
        read = to_host(found)
        if self._last is not None:
            self._before = lambda: dict(zip(step.rows, read()[0])) if step.rows else {}
        return read

    @torch.inference_mode()
    def record_decode_steps(self, sequences_max: int) -> None:
        """Record now, not when they are first needed, the decode steps of up to so many sequences, where any are."""
        if self._graphs is not None:
            self._graphs.record(sequences_max)

    def close(self) -> None:
        """Give up the thread and the recorded steps: NCCL's communicators do not end while a graph holds them."""
        self._graphs = None
        if self._worker is not None:
            self._worker.shutdown()
        if self._masks is not None:
            self._masks.close()

    def _forward(self, step: PreparedStep) -> Tensor:
        """Hidden states of the wanted rows, [wanted, hidden]."""
        batch, tables = step.batch, step.tables
        if self._graphs is not None and batch.decode_count == len(step.chunks):
            hidden = self._graphs.forward(step.token_ids, batch, tables, step.units)
            if hidden is not None:
                return hidden if step.wanted is None else hidden[step.wanted]
        fixed = self._fixed
        plan_attention = self._ops.plan_attention if fixed is None else fixed.plan_kept
        positions = to_device(batch.positions, self.device)
        layers = Step(
            ops=self._ops,
            rotary=[rope.at(positions) for rope in self._ropes],
            kv=self._kv,
            plans=[
                plan_attention(batch, table, kv, self._windows[g])
                for g, (table, kv) in enumerate(zip(tables, self._kv, strict=True))
            ],
            states=self._states,
            state_plan=None if step.units is None else self._ops.plan_state(batch, step.units),
        )
        return self.model.forward(step.token_ids, layers, step.wanted)

    def _draw(self, hidden: Tensor, step: PreparedStep) -> list[Tensor]:
        """The tokens drawn, and their logprobs where somebody wants any."""
        if not step.drawn:
            return []
        picked = hidden if step.last is None else hidden[step.last]
        if step.draft is None:
            self.model.lend_logits(picked)
            return []
        tokens, logprobs = self._sampler.sample(self.model.logits(picked), step.draft)
        if self._last is not None:
            assert step.drawn_rows is not None
            self._last.index_copy_(0, step.drawn_rows, tokens)
        return [tokens, *logprobs]

    def _prompt_logprobs(self, hidden: Tensor, chunk: Chunk) -> list[Tensor]:
        """Logprobs of the prompt tokens start + 1 .. end; row i of `hidden` is position start + i."""
        end = min(chunk.end + 1, chunk.seq.prompt_len)
        count, slab = end - chunk.start - 1, max(1, LOGIT_SLAB_BYTES // (4 * self.model.config.vocab_size))
        tokens = to_device(np.array(chunk.seq.token_ids[chunk.start + 1 : end], np.int64), self.device)
        found = []
        for at in range(0, count, slab):
            rows = hidden[at : min(at + slab, count)]
            if self.model.samples:
                most = chunk.seq.request.params.prompt_logprobs or 0
                found.append(token_logprobs(self.model.logits(rows), tokens[at : at + slab], most))
            else:
                self.model.lend_logits(rows)
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _result(self, step: PreparedStep, found: list[list[Any]]) -> StepResult:
        """From what was read: the tokens, their logprobs, those of prompts."""
        result, order = StepResult([None] * len(step.chunks)), step.order
        if not self.model.samples:
            return result
        if step.draft is not None:
            tokens = found.pop(0)
            if len(tokens) == step.batch.token_count:  # a decode step: in the plan's order
                result.sampled_tokens = tokens
            else:
                for i, token in zip(step.drawn, tokens, strict=True):
                    result.sampled_tokens[order[i]] = token
            result.failures = {order[step.drawn[i]]: why for i, why in self._sampler.failed(step.draft).items()}
            if rows := step.draft.batch.logprobs:
                entries = read_logprobs(found[:TENSORS], step.draft.batch.logprob_counts)
                result.logprobs = {order[step.drawn[row]]: entry for row, entry in zip(rows, entries, strict=True)}
                del found[:TENSORS]
        for i in step.scored:
            most = step.chunks[i].seq.request.params.prompt_logprobs or 0
            result.prompt_logprobs[order[i]] = read_logprobs(found[:TENSORS], [most] * len(found[0]))
            del found[:TENSORS]
        return result

    def _prepare_states(self, plan: StepPlan) -> None:
        for unit in plan.state_resets:
            self._buffer.view(self.num_units, -1)[unit].zero_()
        for source, target in plan.state_restores:
            self._copy_unit(source, target)

    def _copy_unit(self, source: UnitId, target: UnitId) -> None:
        units = self._buffer.view(self.num_units, -1)
        units[target].copy_(units[source])


def _in_order(chunks: Items[Chunk]) -> tuple[Items[Chunk], Order, Ragged]:
    """The chunks in the kernels' order, where each of them was, and their batch. A decode step is in order."""
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    ends = np.array([chunk.end for chunk in chunks], np.int64)
    longer = ends - starts > 1
    if not longer.any():
        return chunks, range(len(chunks)), Ragged(np.arange(len(chunks) + 1), ends, starts, len(chunks))
    at = longer.argsort(kind="stable")
    order = at.tolist()
    return [chunks[i] for i in order], order, Ragged.of(starts[at], ends[at])
