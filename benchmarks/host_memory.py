#!/usr/bin/env python3
"""What host memory under the engines' caches is worth, and what its copies cost a step.

    benchmarks/host_memory.py --json host.json

`live`: conversations over the repo's own text, played in turn before a router and two real engines. Their caches hold
`--device-share` of what each engine's half of the conversations needs, host memory `--host-share`; compared are engines
with nothing below, with either order of eviction, with host memory under either, and with a cache that holds all.
`step`: decode steps of one engine whose cache is full, so that every block that is begun evicts one, alternating with
and without host memory, by the CPU time of the thread that computes; and the speed of the copies beside memcpy.
`loads`: decode steps of one engine that bring back blocks of requests that wait for them, `--load-tokens` each, with
the engine's own bound, and copy down what was evicted for them; in turn with steps that are kept from it, compared in
pairs: the mean of the steps while requests wait, and of those alone that copy (small steps do not all). The step that
admits such a request stands beside the one before it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import numpy as np
import torch
from harness.figures import in_words, machine, markdown, write_json
from harness.load import Outcome, summarise
from harness.programs import Cluster
from harness.talks import ANSWER_TOKENS, make_conversations, play

from engine.cache.kv_cache import KVCache
from engine.cache.spec import CacheSpec
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.execution.runner import ModelRunner, unit_stride_bytes
from engine.execution.sizing import load_bytes_max
from engine.models.loader import load_model
from engine.scheduler import Scheduler, SchedulerConfig
from engine.tiny.model import PRESETS, cached_model
from engine.types import Request, SamplingParams

BLOCK = 16
COLUMNS = {
    "requests": ("requests", "{:,}"), "prompt tokens": ("prompt_tokens", "{:,}"),
    "computed": ("prefilled_tokens", "{:,}"), "mispredicted": ("mispredicted_requests", "{:,}"),
    "TTFT mean": ("ttft_mean_ms", "{:.0f} ms"), "TTFT p99": ("ttft_p99_ms", "{:.0f} ms"),
}  # fmt: skip
STEP_COLUMNS = {
    "sequences": ("sequences", "{:,}"), "without": ("without_ms", "{:.3f} ms"), "with copies": ("with_ms", "{:.3f} ms"),
    "slower": ("slower", "{:.1%}"), "copied": ("bytes_per_s", "{:,.0f} B/s"), "of memcpy": ("memcpy_share", "{:.0%}"),
}  # fmt: skip
LOAD_COLUMNS = {
    "steps with loads": ("with_loads", "{:,}"), "without": ("without_ms", "{:.3f} ms"),
    "slower": ("slower", "{:.1%}"), "of them copy": ("copying_share", "{:.0%}"), "these": ("copying_slower", "{:.1%}"),
    "blocks a step": ("blocks_a_step", "{:.1f}"),
    "step that admits": ("admitting_slower", "{:.1%}"), "copied": ("bytes_per_s", "{:,.0f} B/s"),
    "of memcpy": ("memcpy_share", "{:.0%}"),
}  # fmt: skip


def live(o: argparse.Namespace, model: Path, spec: CacheSpec) -> dict[str, dict[str, Any]]:
    """Rows by what the engines have."""
    conversations = make_conversations(model, o.conversations, o.turns, o.context_tokens, o.turn_tokens)
    length = o.context_tokens + o.turns * (o.turn_tokens + ANSWER_TOKENS + 30)
    needed = o.conversations * length // 2 // BLOCK  # blocks, of an engine
    device = max(int(needed * o.device_share), 2 * length // BLOCK)
    host = ("--host-cache-memory", str(int(needed * o.host_share) * unit_stride_bytes(spec)))
    adaptive = ("--eviction-policy", "adaptive")
    modes: dict[str, tuple[int | None, tuple[str, ...]]] = {
        "lru": (device, ()),
        "adaptive": (device, adaptive),
        "lru, host memory": (device, host),
        "adaptive, host memory": (device, (*host, *adaptive)),
        "a cache for all": (None, ()),
    }
    print(f"{needed} blocks are needed of each engine, {device} are on the device, {int(needed * o.host_share)} below")
    outcomes: dict[str, list[Outcome]] = {name: [] for name in modes}
    with tempfile.TemporaryDirectory(prefix="blockcast-host-") as folder:
        for _ in range(o.rounds):
            for name, (blocks, flags) in modes.items():
                with Cluster(model, policy="kv", num_blocks=blocks, log_dir=Path(folder), engine_flags=flags) as fleet:
                    played = play(fleet.url, fleet.model_name, conversations, lambda name, outcome: None)
                    outcomes[name] += asyncio.run(played)
                print(f"  {name}: {summarise(outcomes[name])['prefilled_tokens']:,} tokens computed", flush=True)
    return {name: summarise(found) for name, found in outcomes.items()}


class Decoding:
    """An engine that decodes in a full cache."""

    def __init__(self, model: Path, sequences: int, host_units: int, room: int = 0) -> None:
        """`room`: blocks more than what they need."""
        loaded, dtype = load_model(model, dtype="bfloat16")
        spec = loaded.cache_spec(BLOCK, dtype)
        length = 1024
        self.units = units = sequences * (length // BLOCK + 2) + room
        bound = load_bytes_max(EngineConfig(), loaded, spec, dtype=dtype, device=torch.device("cpu"))
        cache = KVCache(spec, units, host_units=host_units, load_bytes_max=bound)
        config = SchedulerConfig(max_num_seqs=sequences + 1, max_num_batched_tokens=2048, max_model_len=length)
        runner = ModelRunner(
            loaded, spec, units, device=torch.device("cpu"), dtype=dtype, max_model_len=length, host_units=host_units
        )
        self.core, self.moves, self.spec = (
            EngineCore(Scheduler(config, cache), runner, lambda events: None),
            runner.moves,
            spec,
        )
        self.vocabulary = loaded.config.vocab_size
        fillers = units * BLOCK // length
        for i in range(fillers):
            self.add(f"fill{i}", [(i * 7 + j * 13) % self.vocabulary for j in range(length - 40)], 1)
            while self.core.has_work:
                self.core.step(0.0)
        for i in range(sequences):
            self.add(f"run{i}", [(i * 11 + j * 17 + 5) % self.vocabulary for j in range(64)], length - 70)
        for _ in range(sequences + 40):
            self.core.step(0.0)

    def add(self, name: str, token_ids: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.core.add(Request(request_id=name, token_ids=token_ids, params=params), now=0.0)

    def steps_s(self, count: int) -> float:
        """CPU seconds of a step, on average."""
        start_s = time.thread_time()
        for _ in range(count):
            self.core.step(0.0)
        return (time.thread_time() - start_s) / count


def step(o: argparse.Namespace, model: Path, sequences: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    plain, tiered = Decoding(model, sequences, 0), Decoding(model, sequences, 2000)
    stored, copy_s = tiered.core.stats().host_stored_bytes, tiered.moves.copy_s
    pairs = [(plain.steps_s(o.steps), tiered.steps_s(o.steps)) for _ in range(o.step_rounds)]
    stored, copy_s = tiered.core.stats().host_stored_bytes - stored, tiered.moves.copy_s - copy_s
    assert stored, "nothing was copied"
    without_s, with_s = (statistics.median(times) for times in zip(*pairs))
    block_bytes = tiered.spec.block_bytes(0)
    return {
        "sequences": sequences, "steps": o.steps * o.step_rounds,
        "without_ms": without_s * 1e3, "with_ms": with_s * 1e3,
        "slower": statistics.median(b / a for a, b in pairs) - 1, "stored_bytes": stored, "block_bytes": block_bytes,
        "copy_ms_a_step": copy_s / (o.steps * o.step_rounds) * 1e3,
        "bytes_per_s": stored / copy_s, "memcpy_share": stored / copy_s / memcpy_bytes_per_s(block_bytes),
    }  # fmt: skip


def loads(o: argparse.Namespace, model: Path, sequences: int) -> dict[str, Any]:
    """Decode steps of one engine with and without loads beside them, in turn: every other step is kept from loading."""
    torch.set_num_threads(1)
    engine = Decoding(model, sequences, o.host_blocks, room=4 * o.load_tokens // BLOCK)
    core, cache = engine.core, engine.core.scheduler.cache
    assert cache.loads is not None
    begin, paused = cache.loads.begin, False

    def begins(*, beside_decodes: bool) -> None:
        if not paused:
            begin(beside_decodes=beside_decodes)

    cache.loads.begin = begins  # type: ignore[method-assign]
    rng = random.Random(sequences)
    count = 3 * engine.units * BLOCK // (2 * o.load_tokens)
    texts = [[rng.randrange(engine.vocabulary) for _ in range(o.load_tokens)] for _ in range(count)]
    pairs: list[tuple[float, float, int]] = []
    """CPU seconds without and with, and bytes copied."""
    admits: list[tuple[float, float]] = []
    moved, copy_s = [0, 0], 0.0
    for turn in range(o.load_rounds):
        for number, text in enumerate(texts):
            paused, waits = False, core.stats()
            plain_s = engine.steps_s(1)
            engine.add(f"load{turn}/{number}", [*text, turn], 1)
            admits.append((plain_s, engine.steps_s(1)))
            if not cache.loads:  # it computes, too: the first time all, and where one step brings all there is
                admits.pop()
            while cache.loads:
                before, copied_s, times = core.stats(), engine.moves.copy_s, {}
                for paused in rng.sample([True, False], 2):  # which is first is chance: decodes store now and then
                    times[paused] = engine.steps_s(1)
                after = core.stats()
                if not cache.loads:  # the step that brings the last of it computes the rest of the prompt
                    break
                changes = (after.host_loaded_bytes - before.host_loaded_bytes,
                           after.host_stored_bytes - before.host_stored_bytes)  # fmt: skip
                pairs.append((times[True], times[False], sum(changes)))
                moved = [total + change for total, change in zip(moved, changes)]
                copy_s += engine.moves.copy_s - copied_s
            while core.stats().finished_requests == waits.finished_requests:
                engine.steps_s(1)
    assert pairs, "nothing was loaded beside decodes"
    assert moved[1], "nothing was stored beside decodes"
    block_bytes = engine.spec.block_bytes(0)
    copying = [b / a - 1 for a, b, copied in pairs if copied]
    others = [b / a - 1 for a, b, copied in pairs if not copied]
    slower = sum(len(some) * statistics.median(some) for some in (copying, others) if some) / len(pairs)
    return {
        "sequences": sequences, "with_loads": len(pairs),
        "without_ms": statistics.median(a for a, _, _ in pairs) * 1e3,
        "copying_share": len(copying) / len(pairs), "copying_slower": statistics.median(copying), "slower": slower,
        "admitting_slower": statistics.median(b / a for a, b in admits) - 1,
        "loaded_bytes": moved[0], "stored_bytes": moved[1], "block_bytes": block_bytes,
        "blocks_a_step": sum(moved) / block_bytes / len(pairs), "bytes_per_s": sum(moved) / copy_s,
        "memcpy_share": sum(moved) / copy_s / memcpy_bytes_per_s(block_bytes), "pairs_s": pairs,
    }  # fmt: skip


def memcpy_bytes_per_s(block_bytes: int, total: int = 256 << 20) -> float:
    """Copies of so many bytes each, between random places of two arrays much larger than the CPU's caches."""
    count = total // block_bytes
    places = random.Random(0).sample(range(count), count)
    one, other = np.ones((count, block_bytes), np.uint8), np.zeros((count, block_bytes), np.uint8)
    times = []
    for _ in range(3):
        start_s = time.thread_time()
        for to, of in zip(places, reversed(places)):
            other[to] = one[of]
        times.append(time.thread_time() - start_s)
    return count * block_bytes / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["live", "step", "loads"], default=["live", "step", "loads"])
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--context-tokens", type=int, default=1200)
    parser.add_argument("--turn-tokens", type=int, default=100)
    parser.add_argument("--device-share", type=float, default=0.1)
    parser.add_argument("--host-share", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--load-tokens", type=int, default=480, help="of each request that comes back (part loads)")
    parser.add_argument("--host-blocks", type=int, default=4000, help="of host memory (part loads)")
    parser.add_argument(
        "--preset", default="demo", help="of the random model: scripts/make_tiny_model --help lists them"
    )
    parser.add_argument("--load-rounds", type=int, default=4, help="times that each request comes (part loads)")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--step-rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    facts = machine("torch")
    print(in_words(facts))
    model = cached_model(PRESETS[o.preset])
    found: dict[str, Any] = {"machine": facts}
    if "live" in o.parts:
        loaded, dtype = load_model(model, dtype="bfloat16")
        found["live"] = live(o, model, loaded.cache_spec(BLOCK, dtype))
        print("\n" + markdown(found["live"], COLUMNS, "engines"))
    if "step" in o.parts:
        found["step"] = {str(count): step(o, model, count) for count in o.sequences}
        print("\n" + markdown(found["step"], STEP_COLUMNS, "decoding"))
    if "loads" in o.parts:
        found["loads"] = {str(count): loads(o, model, count) for count in o.sequences}
        print("\n" + markdown(found["loads"], LOAD_COLUMNS, "decoding"))
    write_json(o.json, found)


if __name__ == "__main__":
    main()
