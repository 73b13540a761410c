"""What benchmarks/live_routing.py counts and reads: unseen tokens against a naive count, the trace's errors."""

from __future__ import annotations

import importlib
import json
import sys
import tarfile
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


def test_a_trace_is_read_in_order_cut_and_described(parts: Any, tmp_path: Path) -> None:
    records = [
        {"timestamp": 3_000_000, "input": "x" * 40, "output": "long answer"},
        {"timestamp": 1_000_000, "input": "x" * 20, "output": "ok"},
        {"timestamp": 2_000_000, "input": " ", "output": "ok"},
        {"timestamp": 4_500_000, "input": "x" * 100, "output": "ok"},
        {"timestamp": 5_000_000, "input": "x" * 30, "output": "ok"},
    ]
    file = tmp_path / "one.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    archive = tmp_path / "trace.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(file, "agent/one.jsonl")
    limits = {"requests_max": 10, "max_tokens": 50, "answer_tokens": 4, "seed": 0}
    for path in (archive, tmp_path):
        made = parts.agent_text(path, Letters(), **limits)
        (session,) = made.sessions
        assert [(len(t.prompt_ids), t.answer_tokens, t.gap_s) for t in session.turns] == [(20, 2, 0.0), (40, 4, 2.0)]
        assert "2 requests from the first prompt above 50 tokens on, 1 without text" in made.note
    file.write_text(json.dumps({"timestamp": "now", "input": "", "output": ""}))
    with pytest.raises(ValueError, match=r"one.jsonl line 1: timestamp is 'now', expected int"):
        parts.agent_text(tmp_path, Letters(), **limits)
