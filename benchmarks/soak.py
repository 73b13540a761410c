#!/usr/bin/env python3
"""Does the router's memory stay flat? Mixed load on mock workers for as long as asked, resident memory every interval.

    python benchmarks/soak.py --minutes 30 [--rate 300] [--json FILE]

Full function: kv policy, index fed by events that store and remove blocks all the time, tokenising, metrics, a
dashboard that is looked at. The load: complete answers and streams over conversations that never end being new, clients
that leave in the middle, requests that are refused, connections that come and go.

The cache of conversations and what the router remembers of requests (little here) are filled first. So what grows
afterwards is a leak and not a cache that fills. Exit status 1 if memory grew by over 1 % in the second half.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import click
from harness.baseline_routers import router_with_mock_workers
from harness.conversations import CHAT, ChatRequests, make_question
from harness.fault_run import FaultRun
from harness.figures import describe_machine, format_facts, resident_bytes
from harness.load import Client, post_request
from harness.programs import ADMIN_KEY, read_metric

from engine.tiny.tokenizer import write_tokenizer

IN_FLIGHT_MAX = 200
ROUTER_FLAGS = ("--log-level=error", "--set=miss_reasons.memory_mb=1", "--set=miss_reasons.requests_max=256")
WATCH = b"GET /dashboard/updates HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\n\r\n" % ADMIN_KEY.encode()


class Soak:
    """One running router and what is done to it."""

    def __init__(self, url: str, pid: int, rate: float) -> None:
        self._url, self._pid, self._rate = url, pid, rate
        self._bodies = ChatRequests()
        self._rng = random.Random(1)
        self.outcomes: Counter[str] = Counter()
        self.samples: list[tuple[float, float, float, float]] = []
        """(minutes, resident MiB, MiB of cached conversations, blocks in the index)."""

    def _sample(self, minute: float = 0.0) -> tuple[float, float, float, float]:
        cache_mib = read_metric(self._url, "blockcast_router_conversation_cache_bytes") / 2**20
        blocks = read_metric(self._url, "blockcast_router_index_entries")
        return round(minute, 2), round(resident_bytes(self._pid) / 2**20, 1), round(cache_mib, 1), blocks

    async def fill(self) -> None:
        """Send new turns, hundreds a request and such as the load has, until the cache of encoded text was filled and
        all of it replaced once."""
        cache_mib, before_mib, turn, full_at = 0.0, -1.0, 0, None
        async with Client(self._url) as client:
            while full_at is None or turn < 2 * full_at:
                for _ in range(50):
                    numbers = range(turn, turn := turn + 200)
                    talk = [make_question(10**6 + i) for i in numbers]
                    (await client.send(post_request(CHAT, {"model": "mock", "messages": talk}))).raise_for_status()
                before_mib, cache_mib = cache_mib, (await asyncio.to_thread(self._sample))[2]
                if full_at is None and cache_mib < before_mib + 0.1:
                    full_at = turn
        _, resident, cache_mib, _ = self._sample()
        print(f"filled with {turn} turns: {cache_mib:.1f} MiB of cached conversations, {resident:.1f} MiB resident")

    async def run(self, minutes: float, interval_s: float) -> None:
        start_s = time.monotonic()
        next_sample_s = start_s
        tasks: set[asyncio.Task[None]] = set()
        async with Client(self._url, timeout_s=30) as client:
            watching = asyncio.create_task(self._watch())
            while (now := time.monotonic()) < start_s + 60 * minutes:
                if now >= next_sample_s:
                    next_sample_s += interval_s
                    self.samples.append(await asyncio.to_thread(self._sample, (now - start_s) / 60))
                    minute, resident, cache_mib, blocks = self.samples[-1]
                    print(f"{minute:6.1f} min {resident:8.1f} MiB  text {cache_mib:.1f} MiB  index {blocks:.0f}  "
                          f"{dict(self.outcomes)}", flush=True)  # fmt: skip
                if len(tasks) < IN_FLIGHT_MAX:
                    task = asyncio.create_task(self._send_request(client))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(self._rng.expovariate(self._rate))
            await asyncio.gather(*tasks)
            watching.cancel()

    async def _send_request(self, client: Client) -> None:
        kind = self._rng.choices(["whole", "stream", "leave", "wrong", "fresh"], [50, 25, 10, 5, 10])[0]
        size = self._rng.choices(["0.2k", "2k", "16k"], [3, 6, 1])[0]
        streams: dict[str, Any] = {"stream": True} if kind in ("stream", "leave") else {}
        (request,) = self._bodies.make(size, 1, **streams)
        if kind == "wrong":
            body = request.partition(b"\r\n\r\n")[2]
            wrongs = [b"{", body.replace(b'"mock"', b'"other"'), b'{"model":"mock","prompt":5}']
            request = post_request(CHAT, self._rng.choice(wrongs))
        answer = await client.send(request, disconnects_early=kind == "leave", new_connection=kind == "fresh")
        self.outcomes[f"{kind} {answer.status} {answer.error}".strip()] += 1

    async def _watch(self) -> None:
        """A dashboard that is looked at."""
        async with Client(self._url) as client:
            while True:
                await client.send(WATCH, timeout_s=60)
                await asyncio.sleep(1)


@click.command(help=__doc__)
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--rate", default=300.0, show_default=True, help="Requests a second.")
@click.option("--checkout", is_flag=True, help="Measure the checkout instead of an installed package.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(minutes: float, rate: float, checkout: bool, json_file: Path | None) -> None:
    trial = FaultRun("soak")
    write_tokenizer(trial.folder, 4096, 1 << 20)
    mocks = [["--churn", "50", "--chunks", "16"]] * 2
    print(format_facts(describe_machine()))
    with router_with_mock_workers(trial.folder, checkout, mocks, *ROUTER_FLAGS) as (router, url, _):
        trial.watch_program(router)
        soak = Soak(url, router.pid, rate)
        asyncio.run(soak.fill())
        asyncio.run(soak.run(minutes, max(5.0, 60 * minutes / 30)))
        trial.check_logs("all of it")
    half = soak.samples[len(soak.samples) // 2 :]
    growth = half[-1][1] - half[0][1]
    print(f"second half: {half[0][1]:.1f} -> {half[-1][1]:.1f} MiB; {sum(soak.outcomes.values())} requests")
    if growth > 0.01 * half[0][1]:
        trial.report_fault("memory", f"grew by {growth:.1f} MiB in the second half")
    trial.close()
    trial.finish({"samples_min_mib_text_blocks": soak.samples, "outcomes": soak.outcomes}, json_file)


if __name__ == "__main__":
    main()
