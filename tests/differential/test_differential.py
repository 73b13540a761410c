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
SHORT_SEEDS = range(15)
LONG_SEEDS = range(15, compare.RECORDED_SEEDS)


def check(policy: str, seeds: range) -> None:
    changes = compare.find_changes(policy, seeds)
    hint = "python -m tests.differential.compare --old CHECKOUT prints the first difference"
    assert not changes, "\n".join([*changes, hint])


@pytest.mark.parametrize("policy", compare.POLICIES)
def test_traffic_is_handled_as_recorded(policy: str) -> None:
    check(policy, SHORT_SEEDS)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", compare.POLICIES)
def test_more_traffic_is_handled_as_recorded(policy: str) -> None:
    check(policy, LONG_SEEDS)
