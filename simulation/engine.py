"""The simulated engine: a step loop (simulation/steps.py says what a step takes) and a block cache with leaf-first LRU.

Chunks are filled up to the step's token budget, decoding requests take one token of it each: first come first served,
or of who has the least left first, as our engine does. There what came later counts a tenth of what was
computed meanwhile more, or could have been where somebody waited for a seat: once ten times the length of a prompt was,
nobody who comes goes before it.
Pages are reserved for prompt and output when a request begins, or taken as tokens come; then the youngest sequence is
preempted where there are none left: it gives up its pages and begins again, with what it had said as prompt. Stretches
without prefill are jumped over in closed form, so the cost of a run grows with requests, not with tokens.
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
"""Of a prompt token computed before a request came, in what it has left; the engine's figure."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine has besides time."""

    max_sequences: int = 256
    """Sequences that run at once (`max_num_seqs`)."""
    is_preemptive: bool = False
    """Pages are taken as tokens come and the youngest sequence is preempted where there are none; else the pages of the
    whole request are reserved when it begins."""
    shortest_first: bool = False
    """Of the prompts, who has the least left goes first, whether it has begun or not; else who came first."""


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
        """Blocks that the last `reserve` moved back."""
        self.is_shared = is_shared
        self.reference_count_by_block: dict[int, int] = {}
        self.idle_blocks: OrderedDict[int, None] = OrderedDict()
        self.unnamed_blocks = 0
        self.on_store: Callable[[list[int], int | None], None] | None = None
        self.on_remove: Callable[[list[int]], None] | None = None
        self.on_move: Callable[[list[int], bool], None] | None = None
        """Blocks, and whether they go to the host."""

    def is_resident(self, block: int) -> bool:
        """Whether it is resident, whatever is before it."""
        return block in self.reference_count_by_block or block in self.idle_blocks or block in self.host_blocks

    def count_cached_prefix(self, block_ids: list[int], max_blocks: int) -> int:
        """Blocks of the longest resident prefix, at most `max_blocks`."""
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
        """Share of the pages that running requests hold."""
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
        """Evict what is over the capacity."""
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
        """Private pages of [start, end) are computed: they get their names. A name that is resident already is
        shared."""
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
        """A request ended: its references go, deepest first, so that leaves are the older."""
        reference_counts = self.reference_count_by_block
        for block in reversed(block_ids):
            reference_counts[block] -= 1
            if not reference_counts[block]:
                del reference_counts[block]
                self.idle_blocks[block] = None
        self.unnamed_blocks -= private_blocks


@dataclass(slots=True)
class SimSequence:
    """A request inside an engine."""

    request: SimRequest
    routed_at_s: float
    prefill_tokens: int = 0
    """Tokens to prefill: the prompt, and what was generated before a preemption."""
    remaining_tokens: int = 0
    """Tokens to generate after them."""
    computed_tokens: int = 0
    """Of `length`; while it waits, what the cache had of it when it came."""
    computed_before_arrival: int = 0
    """Prompt tokens that the engine had computed by then, or could have."""
    hit_blocks: int = 0
    registered_blocks: int = 0
    reserved_blocks: int = 0
    blocks_to_load: int = 0
    """Blocks that its next step brings back from host memory."""
    admission_order: int = 0
    """Order of admission."""
    finish_step: int = 0
    is_prefilled: bool = False
    has_first_token: bool = False
    """Its first token was seen."""
    best_alternative_s: float | None = None
    """Where no seat was free when it was sent: the least that a worker which had one would have had to compute for it;
    None where there was a seat, or none anywhere."""

    def __post_init__(self) -> None:
        self.prefill_tokens = self.request.prompt_tokens
        self.remaining_tokens = self.request.output_tokens

    @property
    def queue_key(self) -> float:
        """The lowest goes first, where that is the order."""
        return self.prefill_tokens - self.computed_tokens + AGEING * self.computed_before_arrival


@dataclass(slots=True)
class StepResult:
    """What a finished step (or stretch of decode steps) produced."""

    first_token_sequences: list[SimSequence] = field(default_factory=list)
    finished_sequences: list[SimSequence] = field(default_factory=list)


class SimWorker:
    """One engine. The cluster calls `submit`, and `advance` at `wake_s`; both may move `wake_s`."""

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
        """Heap of (step at whose end it finishes, tie, sequence)."""
        self.decoding_context_tokens = 0
        self.step_count = 0
        self.wake_s: float | None = None
        self._chunks: list[tuple[SimSequence, int]] = []
        self._decode_run: tuple[float, int] | None = None
        """(start time, steps planned) of a run of decode-only steps; `decode_context` is that of its start."""
        self._admission_count = 0
        self._generated_blocks = 0
        """Pages that running sequences took since they began, counted in the `unnamed_blocks` of the cache."""
        self._generated_tokens = 0
        """Tokens that running sequences have said since they began."""
        self._last_slot_wait_s = -1.0
        """When a request last had to wait for a seat."""
        self._prefill_capacity_used = 0
        """What steps have computed of prompts, or could have where somebody waited for a seat."""
        self._unused_prefill_tokens = 0
        """What each step of the stretch could have computed for those who wait for a seat."""
        self.prefilled_tokens = 0
        self.slot_wait_count = 0
        self.avoidable_slot_wait_count = 0
        self.preemption_count = 0

    @property
    def running_sequence_count(self) -> int:
        return len(self.prefilling_sequences) + len(self.decoding_heap)

    @property
    def occupied_slot_count(self) -> int:
        """Seats that are taken, or will be by who waits."""
        return self.running_sequence_count + len(self.waiting_sequences)

    def compute_missing_prefill_s(self, sequence: SimSequence) -> float:
        """What of the prompt neither the cache has nor a request that is here already brings, in seconds."""
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
        """A request arrives."""
        sequence.computed_before_arrival = self._prefill_capacity_used
        if self._decode_run is not None and self._unused_prefill_tokens:
            sequence.computed_before_arrival += self._unused_prefill_tokens * self._count_started_steps(now)
        self._enqueue(sequence)
        if self.wake_s is None:
            self._start_step(now)
        elif self._decode_run is not None and len(self.waiting_sequences) == 1:
            self._cut_decode_run(now)

    def advance(self, now: float) -> StepResult:
        """`wake_s` has come: end the step, begin the next."""
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
        """What every decoding request has said so far."""
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
        """Begin those who wait, while there is room and their turn is earlier; what is left of the budget."""
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
        """A request arrived during decode-only steps: it joins at the end of the step that is running."""
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
        """Of the stretch."""
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
        tokens = (
            sequence.prefill_tokens
            if self.limits.is_preemptive
            else sequence.prefill_tokens + sequence.remaining_tokens
        )
        needed_blocks = (
            -(-tokens // self.block_size) + self.limits.is_preemptive
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
        """A sequence that has said so many tokens since it began decodes no longer."""
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
        """Pages that running sequences can still take."""
        cache = self.cache
        assert cache.capacity is not None
        return cache.capacity - len(cache.reference_count_by_block) - cache.unnamed_blocks

    def _set_generated_blocks(self, block_count: int) -> None:
        self.cache.unnamed_blocks += block_count - self._generated_blocks
        self._generated_blocks = block_count

    def _count_generated_blocks(self) -> None:
        """Count the pages of what was said; preempt the youngest while the next step has none."""
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
