"""How much of its prompts a hybrid model takes from the cache, by the rules of vLLM, SGLang and ours.

    python benchmarks/hybrid_cache.py --json out.json --trace claude_code_agentic.jsonl.gz

No model: token ids only. Ours is the engine's real cache (`engine.cache`: admission, clipped chunks, commit, eviction,
events). The other two are simulations of their published rules (see `VllmRule`, `SglangRule`), kinder than the real
programs: whole-memory pools, no fragmentation, no speculative buffers. Requests are served one at a time in the order
they arrive, by all three; sizes are those of a model (`--model`, Qwen3.5-4B), built from its config without weights.

The agentic trace is kvcache-tester's (https://github.com/callanjfox/kv-cache-tester, Apache-2.0), one session a line.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import _path  # noqa: F401
from harness.figures import machine, markdown, write_json
from hybrid_pages import BLOCK, ROWS, pages_of

from engine.cache.kv_cache import KVCache
from engine.dry_run import Pages
from engine.types import Chunk, Request, SamplingParams, Sequence, StepPlan
from events import block_hashes

PREFILL_TOKENS_MAX = 8192
"""Budget of a prefill step, the same for every rule."""
COLUMNS = {title: (key, "{:.3f}") for title, key in (
    ("vLLM's rule", "vllm"), ("SGLang's rule", "sglang"), ("ours", "blockcast"), ("ours, adaptive", "adaptive"),
    ("infinite, attention only", "infinite"))}  # fmt: skip


@dataclass(slots=True)
class Served:
    """One request of a workload. `hashes[i]` names the prefix of i + 1 blocks of prompt and output together."""

    prompt: list[int]
    output: list[int]
    hashes: list[int]


class Rule(Protocol):
    def serve(self, request: Served) -> int:
        """Serve a request; the tokens of its prompt that were cached."""


# ---------------------------------------------------------------------- the rules


class OurRule:
    """The engine's cache itself."""

    def __init__(self, pages: Pages, memory_bytes: int, *, adaptive: bool = False) -> None:
        spec, units = pages.spec, memory_bytes // pages.spec.unit_bytes
        self.cache = KVCache(spec, units, step_tokens_max=PREFILL_TOKENS_MAX, adaptive_eviction=adaptive)
        self.refused = 0
        self.hole_share: list[float] = []

    def serve(self, request: Served) -> int:
        cache = self.cache
        asked = Request(request_id="r", token_ids=request.prompt, params=SamplingParams())
        seq = Sequence(request=asked, token_ids=list(request.prompt), prompt_len=len(request.prompt), arrival_s=0.0)
        if len(request.prompt) + len(request.output) > cache.token_capacity or not cache.admit(seq):
            self.refused += 1
            cache.forget_names(seq)
            return 0
        cached = seq.computed
        for token in [None, *request.output]:
            if token is not None:
                seq.token_ids.append(token)
            while seq.computed < len(seq.token_ids):
                end = cache.clip(seq, min(len(seq.token_ids), seq.computed + PREFILL_TOKENS_MAX))
                grown = cache.grow(seq, end)
                assert grown, "a request that fits alone did not fit alone"
                plan = StepPlan(chunks=[Chunk(seq, seq.computed, end, end == len(seq.token_ids))])
                cache.reserve(seq, end)
                cache.fill(plan)
                cache.commit(plan.chunks)
        self._measure_holes()
        cache.release(seq)
        cache.forget_names(seq)
        cache.take_events()
        return cached

    def _measure_holes(self) -> None:
        """Share of the used memory that is holes in KV units: the price of units."""
        pool = self.cache.pool
        used = len(pool.units) - pool.free_units
        holes = sum(len(unit.holes) for unit in pool.units) / pool.blocks_per_unit[0]
        self.hole_share.append(holes / used)


class Lru:
    """Cached things by key, each of so many bytes, oldest first; what a request uses is taken out meanwhile."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.used = 0.0
        self.items: OrderedDict[object, float] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self.items

    def put(self, key: object, size: float, dropped: Callable[[object], None] | None = None) -> None:
        """Insert or refresh; evicts the oldest as needed. Not inserted when it cannot fit."""
        if key in self.items:
            self.items.move_to_end(key)
        elif size <= self.capacity:
            while self.used + size > self.capacity:
                old, old_size = self.items.popitem(last=False)
                self.used -= old_size
                if dropped is not None:
                    dropped(old)
            self.items[key] = size
            self.used += size


class VllmRule:
    """vLLM's align mode (vLLM #30877, #45238), with the shared-prefix junction of #45939 / #46384 (#53945).

    Attention blocks of the inflated size; a state (one page of every group of linear layers) at the block boundary that
    ends a prefill step, at the last one of the prompt, and at each one that decode crosses; one more at the last
    16-token boundary of the prompt, with the partial attention block before it. One LRU list, tails first.
    """

    def __init__(self, pages: Pages, memory_bytes: int) -> None:
        spec, full = pages.spec, pages.spec.groups[0]
        assert spec.state is not None
        self.block = pages.vllm_block
        self.page = self.block * full.token_bytes
        self.state_bytes = -(-len(spec.state.layers) // len(full.layers)) * self.page
        self.lru = Lru(memory_bytes - self.state_bytes)  # the running request's own state

    def serve(self, request: Served) -> int:
        per = self.block // BLOCK
        length, total = len(request.prompt), len(request.prompt) + len(request.output)
        keys = request.hashes
        blocks = 0
        while (blocks + 1) * per <= len(keys) and ("kv", keys[(blocks + 1) * per - 1]) in self.lru:
            blocks += 1
        usable = min(blocks, (length - 1) // self.block)
        hit = next((n * self.block for n in range(usable, 0, -1) if ("state", keys[n * per - 1]) in self.lru), 0)
        for fine in range((length - 1) // BLOCK, hit // BLOCK, -1):
            key = keys[fine - 1]
            if ("state", key) in self.lru and fine // per <= blocks and (fine % per == 0 or ("part", key) in self.lru):
                hit = fine * BLOCK
                break
        stops = set()
        at = hit
        while at < length:  # every prefill step ends on a block boundary, but the last
            end = min(length, at + PREFILL_TOKENS_MAX)
            end = end if end == length else end // self.block * self.block
            stops.add(end // self.block * per)
            at = end
        stops |= {n * per for n in range(length // self.block + 1, (total - 1) // self.block + 1)}
        fine = (length - 1) // BLOCK
        # Tails first: what is deepest is oldest.
        for n in range((total - 1) // self.block, 0, -1):
            self.lru.put(("kv", keys[n * per - 1]), self.page)
        for stop in sorted(stops - {0}, reverse=True):
            self.lru.put(("state", keys[stop - 1]), self.state_bytes)
        if fine:
            if fine % per:
                self.lru.put(("part", keys[fine - 1]), self.page)
            self.lru.put(("state", keys[fine - 1]), self.state_bytes)
        return hit


class SglangRule:
    """SGLang's MambaRadixCache with the extra buffer and branching (sglang #11214, #14792, #31181, #25993).

    KV of any length; states on multiples of 64 tokens: where a prefill chunk ends, at the last multiple of the prompt,
    at the branching point, and in decode at the last multiple of 256, kept when the request ends. Two pools of fixed
    sizes (states get 0.9 of what KV gets), each with its LRU list; a state goes with its KV, not the reverse.
    """

    STEP, DECODE_STEP, RATIO = 64, 256, 0.9

    def __init__(self, pages: Pages, memory_bytes: int) -> None:
        spec = pages.spec
        assert spec.state is not None
        kv = memory_bytes / (1 + self.RATIO)
        self.state_bytes = spec.state.state_bytes
        self.kv = Lru(kv)
        self.states = Lru(memory_bytes - kv - 3 * self.state_bytes)  # the running request's state and two buffers
        self.chunk_bytes = self.STEP * spec.groups[0].token_bytes

    def serve(self, request: Served) -> int:
        per = self.STEP // BLOCK
        length, total = len(request.prompt), len(request.prompt) + len(request.output)
        if (total // self.STEP + 1) * self.chunk_bytes > self.kv.capacity:
            return 0
        keys = request.hashes[per - 1 :: per]  # one a 64-token chunk
        known = 0
        while known < (length - 1) // self.STEP and keys[known] in self.kv:
            known += 1
        hit = next((n for n in range(known, 0, -1) if keys[n - 1] in self.states), 0)
        stops = {(length - 1) // self.STEP, known}
        stops |= {end // self.STEP for end in range(hit * self.STEP + PREFILL_TOKENS_MAX, length, PREFILL_TOKENS_MAX)}
        decoded = (total - 1) // self.DECODE_STEP * self.DECODE_STEP
        if decoded > length:
            stops.add(decoded // self.STEP)
        for n in range((total - 1) // self.STEP, 0, -1):
            self.kv.put(keys[n - 1], self.chunk_bytes, self._drop_state)
        for stop in sorted(stops - {0}, reverse=True):
            self.states.put(keys[stop - 1], self.state_bytes)
        if hit:
            self.states.put(keys[hit - 1], self.state_bytes)
        return hit * self.STEP

    def _drop_state(self, key: object) -> None:
        if key in self.states:
            self.states.used -= self.states.items.pop(key)


# ---------------------------------------------------------------------- the workloads


def finish(prompt: list[int], output: list[int]) -> Served:
    return Served(prompt, output, [int(h) for h in block_hashes(None, prompt + output, BLOCK)])


def multi_turn(rng: random.Random) -> Iterator[Served]:
    """250 conversations of 3 to 10 turns over 4 system prompts, interleaved; each keeps all its history."""
    fresh = itertools.count(1)
    systems = [[next(fresh) for _ in range(rng.randint(300, 1500))] for _ in range(4)]
    live = [(list(rng.choice(systems)), rng.randint(3, 10)) for _ in range(250)]
    active, rest = live[:60], live[60:]
    while active:
        index = rng.randrange(len(active))
        history, turns = active[index]
        prompt = history + [next(fresh) for _ in range(rng.randint(30, 500))]
        output = [next(fresh) for _ in range(rng.randint(50, 400))]
        yield finish(prompt, output)
        if turns > 1:
            active[index] = (prompt + output, turns - 1)
        elif rest:
            active[index] = rest.pop()
        else:
            del active[index]


def shared_prefix(rng: random.Random) -> Iterator[Served]:
    """1,500 requests on 60 documents of 500 to 12,000 tokens, popular ones more often; each asks its own."""
    fresh = itertools.count(1)
    documents = [[next(fresh) for _ in range(rng.randint(500, 12_000))] for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    for _ in range(1500):
        document = rng.choices(documents, weights)[0]
        yield finish(document + [next(fresh) for _ in range(rng.randint(20, 600))], [next(fresh) for _ in range(100)])


def agentic(path: Path, sessions_max: int, requests_max: int, context_max: int) -> Iterator[Served]:
    """Coding-agent sessions of a trace, interleaved by time; a prompt is taken to go on with the last answer."""
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    picked = [s for s in lines if s["bs"] == 64][:: max(1, len(lines) // sessions_max)][:sessions_max]
    timeline: list[tuple[float, int, Served]] = []
    fresh = itertools.count(1 << 31)
    for number, session in enumerate(picked):
        calls = [r for r in session["reqs"] if "in" in r and r["in"] + r["out"] <= context_max][:requests_max]
        texts = [_expand(call["h"], number) for call in calls]
        for index, (call, text) in enumerate(zip(calls, texts)):
            after = texts[index + 1] if index + 1 < len(texts) else []
            follows = after[: len(text)] == text
            tail = list(after[len(text) : call["in"] + call["out"]]) if follows else []
            whole = text[: call["in"]] + tail
            whole += [next(fresh) for _ in range(call["in"] + call["out"] - len(whole))]
            timeline.append((call["t"], number, finish(whole[: call["in"]], whole[call["in"] :])))
    timeline.sort(key=lambda entry: entry[:2])
    yield from (request for _, _, request in timeline)


def _expand(runs: list[int], session: int) -> list[int]:
    """Token ids of a request: 64 of their own for each block id, which is scoped to the session."""
    ids = [first + i for first, count in zip(runs[::2], runs[1::2]) for i in range(count)]
    base = session * (1 << 24)
    return [base + id_ * 64 + offset & 0x7FFFFFFF for id_ in ids for offset in range(64)]


# ---------------------------------------------------------------------- the table


RULES: dict[str, Callable[[Pages, int], Rule]] = {
    "vllm": VllmRule, "sglang": SglangRule, "blockcast": OurRule,
    "adaptive": lambda pages, memory_bytes: OurRule(pages, memory_bytes, adaptive=True)}  # fmt: skip


def run(requests: list[Served], pages: Pages, sizes_gb: list[int]) -> dict[str, Any]:
    prompt_tokens = sum(len(r.prompt) for r in requests)
    rows: dict[str, dict[str, float]] = {}
    for size in sizes_gb:
        row = rows[f"{size}GB"] = {}
        for name, make in RULES.items():
            rule, start = make(pages, size * 10**9), time.perf_counter()
            row[name] = sum(rule.serve(request) for request in requests) / prompt_tokens
            print(f"    {size} GB {name}: {row[name]:.3f} ({time.perf_counter() - start:.1f} s)", file=sys.stderr)
            if isinstance(rule, OurRule):
                row[f"{name}_holes"] = sum(rule.hole_share) / max(1, len(rule.hole_share))
                row[f"{name}_refused"] = rule.refused
    return {
        "requests": len(requests), "prompt_tokens": prompt_tokens,
        "infinite_cache": _unbounded(requests) / prompt_tokens, "hit_fraction": rows,
    }  # fmt: skip


def _unbounded(requests: list[Served]) -> int:
    """Prompt tokens that full attention alone would find in a cache without bounds, in blocks of 16."""
    seen: set[int] = set()
    found = 0
    for request in requests:
        blocks = 0
        while blocks < (len(request.prompt) - 1) // BLOCK and request.hashes[blocks] in seen:
            blocks += 1
        found += blocks * BLOCK
        seen.update(request.hashes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--trace", type=Path, help="claude_code_agentic.jsonl.gz; without it that workload is left out")
    parser.add_argument("--sizes-gb", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--sessions", type=int, default=24, help="sessions of the trace, evenly picked (default 24)")
    parser.add_argument("--session-requests-max", type=int, default=60)
    parser.add_argument("--context-max", type=int, default=65_536, help="longer requests of the trace are left out")
    parser.add_argument("--seed", type=int, default=0)
    hybrids = [row for row in ROWS if pages_of(row).spec.state]
    parser.add_argument("--model", choices=hybrids, default="Qwen3.5-4B", help="whose sizes (default Qwen3.5-4B)")
    args = parser.parse_args()
    pages = pages_of(args.model)
    workloads: dict[str, Callable[[], Iterator[Served]]] = {
        "multi_turn": lambda: multi_turn(random.Random(args.seed)),
        "shared_prefix": lambda: shared_prefix(random.Random(args.seed)),
    }
    if args.trace:
        limits = (args.sessions, args.session_requests_max, args.context_max)
        workloads["agentic_trace"] = lambda: agentic(args.trace, *limits)
    figures: dict[str, Any] = {}
    for name, make in workloads.items():
        print(f"{name} ...", file=sys.stderr)
        figures[name] = run(list(make()), pages, args.sizes_gb)
    print(f"sizes of {args.model}; share of prompt tokens cached\n")
    rows = {
        f"{name}, {size}": {**row, "infinite": result["infinite_cache"]}
        for name, result in figures.items()
        for size, row in result["hit_fraction"].items()
    }
    print(markdown(rows, COLUMNS, "workload, memory"))
    arguments = {key: value for key, value in vars(args).items() if key not in ("json", "trace")}
    write_json(args.json, {"machine": machine(), "arguments": arguments, "workloads": figures})


if __name__ == "__main__":
    main()
