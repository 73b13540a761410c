"""Puller of cached blocks: asks another engine for the blocks that a prompt lacks, checks them, and has them stored.

The number of pulls at once, the bytes of each pull and its seconds are bounded. Prompts that begin with the same block
are pulled from a source one after another, so that no block comes twice. A source that has failed is not asked for 2 s,
and one that fails again for a multiple of the failure's time, so that dead sources hardly delay pulls from others.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from engine.transfer.block_exchange import BlockExchange
from engine.transfer.connection import Connection
from engine.transfer.messages import (
    FAILURE_REASONS,
    Answer,
    BlocksLocated,
    BlocksSent,
    FetchBlocks,
    LocateBlocks,
    Refused,
    TransferError,
    WantedBlock,
    decode_answer,
)
from engine.transfer.pull_plan import Pull, PullItem, split_into_batches
from engine.transfer.settings import BATCH_BLOCKS_MAX, BATCH_BYTES_MAX, CONNECT_S_MAX, TransferSettings, TransferStats
from engine.transfer.simulated_link import SimulatedLink
from engine.transfer.step_jobs import StepJobs
from engine.types import KVSource
from options.bounded_dict import BoundedDict

log = logging.getLogger("engine.transfer")

PULLS_AT_ONCE_MAX = 4
PULL_BYTES_MAX = 4 * BATCH_BYTES_MAX
"""Most bytes of one pull that are requested and not stored yet. A larger block is requested alone."""
RETRY_AFTER_S = 2.0
"""Least seconds for which a source that has failed is not asked. A restarted program refuses connections at once."""
RETRY_AFTER_FAILURES = 3.0
"""Pause of a source that fails again, as a multiple of the failure's time: it takes a slot a quarter of the time."""
FAILED_SOURCES_MAX = 1024

Address = tuple[str, int]
"""Host and port of a source."""
AnswerType = TypeVar("AnswerType", BlocksLocated, BlocksSent)


@dataclass(slots=True)
class _BatchQueues:
    """Batches of the blocks that one pull fetches, by how far they are: a batch passes through three queues."""

    waiting: deque[list[PullItem]]
    """Batches that are not requested yet."""
    requested: deque[list[PullItem]] = field(default_factory=deque)
    """Batches that were requested from the source and have not arrived."""
    storing: deque[tuple[list[PullItem], Future[int]]] = field(default_factory=deque)
    """Batches that have arrived, each with a future of the number of its blocks that were stored."""
    unstored_bytes: int = 0
    """Bytes of the batches in the last two queues."""
    stored_count: int = 0
    """Number of blocks that were stored."""

    def is_oldest_stored(self) -> bool:
        """Return whether the batch that arrived first is stored."""
        _, stored_future = self.storing[0]
        return stored_future.done()


class Puller:
    """Pulls cached blocks from other engines, on an event loop."""

    def __init__(
        self, exchange: BlockExchange, jobs: StepJobs, settings: TransferSettings, stats: TransferStats,
        link: SimulatedLink | None = None,
    ) -> None:  # fmt: skip
        """Create a puller of KV blocks, which is used on one event loop.

        `exchange`: finds blocks that the cache lacks, and stores received ones. `jobs`: queue of the stores, which the
        thread of the step loop does between steps. `stats`: counters for the metrics. `link`: network of a simulated
        engine, which waits as long as a transfer would take; None for a real one.
        """
        self._exchange = exchange
        self._jobs = jobs
        self._settings = settings
        self._stats = stats
        self._link = link
        self._pull_slots = asyncio.Semaphore(PULLS_AT_ONCE_MAX)
        self._locks: WeakValueDictionary[tuple[Address, int], asyncio.Lock] = WeakValueDictionary()
        """Lock by source and hash of a prompt's first block. A lock is dropped when no pull refers to it."""
        self._pause_end_s_by_source: BoundedDict[Address, float] = BoundedDict(FAILED_SOURCES_MAX)
        """Time until which a source is not asked, because its last pull has failed."""

    async def pull(self, pull: Pull) -> None:
        """Store the blocks of a prompt that the source has and this cache lacks. Failures are counted and logged."""
        start_s = time.monotonic()
        try:
            await asyncio.wait_for(self._pull_in_turn(pull), self._settings.timeout_s)
        except TransferError as error:
            self._count_failure(pull.source, error.reason, str(error))
        except asyncio.TimeoutError:
            self._count_failure(pull.source, "timeout", f"no end within {self._settings.timeout_s:g} s")
        except OSError as error:
            self._count_failure(pull.source, "closed", str(error))
        except Exception:
            log.exception("a pull has failed for a reason that is not the peer's")
        finally:
            self._stats.pulls += 1
            self._stats.pull_s += time.monotonic() - start_s

    def _count_failure(self, source: KVSource, reason: str, message: str) -> None:
        self._stats.failures[reason] += 1
        log.warning("no more blocks from %s:%d: %s", source.host, source.port, message)

    async def _pull_in_turn(self, pull: Pull) -> None:
        """Wait for a free slot, connect to the source, and pull the blocks.

        Pulls from one source of prompts with the same first block take turns, so that blocks that the prompts share are
        fetched once. Raises TransferError, without a connection, if the source has failed a moment ago.
        """
        source = pull.source
        lock = self._locks.setdefault((source.address, pull.keys[0].hash), asyncio.Lock())
        async with lock, self._pull_slots:
            start_s = time.monotonic()
            if start_s < self._pause_end_s_by_source.get(source.address, 0.0):
                raise TransferError("recent", "failed a moment ago")
            try:
                connection = await _connect(source, self._settings.fleet_key)
                try:
                    await self._pull_blocks(connection, pull)
                finally:
                    connection.close()
            except BaseException:  # also a time-out, which arrives as a cancellation
                if not pull.is_abandoned:
                    self._pause_source(source, start_s)
                raise
            self._pause_end_s_by_source.pop(source.address, None)

    def _pause_source(self, source: KVSource, start_s: float) -> None:
        """Do not ask a source for a while, because a pull that began at `start_s` has failed.

        If the source fails again after a pause, a slow failure makes the next pause longer, in proportion to its time.
        """
        now_s, pause_s = time.monotonic(), RETRY_AFTER_S
        pause_ends_s = self._pause_end_s_by_source
        last_pause_end_s = pause_ends_s.pop(source.address, None)
        has_failed_again = last_pause_end_s is not None and start_s >= last_pause_end_s
        if has_failed_again:
            pause_s = max(pause_s, RETRY_AFTER_FAILURES * (now_s - start_s))
        pause_ends_s[source.address] = max(now_s + pause_s, last_pause_end_s or 0.0)

    async def _pull_blocks(self, connection: Connection, pull: Pull) -> None:
        """Ask the source which blocks of a prompt it has, and fetch those that are useful and not cached here."""
        hashes = [key.hash for key in pull.keys]
        await connection.send(LocateBlocks(self._settings.fingerprint, hashes))
        located, _ = await _receive(connection, BlocksLocated, 0)
        items = self._exchange.choose_blocks_to_pull(pull.keys, located.kind_masks)
        if not items:
            return
        stored_count = await self._fetch(connection, pull, items)
        self._stats.missing_blocks += len(items) - stored_count

    async def _fetch(self, connection: Connection, pull: Pull, items: list[PullItem]) -> int:
        """Fetch blocks of a prompt in order. Return how many were stored before the first that could not be.

        Batches of blocks are requested while earlier ones arrive and are stored, so that neither the network nor the
        thread of the step loop has to wait.
        """
        block_bytes = self._settings.block_bytes_by_kind
        queues = _BatchQueues(deque(split_into_batches(items, block_bytes, BATCH_BYTES_MAX, BATCH_BLOCKS_MAX)))
        try:
            while queues.waiting or queues.requested or queues.storing:
                await self._request_batches(connection, pull, queues)
                if queues.requested:
                    await self._receive_and_store(connection, pull, queues)
                while queues.storing and (queues.is_oldest_stored() or not queues.requested):
                    is_complete = await self._finish_storing(queues)
                    if not is_complete:  # later blocks are useless without this batch's
                        return queues.stored_count
        finally:
            for _, stored_future in queues.storing:
                stored_future.cancel()
        return queues.stored_count

    async def _request_batches(self, connection: Connection, pull: Pull, queues: _BatchQueues) -> None:
        """Request batches until the limit on unstored bytes is reached. One batch is always allowed."""
        while queues.waiting:
            batch_bytes = self._count_bytes(queues.waiting[0])
            if queues.unstored_bytes and queues.unstored_bytes + batch_bytes > PULL_BYTES_MAX:
                return
            wanted_blocks = [WantedBlock(pull.keys[item.block_index].hash, item.kind) for item in queues.waiting[0]]
            await connection.send(FetchBlocks(wanted_blocks))
            queues.unstored_bytes += batch_bytes
            queues.requested.append(queues.waiting.popleft())

    async def _receive_and_store(self, connection: Connection, pull: Pull, queues: _BatchQueues) -> None:
        """Receive the batch that was requested first, and have the thread of the step loop store it."""
        batch = queues.requested.popleft()
        contents, arrived_count = await self._receive_batch(connection, pull, batch)
        if arrived_count < len(batch):  # the source has evicted a block, without which later ones are useless
            queues.waiting.clear()
            queues.requested.clear()
        is_last = not queues.waiting and not queues.requested
        store = partial(self._store, pull, batch[:arrived_count], contents, is_last=is_last)
        stored_future = self._jobs.submit(store, self._count_bytes(batch[:arrived_count]))
        queues.storing.append((batch, stored_future))

    async def _finish_storing(self, queues: _BatchQueues) -> bool:
        """Wait until the oldest received batch is stored, and count its blocks. Return whether all were stored."""
        batch, stored_future = queues.storing.popleft()
        stored_count = await asyncio.wrap_future(stored_future)
        self._stats.pulled_blocks += stored_count
        self._stats.pulled_bytes += self._count_bytes(batch[:stored_count])
        queues.stored_count += stored_count
        queues.unstored_bytes -= self._count_bytes(batch)
        return stored_count == len(batch)

    async def _receive_batch(self, connection: Connection, pull: Pull, batch: list[PullItem]) -> tuple[memoryview, int]:
        """Receive and check the blocks of a requested batch. Return their contents, and the number of blocks.

        The number is smaller than the batch's if the source has evicted a block.
        """
        get_bytes = self._exchange.get_block_bytes
        sent, payload = await _receive(connection, BlocksSent, sum(get_bytes(kind) for _, kind in batch))
        self._check_sent_blocks(pull, batch, sent, len(payload))
        if self._link is not None:
            await self._link.carry(self._count_bytes(batch[: len(sent.blocks)]))
        return memoryview(payload), len(sent.blocks)

    def _store(self, pull: Pull, batch: list[PullItem], contents: memoryview, *, is_last: bool) -> int:
        """Store blocks, on the thread of the steps, and return how many the cache had room for.

        `is_last`: whether these are the last blocks of the pull.
        """
        stored_count = self._exchange.store(pull, batch, contents)
        pull.is_stored = is_last
        return stored_count

    def _check_sent_blocks(self, pull: Pull, batch: list[PullItem], sent: BlocksSent, payload_bytes: int) -> None:
        """Raise TransferError unless the sent blocks are the first ones of the batch, computed with our weights."""
        get_bytes = self._exchange.get_block_bytes
        if sent.fingerprint != self._settings.fingerprint:
            raise TransferError("incompatible", "one of the two engines has other weights now")
        arrived_batch = batch[: len(sent.blocks)]
        expected_bytes = sum(get_bytes(kind) for _, kind in arrived_batch)
        if len(sent.blocks) > len(batch) or payload_bytes != expected_bytes:
            raise TransferError("malformed", f"{len(sent.blocks)} blocks of {payload_bytes} bytes")
        for item, block in zip(arrived_batch, sent.blocks):
            if block != pull.describe_block(item):
                raise TransferError("malformed", f"block {item.block_index} of the prompt is another one")

    def _count_bytes(self, items: list[PullItem]) -> int:
        return sum(self._settings.block_bytes_by_kind[item.kind] for item in items)


async def _connect(source: KVSource, fleet_key: bytes) -> Connection:
    """Return a connection to another engine, on which both ends have proved that they know the fleet's key.

    Raises TransferError if the engine does not answer in time, or has another key.
    """
    try:
        sock = await _open_socket(source)
    except (OSError, UnicodeError, asyncio.TimeoutError) as error:
        raise TransferError("unreachable", f"no connection: {str(error) or type(error).__name__}") from error
    connection = Connection(sock)
    try:
        await asyncio.wait_for(connection.greet_as_client(fleet_key), CONNECT_S_MAX)
    except asyncio.TimeoutError as error:
        connection.close()
        raise TransferError("unreachable", f"no greeting within {CONNECT_S_MAX:g} s") from error
    except BaseException:  # also a cancellation, such as by the time-out of the pull
        connection.close()
        raise
    return connection


async def _open_socket(source: KVSource) -> socket.socket:
    """Return a socket that is connected to a source. Raises OSError, UnicodeError, TimeoutError."""
    family, socket_type, protocol, _, address = await asyncio.wait_for(_resolve(source), CONNECT_S_MAX)
    sock = socket.socket(family, socket_type, protocol)
    try:
        sock.setblocking(False)
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, address), CONNECT_S_MAX)
    except BaseException:  # also a cancellation, such as by the time-out of the pull
        sock.close()
        raise
    return sock


async def _resolve(source: KVSource) -> tuple[Any, ...]:
    """Return the entry of `getaddrinfo` for a source. Raises OSError, UnicodeError."""
    try:  # an address needs none of the threads that look names up, each of which a dead name server may hold
        return socket.getaddrinfo(*source.address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    except socket.gaierror:
        return (await asyncio.get_running_loop().getaddrinfo(*source.address, type=socket.SOCK_STREAM))[0]


async def _receive(
    connection: Connection, answer_type: type[AnswerType], payload_bytes_max: int
) -> tuple[AnswerType, bytearray]:
    """Receive an answer of the expected type; return it and its payload, the contents of blocks.

    Raises TransferError if the source refuses, or answers otherwise.
    """
    data, payload = await connection.receive(payload_bytes_max)
    answer: Answer = decode_answer(data)
    if isinstance(answer, Refused):
        raise TransferError(answer.reason if answer.reason in FAILURE_REASONS else "malformed", answer.message[:200])
    if not isinstance(answer, answer_type):
        raise TransferError("malformed", f"{type(answer).__name__} in place of {answer_type.__name__}")
    return answer, payload
