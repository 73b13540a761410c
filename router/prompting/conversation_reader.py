"""Bodies that continue cached conversations: the cache, which templates allow it, and the checks while serving.

A template may be rendered from a boundary on where that gave the ids of full reads when it was tried out
(router/prompting/template_trial.py). While serving, one such prompt in CHECK_INTERVAL is read whole too; a difference
ends it for the model. In a router a wrong id costs a worse placement, never a wrong answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prompts.routing import ApiKind, RoutingRequest
from prompts.tokenizer import Tokenizer
from router.prompting.conversation_cache import Boundary, CachedConversation, ConversationCache
from router.prompting.conversation_reading import Continuation, continue_conversation, is_cacheable

log = logging.getLogger("router")

CHECK_INTERVAL = 64
"""One continued conversation in so many is read whole too."""
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
        self._tried_models: set[str] = set()
        self.check_count = self.difference_count = 0

    def can_cache(self, tokenizer: Tokenizer) -> bool:
        """Whether conversations of a tokenizer's template are cached, if that may be rendered from a boundary on."""
        template = tokenizer.chat_template
        return self.cache.max_bytes > 0 and template is not None and template.is_bounded

    def allow(self, model: str, problem: str | None) -> None:
        """Note whether a model's conversations may be cached. `problem`: why not."""
        self.problems.pop(model, None)
        self._tried_models.discard(model)
        if problem is None:
            self._tried_models.add(model)
        else:
            self.problems[model] = problem
            log.info("conversations of %s are read whole: %s", model, problem)

    def is_allowed(self, model: str) -> bool:
        """Whether conversations of a model are cached."""
        return model in self._tried_models

    def may_have(self, kind: ApiKind | None, body_bytes: int) -> bool:
        """Whether a conversation may be cached that a body of this size continues."""
        return bool(self._tried_models) and is_cacheable(kind, body_bytes)

    def find(self, kind: ApiKind, body: bytes) -> list[Match]:
        """Find the boundaries of cached conversations that a body has too, the furthest first."""
        matches = []
        for match in self.cache.find(kind, body):
            matches.append(match)
            if len(matches) == ATTEMPTS_MAX:
                break
        self.cache.misses += not matches
        return matches

    @staticmethod
    def read(matches: Sequence[Match], body: bytes, tokenizer: Tokenizer, model: str) -> Continuation | None:
        """Read what a body has behind the furthest boundary that can be used. None where it must be read whole."""
        further_differs = True
        for conversation, boundary in matches:
            if conversation.model != model:
                continue
            continuation = continue_conversation(
                conversation, boundary, body, tokenizer, further_differs=further_differs
            )
            if continuation is not None:
                return continuation
            further_differs = False
        return None

    def count_hit(self, continuation: Continuation) -> bool:
        """Count a continued conversation; return whether it is to be checked."""
        self.cache.hits += 1
        self.cache.touch(continuation.conversation)
        return self.cache.hits % CHECK_INTERVAL == 0

    def compare(self, model: str, continuation: Continuation, token_ids: Sequence[int]) -> None:
        """Compare a continued prompt with the ids of a full read. A difference ends the caching for the model."""
        self.check_count += 1
        if len(token_ids) == len(continuation.token_ids) and list(token_ids) == list(continuation.token_ids):
            return
        self.difference_count += 1
        count = continuation.boundary.message_count
        problem = f"a prompt that was continued behind its message {count} differed from the whole"
        self.allow(model, problem)
        self.cache.clear(model)
        log.warning("model %s: %s", model, problem)


def is_worth_caching(request: RoutingRequest, body_bytes: int) -> bool:
    """Whether the conversation of a body that was read whole is worth caching."""
    messages = getattr(request.source, "messages", None) or request.messages or ()
    return is_cacheable(request.kind, body_bytes) and (body_bytes > INLINE_BYTES_MAX or len(messages) >= MESSAGES_MIN)
