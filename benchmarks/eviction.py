#!/usr/bin/env python3
"""What one cache of prefixes finds under different orders of eviction, on traces of requests.

    python benchmarks/eviction.py --json out.json mooncake_conversation.jsonl.gz claude_code_agentic.jsonl.gz

Only names of blocks of 512 tokens (of 2,048 characters where a trace has text), full ones, one request at a time; all
sessions of a trace begin at once. A cache's size is a share of the trace's distinct blocks; a block is found with all
those before it. The first tenth of the requests is served and not counted. LRU and adaptive are the orders of the
engine's own cache (`played_cache`); Belady knows the future. Traces: Mooncake
(kvcache-ai/Mooncake, FAST25-release/traces), agents' sessions (callanjfox/kv-cache-tester), agents' texts
(LMCache/lmcache-agent-trace). `contrary` is made here: what was learned of each of its conversations is wrong.

`--state-blocks 12` plays a hybrid model's cache too: a prompt is resumed only at states that were kept, each in the
room of 12 blocks. LRU is GreedyDual then, and Belady's order has no states to keep.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import random
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _path  # noqa: F401
from harness.belady import belady_hits
from harness.figures import describe_machine, markdown_table, write_json
from played_cache import PlayedCache

BLOCK = 512
Trace = list[list[int]]
"""Names of the full blocks of each prompt."""


Orders = dict[str, Callable[[int], PlayedCache]]


def make_orders(state_blocks: int | None = None) -> Orders:
    """Return the functions that make a cache of a capacity in blocks; `state_blocks`: of a hybrid model."""
    return {
        order: partial(PlayedCache, block_tokens=BLOCK, state_blocks=state_blocks, adaptive=order == "adaptive")
        for order in ("LRU", "adaptive")
    }


# ---------------------------------------------------------------------- the traces


def read(path: Path, requests_max: int) -> Trace:
    """Any of the three formats. Raises ValueError for another."""
    timeline: list[tuple[float, int, int, Sequence[Any]]]
    if ".tar" in path.suffixes:
        timeline = sorted(_texts(path), key=lambda entry: entry[:3])
    else:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            records = [json.loads(line) for line in lines]
        if "hash_ids" in records[0]:
            timeline = [(i, 0, 0, r["hash_ids"][: r["input_length"] // BLOCK]) for i, r in enumerate(records)]
        elif "reqs" in records[0]:
            timeline = sorted(_sessions(records), key=lambda entry: entry[:3])
        else:
            raise ValueError(f"{path}: line 1 has neither `hash_ids` nor `reqs`")
    calls = [entry for entry in timeline if entry[3]][:requests_max]
    rng = random.Random(0)
    names: dict[Any, int] = {}
    trace = []
    for _, session, _, parts in calls:
        prefix: Any = session
        prompt = []
        for part in parts:  # a name is a random number for a prefix, as a block's hash is
            prefix = names.setdefault((prefix, part), rng.getrandbits(63))
            prompt.append(prefix)
        trace.append(prompt)
    return trace


def _sessions(records: list[dict[str, Any]]) -> Iterator[tuple[float, int, int, Sequence[Any]]]:
    for number, session in enumerate(records):
        per = BLOCK // session["bs"]
        calls = [call for call in session["reqs"] if "in" in call]
        for index, call in enumerate(calls):
            ids = [first + k for first, count in zip(call["h"][::2], call["h"][1::2]) for k in range(count)]
            yield call["t"], number, index, [tuple(ids[k : k + per]) for k in range(0, len(ids) - per + 1, per)]


def _texts(path: Path) -> Iterator[tuple[float, int, int, Sequence[Any]]]:
    """Calls of each file, from its own beginning; blocks of four characters a token."""
    size = 4 * BLOCK
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".jsonl") else None
            if file is not None:
                calls = [json.loads(line) for line in file]
                for index, call in enumerate(calls):
                    text = call["input"]
                    blocks = [text[k : k + size] for k in range(0, len(text) - size + 1, size)]
                    yield call["timestamp"] - calls[0]["timestamp"], 0, index, blocks


def generate_contrary(requests: int = 6000) -> Trace:
    """Conversations that come back at once after a long gap, and late after a short one."""
    rng = random.Random(0)
    waiting = [(300 * rng.random(), number, 0, [rng.getrandbits(63) for _ in range(20)]) for number in range(300)]
    heapq.heapify(waiting)
    trace = []
    for _ in range(requests):
        at, number, turn, names = heapq.heappop(waiting)
        trace.append(names)
        next_names = [*names, rng.getrandbits(63)] if len(names) < 40 else [rng.getrandbits(63) for _ in range(20)]
        gap = rng.uniform(400, 900) if turn % 2 else rng.uniform(1, 8)
        heapq.heappush(waiting, (at + gap, number, turn + 1, next_names))
    return trace


# ---------------------------------------------------------------------- figures


def play(trace: Trace, percents: Sequence[int], warm: int, orders: Orders, bound: str) -> dict[str, dict[str, float]]:
    """Share of prompt blocks found, by size and order; `bound` names Belady's. The cache has the room of a share of the
    distinct blocks."""
    distinct_count = len({name for names in trace for name in names})
    block_count = sum(map(len, trace[warm:]))
    rows: dict[str, dict[str, float]] = {}
    for percent in percents:
        capacity = max(1, distinct_count * percent // 100)
        row = rows[f"{percent} %"] = {}
        for order, make in orders.items():
            cache, start_s = make(capacity), time.process_time()
            hit_counts = [cache.serve(names) for names in trace]
            row[order] = sum(hit_counts[warm:]) / block_count
            row[f"{order}, us a block"] = 1e6 * (time.process_time() - start_s) / sum(map(len, trace))
            row[f"{order}, refused"] = cache.refused_prompts
        row[bound] = sum(belady_hits(trace, capacity)[warm:]) / block_count
        print(f"    {percent} %: " + "  ".join(f"{k} {row[k]:.3f}" for k in (*orders, bound)), file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, nargs="*", help="files of the formats above")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--requests", type=int, default=6000, help="of each trace (default 6000)")
    parser.add_argument("--percents", type=int, nargs="+", default=[2, 5, 10, 20, 30, 50], help="sizes of the cache")
    parser.add_argument(
        "--state-blocks", type=int, nargs="+", default=[], metavar="BLOCKS",
        help="play caches of hybrid models too, a state of which takes the room of so many blocks (none by default; "
        "Qwen3.5-4B 3, Nemotron-H-8B 12)",
    )  # fmt: skip
    args = parser.parse_args()
    if any(blocks < 1 for blocks in args.state_blocks):
        parser.error(f"argument --state-blocks: expected at least 1, got {min(args.state_blocks)}")
    figures: dict[str, Any] = {}
    for path in (*args.traces, None):
        name = "contrary" if path is None else path.name.split(".")[0]
        trace = generate_contrary(args.requests) if path is None else read(path, args.requests)
        distinct, block_count = len({n for names in trace for n in names}), sum(map(len, trace))
        print(f"{name}: {len(trace)} requests, {block_count} blocks, {distinct} distinct", file=sys.stderr)
        rows = play(trace, args.percents, len(trace) // 10, make_orders(), "Belady")
        figures[name] = {"requests": len(trace), "blocks": block_count, "distinct": distinct, "rows": rows}
        columns = {title: (title, "{:.3f}") for title in ("LRU", "adaptive", "Belady")}
        print(f"\n{name}\n\n{markdown_table(rows, columns, 'cache')}\n")
        for blocks in args.state_blocks:
            hybrid = play(trace, args.percents, len(trace) // 10, make_orders(blocks), "Belady, no states")
            figures[name][f"a state as {blocks} blocks"] = hybrid
            columns = {title: (title, "{:.3f}") for title in ("LRU", "adaptive", "Belady, no states")}
            print(f"{name}, a state as {blocks} blocks\n\n{markdown_table(hybrid, columns, 'cache')}\n")
    write_json(args.json, {"machine": describe_machine(), "requests": args.requests, "traces": figures})


if __name__ == "__main__":
    main()
