"""A request that is compared with the last prompt of its conversation, for why its turn missed."""

from __future__ import annotations

from typing import NamedTuple

from router.edge.routing_headers import ResolvedModel
from router.prompting.read_body import ReadBody


class Sampling(NamedTuple):
    """Whether a request is compared with the last prompt of its conversation."""

    is_compared: bool
    is_sampled: bool
    """As one of the share, which is counted by reason."""
    has_unknown_history: bool
    """Earlier prompts of the conversation may have been, and were not kept."""


class PendingComparison:
    """A request that is to be compared, until that is done. Holds no text of its body but in `pieces`."""

    __slots__ = ("ended_at_s", "first_message_digest", "has_started", "outline", "pieces", "sampling")

    def __init__(
        self, body: ReadBody[ResolvedModel], pieces: tuple[bytes, ...], sampling: Sampling, *, is_named: bool
    ) -> None:
        """`pieces`: of the same body. `is_named`: its session has a name."""
        self.sampling = sampling
        self.outline = body.outline()
        self.pieces = (pieces, body.request.kind) if body.is_outline_missing else None
        """The body, and its kind, where its outline is made by another process."""
        self.first_message_digest = None if is_named or body.request.kind != "chat" else body.digest_first_message()
        self.has_started = False
        """Its first byte came, and its outline is being made."""
        self.ended_at_s: float | None = None
        """When its answer was whole, where that was while its outline was made."""
