"""Many mixed requests at one worker with a small cache: every one ends right or with a clear error, nothing is left.

The worker checks the pool's and the scheduler's invariants after every step and ends if one is broken. The seed is
printed; set ENGINE_STORM_SEED to repeat a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from engine.tiny.model import Recipe, cached_model

pytestmark = [pytest.mark.long, pytest.mark.live]

BLOCKS, BLOCK_SIZE, MAX_LEN = 96, 16, 1024
SHARED = [[(11 * i + 7 * k) % 1800 + 100 for i in range(300)] for k in range(4)]


@dataclass
class Storm:
    url: str
    rng: random.Random
    expected: dict[tuple[int, ...], list[int]]
    """Greedy continuations, made one at a time before the storm."""
    outcomes: Counter[str] = field(default_factory=Counter)

    async def run_one_client(self, session: aiohttp.ClientSession) -> None:
        kind = self.rng.choices(["greedy", "sampled", "leaves", "wrong", "too long", "samples"], [4, 4, 3, 1, 1, 1])[0]
        self.outcomes[kind] += 1
        if kind == "greedy":
            await self._greedy(session)
        elif kind == "wrong":
            status, body = await self._post(session, {"prompt": self._prompt(), "temperature": -1})
            assert (status, body["error"]["param"]) == (400, "temperature")
        elif kind == "too long":
            status, body = await self._post(session, {"prompt": [5] * MAX_LEN})
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        elif kind == "leaves":
            await self._leaves(session)
        else:
            await self._sample_several(session, n=self.rng.randint(2, 4) if kind == "samples" else 1)

    def _prompt(self) -> list[int]:
        prefix = self.rng.choice(SHARED)[: self.rng.randint(0, 300)]
        return prefix + [self.rng.randint(100, 1900) for _ in range(self.rng.randint(1, 200))]

    async def _greedy(self, session: aiohttp.ClientSession) -> None:
        prompt = self.rng.choice(list(self.expected))
        body = {"prompt": list(prompt), "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        status, answer = await self._post(session, body)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == self.expected[prompt]

    async def _sample_several(self, session: aiohttp.ClientSession, n: int) -> None:
        count, prompt = self.rng.randint(1, 120), self._prompt()
        body = {"prompt": prompt, "max_tokens": count, "n": n, "temperature": self.rng.uniform(0.1, 2),
                "top_p": self.rng.uniform(0.2, 1), "top_k": self.rng.choice([-1, 1, 40]),
                "min_p": self.rng.choice([0, 0.1]), "seed": self.rng.choice([None, 7]),
                "repetition_penalty": self.rng.choice([1, 1.2]), "frequency_penalty": self.rng.choice([0, 0.5]),
                "logprobs": self.rng.choice([None, 3]), "stop": self.rng.choice([None, ["e"], ["the", "\n"]]),
                "ignore_eos": self.rng.random() < 0.5, "priority": self.rng.randint(0, 2),
                "cache_salt": self.rng.choice([None, "tenant"])}  # fmt: skip
        status, answer = await self._post(session, body)
        assert status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == list(range(n))
        assert all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"])
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        assert usage["completion_tokens"] <= n * count
        if body["ignore_eos"] and not body["stop"]:
            assert usage["completion_tokens"] == n * count

    async def _leaves(self, session: aiohttp.ClientSession) -> None:
        """A client that goes away: before the answer, or in the middle of a stream."""
        body = {"prompt": self._prompt(), "max_tokens": 500, "ignore_eos": True, "stream": self.rng.random() < 0.7}
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._read_all(session, body), self.rng.uniform(0.0, 0.6))

    async def _read_all(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post(self.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            await response.read()

    async def _post(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("temperature", 0) >= 0 and self.rng.random() < 0.5 and "return_token_ids" not in body:
            return await self._stream(session, body)
        async with session.post(self.url + "/v1/completions", json=body) as response:
            return response.status, await response.json()

    async def _stream(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, Any]:
        """The answer of a stream, put together as if it had come whole."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        finishes: dict[int, str] = {}
        usage: Any = None
        async with session.post(self.url + "/v1/completions", json=body) as response:
            if response.status != 200:
                return response.status, await response.json()
            text = (await response.read()).decode()
        events = [event for event in text.split("\n\n") if event and not event.startswith(":")]  # not keep-alives
        *chunks, done_event = [event.removeprefix("data: ") for event in events]
        assert done_event == "[DONE]"
        for chunk in map(json.loads, chunks):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if choice["finish_reason"]:
                    assert choice["index"] not in finishes
                    finishes[choice["index"]] = choice["finish_reason"]
        choices = [{"index": index, "finish_reason": finishes[index]} for index in sorted(finishes)]
        return 200, {"choices": choices, "usage": usage}


async def run_storm(url: str, count: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    expected: dict[tuple[int, ...], list[int]] = {}
    limit = asyncio.Semaphore(24)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(8):
            prompt = SHARED[number % 4][: 37 * number + 20] + [150 + number] * number
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
            async with session.post(url + "/v1/completions", json=body) as response:
                expected[tuple(prompt)] = (await response.json())["choices"][0]["token_ids"]
        storm = Storm(url, rng, expected)

        async def run_bounded() -> None:
            async with limit:
                await storm.run_one_client(session)

        await asyncio.gather(*(run_bounded() for _ in range(count)))
        await nothing_left(session, url)
    return storm.outcomes


async def nothing_left(session: aiohttp.ClientSession, url: str) -> None:
    end_s = time.monotonic() + 20
    while True:
        async with session.get(url + "/metrics") as response:
            page = await response.text()
        gauges = {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith(("vllm:num_requests", "vllm:kv_cache_usage"))
        }
        if not any(gauges.values()):
            print(*(line for line in page.splitlines() if line.startswith("vllm:num_preemptions_total")))
            return
        assert time.monotonic() < end_s, gauges
        await asyncio.sleep(0.05)


def storm_at(start_engine: Any, count: int, family: str = "qwen3") -> None:
    seed = int(os.environ.get("ENGINE_STORM_SEED") or random.SystemRandom().randrange(10**9))
    print(f"ENGINE_STORM_SEED={seed}")
    model = str(cached_model(Recipe(family=family, layers=6)))
    engine = start_engine(
        model, "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str(MAX_LEN), "--max-num-seqs", "12",
        "--max-num-batched-tokens", "256", "--check-invariants",
    )  # fmt: skip
    try:
        outcomes = asyncio.run(run_storm(engine.url, count, seed))
        assert sum(outcomes.values()) == count
        print(dict(outcomes))
        assert engine.stop() == 0
    except BaseException:
        print(engine.log())
        raise


def test_two_hundred_mixed_requests(start_engine: Any) -> None:
    storm_at(start_engine, 200)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3_text"])
def test_mixed_requests_on_a_model_with_state_and_on_one_with_windows(start_engine: Any, family: str) -> None:
    storm_at(start_engine, 120, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3_text", "nemotron_h"])
def test_a_thousand_mixed_requests(start_engine: Any, family: str) -> None:
    storm_at(start_engine, 1000, family)
