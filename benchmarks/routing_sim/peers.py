"""Other routers' policies, re-implemented from their documented formulas, and the two bounds.

Each class names its source and its defaults; tests/router/test_routing_sim.py has decisions computed by hand. All
of them see the same event-fed view of the caches (`Residency`), also those that approximate it in their own programs,
unless the approximation is the policy (SGLang's tree).
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Container, Sequence

from simulation.cluster import Cluster, Placement, Router
from simulation.engine import SimSequence, SimWorker
from simulation.workload import SimRequest


class Residency(Router):
    """Which blocks each worker holds, as its events said so far, and what is in flight where."""

    DEVICE_CREDIT = HOST_CREDIT = 1.0
    """Cached blocks that a block on the device, and one in host memory, count as."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)

    def attach(self, cluster: Cluster) -> None:
        super().attach(cluster)
        self.count = len(cluster.workers)
        self.resident: list[set[int]] = [set() for _ in range(self.count)]
        self.host_blocks: list[set[int]] = [set() for _ in range(self.count)]
        """Of these, in host memory."""
        self.in_flight = [0] * self.count

    def on_blocks_stored(self, worker: int, ids: list[int], parent: int | None, now: float) -> None:
        self.resident[worker].update(ids)

    def on_blocks_removed(self, worker: int, ids: list[int], now: float) -> None:
        self.resident[worker].difference_update(ids)
        self.host_blocks[worker].difference_update(ids)

    def on_blocks_moved(self, worker: int, ids: list[int], to_host: bool, now: float) -> None:
        (self.host_blocks[worker].update if to_host else self.host_blocks[worker].difference_update)(ids)

    def prefix_blocks(self, request: SimRequest) -> list[int]:
        """Cached prefix of each worker in blocks, short of the prompt's last token."""
        ids = request.block_ids[: (request.prompt_tokens - 1) // request.block_size]
        return [prefix_len(ids, blocks) for blocks in self.resident]

    def credited_blocks(self, request: SimRequest) -> list[float]:
        """Cached prefix of each worker in blocks, weighted by `DEVICE_CREDIT` and `HOST_CREDIT`."""
        block_credits = []
        for count, host_blocks in zip(self.prefix_blocks(request), self.host_blocks):
            host_count = sum(block in host_blocks for block in request.block_ids[:count]) if host_blocks else 0
            block_credits.append(self.DEVICE_CREDIT * (count - host_count) + self.HOST_CREDIT * host_count)
        return block_credits

    def choose(self, request: SimRequest, now: float) -> int:
        raise NotImplementedError

    def route(self, request: SimRequest, now: float) -> list[Placement]:
        worker = self.choose(request, now)
        self.in_flight[worker] += 1
        return [Placement(request.index, worker)]

    def on_finished(self, request: SimRequest, worker: int, cached_tokens: int, now: float) -> list[Placement]:
        self.in_flight[worker] -= 1
        return []


def prefix_len(ids: list[int], cached_blocks: Container[int]) -> int:
    """How many of the first blocks are held, without a hole."""
    return next((i for i, block in enumerate(ids) if block not in cached_blocks), len(ids))


def argmin(values: Sequence[float], rng: random.Random | None = None) -> int:
    """Index of the least; ties at random where `rng` is given, else the first."""
    minimum = min(values)
    ties = [i for i, value in enumerate(values) if value == minimum]
    return ties[0] if rng is None or len(ties) == 1 else rng.choice(ties)


class RoundRobin(Residency):
    """Each worker in turn."""

    _next = 0

    def choose(self, request: SimRequest, now: float) -> int:
        self._next += 1
        return (self._next - 1) % self.count


class LeastRequests(Residency):
    """Fewest requests in flight; ties at random. The default of most HTTP balancers."""

    def choose(self, request: SimRequest, now: float) -> int:
        return argmin(self.in_flight, self.rng)


class PowerOfTwo(Residency):
    """The fewer requests in flight of two workers drawn at random (Mitzenmacher 2001)."""

    def choose(self, request: SimRequest, now: float) -> int:
        return min(self.rng.sample(range(self.count), 2), key=self.in_flight.__getitem__)


class SessionSticky(Residency):
    """A session stays where its first request went: the worker with the fewest requests then."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.home: dict[int, int] = {}

    def choose(self, request: SimRequest, now: float) -> int:
        if request.session not in self.home:
            self.home[request.session] = argmin(self.in_flight, self.rng)
        return self.home[request.session]


class SglangTree(Residency):
    """SGLang's cache-aware router (docs/router/router.md and its defaults): an approximate tree of what it sent where.

    Imbalanced, when max - min > balance_abs_threshold (32) and max > balance_rel_threshold (1.0001) * min requests in
    flight: the fewest requests. Else the worker of the longest match, if it covers more than cache_threshold (0.5) of
    the prompt; else the worker whose tree is smallest. Its tree is bounded in characters; here, in its favour, by each
    worker's true capacity.
    """

    CACHE_THRESHOLD = 0.5
    BALANCE_ABS = 32
    BALANCE_REL = 1.0001

    def attach(self, cluster: Cluster) -> None:
        super().attach(cluster)
        self.trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(self.count)]
        self.tree_max = cluster.config.workers[0].cache_blocks

    def choose(self, request: SimRequest, now: float) -> int:
        worker = self._select_worker(request)
        tree = self.trees[worker]
        for block in reversed(request.block_ids):
            tree[block] = None
            tree.move_to_end(block)
        while self.tree_max is not None and len(tree) > self.tree_max:
            tree.popitem(last=False)
        return worker

    def _select_worker(self, request: SimRequest) -> int:
        high, low = max(self.in_flight), min(self.in_flight)
        if high - low > self.BALANCE_ABS and high > self.BALANCE_REL * low:
            return argmin(self.in_flight)
        match_lens = [prefix_len(request.block_ids, tree) for tree in self.trees]
        best = argmin([-m for m in match_lens])
        if match_lens[best] / len(request.block_ids) > self.CACHE_THRESHOLD:
            return best
        return argmin([len(tree) for tree in self.trees])


class QueuedPrefills(Residency):
    """Base of policies that know the tokens that were routed to each worker and are not prefilled yet."""

    def attach(self, cluster: Cluster) -> None:
        super().attach(cluster)
        self.prefill_tokens = [0] * self.count
        self.pending: dict[int, int] = {}
        """Tokens to prefill, by request."""

    def costs(self, request: SimRequest) -> list[float]:
        """Cost of each worker; the least wins, ties at random."""
        raise NotImplementedError

    def uncached_tokens(self, request: SimRequest) -> list[int]:
        """Prompt tokens that each worker would have to prefill."""
        return [request.prompt_tokens - prefix * request.block_size for prefix in self.prefix_blocks(request)]

    def choose(self, request: SimRequest, now: float) -> int:
        worker = argmin(self.costs(request), self.rng)
        self.pending[request.index] = self.uncached_tokens(request)[worker]
        self.prefill_tokens[worker] += self.pending[request.index]
        return worker

    def on_first_token(self, request: SimRequest, worker: int, now: float) -> list[Placement]:
        self.prefill_tokens[worker] -= self.pending.pop(request.index)
        return []


class Dynamo(QueuedPrefills):
    """NVIDIA Dynamo's KV router (docs: "KV Cache Routing", `DefaultWorkerSelector`): in blocks,

        cost = overlap_score_weight * potential prefill blocks + potential decode blocks

    potential prefill = tokens routed there and not yet prefilled, plus this prompt's uncached ones, over the block
    size, where a block in host memory counts for three quarters of a cached one; potential decode = blocks of the
    requests active there, this one's included, shared blocks once. Weight 1.0 and router_temperature 0 (the least cost)
    by default; ties at random.
    """

    HOST_CREDIT = 0.75
    ACTIVE_REQUEST_TOKENS = 0.0
    """Cost of each request in flight there, as tokens of prefill at weight 1."""

    def __init__(self, weight: float = 1.0, seed: int = 0) -> None:
        super().__init__(seed)
        self.weight = weight

    def attach(self, cluster: Cluster) -> None:
        super().attach(cluster)
        self.active: list[Counter[int]] = [Counter() for _ in range(self.count)]

    def costs(self, request: SimRequest) -> list[float]:
        """Cost of each worker, in blocks."""
        prefix = self.credited_blocks(request)
        costs = []
        for w in range(self.count):
            prefill = max((self.prefill_tokens[w] + request.prompt_tokens) / request.block_size - prefix[w], 0.0)
            active = self.active[w]
            decode = len(active) + sum(1 for block in request.block_ids if block not in active)
            requests = self.ACTIVE_REQUEST_TOKENS / request.block_size * self.in_flight[w]
            costs.append(self.weight * prefill + decode + requests)
        return costs

    def choose(self, request: SimRequest, now: float) -> int:
        worker = super().choose(request, now)
        self.active[worker].update(request.block_ids)
        return worker

    def on_finished(self, request: SimRequest, worker: int, cached_tokens: int, now: float) -> list[Placement]:
        active = self.active[worker]
        for block in request.block_ids:
            active[block] -= 1
            if not active[block]:
                del active[block]
        return super().on_finished(request, worker, cached_tokens, now)


class DynamoAgentic(Dynamo):
    """NVIDIA Dynamo's `--agentic` preset (docs: "Router Presets"): overlap_score_credit 2, prefill_load_scale 4 and
    decode_active_request_weight 64, a block being 16 tokens.

        cost = 4 * max(0, potential prefill blocks before cache hits - 2 * cached blocks)
             + potential decode blocks + 64 * active requests

    A block of the simulation is larger than 16 tokens: the weight of an active request is kept in tokens.
    """

    DEVICE_CREDIT = 2.0
    ACTIVE_REQUEST_TOKENS = 64 * 16

    def __init__(self, seed: int = 0) -> None:
        super().__init__(4.0, seed)


class LMetric(QueuedPrefills):
    """LMetric (arXiv 2603.15202, "Multiplication may be all you need"), which has no parameters:

        cost = (tokens routed there and not yet prefilled + uncached tokens of this prompt) * (requests in flight + 1)

    The least product wins; ties at random.
    """

    def costs(self, request: SimRequest) -> list[float]:
        """Cost of each worker, in tokens times requests."""
        uncached = self.uncached_tokens(request)
        return [
            (queued + new) * (count + 1) for queued, new, count in zip(self.prefill_tokens, uncached, self.in_flight)
        ]


class LlmD(Residency):
    """llm-d's scheduler with the weights of its precise-prefix guide: prefix 2, KV utilisation 1, queue 1.

    prefix = unbroken cached prefix / prompt in blocks, where one in host memory counts for 0.8 (the indexer's default);
    KV = 1 - used share of the pages; queue = (max - q) / (max - min) over the waiting requests, 1 if all are equal.
    Gauges are scraped every 50 ms; the best sum wins, ties at random.
    """

    SCRAPE_S = 0.05
    HOST_CREDIT = 0.8

    def attach(self, cluster: Cluster) -> None:
        super().attach(cluster)
        self.scraped_s = -1.0
        self.waiting = [0] * self.count
        self.usage = [0.0] * self.count

    def scores(self, request: SimRequest, now: float) -> list[float]:
        """Of every worker; the highest wins."""
        if now - self.scraped_s >= self.SCRAPE_S:
            self.scraped_s = now
            self.waiting = [len(w.waiting_sequences) for w in self.cluster.workers]
            self.usage = [w.cache.compute_usage() for w in self.cluster.workers]
        prefix = self.credited_blocks(request)
        high, low = max(self.waiting), min(self.waiting)
        return [
            2.0 * prefix[w] / len(request.block_ids)
            + (1.0 - self.usage[w])
            + (1.0 if high == low else (high - self.waiting[w]) / (high - low))
            for w in range(self.count)
        ]

    def choose(self, request: SimRequest, now: float) -> int:
        return argmin([-score for score in self.scores(request, now)], self.rng)


def remaining_work_s(worker: SimWorker, job: SimSequence) -> float:
    """Prefill seconds of a job that waits or is being prefilled, known exactly."""
    done_tokens = job.computed_tokens or worker.count_hit_blocks(job.request) * worker.block_size
    return worker.step_times.compute_prefill_s(job.prefill_tokens - done_tokens, done_tokens)


class LeastWork(Residency):
    """The bounds' router: the worker with the least prefill work left, known exactly. With `shared_cache` and no
    capacity it is INF, with the summed capacity POOL."""

    def choose(self, request: SimRequest, now: float) -> int:
        costs = []
        for worker in self.cluster.workers:
            work = sum(
                remaining_work_s(worker, job) for job in [*worker.prefilling_sequences, *worker.waiting_sequences]
            )
            costs.append(work * 1e9 + worker.running_sequence_count)
        return argmin(costs)


class Oracle(Residency):
    """Knows the engines' state, their service model and how long every answer will be: time to the first token, plus
    `WEIGHT` times what the rest of this answer takes and what it costs the answers beside it. Looks no further ahead
    than the requests that are there."""

    WEIGHT = 0.2

    def choose(self, request: SimRequest, now: float) -> int:
        return argmin([self.cost(worker, request, now) for worker in self.cluster.workers])

    def cost(self, worker: SimWorker, request: SimRequest, now: float) -> float:
        """Seconds."""
        times, length, output_tokens = worker.step_times, request.prompt_tokens, request.output_tokens
        hit = worker.count_hit_blocks(request) * worker.block_size
        prefill = times.compute_prefill_s(length - hit, hit)
        waiting = [*worker.prefilling_sequences, *worker.waiting_sequences]
        queue = sum(remaining_work_s(worker, job) for job in waiting)
        remaining_lens = [sequence.finish_step - worker.step_count for sequence in worker.decoding_heap]
        n = len(remaining_lens)
        step = times.compute_decode_s(n, worker.decoding_context_tokens)
        slow = 1.0 + step / (times.prefill_s_per_token * times.step_tokens)
        cost = slow * (queue + prefill) + len(waiting) * prefill
        missing_seats = n + len(waiting) - worker.limits.max_sequences
        if missing_seats >= 0:
            cost += sorted(remaining_lens)[min(missing_seats, n - 1)] * step if n else 0.0
        remaining_lens += [job.remaining_tokens for job in waiting]
        overlap_tokens = sum(min(remaining, output_tokens) for remaining in remaining_lens)
        context = (worker.decoding_context_tokens + sum(job.prefill_tokens for job in waiting)) / max(
            len(remaining_lens), 1
        )
        own_cost = output_tokens * times.compute_decode_s(1, length + output_tokens / 2) + overlap_tokens * (
            times.decode_request_s + times.decode_context_s * context
        )
        added_cost = (
            overlap_tokens * (times.decode_request_s + times.decode_context_s * (length + output_tokens / 2))
            + n * prefill
        )
        return cost + self.WEIGHT * (own_cost + added_cost)
