"""The simulated engine: a step loop with the service model of docs/routing.md and a block cache with leaf-first LRU.

One step takes `step_s + a * sum over prefill chunks of chunk * (1 + context / quadratic_tokens) + c * decoding + d *
decode context`. Chunks are filled first come first served up to the step's token budget, decoding requests take one
token of it each. Pages for prompt and output are reserved at admission; nothing is preempted. Stretches without prefill
are jumped over in closed form, so the cost of a run grows with requests, not with tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from router.decide.config import ServiceModel
from routing_sim.workload import BLOCK, SimRequest

BATCH_MAX = 256


class Cache:
    """Blocks of one worker, or of several where a bound shares them. `capacity` in blocks; None is infinite.

    Invariant: len(used) + private + len(idle) <= capacity, where `used` maps referenced blocks to their count, `idle`
    is the LRU order of unreferenced ones and `private` counts reserved pages without a name yet. A shared cache may go
    over it, see `reserve`.
    """

    def __init__(self, capacity: int | None, *, shared: bool = False) -> None:
        self.capacity = capacity
        self.shared = shared
        self.used: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.private = 0
        self.on_store: Callable[[list[int], int | None], None] | None = None
        self.on_remove: Callable[[list[int]], None] | None = None

    def match(self, ids: list[int], limit: int) -> int:
        """Blocks of the longest resident prefix, at most `limit`."""
        used, idle = self.used, self.idle
        count = 0
        for block in ids:
            if count >= limit or (block not in used and block not in idle):
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
            woken = sum(1 for block in ids[:hits] if block in idle)
            if len(used) + self.private + woken + fresh > self.capacity and not force:
                return False
        for block in ids[:hits]:
            if block in idle:
                del idle[block]
                used[block] = 1
            else:
                used[block] += 1
        self.private += fresh
        if self.capacity is not None:
            excess = min(len(used) + self.private + len(idle) - self.capacity, len(idle))
            if excess > 0:
                gone = [idle.popitem(last=False)[0] for _ in range(excess)]
                if self.on_remove is not None:
                    self.on_remove(gone)
        return True

    def register(self, ids: list[int], start: int, end: int) -> None:
        """Private pages of [start, end) are computed: they get their names. A name that is resident already is
        shared."""
        new = []
        for block in ids[start:end]:
            self.private -= 1
            if block in self.used:
                self.used[block] += 1
            else:
                if block in self.idle:
                    del self.idle[block]
                else:
                    new.append(block)
                self.used[block] = 1
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
    computed: int = 0
    hit_blocks: int = 0
    named: int = 0
    pages: int = 0
    prefill_done: bool = False


@dataclass(slots=True)
class StepEnd:
    """What a finished step (or stretch of decode steps) produced."""

    first_tokens: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)


class SimWorker:
    """One engine. The cluster calls `submit`, and `advance` at `wake_s`; both may move `wake_s`."""

    def __init__(self, number: int, service: ServiceModel, cache: Cache) -> None:
        self.number = number
        self.service = service
        self.cache = cache
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.decode: list[tuple[int, int, Job]] = []
        """Heap of (step at whose end it finishes, tie, job)."""
        self.decode_context = 0
        self.steps = 0
        self.wake_s: float | None = None
        self._chunks: list[tuple[Job, int]] = []
        self._stretch: tuple[float, int, int] | None = None
        """(start time, context at the start, steps planned) of a run of decode-only steps."""
        self._ties = 0
        self.blocked = False
        """The head of the queue waits for pages or a place in the batch."""
        self.busy_s = 0.0
        self.prefilled_tokens = 0

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decode)

    def submit(self, job: Job, now: float) -> None:
        """A request arrives."""
        self.waiting.append(job)
        if self.wake_s is None:
            self._start(now)
        elif self._stretch is not None and len(self.waiting) == 1:
            self._cut_stretch(now)

    def advance(self, now: float) -> StepEnd:
        """`wake_s` has come: end the step, begin the next."""
        end = StepEnd()
        if self._stretch is not None:
            _, _, steps = self._stretch
            self._stretch = None
            self.decode_context += len(self.decode) * steps
            self.steps += steps
        else:
            self.steps += 1
            self.decode_context += len(self.decode)
        self._finish_decodes(end)
        for job, tokens in self._chunks:
            self._chunk_done(job, tokens, end)
        self._chunks = []
        if end.first_tokens:
            self.prefilling = [job for job in self.prefilling if not job.prefill_done]
        self._start(now)
        return end

    # Steps -------------------------------------------------------------------------------------------------------
    def _start(self, now: float) -> None:
        service = self.service
        budget = service.step_tokens - len(self.decode)
        chunks: list[tuple[Job, int]] = []
        for job in self.prefilling:
            if budget <= 0:
                break
            tokens = min(budget, job.request.prompt_tokens - job.computed)
            chunks.append((job, tokens))
            budget -= tokens
        self.blocked = False
        while budget > 0 and self.waiting:
            job = self.waiting[0]
            if self.running >= BATCH_MAX or not self._admit(job):
                self.blocked = True
                break
            self.waiting.popleft()
            self.prefilling.append(job)
            tokens = min(budget, job.request.prompt_tokens - job.computed)
            chunks.append((job, tokens))
            budget -= tokens
        self._chunks = chunks
        n = len(self.decode)
        if chunks:
            work = 0.0
            for job, tokens in chunks:
                work += tokens * (1.0 + (job.computed + tokens / 2.0) / service.quadratic_tokens)
                self.prefilled_tokens += tokens
            seconds = service.step_s + service.prefill_s_per_token * work
            seconds += service.decode_request_s * n + service.decode_context_s * self.decode_context
            self.wake_s = now + seconds
        elif n:
            steps = self.decode[0][0] - self.steps
            self._stretch = (now, self.decode_context, steps)
            self.wake_s = now + self._stretch_s(steps)
        else:
            assert not self.waiting, (
                f"worker {self.number} cannot take a request even when idle: its cache is too small"
            )
            self.wake_s = None

    def _stretch_s(self, steps: int) -> float:
        """Time of so many decode-only steps from the present stretch's start."""
        assert self._stretch is not None
        service, n = self.service, len(self.decode)
        each = service.step_s + service.decode_request_s * n + service.decode_context_s * self._stretch[1]
        return steps * each + service.decode_context_s * n * steps * (steps - 1) / 2.0

    def _cut_stretch(self, now: float) -> None:
        """A request arrived during decode-only steps: it joins at the end of the step that is running."""
        assert self._stretch is not None
        start, context, planned = self._stretch
        service, n = self.service, len(self.decode)
        each = service.step_s + service.decode_request_s * n + service.decode_context_s * context
        growth = service.decode_context_s * n / 2.0
        elapsed = now - start
        linear = each - growth
        steps = elapsed / each
        if growth > 0.0:
            steps = (math.sqrt(linear * linear + 4.0 * growth * elapsed) - linear) / (2.0 * growth)
        done = min(planned, max(1, math.ceil(steps + 1e-9)))
        self._stretch = (start, context, done)
        self.wake_s = max(now, start + self._stretch_s(done))

    def _admit(self, job: Job) -> bool:
        request = job.request
        hits = self.cache.match(request.ids, (request.prompt_tokens - 1) // BLOCK)
        pages = -(-(request.prompt_tokens + request.output_tokens) // BLOCK)
        alone = self.cache.shared and not self.running
        if not self.cache.reserve(request.ids, hits, pages, force=alone):
            return False
        job.hit_blocks = job.named = hits
        job.computed = hits * BLOCK
        job.pages = pages
        return True

    def _chunk_done(self, job: Job, tokens: int, end: StepEnd) -> None:
        job.computed += tokens
        full = job.computed // BLOCK
        if full > job.named:
            self.cache.register(job.request.ids, job.named, full)
            job.named = full
        if job.computed == job.request.prompt_tokens:
            job.prefill_done = True
            end.first_tokens.append(job)
            if job.request.output_tokens <= 1:
                self._finish(job, end)
                return
            self._ties += 1
            heapq.heappush(self.decode, (self.steps + job.request.output_tokens - 1, self._ties, job))
            self.decode_context += job.request.prompt_tokens + 1

    def _finish_decodes(self, end: StepEnd) -> None:
        while self.decode and self.decode[0][0] <= self.steps:
            job = heapq.heappop(self.decode)[2]
            self.decode_context -= job.request.prompt_tokens + job.request.output_tokens
            self._finish(job, end)

    def _finish(self, job: Job, end: StepEnd) -> None:
        final = job.request.final_ids
        self.cache.register(final, job.named, len(final))
        self.cache.release(final, job.pages - len(final))
        end.finished.append(job)
