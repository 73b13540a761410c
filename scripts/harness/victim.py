"""Somebody who does nothing wrong: small requests at a steady pace, to the router and beside it straight to a worker.

    python -m harness.victim ROUTER_URL WORKER_URL FILE ROUTER_PID

A process of its own, so that nothing the attacker computes is taken for a delay. A line of FILE is
[when it was due, milliseconds until the whole answer, status, "router" or "direct", milliseconds that the router's main
thread ran meanwhile, milliseconds that it could have run and was given no CPU]. What the direct ones show is the
machine; what the others show beyond it is the router: where its thread ran all the while it was work that others had
brought, where it waited for a CPU it was the machine. A request counts from the moment it was due: who is held up is
not asked less often. It comes from an address of its own: the attackers are somebody else.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

from harness.load import Client, post

EVERY_S, WATCH_S = 0.02, 0.004
SOURCE = "127.0.0.2"
OUTSTANDING_MAX = 200
"""More are counted as lost at once, with status -1."""


class Watched:
    """What the main thread of a process does, looked at in a thread of our own every few milliseconds (Linux)."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/task/{pid}/schedstat")
        self._at_s: list[float] = []
        self._seen: list[tuple[int, int]] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            ran_ns, waited_ns, _ = map(int, self._path.read_text().split())
            self._seen.append((ran_ns, waited_ns))
            self._at_s.append(time.monotonic())
            time.sleep(WATCH_S)

    def between(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """(milliseconds that it ran, that it waited for a CPU), as near as it was looked at."""
        count = len(self._at_s)
        if not count:
            return 0.0, 0.0
        first = max(bisect_right(self._at_s, begin_s, 0, count) - 1, 0)
        last = min(bisect_left(self._at_s, end_s, 0, count), count - 1)
        ran, waited = (round((b - a) / 1e6, 1) for a, b in zip(self._seen[first], self._seen[last]))
        return ran, waited


class Victim:
    def __init__(self, name: str, url: str, lines: list[Any], watched: Watched) -> None:
        self._name, self._lines, self._watched = name, lines, watched
        self._client = Client(url, patience_s=120, source=SOURCE)
        self._outstanding = 0
        self._count = 0

    async def ask(self, due_s: float) -> None:
        self._count += 1
        if self._outstanding >= OUTSTANDING_MAX:
            self._lines.append([due_s, 0.0, -1, self._name, 0.0, 0.0])
            return
        self._outstanding += 1
        talk = [{"role": "user", "content": f"Question {self._count}: how long does this take?"}]
        answer = await self._client.ask(post("/v1/chat/completions", {"model": "mock", "messages": talk}))
        self._outstanding -= 1
        status = answer.status if not answer.error else 0
        delay_ms = round(1e3 * (answer.end_s - due_s), 2)
        self._lines.append([due_s, delay_ms, status, self._name, *self._watched.between(due_s, answer.end_s)])


async def main(router: str, worker: str, file: Path, pid: int) -> None:
    lines: list[Any] = []
    watched = Watched(pid)
    victims = [Victim("router", router, lines, watched), Victim("direct", worker, lines, watched)]
    tasks: set[asyncio.Task[None]] = set()
    due_s = time.monotonic()
    with file.open("a") as out:
        while True:
            due_s += EVERY_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            for victim in victims:
                task = asyncio.create_task(victim.ask(due_s))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if lines and len(lines) >= 20:
                out.writelines(json.dumps(line) + "\n" for line in lines)
                out.flush()
                lines.clear()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
