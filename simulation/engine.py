"""Simulated engine: a step loop with the times of simulation/steps.py, over the block cache of simulation/cache.py.

The token budget of a step goes to one token for each decoding request, then to chunks of prefill. Prompts are computed
first come first served, or the prompt with the least remaining tokens first, as in our engine. With the latter, prompt
tokens that were computed before a request came count a tenth for the request. So no newer request overtakes a prompt
once ten times its length was computed.

Blocks for prompt and output are reserved when a request begins, or taken as tokens come. In the latter case the
youngest sequence is preempted when no block is free: it gives up its blocks and begins again, with its generated tokens
as part of the prompt. Runs of steps without prefill are computed in closed form, so the cost of a simulation grows with
requests, not with tokens.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from simulation.cache import SimCache
from simulation.steps import StepTimes
from simulation.workload import SimRequest

AGEING = 0.1
"""Weight of a prompt token computed before a request came, in the order of prompts; the same as the engine's."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine besides its step times."""

    max_sequences: int = 256
    """Most sequences that run at once (`max_num_seqs`)."""
    is_preemptive: bool = False
    """Whether blocks are taken as tokens come, and the youngest sequence is preempted when no block is free.

    Otherwise the blocks of the whole request are reserved when it begins.
    """
    shortest_first: bool = False
    """Whether the prompt with the fewest remaining tokens is computed first, otherwise the oldest prompt."""


@dataclass(slots=True, eq=False)
class SimSequence:
    """A request in a simulated engine: it waits, its prompt is computed in chunks (prefill), then its answer (decode).

    A preempted request gives up its blocks and waits again, to be computed from the start. The tokens that it has
    generated are then prefilled with its prompt.
    """

    request: SimRequest
    routed_at_s: float
    """Time at which the router sent the request to the engine."""
    prefill_tokens: int = 0
    """Tokens to prefill: the prompt, and tokens generated before a preemption."""
    remaining_tokens: int = 0
    """Tokens to generate after the prefill."""
    computed_tokens: int = 0
    """Tokens of the prefill that are computed or were cached."""
    computed_before_arrival: int = 0
    """Prompt tokens of any requests that the engine had computed, or could have computed, when this one came."""
    hit_blocks: int = 0
    """Blocks of the prompt that were cached when the request was admitted first."""
    moved_tokens: int = 0
    """Tokens of the prompt with KV that came from the worker which computed them."""
    registered_blocks: int = 0
    """Leading blocks of the prompt that the cache has under their ids: cached, or computed to their end."""
    reserved_blocks: int = 0
    """All blocks that the sequence holds, registered or not."""
    blocks_to_load: int = 0
    """Blocks that the next step brings back from host memory."""
    admission_order: int = 0
    """Number of sequences that the engine admitted before this one, plus one: the highest is preempted first."""
    finish_step: int = 0
    """Number of the engine's step that generates the last token."""
    has_first_token: bool = False
    """Whether the first token was generated, perhaps before a preemption."""

    def __post_init__(self) -> None:
        self.prefill_tokens = self.request.prompt_tokens
        self.remaining_tokens = self.request.output_tokens

    def __lt__(self, other: SimSequence) -> bool:
        """Compare two sequences in the order in which they finish, as `heapq` needs it."""
        return (self.finish_step, self.admission_order) < (other.finish_step, other.admission_order)

    @property
    def queue_key(self) -> float:
        """Key by which waiting prompts are ordered, lowest first."""
        return self.prefill_tokens - self.computed_tokens + AGEING * self.computed_before_arrival


class PromptChunk(NamedTuple):
    """Tokens of a prompt that one step computes."""

    sequence: SimSequence
    tokens: int


class DecodeRun(NamedTuple):
    """Consecutive steps without prefill, which are simulated at once."""

    start_s: float
    planned_steps: int


@dataclass(slots=True)
class StepResult:
    """Sequences that a finished step, or run of decode-only steps, brought to a first token or an end."""

    first_token_sequences: list[SimSequence] = field(default_factory=list)
    finished_sequences: list[SimSequence] = field(default_factory=list)


class SimWorker:
    """One simulated engine, which computes prompts and answers in steps of limited size.

    It has no clock: the cluster calls `submit` when a request arrives, and `advance` at the time `wake_s`. Both may
    change `wake_s`.
    """

    def __init__(
        self, number: int, step_times: StepTimes, cache: SimCache, limits: EngineLimits, block_size: int
    ) -> None:
        """Make an idle worker. `number`: its index in the cluster. `block_size`: tokens of a block."""
        self.number = number
        self.step_times = step_times
        self.cache = cache
        self.limits = limits
        self.block_size = block_size
        self.prefilled_tokens = 0
        self.preemption_count = 0

        # Requests: first waiting, then prefilling, then decoding.
        self.waiting_sequences: deque[SimSequence] = deque()
        self.prefilling_sequences: list[SimSequence] = []
        self.decoding_heap: list[SimSequence] = []
        """Heap of the decoding sequences: the next to finish comes first."""
        self.decoding_context_tokens = 0
        """Tokens in the contexts of all decoding sequences, at the start of the current decode run or step."""
        self._admission_count = 0
        self._generated_tokens = 0
        """Tokens that running sequences have generated since they began."""
        self._generated_blocks = 0
        """Blocks of these tokens, which the cache counts in `unnamed_blocks`."""

        # The step, or the run of several decode-only steps, that is computed now.
        self.step_count = 0
        """Number of finished steps."""
        self.wake_s: float | None = None
        """End of the current step or run; None while the worker is idle."""
        self._chunks: list[PromptChunk] = []
        """Chunks of prompts in the step; none in a decode-only run."""
        self._decode_run: DecodeRun | None = None
        self._unused_prefill_tokens = 0
        """Prompt tokens for which a step has room, if requests wait only for a slot; else 0."""
        self._prefill_capacity_used = 0
        """Prompt tokens that steps computed, or had room for while a request waited for a slot: what waiters age by."""

    @property
    def running_sequence_count(self) -> int:
        return len(self.prefilling_sequences) + len(self.decoding_heap)

    def count_hit_blocks(self, request: SimRequest) -> int:
        """Count the cached blocks of a prompt from which it would be resumed: its last token is always computed."""
        return self.cache.count_cached_prefix(request.block_ids, (request.prompt_tokens - 1) // self.block_size)

    def submit(self, sequence: SimSequence, now: float) -> None:
        """Enqueue a request that arrives."""
        run = self._decode_run
        started_steps = 0 if run is None else min(self._count_started_steps(run, now), run.planned_steps)
        sequence.computed_before_arrival = self._prefill_capacity_used + self._unused_prefill_tokens * started_steps
        self._enqueue(sequence)
        if self.wake_s is None:
            self._start_step(now)
        elif run is not None and len(self.waiting_sequences) == 1:  # the new request can join after the running step
            self._decode_run = run._replace(planned_steps=started_steps)
            self.wake_s = max(now, self._compute_run_end_s(self._decode_run))

    def advance(self, now: float) -> StepResult:
        """End the step, or run of decode-only steps, that ends at `wake_s`, and begin the next."""
        step_result = StepResult()
        finished_steps = 1
        if self._decode_run is not None:
            finished_steps = self._decode_run.planned_steps
            self._prefill_capacity_used += self._unused_prefill_tokens * finished_steps
            self._decode_run = None
        self.step_count += finished_steps
        generated_tokens = len(self.decoding_heap) * finished_steps
        self.decoding_context_tokens += generated_tokens
        self._generated_tokens += generated_tokens
        self._finish_decodes(step_result)
        for chunk in self._chunks:
            self._finish_chunk(chunk.sequence, chunk.tokens, step_result)
        if self._chunks:
            self.prefilling_sequences = [
                sequence for sequence in self.prefilling_sequences if sequence.computed_tokens < sequence.prefill_tokens
            ]
        self._chunks = []
        self._start_step(now)
        return step_result

    def list_generated_tokens(self, now: float) -> list[tuple[SimSequence, int]]:
        """Return each decoding sequence with the number of its generated tokens."""
        step_count = self.step_count
        run = self._decode_run
        if run is not None:
            step_count += min(self._count_started_steps(run, now) - 1, run.planned_steps)
        return [
            (sequence, sequence.request.output_tokens - max(sequence.finish_step - step_count, 0))
            for sequence in self.decoding_heap
        ]

    def _enqueue(self, sequence: SimSequence) -> None:
        if not self.limits.shortest_first:
            self.waiting_sequences.append(sequence)
            return
        sequence.computed_tokens = self.count_hit_blocks(sequence.request) * self.block_size
        insort(self.waiting_sequences, sequence, key=lambda sequence: sequence.queue_key)

    # Steps -------------------------------------------------------------------------------------------------------
    def _start_step(self, now: float) -> None:
        """Begin the next work at the time `now`, and set `wake_s` to the time when `advance` is called to end it.

        If prompts are computed, that is one step. If all sequences decode, it is a run of steps, until the first of
        them finishes or the memory is full. Without any sequence the worker is idle, and `wake_s` is None.
        """
        if self.limits.is_preemptive:
            self._preempt_until_step_fits()
        self._plan_chunks()
        self._unused_prefill_tokens = self._count_unused_prefill_tokens()
        if self._chunks:
            chunk_tokens = sum(chunk.tokens for chunk in self._chunks)
            self._prefill_capacity_used += max(chunk_tokens, self._unused_prefill_tokens)
            self.wake_s = now + self._compute_prefill_step_s()
        elif self.decoding_heap:
            self._decode_run = DecodeRun(start_s=now, planned_steps=self._count_steps_to_run())
            self.wake_s = self._compute_run_end_s(self._decode_run)
        else:
            self.wake_s = None
            assert not self.waiting_sequences, f"worker {self.number} is idle, but its cache is too small for a request"

    def _count_unused_prefill_tokens(self) -> int:
        """Count the prompt tokens for which a step has room, but which wait because `max_sequences` run already."""
        is_batch_full = self.running_sequence_count >= self.limits.max_sequences
        if not is_batch_full or not self.waiting_sequences:
            return 0
        return max(self.step_times.step_tokens - len(self.decoding_heap), 0)

    def _count_steps_to_run(self) -> int:
        """Count the decode-only steps until a sequence finishes, or until the generated tokens have no free block."""
        steps_to_finish = self.decoding_heap[0].finish_step - self.step_count
        if not self.limits.is_preemptive or self.cache.capacity is None:
            return steps_to_finish
        steps_with_room = self._count_free_blocks() * self.block_size // len(self.decoding_heap)
        return min(steps_to_finish, max(1, steps_with_room))

    def _compute_run_end_s(self, run: DecodeRun) -> float:
        return run.start_s + self.step_times.compute_decode_run_s(
            run.planned_steps, len(self.decoding_heap), self.decoding_context_tokens
        )

    def _plan_chunks(self) -> None:
        """Fill the token budget of a step with chunks of prompts: first of running sequences, then of waiting ones."""
        token_budget = self.step_times.step_tokens - len(self.decoding_heap)
        prefilling_sequences = self.prefilling_sequences
        if self.limits.shortest_first:
            prefilling_sequences = sorted(prefilling_sequences, key=lambda sequence: sequence.queue_key)
        for sequence in prefilling_sequences:
            if self.limits.shortest_first:
                token_budget = self._admit_waiting(token_budget, sequence.queue_key)
            if token_budget <= 0:
                break
            token_budget -= self._add_chunk(sequence, token_budget)
        self._admit_waiting(token_budget)

    def _add_chunk(self, sequence: SimSequence, token_budget: int) -> int:
        """Add a chunk of a prompt to the step, and return its number of tokens."""
        chunk_tokens = min(token_budget, sequence.prefill_tokens - sequence.computed_tokens)
        self._chunks.append(PromptChunk(sequence, chunk_tokens))
        return chunk_tokens

    def _compute_prefill_step_s(self) -> float:
        """Return the time of a step with the planned chunks, and count what it computes and loads."""
        step_times = self.step_times
        step_s = step_times.compute_decode_s(len(self.decoding_heap), self.decoding_context_tokens)
        for sequence, chunk_tokens in self._chunks:
            step_s += step_times.compute_prefill_s(chunk_tokens, sequence.computed_tokens)
            step_s += step_times.load_s_per_token * self.block_size * sequence.blocks_to_load
            sequence.blocks_to_load = 0
            self.prefilled_tokens += chunk_tokens
        return step_s

    def _admit_waiting(self, token_budget: int, max_queue_key: float = math.inf) -> int:
        """Start waiting sequences in order, while there is room and their queue key is below `max_queue_key`.

        Returns the rest of the token budget.
        """
        while token_budget > 0 and self.waiting_sequences and self.waiting_sequences[0].queue_key < max_queue_key:
            sequence = self.waiting_sequences[0]
            if self.running_sequence_count >= self.limits.max_sequences or not self._admit(sequence):
                break
            self.waiting_sequences.popleft()
            self.prefilling_sequences.append(sequence)
            token_budget -= self._add_chunk(sequence, token_budget)
        return token_budget

    def _count_started_steps(self, run: DecodeRun, now: float) -> int:
        """Count the decode-only steps that have started, if the run did not end before."""
        return self.step_times.count_started_steps(
            now - run.start_s, len(self.decoding_heap), self.decoding_context_tokens
        )

    def _admit(self, sequence: SimSequence) -> bool:
        """Reserve the blocks of a waiting sequence, so that it can start; return False if the cache has no room."""
        hit_blocks = self.count_hit_blocks(sequence.request)
        needed_blocks = self._count_needed_blocks(sequence)
        is_idle = not self.running_sequence_count
        must_fit = is_idle and self.cache.is_shared
        if not is_idle and self._would_pass_watermark(needed_blocks - hit_blocks):
            return False
        loaded_blocks = self.cache.reserve(sequence.request.block_ids, hit_blocks, needed_blocks, force=must_fit)
        if loaded_blocks is None:
            return False
        sequence.blocks_to_load = loaded_blocks
        self._admission_count += 1
        sequence.admission_order = self._admission_count
        sequence.registered_blocks = hit_blocks
        if not sequence.has_first_token:
            sequence.hit_blocks = hit_blocks
        sequence.computed_tokens = max(hit_blocks * self.block_size, sequence.moved_tokens)
        sequence.reserved_blocks = needed_blocks
        return True

    def _count_needed_blocks(self, sequence: SimSequence) -> int:
        """Count the blocks to reserve: for prompt and answer, or with preemption for the prompt and one block more."""
        if self.limits.is_preemptive:
            return -(-sequence.prefill_tokens // self.block_size) + 1
        return -(-(sequence.prefill_tokens + sequence.remaining_tokens) // self.block_size)

    def _finish_chunk(self, sequence: SimSequence, chunk_tokens: int, step_result: StepResult) -> None:
        """End a computed chunk of a prompt: its full blocks are cached, and after the last chunk the answer begins."""
        sequence.computed_tokens += chunk_tokens
        full_blocks = min(sequence.computed_tokens, sequence.request.prompt_tokens) // self.block_size
        if full_blocks > sequence.registered_blocks:
            self.cache.register(sequence.request.block_ids, sequence.registered_blocks, full_blocks)
            sequence.registered_blocks = full_blocks
        if sequence.computed_tokens < sequence.prefill_tokens:
            return
        if not sequence.has_first_token:
            sequence.has_first_token = True
            step_result.first_token_sequences.append(sequence)
        if sequence.remaining_tokens <= 1:
            self._finish(sequence, step_result)
            return
        sequence.finish_step = self.step_count + sequence.remaining_tokens - 1
        heapq.heappush(self.decoding_heap, sequence)
        self.decoding_context_tokens += sequence.prefill_tokens + 1
        self._generated_tokens += 1

    def _finish_decodes(self, step_result: StepResult) -> None:
        while self.decoding_heap and self.decoding_heap[0].finish_step <= self.step_count:
            sequence = heapq.heappop(self.decoding_heap)
            self._stop_decoding(sequence, sequence.remaining_tokens)
            self._finish(sequence, step_result)

    def _stop_decoding(self, sequence: SimSequence, generated_tokens: int) -> None:
        """Subtract a sequence that no longer decodes from the token counts."""
        self.decoding_context_tokens -= sequence.prefill_tokens + generated_tokens
        self._generated_tokens -= generated_tokens
        if self.limits.is_preemptive:
            self._set_generated_blocks(self._generated_tokens // self.block_size)

    def _finish(self, sequence: SimSequence, step_result: StepResult) -> None:
        """End a sequence; its blocks stay in the cache without references."""
        final_block_ids = sequence.request.final_block_ids
        missing_blocks = len(final_block_ids) - sequence.reserved_blocks
        if missing_blocks > 0:  # blocks of generated tokens, which were not reserved
            self.cache.unnamed_blocks += missing_blocks
            sequence.reserved_blocks += missing_blocks
        self.cache.register(final_block_ids, sequence.registered_blocks, len(final_block_ids))
        self.cache.release(final_block_ids, sequence.reserved_blocks - len(final_block_ids))
        step_result.finished_sequences.append(sequence)

    # Preemption -----------------------------------------------------------------------------------------------
    def _count_free_blocks(self) -> int:
        cache = self.cache
        assert cache.capacity is not None
        return cache.capacity - cache.count_held_blocks()

    def _would_pass_watermark(self, new_blocks: int) -> bool:
        """Return whether so few blocks would stay free that a sequence would soon be preempted, as in vLLM."""
        watermark_blocks = (self.cache.capacity or 0) // 100
        if not self.limits.is_preemptive or not watermark_blocks:
            return False
        return self._count_free_blocks() < new_blocks + watermark_blocks

    def _set_generated_blocks(self, block_count: int) -> None:
        self.cache.unnamed_blocks += block_count - self._generated_blocks
        self._generated_blocks = block_count

    def _preempt_until_step_fits(self) -> None:
        """Preempt the youngest sequences until the tokens that the next step generates have room in free blocks."""
        self._set_generated_blocks(self._generated_tokens // self.block_size)
        if self.cache.capacity is None:
            return
        while len(self.decoding_heap) > 1 and self._count_free_blocks() * self.block_size < len(self.decoding_heap):
            self._preempt(max(self.decoding_heap, key=lambda sequence: sequence.admission_order))
        self.cache.evict_excess()

    def _preempt(self, sequence: SimSequence) -> None:
        """Take the blocks from a decoding sequence, which then waits to be computed again from the start.

        The tokens that it has generated since its prefill become a part of the next prefill.
        """
        self.preemption_count += 1
        missing_tokens = sequence.finish_step - self.step_count  # each step generates one
        generated_tokens = sequence.remaining_tokens - missing_tokens
        self.decoding_heap.remove(sequence)
        heapq.heapify(self.decoding_heap)
        self._stop_decoding(sequence, generated_tokens)
        registered_block_ids = sequence.request.block_ids[: sequence.registered_blocks]
        self.cache.release(registered_block_ids, sequence.reserved_blocks - sequence.registered_blocks)
        sequence.prefill_tokens += generated_tokens
        sequence.remaining_tokens = missing_tokens
        sequence.computed_tokens = 0
        sequence.moved_tokens = 0
        if self.limits.shortest_first:
            self._enqueue(sequence)
        else:
            self.waiting_sequences.appendleft(sequence)
