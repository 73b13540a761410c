"""The simulated engine: a step loop (simulation/steps.py says what a step takes) and a block cache with leaf-first LRU.

Chunks are filled up to the step's token budget, decoding requests take one token of it each: first come first served,
or of who has the least left first, as our engine does. There what came later counts a tenth of what was
computed meanwhile more, or could have been where somebody waited for a seat: once ten times a prompt's length was,
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

    seats: int = 256
    """Sequences that run at once (`max_num_seqs`)."""
    preempts: bool = False
    """Pages are taken as tokens come and the youngest sequence is preempted where there are none; else the pages of the
    whole request are reserved when it begins."""
    shortest: bool = False
    """Of the prompts, who has the least left goes first, whether it has begun or not; else who came first."""


class Cache:
    """Blocks of one worker, or of several where a bound shares them. `capacity` in blocks; None is infinite.

    Invariant: len(used) + private + len(idle) <= capacity, where `used` maps referenced blocks to their count, `idle`
    is the LRU order of unreferenced ones and `private` counts reserved pages without a name yet. A shared cache may go
    over it, see `reserve`. `below` blocks of host memory take what is evicted (`host`); a hit there moves back.
    """

    def __init__(self, capacity: int | None, *, shared: bool = False, below: int = 0) -> None:
        self.capacity = capacity
        self.below = below
        self.host: OrderedDict[int, None] = OrderedDict()
        self.loaded = 0
        """Blocks that the last `reserve` moved back."""
        self.shared = shared
        self.used: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.private = 0
        self.on_store: Callable[[list[int], int | None], None] | None = None
        self.on_remove: Callable[[list[int]], None] | None = None
        self.on_move: Callable[[list[int], bool], None] | None = None
        """Blocks, and whether they go to the host."""

    def has(self, block: int) -> bool:
        """Whether it is resident, whatever is before it."""
        return block in self.used or block in self.idle or block in self.host

    def match(self, ids: list[int], limit: int) -> int:
        """Blocks of the longest resident prefix, at most `limit`."""
        used, idle, host = self.used, self.idle, self.host
        count = 0
        for block in ids:
            if count >= limit or (block not in used and block not in idle and block not in host):
                break
            count += 1
        return count

    def usage(self) -> float:
        """Share of the pages that running requests hold."""
        return 0.0 if self.capacity is None else (len(self.used) + self.private) / self.capacity

    def reserve(self, ids: list[int], hits: int, pages: int, *, force: bool = False) -> bool:
        """Take references on the first `hits` blocks and `pages - hits` private pages; False where there is no room.

        `force`: go over the capacity rather than leave a worker idle, where others hold all pages of a shared cache.
        """
        used, idle = self.used, self.idle
        fresh = pages - hits
        if self.capacity is not None:
            woken = sum(1 for block in ids[:hits] if block not in used)
            if len(used) + self.private + woken + fresh > self.capacity and not force:
                return False
        loaded: list[int] = []
        for block in ids[:hits]:
            if block in idle:
                del idle[block]
                used[block] = 1
            elif block in self.host:
                self._take(block, loaded)
            else:
                used[block] += 1
        self.loaded = len(loaded)
        if loaded and self.on_move is not None:
            self.on_move(loaded, False)
        self.private += fresh
        self.trim()
        return True

    def trim(self) -> None:
        """Evict what is over the capacity."""
        if self.capacity is None:
            return
        excess = min(len(self.used) + self.private + len(self.idle) - self.capacity, len(self.idle))
        if excess > 0:
            gone = [self.idle.popitem(last=False)[0] for _ in range(excess)]
            if self.below:
                self.host.update(dict.fromkeys(gone))
                if self.on_move is not None:
                    self.on_move(gone, True)
                gone = [self.host.popitem(last=False)[0] for _ in range(len(self.host) - self.below)]
            if gone and self.on_remove is not None:
                self.on_remove(gone)

    def _take(self, block: int, loaded: list[int]) -> None:
        del self.host[block]
        self.used[block] = 1
        loaded.append(block)

    def register(self, ids: list[int], start: int, end: int) -> None:
        """Private pages of [start, end) are computed: they get their names. A name that is resident already is
        shared."""
        new: list[int] = []
        again: list[int] = []
        for block in ids[start:end]:
            self.private -= 1
            if block in self.used:
                self.used[block] += 1
            elif block in self.host:
                self._take(block, again)
            else:
                if block in self.idle:
                    del self.idle[block]
                else:
                    new.append(block)
                self.used[block] = 1
        if again and self.on_move is not None:
            self.on_move(again, False)
        if new and self.on_store is not None:
            first = ids.index(new[0])
            self.on_store(new, ids[first - 1] if first else None)

    def release(self, ids: list[int], private: int) -> None:
        """A request ended: its references go, deepest first, so that leaves are the older."""
        used = self.used
        for block in reversed(ids):
            used[block] -= 1
            if not used[block]:
                del used[block]
                self.idle[block] = None
        self.private -= private


@dataclass(slots=True)
class Job:
    """A request inside an engine."""

    request: SimRequest
    routed_s: float
    length: int = 0
    """Tokens to prefill: the prompt, and what was generated before a preemption."""
    left: int = 0
    """Tokens to generate after them."""
    computed: int = 0
    """Of `length`; while it waits, what the cache had of it when it came."""
    came: int = 0
    """Prompt tokens that the engine had computed by then, or could have."""
    hit_blocks: int = 0
    named: int = 0
    pages: int = 0
    loaded: int = 0
    """Blocks that its next step brings back from host memory."""
    began: int = 0
    """Order of admission."""
    finish_step: int = 0
    prefill_done: bool = False
    answered: bool = False
    """Its first token was seen."""
    elsewhere_s: float | None = None
    """Where no seat was free when it was sent: the least that a worker which had one would have had to compute for it;
    None where there was a seat, or none anywhere."""

    def __post_init__(self) -> None:
        self.length = self.request.prompt_tokens
        self.left = self.request.output_tokens

    @property
    def turn(self) -> float:
        """The lowest goes first, where that is the order."""
        return self.length - self.computed + AGEING * self.came


@dataclass(slots=True)
class StepEnd:
    """What a finished step (or stretch of decode steps) produced."""

    first_tokens: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)


class SimWorker:
    """One engine. The cluster calls `submit`, and `advance` at `wake_s`; both may move `wake_s`."""

    def __init__(self, number: int, service: StepTimes, cache: Cache, limits: EngineLimits, block: int) -> None:
        self.number = number
        self.service = service
        self.cache = cache
        self.limits = limits
        self.block = block
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.decode: list[tuple[int, int, Job]] = []
        """Heap of (step at whose end it finishes, tie, job)."""
        self.decode_context = 0
        self.steps = 0
        self.wake_s: float | None = None
        self._chunks: list[tuple[Job, int]] = []
        self._stretch: tuple[float, int] | None = None
        """(start time, steps planned) of a run of decode-only steps; `decode_context` is that of its start."""
        self._begun = 0
        self._grown = 0
        """Pages that running sequences took since they began, counted in the cache's `private`."""
        self._said = 0
        """Tokens that running sequences have said since they began."""
        self._full_s = -1.0
        """When a request last had to wait for a seat."""
        self._passed_tokens = 0
        """What steps have computed of prompts, or could have where somebody waited for a seat."""
        self._missed = 0
        """What each step of the stretch could have computed for those who wait for a seat."""
        self.prefilled_tokens = 0
        self.seat_waits = 0
        self.seat_waits_vain = 0
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decode)

    @property
    def taken(self) -> int:
        """Seats that are taken, or will be by who waits."""
        return self.running + len(self.waiting)

    def lacking_s(self, job: Job) -> float:
        """What of the prompt neither the cache has nor a request that is here already brings, in seconds."""
        ids, limit = job.request.ids, (job.request.prompt_tokens - 1) // self.block
        found = self.cache.match(ids, limit)
        for other in itertools.chain(self.prefilling, self.waiting):
            theirs = other.request.ids
            most = min(len(theirs), limit)
            while found < most and theirs[found] == ids[found]:  # an id names all before it
                found += 1
        return self.service.prefill_s(job.request.prompt_tokens - found * self.block, found * self.block)

    def submit(self, job: Job, now: float) -> None:
        """A request arrives."""
        job.came = self._passed_tokens
        if self._stretch is not None and self._missed:
            job.came += self._missed * self._steps_begun(now)
        self._wait(job)
        if self.wake_s is None:
            self._start(now)
        elif self._stretch is not None and len(self.waiting) == 1:
            self._cut_stretch(now)

    def advance(self, now: float) -> StepEnd:
        """`wake_s` has come: end the step, begin the next."""
        end = StepEnd()
        steps = 1
        if self._stretch is not None:
            steps = self._stretch[1]
            self._passed_tokens += self._missed * steps
            self._stretch = None
        self.steps += steps
        self.decode_context += len(self.decode) * steps
        self._said += len(self.decode) * steps
        self._finish_decodes(end)
        for job, tokens in self._chunks:
            self._chunk_done(job, tokens, end)
        if self._chunks:
            self.prefilling = [job for job in self.prefilling if not job.prefill_done]
        self._chunks = []
        self._start(now)
        return end

    def progress(self, now: float) -> list[tuple[Job, int]]:
        """What every decoding request has said so far."""
        steps = self.steps
        if self._stretch is not None:
            start, planned = self._stretch
            done = self.service.steps_in(now - start, len(self.decode), self.decode_context) - 1
            steps += min(done, planned)
        return [(job, job.request.output_tokens - max(job.finish_step - steps, 0)) for _, _, job in self.decode]

    def _wait(self, job: Job) -> None:
        if not self.limits.shortest:
            self.waiting.append(job)
            return
        job.computed = self.cache.match(job.request.ids, (job.request.prompt_tokens - 1) // self.block) * self.block
        insort(self.waiting, job, key=lambda one: one.turn)

    # Steps -------------------------------------------------------------------------------------------------------
    def _start(self, now: float) -> None:
        service = self.service
        if self.limits.preempts:
            self._grow()
        budget = service.step_tokens - len(self.decode)
        chunks = self._chunks
        started = self.prefilling
        if self.limits.shortest:
            started = sorted(started, key=lambda job: job.turn)
        for job in started:
            if self.limits.shortest:
                budget = self._take_in(budget, now, job.turn)
            if budget <= 0:
                break
            tokens = min(budget, job.length - job.computed)
            chunks.append((job, tokens))
            budget -= tokens
        self._take_in(budget, now)
        n = len(self.decode)
        full = bool(self.waiting) and self.running >= self.limits.seats
        self._missed = max(service.step_tokens - n, 0) if full else 0
        if chunks:
            self._passed_tokens += max(sum(tokens for _, tokens in chunks), self._missed)
            seconds = service.decode_s(n, self.decode_context)
            for job, tokens in chunks:
                seconds += service.prefill_s(tokens, job.computed)
                seconds += service.load_s_per_token * self.block * job.loaded
                job.loaded = 0
                self.prefilled_tokens += tokens
            self.wake_s = now + seconds
        elif n:
            steps = self.decode[0][0] - self.steps
            if self.limits.preempts and self.cache.capacity is not None:
                steps = min(steps, max(1, self._room() * self.block // n))
            self._stretch = (now, steps)
            self.wake_s = now + service.stretch_s(steps, n, self.decode_context)
        else:
            assert not self.waiting, (
                f"worker {self.number} cannot take a request even when idle: its cache is too small"
            )
            self.wake_s = None

    def _take_in(self, budget: int, now: float, before: float = math.inf) -> int:
        """Begin those who wait, while there is room and their turn is earlier; what is left of the budget."""
        while budget > 0 and self.waiting and self.waiting[0].turn < before:
            job = self.waiting[0]
            if self.running >= self.limits.seats:
                self._full_s = now
                break
            if not self._admit(job):
                break
            self.waiting.popleft()
            if not job.answered and job.routed_s <= self._full_s:
                self.seat_waits += 1
                if job.elsewhere_s is not None:
                    here_s = self.service.prefill_s(job.length - job.computed, job.computed)
                    self.seat_waits_vain += now - job.routed_s > job.elsewhere_s - here_s
            self.prefilling.append(job)
            tokens = min(budget, job.length - job.computed)
            self._chunks.append((job, tokens))
            budget -= tokens
        return budget

    def _cut_stretch(self, now: float) -> None:
        """A request arrived during decode-only steps: it joins at the end of the step that is running."""
        assert self._stretch is not None
        start, _ = self._stretch
        done = self._steps_begun(now)
        self._stretch = (start, done)
        self.wake_s = max(now, start + self.service.stretch_s(done, len(self.decode), self.decode_context))

    def _steps_begun(self, now: float) -> int:
        """Of the stretch."""
        assert self._stretch is not None
        start, planned = self._stretch
        return min(planned, self.service.steps_in(now - start, len(self.decode), self.decode_context))

    def _admit(self, job: Job) -> bool:
        hits = self.cache.match(job.request.ids, (job.request.prompt_tokens - 1) // self.block)
        tokens = job.length if self.limits.preempts else job.length + job.left
        pages = -(-tokens // self.block) + self.limits.preempts  # one ahead, for the first tokens it says
        alone = self.cache.shared and not self.running
        spare = (self.cache.capacity or 0) // 100  # as vLLM's watermark: else what begins is soon preempted
        if self.limits.preempts and self.running and spare and self._room() < pages - hits + spare:
            return False
        if not self.cache.reserve(job.request.ids, hits, pages, force=alone):
            return False
        job.loaded = self.cache.loaded
        self._begun += 1
        job.began = self._begun
        job.named = hits
        if not job.answered:
            job.hit_blocks = hits
        job.computed = hits * self.block
        job.pages = pages
        job.prefill_done = False
        return True

    def _chunk_done(self, job: Job, tokens: int, end: StepEnd) -> None:
        job.computed += tokens
        full = min(job.computed, job.request.prompt_tokens) // self.block
        if full > job.named:
            self.cache.register(job.request.ids, job.named, full)
            job.named = full
        if job.computed == job.length:
            job.prefill_done = True
            if not job.answered:
                job.answered = True
                end.first_tokens.append(job)
            if job.left <= 1:
                self._finish(job, end)
                return
            job.finish_step = self.steps + job.left - 1
            heapq.heappush(self.decode, (job.finish_step, job.began, job))
            self.decode_context += job.length + 1
            self._said += 1

    def _finish_decodes(self, end: StepEnd) -> None:
        while self.decode and self.decode[0][0] <= self.steps:
            job = heapq.heappop(self.decode)[2]
            self._leave(job, job.left)
            self._finish(job, end)

    def _leave(self, job: Job, said: int) -> None:
        """A sequence that has said so many tokens since it began decodes no longer."""
        self.decode_context -= job.length + said
        self._said -= said
        if self.limits.preempts:
            self._settle(self._said // self.block)

    def _finish(self, job: Job, end: StepEnd) -> None:
        final = job.request.final_ids
        short = len(final) - job.pages
        if short > 0:  # of a request whose pages came as it spoke
            self.cache.private += short
            job.pages += short
        self.cache.register(final, job.named, len(final))
        self.cache.release(final, job.pages - len(final))
        end.finished.append(job)

    # Memory that grows -------------------------------------------------------------------------------------------
    def _room(self) -> int:
        """Pages that running sequences can still take."""
        cache = self.cache
        assert cache.capacity is not None
        return cache.capacity - len(cache.used) - cache.private

    def _settle(self, pages: int) -> None:
        self.cache.private += pages - self._grown
        self._grown = pages

    def _grow(self) -> None:
        """Count the pages of what was said; preempt the youngest while the next step has none."""
        self._settle(self._said // self.block)
        if self.cache.capacity is None:
            return
        while len(self.decode) > 1 and self._room() * self.block < len(self.decode):
            self._preempt(max(self.decode, key=lambda entry: entry[1])[2])
        self.cache.trim()

    def _preempt(self, job: Job) -> None:
        self.preemptions += 1
        said = job.left - (job.finish_step - self.steps)
        self.decode.remove((job.finish_step, job.began, job))
        heapq.heapify(self.decode)
        self._leave(job, said)
        self.cache.release(job.request.ids[: job.named], job.pages - job.named)
        job.length += said
        job.left -= said
        job.computed = 0
        if self.limits.shortest:
            self._wait(job)
        else:
            self.waiting.appendleft(job)
