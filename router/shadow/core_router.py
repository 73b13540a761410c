"""The router's core as a router of the simulation, with the real tracker, policy and index. No I/O.

The index has one token id for each block of a trace, and a block size of one. `BlockScaledIndex` lets its callers
count in tokens. Events pass through the real codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from events.codec import encode_batch
from events.types import BlockRemoved, BlockStored, Event, EventBatch
from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.load import EngineLoad
from router.decide.messages import Decision, Forward, Instruction, Refuse, ReportedUsage, RouteRequest
from router.decide.workers import ServedModel, WorkerSpec
from router.fleet.config import FleetConfig
from router.index import make_index
from router.index.protocol import HolderId, Match, PrefixIndex, Scope, Tokens, make_block_group
from simulation.cluster import Cluster, Placement, Router, WorkerConfig
from simulation.engine import SimWorker
from simulation.workload import SimRequest

MODEL = "sim"
PROGRESS_S = 0.5
LOADS_S = FleetConfig().loads_s
"""Time between two readings of an engine's load."""
_CHUNK_KEY_STEP = 0x9E3779B97F4A7C15
"""Difference between the keys of two chunks of a block. Blocks with consecutive ids have consecutive keys."""


class BlockScaledIndex:
    """Prefix index of a simulation, in which each block of a prompt has one id in place of `block_tokens` token ids.

    The wrapped index takes each block id for a block of one token. So this class multiplies the lengths that the
    wrapped index returns by `block_tokens`, and divides those that are passed to it.
    """

    def __init__(self, inner: PrefixIndex, block_tokens: int) -> None:
        self._inner = inner
        self._block_tokens = block_tokens

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped index: most of its methods use no length in tokens."""
        return getattr(self._inner, name)

    def chunk_keys(self, token_ids: Tokens, scope: Scope, chunk_tokens: int) -> list[int]:
        """Return a key for each chunk of a prompt: a digest of the prompt up to the end of the chunk.

        `chunk_tokens`: tokens of a chunk. Chunks smaller than a block have keys derived from that of the block.
        """
        blocks_per_chunk = max(chunk_tokens // self._block_tokens, 1)
        chunks_per_block = max(self._block_tokens // chunk_tokens, 1)
        keys = self._inner.chunk_keys(token_ids, scope, blocks_per_chunk)
        return [(key + chunk * _CHUNK_KEY_STEP) % 2**64 for key in keys for chunk in range(chunks_per_block)]

    def match(self, token_ids: Tokens, scope: Scope, *options: Any) -> list[Match]:
        """Return how much of a prompt each worker has cached, in tokens."""
        return [self._scale_match(match) for match in self._inner.match(token_ids, scope, *options)]

    def _scale_match(self, match: Match) -> Match:
        gpu_tokens = match.gpu_tokens * self._block_tokens
        return Match(
            holder=match.holder,
            tokens=match.tokens * self._block_tokens,
            gpu_tokens=gpu_tokens,
            tier_tokens=(gpu_tokens, 0, 0, 0),  # slower tiers are not told apart
            pinned_tokens=match.pinned_tokens * self._block_tokens,
        )

    def add_holder(self, model: str) -> HolderId:
        """Add a worker, and declare to the wrapped index that each of its blocks has one token id."""
        holder = self._inner.add_holder(model)
        self._inner.declare_groups(holder, [make_block_group(1)])
        return holder


class CoreRouter(Router):
    """Router of a simulation that decides as `router run` does, with its core and index.

    Workers move no KV in the simulation, and have no host memory.
    """

    def __init__(self, config: CoreConfig, *, seed: int = 0) -> None:
        self._config = config
        self._seed = seed

    def attach(self, cluster: Cluster) -> None:
        """Join a simulation: make the core for its workers, and schedule reports to the core."""
        super().attach(cluster)
        index = BlockScaledIndex(make_index(seed=self._seed + 1), cluster.workload.block_size)
        self.core = RouterCore(index, self._config, seed=self._seed)
        for number, worker in enumerate(cluster.config.workers):
            self.core.add_worker(self.describe_worker(number, worker), 0.0)
        # A simulated worker has one rank.
        self.holders = [self.core.workers[str(number)].holders[0] for number in range(len(cluster.workers))]
        cluster.schedule(PROGRESS_S, self._report_progress)
        cluster.schedule(LOADS_S, self._report_loads)

    def describe_worker(self, number: int, worker: WorkerConfig) -> WorkerSpec:
        """Return what a router knows of a simulated worker."""
        config, block_size = self.cluster.config, self.cluster.workload.block_size
        return WorkerSpec(
            worker_id=str(number),
            url=f"http://{number}",
            models=(ServedModel(MODEL, MODEL),),
            cache_tokens=None if worker.cache_blocks is None else worker.cache_blocks * block_size,
            step_tokens=worker.step_times.step_tokens,
            is_shortest_first=config.limits.shortest_first,
        )

    def route(self, request: SimRequest, now: float) -> list[Placement]:
        """Ask the core for a worker, and return where the core sends this or queued requests."""
        route_request = RouteRequest(
            request_id=str(request.index),
            model=MODEL,
            scope=Scope(MODEL),
            token_ids=request.block_ids,
            prompt_tokens=request.prompt_tokens,
            session=str(request.session),
        )
        return self.perform([self.core.route(route_request, now)])

    def on_first_token(self, request: SimRequest, worker: int, now: float) -> list[Placement]:
        return self.perform(self.core.record_first_token(str(request.index), now))

    def on_finished(self, request: SimRequest, worker: int, cached_tokens: int, now: float) -> list[Placement]:
        self.core.record_progress(str(request.index), request.output_tokens)
        usage = ReportedUsage(request.prompt_tokens, cached_tokens, request.output_tokens)
        return self.perform(self.core.finish_request(str(request.index), usage, now))

    def tick_s(self) -> float | None:
        next_tick_s = self.core.next_tick()
        return None if next_tick_s is None else max(next_tick_s - self.cluster.now, 1e-4)

    def tick(self, now: float) -> list[Placement]:
        return self.perform(self.core.tick(now))

    def on_blocks_stored(self, worker: int, ids: list[int], parent: int | None, now: float) -> None:
        self.ingest(worker, now, BlockStored(list(ids), parent, list(ids), 1, None, "GPU", None))

    def on_blocks_removed(self, worker: int, ids: list[int], now: float) -> None:
        self.ingest(worker, now, BlockRemoved(list(ids), "GPU"))

    def ingest(self, worker: int, now: float, *events: Event) -> None:
        """Apply a worker's events to the index, as `router run` does when they arrive."""
        self.core.index.ingest(self.holders[worker], encode_batch(EventBatch(now, list(events))))

    def perform(self, instructions: Sequence[Instruction]) -> list[Placement]:
        """Return the placements that the core decided."""
        placements = []
        for instruction in instructions:
            assert not isinstance(instruction, Refuse), instruction
            if isinstance(instruction, Forward):
                placements.append(self.make_placement(int(instruction.request_id), instruction.decision))
        return placements

    def make_placement(self, request_index: int, decision: Decision) -> Placement:
        """Return the placement that a decision makes of a request."""
        return Placement(request_index, int(decision.worker))

    def _report_progress(self) -> None:
        """Report the tokens that running requests have generated, as the edge does with chunks of answers."""
        cluster = self.cluster
        for worker in cluster.workers:
            for job, output_tokens in worker.list_generated_tokens(cluster.now):
                if cluster.routers[job.request.index % len(cluster.routers)] is self:
                    self.core.record_progress(str(job.request.index), output_tokens, cluster.now)
        cluster.schedule(cluster.now + PROGRESS_S, self._report_progress)

    def _report_loads(self) -> None:
        """Tell the core the load of each engine every LOADS_S, as the router reads it from `/metrics`."""
        now = self.cluster.now
        for worker in self.cluster.workers:
            in_flight = self.core.count_in_flight_by_rank(str(worker.number))
            self.core.record_engine_load(str(worker.number), [self.read_load(worker)], in_flight, now)
        self.cluster.schedule(now + LOADS_S, self._report_loads)

    def read_load(self, worker: SimWorker) -> EngineLoad | None:
        """Return the load that a worker's `/metrics` says now; None if it says nothing."""
        return EngineLoad(worker.running_sequence_count, len(worker.waiting_sequences), worker.cache.compute_usage())
