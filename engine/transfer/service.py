"""Transfers of one engine with peers: pulls that requests wait for, and copies of blocks between steps.

The server of blocks and all pulls run on one thread, the thread of the network.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from engine.cache.spec import FULL_KIND
from engine.config import KVTransferConfig
from engine.transfer.block_exchange import BlockExchange
from engine.transfer.block_server import BlockServer
from engine.transfer.interface import Transfers, TransferStats
from engine.transfer.pull_plan import Pull
from engine.transfer.puller import Puller
from engine.types import BlockKey, KVSource, Request
from events.sources import KVTransferOffer, resolve_endpoint
from options import ConfigError

DEFAULT_HOST = "127.0.0.1"
GB_S = 0.5
"""Rate of a pull between engines on GPUs, in 1e9 bytes a second: one thread on each side hashes all bytes."""
CPU_GB_S = 0.12
"""Rate of a pull between engines on CPUs, where threads that hash and copy share the cores of the steps."""

STEP_COPY_BYTES_MAX = 32 << 20
"""Bytes of blocks that are copied between two steps. The last message of these may exceed the bound."""
PULLS_MAX = 2048
"""Most pulls that run or wait for their turn. A request beyond these is computed without a pull."""
END_WAIT_S_MAX = 0.01
"""Longest wait for the thread of the network to end a pull."""
CLOSE_S_MAX = 5.0


class KVTransfers(Transfers):
    """Gives cached blocks to peer engines, and pulls blocks from them, on a thread of the network. Must be closed.

    The thread of the steps copies the contents of blocks, between its steps.
    """

    stats: TransferStats

    def __init__(self, config: KVTransferConfig, exchange: BlockExchange, *, computes_on_cpu: bool) -> None:
        """Start a thread that sends cached KV blocks to other engines and pulls blocks from them.

        `exchange`: reads and stores blocks of the cache. Raises ConfigError for an address that cannot be used, and
        for a key that cannot be read.
        """
        fleet_key = config.read_key()
        listener = _listen(config.host or DEFAULT_HOST, config.port or 0)
        self.stats = exchange.stats
        self._host, self.port = listener.getsockname()[:2]
        self._exchange = exchange
        self._device_gb_s = CPU_GB_S if computes_on_cpu else GB_S

        # Pulls that have not ended.
        self._pull_by_id: dict[tuple[KVSource, int], Pull] = {}
        """Pull by its source and the hash of its last block."""
        self._pull_by_request_id: dict[str, Pull] = {}
        """Pull for which a request waits, by the id of the request."""

        # The network's thread.
        self._puller = Puller(exchange, fleet_key, config.timeout_s)
        self._server = BlockServer(listener, exchange, fleet_key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def describe(self) -> KVTransferOffer:
        """Return the address, model and speed by which a router may name this engine as a source of blocks."""
        exchange, simulated_memory = self._exchange, self._exchange.simulated_memory
        return KVTransferOffer(
            endpoint=resolve_endpoint(f"tcp://*:{self.port}", self._host),
            group=exchange.fingerprint.digest.hex(),
            bytes_per_token=max(1, exchange.block_bytes_by_kind[FULL_KIND] // exchange.block_tokens),
            gb_s=self._device_gb_s if simulated_memory is None else simulated_memory.bytes_per_s / 1e9,
        )

    # ------------------------------------------------------------------ copies between steps

    def watch(self, on_copies: Callable[[], None]) -> None:
        self._exchange.on_job = on_copies

    @property
    def has_copies(self) -> bool:
        return self._exchange.has_jobs

    def copy_blocks(self) -> None:
        """Copy blocks for peers and from them, and wait a moment for the end of pulls with all blocks stored.

        The thread of the network ends such a pull at once. So the next step can already compute its requests.
        """
        self._exchange.run_jobs(STEP_COPY_BYTES_MAX)
        wait([pull.end for pull in self._pull_by_id.values() if pull.is_stored], END_WAIT_S_MAX)

    # ------------------------------------------------------------------ pulls

    def start_pull(self, request: Request) -> Future[None] | None:
        """Begin the pull of a request that names a source, or join the pull of an equal prompt from that source.

        A request without a source waits for a running pull of its prompt's first blocks: it need not compute them then.
        """
        source = request.kv_source
        if source is None and not self._pull_by_id:
            return None
        keys = self._exchange.list_keys(request)
        if not keys or self._exchange.is_cached(keys):
            return None
        pull = self._find_pull(keys) if source is None else self._begin_or_join_pull(source, keys)
        if pull is None:
            return None
        pull.waiting_count += 1
        self._pull_by_request_id[request.request_id] = pull
        return pull.end

    def _find_pull(self, keys: list[BlockKey]) -> Pull | None:
        """Return the longest pull of blocks that a prompt begins with; None if there is none."""
        hashes = {key.hash for key in keys}  # a hash is that of all blocks up to its own
        pulls = (pull for pull in self._pull_by_id.values() if pull.keys[-1].hash in hashes)
        return max(pulls, key=lambda pull: len(pull.keys), default=None)

    def _begin_or_join_pull(self, source: KVSource, keys: list[BlockKey]) -> Pull | None:
        """Return the pull of a prompt, which begins if there is none yet; None if there are too many pulls."""
        new_pull = Pull(source, keys)
        if new_pull.id in self._pull_by_id:
            return self._pull_by_id[new_pull.id]
        if len(self._pull_by_id) >= PULLS_MAX:
            self.stats.failures["busy"] += 1
            return None
        self._pull_by_id[new_pull.id] = new_pull
        new_pull.end = asyncio.run_coroutine_threadsafe(self._puller.pull(new_pull), self._loop)
        return new_pull

    def stop_waiting(self, request_id: str) -> None:
        pull = self._pull_by_request_id.pop(request_id, None)
        if pull is not None:
            pull.waiting_count -= 1
            if not pull.waiting_count:
                self._abandon(pull)

    def abandon_pulls(self) -> None:
        for pull in list(self._pull_by_id.values()):
            self._abandon(pull)

    def change_weights(self, path: str | None) -> None:
        self._exchange.fingerprint.update(path)

    def _abandon(self, pull: Pull) -> None:
        """Store nothing more of a pull, and cancel it on the thread of the network."""
        pull.is_abandoned = True
        if self._pull_by_id.get(pull.id) is pull:
            del self._pull_by_id[pull.id]
        pull.end.cancel()

    # ------------------------------------------------------------------ the thread of the network

    def _run(self) -> None:
        """Run the server and the pulls until `close` stops the loop. Body of the thread of the network."""
        asyncio.set_event_loop(self._loop)
        server_task = self._loop.create_task(self._server.run())
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(server_task, *tasks, return_exceptions=True))
            self._loop.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S_MAX)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises ConfigError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigError(f"--kv-transfer {port}: cannot listen on {host}:{port}: {error.strerror or error}") from error
