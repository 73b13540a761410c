"""The helper processes that read large bodies, as the router sees them: few, started when they are first needed, ended
when one takes too long, started again at the next body.

Owns how many wait and for how long. A body is read by the helper that read others with the same beginning, where that
one is free: it has their text encoded. Invariants: a helper has one body at a time; `waiting_bytes` is the sum of the
bodies that are waited for, at most `waiting_mb`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from prompts.errors import RequestError
from prompts.routing import Kind, RoutingRequest
from prompts.segments import ID_TYPE
from router.prompting.config import PoolConfig
from router.prompting.helper import Done, Order, Settings, Told

log = logging.getLogger("router")
T = TypeVar("T")

BEGINNING_BYTES = 2048
PIECE_BYTES = 1 << 20
START_S_MAX = 30.0
"""For starting a helper, and for loading a vocabulary."""


class HelperFailed(Exception):
    """The helper died or was ended; the message says why."""


class _Helper:
    """One process and its socket."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.folders: set[str] = set()
        """Whose tokenizers it has."""
        self.used_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: list[subprocess.Popen[bytes]] = []
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def start(self, settings: Settings) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "router.prompting.helper", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.folders.clear()
        ours.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        await self.send(settings)

    async def send(self, head: msgspec.Struct | None, payload: bytes = b"") -> None:
        assert self._writer is not None
        data = b"" if head is None else msgspec.msgpack.encode(head)
        self._writer.write(len(data).to_bytes(4, "little") + len(payload).to_bytes(8, "little") + data)
        for at in range(0, len(payload), PIECE_BYTES):
            self._writer.write(memoryview(payload)[at : at + PIECE_BYTES])
            await self._writer.drain()

    async def receive(self) -> tuple[bytes, bytes]:
        lengths = await self._reader.readexactly(12)
        head = await self._reader.readexactly(int.from_bytes(lengths[:4], "little"))
        return head, await self._reader.readexactly(int.from_bytes(lengths[4:], "little"))

    def end(self) -> None:
        """End the process; it is reaped later, as taking back gigabytes takes time."""
        self._ended = [process for process in self._ended if process.poll() is None]
        if self._process is not None:
            self._process.kill()
            self._ended.append(self._process)
            self._process = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def reap(self) -> None:
        """End it and wait for that."""
        self.end()
        for process in self._ended:
            process.wait()


class Helpers:
    """`await read(...)` reads one body."""

    def __init__(self, config: PoolConfig, *, chat_template: str | None, cache_bytes: int) -> None:
        self._config = config
        self._settings = Settings(chat_template, cache_bytes, config.memory_mb << 20)
        self._helpers = [_Helper() for _ in range(config.count)]
        self.waiting_bytes = 0
        self.cpu_s = 0.0
        self.counts: Counter[str] = Counter()
        """outcome -> bodies: read, refused (no JSON), full, failed."""

    async def read(
        self,
        body: bytes,
        kind: Kind | None,
        order: Callable[[RoutingRequest], Order],
        wanted: Callable[[], bool],
    ) -> tuple[RoutingRequest, array[int] | bytes | None]:
        """(what the body asks for; ids, or a question for a worker, or None). `kind`: of its path; None where the body
        tells. `order` says what to make of it, `wanted` whether its client is still there. Neither may raise.
        Raises RequestError for a body that is none, or that cannot be read now."""
        if self.waiting_bytes + len(body) > self._config.waiting_mb << 20:
            self.counts["full"] += 1
            raise _not_now("too many large bodies wait to be read")
        self.waiting_bytes += len(body)
        helper = self._choose(body)
        try:
            async with helper.lock:
                if not wanted():
                    raise _not_now("the client left")
                return await self._read(helper, body, kind, order)
        finally:
            helper.used_s = time.monotonic()
            self.waiting_bytes -= len(body)

    def close_idle(self, now: float) -> None:
        """End helpers that had nothing to do for a while, and give their memory back. `now`: of `time.monotonic`."""
        for helper in self._helpers:
            if not helper.lock.locked() and now - helper.used_s > self._config.idle_s:
                helper.end()

    def close(self) -> None:
        for helper in self._helpers:
            helper.reap()

    def _choose(self, body: bytes) -> _Helper:
        usual = self._helpers[zlib.crc32(body[:BEGINNING_BYTES]) % len(self._helpers)]
        if not usual.lock.locked():
            return usual
        return next((helper for helper in self._helpers if not helper.lock.locked()), usual)

    async def _read(
        self, helper: _Helper, body: bytes, kind: Kind | None, order: Callable[[RoutingRequest], Order]
    ) -> tuple[RoutingRequest, array[int] | bytes | None]:
        parsed: RoutingRequest | None = None
        done = False
        try:
            await _within(START_S_MAX, helper.start(self._settings))
            told = await _within(START_S_MAX, self._look(helper, body))
            if told.error is not None or told.fields is None:
                done = True
                self.counts["refused"] += 1
                message, param, code, status = told.error or ("", None, None, 400)
                raise RequestError(message, param=param, code=code, status=status)
            chats = told.fields.pop("chats")
            parsed = RoutingRequest(kind=kind or ("chat" if chats else "completion"), **told.fields)
            ordered = order(parsed)
            seconds = self._config.seconds_max
            if ordered.folder is not None and ordered.folder not in helper.folders:
                helper.folders.add(ordered.folder)
                seconds += START_S_MAX
            result, done = await _within(seconds, self._make(helper, ordered))
            self.counts["read"] += 1
            return parsed, result
        except (OSError, EOFError, HelperFailed) as error:
            self.counts["failed"] += 1
            log.warning("a body of %d bytes could not be read: %s", len(body), error)
            if parsed is None:
                raise _not_now("the body could not be read in time") from None
            return parsed, None
        finally:
            if not done:  # also where the client left: what the helper would still do is for nobody
                helper.end()

    async def _look(self, helper: _Helper, body: bytes) -> Told:
        await helper.send(None, body)
        return msgspec.msgpack.decode((await helper.receive())[0], type=Told)

    async def _make(self, helper: _Helper, order: Order) -> tuple[array[int] | bytes | None, bool]:
        """(what was ordered, whether the helper is fit for more)."""
        await helper.send(order)
        head, payload = await helper.receive()
        done = msgspec.msgpack.decode(head, type=Done)
        self.cpu_s += done.cpu_s
        if done.problem is not None:
            self.counts["unread"] += 1
            log.debug("a large prompt left to the worker to judge: %s", done.problem)
        if done.is_question:
            return payload, done.goes_on
        ids = array(ID_TYPE)
        ids.frombytes(payload)
        return ids or None, done.goes_on


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        raise HelperFailed(f"not done within {seconds:g} s") from None


def _not_now(message: str) -> RequestError:
    return RequestError(message, param=None, code="overloaded", status=503, type="server_error")
