"""The router does what it did: seeded traffic, recorded as digests (README.md tells how to find what differs)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


def load_compare() -> Any:
    """Import compare.py, which needs nothing of its package."""
    spec = importlib.util.spec_from_file_location("differential_compare", Path(__file__).parent / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


compare = load_compare()
SHORT_SEEDS = {
    "least_requests": [0, 1, 2, 1000, 1005, 2000],
    "round_robin": [0, 1],
    "kv": [0, 1, 2, 1000, 1005, 2000],
    "core_least_requests": [*range(5)],
    "core_kv": [*range(5)],
}
READING_SEEDS = [3000, 3001]
MORE_READING_SEEDS = [*range(3002, 3006)]


def check(policy: str, seeds: list[int]) -> None:
    hint = "python -m tests.differential.compare --old CHECKOUT prints the first difference"
    assert not compare.find_changes(policy, seeds), hint


def test_prompts_become_the_recorded_ids() -> None:
    check("least_requests", READING_SEEDS)


@pytest.mark.parametrize("policy", compare.POLICIES)
def test_traffic_is_handled_as_recorded(policy: str) -> None:
    check(policy, SHORT_SEEDS[policy])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", compare.POLICIES)
def test_more_traffic_is_handled_as_recorded(policy: str) -> None:
    check(policy, [seed for seed in compare.RECORDED_SEEDS[policy] if seed not in SHORT_SEEDS[policy]])


@pytest.mark.parametrize(
    ("flags", "policy", "seed", "part"),
    [
        (["--set", "retry.attempts_max=1"], "least_requests", 2000, "decisions"),
        (["--no-cache-headers"], "least_requests", 0, "decisions"),
        (["--pass-worker-field", "kv_transfer_params"], "least_requests", 3, "worker_bytes"),
        (["--chat-template", "{folder}/other.jinja"], "least_requests", 3000, "ids"),
        (["--no-continue-streams"], "least_requests", 2000, "client_bytes"),
        (["--first-byte-timeout", "1"], "least_requests", 2000, "timings"),
        (["--set", "pin_grace_s=0"], "least_requests", 1005, "metrics"),
    ],
)
def test_another_behaviour_is_seen(flags: list[str], policy: str, seed: int, part: str, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    changes = compare.find_changes(policy, [seed], *(flag.format(folder=tmp_path) for flag in flags))
    assert part in changes.get(seed, [])


@pytest.mark.parametrize("seeds", [READING_SEEDS, pytest.param(MORE_READING_SEEDS, marks=pytest.mark.long)])
def test_caches_of_prompts_change_no_ids(seeds: list[int]) -> None:
    flags = ["--set", "conversation_cache_mb=0"]
    changes = compare.find_changes("least_requests", seeds, *flags)
    assert all(parts == ["metrics"] for parts in changes.values())
    assert changes  # else the flags would do nothing
