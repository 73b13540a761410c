"""A request that is compared with the last prompt of its conversation, for why its turn missed."""

from __future__ import annotations

from typing import NamedTuple

from router.prompting.conversation_turn import ConversationTurn


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

    def __init__(self, turn: ConversationTurn, sampling: Sampling) -> None:
        self.sampling = sampling
        self.outline = turn.outline()
        self.pieces = None if turn.pieces is None else (turn.pieces, turn.body_request.kind)
        """The body, and its kind, where its outline is made by another process."""
        is_named = turn.session.name is not None
        self.first_message_digest = (
            None if is_named or turn.body_request.kind != "chat" else turn.digest_first_message()
        )
        self.has_started = False
        """Its first byte came, and its outline is being made."""
        self.ended_at_s: float | None = None
        """When its answer was whole, where that was while its outline was made."""
