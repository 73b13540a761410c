"""NVIDIA Dynamo's index (ai-dynamo-runtime: SelectionService and RadixTree) under the load of benchmarks/index.py.

Run by benchmarks/index.py in the peer's own environment; prints one line of JSON. SelectionService hears real ZeroMQ
publishers in another process, so its CPU time includes its own sockets; ours does not. RadixTree is given events as
JSON and block hashes ready-made, so its figures leave out decoding and token hashing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import struct
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("DYN_LOG", "error")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import index_load as load

WORKERS = 64
THREADS = 2


def publisher(pipe: Any) -> None:
    """Another process: one PUB socket a worker. Takes lists of (worker, payload), sends them, answers when done."""
    import zmq

    context = zmq.Context()
    sockets, seqs = [], [0] * WORKERS
    ports = []
    for _ in range(WORKERS):
        socket = context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, 0)
        ports.append(socket.bind_to_random_port("tcp://127.0.0.1"))
        sockets.append(socket)
    pipe.send(ports)
    while True:
        work = pipe.recv()
        if work is None:
            return
        if isinstance(work, tuple):  # (seed, blocks, per batch): generated here, so that the peer's memory holds none
            work = list(load.batches(*work, WORKERS))
        for worker, payload in work:
            sockets[worker].send_multipart([b"", struct.pack(">Q", seqs[worker]), payload])
            seqs[worker] += 1
        pipe.send(seqs[:])


class Service:
    """A SelectionService with 64 workers whose publishers live in another process."""

    async def start(self) -> None:
        from dynamo._core import SelectionService

        self._pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=publisher, args=(other,), daemon=True)
        self._process.start()
        ports = self._pipe.recv()
        self.service = SelectionService(indexer_threads=THREADS)
        for worker, port in enumerate(ports):
            await self.service.upsert_worker(
                {
                    "worker_id": worker,
                    "endpoint": f"http://127.0.0.1:{20000 + worker}",
                    "model_name": "m",
                    "block_size": load.BLOCK_TOKENS,
                    "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": 1_000_000,
                }
            )
        await asyncio.sleep(1.0)

    async def publish(self, work: Any) -> None:
        self._pipe.send(work)
        while not self._pipe.poll():
            await asyncio.sleep(0.02)
        self._pipe.recv()

    async def held(self, token_ids: list[int]) -> dict[int, int]:
        answer = await self.service.overlap_scores({"model_name": "m", "token_ids": token_ids})
        return {row["worker_id"]: row["device_blocks"] for row in answer["workers"]}

    async def settle(self) -> None:
        """Until the process's CPU has been quiet for a while: everything published has been applied."""
        quiet, before = 0, time.process_time()
        while quiet < 5:
            await asyncio.sleep(0.1)
            now = time.process_time()
            quiet = quiet + 1 if now - before < 0.01 else 0
            before = now

    def stop(self) -> None:
        self._pipe.send(None)
        self.service.shutdown()
        self._process.join(5)


async def measure_service(quick: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    service = Service()
    await service.start()
    blocks = 64_000 if quick else 256_000
    await service.settle()
    started = time.process_time()
    await service.publish((16, blocks, 16))
    await service.settle()
    result["ingest_blocks_per_cpu_s"] = round(blocks / (time.process_time() - started))
    rng = random.Random(3)
    for blocks in (16, 128, 1024, 4096):
        prompts = [load.prompt(rng, blocks) for _ in range(16)]
        work = []
        for held in prompts:
            for worker in range(WORKERS):
                count = max(1, blocks * (worker + 1) // WORKERS)
                tokens = held.token_ids[: count * load.BLOCK_TOKENS]
                work.append((worker, load.stored(held.names[:count], None, tokens)))
        await service.publish(work)
        await service.settle()
        assert (await service.held(prompts[0].token_ids))[WORKERS - 1] == blocks
        result[f"select_us_{blocks}"] = round(await select_us(service, prompts), 1)
    result["decision_us_16k_tokens"] = result["select_us_1024"]
    service.stop()
    return result


async def select_us(service: Service, prompts: list[load.Prompt]) -> float:
    """CPU of the process per select, from token ids to a worker."""
    requests = [{"model_name": "m", "token_ids": held.token_ids} for held in prompts]
    for request in requests:
        answer = await service.service.select(request)
        assert answer["worker_id"] == WORKERS - 1
    means = []
    for _ in range(5):
        started = time.process_time()
        for request in requests:
            await service.service.select(request)
        means.append((time.process_time() - started) / len(requests) * 1e6)
    return load.median(means)


async def measure_service_memory(quick: bool) -> dict[str, Any]:
    service = Service()
    await service.start()
    blocks = 64_000 if quick else 1_000_000
    await service.publish((99, 32_000, 16))
    await service.settle()
    before = load.resident_bytes()
    for part in range(10):
        await service.publish((100 + part, blocks // 10, 16))
    await service.settle()
    grown = load.resident_bytes() - before
    service.stop()
    return {"service_bytes_per_entry_1": round(grown / blocks, 1)}


def radix_event(names: list[int], hashes: list[int], parent: int | None) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": value} for name, value in zip(names, hashes)]
    return json.dumps(
        {"event_id": 0, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}, "dp_rank": 0}
    ).encode()


def measure_radix_lookup() -> dict[str, Any]:
    from dynamo._core import RadixTree

    tree, rng = RadixTree(), random.Random(4)
    hashes, names = load.names(rng, 1024), load.names(rng, 1024)
    for worker in range(WORKERS):
        tree.apply_event(worker, radix_event(names, hashes, None))
    assert len(tree.find_matches(hashes).scores) == WORKERS
    means = []
    for _ in range(20):
        started = time.process_time()
        for _ in range(50):
            tree.find_matches(hashes)
        means.append((time.process_time() - started) / 50 * 1e6)
    return {"match_us_1024": round(load.median(means), 1)}


def measure_radix_growth(quick: bool, copies: int) -> dict[str, Any]:
    """Memory per entry and the longest call while the tree grows to 1 M blocks, by the wall clock."""
    from dynamo._core import RadixTree

    tree, rng = RadixTree(), random.Random(5)
    blocks = (64_000 if quick else 1_000_000) // copies
    gc.collect()
    before, worst, entries = load.resident_bytes(), 0.0, 0
    parent: int | None = None
    for at in range(blocks // 16):
        if at % 4 == 0:
            parent = None
        names = load.names(rng, 16)
        event = radix_event(names, load.names(rng, 16), parent)
        parent = names[-1]
        for i in range(copies):
            started = time.perf_counter()
            tree.apply_event((at // 4 * copies + i) % WORKERS, event)
            worst = max(worst, time.perf_counter() - started)
            entries += 16
    tree.find_matches([1])
    grown = load.resident_bytes() - before
    return {f"radix_bytes_per_entry_{copies}": round(grown / entries, 1), "pause_ms_max": round(worst * 1e3, 3)}


def isolated(section: Any, *args: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        done: dict[str, Any] = pool.apply(section, args)
        return done


def service_section(quick: bool, memory: bool) -> dict[str, Any]:
    # A daemonic pool worker may not have children; the publisher is one.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return asyncio.run(measure_service_memory(quick) if memory else measure_service(quick))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    result: dict[str, Any] = {"version": version("ai-dynamo-runtime"), "threads": THREADS}
    result |= isolated(service_section, quick, False)
    result |= isolated(service_section, quick, True)
    result |= isolated(measure_radix_lookup)
    for copies in (8, 1):
        result |= isolated(measure_radix_growth, quick, copies)
    result["bytes_per_entry"] = max(result["radix_bytes_per_entry_1"], result["radix_bytes_per_entry_8"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
