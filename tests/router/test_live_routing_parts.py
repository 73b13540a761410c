"""What benchmarks/live_routing.py counts and reads: unseen tokens against a naive count, the trace's errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def parts() -> Iterator[Any]:
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.append(folder)
    yield importlib.import_module("live_routing_parts")
    sys.path.remove(folder)


class Letters:
    """A token a character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@given(prompts=st.lists(st.text("ab", min_size=1, max_size=70), min_size=1, max_size=8))
def test_unseen_is_what_an_endless_cache_would_prefill(parts: Any, prompts: list[str]) -> None:
    turns = [parts.Turn(p, tuple(map(ord, p)), 1, 0.0) for p in prompts]
    sessions = tuple(parts.Session(str(i), float(i), (turn,)) for i, turn in enumerate(turns))
    naive, seen = 0, set()
    for p in prompts:
        held = [n for n in range(16, len(p), 16) if p[:n] in seen]  # at most len - 1: the last token is computed
        naive += len(p) - max(held, default=0)
        seen |= {p[:n] for n in range(16, len(p) + 1, 16)}
    workload = parts.Workload("", sessions)
    assert workload.unseen_tokens() == naive
    assert workload.working_set_blocks() == len(seen) + len(prompts)


def test_repo_sessions_are_the_same_each_time_and_grow_turn_by_turn(parts: Any) -> None:
    text = "".join(chr(300 + i % 5000) for i in range(200_000))
    shape = {"sessions": 6, "turns": 3, "answer_tokens": 8}
    made = parts.repo_sessions(Letters(), text, **shape, seed=3)
    assert made == parts.repo_sessions(Letters(), text, **shape, seed=3)
    assert made.requests == 18
    for session in made.sessions:
        for before, after in zip(session.turns, session.turns[1:]):
            assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
    with pytest.raises(ValueError, match="--sessions 6 --turns 3"):
        parts.repo_sessions(Letters(), text[:10_000], **shape, seed=3)
