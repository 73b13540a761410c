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

from harness.load import Client, post_request

INTERVAL_S = 0.02
SOURCE_ADDRESS = "127.0.0.2"
PENDING_MAX = 200
"""More are counted as lost at once, with status -1."""


class Victim:
    def __init__(self, name: str, url: str, lines: list[Any]) -> None:
        self._name, self._rows = name, lines
        self._client = Client(url, timeout_s=120, source=SOURCE_ADDRESS)
        self._pending_count = 0
        self._request_count = 0

    async def send_request(self, due_s: float) -> None:
        self._request_count += 1
        if self._pending_count >= PENDING_MAX:
            self._rows.append([due_s, 0.0, -1, self._name])
            return
        self._pending_count += 1
        messages = [{"role": "user", "content": f"Question {self._request_count}: how long does this take?"}]
        response = await self._client.send(
            post_request("/v1/chat/completions", {"model": "mock", "messages": messages})
        )
        self._pending_count -= 1
        status = response.status if not response.error else 0
        self._rows.append([due_s, round(1e3 * (response.end_s - due_s), 2), status, self._name])


async def main(router: str, worker: str, file: Path) -> None:
    lines: list[Any] = []
    victims = [Victim("router", router, lines), Victim("direct", worker, lines)]
    tasks: set[asyncio.Task[None]] = set()
    due_s = time.monotonic()
    with file.open("a") as output:
        while True:
            due_s += INTERVAL_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            for victim in victims:
                task = asyncio.create_task(victim.send_request(due_s))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if len(lines) >= 20:
                output.writelines(json.dumps(line) + "\n" for line in lines)
                output.flush()
                lines.clear()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
