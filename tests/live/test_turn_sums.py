"""Why turns miss, before engines whose caches are too small: the reasons add up to all that was computed."""

from __future__ import annotations

import itertools
import json
import random
import re
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from programs import call, two_engines_and_a_router

pytestmark = pytest.mark.live

SPEC = {"prefill_s_per_token": 1e-5, "step_s": 0.001, "kv_tokens": 2048, "max_model_len": 2048}
ENGINE = ("engine", "serve", "--port", "0", "--served-model-name", "m", "--log-level", "warning", "--simulate")
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
POST = {"Content-Type": "application/json"}


def converse(url: str, name: str, turns: int) -> list[tuple[str, int, int]]:
    """A conversation that now and then is edited: (id, prompt tokens, cached tokens) of each turn."""
    rng, measured_turns = random.Random(name), []
    messages: list[Any] = [{"role": "system", "content": "You are brief. " * 40}]
    for number in range(turns):
        if number and rng.random() < 0.15:
            messages[1]["content"] = f"No, I meant: {rng.random()}"
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randrange(20, 150)))})
        body = {"model": "m", "messages": messages, "max_tokens": rng.randrange(4, 40), "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {**POST, "x-session-id": name}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer, request_id = json.loads(response.read()), response.headers["x-request-id"]
        usage = answer["usage"]
        measured_turns.append((request_id, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return measured_turns


def test_the_reasons_add_up_to_all_that_was_computed(tmp_path: Path) -> None:
    flags = ("--reasons-share", "1")
    with two_engines_and_a_router(tmp_path, *ENGINE, json.dumps(SPEC), router_flags=flags) as (_, router):
        with ThreadPoolExecutor(12) as pool:
            talks = list(pool.map(lambda name: converse(router.url, f"s{name}", 6), range(14)))
        reasons: Counter[str] = Counter()
        for request_id, prompt, cached_tokens in (turn for talk in talks for turn in talk):
            why = call(f"{router.url}/requests/{request_id}")[2]
            assert (why["prompt_tokens"], why["reported_cached_tokens"]) == (prompt, cached_tokens)
            places = sorted((part["start"], part["end"]) for part in why["uncached_ranges"])
            assert sum(end - start for start, end in places) == prompt - cached_tokens, why
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places)), "no token has two reasons"
            for part in why["uncached_ranges"]:
                reasons[part["reason"]] += part["tokens"]
            assert why["best_cached_tokens"] >= why["predicted_cached_tokens"], why
        with urllib.request.urlopen(router.url + "/metrics") as page:
            reason_counts = re.findall(r'cache_miss_tokens_total\{.*reason="(\w+)"\} (\d+)', page.read().decode())
    assert Counter({reason: int(count) for reason, count in reason_counts}) == reasons
    assert min(reasons[expected_reason] for expected_reason in ("new_session", "new_text", "evicted")) > 0, reasons
