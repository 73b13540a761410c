"""The scheduler's limits, and the check of requests that can never be served within them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.prefill_queue import PrefillOrder
from engine.types import Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step, and the order in which prompts are computed."""

    max_num_seqs: int = 256
    """Most sequences that run at a time."""
    max_num_batched_tokens: int = 2048
    """Most tokens of a step: one for each decode, the others for prompts."""
    max_model_len: int = 4096
    """Most tokens of one sequence, prompt and output together."""
    eos_token_ids: frozenset[int] = frozenset()
    target_prefill_tokens: int | None = None
    """A step with at least so many prompt tokens admits no further request; None: as many as the step has room for.

    On a device that computes small steps as efficiently as large ones, small steps give the first requests their first
    token sooner.
    """
    prefill_order: PrefillOrder = "shortest"

    def __post_init__(self) -> None:
        assert 1 <= self.max_num_seqs <= self.max_num_batched_tokens, "every running sequence needs a token in a step"
        assert self.max_model_len >= 1

    def count_full_prefill_work(self, decode_count: int) -> int:
        """Return the prompt tokens that a step with `decode_count` decodes has if requests are never lacking."""
        prefill_budget = self.max_num_batched_tokens - decode_count
        return min(prefill_budget, self.target_prefill_tokens or prefill_budget)


class RequestRefusedError(ValueError):
    """A request that can never be served here; the message says which limit it breaks."""


def check_prompt_length(request: Request, max_model_len: int, token_limit: int) -> None:
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
