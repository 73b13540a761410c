"""The real router core, tracker, policy and index behind the simulation's `Router` interface.

One "token" of the index stands for one trace block, so a prompt of 16k tokens is 32 ids and the index code is the real
one with a block size of one; `BlockScaled` lets its callers count in tokens. Events pass through the real codec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from events.codec import encode_batch
from events.types import BlockRemoved, BlockStored, EventBatch
from router.decide.config import CoreConfig, LearnConfig, ServiceModel
from router.decide.core import RouterCore
from router.decide.messages import Forward, Instruction, Refuse, ReportedUsage, RouteRequest
from router.decide.workers import ServedModel, WorkerSpec
from router.fleet.peers import PeerLoads
from router.index import make_index
from router.index.protocol import HolderId, IndexStats, IngestReport, Match, PinId, PrefixIndex, Prompt, Scope, Tokens
from routing_sim.cluster import Cluster
from routing_sim.service import StepTimes
from routing_sim.workload import SimRequest

MODEL = "sim"
HEARTBEAT_S = 0.5
PROGRESS_S = 2.0


class BlockScaled:
    """A PrefixIndex whose callers count tokens and whose inner index counts blocks."""

    def __init__(self, inner: PrefixIndex, block: int) -> None:
        self._inner = inner
        self._block = block

    @property
    def seed(self) -> int:
        return self._inner.seed

    def prepare(self, token_ids: Sequence[int] | bytes) -> Prompt:
        return self._inner.prepare(token_ids)

    def chunk_keys(self, token_ids: Tokens, scope: Scope, chunk_tokens: int) -> list[int]:
        return self._inner.chunk_keys(token_ids, scope, chunk_tokens // self._block)

    def match(self, token_ids: Tokens, scope: Scope) -> list[Match]:
        block = self._block
        return [
            Match(
                m.holder,
                m.tokens * block,
                m.gpu_tokens * block,
                (m.gpu_tokens * block, 0, 0, 0),
                m.pinned_tokens * block,
            )
            for m in self._inner.match(token_ids, scope)
        ]

    def add_holder(self, name: str, model: str) -> HolderId:
        holder = self._inner.add_holder(name, model)
        self._inner.declare_groups(holder, [{"group_idx": None, "kind": "full_attention", "block_size": 1}])
        return holder

    def remove_holder(self, holder: HolderId) -> None:
        self._inner.remove_holder(holder)

    def clear(self, holder: HolderId) -> None:
        self._inner.clear(holder)

    def declare_groups(self, holder: HolderId, groups: Sequence[Mapping[str, object]]) -> None:
        self._inner.declare_groups(holder, groups)

    def set_reannounces(self, holder: HolderId, reannounces: bool) -> None:
        self._inner.set_reannounces(holder, reannounces)

    def ingest(self, holder: HolderId, payload: bytes) -> IngestReport:
        return self._inner.ingest(holder, payload)

    def pin(self, holder: HolderId, token_ids: Tokens, scope: Scope) -> PinId:
        return self._inner.pin(holder, token_ids, scope)

    def unpin(self, pin: PinId) -> None:
        self._inner.unpin(pin)

    def stats(self) -> IndexStats:
        return self._inner.stats()

    def groups(self, holder: HolderId) -> list[dict[str, object]]:
        return self._inner.groups(holder)

    def dump(self, holder: HolderId) -> list[bytes]:
        return self._inner.dump(holder)


class Ours:
    """`RouterCore` under test. With `peers`, several of them share their load after `share_delay_s`."""

    def __init__(self, config: CoreConfig, *, seed: int = 0, name: str = "0", share_delay_s: float = 0.02) -> None:
        self.name = name
        self._config, self._seed = config, seed
        self.siblings: list[Ours] = []
        self._share_delay_s = share_delay_s
        self._pending = False

    def attach(self, cluster: Cluster) -> None:
        self.cluster = cluster
        inner = make_index(seed=self._seed + 1)
        self.core = RouterCore(BlockScaled(inner, cluster.workload.block), self._config, seed=self._seed)
        blocks = cluster.config.cache_blocks
        for i in range(cluster.config.workers):
            spec = WorkerSpec(
                worker_id=str(i),
                url=f"http://{i}",
                models=(ServedModel(MODEL, MODEL),),
                cache_tokens=None if blocks is None else blocks * cluster.workload.block,
            )
            self.core.add_worker(spec, 0.0)
        self.holders = [self.core.workers[str(i)].holders[0] for i in range(cluster.config.workers)]
        self.siblings = [r for r in cluster.routers if isinstance(r, Ours) and r is not self]
        self.loads = PeerLoads(self.core.tracker, self.name)
        cluster.at(PROGRESS_S, self._progress)
        if self.siblings:
            cluster.at(0.0, self._beat)

    def tell(self, target: str, times: StepTimes) -> None:
        """Give a worker's constants instead of letting them be learned."""
        self.core.tracker.targets[target].teach(ServiceModel(**asdict(times)))

    def route(self, request: SimRequest, now: float) -> list[tuple[int, int]]:
        routed = RouteRequest(
            request_id=str(request.index),
            model=MODEL,
            scope=Scope(MODEL),
            token_ids=request.ids,
            prompt_tokens=request.prompt_tokens,
            session=str(request.session),
        )
        return self._perform([self.core.route(routed, now)])

    def first_token(self, request: SimRequest, worker: int, now: float) -> list[tuple[int, int]]:
        return self._perform(self.core.first_token(str(request.index), now))

    def finished(self, request: SimRequest, worker: int, cached_tokens: int, now: float) -> list[tuple[int, int]]:
        self.core.progress(str(request.index), request.output_tokens)
        usage = ReportedUsage(request.prompt_tokens, cached_tokens, request.output_tokens)
        return self._perform(self.core.finished(str(request.index), usage, now))

    def tick_s(self) -> float | None:
        wake = self.core.next_tick()
        return None if wake is None else max(wake - self.cluster.now, 1e-4)

    def tick(self, now: float) -> list[tuple[int, int]]:
        return self._perform(self.core.tick(now))

    def stored(self, worker: int, ids: list[int], parent: int | None, now: float) -> None:
        event = BlockStored(list(ids), parent, list(ids), 1, None, "GPU", None)
        self.core.index.ingest(self.holders[worker], encode_batch(EventBatch(now, [event])))

    def removed(self, worker: int, ids: list[int], now: float) -> None:
        event = BlockRemoved(list(ids), "GPU")
        self.core.index.ingest(self.holders[worker], encode_batch(EventBatch(now, [event])))

    def _perform(self, instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
        forwards = []
        for instruction in instructions:
            assert not isinstance(instruction, Refuse), instruction
            if isinstance(instruction, Forward):
                forwards.append((int(instruction.request_id), int(instruction.decision.worker)))
        if self.siblings:
            self._share()
        return forwards

    def _share(self) -> None:
        if not self._pending:
            self._pending = True
            self.cluster.at(self.cluster.now + self._share_delay_s, self._tell)

    def _progress(self) -> None:
        """The edge counts chunks as they pass, and tells now and then."""
        cluster = self.cluster
        for worker in cluster.workers:
            for job, said in worker.progress(cluster.now):
                if cluster.routers[job.request.index % len(cluster.routers)] is self:
                    self.core.progress(str(job.request.index), said)
        cluster.at(cluster.now + PROGRESS_S, self._progress)

    def _beat(self) -> None:
        """The full message that every router sends twice a second."""
        self._share()
        self.cluster.at(self.cluster.now + HEARTBEAT_S, self._beat)

    def _tell(self) -> None:
        self._pending = False
        message = self.loads.outgoing(self.cluster.now)
        if message is not None:
            for sibling in self.siblings:
                sibling.loads.incoming(message, self.cluster.now)


class Told(Ours):
    """`Ours` with every worker's true constants given: what learning is measured against."""

    def __init__(self, config: CoreConfig, *, seed: int = 0) -> None:
        super().__init__(replace(config, learn=LearnConfig(enabled=False)), seed=seed)

    def attach(self, cluster: Cluster) -> None:
        super().attach(cluster)
        for worker in cluster.workers:
            self.tell(str(worker.number), worker.service)
