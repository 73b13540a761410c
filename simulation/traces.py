"""Traces as lists of requests: readers of the two public formats, sampling, load scaling, block bookkeeping.

Everything counts in trace blocks of `BLOCK` tokens. A block id names a whole prefix (ids are unique to what came
before), as in the traces. Output blocks become known when a later request continues its predecessor: they are assigned
here, once, so that every policy sees the same.
"""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation.workload import BLOCK, SimRequest, Workload


def read_trace(path: Path, *, limit: int | None, seed: int) -> Workload:
    """Read either format, by its first line. Raises ValueError naming what is missing."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    if not records:
        raise ValueError(f"{path}: no lines")
    if "hash_ids" in records[0]:
        workload = _read_mooncake(path.name.split(".")[0], records, limit)
    elif "reqs" in records[0]:
        workload = _read_sessions(path.name.split(".")[0], records, limit, seed)
    else:
        raise ValueError(f"{path}: line 1 has neither `hash_ids` (Mooncake) nor `reqs` (agent sessions)")
    return link_requests(workload)


def _read_mooncake(name: str, records: list[dict[str, Any]], limit: int | None) -> Workload:
    """`timestamp` ms, `input_length`, `output_length`, `hash_ids` of 512-token blocks."""
    requests = []
    for i, record in enumerate(records[:limit]):
        requests.append(
            SimRequest(
                index=i,
                session=i,
                arrival_s=record["timestamp"] / 1000.0,
                prompt_tokens=record["input_length"],
                output_tokens=max(1, record["output_length"]),
                ids=record["hash_ids"][: -(-record["input_length"] // BLOCK)],
            )
        )
    # Many requests share one millisecond stamp of a 3 s grid in the trace: spread them evenly to the next stamp.
    stamps = sorted({r.arrival_s for r in requests})
    following = dict(zip(stamps, [*stamps[1:], stamps[-1] + 3.0]))
    groups: dict[float, list[SimRequest]] = {}
    for request in requests:
        groups.setdefault(request.arrival_s, []).append(request)
    for stamp, group in groups.items():
        for k, request in enumerate(group):
            request.arrival_s = stamp + (following[stamp] - stamp) * k / len(group)
    return Workload(name, requests, f"{len(requests)} requests, open loop")


def _read_sessions(name: str, records: list[dict[str, Any]], limit: int | None, seed: int) -> Workload:
    """Agent sessions, closed loop: the next request follows the answer after the think time, cut to 60 s. Cut to 60
    requests of at most 131,072 tokens a session; sessions start at random, one second apart on average at speed 1."""
    rng = random.Random(seed)
    order = list(range(len(records)))
    rng.shuffle(order)
    requests: list[SimRequest] = []
    start_s = 0.0
    for session in order:
        record = records[session]
        if record["bs"] != 64:
            raise ValueError(f"session {record['id']}: block size {record['bs']}, expected 64")
        turns = [r for r in record["reqs"] if "in" in r and r["in"] <= 131_072][:60]
        start_s += rng.expovariate(1.0)
        previous_index: int | None = None
        for turn in turns:
            fine_ids = [first + k for first, count in zip(turn["h"][::2], turn["h"][1::2]) for k in range(count)]
            blocks = -(-turn["in"] // BLOCK)
            ids = [
                session * 1_000_000 + fine_ids[min(8 * b + 7, len(fine_ids) - 1)]
                for b in range(blocks)
                if 8 * b < len(fine_ids)
            ]
            request = SimRequest(
                index=len(requests),
                session=session,
                arrival_s=start_s if previous_index is None else min(60.0, max(0.0, turn["think"] or 0.0)),
                prompt_tokens=min(turn["in"], len(ids) * BLOCK),
                output_tokens=max(1, turn["out"]),
                ids=ids,
                after=previous_index,
            )
            if request.prompt_tokens > 0:
                requests.append(request)
                previous_index = request.index
        if limit is not None and len(requests) >= limit:
            break
    return Workload(name, requests, f"{len(requests)} requests of {len(order)} sessions at most, closed loop")


def generate_tool_use(name: str, *, seed: int, max_requests: int = 6000) -> Workload:
    """A tool-use stand-in: 40 tools with long, shared, skewed prompts, each followed by a short unique question and
    one or two follow-up turns; open loop, Poisson."""
    rng = random.Random(seed)
    next_id = 1
    tools = []
    for _ in range(40):
        blocks = rng.randint(4, 40)
        tools.append(list(range(next_id, next_id + blocks)))
        next_id += blocks
    weights = [1.0 / (k + 1) for k in range(len(tools))]
    requests: list[SimRequest] = []
    now = 0.0
    while len(requests) < max_requests:
        now += rng.expovariate(4.0)
        ids = list(rng.choices(tools, weights)[0])
        at = now
        for _ in range(rng.randint(1, 3)):
            new_blocks = rng.randint(1, 6)
            ids = ids + list(range(next_id, next_id + new_blocks))
            next_id += new_blocks
            tail = rng.randint(1, BLOCK)
            length = (len(ids) - 1) * BLOCK + tail
            requests.append(SimRequest(len(requests), len(requests), at, length, rng.randint(20, 400), list(ids), None))
            ids[-1] = next_id  # the next turn fills the partial block: another content, another name
            next_id += 1
            at += rng.uniform(5.0, 40.0)
    requests.sort(key=lambda r: r.arrival_s)
    for i, request in enumerate(requests):
        request.index = request.session = i
    return link_requests(Workload(name, requests, f"{len(requests)} requests, open loop, generated with seed {seed}"))


def link_requests(workload: Workload) -> Workload:
    """Name output blocks by the first later request that continues its predecessor; link sessions; count blocks."""
    request_by_last_block: dict[int, SimRequest] = {}
    """last full block id of a prompt -> the request it ended"""
    for request in workload.requests:
        request.final_ids = request.ids[: request.full_blocks]
    for request in workload.requests:
        parent = None
        for k in range(len(request.ids), 0, -1):
            candidate = request_by_last_block.get(request.ids[k - 1])
            if candidate is not None and candidate.prompt_tokens + candidate.output_tokens <= request.prompt_tokens:
                parent = candidate
                break
        if parent is not None:
            reach = min((parent.prompt_tokens + parent.output_tokens) // BLOCK, request.full_blocks)
            if len(parent.final_ids) == parent.full_blocks and reach > parent.full_blocks:
                parent.final_ids = request.ids[:reach]
            if request.after is None:
                request.session = parent.session
        if request.full_blocks:
            request_by_last_block[request.ids[request.full_blocks - 1]] = request
    workload.working_set_blocks = len({b for r in workload.requests for b in r.final_ids})
    return workload


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Questions under system prompts that many share."""

    prompts: int = 1
    """System prompts, all asked equally often."""
    system_tokens: int = 1000
    question_tokens: int = 50
    output_tokens: int = 1000
    """Mean length of an answer; lengths are exponential."""
    rate: float = 20.0
    """Requests a second."""
    sequential_requests: int = 0
    """So many of them first, one after the other: each begins when the last has ended."""
    requests: int = 6000
    block: int = 32


def generate_chat(name: str, shape: ChatShape, *, seed: int) -> Workload:
    """Poisson arrivals, after the sequential ones if there are any."""
    rng = random.Random(seed)
    shared_blocks = shape.system_tokens // shape.block
    length = shape.system_tokens + shape.question_tokens
    question_blocks = -(-length // shape.block) - shared_blocks
    next_id, at = shape.prompts * shared_blocks + 1, 0.0
    requests: list[SimRequest] = []
    for i in range(shape.requests):
        first = 1 + rng.randrange(shape.prompts) * shared_blocks
        ids = [*range(first, first + shared_blocks), *range(next_id, next_id + question_blocks)]
        next_id += question_blocks
        output = max(1, round(rng.expovariate(1.0 / shape.output_tokens)))
        chained = 0 < i < shape.sequential_requests
        at = 0.0 if chained else at + rng.expovariate(shape.rate)
        after = min(i, shape.sequential_requests) - 1 if i and shape.sequential_requests else None
        requests.append(SimRequest(i, i, at, length, output, ids, after, shape.block))
    for request in requests:
        request.final_ids = request.ids[: request.full_blocks]
    workload = Workload(name, requests, f"{shape.requests} requests, generated with seed {seed}")
    workload.working_set_blocks = shape.prompts * shared_blocks
    return workload
