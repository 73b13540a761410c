"""Request traces: readers of two public formats, and generated workloads.

Blocks have `TRACE_BLOCK_SIZE` tokens. As in the traces, a block id stands for a whole prefix. The ids of output blocks
are known where a later request continues the conversation. `link_requests` assigns them once, so that every policy sees
the same ids.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation.workload import TRACE_BLOCK_SIZE, SimRequest, Workload

SESSION_PROMPT_TOKENS_MAX = 131_072
SESSION_REQUESTS_MAX = 60
THINK_S_MAX = 60.0


def read_trace(path: Path, *, limit: int | None, seed: int) -> Workload:
    """Read a trace, in the format that its first line shows. Raises ValueError if the line fits neither format."""
    open_trace = gzip.open if path.suffix == ".gz" else open
    with open_trace(path, "rt", encoding="utf-8") as lines:
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
    """Read Mooncake's format: `timestamp` ms, `input_length`, `output_length`, `hash_ids` of 512-token blocks."""
    requests = []
    for i, record in enumerate(records[:limit]):
        requests.append(
            SimRequest(
                index=i,
                session=i,
                arrival_s=record["timestamp"] / 1000.0,
                prompt_tokens=record["input_length"],
                output_tokens=max(1, record["output_length"]),
                block_ids=record["hash_ids"][: -(-record["input_length"] // TRACE_BLOCK_SIZE)],
            )
        )
    # The trace has time stamps on a grid of 3 s: spread simultaneous requests evenly up to the next stamp.
    timestamps = sorted({request.arrival_s for request in requests})
    next_timestamp_by_timestamp = dict(zip(timestamps, [*timestamps[1:], timestamps[-1] + 3.0]))
    requests_by_timestamp: dict[float, list[SimRequest]] = {}
    for request in requests:
        requests_by_timestamp.setdefault(request.arrival_s, []).append(request)
    for timestamp, simultaneous_requests in requests_by_timestamp.items():
        for k, request in enumerate(simultaneous_requests):
            request.arrival_s = timestamp + (next_timestamp_by_timestamp[timestamp] - timestamp) * k / len(
                simultaneous_requests
            )
    return Workload(name, requests, f"{len(requests)} requests, open loop")


def _read_sessions(name: str, records: list[dict[str, Any]], limit: int | None, seed: int) -> Workload:
    """Read agent sessions in random order, until one of them reaches `limit` requests.

    A request arrives one think time after the previous answer, at most 60 s. Longer requests than 131,072 tokens are
    left out, and then the first 60 of a session are read. On average one session starts each second at speed 1.
    """
    rng = random.Random(seed)
    session_order = list(range(len(records)))
    rng.shuffle(session_order)
    requests: list[SimRequest] = []
    start_s = 0.0
    for session in session_order:
        record = records[session]
        if record["bs"] != 64:
            raise ValueError(f"session {record['id']}: block size {record['bs']}, expected 64")
        turns = [turn for turn in record["reqs"] if "in" in turn and turn["in"] <= SESSION_PROMPT_TOKENS_MAX]
        start_s += rng.expovariate(1.0)
        previous_index: int | None = None
        for turn in turns[:SESSION_REQUESTS_MAX]:
            block_ids = _read_block_ids(turn, session)
            if previous_index is None:
                arrival_s = start_s
            else:  # a time after the end of the previous answer
                arrival_s = min(THINK_S_MAX, max(0.0, turn["think"] or 0.0))
            request = SimRequest(
                index=len(requests),
                session=session,
                arrival_s=arrival_s,
                prompt_tokens=min(turn["in"], len(block_ids) * TRACE_BLOCK_SIZE),
                output_tokens=max(1, turn["out"]),
                block_ids=block_ids,
                previous_index=previous_index,
            )
            if request.prompt_tokens > 0:
                requests.append(request)
                previous_index = request.index
        if limit is not None and len(requests) >= limit:
            break
    return Workload(name, requests, f"{len(requests)} requests of {len(session_order)} sessions at most, closed loop")


def _read_block_ids(turn: dict[str, Any], session: int) -> list[int]:
    """Return the ids of a prompt's blocks of `TRACE_BLOCK_SIZE` tokens, different for every session.

    The trace has runs (first id, count) of blocks with 64 tokens. A block takes the id of the last of its 8 small ones.
    """
    small_block_ids = [first + k for first, count in zip(turn["h"][::2], turn["h"][1::2]) for k in range(count)]
    block_count = -(-turn["in"] // TRACE_BLOCK_SIZE)
    return [
        session * 1_000_000 + small_block_ids[min(8 * b + 7, len(small_block_ids) - 1)]
        for b in range(block_count)
        if 8 * b < len(small_block_ids)
    ]


def generate_tool_use(name: str, *, seed: int, max_requests: int = 6000) -> Workload:
    """Generate conversations that begin with the long prompt of one of 40 tools.

    The k-th tool is used 1/k times as often as the first. Conversations arrive as a Poisson process. Each has one to
    three turns with short unique questions.
    """
    rng = random.Random(seed)
    next_id = 1
    block_ids_by_tool = []
    for _ in range(40):
        block_count = rng.randint(4, 40)
        block_ids_by_tool.append(list(range(next_id, next_id + block_count)))
        next_id += block_count
    weights = [1.0 / (k + 1) for k in range(len(block_ids_by_tool))]
    requests: list[SimRequest] = []
    now = 0.0
    while len(requests) < max_requests:
        now += rng.expovariate(4.0)
        block_ids = list(rng.choices(block_ids_by_tool, weights)[0])
        arrival_s = now
        for _ in range(rng.randint(1, 3)):
            new_block_count = rng.randint(1, 6)
            block_ids = block_ids + list(range(next_id, next_id + new_block_count))
            next_id += new_block_count
            last_block_tokens = rng.randint(1, TRACE_BLOCK_SIZE)
            prompt_tokens = (len(block_ids) - 1) * TRACE_BLOCK_SIZE + last_block_tokens
            requests.append(
                SimRequest(
                    len(requests), len(requests), arrival_s, prompt_tokens, rng.randint(20, 400), list(block_ids), None
                )
            )
            block_ids[-1] = next_id  # the next turn fills the partial block, which gets another id
            next_id += 1
            arrival_s += rng.uniform(5.0, 40.0)
    requests.sort(key=lambda request: request.arrival_s)
    for i, request in enumerate(requests):
        request.index = request.session = i
    return link_requests(Workload(name, requests, f"{len(requests)} requests, open loop, generated with seed {seed}"))


def link_requests(workload: Workload) -> Workload:
    """Find the conversations in a trace's workload and return the workload, with the values derived from them.

    Traces do not name conversations. A request is assumed to continue an earlier one if its blocks begin with the full
    blocks of the earlier prompt, and if its prompt is long enough for the earlier answer, too. The derived values are
    sessions, the blocks that each request leaves in the cache (`final_block_ids`), and the working set.
    """
    request_by_last_block: dict[int, SimRequest] = {}
    """Newest request, by the id of the last full block of its prompt."""
    for request in workload.requests:
        request.final_block_ids = request.block_ids[: request.full_block_count]
    for request in workload.requests:
        previous_request = _find_previous_request(request, request_by_last_block)
        if previous_request is not None:
            _add_output_blocks(previous_request, request)
            if request.previous_index is None:
                request.session = previous_request.session
        if request.full_block_count:
            request_by_last_block[request.block_ids[request.full_block_count - 1]] = request
    workload.working_set_blocks = len(
        {block_id for request in workload.requests for block_id in request.final_block_ids}
    )
    return workload


def _find_previous_request(request: SimRequest, request_by_last_block: dict[int, SimRequest]) -> SimRequest | None:
    """Return the request that `request` continues as the next turn of a conversation; None if there is none.

    Its prompt is the longest that this one's prompt begins with, and leaves room for its answer.
    `request_by_last_block`: last block id of a prompt -> its request.
    """
    for block_id in reversed(request.block_ids):
        candidate = request_by_last_block.get(block_id)
        if candidate is not None and candidate.prompt_tokens + candidate.output_tokens <= request.prompt_tokens:
            return candidate
    return None


def _add_output_blocks(previous_request: SimRequest, request: SimRequest) -> None:
    """Set the ids of a request's output blocks, which the prompt of the first request that continues it shows."""
    shared_block_count = min(
        (previous_request.prompt_tokens + previous_request.output_tokens) // TRACE_BLOCK_SIZE,
        request.full_block_count,
    )
    is_first_continuation = len(previous_request.final_block_ids) == previous_request.full_block_count
    if is_first_continuation and shared_block_count > previous_request.full_block_count:
        previous_request.final_block_ids = request.block_ids[:shared_block_count]


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Sizes and arrival rate of questions behind shared system prompts."""

    system_prompt_count: int = 1
    """Number of system prompts, all equally frequent."""
    system_tokens: int = 1000
    question_tokens: int = 50
    output_tokens: int = 1000
    """Mean length of an answer; lengths are exponential."""
    requests_per_s: float = 20.0
    request_count: int = 6000
    block_size: int = 32


def generate_chat(name: str, shape: ChatShape, *, seed: int) -> Workload:
    """Generate single-turn chats: each is one of the shared system prompts, followed by a question of its own.

    A prompt is a list of block ids, and requests share KV cache where their first ids are equal. Requests arrive at
    random, at a mean rate.
    """
    rng = random.Random(seed)
    shared_blocks = shape.system_tokens // shape.block_size
    prompt_tokens = shape.system_tokens + shape.question_tokens
    question_blocks = math.ceil(prompt_tokens / shape.block_size) - shared_blocks
    next_question_id, arrival_s = shape.system_prompt_count * shared_blocks + 1, 0.0
    requests: list[SimRequest] = []
    for index in range(shape.request_count):
        first_shared_id = 1 + rng.randrange(shape.system_prompt_count) * shared_blocks
        shared_ids = range(first_shared_id, first_shared_id + shared_blocks)
        question_ids = range(next_question_id, next_question_id + question_blocks)
        next_question_id += question_blocks
        output_tokens = max(1, round(rng.expovariate(1.0 / shape.output_tokens)))
        arrival_s += rng.expovariate(shape.requests_per_s)
        request = SimRequest(
            index=index,
            session=index,
            arrival_s=arrival_s,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            block_ids=[*shared_ids, *question_ids],
            block_size=shape.block_size,
        )
        request.final_block_ids = request.block_ids[: request.full_block_count]
        requests.append(request)
    description = f"{shape.request_count} requests, generated with seed {seed}"
    return Workload(name, requests, description, working_set_blocks=shape.system_prompt_count * shared_blocks)
