"""Somebody who does nothing wrong: small requests at a steady pace, to the router and beside it straight to a worker.

    python -m harness.victim ROUTER_URL WORKER_URL FILE

A process of its own, so that nothing the attacker computes is taken for a delay. A line of FILE is
[when it was due, milliseconds until the whole answer, status, "router" or "direct"]. What the direct ones show is the
machine; what the others show beyond it is the router. A request counts from the moment it was due: who is held up is
not asked less often. It comes from an address of its own: the attackers are somebody else.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from harness.load import Client, post

EVERY_S = 0.02
SOURCE = "127.0.0.2"
OUTSTANDING_MAX = 200
"""More are counted as lost at once, with status -1."""


class Victim:
    def __init__(self, name: str, url: str, lines: list[Any]) -> None:
        self._name, self._lines = name, lines
        self._client = Client(url, patience_s=120, source=SOURCE)
        self._outstanding = 0
        self._count = 0

    async def ask(self, due_s: float) -> None:
        self._count += 1
        if self._outstanding >= OUTSTANDING_MAX:
            self._lines.append([due_s, 0.0, -1, self._name])
            return
        self._outstanding += 1
        talk = [{"role": "user", "content": f"Question {self._count}: how long does this take?"}]
        answer = await self._client.ask(post("/v1/chat/completions", {"model": "mock", "messages": talk}))
        self._outstanding -= 1
        status = answer.status if not answer.error else 0
        self._lines.append([due_s, round(1e3 * (answer.end_s - due_s), 2), status, self._name])


async def main(router: str, worker: str, file: Path) -> None:
    lines: list[Any] = []
    victims = [Victim("router", router, lines), Victim("direct", worker, lines)]
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
            if len(lines) >= 20:
                out.writelines(json.dumps(line) + "\n" for line in lines)
                out.flush()
                lines.clear()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
