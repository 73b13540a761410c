#!/usr/bin/env python3
"""The prefix index measured: ingest from payload bytes, match, decision, bytes per entry, longest pause.

    python benchmarks/index.py --json index.json [--quick]

A block has 16 tokens, ids uniform over 2^17 (the size of today's vocabularies: the worst case for a msgpack reader, as
ids need two or four bytes by chance). Payloads are vLLM's map events with every field it sends for full attention.

Everything is CPU time of the measuring thread (the machine may be shared); pauses also by the wall clock. Each section
runs in a process of its own, so that memory and caches of one do not colour the next. JSON keys:

    ingest_blocks_per_cpu_s   16-block batches from 64 workers, token hashing included
    match_us_1024             1,024 blocks, 64 workers that all hold them, token bytes in, the same prompt again
    match_us_1024_cold        the same for 128 prompts in turn, far more than the processor's caches hold
    route_us_16k_tokens       a list of 16,385 token ids in, one of 64 workers out: prices, books and pin included
    route_us_8_workers        2,148 tokens in, worker out, where all hold the first 1,024 of them and one of eight
    route_us_500_workers      1,024 more; four requests are in flight on each
    bytes_per_entry           growth of resident memory per (worker, group, block) at 1 M blocks: the larger of
                              each block on 1 and on 8 of 64 workers (bytes_per_entry_1, bytes_per_entry_8)
    pause_ms_max              longest single call (ingest of 16 blocks, clear) while the index grows to 5 M entries,
                              CPU time of the call
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import msgspec
from harness.figures import describe_machine, format_facts, resident_bytes, write_json

from router.decide.config import CoreConfig, LearnConfig
from router.decide.core import RouterCore
from router.decide.messages import Forward, RouteRequest
from router.decide.workers import ServedModel, WorkerSpec
from router.index import make_index
from router.index.protocol import PrefixIndex, Scope

SCOPE = Scope("m")
WORKERS = 64
BLOCK_TOKENS = 16
VOCABULARY = 1 << 17
CHAIN_BLOCKS = 64
"""Blocks of one prompt; the batches of a prompt follow each other by parent hash."""
_ENCODE = msgspec.msgpack.Encoder().encode
Result = dict[str, Any]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [word & (VOCABULARY - 1) for word in array("I", rng.randbytes(4 * count))]


def names(rng: random.Random, count: int) -> list[int]:
    return array("Q", rng.randbytes(8 * count)).tolist()


def encode_stored(block_names: list[int], parent: int | None, token_ids: list[int]) -> bytes:
    """One batch with one run of blocks."""
    event = {
        "type": "BlockStored",
        "block_hashes": block_names,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(block_names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return _ENCODE([1795230670.15, [event], 0])


def batches(seed: int, blocks: int, per_batch: int, streams: int) -> Iterator[tuple[int, bytes]]:
    """(stream, payload) of `blocks` distinct blocks; the streams take turns, each with chains of CHAIN_BLOCKS."""
    rng = random.Random(seed)
    parent: list[int | None] = [None] * streams
    length = [0] * streams
    for at in range(blocks // per_batch):
        stream = at % streams
        if length[stream] >= CHAIN_BLOCKS:
            parent[stream], length[stream] = None, 0
        run = names(rng, per_batch)
        yield stream, encode_stored(run, parent[stream], tokens(rng, per_batch * BLOCK_TOKENS))
        parent[stream] = run[-1]
        length[stream] += per_batch


@dataclass(frozen=True)
class Prompt:
    """A prompt of whole blocks, one token more, and the payload that announces it."""

    token_ids: list[int]
    names: list[int]
    payload: bytes


def prompt(rng: random.Random, blocks: int) -> Prompt:
    token_ids = tokens(rng, blocks * BLOCK_TOKENS + 1)
    block_names = names(rng, blocks)
    return Prompt(token_ids, block_names, encode_stored(block_names, None, token_ids[:-1]))


def make_filled_index(workers: int) -> tuple[PrefixIndex, list[Any]]:
    index = make_index(seed=1)
    return index, [index.add_holder("m") for _ in range(workers)]


def measure_ingest(blocks: int) -> Result:
    """Blocks per CPU second in batches of 16; best of three, from an empty index each time."""
    payloads = list(batches(16, blocks, 16, WORKERS))
    best = 0.0
    for _ in range(3):
        index, holders = make_filled_index(WORKERS)
        start_s = time.thread_time()
        for stream, payload in payloads:
            index.ingest(holders[stream], payload)
        best = max(best, len(payloads) * 16 / (time.thread_time() - start_s))
        assert index.stats().entries == len(payloads) * 16
    return {"ingest_blocks_per_cpu_s": round(best)}


def cpu_us_per_call(call: Callable[[Any], object], inputs: list[Any], seconds: float) -> float:
    """Median over passes of CPU microseconds a call, cycling through the inputs."""
    for item in inputs[:4]:
        call(item)
    means = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(means) < 3:
        start_s = time.thread_time()
        for item in inputs:
            call(item)
        means.append((time.thread_time() - start_s) / len(inputs) * 1e6)
    return statistics.median(means)


def measure_match(quick: bool) -> Result:
    """Each prompt is held by every worker. Hot: one prompt; cold: many, far more than the caches hold."""
    rng, seconds, blocks = random.Random(1024), 0.1 if quick else 0.4, 1024
    prompts = [prompt(rng, blocks) for _ in range(128)]
    index, holders = make_filled_index(WORKERS)
    for prompt_data in prompts:
        for holder in holders:
            index.ingest(holder, prompt_data.payload)
    queries = [array("I", prompt_data.token_ids).tobytes() for prompt_data in prompts]
    matches = index.match(queries[0], SCOPE)
    assert [match.tokens for match in matches] == [blocks * BLOCK_TOKENS] * WORKERS
    hot, cold = (
        cpu_us_per_call(partial(index.match, scope=SCOPE), query_list, seconds)
        for query_list in (queries[:1] * 20, queries)
    )
    return {"match_us_1024": round(hot, 2), "match_us_1024_cold": round(cold, 2)}


def measure_decision() -> Result:
    """The same prompt again and again; worker i holds (i + 1) / 64 of it, two requests are in flight on each."""
    index = make_index(seed=1)
    core = RouterCore(index, CoreConfig())
    shared_prompt = prompt(random.Random(3), 1024)
    for i in range(WORKERS):
        spec = WorkerSpec(f"w{i}", f"http://w{i}", models=(ServedModel("m", "m"),), cache_tokens=1_000_000)
        (holder,) = core.add_worker(spec, 0.0).holders
        count = 1024 * (i + 1) // WORKERS
        index.ingest(
            holder, encode_stored(shared_prompt.names[:count], None, shared_prompt.token_ids[: count * BLOCK_TOKENS])
        )
    for i in range(2 * WORKERS):
        core.route(RouteRequest(f"bg{i}", "m", SCOPE, None, 500 + i, worker=f"w{i % WORKERS}"), 0.0)
        if i >= WORKERS:
            core.record_first_token(f"bg{i}", 0.1)

    routed_s = []
    for i in range(200):
        request = RouteRequest("r", "m", SCOPE, shared_prompt.token_ids, len(shared_prompt.token_ids))
        now = 1.0 + i * 1e-3
        start_s = time.thread_time()
        decision = core.route(request, now)
        routed_s.append(time.thread_time() - start_s)
        assert isinstance(decision, Forward)
        core.abort_request("r", now)
    return {"route_us_16k_tokens": round(statistics.median(routed_s) * 1e6, 1)}


def measure_route(workers: int) -> Result:
    """A system prompt that all hold, three sessions behind it on each."""
    rng = random.Random(1)
    core = RouterCore(make_index(seed=1), CoreConfig(learn=LearnConfig(enabled=False)))
    system = tokens(rng, 1024)
    sessions = [system + tokens(rng, 1024) for _ in range(3 * workers)]
    for i in range(workers):
        spec = WorkerSpec(f"w{i}", f"http://w{i}", models=(ServedModel("m", "m"),), cache_tokens=400_000)
        (holder,) = core.add_worker(spec, 0.0).holders
        for k in range(i, len(sessions), workers):
            core.index.ingest(holder, encode_stored(list(range(1000 * k + 1, 1000 * k + 129)), None, sessions[k]))

    def route(name: str, now: float) -> float:
        ids = rng.choice(sessions) + tokens(rng, 100)
        request = RouteRequest(name, "m", SCOPE, ids, len(ids))
        start_s = time.thread_time()
        core.route(request, now)
        return time.thread_time() - start_s

    for i in range(4 * workers):
        route(f"bg{i}", 0.1 * i / workers)
        if rng.random() < 0.9:
            core.record_first_token(f"bg{i}", 0.1 * i / workers + 0.01)
    routed_s = []
    for i in range(400):
        now = 1.0 + i * 1e-3
        routed_s.append(route("r", now))
        core.abort_request("r", now)
        core.tick(now)
    return {f"route_us_{workers}_workers": round(statistics.median(routed_s) * 1e6, 1)}


def measure_memory(blocks: int, copies: int) -> Result:
    index, holders = make_filled_index(WORKERS)
    for _, payload in batches(99, 16 * 2000, 16, 1):  # warm the allocator and the generator up
        del payload
    before = resident_bytes()
    entries = 0
    for at, (_, payload) in enumerate(batches(5, blocks, 16, 1)):
        for i in range(copies):
            # A chain of 4 batches stays on its workers; the chains go round.
            index.ingest(holders[(at // 4 * copies + i) % WORKERS], payload)
            entries += 16
    growth_bytes = resident_bytes() - before
    stats = index.stats()
    assert stats.entries == entries
    return {
        f"bytes_per_entry_{copies}": round(growth_bytes / entries, 1),
        f"reported_bytes_per_entry_{copies}": round(stats.memory_bytes / entries, 1),
    }


def measure_pause(entries: int) -> Result:
    """The slowest single call while the index grows, and while half of what it holds is cleared and stored again."""
    index, holders = make_filled_index(WORKERS)
    copies = 8
    worst_cpu = worst_wall = 0.0

    def time_call(call: Callable[[], object]) -> None:
        nonlocal worst_cpu, worst_wall
        wall, cpu = time.perf_counter(), time.thread_time()
        call()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        worst_cpu, worst_wall = max(worst_cpu, cpu), max(worst_wall, wall)

    def grow(seed: int, count: int) -> Iterator[None]:
        for at, (_, payload) in enumerate(batches(seed, count // copies, 16, 1)):
            for i in range(copies):
                holder = holders[(at // 4 * copies + i) % WORKERS]
                time_call(lambda holder=holder, payload=payload: index.ingest(holder, payload))  # type: ignore[misc]
            yield

    for _ in grow(7, entries):
        pass
    assert index.stats().entries == entries // copies // 16 * 16 * copies
    for holder in holders[::2]:
        time_call(lambda holder=holder: index.clear(holder))  # type: ignore[misc]
    for _ in grow(8, entries // 4):
        pass
    return {
        "pause_ms_max": round(worst_cpu * 1e3, 3),
        "pause_wall_ms_max": round(worst_wall * 1e3, 3),
        "pause_entries": entries,
    }


def run_isolated(section: Callable[..., Result], *args: Any) -> Result:
    """Run a section in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(section, args)


def measure(quick: bool) -> Result:
    blocks, memory_blocks = (64_000, 64_000) if quick else (256_000, 1_000_000)
    result = run_isolated(measure_ingest, blocks)
    result |= run_isolated(measure_match, quick)
    result |= run_isolated(measure_decision)
    for workers in (8, 500):
        result |= run_isolated(measure_route, workers)
    for copies in (1, 8):
        result |= run_isolated(measure_memory, memory_blocks // 64 * 64, copies)
    result["bytes_per_entry"] = max(result["bytes_per_entry_1"], result["bytes_per_entry_8"])
    result["bytes_per_entry_blocks"] = memory_blocks
    return result | run_isolated(measure_pause, 512_000 if quick else 5_120_000)


KEYS = ("ingest_blocks_per_cpu_s", "match_us_1024", "match_us_1024_cold", "route_us_16k_tokens",
        "route_us_8_workers", "route_us_500_workers", "bytes_per_entry", "pause_ms_max")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a tenth of the load; figures are rough")
    args = parser.parse_args()
    result: Result = {"machine": describe_machine(), **measure(args.quick)}
    print(format_facts(result["machine"]))
    for key in KEYS:
        print(f"{key:28}{result[key]:>16}")
    write_json(args.json, result)


if __name__ == "__main__":
    main()
