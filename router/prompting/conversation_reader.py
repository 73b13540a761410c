"""The conversations of one process: the cache, the models whose templates allow it, and checks while serving.

A template is allowed after a trial when it is loaded. While serving, one continued prompt in 64 is read whole too; a
difference ends the caching for the model. A wrong id costs a worse placement, never a wrong answer.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence

from prompts.routing import ApiKind, RoutingRequest
from prompts.tokenizer import ID_TYPE
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.continued_conversation import TRAILING_MESSAGES, Continuation, continue_conversation
from router.prompting.conversation_cache import BoundaryLocation, ConversationCache, is_cacheable
from router.prompting.encode import truncate_prompt

log = logging.getLogger("router")

CHECK_INTERVAL = 64
"""One in this many continued prompts is also read whole, to compare the ids."""
CHECK_BYTES_PER_S = 256 << 10
"""Most bytes a second that are read whole for checks: some 4 ms of CPU with Qwen3's template."""
INLINE_BYTES_MAX = 8192
"""A body up to this size is read at once. It is cached only from MESSAGES_MIN messages on."""
MESSAGES_MIN = 3


class ConversationReader:
    """Continues cached conversations of models whose templates passed a trial, unless a continued prompt was wrong."""

    def __init__(self, max_bytes: int) -> None:
        self.cache = ConversationCache(max_bytes)
        self.problems: dict[str, str] = {}
        """Model -> why its conversations are read whole; shown by `/workers`."""
        self._renderers: dict[str, BoundaryRenderer] = {}
        """Model whose conversations are cached -> renderer of its template."""
        self.check_count = self.difference_count = 0
        self._unchecked_count = 0
        """Continued conversations since the last check began."""
        self._next_check_s = 0.0
        """Time from which on the next check may begin."""

    def allow(self, model: str, renderer: BoundaryRenderer) -> None:
        """Begin to cache the conversations of a model."""
        self.forget(model)  # a body that another tokenizer was still reading may have been stored since
        self._renderers[model] = renderer

    def forbid(self, model: str, problem: str) -> None:
        """Stop caching the conversations of a model."""
        self.forget(model)
        self.problems[model] = problem

    def forget(self, model: str) -> None:
        """Drop the conversations of a model, and what is known of its template, as another one may take its place."""
        self._renderers.pop(model, None)
        self.problems.pop(model, None)
        self.cache.clear(model)

    def get_renderer(self, model: str) -> BoundaryRenderer | None:
        """Return the renderer of a model's conversations; None if they are not cached."""
        renderer = self._renderers.get(model)
        return renderer if renderer is not None and renderer.template.is_bounded else None

    def may_have(self, kind: ApiKind, body_bytes: int) -> bool:
        """Whether a body of this size may continue a cached conversation."""
        return bool(self._renderers) and is_cacheable(kind, body_bytes)

    def read_continuation(self, matches: Sequence[BoundaryLocation], body: bytes) -> Continuation | None:
        """Tokenise a body that continues a cached conversation, by reading only its new messages.

        `matches`: places between messages up to which the body is equal to a cached body, the furthest first. The first
        usable place is taken. Return None if the body must be read whole. Thread-safe.
        """
        for match in matches:
            renderer = self.get_renderer(match.conversation.model)
            if renderer is None:
                continue
            trailing_count = _count_trailing_messages(match, is_furthest=match is matches[0])
            continuation = continue_conversation(match, body, renderer, trailing_count)
            if continuation is not None:
                return continuation
        return None

    def count_hit(self, continuation: Continuation, body_bytes: int, now: float) -> bool:
        """Count a continued conversation; return whether to read its body whole too, and compare.

        One in CHECK_INTERVAL is compared. A check waits while earlier ones have used up CHECK_BYTES_PER_S.
        """
        self.cache.record_hit(continuation.conversation)
        self._unchecked_count += 1
        if self._unchecked_count < CHECK_INTERVAL or now < self._next_check_s:
            return False
        self._unchecked_count = 0
        self._next_check_s = now + body_bytes / CHECK_BYTES_PER_S
        return True

    def compare(self, model: str, continuation: Continuation, token_ids: Sequence[int]) -> None:
        """Compare a continued prompt with the truncated ids of a full read; if they differ, read the model's whole."""
        self.check_count += 1
        continued_ids = truncate_prompt(continuation.token_ids, continuation.request, None) or ()
        if array(ID_TYPE, token_ids) == array(ID_TYPE, continued_ids):
            return
        message_count = continuation.boundary.message_count
        problem = f"a prompt that was continued behind its message {message_count} differed from the whole"
        self.difference_count += 1
        self.forbid(model, problem)
        log.warning("model %s: %s", model, problem)


def _count_trailing_messages(match: BoundaryLocation, *, is_furthest: bool) -> int:
    """Return how many last messages the next turn may change: a few if this client has changed such messages before.

    It has, if the furthest boundary up to which the bodies are equal is not the last one of the cached body.
    """
    has_changed_messages = is_furthest and match.boundary is not match.conversation.boundaries[-1]
    return TRAILING_MESSAGES if has_changed_messages or match.boundary.trailing_count == TRAILING_MESSAGES else 1


def is_worth_caching(request: RoutingRequest, body_bytes: int) -> bool:
    """Whether the conversation of a body that was read whole is worth caching."""
    messages = getattr(request.source, "messages", None) or request.messages or ()
    return is_cacheable(request.kind, body_bytes) and (body_bytes > INLINE_BYTES_MAX or len(messages) >= MESSAGES_MIN)
