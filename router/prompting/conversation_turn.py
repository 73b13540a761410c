"""One turn of a conversation as it was read: the outline of its messages, and the keys of its conversation. Pure."""

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

DIGESTED_CHARS: Final = 256


class ConversationTurn:
    """The request of one turn, as far as its conversation goes."""

    __slots__ = (
        "body_request",
        "cached_conversation",
        "fingerprinter",
        "first_message_digest",
        "pieces",
        "session",
        "wants_explanation",
    )

    def __init__(self, body_request: RoutingRequest, session: Session) -> None:
        self.body_request = body_request
        self.session = session
        self.fingerprinter: Callable[[], Outline | None] | None = None
        """Makes the outline where only the suffix of the body was read."""
        self.pieces: Sequence[bytes] | None = None
        """The body, where it was read by another process: its messages are not here."""
        self.first_message_digest: int | None = None
        """`digest_first_user_message` of the body, once it is needed."""
        self.wants_explanation = False
        """Whether the client asks for the reasons of its miss."""
        self.cached_conversation: CachedConversation | None = None
        """The cached conversation that its body continues, where the prefix was not read again."""

    def outline(self) -> Outline | None:
        """Outline its messages; None where it is no chat, or they are not here."""
        if self.fingerprinter is not None:
            return self.fingerprinter()
        return None if self.pieces is not None else outline_chat(self.body_request)

    def digest_first_message(self) -> int:
        """Digest what its user said first: the same in all turns of a conversation without a name."""
        if self.first_message_digest is None:
            conversation = self.cached_conversation
            self.first_message_digest = (
                digest_first_user_message(self.body_request)
                if conversation is None or conversation.first_message_digest is None
                else conversation.first_message_digest
            )
        return self.first_message_digest

    def conversation_keys(self) -> tuple[int, ...]:
        """Return the keys of its conversation: of the session that started it, and its own. A conversation without a
        name has the digest of its first message."""
        session = self.session
        if session.name is None:
            return (digest_name(session.parent),) if session.parent else (self.digest_first_message(),)
        return (
            (digest_name(session.parent), digest_name(session.name)) if session.parent else (digest_name(session.name),)
        )


def digest_first_user_message(request: RoutingRequest) -> int:
    """Digest what the user of a body said first."""
    content: Any = request.prompt
    source = request.source
    if isinstance(source, ResponsesRequest):
        content = source.input if isinstance(source.input, str) else _first_user_content(source.input)
    elif source is not None:
        content = _first_user_content(source.messages)
    elif request.messages is not None:
        content = _first_user_content(request.messages)
    if isinstance(content, list):
        content = repr(content[:16])
    return digest_name(content[:DIGESTED_CHARS] if isinstance(content, str) else repr(None))


def digest_name(name: str) -> int:
    """Digest a name to 32 bits."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "replace")) & 0xFFFF_FFFF


def _first_user_content(messages: Sequence[Any]) -> Any:
    """Return the text, or its first part, of the first message that is not the system's."""
    for message in messages:
        if _get_field(message, "role") not in ("system", "developer"):
            content = _get_field(message, "content")
            if isinstance(content, list) and content:
                return _get_field(content[0], "text") or content
            return content
    return None


def _get_field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
