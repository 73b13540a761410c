"""Data of a request that is to be compared with the last prompt of its conversation."""

from __future__ import annotations

from typing import NamedTuple

from router.edge.routing_headers import ResolvedModel
from router.prompting.read_body import ReadBody


class Sampling(NamedTuple):
    """Whether, and why, a request is compared with the last prompt of its conversation."""

    is_compared: bool
    is_sampled: bool
    """Whether the conversation belongs to the sampled share, which is counted by reason."""
    has_unknown_history: bool
    """Whether the conversation may have had earlier prompts that were not stored."""


class PendingComparison:
    """A request that waits for its comparison. Only `pieces` holds text of its body."""

    __slots__ = ("ended_at_s", "first_message_digest", "has_started", "outline", "pieces", "sampling")

    def __init__(
        self, body: ReadBody[ResolvedModel], pieces: tuple[bytes, ...], sampling: Sampling, *, is_named: bool
    ) -> None:
        """`pieces`: bytes of the same body. `is_named`: its session has a name."""
        self.sampling = sampling
        self.outline = body.outline()
        self.pieces = (pieces, body.request.kind) if body.is_outline_missing else None
        """Bytes and kind of the body, where a worker process has to make its outline."""
        self.first_message_digest = None if is_named or body.request.kind != "chat" else body.digest_first_message()
        self.has_started = False
        """Whether the first byte of the answer came; the outline may still be missing."""
        self.ended_at_s: float | None = None
        """End of the answer, where it came before the outline was made."""
