"""Computes a step: copies what the plan says, runs the model over the chunks, samples where a chunk asks for it.

Decides nothing about who runs or what lies where. Rows of a step are put in the kernels' order (chunks of one token
first); results are given back in the plan's order. Nothing is read from a block or a state that the plan did not fill
before.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.execution.block_tables import BlockTables, RowAllocator
from engine.execution.decode_graphs import Capture, DecodeGraphs
from engine.execution.device_pool import DevicePool
from engine.execution.logprobs import LOGPROB_TENSORS, read_logprobs, token_logprobs
from engine.execution.masks import Masks
from engine.execution.prepared_step import (
    BatchState,
    Order,
    OrderedChunks,
    PreparedStep,
    select_hidden_rows,
    sort_for_kernels,
    state_units,
    wants_prompt_logprobs,
)
from engine.execution.sampler import Sampler
from engine.grammars import GrammarCompiler
from engine.models import CausalLM
from engine.models.layers import ForwardContext
from engine.types import Chunk, RunnerLostError, StepPlan, StepResult
from kernels import Kernels, RaggedBatch, select_kernels
from kernels.interface import FixedPlanKernels
from kernels.transfer import copy_to_device, start_copy_to_host

Result = TypeVar("Result")

LOGIT_SLAB_BYTES = 64 << 20
"""Logits of prompt positions are made in slabs of at most so many bytes of fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How a runner computes steps, besides its model and its memory."""

    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    overlaps_steps: bool = False
    """Steps may have tokens that the step before draws. Where no device queues steps, a thread does them."""
    mask_threads: int = 1
    """Threads that make the masks of constrained answers."""


class ModelRunner:
    """Runs one model on one device over one pool of units."""

    def __init__(
        self,
        model: CausalLM,
        pool: DevicePool,
        config: RunnerConfig,
        *,
        kernels: Kernels | None = None,
        capture: Capture | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`kernels`: None: the device's own. `capture`: how decode steps are recorded, where the kernels allow it;
        None: they are not. `grammars`: of constrained answers; None: there are none.
        """
        device, spec = pool.device, pool.spec
        self.model = model
        self.pool = pool
        self.device = device
        self._ops = select_kernels(device) if kernels is None else kernels
        vocab_size = model.config.vocab_size
        self._masks = None if grammars is None else Masks(grammars, vocab_size, device, config.mask_threads)
        self._sampler = Sampler(vocab_size, device, config.eos_token_ids, config.seed, self._ops, self._masks)
        self._ropes = model.make_rope_tables(config.max_model_len, pool.dtype, device)
        self._windows = model.window_by_group
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=device) if config.overlaps_steps else None
        """[rows]: the token drawn last for the sequence in each row."""
        self._read_last_tokens: Callable[[], dict[int, int]] = dict
        """Waits for the tokens that the newest step draws; returns row -> token."""
        self._fixed_plans = self._ops if isinstance(self._ops, FixedPlanKernels) else None
        # Kept tables are read when a step is queued on their device: in the order of the steps, on this thread.
        needs_thread = config.overlaps_steps and self._fixed_plans is None
        self._step_thread = ThreadPoolExecutor(1, "step") if needs_thread else None
        self._row_allocator = RowAllocator()
        self._batch_state: BatchState | None = None
        self._batch: RaggedBatch | None = None
        """Batch of the last step, like `_batch_state`."""
        blocks_max = -(-config.max_model_len // spec.block_size)
        self._tables = [
            BlockTables(g, kv, blocks_max, None if self._fixed_plans is None else device)
            for g, kv in enumerate(pool.kv)
        ]
        self._states = pool.view_states(model.make_state_layout(pool.dtype))
        self._graphs: DecodeGraphs | None = None
        if capture is not None and self._fixed_plans is not None:
            self._graphs = DecodeGraphs(
                model,
                self._ops,
                kv=pool.kv,
                states=self._states,
                ropes=self._ropes,
                blocks_max=blocks_max,
                capture=capture,
            )

    @property
    def has_recorded_steps(self) -> bool:
        """Decode steps are recorded: they read and write where the pool and the weights were then."""
        return self._graphs is not None

    def release_pool(self) -> None:
        """Give the pool's memory back. No step may be out, and none may come before `allocate_pool`."""
        self._row_allocator.clear()
        self.pool.release()

    def allocate_pool(self) -> None:
        """Have a pool again, in which nothing is. Raises RuntimeError where there is no memory for it."""
        self.pool.allocate()

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the step. Results are in the order of `plan.chunks`. Raises RunnerLostError where no step can be done."""
        return self.submit(plan)()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin the step, behind those that were begun before; what is returned waits for its result.

        Either may raise, RunnerLostError too. The plan is not read after this returns.
        """
        return self._reset_on_error(partial(self._submit, plan))

    def _submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        step = self._prepare(plan)
        read = (
            self._compute(step)
            if self._step_thread is None
            else self._step_thread.submit(self._compute_and_read, step).result
        )
        return lambda: self._reset_on_error(lambda: self._build_result(step, read()))

    @torch.inference_mode()
    def _compute_and_read(self, step: PreparedStep) -> list[list[Any]]:
        """On the thread that computes."""
        return self._compute(step)()

    def _reset_on_error(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except Exception as error:
            self._row_allocator.clear()
            self._batch = None
            self._sampler.reset_rows()
            try:
                self._probe()
            except RuntimeError as fault:
                raise RunnerLostError(f"{self.device} computes nothing any more: {fault}".partition("\n")[0]) from error
            raise

    def _probe(self) -> None:
        """Compute something small: a kernel's error sticks to its CUDA context, and fails whatever comes after it."""
        torch.ones(1, device=self.device).sum().item()

    def _prepare(self, plan: StepPlan) -> PreparedStep:
        """Prepare a step on the host: order its chunks, and upload tables, tokens and sampling inputs."""
        continuation = self._continue_previous(plan)
        chunks, order, batch = continuation or sort_for_kernels(plan.chunks)
        batch_state, new_rows = self._current_batch_state(chunks, is_continuation=continuation is not None)
        self._batch = batch
        ends, rows = batch.context_lens, batch_state.rows
        self._sampler.reset_rows(new_rows)
        for tables in self._tables:
            tables.update(chunks, ends, rows, new_rows, self._row_allocator.row_count, plan.table_version)
        prompt_logprob_chunks = (
            [i for i, chunk in enumerate(chunks) if wants_prompt_logprobs(chunk)]
            if batch_state.has_prompt_logprobs
            else []
        )
        token_ids, tokens_on_device = self._build_token_ids(
            chunks, batch.token_count, batch_state, all_on_device=continuation is not None
        )
        selected_tokens, selected_starts = None, batch.query_starts
        sampled_chunks: Order = range(len(chunks))
        if continuation is None:
            selected_tokens, selected_starts = select_hidden_rows(chunks, batch.query_starts, prompt_logprob_chunks)
            sampled_chunks = [i for i, chunk in enumerate(chunks) if chunk.should_sample]
        sequences, sampled_ends, sampled_rows = batch_state.sequences, ends, batch_state.row_list
        if len(sampled_chunks) < len(chunks):
            sequences, sampled_rows = [sequences[i] for i in sampled_chunks], [sampled_rows[i] for i in sampled_chunks]
            sampled_ends = ends[sampled_chunks]
        sampling_inputs = None
        if sampled_chunks and self.model.samples_tokens:
            sampling_inputs = self._sampler.prepare(
                sequences, sampled_ends, sampled_rows, self._row_allocator.row_count
            )
        return PreparedStep(
            plan, chunks, order, batch,
            token_ids=token_ids,
            tables=[
                tables.host_table(ends, rows) if self._fixed_plans is None else tables.device_table(rows)
                for tables in self._tables
            ],
            units=state_units(chunks) if self._states else None,
            selected_tokens=None if selected_tokens is None else copy_to_device(selected_tokens, self.device),
            selected_starts=selected_starts,
            sampled_chunks=sampled_chunks,
            sampled_rows=sampled_rows,
            last_token_indices=copy_to_device(selected_starts[1:][sampled_chunks] - 1, self.device)
            if len(sampled_chunks) < selected_starts[-1] else None,
            sampling_inputs=sampling_inputs,
            row_count=self._row_allocator.row_count,
            tokens_on_device=tokens_on_device,
            prompt_logprob_chunks=prompt_logprob_chunks,
            sampled_device_rows=None if self._last_tokens is None or sampling_inputs is None
            else batch_state.device_rows if len(sampled_chunks) == len(rows)
            else copy_to_device(rows[sampled_chunks], self.device),
        )  # fmt: skip

    def _current_batch_state(self, chunks: Items[Chunk], *, is_continuation: bool) -> tuple[BatchState, list[int]]:
        """Return the batch state, and the rows that are new to their sequences.

        `RowAllocator` returns the same array while the same sequences come.
        """
        if is_continuation and self._batch_state is not None:
            return self._batch_state, []
        rows, new_rows = self._row_allocator.assign(chunks)
        if self._batch_state is None or self._batch_state.rows is not rows:
            self._batch_state = BatchState.from_chunks(chunks, rows, self.device)
        return self._batch_state, new_rows

    def _continue_previous(self, plan: StepPlan) -> OrderedChunks | None:
        """Return what `sort_for_kernels` would, where each chunk is the token that its chunk of the last step drew."""
        previous, chunks = self._batch, plan.chunks
        if previous is None or not plan.continues_previous:
            return None
        count, previous_lens = len(chunks), previous.context_lens
        assert (chunks[0].start, chunks[-1].start) == (previous_lens[0], previous_lens[-1])
        query_starts = previous.query_starts if previous.decode_count == count else np.arange(count + 1)
        batch = RaggedBatch(query_starts, previous_lens + 1, previous_lens, count)
        return OrderedChunks(chunks, range(count), batch)

    def _build_token_ids(
        self, chunks: Items[Chunk], token_count: int, batch_state: BatchState, *, all_on_device: bool
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor] | None]:
        """Return the tokens that are known on the host, and `PreparedStep.tokens_on_device`."""
        if all_on_device:
            return torch.empty(token_count, dtype=torch.int64, device=self.device), (None, batch_state.device_rows)
        chunks_on_device = [
            i for i, chunk in enumerate(chunks) if chunk.token_on_device
        ]  # alone, so these are places among the tokens too
        tokens: list[int] = []
        for chunk in chunks:
            tokens += (0,) if chunk.token_on_device else chunk.seq.token_ids[chunk.start : chunk.end]
        device_tokens = copy_to_device(np.array(tokens, np.int64), self.device)
        if not chunks_on_device:
            return device_tokens, None
        return device_tokens, (
            copy_to_device(np.array(chunks_on_device), self.device),
            copy_to_device(batch_state.rows[chunks_on_device], self.device),
        )

    def _compute(self, step: PreparedStep) -> Callable[[], list[list[Any]]]:
        """Have the device do it; what waits for what there is to read."""
        plan = step.plan
        if step.sampling_inputs is not None:
            self._sampler.start_masks(step.sampling_inputs, self._read_last_tokens)
        self.pool.prepare_step(plan)
        outputs: list[Tensor] = []
        if self._last_tokens is not None and (missing_rows := step.row_count - len(self._last_tokens)) > 0:
            self._last_tokens = torch.cat([self._last_tokens, self._last_tokens.new_zeros(missing_rows)])
        if step.tokens_on_device is not None:
            assert self._last_tokens is not None
            token_indices, rows = step.tokens_on_device
            if token_indices is None:
                torch.index_select(self._last_tokens, 0, rows, out=step.token_ids)
            else:
                step.token_ids.index_copy_(0, token_indices, self._last_tokens.index_select(0, rows))
        if step.chunks:
            hidden = self._forward(step)
            outputs += self._sample(hidden, step)
            for i in step.prompt_logprob_chunks:
                outputs += self._prompt_logprobs(hidden[step.selected_starts[i] :], step.chunks[i])
        self.pool.finish_step(plan)
        read = start_copy_to_host(outputs)
        if self._last_tokens is not None:
            self._read_last_tokens = lambda: dict(zip(step.sampled_rows, read()[0])) if step.sampled_rows else {}
        return read

    @torch.inference_mode()
    def record_decode_steps(self, sequences_max: int) -> None:
        """Record now, not when they are first needed, the decode steps of up to so many sequences, where any are."""
        if self._graphs is not None:
            self._graphs.record(sequences_max)

    def close(self) -> None:
        """Give up the thread and the recorded steps: NCCL's communicators do not end while a graph holds them."""
        self._graphs = None
        if self._step_thread is not None:
            self._step_thread.shutdown()
        if self._masks is not None:
            self._masks.close()

    def _forward(self, step: PreparedStep) -> Tensor:
        """Hidden states of the selected rows, [selected, hidden]."""
        batch, tables = step.batch, step.tables
        if self._graphs is not None and batch.decode_count == len(step.chunks):
            hidden = self._graphs.forward(step.token_ids, batch, tables, step.units)
            if hidden is not None:
                return hidden if step.selected_tokens is None else hidden[step.selected_tokens]
        fixed_plans = self._fixed_plans
        plan_attention = self._ops.plan_attention if fixed_plans is None else fixed_plans.plan_with_device_table
        positions = copy_to_device(batch.positions, self.device)
        layers = ForwardContext(
            ops=self._ops,
            rotary_by_rope=[rope.look_up(positions) for rope in self._ropes],
            kv_by_group=self.pool.kv,
            plan_by_group=[
                plan_attention(batch, table, kv, self._windows[g])
                for g, (table, kv) in enumerate(zip(tables, self.pool.kv, strict=True))
            ],
            state_by_layer=self._states,
            state_plan=None if step.units is None else self._ops.plan_state(batch, step.units),
        )
        return self.model.forward(step.token_ids, layers, step.selected_tokens)

    def _sample(self, hidden: Tensor, step: PreparedStep) -> list[Tensor]:
        """The tokens drawn, and their logprobs where somebody wants any."""
        if not step.sampled_chunks:
            return []
        sampled_hidden = hidden if step.last_token_indices is None else hidden[step.last_token_indices]
        if step.sampling_inputs is None:
            self.model.contribute_logits(sampled_hidden)
            return []
        tokens, logprobs = self._sampler.sample(self.model.compute_logits(sampled_hidden), step.sampling_inputs)
        if self._last_tokens is not None:
            assert step.sampled_device_rows is not None
            self._last_tokens.index_copy_(0, step.sampled_device_rows, tokens)
        return [tokens, *logprobs]

    def _prompt_logprobs(self, hidden: Tensor, chunk: Chunk) -> list[Tensor]:
        """Logprobs of the prompt tokens start + 1 .. end; row i of `hidden` is position start + i."""
        end = min(chunk.end + 1, chunk.seq.prompt_len)
        count, slab_rows = end - chunk.start - 1, max(1, LOGIT_SLAB_BYTES // (4 * self.model.config.vocab_size))
        tokens = copy_to_device(np.array(chunk.seq.token_ids[chunk.start + 1 : end], np.int64), self.device)
        slabs = []
        for at in range(0, count, slab_rows):
            rows = hidden[at : min(at + slab_rows, count)]
            if self.model.samples_tokens:
                top_count = chunk.seq.request.params.prompt_logprobs or 0
                slabs.append(token_logprobs(self.model.compute_logits(rows), tokens[at : at + slab_rows], top_count))
            else:
                self.model.contribute_logits(rows)
        return [torch.cat(parts) for parts in zip(*slabs, strict=True)]

    def _build_result(self, step: PreparedStep, outputs: list[list[Any]]) -> StepResult:
        """From what was read: the tokens, their logprobs, those of prompts."""
        result, order = StepResult([None] * len(step.chunks)), step.order
        if not self.model.samples_tokens:
            return result
        if step.sampling_inputs is not None:
            tokens = outputs.pop(0)
            if len(tokens) == step.batch.token_count:  # a decode step: in the plan's order
                result.sampled_tokens = tokens
            else:
                for i, token in zip(step.sampled_chunks, tokens, strict=True):
                    result.sampled_tokens[order[i]] = token
            result.failure_by_chunk = {
                order[step.sampled_chunks[i]]: reason
                for i, reason in self._sampler.failures(step.sampling_inputs).items()
            }
            if rows := step.sampling_inputs.batch.logprob_rows:
                entries = read_logprobs(outputs[:LOGPROB_TENSORS], step.sampling_inputs.batch.logprob_counts)
                result.logprobs_by_chunk = {
                    order[step.sampled_chunks[row]]: entry for row, entry in zip(rows, entries, strict=True)
                }
                del outputs[:LOGPROB_TENSORS]
        for i in step.prompt_logprob_chunks:
            top_count = step.chunks[i].seq.request.params.prompt_logprobs or 0
            result.prompt_logprobs_by_chunk[order[i]] = read_logprobs(
                outputs[:LOGPROB_TENSORS], [top_count] * len(outputs[0])
            )
            del outputs[:LOGPROB_TENSORS]
        return result
