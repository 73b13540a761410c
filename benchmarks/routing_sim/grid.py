"""A grid of settings in which decoding costs, a fixed sample of it, and what a policy may not be in any of them.

A setting's arrival rate is a share of what its engines can do: as many sequences as have seats and memory, each step as
long as those make it. It is played for long enough to fill the engines twice over before anything is scored.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from routing_sim.runs import CHAT_POLICIES, Options, Setting, run
from routing_sim.traces import ChatShape, generate_chat
from simulation.engine import EngineLimits
from simulation.steps import StepTimes

OURS, BASE = "blockcast", "oracle"
SERVICE = StepTimes(0.0001, 1e12, 0.01, 2e-5, 4e-8, 4096)
CACHE_TOKENS = 200_000
FIGURES = ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "e2e")
WITHIN, WORST = 1.03, 1.10
"""How far from the best end-to-end time, and from the best time to first token or per output token, ours may be."""
TIE = 1.01
"""Two policies are not told apart below."""
SCORED, WARM_S, WARM_MAX = 1500, 30.0, 20_000
"""Requests scored, at least; seconds before them, but no more than so many requests."""


@dataclass(frozen=True, slots=True)
class Point:
    """One setting."""

    workers: int
    prompts: int
    system_tokens: int
    output_tokens: int
    load: float | None = None
    """Share of what the engines can do."""
    rate: float | None = None
    """Requests a second, where not by load."""
    cache_tokens: int = CACHE_TOKENS
    own_tokens: int = 50

    @property
    def seats(self) -> int:
        """Of an engine; fewer of many, or there would be too many requests at once to simulate."""
        return 256 if self.workers < 64 else 64

    def estimate_load(self) -> tuple[float, float]:
        """(requests a second, requests at once), of all workers."""
        context = self.system_tokens + self.own_tokens + self.output_tokens
        question_prefill_s = SERVICE.compute_prefill_s(self.own_tokens, 0)
        decode_s = self.output_tokens * (SERVICE.decode_request_s + SERVICE.decode_context_s * context)
        lone_answer_s = self.output_tokens * SERVICE.step_s
        shared_tokens = min(math.ceil(self.prompts / self.workers) * self.system_tokens, self.cache_tokens // 2)
        running_max = min(self.seats, (self.cache_tokens - shared_tokens) / (self.own_tokens + self.output_tokens))
        rate = (
            self.rate / self.workers
            if self.rate
            else (self.load or 0.0) / (lone_answer_s / running_max + decode_s + question_prefill_s)
        )
        running = rate * lone_answer_s / max(1.0 - rate * (question_prefill_s + decode_s), 0.05)
        return rate * self.workers, min(running, running_max) * self.workers

    def chat(self) -> tuple[ChatShape, int]:
        """(what is played, how much of its beginning is not scored)."""
        rate, running = self.estimate_load()
        skip = min(int(max(2.0 * running, WARM_S * rate, 500)), WARM_MAX)
        block = 32 if self.system_tokens < 4000 else 128
        shape = ChatShape(self.prompts, self.system_tokens, self.own_tokens, self.output_tokens, rate, 0, block)
        return ChatShape(**{**asdict(shape), "request_count": skip + int(max(SCORED, min(running, SCORED * 2)))}), skip

    def __str__(self) -> str:
        load_text = f"{100 * self.load:.0f} %" if self.load else f"{self.rate:g}/s"
        prompts = f"{self.prompts} x {self.system_tokens:,}"
        return f"{self.workers} workers, {prompts}, answers of {self.output_tokens:,}, {load_text}"


HEAD = [
    Point(8, 1, 1000, 1000, rate=20.0),
    Point(8, 1, 1000, 1000, rate=40.0),
    Point(8, 4, 1000, 1000, rate=20.0),
    Point(8, 32, 8000, 200, rate=20.0),
    Point(16, 16, 4000, 500, rate=30.0),
    Point(8, 200, 6000, 60, rate=10.0, cache_tokens=120_000),
]
"""The settings where decoding binds that docs/measurements/routing.md began with: in every sample."""


def points(sample: int | None) -> list[Point]:
    """The settings to play: all, or so many of them, always the same."""
    axes = ((4, 8, 16, 64), (1, 4, 32), (200, 1000, 4000, 8000), (50, 200, 1000, 2000), (0.3, 0.6, 0.8, 0.95))
    all_points = [Point(*values) for values in itertools.product(*axes)]
    if sample is not None:
        all_points = random.Random(16).sample(all_points, max(0, min(sample - len(HEAD), len(all_points))))
    return [*HEAD, *all_points][:sample]


def play(point: Point, policies: Sequence[str], seed: int) -> dict[str, dict[str, Any]]:
    """Every policy's figures."""
    shape, skip = point.chat()
    workload = generate_chat(str(point), shape, seed=seed)
    limits = EngineLimits(point.seats, is_preemptive=True)
    blocks = point.cache_tokens // shape.block_size
    options = Options(SERVICE, limits, seed=seed, skip=skip, cache_blocks=blocks)
    setting = Setting(workload.name, point.workers, 1.0, 1.0)
    return {policy: asdict(run(policy, setting, workload, 1.0, options)[1]) for policy in policies}


def verdict(policies: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Ours in one setting: each figure over the best policy's (the oracle, which no router is, aside), who is better in
    both time to first token and time per output token, and by what."""
    peers = {name: row for name, row in policies.items() if name not in (OURS, BASE)}
    ours, ratios = policies[OURS], {}
    for figure in FIGURES:
        best = min(policies, key=lambda name: policies[name][figure] if name != BASE else math.inf)
        ratios[figure] = (ours[figure] / policies[best][figure], best)
    better = [
        name
        for name, row in peers.items()
        if all(ours[figure] > TIE * row[figure] for figure in ("ttft_mean", "tpot_mean"))
    ]
    return {"ratios": ratios, "better_in_both": better}


def means(settings: Mapping[str, Mapping[str, Mapping[str, float]]], policy: str, base: str) -> dict[str, float]:
    """Geometric means over the settings of each of a policy's figures over that of another."""
    return {
        figure: statistics.geometric_mean(
            max(row[policy][figure], 1e-9) / max(row[base][figure], 1e-9) for row in settings.values()
        )
        for figure in FIGURES
    }


def summary(settings: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """What all settings say together: where ours fails, and every policy's geometric means relative to the oracle."""
    verdicts = {name: verdict(policies) for name, policies in settings.items()}
    worst = max(
        ((*verdicts[name]["ratios"][figure], figure, name) for name in verdicts for figure in FIGURES[:4:2]),
        default=None,
    )
    relative = {policy: means(settings, policy, BASE) for policy in (CHAT_POLICIES + [BASE] if settings else [])}
    slow_settings = {name: v["ratios"]["e2e"] for name, v in verdicts.items() if v["ratios"]["e2e"][0] > WITHIN}
    over_limits = {
        name: {figure: v["ratios"][figure] for figure in FIGURES[:4:2] if v["ratios"][figure][0] > WORST}
        for name, v in verdicts.items()
    }
    return {
        "relative": relative,
        "e2e_not_within": slow_settings,
        "better_in_both": {name: v["better_in_both"] for name, v in verdicts.items() if v["better_in_both"]},
        "over_worst": {name: ratios for name, ratios in over_limits.items() if ratios},
        "worst": worst,
    }
