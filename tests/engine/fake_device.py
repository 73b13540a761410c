"""A device without tensors: remembers what every slot of every block holds, and refuses to read anything else.

The "KV" of a position is a digest of the whole prefix up to it (and of salt and LoRA name, so that sharing across them
shows); the next token is a function of the digest. What a correct engine generates is therefore known: `continuation`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np

from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.execution.block_tables import BlockTables, RowAllocator
from engine.scheduler import Scheduler, SchedulerConfig
from engine.types import (
    BlockCopy,
    Chunk,
    CopyDirection,
    Request,
    SamplingParams,
    SequenceOutput,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from events import CPU, GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event

VOCABULARY = 5
EOS = 4


def digests(token_ids: Tokens[int], salt: str | None = None, lora: str | None = None) -> list[int]:
    """Digest of every prefix: entry i stands for the tokens [0, i)."""
    names = ((-1,) if name is None else tuple(name.encode()) for name in (salt, lora))
    values = [hash(tuple(names))]  # of numbers alone: the same in every process
    for token in token_ids:
        values.append(hash((values[-1], token)))
    return values


def next_token(digest: int) -> int:
    return (digest >> 7) % VOCABULARY


def continuation(request: Request, token_limit: int, eos: frozenset[int] = frozenset()) -> list[int]:
    """What a correct engine generates."""
    tokens, params = list(request.token_ids), request.params
    digest = digests(tokens, request.cache_salt, request.lora_name)[-1]
    output: list[int] = []
    while True:
        output.append(next_token(digest))
        digest = hash((digest, output[-1]))
        if len(output) >= params.min_tokens:
            if output[-1] in eos and not params.ignore_eos:
                return output
            if output[-1] in params.stop_token_ids:
                return output
        if len(tokens) + len(output) >= token_limit or len(output) == params.max_tokens:
            return output


class DeviceFault(RuntimeError):
    pass


@dataclass(slots=True)
class SubmittedStep:
    """A step as a device is given it: nothing of it follows what scheduler and cache do next."""

    plan: StepPlan
    chunks: list[tuple[Chunk, list[int], list[list[int]], int | None]]
    """(chunk as it was, its known tokens, its blocks of each group, its state)."""
    result: StepResult | Exception | None = None


class FakeDevice:
    """A runner whose steps overlap. `slots[group, block][offset]` is the digest written there; `states[unit]` a state.

    It computes a step when its result is asked for, from what was sent, block tables by what changed in them, as a real
    one does; a token that is on the device is that which the step before found.
    """

    def __init__(self, block_size: int, windows: Tokens[int | None] = (None,)) -> None:
        self.block_size = block_size
        self.windows = windows
        self.slots: dict[tuple[int, int], list[int | None]] = {}
        self.states: dict[int, tuple[int, int] | None] = {}
        self.host_slots: dict[tuple[int, int], list[int | None]] = {}
        self.host_states: dict[int, tuple[int, int] | None] = {}
        self.fail_next = False
        """The next step that is begun is not computed."""
        self.acts_before_fault: int | None = None
        """Copies, chunks and checkpoints that are still done before a step fails half-way; None: none fails."""
        self.on_execute = lambda plan: None
        self.plans: list[list[tuple[str, int, int]]] = []
        self.computed_tokens = 0
        self._row_allocator = RowAllocator(64)
        layout = SimpleNamespace(block_size=block_size)
        self._tables = [BlockTables(group, layout, 64, 500, None) for group in range(len(windows))]  # type: ignore[arg-type]
        self._queue: deque[SubmittedStep] = deque()
        self._last: dict[str, int] = {}
        """Request -> the token found for it last."""

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan)()

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        rows, new = self._row_allocator.assign([chunk.seq for chunk in plan.chunks])
        ends, tables = np.array([chunk.end for chunk in plan.chunks]), []
        for table in self._tables:
            table.update(plan.chunks, ends, rows, new)
            tables.append(table.make_step_table(rows).host_blocks[rows].tolist())
        chunks = [
            (copy(c), c.seq.token_ids[: c.end], [table[i] for table in tables], c.seq.state_unit)
            for i, c in enumerate(plan.chunks)
        ]
        step = SubmittedStep(plan, chunks, DeviceFault("the device fell off the bus") if self.fail_next else None)
        self.fail_next = False
        self._queue.append(step)
        return partial(self._result, step)

    def _result(self, submitted_step: SubmittedStep) -> StepResult:
        self.on_execute(submitted_step.plan)
        while submitted_step in self._queue:
            step = self._queue.popleft()
            step.result = step.result or self._compute_or_fail(step)
        if isinstance(submitted_step.result, Exception):
            self._queue.clear()
            self._row_allocator.clear()
            raise submitted_step.result
        assert submitted_step.result is not None
        return submitted_step.result

    def _compute_or_fail(self, step: SubmittedStep) -> StepResult | Exception:
        try:
            return self._compute(step)
        except DeviceFault as fault:
            return fault

    def _count_act(self) -> None:
        if self.acts_before_fault is not None:
            self.acts_before_fault -= 1
            if self.acts_before_fault < 0:
                self.acts_before_fault = None
                raise DeviceFault("the device fell off the bus half-way")

    def _compute(self, step: SubmittedStep) -> StepResult:
        plan, size = step.plan, self.block_size
        self.plans.append([(c.seq.request.request_id, c.start, c.end) for c, _, _, _ in step.chunks])
        self.computed_tokens += sum(c.end - c.start for c, _, _, _ in step.chunks)
        for block_copy in plan.block_copies:
            self._count_act()
            self.copy_blocks([block_copy])
        for unit in plan.state_resets:
            self.states[unit] = None
        known_ids = []
        for chunk, tokens, _, _ in step.chunks:
            request = chunk.seq.request
            assert chunk.token_on_device == (len(tokens) == chunk.start)
            fed_ids = [self._last[request.request_id]] if chunk.token_on_device else []
            known_ids.append(digests(tokens + fed_ids, request.cache_salt, request.lora_name))
        for (chunk, _, tables, state), prefix in zip(step.chunks, known_ids):
            self._count_act()
            for group in range(len(self.windows)):
                for position in range(chunk.start, chunk.end):
                    slot = self.slots.setdefault((group, tables[group][position // size]), [None] * size)
                    slot[position % size] = prefix[position + 1]
            if state is not None:
                before = (chunk.start, prefix[chunk.start]) if chunk.start else None
                assert self.states[state] == before, "the state is not that of the prefix"
                self.states[state] = (chunk.end, prefix[chunk.end])
        result = StepResult(sampled_tokens=[])
        for index, ((chunk, _, tables, _), prefix) in enumerate(zip(step.chunks, known_ids)):
            request = chunk.seq.request
            for group, window in enumerate(self.windows):
                for position in range(0 if window is None else max(0, chunk.start - window + 1), chunk.end):
                    stored_id = self.slots[group, tables[group][position // size]][position % size]
                    assert stored_id == prefix[position + 1], (
                        f"{request.request_id}: position {position} of group {group} reads foreign content"
                    )
            token = next_token(prefix[chunk.end]) if chunk.should_sample else None
            if token is not None:
                self._last[request.request_id] = token
            result.sampled_tokens.append(token)
            self._logprobs(result, index, request, chunk.start, chunk.end, chunk.should_sample)
        for block_copy in plan.state_checkpoints:
            self._count_act()
            self.copy_blocks([block_copy])
        return result

    def copy_blocks(self, block_copies: Tokens[BlockCopy]) -> None:
        for kind, source, destination, way in block_copies:
            places = (self.host_slots if way is CopyDirection.FROM_HOST else self.slots), (
                self.host_slots if way is CopyDirection.TO_HOST else self.slots)  # fmt: skip
            if kind == len(self.windows):
                states = (self.host_states if way is CopyDirection.FROM_HOST else self.states), (
                    self.host_states if way is CopyDirection.TO_HOST else self.states)  # fmt: skip
                states[1][destination] = states[0][source]
            else:
                places[1][kind, destination] = list(places[0].get((kind, source), [None] * self.block_size))

    def _logprobs(self, result: StepResult, index: int, request: Request, start: int, end: int, samples: bool) -> None:
        if request.params.logprobs is not None and samples:
            token = result.sampled_tokens[index]
            assert token is not None
            result.logprobs_by_chunk[index] = TokenLogprobs.pack(token, -1.0, 1, [])
        if request.params.prompt_logprobs is not None:
            tokens = request.token_ids[start + 1 : end + 1]
            result.prompt_logprobs_by_chunk[index] = [TokenLogprobs.pack(token, -2.0, 1, []) for token in tokens]


class EventChecker:
    """Replays events and holds them to the guarantees of the wire format: alternation, parents, sizes."""

    def __init__(self, block_size: int, full_group: int = 0) -> None:
        self.block_size = block_size
        self.full_group = full_group
        self.resident: dict[tuple[int, int, str], tuple[int | None, tuple[int, ...], object]] = {}
        """By (group, name, medium)."""
        self.events: list[Event] = []

    def __call__(self, step_events: Iterable[Event]) -> None:
        events = list(step_events)
        assert events, "an empty batch"
        self.events += events
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.resident.clear()
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    assert isinstance(name, int)
                    del self.resident[event.group_idx, name, event.medium]
                    if event.group_idx == self.full_group and not self._full(name):
                        assert all(parent != name for parent, _, _ in self.resident.values()), "a parent left first"
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = self.block_size, event.parent_block_hash
        assert event.block_size == size
        assert len(event.token_ids) == len(event.block_hashes) * size > 0
        assert event.extra_keys is not None
        for index, name in enumerate(event.block_hashes):
            assert (event.group_idx, name, event.medium) not in self.resident, "stored twice"
            assert parent is None or self._full(parent), "a child before its parent"
            assert event.group_idx == self.full_group or self._full(name)
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            self.resident[event.group_idx, name, event.medium] = (parent, tokens, event.extra_keys[index])
            parent = name

    def _full(self, name: int) -> bool:
        """Whether any medium has the full-attention block."""
        return any((self.full_group, name, medium) in self.resident for medium in (GPU, CPU))


def resident_in(cache: KVCache) -> set[tuple[int, int, str]]:
    """{(group, hash, medium)} of every computed block that the cache names."""
    return {
        (kind, node.hash, medium)
        for node in cache.tree.nodes()
        for medium, blocks in ((GPU, node.blocks), (CPU, node.host_blocks))
        for kind, block in enumerate(blocks)
        if block is not None and not block.is_pending
    }


class Bench:
    """An engine on a fake device, checked after every step."""

    def __init__(self, cache: KVCache, config: SchedulerConfig, *, overlap: bool = False) -> None:
        windows = [group.sliding_window for group in cache.spec.groups]
        self.cache = cache
        self.device = FakeDevice(cache.block_size, windows)
        self.events = EventChecker(cache.block_size)
        self.core = EngineCore(Scheduler(config, cache), self.device, self.events, overlaps_steps=overlap)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, SequenceOutput] = {}
        self.firsts: dict[str, SequenceOutput] = {}
        self.now = 0.0

    def add(self, request_id: str, token_ids: list[int], *, max_tokens: int | None = 4, **other: object) -> Request:
        names = {"cache_salt", "lora_name", "priority"}
        params = SamplingParams(
            max_tokens=max_tokens,
            **{k: v for k, v in other.items() if k not in names},  # type: ignore[arg-type]
        )
        request = Request(
            request_id=request_id,
            token_ids=token_ids,
            params=params,
            **{k: v for k, v in other.items() if k in names},  # type: ignore[arg-type]
        )
        self.now += 1.0
        self.core.add(request, self.now)
        self.requests[request_id] = request
        self.outputs[request_id] = []
        return request

    def step(self) -> list[SequenceOutput]:
        outputs = self.core.step(self.now)
        for output in outputs:
            assert output.request_id not in self.ends, "an output after the last"
            assert not re.search("AssertionError|KeyError|IndexError|TypeError", output.error or ""), output.error
            self.firsts.setdefault(output.request_id, output)
            self.outputs[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = output
        self.check()
        return outputs

    def abort(self, *request_ids: str) -> None:
        for output in self.core.abort(request_ids):
            self.ends[output.request_id] = output

    def check(self) -> None:
        self.core.check_invariants()
        assert set(self.events.resident) == resident_in(self.cache)

    def drain(self, steps_max: int = 10_000) -> None:
        for _ in range(steps_max):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "starved"
        assert self.cache.pool.live_units == 0, "memory leaked"

    def assert_correct(self) -> None:
        """Every request that ended by itself said what a correct engine says."""
        scheduler = self.core.scheduler
        for request_id, end in self.ends.items():
            expected = continuation(self.requests[request_id], scheduler.token_limit, scheduler.config.eos_token_ids)
            actual = self.outputs[request_id]
            if end.finish_reason in ("stop", "length"):
                assert actual == expected, request_id
            else:
                assert actual == expected[: len(actual)], request_id
