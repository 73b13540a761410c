"""A conversation's turn as it was read: what is kept of it until it is known why it missed. Pure.

Owns which of its token ids need not be kept because others keep them, how its messages are outlined, and which
conversations are looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Final

import xxhash

from prompts.routing import RoutingRequest
from router.prompting.known import Known
from router.prompting.outline import outline
from router.prompting.outlined import Outline, Outlined
from router.prompting.sessions import Session

BEGINNING_CHARS: Final = 256


class ReadTurn:
    """What a request asks for, as far as its conversation goes."""

    __slots__ = ("beginning", "drawn", "kept", "known", "outline", "parsed", "session", "stays")

    def __init__(self, parsed: RoutingRequest, session: Session) -> None:
        self.parsed = parsed
        self.session = session
        self.outline: Outline | None = None
        """Of its messages, or the last of them, where it was read elsewhere."""
        self.drawn: Callable[[int], Outlined | None] | None = None
        """Makes it, where not all of them were read now."""
        self.known: Known | None = None
        """Whose beginning its body has, where that was not read again."""
        self.beginning: array[int] | None = None
        """Token ids that are kept of it."""
        self.kept = 0
        """How many of those the prompt begins with."""
        self.stays = False
        """All its prompt's ids are kept, for when it returns."""

    def outliner(self) -> Callable[[int], Outlined | None]:
        """Makes the outline of its messages from that one on; None where it is no chat, or that part is not known."""
        if self.drawn is not None:
            return self.drawn
        parsed, made = self.parsed, self.outline
        if made is not None:
            return lambda after: made if made.after == after else None
        return lambda after: outline(parsed, after)

    def begins(self) -> int | None:
        """A digest of what its user said first; None of what is no chat."""
        known = self.known
        if known is None or known.kind != "chat":
            return begins_with(self.parsed)
        if known.begins is None:  # the same for all that have it
            known.begins = begins_with(self.parsed)
        return known.begins

    def is_drawn(self, share: float) -> bool:
        """Whether its conversation, with those that it started, is one of the share."""
        return share >= 1 or is_drawn(self.session.parent or self.session.name or beginning(self.parsed), share)


def begins_with(parsed: RoutingRequest) -> int | None:
    """A digest of what its user said first; None of what is no chat."""
    return None if parsed.messages is None else _digest(beginning(parsed))


def is_drawn(name: str, share: float) -> bool:
    """Whether a conversation of this name, or that begins so, is one of the share."""
    return _digest(name) < share * 2**32


def _digest(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "replace")) & 0xFFFF_FFFF


def beginning(parsed: RoutingRequest) -> str:
    """What stays the same in all turns of a conversation without a name: what its user said first."""
    found: Any = parsed.prompt
    for message in parsed.messages or ():
        if message.get("role") not in ("system", "developer"):
            found = message.get("content")
            break
    if isinstance(found, list) and found and isinstance(found[0], dict):
        found = found[0].get("text")
    return found[:BEGINNING_CHARS] if isinstance(found, str) else repr(found[:16] if isinstance(found, list) else None)
