"""The router's core as a router of the simulation, with the real tracker, policy and index. No I/O.

The index has one token id for each block of a trace, and a block size of one. `BlockScaledIndex` lets its callers
count in tokens. Events pass through the real codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from events.codec import encode_batch
from events.types import BlockRemoved, BlockStored, EventBatch
from router.decide.config import CoreConfig, LearnConfig
from router.decide.core import RouterCore
from router.decide.load import EngineLoad
from router.decide.messages import Forward, Instruction, Refuse, ReportedUsage, RouteRequest, TransferKind
from router.decide.workers import NO_TRANSFERS, ServedModel, TransferFacts, WorkerSpec
from router.fleet.config import FleetConfig
from router.fleet.peers import PeerLoads
from router.index import make_index
from router.index.protocol import HolderId, Match, PrefixIndex, Scope, Tokens
from simulation.cluster import Cluster, Placement, Placements, Router, WorkerConfig
from simulation.engine import SimWorker
from simulation.workload import SimRequest

MODEL = "sim"
KV_BYTES_PER_TOKEN = 131_072
"""Bytes of KV of one token of Llama-3.1-8B."""
PULLS = frozenset({TransferKind.PULL})
HEARTBEAT_S = 0.5
PROGRESS_S = 0.5
LOADS_S = FleetConfig().loads_s
"""Time between two readings of an engine's load."""
SHARE_DELAY_S = 0.02
_CHUNK_KEY_STEP = 0x9E3779B97F4A7C15
"""Difference between the keys of two chunks of a block. Blocks with consecutive ids have consecutive keys."""


class BlockScaledIndex:
    """Wrapper of a simulation's index, which takes prompts as block ids, for a core that counts in tokens.

    The inner index stores each block id as a block of one token. So this class multiplies the lengths that the inner
    index returns by `block_tokens`, and divides the lengths that are passed to the inner index.
    """

    def __init__(self, inner: PrefixIndex, block_tokens: int) -> None:
        self._inner = inner
        self._block_tokens = block_tokens

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner index, as most of its methods use no length in tokens."""
        return getattr(self._inner, name)

    def chunk_keys(self, token_ids: Tokens, scope: Scope, chunk_tokens: int) -> list[int]:
        """Return the key of each chunk of `chunk_tokens` tokens.

        A block has one id, so chunks that are smaller than a block have no ids of their own: their keys are derived
        from the key of their block.
        """
        keys = self._inner.chunk_keys(token_ids, scope, max(chunk_tokens // self._block_tokens, 1))
        chunks_of_block = range(max(self._block_tokens // chunk_tokens, 1))
        return [(key + chunk * _CHUNK_KEY_STEP) % 2**64 for key in keys for chunk in chunks_of_block]

    def match(self, token_ids: Tokens, scope: Scope, *options: Any) -> list[Match]:
        """Return the cached prefixes of a prompt, with lengths in tokens."""
        matches = []
        for match in self._inner.match(token_ids, scope, *options):
            gpu_tokens = match.gpu_tokens * self._block_tokens
            matches.append(
                Match(
                    holder=match.holder,
                    tokens=match.tokens * self._block_tokens,
                    gpu_tokens=gpu_tokens,
                    tier_tokens=(gpu_tokens, 0, 0, 0),  # slower tiers are not told apart
                    pinned_tokens=match.pinned_tokens * self._block_tokens,
                )
            )
        return matches

    def add_holder(self, model: str) -> HolderId:
        """Add a worker's rank, and declare to the inner index that its blocks have one token id each."""
        holder = self._inner.add_holder(model)
        self._inner.declare_groups(holder, [{"group_idx": None, "kind": "full_attention", "block_size": 1}])
        return holder


class CoreRouter(Router):
    """Router of a simulation that decides as `router run` does, with its core and index.

    Several of them in one simulation tell each other their loads, which arrive after `SHARE_DELAY_S`.
    """

    def __init__(
        self,
        config: CoreConfig,
        *,
        seed: int = 0,
        knows_constants: bool = False,
        transfer_kinds: frozenset[TransferKind] = PULLS,
    ) -> None:
        """`knows_constants`: the core is given the workers' true step times, and learns nothing.

        `transfer_kinds`: transfers that the core plans, if KV moves in the simulation.
        """
        self._transfer_kinds = transfer_kinds
        self._config = replace(config, learn=LearnConfig(enabled=False)) if knows_constants else config
        self._seed = seed
        self._knows_constants = knows_constants
        self._are_loads_scheduled = False

    def attach(self, cluster: Cluster) -> None:
        """Join a simulation: make the core for its workers, and schedule reports to the core and other routers."""
        super().attach(cluster)
        index = BlockScaledIndex(make_index(seed=self._seed + 1), cluster.workload.block_size)
        self.core = RouterCore(index, self._config, seed=self._seed)
        self._add_workers(cluster)
        self.siblings = [router for router in cluster.routers if isinstance(router, CoreRouter) and router is not self]
        self.loads = PeerLoads(self.core.tracker, str(cluster.routers.index(self)))
        cluster.schedule(PROGRESS_S, self._report_progress)
        cluster.schedule(LOADS_S, self._report_loads)
        if self.siblings:
            cluster.schedule(0.0, self._send_heartbeat)

    def _add_workers(self, cluster: Cluster) -> None:
        """Add the simulated workers to the core, with their true step times if the core is to know these."""
        for number, worker in enumerate(cluster.config.workers):
            self.core.add_worker(self._describe_worker(number, worker), 0.0)
        # A simulated worker has one rank.
        self.holders = [self.core.workers[str(number)].holders[0] for number in range(len(cluster.workers))]
        if self._knows_constants:
            for sim_worker in cluster.workers:
                target = self.core.tracker.targets[str(sim_worker.number)]
                target.set_step_times(sim_worker.step_times)

    def _describe_worker(self, number: int, worker: WorkerConfig) -> WorkerSpec:
        """Return what a router knows of a simulated worker."""
        config, block_size = self.cluster.config, self.cluster.workload.block_size
        transfer_facts = NO_TRANSFERS
        if config.link_times is not None:
            transfer_facts = TransferFacts("sim", self._transfer_kinds, bytes_per_token=KV_BYTES_PER_TOKEN)
        return WorkerSpec(
            worker_id=str(number),
            url=f"http://{number}",
            models=(ServedModel(MODEL, MODEL),),
            cache_tokens=None if worker.cache_blocks is None else worker.cache_blocks * block_size,
            host_tokens=worker.host_blocks * block_size,
            step_tokens=worker.step_times.step_tokens,
            is_shortest_first=config.limits.shortest_first,
            roles=worker.roles,
            transfer=transfer_facts,
        )

    def route(self, request: SimRequest, now: float) -> Placements:
        """Ask the core for a worker, and return where the core sends this or queued requests."""
        route_request = RouteRequest(
            request_id=str(request.index),
            model=MODEL,
            scope=Scope(MODEL),
            token_ids=request.block_ids,
            prompt_tokens=request.prompt_tokens,
            session=str(request.session),
        )
        return self._perform([self.core.route(route_request, now)])

    def on_prefill_end(self, request: SimRequest, now: float) -> Placements:
        return self._perform(self.core.record_prefill_end(str(request.index), now))

    def on_first_token(self, request: SimRequest, worker: int, now: float) -> Placements:
        return self._perform(self.core.record_first_token(str(request.index), now))

    def on_finished(self, request: SimRequest, worker: int, cached_tokens: int, now: float) -> Placements:
        self.core.record_progress(str(request.index), request.output_tokens)
        usage = ReportedUsage(request.prompt_tokens, cached_tokens, request.output_tokens)
        return self._perform(self.core.finish_request(str(request.index), usage, now))

    def tick_s(self) -> float | None:
        next_tick_s = self.core.next_tick()
        return None if next_tick_s is None else max(next_tick_s - self.cluster.now, 1e-4)

    def tick(self, now: float) -> Placements:
        return self._perform(self.core.tick(now))

    def on_blocks_stored(self, worker: int, ids: list[int], parent: int | None, now: float) -> None:
        event = BlockStored(list(ids), parent, list(ids), 1, None, "GPU", None)
        self.core.index.ingest(self.holders[worker], encode_batch(EventBatch(now, [event])))

    def on_blocks_removed(self, worker: int, ids: list[int], now: float) -> None:
        event = BlockRemoved(list(ids), "CPU" if self.cluster.config.workers[worker].host_blocks else "GPU")
        self.core.index.ingest(self.holders[worker], encode_batch(EventBatch(now, [event])))

    def on_blocks_moved(self, worker: int, ids: list[int], to_host: bool, now: float) -> None:
        """Announce blocks that moved to host memory if `to_host`, else back to the GPU."""
        new_medium, old_medium = ("CPU", "GPU") if to_host else ("GPU", "CPU")
        stored_event = BlockStored(list(ids), None, [], 0, None, new_medium, None)
        batch = EventBatch(now, [stored_event, BlockRemoved(list(ids), old_medium)])
        self.core.index.ingest(self.holders[worker], encode_batch(batch))

    def _perform(self, instructions: Sequence[Instruction]) -> list[Placement]:
        """Return the placements that the core decided, and have the changed load sent to the other routers."""
        placements = []
        for instruction in instructions:
            assert not isinstance(instruction, Refuse), instruction
            if isinstance(instruction, Forward):
                decision = instruction.decision
                placement = Placement(int(instruction.request_id), int(decision.worker))
                if decision.transfer is not None:
                    placement = placement._replace(source=int(decision.transfer.source), is_prefill=decision.is_split)
                placements.append(placement)
        if self.siblings:
            self._schedule_loads()
        return placements

    def _schedule_loads(self) -> None:
        """Send the load to the other routers after SHARE_DELAY_S, once for all changes until then."""
        if not self._are_loads_scheduled:
            self._are_loads_scheduled = True
            self.cluster.schedule(self.cluster.now + SHARE_DELAY_S, self._send_loads)

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

    def _send_heartbeat(self) -> None:
        """Send the whole load every HEARTBEAT_S."""
        self._schedule_loads()
        self.cluster.schedule(self.cluster.now + HEARTBEAT_S, self._send_heartbeat)

    def _send_loads(self) -> None:
        self._are_loads_scheduled = False
        message = self.loads.next_message(self.cluster.now)
        if message is not None:
            for sibling in self.siblings:
                sibling.loads.apply_message(message, self.cluster.now)
