"""The load generator: raw asyncio clients that keep a number of requests in flight and note every time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its children so far, to the nanosecond, all threads."""
    total = 0.0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
            for child in (task / "children").read_text().split():
                total += cpu_seconds(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass  # a thread or child ended while we looked
    return total


class _Closed(asyncio.Protocol):
    """Sends the next request when the last was answered."""

    def __init__(self, requests: Iterator[bytes], latencies: list[float], done: asyncio.Future[None]) -> None:
        self._requests = requests
        self._latencies = latencies
        self._done = done
        self._buffer = b""
        self._sent = 0.0
        self.transport: Any = None
        self.statuses: dict[bytes, int] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._next()

    def _next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self.transport.close()
            if not self._done.done():
                self._done.set_result(None)
            return
        self._sent = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end >= 0:
            head = buffer[:end].lower()
            at = head.find(b"content-length:")
            if at >= 0:
                length = int(head[at + 15 : at + 26].split(b"\r\n")[0])
                complete = len(buffer) >= end + 4 + length
            else:
                complete = buffer.endswith(b"0\r\n\r\n")
            if complete:
                self._latencies.append(time.perf_counter() - self._sent)
                self.statuses[head[9:12]] = self.statuses.get(head[9:12], 0) + 1
                self._buffer = b""
                self._next()
                return
        self._buffer = buffer

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(f"connection lost in the middle of an answer: {exc}"))


async def closed_loop(port: int, requests: list[bytes], concurrency: int) -> list[float]:
    """Latencies in seconds of all requests, `concurrency` in flight at any time. Raises unless all are answered 200."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    feed = iter(requests)
    protocols = []
    waits = []
    for _ in range(concurrency):
        done: asyncio.Future[None] = loop.create_future()
        _, protocol = await loop.create_connection(lambda d=done: _Closed(feed, latencies, d), "127.0.0.1", port)
        protocols.append(protocol)
        waits.append(done)
    await asyncio.gather(*waits)
    bad = {status for protocol in protocols for status in protocol.statuses} - {b"200"}
    if bad or len(latencies) != len(requests):
        raise RuntimeError(f"{len(requests)} requests, {len(latencies)} answers, statuses besides 200: {bad}")
    return latencies


class _Stream(asyncio.Protocol):
    """Notes how old each chunk is when it arrives: sender and receiver read the same clock."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._done = done
        self._rest = b""
        self.sent_ns = 0
        self.first_ns: int | None = None
        self.lags_ns: list[int] = []
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.sent_ns = time.monotonic_ns()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data = self._rest + data
        at = data.find(b'"t":')
        last = 0
        while at >= 0:
            end = data.find(b"}", at)
            if end < 0:
                break
            if self.first_ns is None:
                self.first_ns = now - self.sent_ns
            self.lags_ns.append(now - int(data[at + 4 : end]))
            last = end
            at = data.find(b'"t":', end)
        self._rest = data[max(last, len(data) - 512) :]
        if self._rest.endswith(b"0\r\n\r\n") and b"[DONE]" in data:
            self._transport.close()
            if not self._done.done():
                self._done.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(f"stream broke off: {exc}"))


async def streams(port: int, requests: list[bytes], chunks: int) -> tuple[list[float], list[float]]:
    """(first-chunk times, chunk ages), seconds, of one stream for each request, begun 5 ms apart."""
    loop = asyncio.get_running_loop()
    waits = []
    protocols = []
    for request in requests:
        done: asyncio.Future[None] = loop.create_future()
        _, protocol = await loop.create_connection(lambda r=request, d=done: _Stream(r, d), "127.0.0.1", port)
        protocols.append(protocol)
        waits.append(done)
        await asyncio.sleep(0.005)
    await asyncio.gather(*waits)
    counts = {len(protocol.lags_ns) for protocol in protocols}
    if counts != {chunks}:
        raise RuntimeError(f"streams of {counts} chunks arrived, {chunks} were sent")
    firsts = [(protocol.first_ns or 0) / 1e9 for protocol in protocols]
    return firsts, [lag / 1e9 for protocol in protocols for lag in protocol.lags_ns]
