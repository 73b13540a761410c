"""What is said of one request: the parts of its prompt that had to be computed, and why. Values only."""

from __future__ import annotations

from typing import Final

import msgspec

NOT_COMPARED: Final = "not_compared"
"""The conversation's last prompt was not kept: the reason may be any that needs a comparison."""
NO_LOSS: Final = frozenset(("new_session", "new_text", "block_rest", NOT_COMPARED))
"""Had to be computed, whoever it was sent to, as far as is known."""
GROUPS: Final = {
    **dict.fromkeys(("billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped", "tool_arguments",
                     "truncated", "edited", "re_encoded", "salt", "lora", "model"), "workload"),
    **dict.fromkeys(("evicted", "worker_lost"), "capacity"),
    "elsewhere": "routing",
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
    ago_s: float | None = None
    """When it lost it."""
    here_s: float | None = None
    there_s: float | None = None
    """Time to the first token where the request went, and where more was cached."""

    @property
    def tokens(self) -> int:
        return self.end - self.start


class MissExplanation(msgspec.Struct, omit_defaults=True):
    """One request."""

    id: str
    at: float
    """Wall clock."""
    session: str | None
    worker: str
    prompt_tokens: int
    best_tokens: int
    """Cached at the worker that had most of it and could have been chosen."""
    best_worker: str
    chosen_tokens: int
    """Predicted to be cached where it went."""
    reported_tokens: int | None = None
    """As the worker says, where it does."""
    reason: str = ""
    """That of most of the lost tokens; where none was lost, of the new ones."""
    position: int | None = None
    """Where the prompt leaves what is or was held, for that reason."""
    lost_tokens: int = 0
    parts: list[UncachedRange] = []
    attempt: int = 0
    compared: bool = True
    """Whether the prompt was compared with the last one of its conversation."""

    def sum_up(self) -> None:
        """Find the main reason and its position in the parts."""
        lost = most = most_new = 0
        main: UncachedRange | None = None
        new: UncachedRange | None = None
        for part in self.parts:
            tokens = part.tokens
            if part.reason not in NO_LOSS:
                lost += tokens
                if tokens > most:
                    most, main = tokens, part
            elif tokens > most_new:
                most_new, new = tokens, part
        if main is None:
            main = new
        self.lost_tokens = lost
        self.reason = main.reason if main is not None else "new_text"
        self.position = None if main is None else main.start if main.position is None else main.position

    def settle(self, resident_tokens: int, reported: int) -> None:
        """The worker said how much it reused: what was predicted beyond that is missing too, what it had beyond is not.
        `resident_tokens`: announced by the worker when the request was sent."""
        self.reported_tokens = reported
        reused, predicted = min(reported, self.prompt_tokens), self.chosen_tokens
        kept = [part for part in self.parts if part.end > reused]
        for part in kept:
            part.start = max(part.start, reused)
        vouched = min(max(resident_tokens, reused), predicted)
        missing = [
            UncachedRange("mispredicted", reused, vouched, worker=self.worker),
            UncachedRange("not_announced", vouched, predicted, worker=self.worker),
        ]
        self.parts = [part for part in missing if part.end > part.start] + kept
        self.sum_up()
