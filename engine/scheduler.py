"""Which sequences compute which positions in the next step.

Continuous batching: every step mixes decodes and chunks of prefills under a token budget. Decodes go first (one token
each), then prefills, started ones and waiting requests, as their turn is (`engine.turns`). When memory runs out, the
running sequence that is last by (priority, arrival) is preempted: its blocks are released (most stay cached) and it is
recomputed later.

Owns the budget, seats, memory, and when a sequence ends. Refuses to know tensors, clocks and block contents.

Starvation: `max_num_batched_tokens >= max_num_seqs`, so everybody who decodes advances in every step. Turns come, and
a waiting request whose turn has come is overtaken only while it waits for a prefix that a running sequence is about to
compute (computing it twice would be slower for both). The sequence first by (priority, arrival) is never preempted, and
whoever was preempted is admitted again only when all that is known of it fits: so between two preemptions of one, those
before it have taken memory that they keep. That ends.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import cast

from engine.cache.kv_cache import KVCache
from engine.decoding import Decoders, RequestEntry
from engine.turns import PrefillOrder, PrefillTurns
from engine.types import (
    Chunk,
    FinishReason,
    Request,
    Sequence,
    SequenceOutput,
    StepPlan,
    StepResult,
)

_COMPARED_MAX = 32
"""Waiting requests that are looked at for a common prefix: worth a checkpoint, or being computed right now."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    eos_token_ids: frozenset[int] = frozenset()
    enough_prompt_tokens: int | None = None
    """A step that computes so many prompt tokens takes in no further request; None: only the budget ends it.

    Where a step of so many tokens is as efficient as a larger one, those who came first get their first token sooner.
    """
    prefill_order: PrefillOrder = "shortest"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: expected at least max_num_seqs = {self.max_num_seqs} "
                f"(one token for every running sequence), got {self.max_num_batched_tokens}"
            )


class RequestRefusedError(ValueError):
    """The request can never be served here; the message says which limit it breaks."""


@dataclass(slots=True)
class SchedulerTotals:
    """Counters since the start."""

    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    host_hit_tokens: int = 0
    """Of these, from host memory."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0


@dataclass(slots=True)
class _Draft:
    """A plan being made."""

    chunks: dict[RequestEntry, Chunk] = field(default_factory=dict)
    unnamed: list[RequestEntry] = field(default_factory=list)
    """Those whose blocks have no names yet: up to then they can be preempted."""
    budget: int = 0
    enough: int = 1
    """Of the budget must be left for another prompt to be taken in."""
    passed: int = 0
    """Waiting requests that were passed over."""
    moved: int = 0
    """Those that went back to their place."""
    admitted: bool = False
    """Somebody was: nobody is preempted any more."""
    closed: bool = False
    """Nobody is admitted any more."""


class _MustWait(Exception):
    """The next step cannot be planned before those that are out are applied: somebody would have to be preempted."""


class Scheduler:
    """Pure: requests and results in, plans and outputs out.

    Plans are applied (or failed) in their order; one may be made while another is out, which is how steps overlap. It
    takes for granted that no sequence stops by itself meanwhile: one that does (`ended`) is computed once more
    in vain, and nothing of that gets a name, an event or an output. Nobody is preempted while a plan is out.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCache) -> None:
        self.config = config
        self.cache = cache
        self.totals = SchedulerTotals()
        self.token_limit = min(config.max_model_len, cache.token_capacity)
        """The longest sequence, prompt and output together, that can ever be held."""
        self._entries: dict[str, RequestEntry] = {}
        self._waiting = PrefillTurns(config.prefill_order, cache)
        self._running: list[RequestEntry] = []
        self._arrivals = 0
        self._arrived: list[RequestEntry] = []
        self._planned = self._applied = 0
        """Plans that were made, and those of them that were applied or failed."""
        self._out: deque[tuple[StepPlan, list[RequestEntry], list[RequestEntry], Decoders | None]] = deque()
        """(plan, those that it has chunks of, those that it only loads from host memory for, who decode together)."""
        self._decoding: list[RequestEntry] = []
        """Those of the last plan, where all that run decode in it."""
        self._decoders: Decoders | None = None
        """Of the last plan."""
        self._ended: set[Sequence] = set()
        """Of the entries that have ended and are not gone."""
        self._spare_blocks = max(1, cache.pool.blocks_per_unit[0] * len(cache.pool.units) // 100)

    # ------------------------------------------------------------------ questions

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._entries or self._out)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    # ------------------------------------------------------------------ requests

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Raises RequestRefusedError for one that can never be served."""
        length = len(request.token_ids)
        if request.request_id in self._entries:
            raise RequestRefusedError(f"request_id: {request.request_id!r} is already being served")
        if not length:
            raise RequestRefusedError("prompt: expected at least one token, got none")
        if length >= self.config.max_model_len:
            raise RequestRefusedError(
                f"prompt: {length} tokens leave no room to generate: the model's maximum context length is "
                f"{self.config.max_model_len} tokens (prompt and output together)"
            )
        if length >= self.token_limit:
            raise RequestRefusedError(
                f"prompt: {length} tokens can never fit: the KV cache holds {self.token_limit} tokens of one sequence "
                "(prompt and output together)"
            )
        params, prompt_len = request.params, length - request.resumed_output_len
        seq = Sequence(request=request, token_ids=list(request.token_ids), prompt_len=prompt_len, arrival_s=now)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.config.eos_token_ids)
        length_max = self.token_limit if params.max_tokens is None else prompt_len + params.max_tokens
        order = request.priority, now, self._arrivals
        entry = RequestEntry(seq, request.request_id, order, stops, min(self.token_limit, length_max))
        self._arrivals += 1
        self._entries[request.request_id] = entry
        self._arrived.append(entry)
        self._waiting.arrive(entry)

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request at any time; None where it is not known (any more).

        While a step with it is out its blocks stay (others of the step may share them); `apply` frees them.
        """
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        self._end(entry)
        return SequenceOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> StepPlan | None:
        """Decide the next step. A plan with chunks must be applied or failed; one without asks for nothing.

        None: not before the plan that is out is applied.
        """
        assert len(self._out) < 2, "schedule() with two plans out"
        self._compare_arrivals()
        if self._decoders is not None and (chunks := self._go_on(self._decoders)) is not None:
            return self._send(chunks, self._decoders.entries, [], self._decoders)
        self._decoders = None
        try:
            planned = self._plan()
        except _MustWait:
            return None
        assert planned or self._running or not self._waiting, "requests wait, and nothing runs that they could wait for"
        if not planned:
            return StepPlan(chunks=[])
        entries, chunks = list(planned), list(planned.values())
        before, self._decoding = self._decoding, entries if self._all_decode(chunks) else []
        plan = self._send(chunks, entries, self._loading(planned))
        if before and before == self._decoding and not self._may_admit:
            self._decoders = Decoders(entries)
        return plan

    def _send(
        self,
        chunks: Items[Chunk],
        entries: list[RequestEntry],
        loading: list[RequestEntry],
        decoders: Decoders | None = None,
    ) -> StepPlan:
        """A plan that is out from now on."""
        plan = StepPlan(chunks=chunks, continues_previous=decoders is not None and chunks[0].token_on_device)
        self.cache.fill_plan(plan)
        self._planned = number = self._planned + 1
        for entry in entries:
            entry.last = number
        for entry in loading:
            entry.last = number
        self._out.append((plan, entries, loading, decoders))
        return plan

    @property
    def _may_admit(self) -> bool:
        return bool(self._waiting) and len(self._running) < self.config.max_num_seqs

    def _all_decode(self, chunks: list[Chunk]) -> bool:
        """Whether everybody who runs decodes."""
        return len(chunks) == len(self._running) and all(c.should_sample and c.end - c.start == 1 for c in chunks)

    def _go_on(self, decoders: Decoders) -> Items[Chunk] | None:
        """A decode of everybody again, as planning one by one would find it; None where that may find something else.

        None changes nothing but what it would change too: some have memory for their next token.
        """
        loads = self.cache.host_loads
        if self._ended or loads or self._may_admit or self._running != decoders.entries:
            return None
        for entry in decoders.growing:
            start = entry.seq.computed_tokens
            if start == entry.length_max - 1 or not self.cache.grow(entry.seq, start + 1):
                return None
            entry.decodes(start, self.cache.block_size)
        filling = decoders.grown()
        if any(entry.seq.computed_tokens == entry.length_max - 1 for entry in filling):
            return None
        if loads is not None:
            loads.begin_step(has_decodes=True)
        if self._waiting:  # for a seat
            self._waiting.step(self._prompt_room(len(decoders.entries)))
        chunks = decoders.chunks(fed=bool(self._out))
        for entry in filling:
            self.cache.register_full_blocks(entry.seq, entry.seq.computed_tokens + 1)
        return chunks

    def apply(self, plan: StepPlan, result: StepResult) -> Collection[SequenceOutput]:
        """Take in what the oldest plan computed: commits its blocks, appends tokens, ends what is finished."""
        oldest, entries, loading, decoders = self._out.popleft()
        assert plan is oldest
        assert len(result.sampled_tokens) == len(plan.chunks)
        self._applied += 1
        self.cache.commit(plan.chunks, self._ended)
        if decoders is not None and not self._ended and not result.failures and not result.logprobs:
            together = decoders.outputs(cast("list[int]", result.sampled_tokens))
            if together is not None:
                self.totals.generated_tokens += len(together)
                return together
        outputs: list[SequenceOutput] = []
        failed, all_logprobs, index = result.failures, result.logprobs, -1
        for entry, chunk, token in zip(entries, plan.chunks, result.sampled_tokens):  # the hot loop
            index += 1
            if entry.ended:
                self._end(entry)
                continue
            if not entry.reported and entry.seq.request.params.prompt_logprobs is not None:
                entry.prompt_logprobs += result.prompt_logprobs.get(index, ())
            if not chunk.should_sample:
                continue
            if failed and (why := failed.get(index)) is not None:
                outputs.append(self._give_up(entry, why))
                continue
            assert token is not None, f"chunk {index} samples, but the result holds no token for it"
            tokens = entry.seq.token_ids
            tokens.append(token)
            output = SequenceOutput(request_id=entry.name, token_ids=[token])
            if not entry.reported:
                self._report_prompt(entry, output)
            if len(tokens) >= entry.length_max or token in entry.stops:
                self._finish(entry, token, output)
            outputs.append(output)
            if all_logprobs and (logprobs := all_logprobs.get(index)) is not None:
                output.logprobs = [logprobs]
        for entry in loading:
            if entry.ended:
                self._end(entry)
        self.totals.generated_tokens += len(outputs) - len(result.failures)
        return outputs

    def fail(self, plan: StepPlan, message: str) -> list[SequenceOutput]:
        """The oldest plan was not computed: end its requests with an error. Nothing of it is announced.

        Nor was the one after it, if there is one: those that it alone has wait again.
        """
        plans, self._out, self._applied = self._out, deque(), self._planned
        oldest, entries, _, _ = plans[0]
        assert plan is oldest
        for _ in plans:
            self.cache.rollback()
        outputs: list[SequenceOutput] = []
        starts = {
            entry: chunk.start for other, more, _, _ in list(plans)[1:] for entry, chunk in zip(more, other.chunks)
        }
        for _, _, loading, _ in plans:
            for entry in loading:
                starts.setdefault(entry, entry.seq.computed_tokens)
        for entry in sorted(starts.keys() - set(entries), reverse=True):
            if entry.ended:
                self._remove(entry)
            else:
                self._put_back(entry, starts[entry])
        for entry in reversed(entries):
            self._remove(entry)
            if entry.ended:
                continue
            outputs.append(self._failed(entry, message))
        if self.cache.invalidate_failed_copies():
            for entry in self._running[::-1]:
                self._preempt(entry)
            self.cache.invalidate_failed_copies()
        return outputs[::-1]

    # ------------------------------------------------------------------ deciding

    def _compare_arrivals(self) -> None:
        """Let prefills under way stop where a request that came meanwhile can resume."""
        arrived, self._arrived = self._arrived, []
        if not arrived or not self._compares:
            return
        new = [entry for entry in arrived[:_COMPARED_MAX] if entry.name in self._entries]
        for entry in self._running:
            if len(entry.seq.token_ids) - entry.seq.computed_tokens > 1:
                self._waiting.compare(entry.seq, new)

    @property
    def _compares(self) -> bool:
        """Whether it matters what prompts have in common."""
        return self._waiting.shortest or self.cache.spec.state is not None

    def _plan(self) -> dict[RequestEntry, Chunk]:
        """Chunks of the next step: of decodes, then of prefills in their order. Raises _MustWait."""
        draft = _Draft()
        started, loads = self._decode(draft), self.cache.host_loads
        decodes = len(draft.chunks)
        draft.budget = budget = self.config.max_num_batched_tokens - decodes
        if self.config.enough_prompt_tokens is not None:
            draft.enough = max(1, budget - self.config.enough_prompt_tokens + 1)
        if loads is not None:
            loads.begin_step(has_decodes=bool(draft.chunks))
        for entry in self._waiting.begun(entry for entry in started if entry.seq in self.cache):
            if self._waiting.shortest:
                self._admit(draft, entry)
            if draft.budget >= (draft.enough if self._waiting.shortest else 1):
                self._go_on_with(entry, draft)
        draft.passed = 0  # what they waited for may be in this step
        self._admit(draft)
        self._name(draft)
        computed = max(0, budget - draft.budget)
        full = bool(self._waiting) and len(self._running) >= self.config.max_num_seqs
        self._waiting.step(max(computed, self._prompt_room(decodes)) if full else computed)
        return draft.chunks

    def _prompt_room(self, decodes: int) -> int:
        """Tokens of prompts that a step beside so many decodes is meant to compute at most."""
        room, enough = self.config.max_num_batched_tokens - decodes, self.config.enough_prompt_tokens
        return room if enough is None else min(room, enough)

    def _decode(self, draft: _Draft) -> list[RequestEntry]:
        """Chunks for those who decode. Who does not, yet."""
        size, loads, chunks = self.cache.block_size, self.cache.host_loads, draft.chunks
        prefills: list[RequestEntry] = []
        for entry in list(self._running):
            seq = entry.seq
            start, known = seq.computed_tokens, len(seq.token_ids)
            if start < entry.plain_until:
                chunks[entry] = Chunk(seq, start, start + 1, True, start == known)
            elif entry.ended or start == known == entry.length_max - 1:
                pass  # nothing is left to do but to apply what is out
            elif known - start > 1 or (loads and seq in loads):
                prefills.append(entry)
            elif self._grow(entry, start + 1, draft):
                chunks[entry] = Chunk(seq, start, start + 1, True, start == known)
                entry.decodes(start, size)
                draft.unnamed.append(entry)
        return prefills

    def _go_on_with(self, entry: RequestEntry, draft: _Draft) -> None:
        """A chunk for a prompt that was begun."""
        seq, loads = entry.seq, self.cache.host_loads
        if seq not in self.cache or (loads and seq in loads):  # preempted meanwhile, or waits
            return
        end = self.cache.clip_chunk_end(seq, min(len(seq.token_ids), seq.computed_tokens + draft.budget))
        if self._grow(entry, end, draft):
            draft.chunks[entry] = Chunk(seq, seq.computed_tokens, end, end == len(seq.token_ids))
            draft.budget -= end - seq.computed_tokens
            draft.unnamed.append(entry)

    def _name(self, draft: _Draft) -> None:
        """Name the blocks that its chunks finish: who is admitted from now on shares them."""
        for entry in draft.unnamed:
            if entry in draft.chunks:  # not preempted meanwhile
                self.cache.register_full_blocks(entry.seq, draft.chunks[entry].end)
        draft.unnamed.clear()

    def _grow(self, entry: RequestEntry, end: int, draft: _Draft) -> bool:
        """Find memory for `entry` up to `end`, preempting from the end of the order; False if it went itself, or would
        have to be preempted for one who was just admitted. Raises _MustWait.
        """
        while True:
            if entry.seq not in self.cache:
                return False
            if self.cache.grow(entry.seq, end):
                return True
            if draft.admitted:
                return False
            if self._out:
                raise _MustWait
            victim = self._running[-1]
            if (chunk := draft.chunks.pop(victim, None)) is not None:
                draft.budget += chunk.end - chunk.start
            draft.closed = True
            self._preempt(victim)
            if victim is entry:
                return False

    def _preempt(self, entry: RequestEntry) -> None:
        self._decoders = None
        self._running.remove(entry)
        self.cache.release(entry.seq)
        entry.seq.preemptions += 1
        entry.plain_until = 0
        entry.prompt_logprobs.clear()
        self.totals.preemptions += 1
        self._waiting.add(entry)

    def _loading(self, planned: dict[RequestEntry, Chunk]) -> list[RequestEntry]:
        """Whom the plan brings blocks back for, of those that it computes nothing of."""
        if self.cache.host_loads is None or not self.cache.host_loads.planned_loads:
            return []
        seqs = {load[0] for load in self.cache.host_loads.planned_loads if load is not None}
        return [entry for entry in self._running if entry.seq in seqs and entry not in planned]

    def _put_back(self, entry: RequestEntry, start: int) -> None:
        """Of a step from `start` that was planned and never computed: as if it had not been, if it was the first."""
        seq = entry.seq
        first = not seq.preemptions and start == seq.cached_tokens
        self._preempt(entry)
        if first:
            self.totals.preemptions -= 1
            seq.preemptions = 0
            self._count_prompt(seq, -1)

    def _count_prompt(self, seq: Sequence, times: int) -> None:
        self.totals.prefix_queried_tokens += times * seq.prompt_len
        self.totals.prefix_hit_tokens += times * seq.cached_tokens
        self.totals.host_hit_tokens += times * seq.host_tokens
        self.totals.prompt_tokens += times * seq.prompt_len

    def _admit(self, draft: _Draft, before: RequestEntry | None = None) -> None:
        """Start waiting requests, in order, while budget, seats and memory last; only those whose turn is `before`
        this one's.

        Passed over, for now, is only who would compute what a running sequence is about to compute anyway.
        """
        waiting = self._waiting
        while (
            draft.passed < min(len(waiting), _COMPARED_MAX)
            and not draft.closed
            and draft.budget >= draft.enough
            and len(self._running) < self.config.max_num_seqs
        ):
            if before is None:  # nobody is preempted any more
                self._name(draft)
            entry = waiting[draft.passed]
            seq = entry.seq
            if before is not None and entry.turn >= before.turn:
                return
            # Something is left for the running ones to grow into, else the newcomer would be preempted at once.
            spare = self._spare_blocks if self._running else 0
            if not self.cache.has_spare_blocks(spare + 1):
                draft.closed = True
            elif self.cache.should_wait(seq):
                draft.passed += 1
            elif draft.moved < _COMPARED_MAX and waiting.goes_back(entry):
                draft.moved += 1
            elif self.cache.admit(seq, spare):
                draft.admitted = True
                self._begin(entry, draft)
            else:
                draft.closed = True

    def _begin(self, entry: RequestEntry, draft: _Draft) -> None:
        """The first chunk of a request that was just admitted."""
        seq, waiting = entry.seq, self._waiting
        waiting.remove(entry)
        if self._compares:
            waiting.compare(seq, waiting.first(_COMPARED_MAX))
        insort(self._running, entry)
        if not seq.preemptions:
            seq.cached_tokens = seq.computed_tokens
            self._count_prompt(seq, 1)
        if self.cache.host_loads and seq in self.cache.host_loads:
            return
        end = self.cache.clip_chunk_end(seq, min(len(seq.token_ids), seq.computed_tokens + draft.budget))
        grown = self.cache.grow(seq, end)
        assert grown, "admitted without room for its tokens"
        assert all(len(table) >= -(-end // self.cache.block_size) for table in seq.block_tables)
        draft.chunks[entry] = Chunk(seq, seq.computed_tokens, end, end == len(seq.token_ids))
        draft.unnamed.append(entry)
        draft.budget -= end - seq.computed_tokens

    # ------------------------------------------------------------------ applying

    def _report_prompt(self, entry: RequestEntry, output: SequenceOutput) -> None:
        """Put the facts about the prompt into a request's first output."""
        entry.reported = True
        output.cached_tokens = entry.seq.cached_tokens
        if entry.seq.request.params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *entry.prompt_logprobs]

    def _give_up(self, entry: RequestEntry, message: str) -> SequenceOutput:
        """End a request whose answer cannot go on, for what it asked for itself."""
        self._end(entry)
        output = self._failed(entry, message)
        output.is_client_error = True
        return output

    def _failed(self, entry: RequestEntry, message: str) -> SequenceOutput:
        """Forget it; its last output."""
        del self._entries[entry.name]
        return SequenceOutput(request_id=entry.name, token_ids=[], finish_reason=FinishReason.ERROR, error=message)

    def _finish(self, entry: RequestEntry, token: int, output: SequenceOutput) -> None:
        """End a request if its last token does so: a token to stop at comes before the length."""
        params = entry.seq.request.params
        if token in entry.stops and entry.seq.output_len >= params.min_tokens:
            output.finish_reason = FinishReason.STOP
            if params.ignore_eos or token not in self.config.eos_token_ids:
                output.stop_token_id = token
        elif len(entry.seq.token_ids) >= entry.length_max:
            output.finish_reason = FinishReason.LENGTH
        else:
            return
        self._end(entry)
        del self._entries[entry.name]
        self.totals.finished += 1

    def _end(self, entry: RequestEntry) -> None:
        """Take a request out, once no plan with it is out."""
        if entry.last > self._applied:
            entry.ended, entry.plain_until = True, 0
            self._ended.add(entry.seq)
            if self.cache.host_loads is not None:
                self.cache.host_loads.cancel(entry.seq)
        else:
            self._remove(entry)

    def _remove(self, entry: RequestEntry) -> None:
        """Take a request out of the queue it is in and give its blocks back."""
        self._ended.discard(entry.seq)
        if entry.seq in self.cache:
            self._running.remove(entry)
            self.cache.release(entry.seq)
        else:
            self._waiting.remove(entry)
        self.cache.discard_keys(entry.seq)

    # ------------------------------------------------------------------ proof

    def check_invariants(self) -> None:
        self.cache.check_invariants()
        self._waiting.check_invariants()
        assert self._running == sorted(self._running)
        assert len(self._running) <= self.config.max_num_seqs
        assert len(self._running) + len(self._waiting) == len(self._entries) + len(self._ended)
        for entry in self._running:
            assert entry.seq in self.cache
            assert (entry.seq in self._ended) == entry.ended
            out = sum(entry in (*entries, *loading) for _, entries, loading, _ in self._out)
            assert (entry.last > self._applied) == (out > 0)
            assert 0 <= entry.seq.computed_tokens < len(entry.seq.token_ids) + out + entry.ended
            assert entry.plain_until < len(entry.seq.block_tables[0]) * self.cache.block_size
