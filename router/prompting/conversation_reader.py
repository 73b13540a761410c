"""Bodies that continue cached conversations: the cache, which templates allow it, and the checks while serving.

A template may be rendered from a boundary on where that gave the ids of full reads when it was tried out
(router/prompting/template_trial.py). While serving, one such prompt in 64 is read whole too; a difference ends
it for the model. In a router a wrong id costs a worse placement, never a wrong answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prompts.routing import ApiKind, RoutingRequest
from prompts.tokenizer import Tokenizer
from router.prompting import boundary_rendering
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.conversation_cache import Boundary, CachedConversation, ConversationCache
from router.prompting.conversation_reading import Continuation, continue_conversation, is_cacheable

log = logging.getLogger("router")

CHECK_BYTES_PER_S = 256 << 10
"""Most bytes a second that are read whole for checks: some 4 ms of CPU with Qwen3's template."""
ATTEMPTS_MAX = 4
"""Boundaries that are tried for one body."""
INLINE_BYTES_MAX = 8192
"""A shorter body is cached only where it has several turns: reading it again costs little."""
MESSAGES_MIN = 3
"""Messages of such a body."""
Match = tuple[CachedConversation, Boundary]


class ConversationReader:
    """The conversations of one process."""

    def __init__(self, max_bytes: int) -> None:
        self.cache = ConversationCache(max_bytes)
        self.problems: dict[str, str] = {}
        """model -> why its conversations are read whole; shown by `/workers`."""
        self._renderers: dict[str, BoundaryRenderer] = {}
        """model -> what renders behind boundaries, for models whose conversations are cached."""
        self.check_count = self.difference_count = 0
        self._unchecked_count = 0
        """Continued conversations since the last check began."""
        self._next_check_s = 0.0
        """Time from which on the next check may begin."""

    def can_cache(self, tokenizer: Tokenizer) -> bool:
        """Whether conversations of a tokenizer's template are cached, if that may be rendered from a boundary on."""
        template = tokenizer.chat_template
        return self.cache.max_bytes > 0 and template is not None and template.is_bounded

    def allow(self, model: str, renderer: BoundaryRenderer) -> None:
        """Cache the conversations of a model."""
        self.problems.pop(model, None)
        self._renderers[model] = renderer

    def forbid(self, model: str, problem: str) -> None:
        """Cache no conversations of a model."""
        self._renderers.pop(model, None)
        self.problems[model] = problem
        self.cache.clear(model)

    def renderer_of(self, model: str) -> BoundaryRenderer | None:
        """Return what renders conversations of a model; None where they are not cached, or not to be rendered here."""
        renderer = self._renderers.get(model)
        if renderer is not None and renderer.is_wrong:
            self._end(model, "a prompt that was put together differed from what the template writes")
            return None
        return renderer if renderer is not None and renderer.template.is_bounded else None

    def may_have(self, kind: ApiKind | None, body_bytes: int) -> bool:
        """Whether a conversation may be cached that a body of this size continues."""
        return bool(self._renderers) and is_cacheable(kind, body_bytes)

    def find(self, kind: ApiKind, body: bytes) -> list[Match]:
        """Find the boundaries of cached conversations that a body has too, the furthest first."""
        matches = self.cache.find(kind, body, ATTEMPTS_MAX)
        self.cache.misses += not matches
        return matches

    @staticmethod
    def read(matches: Sequence[Match], body: bytes, renderer: BoundaryRenderer) -> Continuation | None:
        """Read what a body has behind the furthest boundary that can be used. None where it must be read whole."""
        further_differs, model = True, matches[0][0].model
        for conversation, boundary in matches:
            if conversation.model != model:
                continue
            continuation = continue_conversation(
                conversation, boundary, body, renderer, further_differs=further_differs
            )
            if continuation is not None:
                return continuation
            further_differs = False
        return None

    def count_hit(self, continuation: Continuation, body_bytes: int, now: float) -> bool:
        """Count a continued conversation; return whether its body is to be read whole and compared.

        One in CHECK_INTERVAL is, as long as that reads no more than CHECK_BYTES_PER_S; a check that is due then waits.
        """
        self.cache.hits += 1
        self.cache.touch(continuation.conversation)
        self._unchecked_count += 1
        if self._unchecked_count < boundary_rendering.CHECK_INTERVAL or now < self._next_check_s:
            return False
        self._unchecked_count = 0
        self._next_check_s = now + body_bytes / CHECK_BYTES_PER_S
        return True

    def compare(self, model: str, continuation: Continuation, token_ids: Sequence[int]) -> None:
        """Compare a continued prompt with the ids of a full read. A difference ends the caching for the model."""
        self.check_count += 1
        if len(token_ids) == len(continuation.token_ids) and list(token_ids) == list(continuation.token_ids):
            return
        count = continuation.boundary.message_count
        self._end(model, f"a prompt that was continued behind its message {count} differed from the whole")

    def _end(self, model: str, problem: str) -> None:
        """Cache no more conversations of a model."""
        self.difference_count += 1
        self.forbid(model, problem)
        log.warning("model %s: %s", model, problem)


def is_worth_caching(request: RoutingRequest, body_bytes: int) -> bool:
    """Whether the conversation of a body that was read whole is worth caching."""
    messages = getattr(request.source, "messages", None) or request.messages or ()
    return is_cacheable(request.kind, body_bytes) and (body_bytes > INLINE_BYTES_MAX or len(messages) >= MESSAGES_MIN)
