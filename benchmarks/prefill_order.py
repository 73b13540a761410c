#!/usr/bin/env python3
"""Short turns beside long prompts on one engine, whose prompts are computed by length or by arrival.

    benchmarks/prefill_order.py --json order.json
    benchmarks/prefill_order.py --workloads equal --loads 0.9 --seeds 1

The engine's own core, scheduler and cache compute the steps of `engine serve --simulate SPEC` on a virtual clock: each
figure is exact for its draw, and no machine's noise is in it. Both orders play the same draws: sessions that come by
chance, whose next turn comes a while after the last answer.

mixed    90 % agents (1,000 to 6,000 tokens, then 5 turns of 300 to 800 more), 10 % about a document
         (20,000 to 60,000 tokens, then 2 such turns); answers of 100 to 300 tokens, about 3 s before the next turn
equal    prompts of 1,000 tokens, once each
at-once  nano-vllm's 256 prompts of 100 to 1,024 tokens, answers as long, all at one moment

A load of 1 is as many prompt tokens as the engine could compute if it did nothing else and evicted nothing. Classes are
by what is new of a prompt since the session's last turn: short < 2,000 <= middle < 10,000 <= long. E2E: to the end of
the answer. Sessions that begin in the first tenth are played and not counted.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _path  # noqa: F401
from harness.figures import in_words, machine, markdown, write_json

from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec
from engine.core import EngineCore
from engine.scheduler import Scheduler, SchedulerConfig
from engine.simulation.runner import Answers, SimulatedRunner
from engine.simulation.spec import SimulationSpec, read_spec
from engine.turns import PrefillOrder
from engine.types import Request, SamplingParams

ORDERS: tuple[PrefillOrder, ...] = ("arrival", "shortest")
WORKLOADS = ("mixed", "equal", "at-once")
BLOCK = 16
STEP_TOKENS = 2048
THINK_S = 3.0
COLUMNS = {
    "requests": ("requests", "{}"),
    "TTFT mean": ("ttft_mean_s", "{:.3f}"), "p50": ("ttft_p50_s", "{:.3f}"), "p99": ("ttft_p99_s", "{:.2f}"),
    "p99.9": ("ttft_p99.9_s", "{:.2f}"), "most": ("ttft_max_s", "{:.2f}"),
    "E2E mean": ("e2e_mean_s", "{:.3f}"), "E2E p99": ("e2e_p99_s", "{:.2f}"),
    "cached": ("cached", "{:.3f}"), "preempted": ("preempted", "{}"), "until": ("until_s", "{:.1f}"),
    "host us/step": ("host_step_us", "{:.0f}"),
}  # fmt: skip
"""title -> (key, format); times in seconds."""
CLASSES = {"short": 2_000, "middle": 10_000, "long": 1 << 60}


@dataclass
class Session:
    """What one client will say."""

    begins_s: float
    turns: list[tuple[int, int, float]]
    """(new tokens, tokens of the answer, seconds from the answer before)."""
    counts: bool = True
    text: list[int] = field(default_factory=list)


@dataclass
class Answered:
    """A request, when it came and what it got. Seconds."""

    new_tokens: int
    counts: bool
    came_s: float
    first_s: float = 0.0
    end_s: float = 0.0


def sessions(workload: str, load: float, seconds: float, spec: SimulationSpec, rng: random.Random) -> list[Session]:
    if workload == "at-once":
        return [Session(0.0, [(rng.randint(100, 1024), rng.randint(100, 1024), 0.0)]) for _ in range(256)]
    drawn: list[Session] = []
    begins_s, times = 0.0, spec.times(STEP_TOKENS, 1.0)
    shapes = [_turns(workload, rng) for _ in range(2000)]
    each_s = statistics.fmean(
        sum(times.prefill_s(new, sum(n + a for n, a, _ in turns[:i])) for i, (new, _, _) in enumerate(turns))
        for turns in shapes
    )
    for turns in itertools.cycle(shapes):
        begins_s += rng.expovariate(load / each_s)
        if begins_s > seconds:
            return drawn
        drawn.append(Session(begins_s, turns, begins_s > 0.1 * seconds))
    raise AssertionError


def _turns(workload: str, rng: random.Random) -> list[tuple[int, int, float]]:
    if workload == "equal":
        return [(1000, 200, 0.0)]
    long = rng.random() < 0.1
    first = rng.randint(20_000, 60_000) if long else rng.randint(1_000, 6_000)
    news = [first, *(rng.randint(300, 800) for _ in range(2 if long else 5))]
    return [(new, rng.randint(100, 300), rng.expovariate(1 / THINK_S)) for new in news]


class Play:
    """One order, one draw."""

    def __init__(self, order: PrefillOrder, drawn: list[Session], spec: SimulationSpec) -> None:
        self.now = 0.0
        group = GroupSpec(FULL_ATTENTION, layers=(0,), num_kv_heads=1, head_dim=128, dtype_bytes=2)
        cache = KVCache(CacheSpec(BLOCK, (group,)), spec.kv_tokens // BLOCK, step_tokens_max=STEP_TOKENS)
        config = SchedulerConfig(
            max_num_batched_tokens=STEP_TOKENS, max_model_len=spec.max_model_len, prefill_order=order
        )
        runner = SimulatedRunner(
            spec.times(STEP_TOKENS, 1.0), Answers(range(5, 261), 0, None), clock=lambda: self.now, sleep=self._sleep
        )
        self.core = EngineCore(Scheduler(config, cache), runner, lambda events: None)
        self._tokens = itertools.count(1000)
        self._ahead: list[tuple[float, int, int]] = []
        """(when, session, turn)."""
        self._sessions = drawn
        self._asked: dict[str, tuple[Answered, int, int]] = {}
        self.answered: list[Answered] = []
        self.host_s = 0.0
        for number, session in enumerate(drawn):
            session.text.clear()
            heapq.heappush(self._ahead, (session.begins_s, number, 0))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self) -> None:
        begun_s = time.process_time()
        while self._ahead or self.core.has_work:
            if not self.core.has_work:
                self.now = max(self.now, self._ahead[0][0])
            while self._ahead and self._ahead[0][0] <= self.now:
                self._ask(*heapq.heappop(self._ahead))
            self._step()
        self.host_s = time.process_time() - begun_s

    def _ask(self, came_s: float, number: int, turn: int) -> None:
        session = self._sessions[number]
        new, answer, _ = session.turns[turn]
        first = next(self._tokens)  # no two texts begin alike
        session.text += [first] + [first % 7] * (new - 1)
        name = f"{number}-{turn}"
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        self.core.add(Request(request_id=name, token_ids=session.text.copy(), params=params), came_s)
        self._asked[name] = Answered(new, session.counts, came_s), number, turn

    def _step(self) -> None:
        for output in self.core.step(self.now):
            asked, number, turn = self._asked[output.request_id]
            session = self._sessions[number]
            session.text += output.token_ids
            asked.first_s = asked.first_s or self.now
            if output.finish_reason is not None:
                asked.end_s = self.now
                self.answered.append(asked)
                del self._asked[output.request_id]
                if turn + 1 < len(session.turns):
                    heapq.heappush(self._ahead, (self.now + session.turns[turn + 1][2], number, turn + 1))


def class_of(new_tokens: int) -> str:
    return next(name for name, below in CLASSES.items() if new_tokens < below)


def rows(plays: list[Play]) -> Iterator[dict[str, Any]]:
    """Figures of one order, all draws together, by class."""
    counted = [one for play in plays for one in play.answered if one.counts]
    for name in ("all", *CLASSES):
        group = [one for one in counted if name in ("all", class_of(one.new_tokens))]
        if len(group) < 2:
            continue
        ttft = sorted(one.first_s - one.came_s for one in group)
        e2e = [one.end_s - one.came_s for one in group]
        row: dict[str, Any] = {"class": name, "requests": len(group), "ttft_mean_s": statistics.fmean(ttft)}
        for share in (50, 99, 99.9):
            row[f"ttft_p{share}_s"] = ttft[int(len(ttft) * share / 100)]
        row |= {"ttft_max_s": ttft[-1], "e2e_mean_s": statistics.fmean(e2e)}
        row["e2e_p99_s"] = sorted(e2e)[int(len(e2e) * 0.99)]
        stats = [play.core.stats() for play in plays]  # of the whole run, whatever the class
        row["cached"] = sum(s.prefix_cache_hits for s in stats) / sum(s.prefix_cache_queries for s in stats)
        row["preempted"] = sum(s.preemptions for s in stats)
        row["until_s"] = sum(play.now for play in plays)
        row["host_step_us"] = 1e6 * sum(play.host_s for play in plays) / sum(s.steps for s in stats)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", default="h200:llama-3.1-8b", metavar="SPEC")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--loads", nargs="+", type=float, default=[0.5, 0.7, 0.85])
    parser.add_argument("--seconds", type=float, default=300.0, help="during which sessions begin")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    spec, facts = read_spec(options.simulate), machine()
    print(f"{options.simulate}; {in_words(facts)}\n")
    table: list[dict[str, Any]] = []
    for workload in options.workloads:
        for load in options.loads if workload != "at-once" else [0.0]:
            plays: dict[PrefillOrder, list[Play]] = {order: [] for order in ORDERS}
            for seed in range(options.seeds):
                for order in ORDERS:
                    drawn = sessions(workload, load, options.seconds, spec, random.Random(f"{workload} {load} {seed}"))
                    plays[order].append(Play(order, drawn, spec))
                    plays[order][-1].run()
            for order in ORDERS:
                table += [{"workload": workload, "load": load, "order": order, **row} for row in rows(plays[order])]
            here = [row for row in table if (row["workload"], row["load"]) == (workload, load)]
            named = {f"{row['class']}, {row['order']}": row for row in here}
            print(markdown(named, COLUMNS, f"{workload}, load {load}"), flush=True)
            print()
    if options.json:
        write_json(options.json, {"machine": facts, "simulate": options.simulate, "rows": table})


if __name__ == "__main__":
    main()
