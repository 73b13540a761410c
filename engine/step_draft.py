"""Limits of a step, the step while it is planned, and the step in flight: planned, and not yet applied."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.prefill_queue import PrefillOrder
from engine.request_entry import RequestEntry
from engine.types import Chunk, StepPlan


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step (a forward pass over a batch), and the order in which prompts are computed."""

    max_num_seqs: int = 256
    """Most sequences that run at a time."""
    max_num_batched_tokens: int = 2048
    """Most tokens of a step: one for each decode, the others for prompts."""
    max_model_len: int = 4096
    """Most tokens of one sequence, prompt and output together."""
    eos_token_ids: frozenset[int] = frozenset()
    target_prefill_tokens: int | None = None
    """A step with at least so many prompt tokens admits no further request; None: it admits what it has room for.

    Smaller steps give the first requests their first token sooner, on a device that is as fast with small steps.
    """
    prefill_order: PrefillOrder = "shortest"

    def __post_init__(self) -> None:
        assert 1 <= self.max_num_seqs <= self.max_num_batched_tokens, "every running sequence needs a token in a step"
        assert self.max_model_len >= 1


@dataclass(slots=True)
class StepDraft:
    """A step (a forward pass) that is being planned: first decodes are added, then chunks of prompts.

    The scheduler also keeps count here of the waiting requests that it has looked at for this step.
    """

    planned_s: float
    """Time at which the step is planned."""
    prefill_budget: int
    """Tokens that may still be added to the step."""
    chunk_by_entry: dict[RequestEntry, Chunk] = field(default_factory=dict)
    """The tokens of each request that the step computes."""
    registered_count: int = 0
    """Number of leading chunks with blocks in the prefix tree. Requests of other chunks can still be preempted."""
    decode_count: int = 0
    admission_min_tokens: int = 1
    """A waiting request is admitted only while `prefill_budget` is at least this."""
    skipped_count: int = 0
    """Waiting requests that were skipped, because a running sequence is about to compute a prefix of their prompts."""
    requeued_count: int = 0
    """Waiting requests that moved back in the queue."""
    has_admitted: bool = False
    """Whether a waiting request was admitted. Then no sequence is preempted any more."""
    is_admission_closed: bool = False
    """Whether no further waiting request may be admitted."""

    def end_decodes(self, config: SchedulerConfig) -> None:
        """Set the limit for prompts, after all decodes of the step are planned.

        With 2048 tokens a step, 48 decodes and a target of 256 prompt tokens, the budget is 2000. A request is admitted
        while prompts have at most 255 of these tokens, that is, while at least 2000 - 255 = 1745 are left.
        """
        self.decode_count = len(self.chunk_by_entry)
        if config.target_prefill_tokens is not None:
            self.admission_min_tokens = max(1, self.prefill_budget - config.target_prefill_tokens + 1)

    def add(self, entry: RequestEntry, chunk: Chunk) -> None:
        """Add a chunk of a request."""
        self.chunk_by_entry[entry] = chunk
        self.prefill_budget -= chunk.end - chunk.start

    def drop(self, entry: RequestEntry) -> None:
        """Undo `add` for a request that is preempted, if the step has a chunk of it."""
        chunk = self.chunk_by_entry.pop(entry, None)
        if chunk is not None:
            self.prefill_budget += chunk.end - chunk.start


@dataclass(slots=True)
class StepInFlight:
    """A planned step, until its result is applied."""

    plan: StepPlan
    entries: list[RequestEntry]
    """Requests of the plan's chunks, in the same order."""
