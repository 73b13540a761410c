"""A step while it is planned, and one that is out."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engine.active_requests import ActiveRequests
from engine.decode_batch import DecodeBatch
from engine.request_entry import RequestEntry
from engine.types import Chunk, SequenceOutput, StepPlan, StepResult


@dataclass(slots=True)
class StepDraft:
    """A step that is being planned: decodes first, then prefills, as long as its budget lasts."""

    chunk_by_entry: dict[RequestEntry, Chunk] = field(default_factory=dict)
    decode_batch: DecodeBatch | None = None
    """All running requests decode again, and nothing else happens: in place of `chunk_by_entry`."""
    unregistered_entries: list[RequestEntry] = field(default_factory=list)
    """Requests whose blocks have no names yet: up to then they can be preempted."""
    decode_count: int = 0
    token_budget: int = 0
    """Prompt tokens that may be added."""
    admission_min_tokens: int = 1
    """Prompt tokens of the budget that must be left for another request to be taken in."""
    skipped_count: int = 0
    """Waiting requests that were passed over."""
    requeued_count: int = 0
    """Waiting requests that went back to their place."""
    has_admitted: bool = False
    """A request was admitted: no sequence is preempted any more."""
    is_admission_closed: bool = False
    """No request is admitted any more."""

    @property
    def chunk_count(self) -> int:
        return len(self.chunk_by_entry if self.decode_batch is None else self.decode_batch.entries)

    def add(self, entry: RequestEntry, chunk: Chunk) -> None:
        """Add a chunk of a prompt."""
        self.chunk_by_entry[entry] = chunk
        self.token_budget -= chunk.end - chunk.start
        self.unregistered_entries.append(entry)

    def drop(self, entry: RequestEntry) -> None:
        """Take the chunk of a request that is preempted out, if it has one."""
        chunk = self.chunk_by_entry.pop(entry, None)
        if chunk is not None:
            self.token_budget += chunk.end - chunk.start

    def make_chunks(self, *, token_on_device: bool) -> tuple[list[RequestEntry], Items[Chunk]]:
        """Return the requests of the step, and the chunk of each. `token_on_device`: as in Chunk, for a batch."""
        if self.decode_batch is not None:
            return self.decode_batch.entries, self.decode_batch.make_chunks(token_on_device=token_on_device)
        return list(self.chunk_by_entry), list(self.chunk_by_entry.values())


@dataclass(slots=True)
class StepInFlight:
    """A step whose plan is out, and whose result is not applied yet."""

    plan: StepPlan
    entries: list[RequestEntry]
    """Requests of the plan's chunks, in the same order."""
    loading_entries: list[RequestEntry]
    """Requests that it computes nothing of, and copies blocks from host memory for."""
    decode_batch: DecodeBatch | None
    """Where they decode together."""

    def append_tokens(
        self, result: StepResult, requests: ActiveRequests, eos_token_ids: frozenset[int]
    ) -> list[SequenceOutput]:
        """Append the token of each chunk that samples one, and end the requests that it finishes. Returns outputs."""
        outputs: list[SequenceOutput] = []
        failure_by_chunk, all_logprobs, index = result.failure_by_chunk, result.logprobs_by_chunk, -1
        for entry, chunk, token_id in zip(self.entries, self.plan.chunks, result.sampled_tokens):  # the hot loop
            index += 1
            if entry.has_ended:
                requests.end(entry)
                continue
            if not entry.has_reported_prompt and entry.seq.request.params.prompt_logprobs is not None:
                entry.prompt_logprobs += result.prompt_logprobs_by_chunk.get(index, ())
            if not chunk.should_sample:
                continue
            if failure_by_chunk and (failure_message := failure_by_chunk.get(index)) is not None:
                requests.end(entry)
                outputs.append(requests.make_error_output(entry, failure_message))
                outputs[-1].is_client_error = True
                continue
            assert token_id is not None, f"chunk {index} samples, but the result holds no token for it"
            token_ids = entry.seq.token_ids
            token_ids.append(token_id)
            output = SequenceOutput(request_id=entry.request_id, token_ids=[token_id])
            if not entry.has_reported_prompt:
                entry.add_prompt_results(output)
            may_end = len(token_ids) >= entry.length_max or token_id in entry.stop_token_ids
            if may_end and entry.set_finish_reason(token_id, output, eos_token_ids):
                requests.end(entry)
                requests.take(entry.request_id)
                requests.totals.finished_requests += 1
            outputs.append(output)
            if all_logprobs and (logprobs := all_logprobs.get(index)) is not None:
                output.logprobs = [logprobs]
        return outputs


def find_unexecuted_starts(steps: list[StepInFlight]) -> dict[RequestEntry, int]:
    """Return where each request stood that a later step than the first computes, or that one only loads for."""
    start_by_entry = {entry: chunk.start for step in steps[1:] for entry, chunk in zip(step.entries, step.plan.chunks)}
    for step in steps:
        for entry in step.loading_entries:
            start_by_entry.setdefault(entry, entry.seq.computed_tokens)
    return start_by_entry
