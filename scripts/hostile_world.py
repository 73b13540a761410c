"""What scripts/hostile attacks: a router before two mock workers, the victim beside the attacks, the books about it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from harness.figures import rank, resident_tree_mib
from harness.load import Client, post
from harness.peers import before_mocks
from harness.programs import ROOT, Program, await_true, call, free_port, metric
from harness.workers import BLOCK, FakeWorker, Publisher, removed, stored

T = TypeVar("T")
CLOSED_S_MAX = 10.0
"""How long a connection may stay open after all was said."""
QUIET_S = 0.5
"""Where more bytes would be needed to make a request: how long they are not sent before the end of sending is."""
ENDED, AT_EOF, STAYS_OPEN = "ended", "at EOF", "stays open"
TABLES = ("--segment-cache-mb", "1", "--known-bodies-mb", "1", "--set", "turns.memory_mb=1",
          "--set", "turns.requests_max=256", "--set", "sessions_max=1000")  # fmt: skip
"""What the router remembers of whoever asks, bounded so that all of it is full before the first attack: memory that
grows beside them is then no memory of theirs or the victim's."""
TALKS = 5_000
BLOCKS_HELD, BLOCKS_GONE = 1 << 16, 9 << 15
"""More than the mocks hold at a time, or an attack stores, and than are remembered of those that are held no more
(kDepartedMax)."""
NICE = 10
"""Of what attacks: it would be on other machines, and makes bodies of 60 MB here with the router's cores."""
BESIDE_S = 0.1
NOBODY = (0.0, 0.0, 0, "", 0.0, 0.0)
TRACEBACK = "Traceback (most recent call last)"
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")


class World:
    """Use as `async with`."""

    def __init__(self, *, match: str, short: bool, checkout: bool, seconds: float, seed: int) -> None:
        self.match, self.short, self.rng = match, short, random.Random(seed)
        self._checkout, self._end_s = checkout, time.monotonic() + seconds
        self._folder = Path(tempfile.mkdtemp(prefix="blockcast-hostile-"))
        self._stack = ExitStack()
        self._log_at = 0
        self._samples: list[tuple[float, float]] = []
        """(when, MiB)."""
        self.peer_port, self.dump_port, self.otlp_port = free_port(), free_port(), free_port()
        self.hand_over = self._folder / "hand-over"
        self.attacks: list[dict[str, Any]] = []
        self.faults: list[dict[str, str]] = []

    async def __aenter__(self) -> World:
        from engine.tiny.tokenizer import write_tokenizer

        write_tokenizer(self._folder, 4096, 8192)
        flags = ["--request-timeout", "2", "--connect-timeout", "1", "--first-byte-timeout", "3", "--idle-timeout", "3",
                 "--total-timeout", "20", "--health-interval", "0.5", "--peer", f"tcp://127.0.0.1:{self.peer_port}",
                 "--snapshot-from", f"http://127.0.0.1:{self.dump_port}",
                 "--hand-over", str(self.hand_over), "--set", "helpers.idle_s=4", *TABLES]  # fmt: skip
        if self._checkout:  # what is installed for this has no collector's packages
            with contextlib.suppress(ImportError):
                importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
                flags += ["--otlp-endpoint", f"http://127.0.0.1:{self.otlp_port}"]
        mocks = [["--max-model-len", "8192", "--churn", "10"]] * 2
        try:
            self.router, self.url, urls = self._stack.enter_context(
                before_mocks(self._folder, self._checkout, mocks, *flags)
            )
            await self._warm()
            await self._grow()
            self._file = self._folder / "victim"
            self._file.touch()
            command = [sys.executable, "-m", "harness.victim", self.url, urls[0], str(self._file), str(self.router.pid)]
            path = {"PYTHONPATH": f"{ROOT}:{ROOT}/scripts"}
            self._victim = self._stack.enter_context(Program(command, self._folder / "victim.log", env=path))
            self._sampling = asyncio.create_task(self._sample())
            await asyncio.sleep(1.0)
            os.nice(NICE)
        except BaseException:
            self._stack.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sampling.cancel()
        await asyncio.to_thread(self._stack.close)
        if not self.faults:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _warm(self) -> None:
        """Until requests like the victim's are answered, and have filled all that is remembered of them."""
        answered = 0
        async with Client(self.url) as client:
            for number in range(10 * TALKS):
                talk = [{"role": "user", "content": f"Question {-number}: how long does this take?"}]
                answer = await client.ask(post("/v1/chat/completions", {"model": "mock", "messages": talk}))
                answered += answer.status == 200
                if answered == (TALKS // 10 if self.short else TALKS):
                    return
                if answer.status != 200:
                    await asyncio.sleep(0.02)
        raise RuntimeError(f"the router does not serve:\n{self.router.text()[-2000:]}")

    async def _grow(self) -> None:
        """The index has held as much as it will beside the mocks, whose caches come and go, and remembers all that it
        may of what went: it is a matter of minutes until theirs have."""
        worker, window = FakeWorker("grown", Publisher()), deque[list[int]]()
        added = await self.add(worker.url)
        if not await self.up(added) or not await asyncio.to_thread(worker.publisher.await_subscriber):
            raise RuntimeError("the router does not hear a sound worker")
        for first in range(0, BLOCKS_GONE // (8 if self.short else 1), 1 << 12):
            names = list(range(first, first + (1 << 12)))
            ids = [part for name in names for part in (name % 4096, name // 4096) * (BLOCK // 2)]  # no two alike
            window.append(names)
            gone = window.popleft() if len(window) > BLOCKS_HELD >> 12 else []
            worker.publisher.publish(stored(names, ids), *([removed(gone)] if gone else []))
            await asyncio.sleep(0.02)
        worker.publisher.publish(removed([name for names in window for name in names]))
        name = f'blockcast_router_events_removed_total{{worker="{added}"}}'
        count = first + (1 << 12)
        if not await asyncio.to_thread(await_true, lambda: metric(self.url, name) >= count, 30.0, 0.2):
            raise RuntimeError(f"of {count} removed blocks the router knows {metric(self.url, name):.0f}")
        await self.remove(added)
        await asyncio.to_thread(worker.close)

    async def _sample(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._samples.append((time.monotonic(), resident_tree_mib(self.router.pid)))
            await asyncio.sleep(0.1)

    # Books ------------------------------------------------------------------------------------------------------------

    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def picked(self, found: Sequence[T], count: int) -> list[T]:
        """All of them, or so many by chance where it is to be short."""
        return self.rng.sample(found, min(count, len(found))) if self.short else list(found)

    @contextlib.asynccontextmanager
    async def attack(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """One attack by name; afterwards the log is read and the victim's delays are kept with it."""
        entry: dict[str, Any] = {"name": name, "note": "", "begun": time.monotonic()}
        self.attacks.append(entry)
        yield entry
        await asyncio.sleep(0.05)
        entry["end"] = time.monotonic()
        self._read_log(name)
        if self.router.process.poll() is not None:
            raise RuntimeError(f"the router ended with {self.router.process.poll()} after {name}; {self.router.log}")

    def fault(self, attack: str, what: str, reproducer: object) -> None:
        self.faults.append({"attack": attack, "what": what[:600], "reproducer": repr(reproducer)[:4000]})

    def _read_log(self, attack: str) -> None:
        text = self.router.text()
        new, self._log_at = text[self._log_at :], len(text)
        for trace in new.split(TRACEBACK)[1:3]:
            lines = [line for line in trace.splitlines()[1:] if line.strip(" ^~")]
            raised = next((i for i, line in enumerate(lines) if not line.startswith(" ")), 0)
            self.fault(attack, f"raised in the router: {' | '.join(lines[max(0, raised - 2) : raised + 1])}", "")

    def memory_mib(self) -> float:
        return round(resident_tree_mib(self.router.pid), 1)

    async def settled_mib(self, before: float) -> float:
        """Once it is back, or after some seconds."""
        end_s = time.monotonic() + (2 if self.short else 10)
        while self.memory_mib() > 1.1 * before and time.monotonic() < end_s:
            await asyncio.sleep(0.2)
        return self.memory_mib()

    def close_books(self, windows: list[dict[str, Any]]) -> None:
        """What the victim saw and what memory was, in each of these windows (`begun`, `end`)."""
        lines = sorted(json.loads(line) for line in self._file.read_text().splitlines())
        for window in [*self.attacks, *windows]:
            end_s = window.get("end", time.monotonic())
            inside = [line for line in lines if window["begun"] <= line[0] <= end_s]
            for name, key in (("router", ""), ("direct", "direct_")):
                answered = [line for line in inside if line[3] == name and line[2] > 0] or [NOBODY]
                delays = [line[1] for line in answered]
                window[f"{key}worst_ms"], window[f"{key}p99_ms"] = max(delays), rank(delays, 0.99)
                worst = max(answered, key=lambda line: line[1])
                if not key:
                    window["beyond_ms"] = max(0.0, *(line[1] - beside_ms(line, lines) for line in answered))
                window |= {} if key else {"ran_ms": worst[4], "waited_ms": worst[5]}
            sizes = [mib for at_s, mib in self._samples if window["begun"] <= at_s <= end_s]
            window["mib_most"] = round(max(sizes, default=0))
            if window in self.attacks and "end" in window:
                statuses = [line[2] for line in inside if line[3] == "router"]
                wrong = [status for status in statuses if status != 200]
                if wrong:
                    what = f"{len(wrong)} of {len(statuses)} requests of the victim got {sorted(set(wrong))}"
                    self.fault(window["name"], what, "")

    # Means ------------------------------------------------------------------------------------------------------------

    async def admin(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        return await asyncio.to_thread(call, self.url + path, body, method, timeout_s=60)

    async def add(self, url: str, **more: Any) -> str:
        """A worker; its id."""
        status, answer = await self.admin("/workers", {"url": url, **more})
        if status != 201:
            raise RuntimeError(f"POST /workers {url} answers {status}: {answer}")
        return url.partition("//")[2]

    async def up(self, worker: str, seconds: float = 20.0) -> bool:
        def is_up() -> bool:
            rows = call(f"{self.url}/workers")[1]["workers"]
            return any(row["worker_id"] == worker and row["state"] == "up" for row in rows)

        return bool(await asyncio.to_thread(await_true, is_up, seconds, 0.1))

    async def remove(self, *workers: str) -> None:
        for worker in workers:
            await self.admin(f"/workers/{worker}", method="DELETE")

    async def exchange(self, *pieces: bytes, patience_s: float = QUIET_S) -> tuple[list[int], str]:
        """The statuses that come back for these reads, and when the router ended the connection: ENDED by itself,
        AT_EOF when nothing more was to come, or STAYS_OPEN."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = b""

        async def read(seconds: float) -> bool:
            async def all_of_it() -> None:
                nonlocal data
                while received := await reader.read(1 << 16):
                    data += received

            try:
                await asyncio.wait_for(all_of_it(), seconds)
            except asyncio.TimeoutError:
                return False
            except ConnectionError:
                pass
            return True

        with contextlib.suppress(ConnectionError):
            for i, piece in enumerate(pieces):
                if writer.is_closing():
                    break
                writer.write(piece)
                if i < 50:
                    await writer.drain()
                    await asyncio.sleep(0.001)
        end = ENDED if await read(patience_s) else STAYS_OPEN
        if end != ENDED:
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()
            end = AT_EOF if await read(CLOSED_S_MAX) else STAYS_OPEN
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return [int(status) for status in _STATUS.findall(data) if status != b"100"], end


def beside_ms(line: Sequence[Any], lines: Sequence[Sequence[Any]]) -> float:
    """The longest delay of who asked a worker directly while this request of the victim waited, or just before it:
    what held that one up held this one up too."""
    first, last = (
        bisect_left(lines, line[0] - BESIDE_S, key=_due),
        bisect_right(lines, line[0] + line[1] / 1e3, key=_due),
    )
    return max((other[1] for other in lines[first:last] if other[3] == "direct"), default=0.0)


def _due(line: Sequence[Any]) -> float:
    due_s: float = line[0]
    return due_s


def named(found: dict[str, Any], world: World, count: int) -> list[tuple[str, Any]]:
    return world.picked([(name, value) for name, value in found.items() if world.match in name], count)
