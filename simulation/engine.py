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

    Invariant: len(reference_counts) + unnamed_pages + len(idle) <= capacity. `reference_counts` has the referenced
    blocks, `idle` is the LRU order of unreferenced ones, `unnamed_pages` counts reserved pages without a name yet. A
    shared cache may go over it, see `reserve`. `host_capacity` blocks of host memory take what is evicted (`host`); a
    hit there moves back.
    """

    def __init__(self, capacity: int | None, *, is_shared: bool = False, host_capacity: int = 0) -> None:
        self.capacity = capacity
        self.host_capacity = host_capacity
        self.host: OrderedDict[int, None] = OrderedDict()
        self.last_loaded_blocks = 0
        """Blocks that the last `reserve` moved back."""
        self.is_shared = is_shared
        self.reference_counts: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.unnamed_pages = 0
        self.on_store: Callable[[list[int], int | None], None] | None = None
        self.on_remove: Callable[[list[int]], None] | None = None
        self.on_move: Callable[[list[int], bool], None] | None = None
        """Blocks, and whether they go to the host."""

    def is_resident(self, block: int) -> bool:
        """Whether it is resident, whatever is before it."""
        return block in self.reference_counts or block in self.idle or block in self.host

    def match(self, ids: list[int], limit: int) -> int:
        """Blocks of the longest resident prefix, at most `limit`."""
        reference_counts, idle, host = self.reference_counts, self.idle, self.host
        count = 0
        for block in ids:
            if count >= limit or (block not in reference_counts and block not in idle and block not in host):
                break
            count += 1
        return count

    def usage(self) -> float:
        """Share of the pages that running requests hold."""
        return 0.0 if self.capacity is None else (len(self.reference_counts) + self.unnamed_pages) / self.capacity

    def reserve(self, ids: list[int], hits: int, pages: int, *, force: bool = False) -> bool:
        """Take references on the first `hits` blocks and `pages - hits` private pages; False where there is no room.

        `force`: go over the capacity rather than leave a worker idle, where others hold all pages of a shared cache.
        """
        reference_counts, idle = self.reference_counts, self.idle
        new_pages = pages - hits
        if self.capacity is not None:
            newly_referenced = sum(1 for block in ids[:hits] if block not in reference_counts)
            if len(reference_counts) + self.unnamed_pages + newly_referenced + new_pages > self.capacity and not force:
                return False
        loaded_blocks: list[int] = []
        for block in ids[:hits]:
            if block in idle:
                del idle[block]
                reference_counts[block] = 1
            elif block in self.host:
                self._load_from_host(block, loaded_blocks)
            else:
                reference_counts[block] += 1
        self.last_loaded_blocks = len(loaded_blocks)
        if loaded_blocks and self.on_move is not None:
            self.on_move(loaded_blocks, False)
        self.unnamed_pages += new_pages
        self.trim()
        return True

    def trim(self) -> None:
        """Evict what is over the capacity."""
        if self.capacity is None:
            return
        excess = min(len(self.reference_counts) + self.unnamed_pages + len(self.idle) - self.capacity, len(self.idle))
        if excess > 0:
            evicted_blocks = [self.idle.popitem(last=False)[0] for _ in range(excess)]
            if self.host_capacity:
                self.host.update(dict.fromkeys(evicted_blocks))
                if self.on_move is not None:
                    self.on_move(evicted_blocks, True)
                evicted_blocks = [self.host.popitem(last=False)[0] for _ in range(len(self.host) - self.host_capacity)]
            if evicted_blocks and self.on_remove is not None:
                self.on_remove(evicted_blocks)

    def _load_from_host(self, block: int, loaded_blocks: list[int]) -> None:
        del self.host[block]
        self.reference_counts[block] = 1
        loaded_blocks.append(block)

    def register(self, ids: list[int], start: int, end: int) -> None:
        """Private pages of [start, end) are computed: they get their names. A name that is resident already is
        shared."""
        new_blocks: list[int] = []
        loaded_blocks: list[int] = []
        for block in ids[start:end]:
            self.unnamed_pages -= 1
            if block in self.reference_counts:
                self.reference_counts[block] += 1
            elif block in self.host:
                self._load_from_host(block, loaded_blocks)
            else:
                if block in self.idle:
                    del self.idle[block]
                else:
                    new_blocks.append(block)
                self.reference_counts[block] = 1
        if loaded_blocks and self.on_move is not None:
            self.on_move(loaded_blocks, False)
        if new_blocks and self.on_store is not None:
            first = ids.index(new_blocks[0])
            self.on_store(new_blocks, ids[first - 1] if first else None)

    def release(self, ids: list[int], private: int) -> None:
        """A request ended: its references go, deepest first, so that leaves are the older."""
        reference_counts = self.reference_counts
        for block in reversed(ids):
            reference_counts[block] -= 1
            if not reference_counts[block]:
                del reference_counts[block]
                self.idle[block] = None
        self.unnamed_pages -= private


@dataclass(slots=True)
class SimSequence:
    """A request inside an engine."""

    request: SimRequest
    routed_s: float
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
    pages: int = 0
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

    first_tokens: list[SimSequence] = field(default_factory=list)
    finished: list[SimSequence] = field(default_factory=list)


class SimWorker:
    """One engine. The cluster calls `submit`, and `advance` at `wake_s`; both may move `wake_s`."""

    def __init__(self, number: int, step_times: StepTimes, cache: SimCache, limits: EngineLimits, block: int) -> None:
        self.number = number
        self.step_times = step_times
        self.cache = cache
        self.limits = limits
        self.block = block
        self.waiting: deque[SimSequence] = deque()
        self.prefilling: list[SimSequence] = []
        self.decoding: list[tuple[int, int, SimSequence]] = []
        """Heap of (step at whose end it finishes, tie, job)."""
        self.decoding_context_tokens = 0
        self.steps = 0
        self.wake_s: float | None = None
        self._chunks: list[tuple[SimSequence, int]] = []
        self._decode_run: tuple[float, int] | None = None
        """(start time, steps planned) of a run of decode-only steps; `decode_context` is that of its start."""
        self._admissions = 0
        self._generated_pages = 0
        """Pages that running sequences took since they began, counted in the `unnamed_pages` of the cache."""
        self._generated_tokens = 0
        """Tokens that running sequences have said since they began."""
        self._last_seat_wait_s = -1.0
        """When a request last had to wait for a seat."""
        self._prefill_capacity_used = 0
        """What steps have computed of prompts, or could have where somebody waited for a seat."""
        self._unused_prefill_tokens = 0
        """What each step of the stretch could have computed for those who wait for a seat."""
        self.prefilled_tokens = 0
        self.seat_waits = 0
        self.avoidable_seat_waits = 0
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def occupied_seats(self) -> int:
        """Seats that are taken, or will be by who waits."""
        return self.running + len(self.waiting)

    def missing_prefill_s(self, job: SimSequence) -> float:
        """What of the prompt neither the cache has nor a request that is here already brings, in seconds."""
        ids, limit = job.request.ids, (job.request.prompt_tokens - 1) // self.block
        matching_blocks = self.cache.match(ids, limit)
        for other in itertools.chain(self.prefilling, self.waiting):
            other_ids = other.request.ids
            comparable_blocks = min(len(other_ids), limit)
            while (
                matching_blocks < comparable_blocks and other_ids[matching_blocks] == ids[matching_blocks]
            ):  # an id names all before it
                matching_blocks += 1
        return self.step_times.prefill_s(
            job.request.prompt_tokens - matching_blocks * self.block, matching_blocks * self.block
        )

    def submit(self, job: SimSequence, now: float) -> None:
        """A request arrives."""
        job.computed_before_arrival = self._prefill_capacity_used
        if self._decode_run is not None and self._unused_prefill_tokens:
            job.computed_before_arrival += self._unused_prefill_tokens * self._steps_begun(now)
        self._enqueue(job)
        if self.wake_s is None:
            self._start_step(now)
        elif self._decode_run is not None and len(self.waiting) == 1:
            self._cut_decode_run(now)

    def advance(self, now: float) -> StepResult:
        """`wake_s` has come: end the step, begin the next."""
        end = StepResult()
        steps = 1
        if self._decode_run is not None:
            steps = self._decode_run[1]
            self._prefill_capacity_used += self._unused_prefill_tokens * steps
            self._decode_run = None
        self.steps += steps
        self.decoding_context_tokens += len(self.decoding) * steps
        self._generated_tokens += len(self.decoding) * steps
        self._finish_decodes(end)
        for job, tokens in self._chunks:
            self._finish_chunk(job, tokens, end)
        if self._chunks:
            self.prefilling = [job for job in self.prefilling if not job.is_prefilled]
        self._chunks = []
        self._start_step(now)
        return end

    def progress(self, now: float) -> list[tuple[SimSequence, int]]:
        """What every decoding request has said so far."""
        steps = self.steps
        if self._decode_run is not None:
            start, planned = self._decode_run
            finished_steps = self.step_times.steps_in(now - start, len(self.decoding), self.decoding_context_tokens) - 1
            steps += min(finished_steps, planned)
        return [(job, job.request.output_tokens - max(job.finish_step - steps, 0)) for _, _, job in self.decoding]

    def _enqueue(self, job: SimSequence) -> None:
        if not self.limits.shortest_first:
            self.waiting.append(job)
            return
        job.computed_tokens = (
            self.cache.match(job.request.ids, (job.request.prompt_tokens - 1) // self.block) * self.block
        )
        insort(self.waiting, job, key=lambda sequence: sequence.queue_key)

    # Steps -------------------------------------------------------------------------------------------------------
    def _start_step(self, now: float) -> None:
        step_times = self.step_times
        if self.limits.is_preemptive:
            self._account_generated()
        budget = step_times.step_tokens - len(self.decoding)
        chunks = self._chunks
        prefilling = self.prefilling
        if self.limits.shortest_first:
            prefilling = sorted(prefilling, key=lambda job: job.queue_key)
        for job in prefilling:
            if self.limits.shortest_first:
                budget = self._admit_waiting(budget, now, job.queue_key)
            if budget <= 0:
                break
            tokens = min(budget, job.prefill_tokens - job.computed_tokens)
            chunks.append((job, tokens))
            budget -= tokens
        self._admit_waiting(budget, now)
        decoding_count = len(self.decoding)
        has_full_batch = bool(self.waiting) and self.running >= self.limits.max_sequences
        self._unused_prefill_tokens = max(step_times.step_tokens - decoding_count, 0) if has_full_batch else 0
        if chunks:
            self._prefill_capacity_used += max(sum(tokens for _, tokens in chunks), self._unused_prefill_tokens)
            seconds = step_times.decode_s(decoding_count, self.decoding_context_tokens)
            for job, tokens in chunks:
                seconds += step_times.prefill_s(tokens, job.computed_tokens)
                seconds += step_times.load_s_per_token * self.block * job.blocks_to_load
                job.blocks_to_load = 0
                self.prefilled_tokens += tokens
            self.wake_s = now + seconds
        elif decoding_count:
            steps = self.decoding[0][0] - self.steps
            if self.limits.is_preemptive and self.cache.capacity is not None:
                steps = min(steps, max(1, self._free_pages() * self.block // decoding_count))
            self._decode_run = (now, steps)
            self.wake_s = now + step_times.decode_run_s(steps, decoding_count, self.decoding_context_tokens)
        else:
            assert not self.waiting, (
                f"worker {self.number} cannot take a request even when idle: its cache is too small"
            )
            self.wake_s = None

    def _admit_waiting(self, budget: int, now: float, before: float = math.inf) -> int:
        """Begin those who wait, while there is room and their turn is earlier; what is left of the budget."""
        while budget > 0 and self.waiting and self.waiting[0].queue_key < before:
            job = self.waiting[0]
            if self.running >= self.limits.max_sequences:
                self._last_seat_wait_s = now
                break
            if not self._admit(job):
                break
            self.waiting.popleft()
            if not job.has_first_token and job.routed_s <= self._last_seat_wait_s:
                self.seat_waits += 1
                if job.best_alternative_s is not None:
                    here_s = self.step_times.prefill_s(job.prefill_tokens - job.computed_tokens, job.computed_tokens)
                    self.avoidable_seat_waits += now - job.routed_s > job.best_alternative_s - here_s
            self.prefilling.append(job)
            tokens = min(budget, job.prefill_tokens - job.computed_tokens)
            self._chunks.append((job, tokens))
            budget -= tokens
        return budget

    def _cut_decode_run(self, now: float) -> None:
        """A request arrived during decode-only steps: it joins at the end of the step that is running."""
        assert self._decode_run is not None
        start, _ = self._decode_run
        started_steps = self._steps_begun(now)
        self._decode_run = (start, started_steps)
        self.wake_s = max(
            now, start + self.step_times.decode_run_s(started_steps, len(self.decoding), self.decoding_context_tokens)
        )

    def _steps_begun(self, now: float) -> int:
        """Of the stretch."""
        assert self._decode_run is not None
        start, planned = self._decode_run
        return min(planned, self.step_times.steps_in(now - start, len(self.decoding), self.decoding_context_tokens))

    def _admit(self, job: SimSequence) -> bool:
        hits = self.cache.match(job.request.ids, (job.request.prompt_tokens - 1) // self.block)
        tokens = job.prefill_tokens if self.limits.is_preemptive else job.prefill_tokens + job.remaining_tokens
        pages = -(-tokens // self.block) + self.limits.is_preemptive  # one ahead, for the first tokens it says
        must_fit = self.cache.is_shared and not self.running
        watermark = (self.cache.capacity or 0) // 100  # as vLLM's watermark: else what begins is soon preempted
        if self.limits.is_preemptive and self.running and watermark and self._free_pages() < pages - hits + watermark:
            return False
        if not self.cache.reserve(job.request.ids, hits, pages, force=must_fit):
            return False
        job.blocks_to_load = self.cache.last_loaded_blocks
        self._admissions += 1
        job.admission_order = self._admissions
        job.registered_blocks = hits
        if not job.has_first_token:
            job.hit_blocks = hits
        job.computed_tokens = hits * self.block
        job.pages = pages
        job.is_prefilled = False
        return True

    def _finish_chunk(self, job: SimSequence, tokens: int, end: StepResult) -> None:
        job.computed_tokens += tokens
        full = min(job.computed_tokens, job.request.prompt_tokens) // self.block
        if full > job.registered_blocks:
            self.cache.register(job.request.ids, job.registered_blocks, full)
            job.registered_blocks = full
        if job.computed_tokens == job.prefill_tokens:
            job.is_prefilled = True
            if not job.has_first_token:
                job.has_first_token = True
                end.first_tokens.append(job)
            if job.remaining_tokens <= 1:
                self._finish(job, end)
                return
            job.finish_step = self.steps + job.remaining_tokens - 1
            heapq.heappush(self.decoding, (job.finish_step, job.admission_order, job))
            self.decoding_context_tokens += job.prefill_tokens + 1
            self._generated_tokens += 1

    def _finish_decodes(self, end: StepResult) -> None:
        while self.decoding and self.decoding[0][0] <= self.steps:
            job = heapq.heappop(self.decoding)[2]
            self._stop_decoding(job, job.remaining_tokens)
            self._finish(job, end)

    def _stop_decoding(self, job: SimSequence, generated_tokens: int) -> None:
        """A sequence that has said so many tokens since it began decodes no longer."""
        self.decoding_context_tokens -= job.prefill_tokens + generated_tokens
        self._generated_tokens -= generated_tokens
        if self.limits.is_preemptive:
            self._set_generated_pages(self._generated_tokens // self.block)

    def _finish(self, job: SimSequence, end: StepResult) -> None:
        final = job.request.final_ids
        missing_pages = len(final) - job.pages
        if missing_pages > 0:  # of a request whose pages came as it spoke
            self.cache.unnamed_pages += missing_pages
            job.pages += missing_pages
        self.cache.register(final, job.registered_blocks, len(final))
        self.cache.release(final, job.pages - len(final))
        end.finished.append(job)

    # Memory that grows -------------------------------------------------------------------------------------------
    def _free_pages(self) -> int:
        """Pages that running sequences can still take."""
        cache = self.cache
        assert cache.capacity is not None
        return cache.capacity - len(cache.reference_counts) - cache.unnamed_pages

    def _set_generated_pages(self, pages: int) -> None:
        self.cache.unnamed_pages += pages - self._generated_pages
        self._generated_pages = pages

    def _account_generated(self) -> None:
        """Count the pages of what was said; preempt the youngest while the next step has none."""
        self._set_generated_pages(self._generated_tokens // self.block)
        if self.cache.capacity is None:
            return
        while len(self.decoding) > 1 and self._free_pages() * self.block < len(self.decoding):
            self._preempt(max(self.decoding, key=lambda entry: entry[1])[2])
        self.cache.trim()

    def _preempt(self, job: SimSequence) -> None:
        self.preemptions += 1
        generated_tokens = job.remaining_tokens - (job.finish_step - self.steps)
        self.decoding.remove((job.finish_step, job.admission_order, job))
        heapq.heapify(self.decoding)
        self._stop_decoding(job, generated_tokens)
        self.cache.release(job.request.ids[: job.registered_blocks], job.pages - job.registered_blocks)
        job.prefill_tokens += generated_tokens
        job.remaining_tokens -= generated_tokens
        job.computed_tokens = 0
        if self.limits.shortest_first:
            self._enqueue(job)
        else:
            self.waiting.appendleft(job)
