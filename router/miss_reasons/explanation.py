"""Explanation of one request: the uncached ranges of its prompt, and their reasons. Values only."""

from __future__ import annotations

from typing import Final

import msgspec

NOT_COMPARED: Final = "not_compared"
"""Reason of tokens that were not compared, as the conversation's last prompt was not stored."""
NO_LOSS: Final = frozenset(("new_session", "new_text", "partial_block", NOT_COMPARED))
"""Reasons of tokens that no worker could have cached, as far as is known."""
GROUPS: Final = {
    **dict.fromkeys(("billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments",
                     "truncated", "edited", "re_encoded", "salt", "lora", "model"), "workload"),
    **dict.fromkeys(("evicted", "worker_lost"), "capacity"),
    "cached_elsewhere": "routing",
    **dict.fromkeys(("not_announced", "mispredicted"), "index"),
}  # fmt: skip
"""Reason -> part of the system that causes it."""


class UncachedRange(msgspec.Struct, omit_defaults=True):
    """Tokens `start` to `end` of a prompt, which the worker had not cached, and the reason for that."""

    reason: str
    start: int
    end: int
    position: int | None = None
    """Position of the first token that differs from the conversation's last prompt."""
    message: int | None = None
    """Index of the message with that token."""
    worker: str | None = None
    """Worker that had the tokens cached."""
    lost_ago_s: float | None = None
    """Seconds since the worker lost the tokens."""
    chosen_ttft_s: float | None = None
    """Predicted time to first token at the chosen worker."""
    best_ttft_s: float | None = None
    """Predicted time to first token at the worker that had more of the prompt."""

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def has_same_cause(self, other: UncachedRange) -> bool:
        """Return whether two ranges are equal except for their start and end."""
        return msgspec.structs.replace(self, start=other.start, end=other.end) == other


class MissExplanation(msgspec.Struct, omit_defaults=True):
    """Explanation why tokens of one request's prompt were not cached at the worker that got the request."""

    id: str
    timestamp: float
    """Time of the answer's first byte, by the wall clock."""
    session: str | None
    worker: str
    prompt_tokens: int
    best_cached_tokens: int
    """Cached tokens at the eligible worker that had the most."""
    best_worker: str
    predicted_cached_tokens: int
    """Tokens predicted to be cached at the chosen worker."""
    reported_cached_tokens: int | None = None
    """Cached tokens as the worker reports them; None if it does not."""
    reason: str = ""
    """Main reason: that of the longest range of lost tokens, or if there is none, of new tokens."""
    position: int | None = None
    """Position of the first token with the main reason; None if all tokens were cached."""
    lost_tokens: int = 0
    """Uncached tokens that could have been cached."""
    uncached_ranges: list[UncachedRange] = []
    attempt: int = 0
    is_compared: bool = True
    """Whether the prompt was compared with the last one of its conversation."""

    def __post_init__(self) -> None:
        """Set the main reason, its position and the lost tokens from the ranges."""
        lost_ranges = [uncached for uncached in self.uncached_ranges if uncached.reason not in NO_LOSS]
        self.lost_tokens = sum(uncached.tokens for uncached in lost_ranges)
        if not self.uncached_ranges:
            self.reason = "new_text"
            self.position = None
            return
        main_range = max(lost_ranges or self.uncached_ranges, key=lambda uncached: uncached.tokens)
        self.reason = main_range.reason
        self.position = main_range.start if main_range.position is None else main_range.position
