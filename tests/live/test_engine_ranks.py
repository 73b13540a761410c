"""`engine serve --tensor-parallel-size 2`: the same answers, and no rank that outlives the others."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.live]
BODY = {"prompt": "Once upon a time, in a land of blocks", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def complete(url: str) -> Any:
    data = json.dumps(BODY).encode()
    with urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", data), timeout=60) as response:
        return json.load(response)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until_gone(pids: list[int], timeout_s: float = 30.0) -> None:
    end_s = time.monotonic() + timeout_s
    while any(map(alive, pids)):
        assert time.monotonic() < end_s, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.05)


def processes(engine: Any) -> tuple[int, int]:
    """(core, second rank)."""
    core = engine.core_pid()
    (rank,) = children(core)
    return core, rank


def test_two_ranks_answer_as_one(start_engine: Any) -> None:
    single_rank, two_ranks = start_engine(wait=False), start_engine("--tensor-parallel-size", "2", wait=False)
    expected = complete(single_rank.await_ready().url)
    answer = complete(two_ranks.await_ready().url)
    second_answer = complete(two_ranks.url)
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert second_answer["choices"][0]["text"] == expected["choices"][0]["text"]
    core, rank = processes(two_ranks)
    assert two_ranks.stop() == 0
    until_gone([core, rank])


@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_is_killed_ends_the_engine(start_engine: Any, busy: bool) -> None:
    engine = start_engine("-tp", "2")
    core, rank = processes(engine)
    if busy:
        data = json.dumps(BODY | {"max_tokens": 4000, "stream": True}).encode()
        response = urllib.request.urlopen(urllib.request.Request(engine.url + "/v1/completions", data), timeout=60)
        response.read(1)
    os.kill(rank, signal.SIGKILL)
    assert engine.process.wait(30) == 1
    assert f"tensor-parallel rank 1 (process {rank}) was killed by SIGKILL" in engine.log()
    until_gone([core])
    if busy:
        response.close()


def test_no_rank_outlives_a_killed_core(start_engine: Any) -> None:
    engine = start_engine("-tp", "2")
    core, rank = processes(engine)
    os.kill(core, signal.SIGKILL)
    assert engine.process.wait(30) == 1
    until_gone([rank])


def test_a_size_that_does_not_divide_the_model_is_one_clear_line(start_engine: Any) -> None:
    engine = start_engine("-tp", "3", wait=False)
    assert engine.process.wait(60) == 1
    (line,) = engine.log().strip().splitlines()
    assert "--tensor-parallel-size 3: expected a divisor of the model's attention heads (4)" in line
