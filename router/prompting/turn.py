"""A conversation's turn as it was read: its messages' outline, and what tells its conversation from others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import xxhash

from prompts.responses import ResponsesRequest
from prompts.routing import RoutingRequest
from router.prompting.chat_outline import Outline
from router.prompting.conversation_cache import CachedConversation
from router.prompting.outline import outline_chat
from router.prompting.sessions import Session

BEGINNING_CHARS: Final = 256


class ReadTurn:
    """What a request asks for, as far as its conversation goes."""

    __slots__ = ("begins", "explains", "known", "outliner", "parsed", "pieces", "session")

    def __init__(self, parsed: RoutingRequest, session: Session) -> None:
        self.parsed = parsed
        self.session = session
        self.outliner: Callable[[], Outline | None] | None = None
        """Makes the outline, where not all messages were read now."""
        self.pieces: Sequence[bytes] | None = None
        """The body, where it was read by another process: its messages are not here."""
        self.begins: int | None = None
        """`digest_beginning` of the body, once it was asked for."""
        self.explains = False
        """The client asks for the reasons of its miss."""
        self.known: CachedConversation | None = None
        """Whose beginning its body has, where that was not read again."""

    def outline(self) -> Outline | None:
        """Outline its messages; None where it is no chat, or they are not here."""
        if self.outliner is not None:
            return self.outliner()
        return None if self.pieces is not None else outline_chat(self.parsed)

    def beginning(self) -> int:
        """Digest of what its user said first: the same in all turns of a conversation without a name."""
        if self.begins is None:
            known = self.known
            self.begins = (
                digest_beginning(self.parsed)
                if known is None or known.first_message_digest is None
                else known.first_message_digest
            )
        return self.begins

    def conversations(self) -> tuple[int, ...]:
        """Keys of its conversation: of the one that started it, and its own. Of a conversation without a name, its
        beginning."""
        session = self.session
        if session.name is None:
            return (digest(session.parent),) if session.parent else (self.beginning(),)
        return (digest(session.parent), digest(session.name)) if session.parent else (digest(session.name),)


def digest_beginning(parsed: RoutingRequest) -> int:
    """Digest of what the user of a body said first."""
    found: Any = parsed.prompt
    source = parsed.source
    if isinstance(source, ResponsesRequest):
        found = source.input if isinstance(source.input, str) else _content_of(source.input)
    elif source is not None:
        found = _content_of(source.messages)
    elif parsed.messages is not None:
        found = _content_of(parsed.messages)
    if isinstance(found, list):
        found = repr(found[:16])
    return digest(found[:BEGINNING_CHARS] if isinstance(found, str) else repr(None))


def digest(name: str) -> int:
    """Digest of a name, 32 bits."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "replace")) & 0xFFFF_FFFF


def _content_of(messages: Sequence[Any]) -> Any:
    """The text, or the first part of it, of the first message that is not the system's."""
    for message in messages:
        if _field(message, "role") not in ("system", "developer"):
            content = _field(message, "content")
            if isinstance(content, list) and content:
                return _field(content[0], "text") or content
            return content
    return None


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
