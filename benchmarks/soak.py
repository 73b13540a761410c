"""Does the router's memory stay flat? Mixed load on mock workers for as long as asked, resident memory every interval.

    python benchmarks/soak.py --minutes 30 [--rate 300] [--json FILE]

Full function: kv policy, index fed by events that store and remove blocks all the time, tokenising, metrics, a
dashboard that is looked at. The load: complete answers and streams over conversations that never end being new, clients
that leave in the middle, requests that are refused, connections that come and go.

The cache of encoded text is filled first, so that what grows afterwards is a leak and not a cache doing its work. Exit
status 1 where memory grew by over 1 % in the second half.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from proxy import Bodies, machine, program, question  # noqa: E402
from proxy_parts.peers import install_ourselves  # noqa: E402

from engine.tiny.tokenizer import write_tokenizer  # noqa: E402


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def gauges(url: str) -> tuple[float, float]:
    """(MiB of encoded text, blocks in the index), as the router says."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        text = page.read().decode()
    found = []
    for name in ("segment_cache_bytes", "index_entries"):
        values = re.findall(rf"^blockcast_router_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        found.append(sum(map(float, values)))
    return found[0] / 2**20, found[1]


class Soak:
    """One running router and what is done to it."""

    def __init__(self, url: str, pid: int, rate: float) -> None:
        self._url = url
        self._pid = pid
        self._rate = rate
        self._bodies = Bodies()
        self._rng = random.Random(1)
        self.outcomes: Counter[str] = Counter()
        self.samples: list[tuple[float, float, float, float]] = []
        """(minutes, resident MiB, MiB of encoded text, blocks in the index)."""

    async def fill(self) -> None:
        """Send new turns, hundreds a request and such as the load has, until the cache of encoded text was filled and
        all of it replaced once."""
        text_mib, before_mib, turn, full_at = 0.0, -1.0, 0, None
        async with aiohttp.ClientSession() as session:
            while full_at is None or turn < 2 * full_at:
                for _ in range(50):
                    numbers = range(turn, turn := turn + 200)
                    talk = [{"role": "user", "content": question(10**6 + i)} for i in numbers]
                    body = {"model": "mock", "messages": talk}
                    async with session.post(f"{self._url}/v1/chat/completions", json=body) as answer:
                        await answer.read()
                before_mib, text_mib = text_mib, (await asyncio.to_thread(gauges, self._url))[0]
                if full_at is None and text_mib < before_mib + 0.1:
                    full_at = turn
        resident = resident_mb(self._pid)
        print(f"filled with {turn} turns: {text_mib:.1f} MiB of encoded text, {resident:.1f} MiB resident")

    async def run(self, minutes: float, interval_s: float) -> None:
        started = time.monotonic()
        end_s = started + 60 * minutes
        next_sample_s = started
        tasks: set[asyncio.Task[None]] = set()
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=256)) as session:
            watching = asyncio.create_task(self._watch())
            while (now := time.monotonic()) < end_s:
                if now >= next_sample_s:
                    next_sample_s += interval_s
                    text_mib, blocks = await asyncio.to_thread(gauges, self._url)
                    minute = (now - started) / 60
                    self.samples.append((round(minute, 2), round(resident_mb(self._pid), 1), text_mib, blocks))
                    print(
                        f"{minute:6.1f} min {self.samples[-1][1]:8.1f} MiB  text {text_mib:.1f} MiB  "
                        f"index {blocks:.0f}  {dict(self.outcomes)}",
                        flush=True,
                    )
                if len(tasks) < 200:
                    task = asyncio.create_task(self._one(session))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(self._rng.expovariate(self._rate))
            await asyncio.gather(*tasks, return_exceptions=True)
            watching.cancel()

    async def _one(self, session: aiohttp.ClientSession) -> None:
        kind = self._rng.choices(["whole", "stream", "leave", "wrong", "fresh"], [50, 25, 10, 5, 10])[0]
        size = self._rng.choices(["0.2k", "2k", "16k"], [3, 6, 1])[0]
        (request,) = self._bodies.make(size, 1, stream=kind in ("stream", "leave"))
        body = request.partition(b"\r\n\r\n")[2]
        if kind == "wrong":
            body = self._rng.choice([b"{", body.replace(b'"mock"', b'"other"'), b'{"model":"mock","prompt":5}'])
        headers = {"Content-Type": "application/json"}
        if kind == "fresh":
            headers["Connection"] = "close"
        try:
            async with session.post(f"{self._url}/v1/chat/completions", data=body, headers=headers) as answer:
                if kind == "leave":
                    await answer.content.read(100)
                    answer.close()
                else:
                    await answer.read()
                self.outcomes[f"{kind} {answer.status}"] += 1
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            self.outcomes[f"{kind} {type(error).__name__}"] += 1

    async def _watch(self) -> None:
        """A dashboard that is looked at, reloaded every minute."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                    async with session.get(f"{self._url}/dashboard/events") as stream:
                        async for _ in stream.content.iter_any():
                            pass


@click.command(help=__doc__)
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--rate", default=300.0, show_default=True, help="Requests a second.")
@click.option("--checkout", is_flag=True, help="Measure the checkout, interpreted, instead of an installed package.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(minutes: float, rate: float, checkout: bool, json_file: Path | None) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_tokenizer(folder, 4096, 1 << 20)
        mock = [sys.executable, str(Path(__file__).parent / "proxy_parts/mock.py"), "--model", str(folder)]
        churn = ["--churn", "50", "--chunks", "16"]
        urls = []
        for _ in range(2):
            _, port = stack.enter_context(program([*mock, *churn], r"^(\d+)$"))
            urls.append(f"http://127.0.0.1:{port}")
        own = [sys.executable, "-m", "router"] if checkout else [str(install_ourselves(ROOT))]
        command = [*own, "run", *urls, "--port", "0", "--log-level", "error"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)} if checkout else None
        pid, port = stack.enter_context(program(command, r"listening on http://127.0.0.1:(\d+)", env))
        print(machine())
        soak = Soak(f"http://127.0.0.1:{port}", pid, rate)
        asyncio.run(soak.fill())
        asyncio.run(soak.run(minutes, max(5.0, 60 * minutes / 30)))
    half = soak.samples[len(soak.samples) // 2 :]
    growth = half[-1][1] - half[0][1] if len(half) > 1 else 0.0
    total = sum(soak.outcomes.values())
    print(f"second half: {half[0][1]:.1f} -> {half[-1][1]:.1f} MiB ({growth:+.1f}); {total} requests")
    if json_file is not None:
        report = {
            "machine": machine(),
            "samples_min_mib_text_blocks": soak.samples,
            "outcomes": dict(soak.outcomes),
            "second_half_growth_mib": growth,
        }
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(growth > 0.01 * half[0][1])


if __name__ == "__main__":
    main()
