"""Server of cached blocks: answers which blocks this engine has, and sends them to peers.

Bounded: connections, answers at once with their bytes, questions ahead in one connection, and every wait for a peer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from functools import partial

from engine.transfer.block_exchange import BlockExchange
from engine.transfer.connection import CONNECT_S_MAX, Connection
from engine.transfer.messages import (
    BATCH_BLOCKS_MAX,
    BATCH_BYTES_MAX,
    HASHES_MAX,
    QUESTION_DECODER,
    Answer,
    BlocksLocated,
    Bytes,
    FetchBlocks,
    LocateBlocks,
    Refused,
    TransferError,
    decode_message,
)
from options.background_tasks import BackgroundTasks

log = logging.getLogger("engine.transfer")

CONNECTIONS_MAX = 256
GREETINGS_MAX = 64
"""Connections that have not shown the key yet."""
ANSWERS_MAX = 8
"""Answers with blocks that are in memory at once."""
QUESTIONS_AHEAD_MAX = 4
"""Questions of one connection that are being answered."""
IDLE_S_MAX = 60.0
SEND_S_MAX = 5.0
ACCEPT_PAUSE_S = 0.1
"""Pause after a connection that could not be accepted, such as for want of file descriptors."""


class BlockServer:
    """Sends cached blocks to peers that connect to a listening socket, on an event loop."""

    def __init__(self, listener: socket.socket, exchange: BlockExchange, fleet_key: bytes) -> None:
        """Create a server of cached blocks, which accepts no connection until `run`.

        `listener`: socket to which other engines connect. `exchange`: finds and reads blocks of the cache.
        """
        listener.setblocking(False)
        self._listener = listener
        self._exchange = exchange
        self._fleet_key = fleet_key
        self._connection_tasks = BackgroundTasks()
        self._greeting_count = 0
        self._answer_slots = asyncio.Semaphore(ANSWERS_MAX)

    async def run(self) -> None:
        """Accept connections of other engines, and serve each in a task, until this task is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(self._listener)
                except OSError as error:  # such as too many open files
                    log.warning("a connection for blocks is not accepted: %s", error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                if len(self._connection_tasks) >= CONNECTIONS_MAX or self._greeting_count >= GREETINGS_MAX:
                    self._exchange.stats.refused_connections += 1
                    sock.close()
                    continue
                self._greeting_count += 1
                self._connection_tasks.start(self._serve(Connection(sock)))
        finally:
            self._connection_tasks.cancel()
            self._listener.close()

    async def _serve(self, connection: Connection) -> None:
        """Authenticate a peer engine by the fleet's key, answer its questions, and close the connection at the end."""
        try:
            try:
                await asyncio.wait_for(connection.greet_as_server(self._fleet_key), CONNECT_S_MAX)
            finally:
                self._greeting_count -= 1
            await self._answer_questions(connection)
        except ConnectionError:
            log.debug("a peer has left")
        except (TransferError, OSError, asyncio.TimeoutError) as error:
            self._exchange.stats.refused_connections += 1
            log.warning("a peer's connection is closed: %s", str(error) or type(error).__name__)
        finally:
            connection.close()

    async def _answer_questions(self, connection: Connection) -> None:
        """Answer the questions of a connection in their order, until it is closed or fails.

        Up to QUESTIONS_AHEAD_MAX answers are prepared at the same time. Each task sends its answer after the previous
        task has sent its own.
        """
        answer_tasks: deque[asyncio.Task[None]] = deque()
        try:
            while True:
                data, _ = await asyncio.wait_for(connection.receive(payload_bytes_max=0), IDLE_S_MAX)
                question = decode_message(QUESTION_DECODER, data)
                previous_task = answer_tasks[-1] if answer_tasks else None
                answer_tasks.append(asyncio.create_task(self._send_answer(connection, question, previous_task)))
                if len(answer_tasks) >= QUESTIONS_AHEAD_MAX:
                    await answer_tasks.popleft()
        finally:
            for task in answer_tasks:
                task.cancel()
            await asyncio.gather(*answer_tasks, return_exceptions=True)

    async def _send_answer(
        self, connection: Connection, question: LocateBlocks | FetchBlocks, previous_task: asyncio.Task[None] | None
    ) -> None:
        """Answer a question, once `previous_task` has sent the answer to the question before it."""
        async with self._answer_slots:
            answer, contents = await self._make_answer(question)
            if previous_task is not None:
                await previous_task
            await asyncio.wait_for(connection.send(answer, contents), SEND_S_MAX)

    async def _make_answer(self, question: LocateBlocks | FetchBlocks) -> tuple[Answer, Bytes]:
        """Return an answer, and the contents of the blocks that go with it."""
        exchange = self._exchange
        refusal = self._find_refusal(question)
        if refusal is not None:
            return refusal, b""
        if isinstance(question, LocateBlocks):
            return BlocksLocated(exchange.locate(question.hashes)), b""
        wanted_blocks = question.wanted_blocks
        reading = exchange.submit(partial(exchange.read, wanted_blocks), exchange.count_bytes(wanted_blocks))
        try:
            return await asyncio.wrap_future(reading)
        except Exception:  # noqa: BLE001 - the step loop has logged it
            return Refused("failed", "the source failed to read its blocks"), b""

    def _find_refusal(self, question: LocateBlocks | FetchBlocks) -> Refused | None:
        """Check a peer's question. Return a refusal if the peer has another model or asks for too much, else None."""
        if isinstance(question, LocateBlocks):
            if question.fingerprint != self._exchange.fingerprint.digest:
                return Refused("incompatible", "the source has another model or another cache layout")
            if len(question.hashes) > HASHES_MAX:
                return Refused("malformed", f"expected at most {HASHES_MAX} hashes")
            return None
        wanted_blocks = question.wanted_blocks
        kind_count = len(self._exchange.block_bytes_by_kind)
        has_known_kinds = all(0 <= block.kind < kind_count for block in wanted_blocks)
        if len(wanted_blocks) > BATCH_BLOCKS_MAX or not has_known_kinds:
            return Refused("malformed", f"expected at most {BATCH_BLOCKS_MAX} blocks of known kinds")
        is_too_large = len(wanted_blocks) > 1 and self._exchange.count_bytes(wanted_blocks) > BATCH_BYTES_MAX
        if is_too_large:  # a single block may be of any size
            return Refused("malformed", f"expected blocks of at most {BATCH_BYTES_MAX} bytes")
        return None
