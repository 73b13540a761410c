"""Prefill apart from decode: workers that do both, workers with a role, and who decides which leg goes where.

Conversations begin at random times, and their turns follow each other. A turn's prompt is the last prompt, its answer
and a new question. Every scheme plays the same requests.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from router.decide.config import CoreConfig
from router.decide.messages import TransferKind
from routing_sim import peers, two_legs
from routing_sim.fleet_router import KV_BYTES_PER_TOKEN, FleetRouter
from routing_sim.runs import score
from simulation.cluster import Cluster, ClusterConfig, Router, WorkerConfig
from simulation.engine import EngineLimits
from simulation.steps import StepTimes
from simulation.transfers import LinkTimes
from simulation.workload import SimRequest, Workload

BLOCK_TOKENS = 128
CACHE_BLOCKS = 4000
TRANSFER_GB_S = 25.0
PROMPT_TOKENS_MIN = 50
QUESTION_TOKENS = 200
GOES_ON = 0.6
"""Share of the turns after which another one follows."""
THINK_S = 5.0


@dataclass(frozen=True, slots=True)
class Conversations:
    """Means of conversations of one kind: their first prompts and their answers. The lengths are exponential."""

    share: float
    """Share of all conversations."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Conversations and the requests a second that they send for each worker."""

    name: str
    conversations: tuple[Conversations, ...]
    requests_per_s: float


DECODE_BOUND = (Conversations(1.0, 1000, 800),)
MIXED = (Conversations(0.8, 1000, 500), Conversations(0.2, 16_000, 200))
TRAFFICS = (
    Traffic("decode-bound, half load", DECODE_BOUND, 2.5),
    Traffic("decode-bound, high load", DECODE_BOUND, 5.0),
    Traffic("mixed, half load", MIXED, 1.5),
    Traffic("mixed, high load", MIXED, 3.0),
)
PREFILL_SHARES = (1 / 8, 2 / 8, 3 / 8, 4 / 8)
"""Shares of a fleet's workers that compute prompts only."""

EQUAL: dict[str, Callable[[], Router]] = {
    "dynamo": lambda: peers.Dynamo(),
    "lmetric": lambda: peers.LMetric(),
    "llm_d": lambda: peers.LlmD(),
    "blockcast": lambda: FleetRouter(CoreConfig(), transfer_kinds=frozenset()),
    "blockcast, any role": lambda: FleetRouter(CoreConfig(), transfer_kinds=frozenset({TransferKind.PREFILL})),
}
"""Schemes for workers that all do both."""
SPLIT: dict[str, Callable[[], Router]] = {
    "smg, vllm-router": lambda: two_legs.TwoLegs(peers.SglangTree(), peers.PowerOfTwo()),
    "dynamo": lambda: two_legs.DynamoConditional(peers.Dynamo(), peers.Dynamo()),
    "llm_d": lambda: two_legs.LlmDThreshold(peers.LlmD(), peers.LlmD()),
    "blockcast": EQUAL["blockcast, any role"],
}
"""Schemes for workers with roles."""

COLUMNS = {
    "hit": ("hit", "{:.2f}"), "TTFT s": ("ttft_mean", "{:.3f}"), "TTFT p99": ("ttft_p99", "{:.2f}"),
    "ms a token": ("tpot_mean_ms", "{:.1f}"), "p99": ("tpot_p99_ms", "{:.1f}"), "E2E s": ("e2e", "{:.2f}"),
    "moved": ("moved", "{:.2f}"),
}  # fmt: skip


def generate_conversations(traffic: Traffic, workers: int, count: int, seed: int) -> Workload:
    """Generate `count` requests of conversations."""
    rng = random.Random(seed)
    conversations_per_s = traffic.requests_per_s * workers * (1.0 - GOES_ON)
    kinds, shares = traffic.conversations, [kind.share for kind in traffic.conversations]
    requests: list[SimRequest] = []
    new_block_ids, arrival_s, session = itertools.count(1), 0.0, 0
    while len(requests) < count:
        [kind] = rng.choices(kinds, shares)
        arrival_s += rng.expovariate(conversations_per_s)
        session += 1
        prompt_tokens = PROMPT_TOKENS_MIN + round(rng.expovariate(1.0 / kind.prompt_tokens))
        block_ids: list[int] = []
        previous_index = None
        while True:
            output_tokens = 2 + round(rng.expovariate(1.0 / kind.output_tokens))
            missing_blocks = math.ceil(prompt_tokens / BLOCK_TOKENS) - len(block_ids)
            block_ids = [*block_ids, *itertools.islice(new_block_ids, missing_blocks)]
            time_s = arrival_s if previous_index is None else rng.expovariate(1.0 / THINK_S)
            request = SimRequest(
                len(requests), session, time_s, prompt_tokens, output_tokens, block_ids, previous_index, BLOCK_TOKENS
            )
            known_ids = block_ids[: request.full_block_count]
            # The answer fills the prompt's last block, which so gets another id. Its last token is never computed.
            answer_blocks = (prompt_tokens + output_tokens - 1) // BLOCK_TOKENS - len(known_ids)
            request.final_block_ids = [*known_ids, *itertools.islice(new_block_ids, answer_blocks)]
            requests.append(request)
            if rng.random() >= GOES_ON:
                break
            previous_index = request.index
            block_ids = request.final_block_ids
            prompt_tokens += output_tokens + 1 + round(rng.expovariate(1.0 / QUESTION_TOKENS))
    return Workload(traffic.name, requests, f"{len(requests)} requests of {session} conversations, seed {seed}")


@dataclass(frozen=True, slots=True)
class Run:
    """One scheme before one fleet. The first `prefill_workers` compute prompts only, the others answers only."""

    traffic: Traffic
    workers: int
    scheme: str
    prefill_workers: int
    """0: all workers do both."""
    request_count: int
    seed: int

    def __str__(self) -> str:
        if not self.prefill_workers:
            return self.scheme
        return f"{self.scheme} {self.prefill_workers}:{self.workers - self.prefill_workers}"


def list_schemes(workers: int) -> list[tuple[str, int]]:
    """Return each scheme with its number of workers that compute prompts only."""
    counts = sorted({max(round(share * workers), 1) for share in PREFILL_SHARES})
    return [(scheme, 0) for scheme in EQUAL] + [(scheme, count) for count in counts for scheme in SPLIT]


def play(run: Run) -> dict[str, Any]:
    """Return the figures of one run."""
    workload = generate_conversations(run.traffic, run.workers, run.request_count, run.seed)
    roles = [frozenset[str]()] * run.workers
    make_router = EQUAL.get(run.scheme)
    if run.prefill_workers:
        roles = [frozenset({"prefill" if i < run.prefill_workers else "decode"}) for i in range(run.workers)]
        make_router = SPLIT[run.scheme]
    assert make_router is not None
    config = ClusterConfig(
        [WorkerConfig(StepTimes(), CACHE_BLOCKS, roles=worker_roles) for worker_roles in roles],
        limits=EngineLimits(is_preemptive=True),
        link_times=LinkTimes(TRANSFER_GB_S * 1e9 / KV_BYTES_PER_TOKEN),
    )
    result = Cluster(config, workload, [make_router()]).run()
    figures = asdict(score(result, workload, None))
    return {**figures, "tpot_mean_ms": 1e3 * figures["tpot_mean"], "tpot_p99_ms": 1e3 * figures["tpot_p99"]}
