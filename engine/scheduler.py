"""Plans each step: which sequences compute which positions.

Continuous batching: every step mixes decodes and chunks of prefills under a token budget. Decodes go first (one token
each), then prefills, started ones and waiting requests, in the order of `engine.prefill_queue`. When memory runs out,
the running sequence that is last by (priority, arrival) is preempted: its blocks are released (most stay cached) and it
is recomputed later.

No request starves. `max_num_batched_tokens >= max_num_seqs`, so every sequence that decodes advances in every step.
Every waiting request becomes the first of the queue at some time. From then on it is skipped only while a running
sequence is about to compute a prefix of its prompt. The first sequence by (priority, arrival) is never preempted. A
preempted request is admitted again only when all its tokens fit.
"""

from __future__ import annotations

from itertools import islice

from engine.active_requests import ActiveRequests, SchedulerTotals
from engine.cache.kv_cache import KVCache
from engine.request_entry import RequestEntry
from engine.step_draft import SchedulerConfig, StepDraft, StepInFlight
from engine.types import Chunk, FinishReason, Request, Sequence, SequenceOutput, StepPlan, StepResult

__all__ = ["RequestRefusedError", "Scheduler", "SchedulerConfig"]

_WAITING_SCAN_MAX = 32
"""Most waiting requests that a step skips, requeues, or compares with a running sequence for a common prefix."""


class RequestRefusedError(ValueError):
    """A request that is not served here; the message says why."""


class _MustDrain(Exception):
    """The step being planned would preempt a sequence, so the step in flight must be applied first."""


class Scheduler:
    """Plans steps and applies their results. Pure: no sockets, no clock, no tensors.

    Plans are applied (or failed) in their order. Steps may overlap: a plan may be made while another step is in flight.
    Such a plan assumes that no stop token ends a sequence in the step in flight. If one does, the next token is
    computed in vain: it is not output, and no block with it is cached. No sequence is preempted while a step is in
    flight.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCache) -> None:
        """Start without requests. `cache`: empty KV cache, which the scheduler owns from now on."""
        self.config = config
        self.cache = cache
        self.token_limit = min(config.max_model_len, cache.token_capacity)
        """Tokens of the longest sequence, prompt and output together, that the model and the cache can hold."""
        self._requests = ActiveRequests(cache, config.prefill_order)
        self._waiting_queue = self._requests.waiting
        self._steps_in_flight = self._requests.steps_in_flight
        self._uses_shared_prefixes = self._waiting_queue.is_shortest_first or cache.has_states
        """Whether to compare prompts for common prefixes: for the order of requests, or to save recurrent states."""
        self._arrival_count = 0
        self._new_arrivals: list[RequestEntry] = []
        """Requests that came since the last step was planned."""

    @property
    def totals(self) -> SchedulerTotals:
        return self._requests.totals

    @property
    def running_count(self) -> int:
        return len(self._requests.running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting_queue)

    @property
    def has_requests(self) -> bool:
        """Whether any request waits or runs. The steps in flight may have requests that ended meanwhile."""
        return bool(self._requests.entry_by_id)

    @property
    def has_work(self) -> bool:
        return self.has_requests or bool(self._steps_in_flight)

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Raises RequestRefusedError if it can never fit, or if another one has its id."""
        if request.request_id in self._requests.entry_by_id:
            raise RequestRefusedError(f"request_id: {request.request_id!r} is already being served")
        _check_prompt_length(request, self.config.max_model_len, self.token_limit)
        entry = RequestEntry.from_request(
            request, now, self._arrival_count, self.config.eos_token_ids, self.token_limit
        )
        self._arrival_count += 1
        self._new_arrivals.append(entry)
        self._requests.add(entry)

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request at any time, and return its last output; None if there is no such request (any more).

        A waiting request leaves nothing behind, except that a running one with the same prefix still saves the state
        that was planned for it. A running request releases its blocks: full ones stay cached for other prompts, and the
        memory of the others is free. If a step with the request is in flight, its blocks are released only when the
        step is applied, because other requests of the step may share them. The step's full blocks are announced and
        cached, too, but the request is in no further step and gets no further output.
        """
        entry = self._requests.entry_by_id.get(request_id)
        if entry is None:
            return None
        self._requests.end(entry)
        return SequenceOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, a forward pass: decodes first, then prompts, begun ones and those of waiting requests.

        If memory runs out, running sequences are preempted, but never to admit a waiting request. Returns None if that
        would happen while another step is being computed: the caller applies that step's result, and plans again.
        """
        assert len(self._steps_in_flight) < 2, "schedule() with two steps in flight"
        self._share_prefixes_with_arrivals()
        draft = StepDraft(now, self.config.max_num_batched_tokens)
        try:
            prefills = self._plan_decodes(draft)
            self._plan_prefills(prefills, draft)
        except _MustDrain:
            return None
        self._admit_waiting(draft)
        self._register_blocks(draft)
        self._count_prefill_work(draft)
        return self._finish_draft(draft)

    def _share_prefixes_with_arrivals(self) -> None:
        """Compare new requests with prompts that are being computed, because a common prefix is computed only once.

        New requests with such a prefix have fewer tokens to compute, so they move forward in the queue. In a model with
        recurrent states, the running sequence must also save its state at the end of the common prefix.
        """
        arrivals, self._new_arrivals = self._new_arrivals, []
        if not arrivals or not self._uses_shared_prefixes:
            return
        new_entries = [entry for entry in arrivals[:_WAITING_SCAN_MAX] if not entry.has_ended]
        for entry in self._requests.running:
            is_prefill = len(entry.seq.token_ids) - entry.seq.computed_tokens > 1
            if is_prefill:
                self._waiting_queue.discount_shared_prefix(entry.seq, new_entries)

    def _plan_decodes(self, draft: StepDraft) -> list[RequestEntry]:
        """Add one token of each sequence that decodes to the step. Returns the requests with prompt left to compute.

        A request that has ended, or that reaches its greatest length with the step in flight, gets no token.
        """
        prefills: list[RequestEntry] = []
        for entry in list(self._requests.running):
            seq = entry.seq
            start, token_count = seq.computed_tokens, len(seq.token_ids)
            is_last_token_in_flight = start == token_count  # the step in flight samples it
            ends_with_step_in_flight = is_last_token_in_flight and token_count == entry.length_max - 1
            if entry.has_ended or ends_with_step_in_flight:
                continue
            if token_count - start > 1:
                prefills.append(entry)
            elif self._grow_or_preempt(entry, start + 1, draft):
                chunk = Chunk(seq, start, start + 1, should_sample=True, token_on_device=is_last_token_in_flight)
                draft.add(entry, chunk)
        draft.end_decodes(self.config)
        return prefills

    def _grow_or_preempt(self, entry: RequestEntry, end: int, draft: StepDraft) -> bool:
        """Give a running request KV cache blocks for its tokens before `end`; return False if there is no memory.

        Without free memory, running requests are preempted, the last one first, until there is enough: a preempted
        request releases its blocks and waits again. That may happen to `entry` itself. No request is preempted once the
        step has admitted one. Raises _MustDrain if a step is being computed, because its requests need their blocks.
        """
        while entry.seq in self.cache:  # until `entry` itself is preempted
            if self.cache.grow(entry.seq, end):
                return True
            if draft.has_admitted:
                return False
            if self._steps_in_flight:
                raise _MustDrain
            last_entry = self._requests.running[-1]
            draft.drop(last_entry)
            draft.is_admission_closed = True
            self._requests.preempt(last_entry)
        return False

    def _plan_prefills(self, prefills: list[RequestEntry], draft: StepDraft) -> None:
        """Add chunks of prompts that were begun (`prefills`).

        If the shortest prompt goes first, shorter waiting requests are admitted before each of these.
        """
        is_shortest_first = self._waiting_queue.is_shortest_first
        min_tokens = draft.admission_min_tokens if is_shortest_first else 1
        for entry in self._waiting_queue.sort_started(entry for entry in prefills if entry.seq in self.cache):
            if is_shortest_first:
                self._admit_waiting(draft, entry)
            if draft.prefill_budget >= min_tokens and entry.seq in self.cache:
                chunk = self._make_chunk(entry.seq, draft)
                if self._grow_or_preempt(entry, chunk.end, draft):
                    draft.add(entry, chunk)
        draft.skipped_count = 0  # this step may compute the prefixes for which requests were skipped

    def _make_chunk(self, seq: Sequence, draft: StepDraft) -> Chunk:
        """Return the next chunk of a prompt, of which the step's budget and planned checkpoints bound the end."""
        start, token_count = seq.computed_tokens, len(seq.token_ids)
        end = self.cache.clip_chunk_end(seq, min(token_count, start + draft.prefill_budget))
        return Chunk(seq, start, end, should_sample=end == token_count)

    def _admit_waiting(self, draft: StepDraft, started_entry: RequestEntry | None = None) -> None:
        """Start waiting requests in the order of the queue, as far as the step's limits and memory allow.

        `started_entry`: request with a partly computed prompt, which no request that goes behind it in the order may
        overtake. None: all other chunks of the step are planned.
        """
        while self._may_admit(draft):
            if started_entry is None:
                self._register_blocks(draft)  # no chunk is dropped any more, so the next request can share all blocks
            entry = self._waiting_queue[draft.skipped_count]
            if started_entry is not None and entry.sort_key >= started_entry.sort_key:
                return
            self._admit_or_skip(entry, draft)

    def _may_admit(self, draft: StepDraft) -> bool:
        """Return whether the step may start another request, and the queue has one that was not skipped."""
        return (
            draft.skipped_count < min(len(self._waiting_queue), _WAITING_SCAN_MAX)
            and not draft.is_admission_closed
            and draft.prefill_budget >= draft.admission_min_tokens
            and len(self._requests.running) < self.config.max_num_seqs
        )

    def _admit_or_skip(self, entry: RequestEntry, draft: StepDraft) -> None:
        """Start a waiting request if it can run now.

        The request is skipped in this step if a running sequence is about to compute a prefix of its prompt. It moves
        back in the queue if cached blocks of its prompt were evicted meanwhile. If there is no memory for it, the step
        admits no other request either.
        """
        # Leave running requests some memory to grow into, else the new request would soon be preempted.
        reserve_blocks = self.cache.growth_reserve_blocks if self._requests.running else 0
        if not self.cache.has_room_for_blocks(reserve_blocks + 1):
            draft.is_admission_closed = True
        elif self.cache.should_wait(entry.seq):
            draft.skipped_count += 1
        elif draft.requeued_count < _WAITING_SCAN_MAX and self._waiting_queue.requeue_if_longer(entry):
            draft.requeued_count += 1
        elif self.cache.admit(entry.seq, reserve_blocks):
            self._start_prefill(entry, draft)
        else:
            draft.is_admission_closed = True

    def _start_prefill(self, entry: RequestEntry, draft: StepDraft) -> None:
        """Add the first chunk of a request that was just admitted."""
        draft.has_admitted = True
        self._requests.start(entry, draft.planned_s)
        seq = entry.seq
        if self._uses_shared_prefixes:
            self._waiting_queue.discount_shared_prefix(seq, list(islice(self._waiting_queue, _WAITING_SCAN_MAX)))
        chunk = self._make_chunk(seq, draft)
        has_memory = self.cache.grow(seq, chunk.end)
        assert has_memory, "admitted without room for its tokens"
        draft.add(entry, chunk)

    def _register_blocks(self, draft: StepDraft) -> None:
        """Put the blocks that planned chunks fill into the prefix tree: requests admitted from now on share them."""
        for chunk in islice(draft.chunk_by_entry.values(), draft.registered_count, None):
            self.cache.register_full_blocks(chunk.seq, chunk.end)
        draft.registered_count = len(draft.chunk_by_entry)

    def _count_prefill_work(self, draft: StepDraft) -> None:
        """Report the step's prompt tokens to the queue, by which waiting requests age.

        If requests wait only because `max_num_seqs` are running, the tokens of a full step are counted.
        """
        config = self.config
        prompt_tokens_max = config.max_num_batched_tokens - draft.decode_count
        work_tokens = max(0, prompt_tokens_max - draft.prefill_budget)
        if self._waiting_queue and len(self._requests.running) >= config.max_num_seqs:
            work_tokens = max(work_tokens, min(prompt_tokens_max, config.target_prefill_tokens or prompt_tokens_max))
        self._waiting_queue.add_work(work_tokens)

    def _finish_draft(self, draft: StepDraft) -> StepPlan:
        """Make the plan of the draft. If the plan has chunks, its step is in flight from now on."""
        if not draft.chunk_by_entry:
            assert self._requests.running or not self._waiting_queue, "requests wait, and nothing runs"
            return StepPlan(chunks=[])
        plan = StepPlan(list(draft.chunk_by_entry.values()))
        self.cache.fill_plan(plan)
        self._steps_in_flight.append(StepInFlight(plan, list(draft.chunk_by_entry)))
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Apply the result of the oldest step: commit its blocks, append its tokens, and end finished requests."""
        step = self._steps_in_flight.popleft()
        assert plan is step.plan
        assert len(result.sampled_tokens) == len(plan.chunks)
        self.cache.commit(plan.chunks, [entry.seq for entry in step.entries if entry.has_ended])
        return self._requests.append_tokens(step, result)

    def fail(self, plan: StepPlan, message: str) -> list[SequenceOutput]:
        """End the requests of the oldest step, which was not computed, with an error. None of its blocks is announced.

        A later step in flight was not computed either, but is not to blame: all other running requests wait again.
        """
        failed_step = self._steps_in_flight[0]
        assert plan is failed_step.plan
        live_entries = [entry for entry in failed_step.entries if not entry.has_ended]
        outputs = [self._requests.end_with_error(entry, message) for entry in live_entries]
        self._steps_in_flight.clear()
        self.restart_running()
        return outputs

    def restart_running(self) -> None:
        """Empty the cache after a failure that may have left copies of blocks unmade. All running requests wait again.

        No step may be in flight. Requests that have ended give up their blocks.
        """
        assert not self._steps_in_flight
        self.cache.reset_after_failure()
        for entry in self._requests.running[::-1]:
            if entry.has_ended:
                self._requests.remove(entry)
            else:
                self._requests.preempt(entry)

    def check_invariants(self) -> None:
        self.cache.check_invariants()
        self._requests.check_invariants()
        assert len(self._requests.running) <= self.config.max_num_seqs


def _check_prompt_length(request: Request, max_model_len: int, token_limit: int) -> None:
    """Raise RequestRefusedError for a prompt that is empty, or leaves no room for an answer.

    `token_limit`: the longest sequence, in tokens, that model and cache can hold.
    """
    prompt_tokens = len(request.token_ids)
    if not prompt_tokens:
        raise RequestRefusedError("prompt: expected at least one token, got none")
    if prompt_tokens >= max_model_len:
        raise RequestRefusedError(
            f"prompt: {prompt_tokens} tokens leave no room to generate: the model's maximum context length is "
            f"{max_model_len} tokens (prompt and output together)"
        )
    if prompt_tokens >= token_limit:
        raise RequestRefusedError(
            f"prompt: {prompt_tokens} tokens can never fit: the KV cache holds {token_limit} tokens of one "
            "sequence (prompt and output together)"
        )
