"""The requests that wait, that run, or that have ended while a step with them is in flight.

A request that ends while a step with it is in flight keeps its blocks, which other requests of the step may share,
until the last of these steps is applied.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

import msgspec

from engine.cache.kv_cache import KVCache
from engine.prefill_queue import PrefillOrder, PrefillQueue
from engine.request_entry import RequestEntry
from engine.step_draft import StepInFlight
from engine.types import Sequence, SequenceOutput, StepResult

NAN_MESSAGE = (
    "the model computed logits that are not numbers (NaN) for this request; if its numbers are too large for float16, "
    "--dtype bfloat16 or float32 helps"
)


class SchedulerTotals(msgspec.Struct):
    """Totals of the scheduler's work since the engine started, for its metrics."""

    preemptions: int = 0
    prompt_tokens: int = 0
    """Tokens of all prompts that were admitted."""
    prefix_hit_tokens: int = 0
    """Tokens that were found in the prefix cache, and not computed: of prompts, and of answers to resume."""
    host_hit_tokens: int = 0
    """Tokens of `prefix_hit_tokens` that came from host memory."""
    finished_requests: int = 0

    def add_prompt(self, seq: Sequence) -> None:
        """Count the prompt of a request that starts to run for the first time."""
        self.prefix_hit_tokens += seq.cached_tokens
        self.host_hit_tokens += seq.host_tokens
        self.prompt_tokens += seq.prompt_len


class ActiveRequests:
    """Moves requests between the waiting queue and the running ones, which hold blocks of the cache, to their end."""

    def __init__(self, cache: KVCache, prefill_order: PrefillOrder) -> None:
        """Start without requests. Running ones hold blocks of `cache`."""
        self._cache = cache
        self.totals = SchedulerTotals()
        self.waiting = PrefillQueue(prefill_order, cache)
        self.running: list[RequestEntry] = []
        """Ordered by (priority, arrival)."""
        self.steps_in_flight: deque[StepInFlight] = deque()
        """Steps that are being computed: planned, and their results not yet applied; oldest first."""
        self.entry_by_id: dict[str, RequestEntry] = {}
        """Request id -> request, of all that have not ended."""

    def add(self, entry: RequestEntry) -> None:
        """Queue a request that has just arrived."""
        self.entry_by_id[entry.request_id] = entry
        self.waiting.add_arrival(entry)

    def start(self, entry: RequestEntry, now: float) -> None:
        """Move a request from the waiting queue to `running`, after the cache has admitted it."""
        self.waiting.remove(entry)
        insort(self.running, entry)
        if not entry.seq.preemptions:
            entry.seq.cached_tokens = entry.seq.computed_tokens
            entry.seq.start_s = now
            self.totals.add_prompt(entry.seq)

    def preempt(self, entry: RequestEntry) -> None:
        """Move a running request back to the waiting queue. It gives up its blocks, most of which stay cached."""
        self.running.remove(entry)
        self._cache.release(entry.seq)
        entry.seq.preemptions += 1
        entry.prompt_logprobs.clear()
        self.totals.preemptions += 1
        self.waiting.add(entry)

    def end(self, entry: RequestEntry) -> None:
        """End a request. If steps with it are in flight, it keeps its blocks until the last of them is applied."""
        del self.entry_by_id[entry.request_id]
        entry.has_ended = True
        self._remove_after_steps(entry)

    def end_with_error(self, entry: RequestEntry, message: str, *, is_client_error: bool = False) -> SequenceOutput:
        """End a request, and return its last output, an error."""
        self.end(entry)
        return SequenceOutput.from_error(entry.request_id, message, is_client_error=is_client_error)

    def _remove_after_steps(self, entry: RequestEntry) -> None:
        """Remove a request that has ended, unless steps with it are in flight."""
        if not any(entry in step.entries for step in self.steps_in_flight):
            self.remove(entry)

    def remove(self, entry: RequestEntry) -> None:
        """Remove a request from `running` or from the waiting queue, and release its blocks."""
        if entry.seq in self._cache:
            self.running.remove(entry)
            self._cache.release(entry.seq)
        else:
            self.waiting.remove(entry)
        self._cache.forget_match(entry.seq)

    def append_tokens(self, step: StepInFlight, result: StepResult) -> list[SequenceOutput]:
        """Append the tokens that a forward step sampled to their requests, and end the requests that are finished.

        The step computed one chunk of tokens for each of its requests. Returns the outputs for clients, a token or an
        error, of the requests that were to sample a token: a prompt samples only at its end.
        """
        outputs: list[SequenceOutput] = []
        for index, (entry, chunk, token_id) in enumerate(zip(step.entries, step.plan.chunks, result.sampled_tokens)):
            if entry.has_ended:  # while the step was in flight
                self._remove_after_steps(entry)
                continue
            if not entry.has_reported_prompt and entry.seq.request.params.prompt_logprobs is not None:
                entry.prompt_logprobs += result.prompt_logprobs_by_chunk.get(index, ())
            if not chunk.should_sample:
                continue
            has_nan = index in result.nan_chunks
            failure = NAN_MESSAGE if has_nan else result.failure_by_chunk.get(index)
            if failure is not None:
                outputs.append(self.end_with_error(entry, failure, is_client_error=not has_nan))
                continue
            assert token_id is not None, f"chunk {index} samples, but the result holds no token for it"
            output = self._append_token(entry, token_id)
            if index in result.logprobs_by_chunk:
                output.logprobs = [result.logprobs_by_chunk[index]]
            outputs.append(output)
        return outputs

    def _append_token(self, entry: RequestEntry, token_id: int) -> SequenceOutput:
        """Append a sampled token to a request, and end the request if the token finishes it."""
        token_ids = entry.seq.token_ids
        token_ids.append(token_id)
        output = SequenceOutput(request_id=entry.request_id, token_ids=[token_id])
        if not entry.has_reported_prompt:
            entry.add_prompt_results(output)
        may_end = len(token_ids) >= entry.length_max or token_id in entry.stop_token_ids
        if may_end and entry.set_finish_reason(token_id, output):
            self.end(entry)
            self.totals.finished_requests += 1
        return output

    def check_invariants(self) -> None:
        assert self.running == sorted(self.running)
        ended_count = sum(entry.has_ended for entry in self.running)
        assert len(self.running) + len(self.waiting) == len(self.entry_by_id) + ended_count
        self.waiting.check_invariants()
        for entry in self.running:
            assert entry.seq in self._cache
            steps_with_entry = sum(entry in step.entries for step in self.steps_in_flight)
            assert 0 <= entry.seq.computed_tokens < len(entry.seq.token_ids) + steps_with_entry + entry.has_ended
