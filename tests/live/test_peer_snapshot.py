"""A second router starts late before workers as vLLM's: it takes the first one's knowledge, and the worker confirms it.

The worker is the scripted one of tests/contracts/event_faults.py, whose ring has lost the beginning by the time.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from event_faults import Router
from harness.programs import wait_until
from harness.workers import Publisher, ScriptedWorker, block_stored

pytestmark = pytest.mark.live


@pytest.mark.parametrize("is_restarted", [False, True], ids=["confirmed", "restarted meanwhile"])
def test_a_late_router_asks_the_one_that_was_there(is_restarted: bool) -> None:
    worker = ScriptedWorker("m", Publisher())
    first = Router()
    late = None
    try:
        first.attach([worker])
        assert worker.publisher.await_subscriber()
        rng = random.Random(5)
        prompt = [rng.randrange(1000, 30000) for _ in range(165)]
        body = {"model": "m", "prompt": prompt, "max_tokens": 1}
        names = [rng.getrandbits(64) for _ in range(10)]
        for block in range(10):
            parent = names[block - 1] if block else None
            worker.publisher.publish(block_stored([names[block]], prompt[block * 16 : block * 16 + 16], parent))
        assert wait_until(lambda: first.predict_tokens(body) == {worker.port: 160}, 10)
        worker.publisher.drop_oldest(9)
        if is_restarted:
            first_seen = worker.publisher.seq
            worker.publisher.restart()
            while worker.publisher.seq < first_seen:  # another history of the same length
                worker.publisher.publish(block_stored([rng.getrandbits(64)], [1] * 16), drop=True)
        late = Router("--snapshot-from", first.url)
        late.attach([worker])
        expected = {worker.port: 0 if is_restarted else 160}
        assert wait_until(lambda: late.predict_tokens(body) == expected, 10), late.predict_tokens(body)
        single_router = Router()
        single_router.attach([worker])
        assert single_router.predict_tokens(body) == {worker.port: 0}, "the ring alone does not tell"
        single_router.close()
    finally:
        for router in (first, late):
            if router is not None:
                router.close()
        worker.close()
