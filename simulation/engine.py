"""Simulated engine: a step loop (simulation/steps.py has its times) and a block cache with leaf-first LRU.

A step's token budget is filled with one token for each decoding request, then with chunks of prefill: first come first
served, or the prompt with the least left first, as our engine does. There, prompt tokens computed since a request came
count a tenth against newer requests (also tokens that could have been computed while a request waited for a slot): once
ten times the length of a prompt was computed, no newer request goes before it.

Blocks are reserved for prompt and output when a request begins, or taken as tokens come; then the youngest sequence is
preempted when there are none left: it gives up its blocks and begins again, with its generated tokens as part of the
prompt. Stretches without prefill are jumped over in closed form, so the cost of a run grows with requests, not with
tokens.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from simulation.steps import StepTimes
from simulation.workload import SimRequest

AGEING = 0.1
"""Weight of a prompt token computed before a request came, in the order of waiting prompts; the engine's figure."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine besides its step times."""

    max_sequences: int = 256
    """Most sequences that run at once (`max_num_seqs`)."""
    is_preemptive: bool = False
    """Whether blocks are taken as tokens come, and the youngest sequence is preempted when there are none.

    Else the blocks of the whole request are reserved when it begins.
    """
    shortest_first: bool = False
    """Whether the prompt with the fewest tokens left goes first, begun or not; else the one that came first."""


class SimCache:
    """Blocks of one worker, or of several where a bound shares them. `capacity` in blocks; None is infinite.

    Invariant: len(reference_counts) + unnamed_blocks + len(idle_blocks) <= capacity. `reference_counts` has the
    referenced blocks, `idle_blocks` is the LRU order of unreferenced ones, `unnamed_blocks` counts reserved pages
    without a name yet. A shared cache may go over it, see `reserve`. `host_capacity` blocks of host memory take what is
    evicted (`host_blocks`); a hit there moves back.
    """

    def __init__(self, capacity: int | None, *, is_shared: bool = False, host_capacity: int = 0) -> None:
        self.capacity = capacity
        self.host_capacity = host_capacity
        self.host_blocks: OrderedDict[int, None] = OrderedDict()
        self.last_loaded_blocks = 0
        """Blocks that the last `reserve` moved back from host memory."""
        self.is_shared = is_shared
        self.reference_count_by_block: dict[int, int] = {}
        self.idle_blocks: OrderedDict[int, None] = OrderedDict()
        self.unnamed_blocks = 0
        self.on_store: Callable[[list[int], int | None], None] | None = None
        self.on_remove: Callable[[list[int]], None] | None = None
        self.on_move: Callable[[list[int], bool], None] | None = None
        """Called with the blocks that moved, and whether they went to the host."""

    def is_resident(self, block: int) -> bool:
        """Return whether a block is resident, whatever blocks come before it."""
        return block in self.reference_count_by_block or block in self.idle_blocks or block in self.host_blocks

    def count_cached_prefix(self, block_ids: list[int], max_blocks: int) -> int:
        """Count the blocks of the longest resident prefix, at most `max_blocks`."""
        reference_counts, idle_blocks, host_blocks = self.reference_count_by_block, self.idle_blocks, self.host_blocks
        matching_blocks = 0
        for block in block_ids:
            if matching_blocks >= max_blocks or (
                block not in reference_counts and block not in idle_blocks and block not in host_blocks
            ):
                break
            matching_blocks += 1
        return matching_blocks

    def compute_usage(self) -> float:
        """Return the share of the blocks that running requests hold."""
        return (
            0.0 if self.capacity is None else (len(self.reference_count_by_block) + self.unnamed_blocks) / self.capacity
        )

    def reserve(self, block_ids: list[int], hit_blocks: int, block_count: int, *, force: bool = False) -> bool:
        """Take references on the first `hit_blocks` blocks and `block_count - hit_blocks` private blocks.

        Return False where there is no room. `force`: exceed the capacity rather than leave a worker idle while others
        hold all blocks of a shared cache.
        """
        reference_counts, idle_blocks = self.reference_count_by_block, self.idle_blocks
        new_block_count = block_count - hit_blocks
        if self.capacity is not None:
            newly_referenced = sum(1 for block in block_ids[:hit_blocks] if block not in reference_counts)
            if (
                len(reference_counts) + self.unnamed_blocks + newly_referenced + new_block_count > self.capacity
                and not force
            ):
                return False
        loaded_blocks: list[int] = []
        for block in block_ids[:hit_blocks]:
            if block in idle_blocks:
                del idle_blocks[block]
                reference_counts[block] = 1
            elif block in self.host_blocks:
                self._load_from_host(block, loaded_blocks)
            else:
                reference_counts[block] += 1
        self.last_loaded_blocks = len(loaded_blocks)
        if loaded_blocks and self.on_move is not None:
            self.on_move(loaded_blocks, False)
        self.unnamed_blocks += new_block_count
        self.trim()
        return True

    def trim(self) -> None:
        """Evict blocks over the capacity."""
        if self.capacity is None:
            return
        excess = min(
            len(self.reference_count_by_block) + self.unnamed_blocks + len(self.idle_blocks) - self.capacity,
            len(self.idle_blocks),
        )
        if excess > 0:
            evicted_blocks = [self.idle_blocks.popitem(last=False)[0] for _ in range(excess)]
            if self.host_capacity:
                self.host_blocks.update(dict.fromkeys(evicted_blocks))
                if self.on_move is not None:
                    self.on_move(evicted_blocks, True)
                evicted_blocks = [
                    self.host_blocks.popitem(last=False)[0] for _ in range(len(self.host_blocks) - self.host_capacity)
                ]
            if evicted_blocks and self.on_remove is not None:
                self.on_remove(evicted_blocks)

    def _load_from_host(self, block: int, loaded_blocks: list[int]) -> None:
        del self.host_blocks[block]
        self.reference_count_by_block[block] = 1
        loaded_blocks.append(block)

    def register(self, block_ids: list[int], start_block: int, end_block: int) -> None:
        """Give the private blocks [start, end) their names, as they are computed.

        A name that is resident already is shared.
        """
        new_blocks: list[int] = []
        loaded_blocks: list[int] = []
        for block in block_ids[start_block:end_block]:
            self.unnamed_blocks -= 1
            if block in self.reference_count_by_block:
                self.reference_count_by_block[block] += 1
            elif block in self.host_blocks:
                self._load_from_host(block, loaded_blocks)
            else:
                if block in self.idle_blocks:
                    del self.idle_blocks[block]
                else:
                    new_blocks.append(block)
                self.reference_count_by_block[block] = 1
        if loaded_blocks and self.on_move is not None:
            self.on_move(loaded_blocks, False)
        if new_blocks and self.on_store is not None:
            first_index = block_ids.index(new_blocks[0])
            self.on_store(new_blocks, block_ids[first_index - 1] if first_index else None)

    def release(self, block_ids: list[int], private_blocks: int) -> None:
        """Release the references of a request that ended, deepest first, so that leaves are the older."""
        reference_counts = self.reference_count_by_block
        for block in reversed(block_ids):
            reference_counts[block] -= 1
            if not reference_counts[block]:
                del reference_counts[block]
                self.idle_blocks[block] = None
        self.unnamed_blocks -= private_blocks


@dataclass(slots=True)
class SimSequence:
    """State of a request inside an engine."""

    request: SimRequest
    routed_at_s: float
    prefill_tokens: int = 0
    """Tokens to prefill: the prompt, and tokens generated before a preemption."""
    remaining_tokens: int = 0
    """Tokens to generate after the prefill."""
    computed_tokens: int = 0
    """Computed tokens of the prefill; while the request waits, the cached ones when it came."""
    computed_before_arrival: int = 0
    """Prompt tokens that the engine had computed when the request came, or could have."""
    hit_blocks: int = 0
    registered_blocks: int = 0
    reserved_blocks: int = 0
    blocks_to_load: int = 0
    """Blocks that the next step brings back from host memory."""
    admission_order: int = 0
    """Number of the admission, in order."""
    finish_step: int = 0
    is_prefilled: bool = False
    has_first_token: bool = False
    """Whether the first token was seen."""
    best_alternative_s: float | None = None
    """Least seconds of prefill at a worker with a free slot, where this one had none when the request was sent.

    None where there was a free slot, or none anywhere.
    """

    def __post_init__(self) -> None:
        self.prefill_tokens = self.request.prompt_tokens
        self.remaining_tokens = self.request.output_tokens

    @property
    def queue_key(self) -> float:
        """Key by which waiting prompts are ordered, lowest first."""
        return self.prefill_tokens - self.computed_tokens + AGEING * self.computed_before_arrival


@dataclass(slots=True)
class StepResult:
    """Sequences that a finished step (or stretch of decode steps) brought to a first token or an end."""

    first_token_sequences: list[SimSequence] = field(default_factory=list)
    finished_sequences: list[SimSequence] = field(default_factory=list)


class SimWorker:
    """One simulated engine. The cluster calls `submit`, and `advance` at `wake_s`; both may move `wake_s`."""

    def __init__(
        self, number: int, step_times: StepTimes, cache: SimCache, limits: EngineLimits, block_size: int
    ) -> None:
        self.number = number
        self.step_times = step_times
        self.cache = cache
        self.limits = limits
        self.block_size = block_size
        self.waiting_sequences: deque[SimSequence] = deque()
        self.prefilling_sequences: list[SimSequence] = []
        self.decoding_heap: list[tuple[int, int, SimSequence]] = []
        """Heap of (last step, admission number, sequence)."""
        self.decoding_context_tokens = 0
        self.step_count = 0
        self.wake_s: float | None = None
        self._chunks: list[tuple[SimSequence, int]] = []
        self._decode_run: tuple[float, int] | None = None
        """Start and planned steps of a run of decode-only steps; `decoding_context_tokens` is that of its start."""
        self._admission_count = 0
        self._generated_blocks = 0
        """Blocks that running sequences took since they began, counted in the cache's `unnamed_blocks`."""
        self._generated_tokens = 0
        """Tokens that running sequences have generated since they began."""
        self._last_slot_wait_s = -1.0
        """Time at which a request last had to wait for a slot."""
        self._prefill_capacity_used = 0
        """Prompt tokens that steps have computed, or could have computed while a request waited for a slot."""
        self._unused_prefill_tokens = 0
        """Prompt tokens that each step of the decode run could have computed for requests that wait for a slot."""
        self.prefilled_tokens = 0
        self.slot_wait_count = 0
        self.avoidable_slot_wait_count = 0
        self.preemption_count = 0

    @property
    def running_sequence_count(self) -> int:
        return len(self.prefilling_sequences) + len(self.decoding_heap)

    @property
    def occupied_slot_count(self) -> int:
        """Slots that are taken, or will be by waiting requests."""
        return self.running_sequence_count + len(self.waiting_sequences)

    def compute_missing_prefill_s(self, sequence: SimSequence) -> float:
        """Return the seconds to prefill what neither the cache nor another request here brings."""
        block_ids, max_blocks = sequence.request.block_ids, (sequence.request.prompt_tokens - 1) // self.block_size
        matching_blocks = self.cache.count_cached_prefix(block_ids, max_blocks)
        for other_sequence in itertools.chain(self.prefilling_sequences, self.waiting_sequences):
            other_block_ids = other_sequence.request.block_ids
            comparable_blocks = min(len(other_block_ids), max_blocks)
            while (
                matching_blocks < comparable_blocks and other_block_ids[matching_blocks] == block_ids[matching_blocks]
            ):  # an id names all before it
                matching_blocks += 1
        return self.step_times.compute_prefill_s(
            sequence.request.prompt_tokens - matching_blocks * self.block_size, matching_blocks * self.block_size
        )

    def submit(self, sequence: SimSequence, now: float) -> None:
        """Enqueue a request that arrives."""
        sequence.computed_before_arrival = self._prefill_capacity_used
        if self._decode_run is not None and self._unused_prefill_tokens:
            sequence.computed_before_arrival += self._unused_prefill_tokens * self._count_started_steps(now)
        self._enqueue(sequence)
        if self.wake_s is None:
            self._start_step(now)
        elif self._decode_run is not None and len(self.waiting_sequences) == 1:
            self._cut_decode_run(now)

    def advance(self, now: float) -> StepResult:
        """End the step that ends at `wake_s`, and begin the next."""
        step_result = StepResult()
        finished_steps = 1
        if self._decode_run is not None:
            finished_steps = self._decode_run[1]
            self._prefill_capacity_used += self._unused_prefill_tokens * finished_steps
            self._decode_run = None
        self.step_count += finished_steps
        self.decoding_context_tokens += len(self.decoding_heap) * finished_steps
        self._generated_tokens += len(self.decoding_heap) * finished_steps
        self._finish_decodes(step_result)
        for sequence, tokens in self._chunks:
            self._finish_chunk(sequence, tokens, step_result)
        if self._chunks:
            self.prefilling_sequences = [
                sequence for sequence in self.prefilling_sequences if not sequence.is_prefilled
            ]
        self._chunks = []
        self._start_step(now)
        return step_result

    def list_generated_tokens(self, now: float) -> list[tuple[SimSequence, int]]:
        """List the decoding sequences with the tokens generated so far."""
        step_count = self.step_count
        if self._decode_run is not None:
            start_s, planned_steps = self._decode_run
            finished_steps = (
                self.step_times.count_started_steps(
                    now - start_s, len(self.decoding_heap), self.decoding_context_tokens
                )
                - 1
            )
            step_count += min(finished_steps, planned_steps)
        return [
            (sequence, sequence.request.output_tokens - max(sequence.finish_step - step_count, 0))
            for _, _, sequence in self.decoding_heap
        ]

    def _enqueue(self, sequence: SimSequence) -> None:
        if not self.limits.shortest_first:
            self.waiting_sequences.append(sequence)
            return
        sequence.computed_tokens = (
            self.cache.count_cached_prefix(
                sequence.request.block_ids, (sequence.request.prompt_tokens - 1) // self.block_size
            )
            * self.block_size
        )
        insort(self.waiting_sequences, sequence, key=lambda sequence: sequence.queue_key)

    # Steps -------------------------------------------------------------------------------------------------------
    def _start_step(self, now: float) -> None:
        step_times = self.step_times
        if self.limits.is_preemptive:
            self._count_generated_blocks()
        token_budget = step_times.step_tokens - len(self.decoding_heap)
        chunks = self._chunks
        prefilling_sequences = self.prefilling_sequences
        if self.limits.shortest_first:
            prefilling_sequences = sorted(prefilling_sequences, key=lambda sequence: sequence.queue_key)
        for sequence in prefilling_sequences:
            if self.limits.shortest_first:
                token_budget = self._admit_waiting(token_budget, now, sequence.queue_key)
            if token_budget <= 0:
                break
            chunk_tokens = min(token_budget, sequence.prefill_tokens - sequence.computed_tokens)
            chunks.append((sequence, chunk_tokens))
            token_budget -= chunk_tokens
        self._admit_waiting(token_budget, now)
        decoding_count = len(self.decoding_heap)
        has_full_batch = bool(self.waiting_sequences) and self.running_sequence_count >= self.limits.max_sequences
        self._unused_prefill_tokens = max(step_times.step_tokens - decoding_count, 0) if has_full_batch else 0
        if chunks:
            self._prefill_capacity_used += max(
                sum(chunk_tokens for _, chunk_tokens in chunks), self._unused_prefill_tokens
            )
            step_s = step_times.compute_decode_s(decoding_count, self.decoding_context_tokens)
            for sequence, chunk_tokens in chunks:
                step_s += step_times.compute_prefill_s(chunk_tokens, sequence.computed_tokens)
                step_s += step_times.load_s_per_token * self.block_size * sequence.blocks_to_load
                sequence.blocks_to_load = 0
                self.prefilled_tokens += chunk_tokens
            self.wake_s = now + step_s
        elif decoding_count:
            planned_steps = self.decoding_heap[0][0] - self.step_count
            if self.limits.is_preemptive and self.cache.capacity is not None:
                planned_steps = min(
                    planned_steps, max(1, self._count_free_blocks() * self.block_size // decoding_count)
                )
            self._decode_run = (now, planned_steps)
            self.wake_s = now + step_times.compute_decode_run_s(
                planned_steps, decoding_count, self.decoding_context_tokens
            )
        else:
            assert not self.waiting_sequences, (
                f"worker {self.number} cannot take a request even when idle: its cache is too small"
            )
            self.wake_s = None

    def _admit_waiting(self, token_budget: int, now: float, max_queue_key: float = math.inf) -> int:
        """Begin waiting requests while there is room and their turn is earlier; return the rest of the budget."""
        while token_budget > 0 and self.waiting_sequences and self.waiting_sequences[0].queue_key < max_queue_key:
            sequence = self.waiting_sequences[0]
            if self.running_sequence_count >= self.limits.max_sequences:
                self._last_slot_wait_s = now
                break
            if not self._admit(sequence):
                break
            self.waiting_sequences.popleft()
            if not sequence.has_first_token and sequence.routed_at_s <= self._last_slot_wait_s:
                self.slot_wait_count += 1
                if sequence.best_alternative_s is not None:
                    prefill_here_s = self.step_times.compute_prefill_s(
                        sequence.prefill_tokens - sequence.computed_tokens, sequence.computed_tokens
                    )
                    self.avoidable_slot_wait_count += (
                        now - sequence.routed_at_s > sequence.best_alternative_s - prefill_here_s
                    )
            self.prefilling_sequences.append(sequence)
            chunk_tokens = min(token_budget, sequence.prefill_tokens - sequence.computed_tokens)
            self._chunks.append((sequence, chunk_tokens))
            token_budget -= chunk_tokens
        return token_budget

    def _cut_decode_run(self, now: float) -> None:
        """Cut a run of decode-only steps: a new request joins at the end of the running step."""
        assert self._decode_run is not None
        start_s, _ = self._decode_run
        started_steps = self._count_started_steps(now)
        self._decode_run = (start_s, started_steps)
        self.wake_s = max(
            now,
            start_s
            + self.step_times.compute_decode_run_s(
                started_steps, len(self.decoding_heap), self.decoding_context_tokens
            ),
        )

    def _count_started_steps(self, now: float) -> int:
        """Count the steps of the decode run that have started."""
        assert self._decode_run is not None
        start_s, planned_steps = self._decode_run
        return min(
            planned_steps,
            self.step_times.count_started_steps(now - start_s, len(self.decoding_heap), self.decoding_context_tokens),
        )

    def _admit(self, sequence: SimSequence) -> bool:
        hit_blocks = self.cache.count_cached_prefix(
            sequence.request.block_ids, (sequence.request.prompt_tokens - 1) // self.block_size
        )
        reserved_tokens = (
            sequence.prefill_tokens
            if self.limits.is_preemptive
            else sequence.prefill_tokens + sequence.remaining_tokens
        )
        needed_blocks = (
            -(-reserved_tokens // self.block_size) + self.limits.is_preemptive
        )  # one ahead, for the first tokens it says
        must_fit = self.cache.is_shared and not self.running_sequence_count
        watermark_blocks = (self.cache.capacity or 0) // 100  # as vLLM's watermark: else what begins is soon preempted
        if (
            self.limits.is_preemptive
            and self.running_sequence_count
            and watermark_blocks
            and self._count_free_blocks() < needed_blocks - hit_blocks + watermark_blocks
        ):
            return False
        if not self.cache.reserve(sequence.request.block_ids, hit_blocks, needed_blocks, force=must_fit):
            return False
        sequence.blocks_to_load = self.cache.last_loaded_blocks
        self._admission_count += 1
        sequence.admission_order = self._admission_count
        sequence.registered_blocks = hit_blocks
        if not sequence.has_first_token:
            sequence.hit_blocks = hit_blocks
        sequence.computed_tokens = hit_blocks * self.block_size
        sequence.reserved_blocks = needed_blocks
        sequence.is_prefilled = False
        return True

    def _finish_chunk(self, sequence: SimSequence, chunk_tokens: int, step_result: StepResult) -> None:
        sequence.computed_tokens += chunk_tokens
        full_blocks = min(sequence.computed_tokens, sequence.request.prompt_tokens) // self.block_size
        if full_blocks > sequence.registered_blocks:
            self.cache.register(sequence.request.block_ids, sequence.registered_blocks, full_blocks)
            sequence.registered_blocks = full_blocks
        if sequence.computed_tokens == sequence.prefill_tokens:
            sequence.is_prefilled = True
            if not sequence.has_first_token:
                sequence.has_first_token = True
                step_result.first_token_sequences.append(sequence)
            if sequence.remaining_tokens <= 1:
                self._finish(sequence, step_result)
                return
            sequence.finish_step = self.step_count + sequence.remaining_tokens - 1
            heapq.heappush(self.decoding_heap, (sequence.finish_step, sequence.admission_order, sequence))
            self.decoding_context_tokens += sequence.prefill_tokens + 1
            self._generated_tokens += 1

    def _finish_decodes(self, step_result: StepResult) -> None:
        while self.decoding_heap and self.decoding_heap[0][0] <= self.step_count:
            sequence = heapq.heappop(self.decoding_heap)[2]
            self._stop_decoding(sequence, sequence.remaining_tokens)
            self._finish(sequence, step_result)

    def _stop_decoding(self, sequence: SimSequence, generated_tokens: int) -> None:
        """Take a sequence with this many generated tokens out of the decoding ones."""
        self.decoding_context_tokens -= sequence.prefill_tokens + generated_tokens
        self._generated_tokens -= generated_tokens
        if self.limits.is_preemptive:
            self._set_generated_blocks(self._generated_tokens // self.block_size)

    def _finish(self, sequence: SimSequence, step_result: StepResult) -> None:
        final_block_ids = sequence.request.final_block_ids
        missing_blocks = len(final_block_ids) - sequence.reserved_blocks
        if missing_blocks > 0:  # of a request whose pages came as it spoke
            self.cache.unnamed_blocks += missing_blocks
            sequence.reserved_blocks += missing_blocks
        self.cache.register(final_block_ids, sequence.registered_blocks, len(final_block_ids))
        self.cache.release(final_block_ids, sequence.reserved_blocks - len(final_block_ids))
        step_result.finished_sequences.append(sequence)

    # Memory that grows -------------------------------------------------------------------------------------------
    def _count_free_blocks(self) -> int:
        """Count the blocks that running sequences can still take."""
        cache = self.cache
        assert cache.capacity is not None
        return cache.capacity - len(cache.reference_count_by_block) - cache.unnamed_blocks

    def _set_generated_blocks(self, block_count: int) -> None:
        self.cache.unnamed_blocks += block_count - self._generated_blocks
        self._generated_blocks = block_count

    def _count_generated_blocks(self) -> None:
        """Count the blocks of generated tokens; preempt the youngest while the next step has none."""
        self._set_generated_blocks(self._generated_tokens // self.block_size)
        if self.cache.capacity is None:
            return
        while len(self.decoding_heap) > 1 and self._count_free_blocks() * self.block_size < len(self.decoding_heap):
            self._preempt(max(self.decoding_heap, key=lambda entry: entry[1])[2])
        self.cache.trim()

    def _preempt(self, sequence: SimSequence) -> None:
        self.preemption_count += 1
        generated_tokens = sequence.remaining_tokens - (sequence.finish_step - self.step_count)
        self.decoding_heap.remove((sequence.finish_step, sequence.admission_order, sequence))
        heapq.heapify(self.decoding_heap)
        self._stop_decoding(sequence, generated_tokens)
        self.cache.release(
            sequence.request.block_ids[: sequence.registered_blocks],
            sequence.reserved_blocks - sequence.registered_blocks,
        )
        sequence.prefill_tokens += generated_tokens
        sequence.remaining_tokens -= generated_tokens
        sequence.computed_tokens = 0
        if self.limits.shortest_first:
            self._enqueue(sequence)
        else:
            self.waiting_sequences.appendleft(sequence)
