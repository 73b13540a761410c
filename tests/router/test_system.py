"""What a process asks of Python and of its listeners: collections of garbage, and the end after signals."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from router.app.shutdown import Shutdown
from router.edge.config import EdgeConfig

ROOT = Path(__file__).resolve().parents[2]
COLLECTOR = """
import gc
from router.app.process_limits import limit_garbage_collection
limit_garbage_collection()
looked = []
gc.callbacks.append(lambda phase, info: looked.append(
    sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)) if phase == "start" else 0))
kept = []
for i in range(500_000):
    kept.append([i])
busy = max(looked)
looked.clear()
while max(looked, default=0) < 500_000:
    looked.clear()
    for _ in range(1000):
        kept.append([])
print(busy, len(kept))
"""


def test_what_the_garbage_collector_looks_at_at_once_is_bounded() -> None:
    """500,000 objects that stay: it looks at some 5,000 of them, and at all once they have become very many."""
    result = subprocess.run([sys.executable, "-c", COLLECTOR], capture_output=True, text=True, cwd=ROOT, check=True)
    busy, object_count = map(int, result.stdout.split())
    assert busy <= 6_000
    assert 1_000_000 < object_count < 3_000_000


def test_a_second_signal_ends_every_wait_of_the_shutdown() -> None:
    calls: list[str] = []
    listener: Any = SimpleNamespace(
        is_busy=True,
        close_after_answers=lambda: calls.append("close after answers"),
        stop_listening=lambda: calls.append("stop"),
        abort=lambda: calls.append("abort"),
    )

    async def scenario() -> None:
        proxy: Any = SimpleNamespace(exchanges={1: None}, now=time.monotonic)
        shutdown = Shutdown(EdgeConfig(unready_s=600.0, shutdown_s=600.0), proxy)
        shutdown._on_signal()
        assert shutdown.end_requested.is_set()
        draining = asyncio.ensure_future(shutdown.drain([listener], None))
        await asyncio.sleep(0.05)
        assert calls == ["close after answers"], "requests are taken until load balancers know"
        shutdown._on_signal()
        await asyncio.wait_for(draining, 10.0)

    asyncio.run(scenario())
    assert calls == ["close after answers", "stop", "abort"]
