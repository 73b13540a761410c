"""What one decision costs: token ids in, worker out, through the real core."""

from __future__ import annotations

import random
import time

from events.codec import encode_batch
from events.types import BlockStored, EventBatch
from router.decide.config import CoreConfig
from router.decide.core import RouterCore
from router.decide.messages import Forward, RouteRequest
from router.decide.workers import ServedModel, WorkerSpec
from router.index import make_index
from router.index.protocol import Scope

TOKENS, WORKERS, BLOCK = 16_384, 64, 16


def measure_decision(*, repeats: int = 200) -> dict[str, float]:
    """Microseconds, medians. Worker i holds the first i / 64 of the prompt; two requests are in flight on each
    worker."""
    rng = random.Random(0)
    index = make_index(seed=1)
    core = RouterCore(index, CoreConfig())
    prompt = [rng.randrange(150_000) for _ in range(TOKENS)]
    for i in range(WORKERS):
        spec = WorkerSpec(f"w{i}", f"http://w{i}", models=(ServedModel("m", "m"),), cache_tokens=1_000_000)
        holder = core.add_worker(spec, 0.0).holders[0]
        blocks = TOKENS // BLOCK * i // WORKERS
        if blocks:
            names: list[int | bytes] = [b + 1 for b in range(blocks)]
            event = BlockStored(names, None, prompt[: blocks * BLOCK], BLOCK, None, "GPU", None)
            index.ingest(holder, encode_batch(EventBatch(0.0, [event])))
    scope = Scope("m")
    for i in range(2 * WORKERS):
        core.route(RouteRequest(f"bg{i}", "m", scope, None, 500 + i, worker=f"w{i % WORKERS}"), 0.0)
        if i >= WORKERS:
            core.first_token(f"bg{i}", 0.1)
    whole, match = [], []
    for i in range(repeats):
        now = 1.0 + i * 1e-3
        request = RouteRequest(f"r{i}", "m", scope, prompt, TOKENS)
        started = time.perf_counter()
        placed = core.route(request, now)
        whole.append(time.perf_counter() - started)
        assert isinstance(placed, Forward)
        core.aborted(f"r{i}", now)
        started = time.perf_counter()
        index.match(prompt, scope)
        match.append(time.perf_counter() - started)
    whole.sort()
    match.sort()
    return {
        "decision_us_16k_tokens": whole[repeats // 2] * 1e6,
        "match_us": match[repeats // 2] * 1e6,
    }
