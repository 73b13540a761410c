#!/usr/bin/env python3
"""Bytes a second of blocks between two engines on loopback: real caches, memory and connections, without a model.

python benchmarks/kv_transfer.py [--blocks 256] [--block-mib 2] [--rounds 5]

The source runs in a process of its own. Its "steps" take no time, so this is the most that one pull reaches.
"""

from __future__ import annotations

import argparse
import hmac
import multiprocessing
import resource
import statistics
import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

import _path  # noqa: F401  (first: `engine` is a package here)
import torch

from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec
from engine.config import KVTransferConfig
from engine.execution.device_pool import DevicePool
from engine.process.core_process import keep_freed_memory
from engine.transfer.block_exchange import BlockExchange
from engine.transfer.fingerprint import ModelFingerprint
from engine.transfer.pull_plan import Pull, PullItem
from engine.transfer.service import KVTransfers
from engine.types import KVSource, Request, SamplingParams

BLOCK_SIZE = 16
FLEET_KEY = "a key for one measurement"


class Peer:
    """A cache of `block_count` blocks, and its transfers."""

    def __init__(self, block_count: int, block_mib: float) -> None:
        head_dim = int(block_mib * (1 << 20)) // (2 * BLOCK_SIZE * 2)
        spec = CacheSpec(BLOCK_SIZE, (GroupSpec(FULL_ATTENTION, (0,), 1, head_dim, 2),))
        self.cache = KVCache(spec, block_count + 1)
        pool = DevicePool(spec, block_count + 1, device=torch.device("cpu"), dtype=torch.bfloat16)
        torch.set_num_threads(1)  # as `engine serve` does
        pool.buffer.fill_(7)  # memory that was never touched would cost page faults
        self.exchange = BlockExchange(self.cache, pool.block_copier, ModelFingerprint(Path("no folder"), ()))
        transfer_config = KVTransferConfig(port=0, key=FLEET_KEY, timeout_s=600.0)
        self.transfers = KVTransfers(transfer_config, self.exchange, computes_on_cpu=True)
        self.request = Request(
            request_id="r", token_ids=list(range(block_count * BLOCK_SIZE + 1)), params=SamplingParams()
        )

    def fill(self) -> None:
        """Have the whole prompt."""
        pull = Pull(KVSource("", 0), self.exchange.list_keys(self.request))
        block_bytes = self.exchange.content_bytes_by_kind[0]
        for index in range(len(pull.keys)):
            stored = self.exchange.store(pull, [PullItem(index, 0)], memoryview(bytearray(block_bytes)))
            assert stored == 1

    def run_steps(self, until: Future[None] | None = None) -> None:
        """Copy blocks until `until` is done; None: for ever. Sleeps until there is work, as the core's process does."""
        has_work = threading.Event()
        has_work.set()
        self.transfers.watch(has_work.set)
        if until is not None:
            until.add_done_callback(lambda _: has_work.set())
        while until is None or not until.done():
            has_work.wait()
            has_work.clear()
            while self.transfers.has_copies:
                self.transfers.copy_blocks()


def measure_hmac() -> float:
    """Return the seconds of CPU in which one HMAC-SHA256 of 1 GB is computed now."""
    data, start_cpu_s = bytes(64 << 20), time.thread_time()
    hmac.digest(FLEET_KEY.encode(), data, "sha256")
    return (time.thread_time() - start_cpu_s) * 1e9 / len(data)


def serve(block_count: int, block_mib: float, pipe: Connection) -> None:
    keep_freed_memory()
    peer = Peer(block_count, block_mib)
    peer.fill()
    pipe.send(peer.transfers.port)
    peer.run_steps()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--block-mib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    keep_freed_memory()
    pipe, source_pipe = multiprocessing.Pipe()
    source = multiprocessing.get_context("spawn").Process(
        target=serve, args=(args.blocks, args.block_mib, source_pipe), daemon=True
    )
    source.start()
    kv_source = KVSource("127.0.0.1", pipe.recv())
    consumer = Peer(args.blocks, args.block_mib)
    rates: list[float] = []
    for _ in range(args.rounds):
        consumer.cache.reset()
        pulled_bytes, start_s = consumer.transfers.stats.pulled_bytes, time.perf_counter()
        start_cpu_s = time.process_time()
        request = Request(
            request_id="r", token_ids=consumer.request.token_ids, params=SamplingParams(), kv_source=kv_source
        )
        pull_end = consumer.transfers.start_pull(request)
        assert pull_end is not None
        consumer.run_steps(pull_end)
        consumer.transfers.stop_waiting("r")
        seconds = time.perf_counter() - start_s
        pulled_bytes = consumer.transfers.stats.pulled_bytes - pulled_bytes
        assert consumer.transfers.stats.pulled_blocks % args.blocks == 0
        rates.append(pulled_bytes / seconds / 1e9)
        cpu_s = time.process_time() - start_cpu_s
        print(
            f"{pulled_bytes / 1e6:.0f} MB in {seconds * 1e3:.1f} ms: {rates[-1]:.2f} GB/s; "
            f"{cpu_s * 1e9 / pulled_bytes:.2f} s of the consumer's CPU for 1 GB (HMAC alone: {measure_hmac():.2f} s)"
        )
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"median {statistics.median(rates):.2f} GB/s; the consumer's peak memory {usage.ru_maxrss / 1e3:.0f} MB")
    source.terminate()
    consumer.transfers.close()


if __name__ == "__main__":
    main()
