"""Which sequences compute which positions in the next step.

Continuous batching: every step mixes decodes and chunks of prefills under a token budget. Decodes go first (one token
each), then prefills, started ones and waiting requests, in the order of `engine.prefill_queue`. When memory runs out,
the running sequence that is last by (priority, arrival) is preempted: its blocks are released (most stay cached) and it
is recomputed later.

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
from typing import NamedTuple, cast

from engine.cache.kv_cache import KVCache
from engine.decode_batch import DecodeBatch, RequestEntry
from engine.prefill_queue import PrefillOrder, PrefillQueue
from engine.types import (
    Chunk,
    FinishReason,
    Request,
    Sequence,
    SequenceOutput,
    StepPlan,
    StepResult,
)

_WAITING_SCAN_MAX = 32
"""Waiting requests that are looked at for a common prefix: worth a checkpoint, or being computed right now."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    eos_token_ids: frozenset[int] = frozenset()
    target_prefill_tokens: int | None = None
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
    finished_requests: int = 0


@dataclass(slots=True)
class _PlanDraft:
    """A plan being made."""

    chunks: dict[RequestEntry, Chunk] = field(default_factory=dict)
    unregistered_entries: list[RequestEntry] = field(default_factory=list)
    """Those whose blocks have no names yet: up to then they can be preempted."""
    token_budget: int = 0
    admission_min_tokens: int = 1
    """Of the budget must be left for another prompt to be taken in."""
    skipped_count: int = 0
    """Waiting requests that were passed over."""
    requeued_count: int = 0
    """Those that went back to their place."""
    has_admitted: bool = False
    """Somebody was: nobody is preempted any more."""
    is_admission_closed: bool = False
    """Nobody is admitted any more."""


class _InFlightPlan(NamedTuple):
    """A plan that is out."""

    plan: StepPlan
    entries: list[RequestEntry]
    """Those that it has chunks of."""
    loading_entries: list[RequestEntry]
    """Those that it only loads from host memory for."""
    decode_batch: DecodeBatch | None
    """Where they decode together."""


class _MustDrain(Exception):
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
        self._entry_by_id: dict[str, RequestEntry] = {}
        self._waiting_queue = PrefillQueue(config.prefill_order, cache)
        self._running_entries: list[RequestEntry] = []
        self._arrival_count = 0
        self._new_arrivals: list[RequestEntry] = []
        self._plan_count = self._applied_plan_count = 0
        """Plans that were made, and those of them that were applied or failed."""
        self._plans_in_flight: deque[_InFlightPlan] = deque()
        self._last_decode_entries: list[RequestEntry] = []
        """Those of the last plan, where all that run decode in it."""
        self._decode_batch: DecodeBatch | None = None
        """Of the last plan."""
        self._ended_sequences: set[Sequence] = set()
        """Of the entries that have ended and are not gone."""
        self._growth_reserve_blocks = cache.growth_reserve_blocks

    # ------------------------------------------------------------------ questions

    @property
    def running_count(self) -> int:
        return len(self._running_entries)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting_queue)

    @property
    def has_work(self) -> bool:
        return bool(self._entry_by_id or self._plans_in_flight)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entry_by_id

    # ------------------------------------------------------------------ requests

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Raises RequestRefusedError for one that can never be served."""
        prompt_tokens = len(request.token_ids)
        if request.request_id in self._entry_by_id:
            raise RequestRefusedError(f"request_id: {request.request_id!r} is already being served")
        if not prompt_tokens:
            raise RequestRefusedError("prompt: expected at least one token, got none")
        if prompt_tokens >= self.config.max_model_len:
            raise RequestRefusedError(
                f"prompt: {prompt_tokens} tokens leave no room to generate: the model's maximum context length is "
                f"{self.config.max_model_len} tokens (prompt and output together)"
            )
        if prompt_tokens >= self.token_limit:
            raise RequestRefusedError(
                f"prompt: {prompt_tokens} tokens can never fit: the KV cache holds {self.token_limit} tokens of one "
                "sequence (prompt and output together)"
            )
        params, prompt_len = request.params, prompt_tokens - request.resumed_output_len
        seq = Sequence(request=request, token_ids=list(request.token_ids), prompt_len=prompt_len, arrival_s=now)
        stop_token_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self.config.eos_token_ids
        )
        length_max = self.token_limit if params.max_tokens is None else prompt_len + params.max_tokens
        arrival_order = request.priority, now, self._arrival_count
        entry = RequestEntry(seq, request.request_id, arrival_order, stop_token_ids, min(self.token_limit, length_max))
        self._arrival_count += 1
        self._entry_by_id[request.request_id] = entry
        self._new_arrivals.append(entry)
        self._waiting_queue.add_arrival(entry)

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request at any time; None where it is not known (any more).

        While a step with it is out its blocks stay (others of the step may share them); `apply` frees them.
        """
        entry = self._entry_by_id.pop(request_id, None)
        if entry is None:
            return None
        self._end_request(entry)
        return SequenceOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> StepPlan | None:
        """Decide the next step. A plan with chunks must be applied or failed; one without asks for nothing.

        None: not before the plan that is out is applied.
        """
        assert len(self._plans_in_flight) < 2, "schedule() with two plans out"
        self._share_prefixes_with_arrivals()
        if self._decode_batch is not None and (chunks := self._repeat_decode(self._decode_batch)) is not None:
            return self._issue_plan(chunks, self._decode_batch.entries, [], self._decode_batch)
        self._decode_batch = None
        try:
            chunks_by_entry = self._plan_chunks()
        except _MustDrain:
            return None
        assert chunks_by_entry or self._running_entries or not self._waiting_queue, (
            "requests wait, and nothing runs that they could wait for"
        )
        if not chunks_by_entry:
            return StepPlan(chunks=[])
        entries, chunks = list(chunks_by_entry), list(chunks_by_entry.values())
        previous_decode_entries = self._last_decode_entries
        self._last_decode_entries = entries if self._is_all_decode(chunks) else []
        plan = self._issue_plan(chunks, entries, self._find_loading_entries(chunks_by_entry))
        if previous_decode_entries and previous_decode_entries == self._last_decode_entries and not self._can_admit:
            self._decode_batch = DecodeBatch(entries)
        return plan

    def _issue_plan(
        self,
        chunks: Items[Chunk],
        entries: list[RequestEntry],
        loading_entries: list[RequestEntry],
        decode_batch: DecodeBatch | None = None,
    ) -> StepPlan:
        """A plan that is out from now on."""
        plan = StepPlan(chunks=chunks, continues_previous=decode_batch is not None and chunks[0].token_on_device)
        self.cache.fill_plan(plan)
        self._plan_count = plan_number = self._plan_count + 1
        for entry in entries:
            entry.last_plan_number = plan_number
        for entry in loading_entries:
            entry.last_plan_number = plan_number
        self._plans_in_flight.append(_InFlightPlan(plan, entries, loading_entries, decode_batch))
        return plan

    @property
    def _can_admit(self) -> bool:
        return bool(self._waiting_queue) and len(self._running_entries) < self.config.max_num_seqs

    def _is_all_decode(self, chunks: list[Chunk]) -> bool:
        """Whether everybody who runs decodes."""
        return len(chunks) == len(self._running_entries) and all(
            chunk.should_sample and chunk.end - chunk.start == 1 for chunk in chunks
        )

    def _repeat_decode(self, decode_batch: DecodeBatch) -> Items[Chunk] | None:
        """A decode of everybody again, as planning one by one would find it; None where that may find something else.

        None changes nothing but what it would change too: some have memory for their next token.
        """
        if (
            self._ended_sequences
            or self.cache.has_unplanned_loads
            or self._can_admit
            or self._running_entries != decode_batch.entries
        ):
            return None
        for entry in decode_batch.entries_to_grow:
            position = entry.seq.computed_tokens
            if position == entry.length_max - 1 or not self.cache.grow(entry.seq, position + 1):
                return None
            entry.set_next_check(position, self.cache.block_size)
        entries_to_check = decode_batch.finish_growing()
        if any(entry.seq.computed_tokens == entry.length_max - 1 for entry in entries_to_check):
            return None
        self.cache.plan_loads(has_decodes=True)
        if self._waiting_queue:  # for a seat
            self._waiting_queue.add_work(self._prefill_budget(len(decode_batch.entries)))
        chunks = decode_batch.make_chunks(token_on_device=bool(self._plans_in_flight))
        for entry in entries_to_check:
            self.cache.register_full_blocks(entry.seq, entry.seq.computed_tokens + 1)
        return chunks

    def apply(self, plan: StepPlan, result: StepResult) -> Collection[SequenceOutput]:
        """Take in what the oldest plan computed: commits its blocks, appends tokens, ends what is finished."""
        oldest_plan, entries, loading_entries, decode_batch = self._plans_in_flight.popleft()
        assert plan is oldest_plan
        assert len(result.sampled_tokens) == len(plan.chunks)
        self._applied_plan_count += 1
        self.cache.commit(plan.chunks, self._ended_sequences)
        if (
            decode_batch is not None
            and not self._ended_sequences
            and not result.failure_by_chunk
            and not result.logprobs_by_chunk
        ):
            decoded_outputs = decode_batch.append_tokens(cast("list[int]", result.sampled_tokens))
            if decoded_outputs is not None:
                self.totals.generated_tokens += len(decoded_outputs)
                return decoded_outputs
        outputs: list[SequenceOutput] = []
        failure_by_chunk, all_logprobs, index = result.failure_by_chunk, result.logprobs_by_chunk, -1
        for entry, chunk, token_id in zip(entries, plan.chunks, result.sampled_tokens):  # the hot loop
            index += 1
            if entry.has_ended:
                self._end_request(entry)
                continue
            if not entry.has_reported_prompt and entry.seq.request.params.prompt_logprobs is not None:
                entry.prompt_logprobs += result.prompt_logprobs_by_chunk.get(index, ())
            if not chunk.should_sample:
                continue
            if failure_by_chunk and (failure_message := failure_by_chunk.get(index)) is not None:
                outputs.append(self._fail_request(entry, failure_message))
                continue
            assert token_id is not None, f"chunk {index} samples, but the result holds no token for it"
            token_ids = entry.seq.token_ids
            token_ids.append(token_id)
            output = SequenceOutput(request_id=entry.request_id, token_ids=[token_id])
            if not entry.has_reported_prompt:
                self._add_prompt_results(entry, output)
            if len(token_ids) >= entry.length_max or token_id in entry.stop_token_ids:
                self._finish_if_complete(entry, token_id, output)
            outputs.append(output)
            if all_logprobs and (logprobs := all_logprobs.get(index)) is not None:
                output.logprobs = [logprobs]
        for entry in loading_entries:
            if entry.has_ended:
                self._end_request(entry)
        self.totals.generated_tokens += len(outputs) - len(result.failure_by_chunk)
        return outputs

    def fail(self, plan: StepPlan, message: str) -> list[SequenceOutput]:
        """The oldest plan was not computed: end its requests with an error. Nothing of it is announced.

        Nor was the one after it, if there is one: those that it alone has wait again.
        """
        plans, self._plans_in_flight, self._applied_plan_count = self._plans_in_flight, deque(), self._plan_count
        oldest_plan, entries, _, _ = plans[0]
        assert plan is oldest_plan
        for _ in plans:
            self.cache.rollback()
        outputs: list[SequenceOutput] = []
        start_by_entry = {
            entry: chunk.start
            for later_plan, later_entries, _, _ in list(plans)[1:]
            for entry, chunk in zip(later_entries, later_plan.chunks)
        }
        for _, _, loading_entries, _ in plans:
            for entry in loading_entries:
                start_by_entry.setdefault(entry, entry.seq.computed_tokens)
        for entry in sorted(start_by_entry.keys() - set(entries), reverse=True):
            if entry.has_ended:
                self._remove(entry)
            else:
                self._undo_unexecuted_step(entry, start_by_entry[entry])
        for entry in reversed(entries):
            self._remove(entry)
            if entry.has_ended:
                continue
            outputs.append(self._make_error_output(entry, message))
        if self.cache.invalidate_failed_copies():
            for entry in self._running_entries[::-1]:
                self._preempt(entry)
            self.cache.invalidate_failed_copies()
        return outputs[::-1]

    # ------------------------------------------------------------------ deciding

    def _share_prefixes_with_arrivals(self) -> None:
        """Let prefills under way stop where a request that came meanwhile can resume."""
        arrivals, self._new_arrivals = self._new_arrivals, []
        if not arrivals or not self._uses_shared_prefixes:
            return
        new_entries = [entry for entry in arrivals[:_WAITING_SCAN_MAX] if entry.request_id in self._entry_by_id]
        for entry in self._running_entries:
            if len(entry.seq.token_ids) - entry.seq.computed_tokens > 1:
                self._waiting_queue.discount_shared_prefix(entry.seq, new_entries)

    @property
    def _uses_shared_prefixes(self) -> bool:
        """Whether it matters what prompts have in common."""
        return self._waiting_queue.is_shortest_first or self.cache.has_states

    def _plan_chunks(self) -> dict[RequestEntry, Chunk]:
        """Chunks of the next step: of decodes, then of prefills in their order. Raises _MustDrain."""
        draft = _PlanDraft()
        started_prefills = self._plan_decodes(draft)
        decode_count = len(draft.chunks)
        draft.token_budget = budget = self.config.max_num_batched_tokens - decode_count
        if self.config.target_prefill_tokens is not None:
            draft.admission_min_tokens = max(1, budget - self.config.target_prefill_tokens + 1)
        self.cache.plan_loads(has_decodes=bool(draft.chunks))
        for entry in self._waiting_queue.sort_started(entry for entry in started_prefills if entry.seq in self.cache):
            if self._waiting_queue.is_shortest_first:
                self._admit_waiting(draft, entry)
            if draft.token_budget >= (draft.admission_min_tokens if self._waiting_queue.is_shortest_first else 1):
                self._continue_prefill(entry, draft)
        draft.skipped_count = 0  # what they waited for may be in this step
        self._admit_waiting(draft)
        self._register_blocks(draft)
        prefill_tokens = max(0, budget - draft.token_budget)
        is_batch_full = bool(self._waiting_queue) and len(self._running_entries) >= self.config.max_num_seqs
        self._waiting_queue.add_work(
            max(prefill_tokens, self._prefill_budget(decode_count)) if is_batch_full else prefill_tokens
        )
        return draft.chunks

    def _prefill_budget(self, decode_count: int) -> int:
        """Tokens of prompts that a step beside so many decodes is meant to compute at most."""
        token_budget = self.config.max_num_batched_tokens - decode_count
        target_tokens = self.config.target_prefill_tokens
        return token_budget if target_tokens is None else min(token_budget, target_tokens)

    def _plan_decodes(self, draft: _PlanDraft) -> list[RequestEntry]:
        """Chunks for those who decode. Who does not, yet."""
        block_size, chunks = self.cache.block_size, draft.chunks
        prefills: list[RequestEntry] = []
        for entry in list(self._running_entries):
            seq = entry.seq
            start, token_count = seq.computed_tokens, len(seq.token_ids)
            if start < entry.next_check_position:
                chunks[entry] = Chunk(seq, start, start + 1, True, start == token_count)
            elif entry.has_ended or start == token_count == entry.length_max - 1:
                pass  # nothing is left to do but to apply what is out
            elif token_count - start > 1 or self.cache.is_loading(seq):
                prefills.append(entry)
            elif self._grow_or_preempt(entry, start + 1, draft):
                chunks[entry] = Chunk(seq, start, start + 1, True, start == token_count)
                entry.set_next_check(start, block_size)
                draft.unregistered_entries.append(entry)
        return prefills

    def _continue_prefill(self, entry: RequestEntry, draft: _PlanDraft) -> None:
        """A chunk for a prompt that was begun."""
        seq = entry.seq
        if seq not in self.cache or self.cache.is_loading(seq):  # preempted meanwhile, or waits
            return
        end = self.cache.clip_chunk_end(seq, min(len(seq.token_ids), seq.computed_tokens + draft.token_budget))
        if self._grow_or_preempt(entry, end, draft):
            draft.chunks[entry] = Chunk(seq, seq.computed_tokens, end, end == len(seq.token_ids))
            draft.token_budget -= end - seq.computed_tokens
            draft.unregistered_entries.append(entry)

    def _register_blocks(self, draft: _PlanDraft) -> None:
        """Name the blocks that its chunks finish: who is admitted from now on shares them."""
        for entry in draft.unregistered_entries:
            if entry in draft.chunks:  # not preempted meanwhile
                self.cache.register_full_blocks(entry.seq, draft.chunks[entry].end)
        draft.unregistered_entries.clear()

    def _grow_or_preempt(self, entry: RequestEntry, end: int, draft: _PlanDraft) -> bool:
        """Find memory for `entry` up to `end`, preempting from the end of the order; False if it went itself, or would
        have to be preempted for one who was just admitted. Raises _MustDrain.
        """
        while True:
            if entry.seq not in self.cache:
                return False
            if self.cache.grow(entry.seq, end):
                return True
            if draft.has_admitted:
                return False
            if self._plans_in_flight:
                raise _MustDrain
            victim = self._running_entries[-1]
            if (chunk := draft.chunks.pop(victim, None)) is not None:
                draft.token_budget += chunk.end - chunk.start
            draft.is_admission_closed = True
            self._preempt(victim)
            if victim is entry:
                return False

    def _preempt(self, entry: RequestEntry) -> None:
        self._decode_batch = None
        self._running_entries.remove(entry)
        self.cache.release(entry.seq)
        entry.seq.preemptions += 1
        entry.next_check_position = 0
        entry.prompt_logprobs.clear()
        self.totals.preemptions += 1
        self._waiting_queue.add(entry)

    def _find_loading_entries(self, chunks_by_entry: dict[RequestEntry, Chunk]) -> list[RequestEntry]:
        """Whom the plan brings blocks back for, of those that it computes nothing of."""
        seqs = self.cache.list_loading_sequences()
        return [entry for entry in self._running_entries if entry.seq in seqs and entry not in chunks_by_entry]

    def _undo_unexecuted_step(self, entry: RequestEntry, start: int) -> None:
        """Of a step from `start` that was planned and never computed: as if it had not been, if it was the first."""
        seq = entry.seq
        is_first_admission = not seq.preemptions and start == seq.cached_tokens
        self._preempt(entry)
        if is_first_admission:
            self.totals.preemptions -= 1
            seq.preemptions = 0
            self._add_prompt_totals(seq, -1)

    def _add_prompt_totals(self, seq: Sequence, sign: int) -> None:
        self.totals.prefix_queried_tokens += sign * seq.prompt_len
        self.totals.prefix_hit_tokens += sign * seq.cached_tokens
        self.totals.host_hit_tokens += sign * seq.host_tokens
        self.totals.prompt_tokens += sign * seq.prompt_len

    def _admit_waiting(self, draft: _PlanDraft, started_entry: RequestEntry | None = None) -> None:
        """Start waiting requests, in order, while budget, seats and memory last; only those
        whose turn is before that of `started_entry`.

        Passed over, for now, is only who would compute what a running sequence is about to compute anyway.
        """
        waiting_queue = self._waiting_queue
        while (
            draft.skipped_count < min(len(waiting_queue), _WAITING_SCAN_MAX)
            and not draft.is_admission_closed
            and draft.token_budget >= draft.admission_min_tokens
            and len(self._running_entries) < self.config.max_num_seqs
        ):
            if started_entry is None:  # nobody is preempted any more
                self._register_blocks(draft)
            entry = waiting_queue[draft.skipped_count]
            seq = entry.seq
            if started_entry is not None and entry.sort_key >= started_entry.sort_key:
                return
            # Something is left for the running ones to grow into, else the newcomer would be preempted at once.
            reserve_blocks = self._growth_reserve_blocks if self._running_entries else 0
            if not self.cache.has_room_for_blocks(reserve_blocks + 1):
                draft.is_admission_closed = True
            elif self.cache.should_wait(seq):
                draft.skipped_count += 1
            elif draft.requeued_count < _WAITING_SCAN_MAX and waiting_queue.requeue_if_longer(entry):
                draft.requeued_count += 1
            elif self.cache.admit(seq, reserve_blocks):
                draft.has_admitted = True
                self._start_prefill(entry, draft)
            else:
                draft.is_admission_closed = True

    def _start_prefill(self, entry: RequestEntry, draft: _PlanDraft) -> None:
        """The first chunk of a request that was just admitted."""
        seq, waiting = entry.seq, self._waiting_queue
        waiting.remove(entry)
        if self._uses_shared_prefixes:
            waiting.discount_shared_prefix(seq, waiting.first_entries(_WAITING_SCAN_MAX))
        insort(self._running_entries, entry)
        if not seq.preemptions:
            seq.cached_tokens = seq.computed_tokens
            self._add_prompt_totals(seq, 1)
        if self.cache.is_loading(seq):
            return
        end = self.cache.clip_chunk_end(seq, min(len(seq.token_ids), seq.computed_tokens + draft.token_budget))
        has_memory = self.cache.grow(seq, end)
        assert has_memory, "admitted without room for its tokens"
        assert all(len(table) >= -(-end // self.cache.block_size) for table in seq.block_tables)
        draft.chunks[entry] = Chunk(seq, seq.computed_tokens, end, end == len(seq.token_ids))
        draft.unregistered_entries.append(entry)
        draft.token_budget -= end - seq.computed_tokens

    # ------------------------------------------------------------------ applying

    def _add_prompt_results(self, entry: RequestEntry, output: SequenceOutput) -> None:
        """Put the facts about the prompt into a request's first output."""
        entry.has_reported_prompt = True
        output.cached_tokens = entry.seq.cached_tokens
        if entry.seq.request.params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *entry.prompt_logprobs]

    def _fail_request(self, entry: RequestEntry, message: str) -> SequenceOutput:
        """End a request whose answer cannot go on, for what it asked for itself."""
        self._end_request(entry)
        output = self._make_error_output(entry, message)
        output.is_client_error = True
        return output

    def _make_error_output(self, entry: RequestEntry, message: str) -> SequenceOutput:
        """Forget it; its last output."""
        del self._entry_by_id[entry.request_id]
        return SequenceOutput(
            request_id=entry.request_id, token_ids=[], finish_reason=FinishReason.ERROR, error=message
        )

    def _finish_if_complete(self, entry: RequestEntry, token_id: int, output: SequenceOutput) -> None:
        """End a request if its last token does so: a token to stop at comes before the length."""
        params = entry.seq.request.params
        if token_id in entry.stop_token_ids and entry.seq.output_len >= params.min_tokens:
            output.finish_reason = FinishReason.STOP
            if params.ignore_eos or token_id not in self.config.eos_token_ids:
                output.stop_token_id = token_id
        elif len(entry.seq.token_ids) >= entry.length_max:
            output.finish_reason = FinishReason.LENGTH
        else:
            return
        self._end_request(entry)
        del self._entry_by_id[entry.request_id]
        self.totals.finished_requests += 1

    def _end_request(self, entry: RequestEntry) -> None:
        """Take a request out, once no plan with it is out."""
        if entry.last_plan_number > self._applied_plan_count:
            entry.has_ended, entry.next_check_position = True, 0
            self._ended_sequences.add(entry.seq)
            self.cache.cancel_loads(entry.seq)
        else:
            self._remove(entry)

    def _remove(self, entry: RequestEntry) -> None:
        """Take a request out of the queue it is in and give its blocks back."""
        self._ended_sequences.discard(entry.seq)
        if entry.seq in self.cache:
            self._running_entries.remove(entry)
            self.cache.release(entry.seq)
        else:
            self._waiting_queue.remove(entry)
        self.cache.discard_keys(entry.seq)

    # ------------------------------------------------------------------ proof

    def check_invariants(self) -> None:
        self.cache.check_invariants()
        self._waiting_queue.check_invariants()
        assert self._running_entries == sorted(self._running_entries)
        assert len(self._running_entries) <= self.config.max_num_seqs
        assert len(self._running_entries) + len(self._waiting_queue) == len(self._entry_by_id) + len(
            self._ended_sequences
        )
        for entry in self._running_entries:
            assert entry.seq in self.cache
            assert (entry.seq in self._ended_sequences) == entry.has_ended
            plans_with_entry = sum(
                entry in (*entries, *loading_entries) for _, entries, loading_entries, _ in self._plans_in_flight
            )
            assert (entry.last_plan_number > self._applied_plan_count) == (plans_with_entry > 0)
            assert 0 <= entry.seq.computed_tokens < len(entry.seq.token_ids) + plans_with_entry + entry.has_ended
            assert entry.next_check_position < len(entry.seq.block_tables[0]) * self.cache.block_size
