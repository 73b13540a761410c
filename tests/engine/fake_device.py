"""A device without tensors: remembers what every slot of every block holds, and refuses to read anything else.

The "KV" of a position is a digest of the whole prefix up to it (and of salt and LoRA name, so that sharing across them
shows); the next token is a function of the digest. What a correct engine generates is therefore known: `continuation`.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Tokens

from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.scheduler import Scheduler, SchedulerConfig
from engine.types import Request, SamplingParams, SequenceOutput, StepPlan, StepResult, TokenLogprobs
from events import AllBlocksCleared, BlockRemoved, BlockStored, Event

VOCABULARY = 5
EOS = 4


def digests(token_ids: Tokens[int], salt: str | None = None, lora: str | None = None) -> list[int]:
    """Digest of every prefix: entry i stands for the tokens [0, i)."""
    values = [hash((salt, lora))]
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


class FakeDevice:
    """A Runner. `slots[group, block][offset]` is the digest written there; `states[unit]` that of a state."""

    def __init__(self, block_size: int, windows: Tokens[int | None] = (None,)) -> None:
        self.block_size = block_size
        self.windows = windows
        self.slots: dict[tuple[int, int], list[int | None]] = {}
        self.states: dict[int, tuple[int, int] | None] = {}
        self.fail_next = False
        self.on_execute = lambda plan: None
        self.plans: list[list[tuple[str, int, int]]] = []
        self.computed_tokens = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.on_execute(plan)
        if self.fail_next:
            self.fail_next = False
            raise DeviceFault("the device fell off the bus")
        self.plans.append([(c.seq.request.request_id, c.start, c.end) for c in plan.chunks])
        self.computed_tokens += plan.token_count
        size = self.block_size
        for group, source, destination in plan.block_moves:
            self.slots[group, destination] = list(self.slots.get((group, source), [None] * size))
        for source, destination in plan.state_restores:
            self.states[destination] = self.states[source]
        for unit in plan.state_resets:
            self.states[unit] = None
        known = [digests(c.seq.token_ids, c.seq.request.cache_salt, c.seq.request.lora_name) for c in plan.chunks]
        for chunk, prefix in zip(plan.chunks, known):
            for group in range(len(self.windows)):
                table = chunk.seq.block_tables[group]
                for position in range(chunk.start, chunk.end):
                    slot = self.slots.setdefault((group, table[position // size]), [None] * size)
                    slot[position % size] = prefix[position + 1]
            if chunk.seq.state_unit is not None:
                before = (chunk.start, prefix[chunk.start]) if chunk.start else None
                assert self.states[chunk.seq.state_unit] == before, "the state is not that of the prefix"
                self.states[chunk.seq.state_unit] = (chunk.end, prefix[chunk.end])
        result = StepResult(sampled=[])
        for index, (chunk, prefix) in enumerate(zip(plan.chunks, known)):
            for group, window in enumerate(self.windows):
                table = chunk.seq.block_tables[group]
                for position in range(0 if window is None else max(0, chunk.start - window + 1), chunk.end):
                    held = self.slots[group, table[position // size]][position % size]
                    assert held == prefix[position + 1], (
                        f"{chunk.seq.request.request_id}: position {position} of group {group} reads foreign content"
                    )
            assert chunk.samples == (chunk.end == len(chunk.seq.token_ids))
            result.sampled.append(next_token(prefix[chunk.end]) if chunk.samples else None)
            self._logprobs(result, index, chunk.seq.request, chunk.start, chunk.end, chunk.samples)
        for source, destination in plan.state_checkpoints:
            self.states[destination] = self.states[source]
        return result

    def _logprobs(self, result: StepResult, index: int, request: Request, start: int, end: int, samples: bool) -> None:
        if request.params.logprobs is not None and samples:
            token = result.sampled[index]
            assert token is not None
            result.logprobs[index] = TokenLogprobs(token, -1.0, 1, [])
        if request.params.prompt_logprobs is not None:
            tokens = request.token_ids[start + 1 : end + 1]
            result.prompt_logprobs[index] = [TokenLogprobs(token, -2.0, 1, []) for token in tokens]


class EventChecker:
    """Replays events and holds them to the guarantees of the wire format: alternation, parents, sizes."""

    def __init__(self, block_size: int, full_group: int = 0) -> None:
        self.block_size = block_size
        self.full_group = full_group
        self.resident: dict[tuple[int, int], tuple[int | None, tuple[int, ...], object]] = {}
        self.events: list[Event] = []

    def __call__(self, events: Collection[Event]) -> None:
        assert events, "an empty batch"
        self.events += events
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.resident.clear()
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    assert isinstance(name, int)
                    del self.resident[event.group_idx, name]
                    if event.group_idx == self.full_group:
                        assert all(parent != name for parent, _, _ in self.resident.values()), "a parent left first"
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = self.block_size, event.parent_block_hash
        assert event.block_size == size
        assert len(event.token_ids) == len(event.block_hashes) * size > 0
        assert event.extra_keys is not None
        for index, name in enumerate(event.block_hashes):
            assert (event.group_idx, name) not in self.resident, "stored twice"
            assert parent is None or (self.full_group, parent) in self.resident, "a child before its parent"
            if event.group_idx != self.full_group:
                assert (self.full_group, name) in self.resident
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            self.resident[event.group_idx, name] = (parent, tokens, event.extra_keys[index])
            parent = name


def resident_in(cache: KVCache) -> set[tuple[int, int]]:
    """{(group, hash)} of every computed block that the cache names."""
    return {
        (kind, node.hash)
        for node in cache.tree.nodes()
        for kind, block in enumerate(node.blocks)
        if block is not None and not block.pending
    }


class Bench:
    """An engine on a fake device, checked after every step."""

    def __init__(self, cache: KVCache, config: SchedulerConfig) -> None:
        windows = [group.sliding_window for group in cache.spec.groups]
        self.cache = cache
        self.device = FakeDevice(cache.block_size, windows)
        self.events = EventChecker(cache.block_size)
        self.core = EngineCore(Scheduler(config, cache), self.device, self.events)
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
        assert self.cache.usage.live_units == 0, "memory leaked"

    def assert_correct(self) -> None:
        """Every request that ended by itself said what a correct engine says."""
        scheduler = self.core.scheduler
        for request_id, end in self.ends.items():
            expected = continuation(self.requests[request_id], scheduler.token_limit, scheduler.config.eos_token_ids)
            got = self.outputs[request_id]
            if end.finish_reason in ("stop", "length"):
                assert got == expected, request_id
            else:
                assert got == expected[: len(got)], request_id
