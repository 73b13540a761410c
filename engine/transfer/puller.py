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
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from engine.transfer.block_exchange import BlockExchange
from engine.transfer.connection import CONNECT_S_MAX, Connection
from engine.transfer.messages import (
    ANSWER_DECODER,
    BATCH_BLOCKS_MAX,
    BATCH_BYTES_MAX,
    FAILURE_REASONS,
    BlocksLocated,
    BlocksSent,
    FetchBlocks,
    LocateBlocks,
    Refused,
    TransferError,
    WantedBlock,
    decode_message,
)
from engine.transfer.pull_plan import Pull, PullItem, split_into_batches
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

AnswerType = TypeVar("AnswerType", BlocksLocated, BlocksSent)


class Puller:
    """Pulls cached blocks from other engines, on an event loop."""

    def __init__(self, exchange: BlockExchange, fleet_key: bytes, timeout_s: float) -> None:
        """Create a puller of KV blocks, which is used on one event loop.

        `exchange`: finds blocks that the cache lacks, and stores received ones. `timeout_s`: longest that a pull takes.
        """
        self._exchange = exchange
        self._fleet_key = fleet_key
        self._timeout_s = timeout_s
        self._pull_slots = asyncio.Semaphore(PULLS_AT_ONCE_MAX)
        self._locks: WeakValueDictionary[tuple[tuple[str, int], int], asyncio.Lock] = WeakValueDictionary()
        """Lock by a source's address and the hash of a prompt's first block, dropped when no pull refers to it."""
        self._pause_end_s_by_source: BoundedDict[tuple[str, int], float] = BoundedDict(FAILED_SOURCES_MAX)
        """Time until which the source at an address is not asked, because its last pull has failed."""

    async def pull(self, pull: Pull) -> None:
        """Store the blocks of a prompt that the source has and this cache lacks. Failures are counted and logged."""
        start_s, stats = time.monotonic(), self._exchange.stats
        try:
            await asyncio.wait_for(self._pull_in_turn(pull), self._timeout_s)
        except TransferError as error:
            self._count_failure(pull.source, error.reason, str(error))
        except asyncio.TimeoutError:
            self._count_failure(pull.source, "timeout", f"no end within {self._timeout_s:g} s")
        except OSError as error:
            self._count_failure(pull.source, "closed", str(error))
        except Exception:
            log.exception("a pull has failed for a reason that is not the peer's")
        finally:
            stats.pulls += 1
            stats.pull_s += time.monotonic() - start_s

    def _count_failure(self, source: KVSource, reason: str, message: str) -> None:
        self._exchange.stats.failures[reason] += 1
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
                with closing(await _connect(source, self._fleet_key)) as connection:
                    await self._pull_blocks(connection, pull)
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
        await connection.send(LocateBlocks(self._exchange.fingerprint.digest, hashes))
        located, _ = await _receive(connection, BlocksLocated, 0)
        items = self._exchange.choose_blocks_to_pull(pull.keys, located.kind_masks)
        stored_count = await self._fetch(connection, pull, items)
        self._exchange.stats.missing_blocks += len(items) - stored_count

    async def _fetch(self, connection: Connection, pull: Pull, items: list[PullItem]) -> int:
        """Fetch blocks of a prompt in order. Return how many were stored before the first that could not be.

        Batches of blocks are requested while earlier ones arrive and are stored, so that neither the network nor the
        thread of the step loop has to wait. A batch passes through three queues.
        """
        exchange = self._exchange
        waiting = deque(split_into_batches(items, exchange.block_bytes_by_kind, BATCH_BYTES_MAX, BATCH_BLOCKS_MAX))
        requested: deque[list[PullItem]] = deque()
        storing: deque[tuple[list[PullItem], Future[int]]] = deque()
        unstored_bytes = 0  # of the batches that are requested or being stored
        stored_count = 0
        try:
            while waiting or requested or storing:
                # Request what there is room for. One batch is always allowed.
                while waiting:
                    batch_bytes = exchange.count_bytes(waiting[0])
                    if unstored_bytes and unstored_bytes + batch_bytes > PULL_BYTES_MAX:
                        break
                    batch = waiting.popleft()
                    wanted_blocks = [WantedBlock(pull.keys[item.block_index].hash, item.kind) for item in batch]
                    await connection.send(FetchBlocks(wanted_blocks))
                    requested.append(batch)
                    unstored_bytes += batch_bytes
                # Receive the batch that was requested first, and have the thread of the step loop store it.
                if requested:
                    batch = requested.popleft()
                    contents, arrived_count = await self._receive_batch(connection, pull, batch)
                    if arrived_count < len(batch):  # the source has evicted a block, without which later are useless
                        waiting.clear()
                        requested.clear()
                    arrived_blocks, is_last = batch[:arrived_count], not waiting and not requested
                    job = partial(exchange.store, pull, arrived_blocks, contents, is_last)
                    storing.append((batch, exchange.submit(job, exchange.count_bytes(arrived_blocks))))
                # Count what is stored; wait for that only if nothing is to be received.
                while storing and (storing[0][1].done() or not requested):
                    batch, stored_future = storing.popleft()
                    batch_stored_count = await asyncio.wrap_future(stored_future)
                    stored_count += batch_stored_count
                    unstored_bytes -= exchange.count_bytes(batch)
                    if batch_stored_count < len(batch):  # later blocks are useless without this batch's
                        return stored_count
        finally:
            for _, stored_future in storing:
                stored_future.cancel()
        return stored_count

    async def _receive_batch(self, connection: Connection, pull: Pull, batch: list[PullItem]) -> tuple[memoryview, int]:
        """Receive the blocks of a requested batch, and check that they are these, computed with our weights.

        Returns their contents, and the number of blocks: fewer than the batch's if the source has evicted one. Raises
        TransferError.
        """
        exchange, content_bytes = self._exchange, self._exchange.content_bytes_by_kind
        sent, contents = await _receive(connection, BlocksSent, sum(content_bytes[item.kind] for item in batch))
        if sent.fingerprint != exchange.fingerprint.digest:
            raise TransferError("incompatible", "one of the two engines has other weights now")
        arrived_batch = batch[: len(sent.blocks)]
        expected_bytes = sum(content_bytes[item.kind] for item in arrived_batch)
        if len(sent.blocks) > len(batch) or len(contents) != expected_bytes:
            raise TransferError("malformed", f"{len(sent.blocks)} blocks of {len(contents)} bytes")
        for item, block in zip(arrived_batch, sent.blocks):
            if block != pull.describe_block(item):
                raise TransferError("malformed", f"block {item.block_index} of the prompt is another one")
        if exchange.simulated_memory is not None:
            await exchange.simulated_memory.carry(exchange.count_bytes(arrived_batch))
        return memoryview(contents), len(arrived_batch)


async def _connect(source: KVSource, fleet_key: bytes) -> Connection:
    """Return a connection to another engine, on which both ends have proved that they know the fleet's key.

    Raises TransferError if the engine does not answer in time, or has another key.
    """
    with ExitStack() as close_on_error:  # also at a cancellation, such as by the time-out of the pull
        try:
            family, socket_type, protocol, _, address = await asyncio.wait_for(_resolve(source), CONNECT_S_MAX)
            sock = close_on_error.enter_context(socket.socket(family, socket_type, protocol))
            connection = Connection(sock)
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, address), CONNECT_S_MAX)
        except (OSError, UnicodeError, asyncio.TimeoutError) as error:
            raise TransferError("unreachable", f"no connection: {str(error) or type(error).__name__}") from error
        try:
            await asyncio.wait_for(connection.greet_as_client(fleet_key), CONNECT_S_MAX)
        except asyncio.TimeoutError as error:
            raise TransferError("unreachable", f"no greeting within {CONNECT_S_MAX:g} s") from error
        close_on_error.pop_all()
    return connection


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
    answer = decode_message(ANSWER_DECODER, data)
    if isinstance(answer, Refused):
        raise TransferError(answer.reason if answer.reason in FAILURE_REASONS else "malformed", answer.message[:200])
    if not isinstance(answer, answer_type):
        raise TransferError("malformed", f"{type(answer).__name__} in place of {answer_type.__name__}")
    return answer, payload
