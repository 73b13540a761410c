"""benchmarks/step_times.py: what it learns is what the steps were made of. benchmarks/live_peers.py: what it plays."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.steps import StepTimes


@pytest.fixture(scope="module")
def bench() -> Any:
    root = Path(__file__).resolve().parents[2]
    before = list(sys.path)
    sys.path += [str(root / "scripts"), str(root / "benchmarks")]
    yield importlib.import_module
    sys.path[:] = before


def test_the_fit_finds_the_times_that_made_the_steps(bench: Any) -> None:
    step_times = bench("step_times")
    times = StepTimes(
        prefill_s_per_token=3e-5, quadratic_tokens=9_000, step_s=0.007, decode_request_s=2e-4, decode_context_s=4e-8
    )
    rng, observations = random.Random(0), []
    for length in step_times.PROMPTS:
        seconds = times.step_s + times.compute_prefill_s(length, 0)
        observations.append(step_times.TimedStep((1, length, length * length, 0, 0), seconds * rng.uniform(0.99, 1.01)))
    for count, length in step_times.GROUPS:
        seconds = times.compute_decode_s(count, count * length)
        observations.append(step_times.TimedStep((1, 0, 0, count, count * length), seconds * rng.uniform(0.99, 1.01)))
    fit = step_times.fit(observations)
    assert fit["step_s"] == pytest.approx(times.step_s, rel=0.03)
    assert fit["prefill_s_per_token"] == pytest.approx(times.prefill_s_per_token, rel=0.1)
    assert fit["decode_request_s"] == pytest.approx(times.decode_request_s, rel=0.1)
    half = times.prefill_s_per_token / (2 * times.quadratic_tokens)
    assert fit["half_quadratic_s"] == pytest.approx(half, rel=0.15)


def test_no_time_is_below_zero(bench: Any) -> None:
    step_times = bench("step_times")
    observations = [step_times.TimedStep((1, n, 0, 0, 0), 0.01 + 1e-4 * n) for n in step_times.PROMPTS]
    observations += [
        step_times.TimedStep((1, 0, 0, n, 0), 0.01 - 1e-5 * n) for n in (1, 8, 32)
    ]  # faster together: no such term
    fit = step_times.fit(observations)
    assert fit["decode_request_s"] == fit["decode_context_s"] == fit["half_quadratic_s"] == 0
    assert fit["prefill_s_per_token"] == pytest.approx(1e-4, rel=0.01)


def test_all_systems_get_the_same_requests(bench: Any) -> None:
    parts = bench("live_peers_parts")
    for name, make in parts.WORKLOADS.items():
        first, second = make(1.0), make(1.0)
        assert [parts.Talk.of(s) for s in first.sessions] == [parts.Talk.of(s) for s in second.sessions], name
        assert first.unseen_tokens() < first.prompt_tokens, name
        for session in first.sessions:
            for before, after in zip(session.turns, session.turns[1:]):
                assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids, name


@given(prompts=st.lists(st.text("ab", min_size=1, max_size=70), min_size=1, max_size=8))
def test_unseen_is_what_an_endless_cache_would_prefill(bench: Any, prompts: list[str]) -> None:
    parts = bench("live_peers_parts")
    turns = [parts.Turn(p, tuple(map(ord, p)), 1, 0.0) for p in prompts]
    sessions = tuple(parts.Session(str(i), float(i), (turn,)) for i, turn in enumerate(turns))
    naive, cached_prefixes = 0, set()
    for p in prompts:
        hit_lengths = [
            n for n in range(16, len(p), 16) if p[:n] in cached_prefixes
        ]  # at most len - 1: the last token is computed
        naive += len(p) - max(hit_lengths, default=0)
        cached_prefixes |= {p[:n] for n in range(16, len(p) + 1, 16)}
    workload = parts.Workload("", sessions)
    assert workload.unseen_tokens() == naive
    assert workload.working_set_blocks() == len(cached_prefixes) + len(prompts)
