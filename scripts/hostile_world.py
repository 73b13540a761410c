"""What scripts/hostile attacks: a router before two mock workers, the victim beside the attacks, the books about it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import random
import re
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from harness.baseline_routers import router_with_mock_workers
from harness.fault_run import FaultRun
from harness.figures import percentile
from harness.load import Client, post_request
from harness.programs import ROOT, Program, free_port, request_json, wait_until

T = TypeVar("T")
CLOSED_S_MAX = 10.0
"""How long a connection may stay open after all was said."""
QUIET_S = 0.5
"""Where more bytes would be needed to make a request: how long they are not sent before the end of sending is."""
ENDED, AT_EOF, STAYS_OPEN = "ended", "at EOF", "stays open"
NICE = 10
"""Of what attacks: it would be on other machines, and makes bodies of 60 MB here with the router's cores."""
BESIDE_S = 0.1
NOBODY = (0.0, 0.0, 0, "")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")


class World(FaultRun):
    """Use as `async with`."""

    def __init__(self, *, match: str, short: bool, checkout: bool, seconds: float, seed: int) -> None:
        super().__init__("hostile")
        self.match, self.short, self.rng = match, short, random.Random(seed)
        self._checkout, self._end_s = checkout, time.monotonic() + seconds
        self.peer_port, self.dump_port, self.otlp_port = free_port(), free_port(), free_port()
        self.attacks: list[dict[str, Any]] = []

    async def __aenter__(self) -> World:
        from engine.tiny.tokenizer import write_tokenizer

        write_tokenizer(self.folder, 4096, 8192)
        flags = ["--request-timeout", "2", "--connect-timeout", "1", "--first-byte-timeout", "3", "--idle-timeout", "3",
                 "--total-timeout", "20", "--health-interval", "0.5", "--peer", f"tcp://127.0.0.1:{self.peer_port}",
                 "--snapshot-from", f"http://127.0.0.1:{self.dump_port}"]  # fmt: skip
        if self._checkout:  # what is installed for this has no collector's packages
            with contextlib.suppress(ImportError):
                importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
                flags += ["--otlp-endpoint", f"http://127.0.0.1:{self.otlp_port}"]
        mocks = [["--max-model-len", "8192", "--churn", "10"]] * 2
        try:
            router, self.url, urls = self.exit_stack.enter_context(
                router_with_mock_workers(self.folder, self._checkout, mocks, *flags)
            )
            self.watch_program(router)
            await self._warm()
            self._file = self.folder / "victim.jsonl"
            self._file.touch()
            command = [sys.executable, "-m", "harness.victim", self.url, urls[0], str(self._file)]
            path = {"PYTHONPATH": f"{ROOT}:{ROOT}/scripts"}
            self.exit_stack.enter_context(Program(command, self.folder / "victim.log", env=path))
            await asyncio.sleep(1.0)
            os.nice(NICE)
        except BaseException:
            self.exit_stack.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def _warm(self) -> None:
        """Until requests like the victim's are answered."""
        answered = 0
        async with Client(self.url) as client:
            for number in range(2_000):
                talk = [{"role": "user", "content": f"Question {-number}: how long does this take?"}]
                answer = await client.send(post_request("/v1/chat/completions", {"model": "mock", "messages": talk}))
                answered += answer.status == 200
                if answered == 200:
                    return
                if answer.status != 200:
                    await asyncio.sleep(0.02)
        raise RuntimeError(f"the router does not serve; logs in {self.folder}")

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
        self.check_logs(name)

    def close_books(self, windows: list[dict[str, Any]]) -> None:
        """What the victim saw in each attack and each of these windows (`begun`, `end`)."""
        lines = sorted(json.loads(line) for line in self._file.read_text().splitlines())
        for window in [*self.attacks, *windows]:
            end_s = window.get("end", time.monotonic())
            inside = [line for line in lines if window["begun"] <= line[0] <= end_s]
            for name, key in (("router", ""), ("direct", "direct_")):
                answered = [line for line in inside if line[3] == name and line[2] > 0] or [NOBODY]
                delays = [line[1] for line in answered]
                window[f"{key}worst_ms"], window[f"{key}p99_ms"] = max(delays), percentile(delays, 0.99)
                if not key:
                    window["beyond_ms"] = max(0.0, *(line[1] - beside_ms(line, lines) for line in answered))
            is_attack = window in self.attacks and "end" in window
            statuses = [line[2] for line in inside if line[3] == "router"] if is_attack else []
            if wrong := [status for status in statuses if status != 200]:
                what = f"{len(wrong)} of {len(statuses)} requests of the victim got {sorted(set(wrong))}"
                self.report_fault(window["name"], what)

    # Means ------------------------------------------------------------------------------------------------------------

    async def admin(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        return await asyncio.to_thread(request_json, self.url + path, body, method, timeout_s=60)

    async def add(self, url: str, **more: Any) -> str:
        """A worker; its id."""
        status, answer = await self.admin("/workers", {"url": url, **more})
        if status != 201:
            raise RuntimeError(f"POST /workers {url} answers {status}: {answer}")
        return url.partition("//")[2]

    async def up(self, worker: str, seconds: float = 20.0) -> bool:
        def is_up() -> bool:
            rows = request_json(f"{self.url}/workers")[1]["workers"]
            return any(row["worker_id"] == worker and row["state"] == "up" for row in rows)

        return bool(await asyncio.to_thread(wait_until, is_up, seconds, 0.1))

    async def remove(self, *workers: str) -> None:
        for worker in workers:
            await self.admin(f"/workers/{worker}", method="DELETE")

    async def exchange(self, *pieces: bytes, patience_s: float = QUIET_S) -> tuple[list[int], str]:
        """The statuses that come back for these reads, and when the router ended the connection: ENDED by itself,
        AT_EOF when nothing more was to come, or STAYS_OPEN."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = bytearray()

        async def read(seconds: float) -> bool:
            async def all_of_it() -> None:
                while received := await reader.read(1 << 16):
                    data.extend(received)

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
    first = bisect_left(lines, line[0] - BESIDE_S, key=_due)
    last = bisect_right(lines, line[0] + line[1] / 1e3, key=_due)
    return max((other[1] for other in lines[first:last] if other[3] == "direct"), default=0.0)


def _due(line: Sequence[Any]) -> float:
    due_s: float = line[0]
    return due_s


def named(found: dict[str, Any], world: World, count: int) -> list[tuple[str, Any]]:
    return world.picked([(name, value) for name, value in found.items() if world.match in name], count)
