"""A step while it is planned, and a step in flight: planned, and not yet applied."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request_entry import RequestEntry
from engine.scheduler_limits import SchedulerConfig
from engine.types import Chunk, StepPlan


@dataclass(slots=True)
class StepDraft:
    """A step that is being planned. Decodes are added first, then prefills, as long as the token budget lasts."""

    chunk_by_entry: dict[RequestEntry, Chunk] = field(default_factory=dict)
    unregistered_entries: list[RequestEntry] = field(default_factory=list)
    """Requests that finish blocks without a name so far. Such a request can still be preempted."""
    decode_count: int = 0
    token_budget: int = 0
    """Prompt tokens that may be added."""
    admission_min_tokens: int = 1
    """Prompt tokens of the budget that must be left to admit another request."""
    skipped_count: int = 0
    """Waiting requests that wait for a prefix which a running sequence computes."""
    requeued_count: int = 0
    """Waiting requests that were given a later place in the queue."""
    has_admitted: bool = False
    """Whether a request was admitted: then no sequence is preempted any more."""
    is_admission_closed: bool = False
    """Whether no further request may be admitted."""

    def set_budget(self, config: SchedulerConfig) -> None:
        """Give what the decodes leave of the step's tokens to prompts. Called once all decodes are planned."""
        self.decode_count = len(self.chunk_by_entry)
        self.token_budget = config.max_num_batched_tokens - self.decode_count
        if config.target_prefill_tokens is not None:
            self.admission_min_tokens = max(1, self.token_budget - config.target_prefill_tokens + 1)

    def add(self, entry: RequestEntry, chunk: Chunk) -> None:
        """Add a chunk of a prompt."""
        self.chunk_by_entry[entry] = chunk
        self.token_budget -= chunk.end - chunk.start
        self.unregistered_entries.append(entry)

    def drop(self, entry: RequestEntry) -> None:
        """Remove the chunk, if there is one, of a request that is preempted."""
        chunk = self.chunk_by_entry.pop(entry, None)
        if chunk is not None:
            self.token_budget += chunk.end - chunk.start


@dataclass(slots=True)
class StepInFlight:
    """A planned step, until its result is applied."""

    plan: StepPlan
    entries: list[RequestEntry]
    """Requests of the plan's chunks, in the same order."""
