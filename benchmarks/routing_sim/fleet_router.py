"""The router under test in fleets beyond those of `router shadow`: several routers, KV that moves, host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from events.types import BlockRemoved, BlockStored
from router.decide.config import CoreConfig, LearnConfig
from router.decide.messages import Decision, Instruction, TransferKind
from router.decide.workers import TransferFacts, WorkerSpec
from router.fleet.peers import PeerLoads
from router.shadow.core_router import CoreRouter
from simulation.cluster import Cluster, Placement, WorkerConfig
from simulation.workload import SimRequest

KV_BYTES_PER_TOKEN = 131_072
"""Bytes of KV of one token of Llama-3.1-8B."""
PULLS = frozenset({TransferKind.PULL})
HEARTBEAT_S = 0.5
SHARE_DELAY_S = 0.02


class FleetRouter(CoreRouter):
    """Router of a simulation that decides as `router run` does, with transfers of KV and with other routers.

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
        super().__init__(replace(config, learn=LearnConfig(enabled=False)) if knows_constants else config, seed=seed)
        self._knows_constants = knows_constants
        self._transfer_kinds = transfer_kinds
        self._are_loads_scheduled = False

    def attach(self, cluster: Cluster) -> None:
        """Join a simulation, and share the load with its other routers from now on."""
        super().attach(cluster)
        if self._knows_constants:
            for sim_worker in cluster.workers:
                target = self.core.tracker.targets[str(sim_worker.number)]
                target.set_step_times(sim_worker.step_times)
        self.siblings = [router for router in cluster.routers if isinstance(router, FleetRouter) and router is not self]
        self.loads = PeerLoads(self.core.tracker, str(cluster.routers.index(self)))
        if self.siblings:
            cluster.schedule(0.0, self._send_heartbeat)

    def describe_worker(self, number: int, worker: WorkerConfig) -> WorkerSpec:
        """Return what a router knows of a simulated worker, with its roles, host memory and transfers."""
        spec = super().describe_worker(number, worker)
        if self.cluster.config.link_times is not None:
            transfer = TransferFacts("sim", self._transfer_kinds, bytes_per_token=KV_BYTES_PER_TOKEN)
            spec = replace(spec, transfer=transfer)
        return replace(spec, host_tokens=worker.host_blocks * self.cluster.workload.block_size, roles=worker.roles)

    def on_prefill_end(self, request: SimRequest, now: float) -> list[Placement]:
        return self.perform(self.core.record_prefill_end(str(request.index), now))

    def on_blocks_removed(self, worker: int, ids: list[int], now: float) -> None:
        medium = "CPU" if self.cluster.config.workers[worker].host_blocks else "GPU"
        self.ingest(worker, now, BlockRemoved(list(ids), medium))

    def on_blocks_moved(self, worker: int, ids: list[int], to_host: bool, now: float) -> None:
        """Announce blocks that moved to host memory if `to_host`, else back to the GPU."""
        new_medium, old_medium = ("CPU", "GPU") if to_host else ("GPU", "CPU")
        stored_event = BlockStored(list(ids), None, [], 0, None, new_medium, None)
        self.ingest(worker, now, stored_event, BlockRemoved(list(ids), old_medium))

    def make_placement(self, request_index: int, decision: Decision) -> Placement:
        """Return the placement that a decision makes of a request, with the source of its KV."""
        placement = super().make_placement(request_index, decision)
        if decision.transfer is None:
            return placement
        return placement._replace(source=int(decision.transfer.source), is_prefill=decision.is_split)

    def perform(self, instructions: Sequence[Instruction]) -> list[Placement]:
        """Return the placements that the core decided, and have the changed load sent to the other routers."""
        placements = super().perform(instructions)
        if self.siblings:
            self._schedule_loads()
        return placements

    def _schedule_loads(self) -> None:
        """Send the load to the other routers after SHARE_DELAY_S, once for all changes until then."""
        if not self._are_loads_scheduled:
            self._are_loads_scheduled = True
            self.cluster.schedule(self.cluster.now + SHARE_DELAY_S, self._send_loads)

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
