"""One tenant with ten times the work of each of three small ones, in long prompts, before simulated workers.

    python benchmarks/fairness.py --seconds 30 --json fairness.json

    python benchmarks/fairness.py --virtual 6 --seconds 250

The same arrivals for all: four tenants with `--fair` and without it, before --workers engines; and each small tenant
alone before a quarter of them, which is its share. Real programs over HTTP: `engine serve --simulate` sleeps as long as
its steps would take, so the figures are those of the router's order where the machine is fast enough for all of them.
`--virtual N`: N draws on a virtual clock instead, the router's core before the simulator's engines: enough requests
for a p99, and no noise of a machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import aiohttp

from options.steps import StepTimes
from router.decide.config import CoreConfig, QueueConfig
from router.decide.messages import RouteRequest
from router.index.protocol import Scope
from router.shadow.cluster import Cluster, ClusterConfig
from router.shadow.ours import MODEL, Ours
from router.shadow.workload import SimRequest, Workload

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "live"))
from programs import ADMIN_KEY, Program, call, until

SPEC = {
    "prefill_s_per_token": 4e-4,
    "step_s": 0.01,
    "decode_request_s": 2e-4,
    "kv_tokens": 262_144,
    "max_model_len": 16_384,
}
SMALL_TOKENS, LONG_TOKENS, ANSWER_TOKENS = 600, 2400, 8
BLOCK = 16
Times = dict[str, list[float]]
"""tenant -> seconds"""
SMALL = ("small1", "small2", "small3")


def arrivals(
    seconds: float, load: float, workers: int, seed: int, long: int = LONG_TOKENS
) -> list[tuple[float, str, int]]:
    """(time, tenant, prompt tokens). `load`: of a small tenant, as a part of its share of the workers."""
    rng, found = random.Random(seed), []
    share = workers / 4
    small = load * share / (SMALL_TOKENS * SPEC["prefill_s_per_token"])
    rates = dict.fromkeys(SMALL, (small, SMALL_TOKENS))
    rates["heavy"] = (10 * small * SMALL_TOKENS / long, long)
    for tenant, (rate, tokens) in rates.items():
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            found.append((at_s, tenant, tokens))
            at_s += rng.expovariate(rate)
    return sorted(found)


class Tenants(Ours):
    """The router's core, told whose each request is."""

    def __init__(self, queue: QueueConfig, asked: list[tuple[float, str, int]]) -> None:
        super().__init__(CoreConfig(queue=queue))
        self._asked = asked

    def route(self, request: SimRequest, now: float) -> list[tuple[int, int]]:
        own = {"prompt_tokens": request.prompt_tokens, "output_max": ANSWER_TOKENS, "output_min": ANSWER_TOKENS}
        routed = RouteRequest(
            str(request.index), MODEL, Scope(MODEL), request.ids, tenant=self._asked[request.index][1], **own
        )
        return self._perform([self.core.route(routed, now)])


def play_virtually(
    asked: list[tuple[float, str, int]], workers: int, queue: QueueConfig, seconds: float
) -> tuple[Times, Times, int]:
    """Times to first tokens of each tenant, and to the ends; prompt tokens of answers that had begun by `seconds`."""
    ids = iter(range(1, 1 << 62))
    requests = []
    for index, (at_s, _, tokens) in enumerate(asked):
        own = [next(ids) for _ in range(-(-(tokens + ANSWER_TOKENS - 1) // BLOCK))]
        prompt = own[: -(-tokens // BLOCK)]
        requests.append(
            SimRequest(
                index,
                index,
                at_s,
                tokens,
                ANSWER_TOKENS,
                prompt,
                block=BLOCK,
                final_ids=own[: (tokens + ANSWER_TOKENS - 1) // BLOCK],
            )
        )
    steps = StepTimes(**{name: value for name, value in SPEC.items() if hasattr(StepTimes, name)})
    config = ClusterConfig(workers, SPEC["kv_tokens"] // BLOCK, 1.0, steps)
    result = Cluster(config, Workload("fair", requests, ""), [Tenants(queue, asked)]).run()
    first: Times = {}
    whole: Times = {}
    for index, (_, tenant, _) in enumerate(asked):
        first.setdefault(tenant, []).append(result.ttft_s[index])
        whole.setdefault(tenant, []).append(result.e2e_s[index])
    return first, whole, sum(one[2] for i, one in enumerate(asked) if result.arrived_s[i] + result.ttft_s[i] <= seconds)


def virtual(draws: int, seconds: float, load: float, workers: int, long: int) -> None:
    """Beside the heavy one, and alone on a share, `draws` times."""
    queue = QueueConfig(fair=True, wait_s_max=1e9, requests_max=1 << 20)
    for seed in range(draws):
        asked = arrivals(seconds, load, workers, seed, long)
        *together, done = play_virtually(asked, workers, queue, seconds)
        *_, plain = play_virtually(asked, workers, QueueConfig(), seconds)
        own = [[one for one in asked if one[1] == tenant] for tenant in SMALL]
        alone = [play_virtually(part, workers // 4, queue, seconds)[:2] for part in own]
        print(f"seed {seed}: throughput {done / plain:.3f}")
        for k, figure in enumerate(("TTFT", "end")):
            pairs = [(at(together[k][tenant], 0.99), at(alone[i][k][tenant], 0.99)) for i, tenant in enumerate(SMALL)]
            all_alone = [s for i, tenant in enumerate(SMALL) for s in alone[i][k][tenant]]
            pairs.append((at([s for tenant in SMALL for s in together[k][tenant]], 0.99), at(all_alone, 0.99)))
            told = [f"{name} {a:.2f}/{b:.2f}={a / b:.2f}" for name, (a, b) in zip((*SMALL, "all small"), pairs)]
            print(f"  p99 of {figure}, beside / alone:", *told, flush=True)


async def play(url: str, asked: list[tuple[float, str, int]], until_s: float) -> dict[str, Any]:
    """First tokens and whole answers of each tenant; prompt tokens of answers that had begun by `until_s`."""
    first: dict[str, list[float]] = {}
    whole: dict[str, list[float]] = {}
    done, failed, begin_s = 0, 0, time.monotonic()
    rng = random.Random(1)

    async def one(session: aiohttp.ClientSession, tenant: str, tokens: int) -> None:
        nonlocal done, failed
        prompt = [rng.randrange(10, 900) for _ in range(tokens)]
        body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
        at_s = time.monotonic()
        async with session.post(
            url + "/v1/completions", json=body, headers={"Authorization": f"Bearer {tenant}"}
        ) as answer:
            if answer.status != 200:
                failed += 1
                return
            await answer.content.readline()
            first.setdefault(tenant, []).append(time.monotonic() - at_s)
            if time.monotonic() - begin_s <= until_s:
                done += tokens
            await answer.read()
        whole.setdefault(tenant, []).append(time.monotonic() - at_s)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)
    ) as session:
        tasks = []
        for at_s, tenant, tokens in asked:
            await asyncio.sleep(max(0.0, begin_s + at_s - time.monotonic()))
            tasks.append(asyncio.create_task(one(session, tenant, tokens)))
        await asyncio.gather(*tasks)
    figures = {
        tenant: {"requests": len(first[tenant]), "ttft_p50_s": at(first[tenant], 0.5),
                 "ttft_p99_s": at(first[tenant], 0.99), "e2e_p99_s": at(whole[tenant], 0.99)}
        for tenant in sorted(first)
    }  # fmt: skip
    return {"tenants": figures, "prefilled_tokens": done, "failed": failed}


def at(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 4)


def run(name: str, workers: int, asked: list[tuple[float, str, int]], seconds: float, *flags: str) -> dict[str, Any]:
    """On fresh programs."""
    with tempfile.TemporaryDirectory() as folder:
        started: list[Program] = []
        try:
            for number in range(workers):
                words = (
                    "--simulate",
                    json.dumps({name: value for name, value in SPEC.items() if name != "step_tokens"}),
                    "--max-num-batched-tokens",
                    str(SPEC["step_tokens"]),
                    "--served-model-name",
                    "m",
                    "--port",
                    "0",
                    "--no-enable-prefix-caching",
                )
                started.append(Program(Path(folder) / f"e{number}.log", "engine", "serve", *words))
            urls = [one.await_ready().url for one in started]
            keys = [word for tenant in (*SMALL, "heavy") for word in ("--api-key", tenant)]
            router = Program(Path(folder) / "r.log", "router", "run", *urls, "--port", "0", *keys, *flags)
            started.append(router)
            router.await_ready()
            until(lambda: call(router.url + "/health")[2]["workers_up"] == workers, router.log)
            found = asyncio.run(play(router.url, asked, seconds))
        finally:
            for one in started:
                one.close()
    print(name, json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.8, help="Of a small tenant, as a part of its share.")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--long", type=int, default=LONG_TOKENS, help="Tokens of the heavy one's prompts.")
    parser.add_argument("--virtual", type=int, default=0, metavar="DRAWS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--step-tokens", type=int, default=8192, help="The engines' budget of a step.")
    given = parser.parse_args()
    SPEC["step_tokens"] = given.step_tokens
    assert ADMIN_KEY
    if given.virtual:
        virtual(given.virtual, given.seconds, given.load, given.workers, given.long)
        return
    asked = arrivals(given.seconds, given.load, given.workers, given.seed, given.long)
    found = {
        "fair": run("fair", given.workers, asked, given.seconds, "--fair"),
        "first come": run("first come", given.workers, asked, given.seconds),
    }
    for tenant in SMALL:
        own = [one for one in asked if one[1] == tenant]
        found[f"{tenant} alone"] = run(f"{tenant} alone", given.workers // 4, own, given.seconds, "--fair")
    ratios = {
        figure: {
            tenant: round(
                found["fair"]["tenants"][tenant][figure] / found[f"{tenant} alone"]["tenants"][tenant][figure], 3
            )
            for tenant in SMALL
        }
        for figure in ("ttft_p99_s", "e2e_p99_s")
    }
    throughput = found["fair"]["prefilled_tokens"] / found["first come"]["prefilled_tokens"]
    print(f"beside the heavy one / alone on its share: {ratios}; throughput to first come: {throughput:.3f}")
    if given.json is not None:
        result = {
            "runs": found,
            "ratios": ratios,
            "throughput": throughput,
            "load_average": os.getloadavg(),
            "spec": SPEC,
        }
        given.json.write_text(json.dumps(result | {"arguments": {k: str(v) for k, v in vars(given).items()}}, indent=1))


if __name__ == "__main__":
    main()
