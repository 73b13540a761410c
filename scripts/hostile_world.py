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
SILENCE_S = 0.5
"""Where more bytes would be needed to make a request: how long they are not sent before the end of sending is."""
ENDED, AT_EOF, STAYS_OPEN = "ended", "at EOF", "stays open"
NICENESS = 10
"""Of what attacks: it would be on other machines, and makes bodies of 60 MB here with the router's cores."""
DIRECT_MARGIN_S = 0.1
NO_REQUEST = (0.0, 0.0, 0, "")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")


class AttackRun(FaultRun):
    """Use as `async with`."""

    def __init__(self, *, name_filter: str, is_short: bool, from_checkout: bool, duration_s: float, seed: int) -> None:
        super().__init__("hostile")
        self.name_filter, self.is_short, self.rng = name_filter, is_short, random.Random(seed)
        self._from_checkout, self._end_s = from_checkout, time.monotonic() + duration_s
        self.peer_port, self.dump_port, self.otlp_port = free_port(), free_port(), free_port()
        self.attacks: list[dict[str, Any]] = []

    async def __aenter__(self) -> AttackRun:
        from engine.tiny.tokenizer import write_tokenizer

        write_tokenizer(self.folder, 4096, 8192)
        flags = ["--request-timeout", "2", "--connect-timeout", "1", "--first-byte-timeout", "3", "--idle-timeout", "3",
                 "--total-timeout", "20", "--health-interval", "0.5", "--peer", f"tcp://127.0.0.1:{self.peer_port}",
                 "--snapshot-from", f"http://127.0.0.1:{self.dump_port}"]  # fmt: skip
        if self._from_checkout:  # what is installed for this has no collector's packages
            with contextlib.suppress(ImportError):
                importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
                flags += ["--otlp-endpoint", f"http://127.0.0.1:{self.otlp_port}"]
        mocks = [["--max-model-len", "8192", "--churn", "10"]] * 2
        try:
            router, self.url, urls = self.exit_stack.enter_context(
                router_with_mock_workers(self.folder, self._from_checkout, mocks, *flags)
            )
            self.watch_program(router)
            await self._warm_up()
            self._victim_file = self.folder / "victim.jsonl"
            self._victim_file.touch()
            command = [sys.executable, "-m", "harness.victim", self.url, urls[0], str(self._victim_file)]
            path = {"PYTHONPATH": f"{ROOT}:{ROOT}/scripts"}
            self.exit_stack.enter_context(Program(command, self.folder / "victim.log", env=path))
            await asyncio.sleep(1.0)
            os.nice(NICENESS)
        except BaseException:
            self.exit_stack.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def _warm_up(self) -> None:
        """Until requests like the victim's are answered."""
        ok_count = 0
        async with Client(self.url) as client:
            for number in range(2_000):
                messages = [{"role": "user", "content": f"Question {-number}: how long does this take?"}]
                response = await client.send(
                    post_request("/v1/chat/completions", {"model": "mock", "messages": messages})
                )
                ok_count += response.status == 200
                if ok_count == 200:
                    return
                if response.status != 200:
                    await asyncio.sleep(0.02)
        raise RuntimeError(f"the router does not serve; logs in {self.folder}")

    # Books ------------------------------------------------------------------------------------------------------------

    def remaining_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def select(self, candidates: Sequence[T], count: int) -> list[T]:
        """All of them, or so many by chance where it is to be short."""
        return self.rng.sample(candidates, min(count, len(candidates))) if self.is_short else list(candidates)

    @contextlib.asynccontextmanager
    async def attack(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """One attack by name; afterwards the log is read and the victim's delays are kept with it."""
        entry: dict[str, Any] = {"name": name, "note": "", "start_s": time.monotonic()}
        self.attacks.append(entry)
        yield entry
        await asyncio.sleep(0.05)
        entry["end"] = time.monotonic()
        self.check_logs(name)

    def summarize_delays(self, windows: list[dict[str, Any]]) -> None:
        """What the victim saw in each attack and each of these windows (`start_s`, `end`)."""
        lines = sorted(json.loads(line) for line in self._victim_file.read_text().splitlines())
        for window in [*self.attacks, *windows]:
            end_s = window.get("end", time.monotonic())
            window_lines = [line for line in lines if window["start_s"] <= line[0] <= end_s]
            for name, key in (("router", ""), ("direct", "direct_")):
                answered_lines = [line for line in window_lines if line[3] == name and line[2] > 0] or [NO_REQUEST]
                delays = [line[1] for line in answered_lines]
                window[f"{key}worst_ms"], window[f"{key}p99_ms"] = max(delays), percentile(delays, 0.99)
                if not key:
                    window["beyond_ms"] = max(0.0, *(line[1] - direct_delay_ms(line, lines) for line in answered_lines))
            is_attack = window in self.attacks and "end" in window
            statuses = [line[2] for line in window_lines if line[3] == "router"] if is_attack else []
            if bad_statuses := [status for status in statuses if status != 200]:
                description = (
                    f"{len(bad_statuses)} of {len(statuses)} requests of the victim got {sorted(set(bad_statuses))}"
                )
                self.report_fault(window["name"], description)

    # Means ------------------------------------------------------------------------------------------------------------

    async def call_admin(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        return await asyncio.to_thread(request_json, self.url + path, body, method, timeout_s=60)

    async def add_worker(self, url: str, **fields: Any) -> str:
        """A worker; its id."""
        status, response = await self.call_admin("/workers", {"url": url, **fields})
        if status != 201:
            raise RuntimeError(f"POST /workers {url} answers {status}: {response}")
        return url.partition("//")[2]

    async def wait_until_up(self, worker: str, timeout_s: float = 20.0) -> bool:
        def is_up() -> bool:
            rows = request_json(f"{self.url}/workers")[1]["workers"]
            return any(row["worker_id"] == worker and row["state"] == "up" for row in rows)

        return bool(await asyncio.to_thread(wait_until, is_up, timeout_s, 0.1))

    async def remove_workers(self, *workers: str) -> None:
        for worker in workers:
            await self.call_admin(f"/workers/{worker}", method="DELETE")

    async def send_raw(self, *parts: bytes, timeout_s: float = SILENCE_S) -> tuple[list[int], str]:
        """The statuses that come back for these reads, and when the router ended the connection: ENDED by itself,
        AT_EOF when nothing more was to come, or STAYS_OPEN."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = bytearray()

        async def read(timeout_s: float) -> bool:
            async def read_all() -> None:
                while chunk := await reader.read(1 << 16):
                    data.extend(chunk)

            try:
                await asyncio.wait_for(read_all(), timeout_s)
            except asyncio.TimeoutError:
                return False
            except ConnectionError:
                pass
            return True

        with contextlib.suppress(ConnectionError):
            for i, piece in enumerate(parts):
                if writer.is_closing():
                    break
                writer.write(piece)
                if i < 50:
                    await writer.drain()
                    await asyncio.sleep(0.001)
        connection_end = ENDED if await read(timeout_s) else STAYS_OPEN
        if connection_end != ENDED:
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()
            connection_end = AT_EOF if await read(CLOSED_S_MAX) else STAYS_OPEN
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return [int(status) for status in _STATUS.findall(data) if status != b"100"], connection_end


def direct_delay_ms(line: Sequence[Any], lines: Sequence[Sequence[Any]]) -> float:
    """The longest delay of who asked a worker directly while this request of the victim waited, or just before it:
    what held that one up held this one up too."""
    first = bisect_left(lines, line[0] - DIRECT_MARGIN_S, key=_due_s)
    last = bisect_right(lines, line[0] + line[1] / 1e3, key=_due_s)
    return max((direct_line[1] for direct_line in lines[first:last] if direct_line[3] == "direct"), default=0.0)


def _due_s(line: Sequence[Any]) -> float:
    due_s: float = line[0]
    return due_s


def select_attacks(attacks: dict[str, Any], world: AttackRun, count: int) -> list[tuple[str, Any]]:
    return world.select([(name, value) for name, value in attacks.items() if world.name_filter in name], count)
