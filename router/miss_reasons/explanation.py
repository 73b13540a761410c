"""What is said of one request: the parts of its prompt that had to be computed, and why. Values only."""

from __future__ import annotations

from typing import Final

import msgspec

NOT_COMPARED: Final = "not_compared"
"""The conversation's last prompt was not kept: the reason may be any that needs a comparison."""
NO_LOSS: Final = frozenset(("new_session", "new_text", "partial_block", NOT_COMPARED))
"""Had to be computed, whoever it was sent to, as far as is known."""
GROUPS: Final = {
    **dict.fromkeys(("billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments",
                     "truncated", "edited", "re_encoded", "salt", "lora", "model"), "workload"),
    **dict.fromkeys(("evicted", "worker_lost"), "capacity"),
    "cached_elsewhere": "routing",
    **dict.fromkeys(("not_announced", "mispredicted"), "index"),
}  # fmt: skip
"""reason -> whose doing it is."""


class UncachedRange(msgspec.Struct, omit_defaults=True):
    """Some of the tokens that had to be computed."""

    reason: str
    start: int
    end: int
    position: int | None = None
    """The first token that differs from what was there before."""
    message: int | None = None
    """Of the body's messages, the one with that token; the first is 0."""
    worker: str | None = None
    """Who had it."""
    lost_ago_s: float | None = None
    """When it lost it."""
    chosen_ttft_s: float | None = None
    best_ttft_s: float | None = None
    """Time to the first token where the request went, and where more was cached."""

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def has_same_cause(self, other: UncachedRange) -> bool:
        """Return whether two ranges differ in nothing but their place."""
        return msgspec.structs.replace(self, start=other.start, end=other.end) == other


class MissExplanation(msgspec.Struct, omit_defaults=True):
    """One request."""

    id: str
    timestamp: float
    """Wall clock."""
    session: str | None
    worker: str
    prompt_tokens: int
    best_cached_tokens: int
    """Cached at the worker that had most of it and could have been chosen."""
    best_worker: str
    predicted_cached_tokens: int
    """Predicted to be cached where it went."""
    reported_cached_tokens: int | None = None
    """As the worker says, where it does."""
    reason: str = ""
    """That of most of the lost tokens; where none was lost, of the new ones."""
    position: int | None = None
    """Where the prompt leaves what is or was held, for that reason."""
    lost_tokens: int = 0
    uncached_ranges: list[UncachedRange] = []
    attempt: int = 0
    is_compared: bool = True
    """Whether the prompt was compared with the last one of its conversation."""

    def update_main_reason(self) -> None:
        """Find the main reason and its position in the parts."""
        lost_tokens = largest_loss = largest_new = 0
        main_range: UncachedRange | None = None
        new_range: UncachedRange | None = None
        for uncached_range in self.uncached_ranges:
            tokens = uncached_range.tokens
            if uncached_range.reason not in NO_LOSS:
                lost_tokens += tokens
                if tokens > largest_loss:
                    largest_loss, main_range = tokens, uncached_range
            elif tokens > largest_new:
                largest_new, new_range = tokens, uncached_range
        if main_range is None:
            main_range = new_range
        self.lost_tokens = lost_tokens
        self.reason = main_range.reason if main_range is not None else "new_text"
        self.position = (
            None if main_range is None else main_range.start if main_range.position is None else main_range.position
        )

    def apply_reported_tokens(self, resident_tokens: int, reported_tokens: int) -> None:
        """The worker said how much it reused: what was predicted beyond that is missing too, what it had beyond is not.
        `resident_tokens`: announced by the worker when the request was sent."""
        self.reported_cached_tokens = reported_tokens
        reused_tokens, predicted_tokens = min(reported_tokens, self.prompt_tokens), self.predicted_cached_tokens
        remaining_ranges = [
            uncached_range for uncached_range in self.uncached_ranges if uncached_range.end > reused_tokens
        ]
        for uncached_range in remaining_ranges:
            uncached_range.start = max(uncached_range.start, reused_tokens)
        announced_tokens = min(max(resident_tokens, reused_tokens), predicted_tokens)
        added_ranges = [
            UncachedRange("mispredicted", reused_tokens, announced_tokens, worker=self.worker),
            UncachedRange("not_announced", announced_tokens, predicted_tokens, worker=self.worker),
        ]
        self.uncached_ranges = [
            uncached_range for uncached_range in added_ranges if uncached_range.end > uncached_range.start
        ] + remaining_ranges
        self.update_main_reason()
