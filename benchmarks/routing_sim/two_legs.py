"""How other routers split a request in two: one worker computes the prompt, another one the answer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from routing_sim.peers import Residency
from simulation.cluster import Cluster, Placement, Router
from simulation.workload import SimRequest


class WorkerGroup:
    """A policy for some workers of a cluster, which it numbers from 0 on."""

    def __init__(self, policy: Residency, cluster: Cluster, role: str) -> None:
        self.policy = policy
        self.numbers = [number for number, worker in enumerate(cluster.config.workers) if role in worker.roles]
        """Number in the cluster of each worker of the group."""
        group_cluster = copy.copy(cluster)
        group_cluster.workers = [cluster.workers[number] for number in self.numbers]
        group_cluster.config = replace(
            cluster.config, workers=[cluster.config.workers[number] for number in self.numbers]
        )
        policy.attach(group_cluster)

    def choose(self, request: SimRequest, now: float) -> int:
        """Return the worker for a request, by its number in the group, and count the request there."""
        [placement] = self.policy.route(request, now)
        return placement.worker

    def count_uncached_tokens(self, request: SimRequest, worker: int) -> int:
        """Return the tokens of a prompt that a worker of the group would have to compute."""
        return request.prompt_tokens - self.policy.prefix_blocks(request)[worker] * request.block_size


class TwoLegs(Router):
    """One policy for each leg of every request, as in smg and vllm-router."""

    def __init__(self, prefill_policy: Residency, decode_policy: Residency) -> None:
        self._policies = prefill_policy, decode_policy

    def attach(self, cluster: Cluster) -> None:
        super().attach(cluster)
        prefill_policy, decode_policy = self._policies
        self.prefill_group = WorkerGroup(prefill_policy, cluster, "prefill")
        self.decode_group = WorkerGroup(decode_policy, cluster, "decode")
        self._prefill_worker_by_request: dict[int, int] = {}
        """Worker of the prefill group that computes the prompt, for each request that is split."""

    def is_split(self, uncached_tokens: int, prompt_tokens: int) -> bool:
        """Return whether another worker computes the prompt, given what the decode worker would have to compute."""
        return True

    def route(self, request: SimRequest, now: float) -> Sequence[Placement]:
        decode_worker = self.decode_group.choose(request, now)
        uncached_tokens = self.decode_group.count_uncached_tokens(request, decode_worker)
        placement = Placement(request.index, self.decode_group.numbers[decode_worker])
        if not self.is_split(uncached_tokens, request.prompt_tokens):
            return [placement]
        self.decode_group.policy.on_first_token(request, decode_worker, now)  # it has no prompt to compute
        prefill_worker = self._prefill_worker_by_request[request.index] = self.prefill_group.choose(request, now)
        return [placement._replace(source=self.prefill_group.numbers[prefill_worker], is_prefill=True)]

    def on_prefill_end(self, request: SimRequest, now: float) -> Sequence[Placement]:
        prefill_worker, policy = self._prefill_worker_by_request[request.index], self.prefill_group.policy
        policy.on_first_token(request, prefill_worker, now)
        policy.on_finished(request, prefill_worker, 0, now)
        return []

    def on_first_token(self, request: SimRequest, worker: int, now: float) -> Sequence[Placement]:
        if request.index not in self._prefill_worker_by_request:
            self.decode_group.policy.on_first_token(request, self.decode_group.numbers.index(worker), now)
        return []

    def on_finished(self, request: SimRequest, worker: int, cached_tokens: int, now: float) -> Sequence[Placement]:
        decode_worker = self.decode_group.numbers.index(worker)
        self.decode_group.policy.on_finished(request, decode_worker, cached_tokens, now)
        return []

    def on_blocks_stored(self, worker: int, ids: list[int], parent: int | None, now: float) -> None:
        for group in self._find_groups(worker):
            group.policy.on_blocks_stored(group.numbers.index(worker), ids, parent, now)

    def on_blocks_removed(self, worker: int, ids: list[int], now: float) -> None:
        for group in self._find_groups(worker):
            group.policy.on_blocks_removed(group.numbers.index(worker), ids, now)

    def _find_groups(self, worker: int) -> list[WorkerGroup]:
        return [group for group in (self.prefill_group, self.decode_group) if worker in group.numbers]


class DynamoConditional(TwoLegs):
    """NVIDIA Dynamo's conditional disaggregation (docs: "Conditional Disaggregation"), with its defaults.

    The decode worker computes the prompt itself if it lacks less than 2,048 tokens and less than .7 of the prompt.
    """

    UNCACHED_TOKENS = 2048
    UNCACHED_SHARE = 0.7

    def is_split(self, uncached_tokens: int, prompt_tokens: int) -> bool:
        is_short = uncached_tokens < self.UNCACHED_TOKENS
        is_mostly_cached = uncached_tokens < self.UNCACHED_SHARE * prompt_tokens
        return not (is_short and is_mostly_cached)


class LlmDThreshold(TwoLegs):
    """llm-d's prefix-based decider: the decode worker computes the prompt itself if it lacks less than a threshold.

    The threshold (`nonCachedTokens`) is for users to set.
    """

    UNCACHED_TOKENS = 512

    def is_split(self, uncached_tokens: int, prompt_tokens: int) -> bool:
        return uncached_tokens >= self.UNCACHED_TOKENS
