"""Computes a step: performs the plan's copies, runs the model over the chunks, and samples where a chunk asks for it.

The chunks of a step are put in the kernels' order (chunks of one token first); results are returned in the plan's
order. Most steps have the sequences of the step before. So all inputs that depend on the sequences alone are kept
(`_batch_state`), and made again only when the sequences change.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from engine.cache.spec import ceil_div
from engine.execution.block_tables import BlockTables, RowAllocator
from engine.execution.decode_graphs import Capture, DecodeGraphs
from engine.execution.device_pool import DevicePool
from engine.execution.logprobs import compute_token_logprobs
from engine.execution.masks import Masks
from engine.execution.prepared_step import (
    BatchState,
    DeviceTokens,
    PreparedStep,
    find_prompt_logprob_chunks,
    list_state_units,
    select_tokens,
)
from engine.execution.sampler import Sampler, SamplingInputs
from engine.execution.step_outputs import build_result
from engine.grammar_compiler import GrammarCompiler
from engine.models import CausalLM
from engine.models.layers import ForwardContext
from engine.types import Chunk, RunnerLostError, StepPlan, StepResult
from kernels import Kernels, RaggedBatch, select_kernels
from kernels.host_copies import copy_to_device, start_copy_to_host
from kernels.interface import IntArray

LOGIT_SLAB_BYTES = 64 << 20
"""Most bytes of fp32 logits of prompt positions that are held at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How a runner computes steps, besides its model and its memory."""

    max_model_len: int
    max_num_seqs: int = 256
    """Most sequences in a step."""
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    overlaps_steps: bool = False
    """Whether a step may begin before the tokens of the previous step are known. On a CPU, beginning computes it."""
    mask_threads: int = 1
    """Threads that make the masks of constrained answers."""


class ModelRunner:
    """Computes the steps of one model on one device, over one pool of units."""

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
        """Make a runner of a loaded model, over the KV cache memory of `pool`.

        `kernels`: None selects the kernels of the device. `capture` records decode steps as CUDA graphs if the kernels
        allow that; None: no step is recorded. `grammars` constrain answers; None: no answer has a grammar.
        """
        device = pool.device
        row_count = config.max_num_seqs
        self.model = model
        self.pool = pool
        self.device = device
        self._ops = select_kernels(device) if kernels is None else kernels

        # Inputs that are kept from step to step, with a row for each running sequence.
        self._row_allocator = RowAllocator(row_count)
        self._batch_state: BatchState | None = None
        """Inputs that depend on the last step's sequences; None before the first step, and after a failed one."""
        blocks_max = ceil_div(config.max_model_len, pool.spec.block_size)
        self._tables = [
            BlockTables(group, kv, row_count, blocks_max, device if self._ops.has_fixed_plans else None)
            for group, kv in enumerate(pool.kv)
        ]

        # The forward pass.
        self._ropes = model.make_rope_tables(config.max_model_len, pool.dtype, device)
        self._windows = model.window_by_group
        self._states = pool.view_states(model.make_state_layout(pool.dtype))
        self._graphs: DecodeGraphs | None = None
        """Recorded decode steps; None: every step launches its kernels."""
        if capture is not None and self._ops.has_fixed_plans:
            self._graphs = DecodeGraphs(
                model,
                self._ops,
                kv=pool.kv,
                states=self._states,
                ropes=self._ropes,
                blocks_max=blocks_max,
                capture=capture,
            )

        # Sampling.
        vocab_size = model.config.vocab_size
        self._sampler = Sampler(
            vocab_size,
            device,
            eos_token_ids=config.eos_token_ids,
            seed=config.seed,
            ops=self._ops,
            masks=None if grammars is None else Masks(grammars, vocab_size, device, config.mask_threads),
            row_count=row_count,
            length_max=config.max_model_len,
        )
        self._last_tokens = torch.zeros(row_count, dtype=torch.int64, device=device) if config.overlaps_steps else None
        """[rows]: the token that was drawn last for the sequence in each row."""
        self._read_last_tokens: Callable[[], dict[int, int]] = dict
        """Waits for the tokens that the newest step draws, and returns them by row. Before the first step: none."""

    def release_pool(self) -> None:
        """Give the pool's memory and the recorded steps back. No step may come before `pool.allocate`."""
        self._forget_rows()
        if self._graphs is not None:
            self._graphs.clear()
        self.pool.release()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step. Results are in the order of `plan.chunks`. Raises RunnerLostError if the device is lost."""
        return self.submit(plan)()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step, after all steps that were begun before. Returns a function that waits for the step's result.

        That function raises any error of the step, also of its beginning, or RunnerLostError if the device is lost. The
        plan is not read after `submit` returns.
        """
        try:
            step = self._prepare(plan)
            wait_for_outputs = self._launch(step)
        except Exception as error:  # noqa: BLE001 - it is raised when the step's result is asked for
            self._forget_rows()
            return partial(self._fail, error)

        def wait_for_result() -> StepResult:
            try:
                return build_result(step, wait_for_outputs())
            except Exception as error:  # noqa: BLE001 - `_fail` raises it
                self._fail(error)

        return wait_for_result

    def _fail(self, error: Exception) -> NoReturn:
        """Raise the error of a step, or RunnerLostError if the device is broken by it.

        First discards all per-sequence tables, which may be half written, also by later steps: they are dropped.
        """
        self._forget_rows()
        try:
            self._check_device()
        except RuntimeError as fault:
            raise RunnerLostError(f"{self.device} computes nothing any more: {fault}".partition("\n")[0]) from error
        raise error

    def _forget_rows(self) -> None:
        """Forget the rows of all sequences, so that the next step writes all per-sequence tables anew."""
        self._row_allocator.clear()
        self._batch_state = None

    def _check_device(self) -> None:
        """Compute something small, which raises RuntimeError if an earlier error has broken the CUDA context."""
        torch.ones(1, device=self.device).sum().item()

    def _prepare(self, plan: StepPlan) -> PreparedStep:
        """Make all inputs of a step before the step is computed: what the host decides, and what the device reads.

        A chunk is the part of one sequence that the step computes. Inputs that stay the same from step to step, such as
        the older part of a block table, are on the device already, and only their changes are sent.
        """
        # Chunks of one token come first, as the kernels need. Otherwise the plan's order stays.
        order = sorted(range(len(plan.chunks)), key=lambda i: plan.chunks[i].end - plan.chunks[i].start > 1)
        chunks = [plan.chunks[i] for i in order]
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        ends = np.array([chunk.end for chunk in chunks], np.int64)
        batch = RaggedBatch.from_positions(starts, ends)
        batch_state, new_rows = self._update_batch_state(chunks)
        for tables in self._tables:
            tables.update(chunks, ends, batch_state.rows, new_rows)

        prompt_logprob_chunks = find_prompt_logprob_chunks(chunks)
        selected = select_tokens(batch.query_starts, batch_state.sampled_chunks, prompt_logprob_chunks, self.device)
        return PreparedStep(
            plan=plan,
            chunks=chunks,
            order=order,
            batch=batch,
            token_ids=self._build_token_ids(chunks),
            tables=[tables.make_step_table(batch_state.rows) for tables in self._tables],
            units=list_state_units(chunks) if self._states else None,
            selected=selected,
            batch_state=batch_state,
            sampling_inputs=self._prepare_sampling(batch_state, ends),
            device_tokens=self._find_device_tokens(chunks, batch_state.rows),
            prompt_logprob_chunks=prompt_logprob_chunks,
        )

    def _prepare_sampling(self, state: BatchState, ends: IntArray) -> SamplingInputs | None:
        """Prepare to draw the tokens at the `ends` of the sampled chunks; None if this rank draws none."""
        if state.sampling_batch is None:
            return None
        return self._sampler.prepare(state.sampling_batch, ends[state.sampled_chunks], self._read_last_tokens)

    def _update_batch_state(self, chunks: Items[Chunk]) -> tuple[BatchState, list[int]]:
        """Return the inputs that depend on a step's sequences alone, and the table rows of new sequences.

        The inputs of the last step are returned if it had the same sequences, and drew tokens for the same ones.
        """
        last_state = self._batch_state
        sequences = [chunk.seq for chunk in chunks]
        sampled_chunks = [i for i, chunk in enumerate(chunks) if chunk.should_sample]
        if last_state is not None and (last_state.sequences, last_state.sampled_chunks) == (sequences, sampled_chunks):
            return last_state, []
        rows, new_rows = self._row_allocator.assign(sequences)
        self._sampler.reset_rows(new_rows)
        sampled_row_array = rows[sampled_chunks]
        sampled_rows = sampled_row_array.tolist()
        sampling_batch = None
        if sampled_chunks and self.model.samples_tokens:
            sampling_batch = self._sampler.make_batch([sequences[i] for i in sampled_chunks], sampled_rows)
        self._batch_state = BatchState(
            sequences=sequences,
            sampled_chunks=sampled_chunks,
            rows=rows,
            sampled_rows=sampled_rows,
            sampled_device_rows=copy_to_device(sampled_row_array, self.device),
            sampling_batch=sampling_batch,
        )
        return self._batch_state, new_rows

    def _build_token_ids(self, chunks: Items[Chunk]) -> Tensor:
        """Send a step's token ids to the device. A token that the previous step has yet to draw is 0 for now."""
        token_ids: list[int] = []
        for chunk in chunks:
            token_ids += [0] if chunk.token_on_device else chunk.seq.token_ids[chunk.start : chunk.end]
        return copy_to_device(np.array(token_ids, np.int64), self.device)

    def _find_device_tokens(self, chunks: Items[Chunk], rows: IntArray) -> DeviceTokens | None:
        """Return the tokens that the previous step has yet to draw; None if the host knows all tokens of the step."""
        # Chunks of one token come first, so the index of such a chunk is also the index of its token.
        indices = [i for i, chunk in enumerate(chunks) if chunk.token_on_device]
        if not indices:
            return None
        return DeviceTokens(copy_to_device(np.array(indices), self.device), copy_to_device(rows[indices], self.device))

    def _launch(self, step: PreparedStep) -> Callable[[], list[list[Any]]]:
        """Queue a step on the device: copies of KV blocks, the forward pass, sampling, then copies of recurrent states.

        Returns a function that waits for the step's outputs, and returns them as lists of numbers: the drawn tokens,
        their logprobs, then logprobs of prompts, as far as the step has them.
        """
        self.pool.prepare_step(step.plan)
        self._fill_device_tokens(step)
        outputs: list[Tensor] = []
        if step.chunks:
            hidden = self._forward(step)
            outputs += self._sample(hidden, step)
            for i in step.prompt_logprob_chunks:
                first_row = step.selected.starts[i]
                outputs += self._compute_prompt_logprobs(hidden[first_row:], step.chunks[i])
        self.pool.finish_step(step.plan)
        wait_for_outputs = start_copy_to_host(outputs)
        if self._last_tokens is not None:
            self._read_last_tokens = partial(_read_drawn_tokens, step.batch_state.sampled_rows, wait_for_outputs)
        return wait_for_outputs

    def _fill_device_tokens(self, step: PreparedStep) -> None:
        """Write the tokens that the previous step draws, which the host does not know, into the step's token ids."""
        if step.device_tokens is None:
            return
        assert self._last_tokens is not None
        token_indices, rows = step.device_tokens
        step.token_ids.index_copy_(0, token_indices, self._last_tokens.index_select(0, rows))

    @torch.inference_mode()
    def record_decode_steps(self, sequences_max: int) -> None:
        """Record the decode steps of up to so many sequences now, instead of when they are first needed."""
        if self._graphs is not None:
            self._graphs.record(sequences_max)

    def close(self) -> None:
        """End the threads, and drop the recorded steps: NCCL's communicators do not end while a graph holds them."""
        self._graphs = None
        self._sampler.close()

    def _forward(self, step: PreparedStep) -> Tensor:
        """Run the model over a step's tokens, and return the hidden states of those that need logits.

        A decode step is replayed as a CUDA graph, if possible. Shape: [selected tokens, hidden size].
        """
        batch, selected_indices = step.batch, step.selected.indices
        if self._graphs is not None:
            hidden = self._graphs.forward(step.token_ids, batch, step.tables, step.units)
            if hidden is not None:
                return hidden if selected_indices is None else hidden[selected_indices]
        positions = copy_to_device(batch.positions, self.device)
        context = ForwardContext(
            ops=self._ops,
            rotary_by_rope=[rope.look_up(positions) for rope in self._ropes],
            kv_by_group=self.pool.kv,
            plan_by_group=[
                self._ops.plan_attention(batch, table, kv, window)
                for table, kv, window in zip(step.tables, self.pool.kv, self._windows, strict=True)
            ],
            state_by_layer=self._states,
            state_plan=None if step.units is None else self._ops.plan_state(batch, step.units),
        )
        return self.model.forward(step.token_ids, context, selected_indices)

    def _sample(self, hidden: Tensor, step: PreparedStep) -> list[Tensor]:
        """Draw the next token of each sequence with all its known tokens computed by this step or earlier ones.

        `hidden`: hidden states of the step's selected tokens. Returns tensors with a row for each draw: the tokens,
        whether their logits were NaN and, if a request wants any, their logprobs. Under tensor parallelism only rank 0
        draws: the other ranks send it their parts of the logits, and return nothing.
        """
        if not step.batch_state.sampled_chunks:  # the step ends within all of its prompts
            return []
        last_indices = step.selected.last_indices  # of the last token of each sequence that gets one
        last_hidden = hidden if last_indices is None else hidden[last_indices]
        logits = self.model.compute_logits(last_hidden)
        if logits is None or step.sampling_inputs is None:
            return []
        has_nan = logits[:, 0].isnan()  # a hidden state with one NaN makes all its logits NaN
        tokens, logprobs = self._sampler.sample(logits, step.sampling_inputs)
        if self._last_tokens is not None:  # the next step may begin before the host has the tokens
            self._last_tokens.index_copy_(0, step.batch_state.sampled_device_rows, tokens)
        return [tokens, has_nan, *logprobs]

    def _compute_prompt_logprobs(self, hidden: Tensor, chunk: Chunk) -> list[Tensor]:
        """Compute the logprobs of the prompt tokens that follow each position of a chunk.

        `hidden`: hidden states from the chunk's first position on. Logits are computed for some rows (a slab) at a
        time, because the logits of a long prompt would take gigabytes.
        """
        end = min(chunk.end + 1, chunk.seq.prompt_len)
        token_count = end - chunk.start - 1  # not `len(tokens)`: other ranks do not have the token after the chunk
        tokens = copy_to_device(np.array(chunk.seq.token_ids[chunk.start + 1 : end], np.int64), self.device)
        top_count = chunk.seq.request.params.prompt_logprobs or 0
        logits_row_bytes = 4 * self.model.config.vocab_size
        slab_rows = max(1, LOGIT_SLAB_BYTES // logits_row_bytes)
        logprobs_by_slab = []
        for start in range(0, token_count, slab_rows):
            slab = slice(start, min(start + slab_rows, token_count))
            logits = self.model.compute_logits(hidden[slab])
            if logits is not None:  # on rank 0, which samples
                logprobs_by_slab.append(compute_token_logprobs(logits, tokens[slab], top_count))
        return [torch.cat(tensors) for tensors in zip(*logprobs_by_slab, strict=True)]


def _read_drawn_tokens(table_rows: list[int], wait_for_outputs: Callable[[], list[list[Any]]]) -> dict[int, int]:
    """Wait for a step, and return the token that it drew for each of these table rows."""
    return dict(zip(table_rows, wait_for_outputs()[0])) if table_rows else {}
