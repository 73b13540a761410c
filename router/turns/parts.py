"""What is said of one request: the parts of its prompt that had to be computed, and why. Values only."""

from __future__ import annotations

from typing import Any

import msgspec

from router.turns._native import Begun


class Part(msgspec.Struct, omit_defaults=True):
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


class Why(msgspec.Struct, omit_defaults=True):
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
    parts: list[Part] = []
    attempt: int = 0
    sampled_tokens: int = 0
    """Of the prompt: as a worker sampled them, where the encoder would choose others. 0: all are the template's."""


def why_of(begun: Begun) -> Why:
    """As values."""
    fields: list[Any] = list(begun.told())
    fields[12] = [
        Part(reason, start, end, position, message, worker, None if ago_s is None else round(ago_s, 3), here_s, there_s)
        for reason, start, end, position, message, worker, ago_s, here_s, there_s in fields[12]
    ]
    return Why(*fields)
