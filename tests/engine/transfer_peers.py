"""Real engines in one process that move blocks between each other over loopback, and attackers beside them."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from fake_device import EventChecker, resident_in

from engine.cache.kv_cache import KVCache
from engine.config import KVTransferConfig
from engine.core import EngineCore
from engine.execution.device_pool import DevicePool
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.models.loader import load_model
from engine.scheduler import Scheduler, SchedulerConfig
from engine.tiny.model import Recipe, cached_model
from engine.transfer.block_exchange import BlockExchange
from engine.transfer.fingerprint import ModelFingerprint
from engine.transfer.service import KVTransfers
from engine.types import KVSource, Request, SamplingParams, SequenceOutput

RECIPES = {
    "qwen3": Recipe(),
    "gemma3": Recipe(family="gemma3_text", layers=3),
    "qwen3_5": Recipe(family="qwen3_5", layers=3),
    "bamba": Recipe(family="bamba", layers=3),
}
CPU = torch.device("cpu")
FLEET_KEY = "the key of the fleet"
BLOCK_SIZE = 4


class FakeFingerprint(ModelFingerprint):
    """Fingerprint of a model without files."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self._folder, self._facts = Path("/nonexistent"), ()

    def _compute_digest(self) -> bytes:
        return b"other weights"


class Engine:
    """An engine with transfers. Its steps are run by `run`, or by a thread of its own."""

    def __init__(
        self,
        family: str = "qwen3",
        *,
        units: int | None = None,
        host_units: int = 0,
        prefix_caching: bool = True,
        fleet_key: str = FLEET_KEY,
        fingerprint: bytes = b"one model",
        timeout_s: float = 20.0,
        overlaps_steps: bool = False,
    ) -> None:
        model, dtype = load_model(cached_model(RECIPES[family]))
        spec = model.make_cache_spec(BLOCK_SIZE, dtype)
        if units is None:
            units = 40 + sum(-(-1200 // (BLOCK_SIZE * spec.blocks_per_unit(g))) for g in range(len(spec.groups)))
        self.cache = KVCache(
            spec, units, step_tokens_max=64, host_unit_count=host_units, enable_prefix_caching=prefix_caching
        )
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512)
        pool = DevicePool(spec, units, device=CPU, dtype=dtype, host_unit_count=host_units)
        pool.buffer.fill_(0xFF)
        runner = ModelRunner(model, pool, RunnerConfig(max_model_len=512, overlaps_steps=overlaps_steps))
        self.exchange = BlockExchange(self.cache, pool.block_copier, FakeFingerprint(fingerprint))
        transfer_config = KVTransferConfig(port=0, key=fleet_key, timeout_s=timeout_s)
        self.transfers = KVTransfers(transfer_config, self.exchange, computes_on_cpu=True)
        self.events = EventChecker(BLOCK_SIZE)
        self.core = EngineCore(
            Scheduler(config, self.cache), runner, self.events, transfers=self.transfers, overlaps_steps=overlaps_steps
        )
        self.outputs: dict[str, list[SequenceOutput]] = {}
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    @property
    def source(self) -> KVSource:
        return KVSource("127.0.0.1", self.transfers.port)

    def add(self, name: str, token_ids: list[int], source: KVSource | None = None, **params: Any) -> None:
        values = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}
        self.core.add(
            Request(request_id=name, token_ids=list(token_ids), params=SamplingParams(**values), kv_source=source), 0.0
        )

    def step(self) -> None:
        for output in self.core.step(0.0):
            self.outputs.setdefault(output.request_id, []).append(output)
        self.core.check_invariants()
        assert set(self.events.resident) == resident_in(self.cache)

    def run(self) -> None:
        """Make steps until there is nothing to do."""
        while self.core.has_work:
            self.step()

    def answer(self, name: str, token_ids: list[int], source: KVSource | None = None, **params: Any) -> list[int]:
        """Serve a request alone. Returns the generated tokens."""
        self.add(name, token_ids, source, **params)
        self.run()
        return self.tokens(name)

    def tokens(self, name: str) -> list[int]:
        assert all(output.error is None for output in self.outputs[name])
        return [token for output in self.outputs[name] for token in output.token_ids]

    def cached_tokens(self, name: str) -> int:
        return next(output.cached_tokens for output in self.outputs[name] if output.cached_tokens is not None)

    def serve(self) -> Engine:
        """From now on a thread makes the steps that peers ask for, as the core's process does."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def _serve(self) -> None:
        while not self._is_stopping:
            if self.core.has_work:
                self.step()
            else:
                time.sleep(0.001)

    def pause(self) -> None:
        if self._thread is not None:
            self._is_stopping = True
            self._thread.join()
            self._thread, self._is_stopping = None, False

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.pause()
        self.transfers.close()


def prompt(seed: object, length: int) -> list[int]:
    rng = random.Random(repr(seed))
    return [rng.randrange(2048) for _ in range(length)]


class Relay:
    """A host in the middle: passes bytes of one connection at a time on, changed by `change` on their way back."""

    def __init__(self, target: KVSource, change: Callable[[bytes, int], bytes]) -> None:
        """`change`: from bytes, and how many came before them, to the bytes that are passed on."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target, self._change = target, change
        self.source = KVSource("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._target.host, self._target.port))
                for way in ((client, server, _keep), (server, client, self._change)):
                    threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    @staticmethod
    def _pass_on(reader: socket.socket, writer: socket.socket, change: Callable[[bytes, int], bytes]) -> None:
        passed_bytes = 0
        with suppress(OSError), reader, writer:
            try:
                while data := reader.recv(1 << 16):
                    writer.sendall(change(data, passed_bytes))
                    passed_bytes += len(data)
            finally:
                for sock in (reader, writer):  # another thread may be reading it
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def _keep(data: bytes, passed_bytes: int) -> bytes:
    return data
