"""What a process asks of Python: nobody waits for a look of the garbage collector."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLLECTOR = """
import gc
from router.app.system import limit_garbage_collection
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
