"""The prefix index measured: ingest from payload bytes, match, decision, bytes per entry, longest pause.

    python benchmarks/index.py --json index.json [--quick]

Everything is CPU time of the measuring thread (the machine may be shared); pauses also by the wall clock. Each section
runs in a process of its own, so that memory and caches of one do not colour the next. JSON keys:

    ingest_blocks_per_cpu_s   16-block batches from 64 workers, token hashing included
    match_us_1024             1,024 blocks, 64 workers that all hold them, token bytes in, the same prompt again (hot)
    decision_us_16k_tokens    a list of 16,385 token ids in, the worker with the longest usable prefix of 64 out
    bytes_per_entry           growth of resident memory per (worker, group, block) at 1 M blocks: the larger of
                              each block on 1 and on 8 of 64 workers (bytes_per_entry_1, bytes_per_entry_8)
    pause_ms_max              longest single call (ingest of 16 blocks, clear) while the index grows to 5 M entries,
                              CPU time of the call
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import index_load as load
from harness.figures import in_words, machine, resident_bytes, write_json

from router.index import make_index
from router.index.protocol import PrefixIndex, Scope

SCOPE = Scope("m")
WORKERS = 64
Result = dict[str, Any]


def filled(workers: int) -> tuple[PrefixIndex, list[Any]]:
    index = make_index(seed=1)
    return index, [index.add_holder(f"w{i}", "m") for i in range(workers)]


def measure_ingest(blocks: int) -> Result:
    """Blocks per CPU second for batches of 1, 16 and 64 blocks; best of three, from an empty index each time."""
    result: Result = {}
    for per_batch in (1, 16, 64):
        payloads = list(load.batches(per_batch, blocks, per_batch, WORKERS))
        best = 0.0
        for _ in range(3):
            index, holders = filled(WORKERS)
            started = time.thread_time()
            for stream, payload in payloads:
                index.ingest(holders[stream], payload)
            best = max(best, len(payloads) * per_batch / (time.thread_time() - started))
            assert index.stats().entries == len(payloads) * per_batch
        result[f"ingest_blocks_per_cpu_s_batch_{per_batch}"] = round(best)
    result["ingest_blocks_per_cpu_s"] = result["ingest_blocks_per_cpu_s_batch_16"]
    return result


def per_call_us(call: Callable[[Any], object], inputs: list[Any], seconds: float) -> float:
    """Median over passes of CPU microseconds a call, cycling through the inputs."""
    for item in inputs[:4]:
        call(item)
    means = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(means) < 3:
        started = time.thread_time()
        for item in inputs:
            call(item)
        means.append((time.thread_time() - started) / len(inputs) * 1e6)
    return load.median(means)


def measure_match(quick: bool) -> Result:
    """Each prompt is held by every worker. Hot: one prompt; cold: many, far more than the caches hold."""
    rows = []
    seconds = 0.1 if quick else 0.4
    for workers in (8, WORKERS) if quick else (8, WORKERS, 512):
        for blocks in (16, 128, 1024, 4096):
            rng = random.Random(blocks)
            count = max(8, (1 << 17) // blocks)
            prompts = [load.prompt(rng, blocks) for _ in range(count)]
            index, holders = filled(workers)
            for held in prompts:
                for holder in holders:
                    index.ingest(holder, held.payload)
            for hit in ("full", "half", "none"):
                queries = [array("I", load.asked(rng, held, hit)).tobytes() for held in prompts]
                expected = {"full": blocks, "half": blocks // 2, "none": 0}[hit] * load.BLOCK_TOKENS
                matches = index.match(queries[0], SCOPE)
                assert len(matches) == (workers if expected else 0)
                assert all(match.tokens == expected for match in matches)

                def call(query: bytes, index: PrefixIndex = index) -> object:
                    return index.match(query, SCOPE)

                hot = per_call_us(call, [queries[0]] * 20, seconds)
                cold = per_call_us(call, queries, seconds)
                rows.append(
                    {
                        "workers": workers,
                        "blocks": blocks,
                        "hit": hit,
                        "hot_us": round(hot, 2),
                        "cold_us": round(cold, 2),
                    }
                )
    wanted = next(r for r in rows if (r["workers"], r["blocks"], r["hit"]) == (WORKERS, 1024, "full"))
    return {"match": rows, "match_us_1024": wanted["hot_us"], "match_us_1024_cold": wanted["cold_us"]}


def measure_decision() -> Result:
    """A list of token ids in, the worker with the longest usable prefix out; worker i holds i/64 of each prompt."""
    index, holders = filled(WORKERS)
    rng = random.Random(3)
    prompts = [load.prompt(rng, 1024) for _ in range(32)]
    for held in prompts:
        for i, holder in enumerate(holders):
            count = 1024 * (i + 1) // WORKERS
            index.ingest(holder, load.stored(held.names[:count], None, held.token_ids[: count * load.BLOCK_TOKENS]))

    def decide(token_ids: list[int]) -> object:
        return max(index.match(token_ids, SCOPE), key=lambda match: match.tokens).holder

    assert all(decide(held.token_ids) == holders[-1] for held in prompts)
    result: Result = {"decision_us_16k_tokens": round(per_call_us(decide, [p.token_ids for p in prompts], 1.5), 1)}
    as_bytes = [array("I", held.token_ids).tobytes() for held in prompts]
    result["decision_us_16k_token_bytes"] = round(per_call_us(decide, as_bytes, 1.0), 1)  # type: ignore[arg-type]
    return result


def measure_memory(blocks: int, copies: int) -> Result:
    index, holders = filled(WORKERS)
    for _, payload in load.batches(99, 16 * 2000, 16, 1):  # warm the allocator and the generator up
        del payload
    before = resident_bytes()
    entries = 0
    for at, (_, payload) in enumerate(load.batches(5, blocks, 16, 1)):
        for i in range(copies):
            # A chain of 4 batches stays on its workers; the chains go round.
            index.ingest(holders[(at // 4 * copies + i) % WORKERS], payload)
            entries += 16
    grown = resident_bytes() - before
    stats = index.stats()
    assert stats.entries == entries
    return {
        f"bytes_per_entry_{copies}": round(grown / entries, 1),
        f"reported_bytes_per_entry_{copies}": round(stats.memory_bytes / entries, 1),
    }


def measure_pause(entries: int) -> Result:
    """The slowest single call while the index grows, and while half of what it holds is cleared and stored again."""
    index, holders = filled(WORKERS)
    copies = 8
    worst_cpu = worst_wall = 0.0

    def timed(call: Callable[[], object]) -> None:
        nonlocal worst_cpu, worst_wall
        wall, cpu = time.perf_counter(), time.thread_time()
        call()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        worst_cpu, worst_wall = max(worst_cpu, cpu), max(worst_wall, wall)

    def grow(seed: int, count: int) -> Iterator[None]:
        for at, (_, payload) in enumerate(load.batches(seed, count // copies, 16, 1)):
            for i in range(copies):
                holder = holders[(at // 4 * copies + i) % WORKERS]
                timed(lambda holder=holder, payload=payload: index.ingest(holder, payload))  # type: ignore[misc]
            yield

    for _ in grow(7, entries):
        pass
    assert index.stats().entries == entries // copies // 16 * 16 * copies
    for holder in holders[::2]:
        timed(lambda holder=holder: index.clear(holder))  # type: ignore[misc]
    for _ in grow(8, entries // 4):
        pass
    return {
        "pause_ms_max": round(worst_cpu * 1e3, 3),
        "pause_wall_ms_max": round(worst_wall * 1e3, 3),
        "pause_entries": entries,
    }


def isolated(section: Callable[..., Result], *args: Any) -> Result:
    """Run a section in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(section, args)


def measure(quick: bool) -> Result:
    blocks, memory_blocks = (64_000, 64_000) if quick else (256_000, 1_000_000)
    result = isolated(measure_ingest, blocks)
    result |= isolated(measure_match, quick)
    result |= isolated(measure_decision)
    for copies in (1, 8):
        result |= isolated(measure_memory, memory_blocks // 64 * 64, copies)
    result["bytes_per_entry"] = max(result["bytes_per_entry_1"], result["bytes_per_entry_8"])
    result["bytes_per_entry_blocks"] = memory_blocks
    return result | isolated(measure_pause, 512_000 if quick else 5_120_000)


KEYS = ("ingest_blocks_per_cpu_s", "match_us_1024", "decision_us_16k_tokens", "bytes_per_entry", "pause_ms_max")


def print_table(result: Result) -> None:
    print("machine:", in_words(result["machine"]))
    for key in KEYS:
        print(f"{key:28}{result[key]:>16}")
    print(f"\n{'match':>8} {'blocks':>7} {'hit':>6} {'hot us':>10} {'cold us':>10}")
    for row in result["match"]:
        print(f"{row['workers']:>6} w {row['blocks']:>7} {row['hit']:>6} {row['hot_us']:>10} {row['cold_us']:>10}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a tenth of the load; figures are rough")
    args = parser.parse_args()
    result: Result = {"machine": machine(), **measure(args.quick)}
    print_table(result)
    write_json(args.json, result)


if __name__ == "__main__":
    main()
