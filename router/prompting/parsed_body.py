"""A client's body and its prompt, as router/prompting/reader.py parses them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from prompts.routing import RoutingRequest
from prompts.tokenizer import Tokenizer
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.conversation_cache import CachedConversation
from router.prompting.conversation_reading import Continuation, cache_conversation
from router.prompting.encode import PromptSize, count_further_tokens, measure_prompts, read_prompt, truncate_prompt
from router.prompting.fields import FieldSpans
from router.prompting.media import MediaPrompt
from router.prompting.outline import Outline, outline_chat
from router.prompting.sessions import digest_first_user_message

log = logging.getLogger("router")


class TokenizedPrompt(msgspec.Struct, eq=False):
    """The prompt of a body as token ids, and facts that were found when it was read."""

    token_ids: Sequence[int] | None = None
    """Token ids of the prompt; None if they are unknown."""
    seconds: float = 0.0
    """Time that reading the prompt took."""
    conversation: CachedConversation | None = None
    """Cache entry that reads the next turn of this conversation faster."""
    size: PromptSize | None = None
    """Size of all prompts of the body; None if the first one was not encoded."""
    outline: Outline | None = None
    """Outline of the messages, if it was made along with the prompt."""


def tokenize_prompt(
    request: RoutingRequest,
    tokenizer: Tokenizer | None,
    tokens_max: int | None = None,
    *,
    body: bytes = b"",
    renderer: BoundaryRenderer | None = None,
    makes_outline: bool = False,
) -> TokenizedPrompt:
    """Tokenise the prompt of a body for routing, truncated to what a worker would use. Raises RequestError.

    `tokens_max`: most tokens that the model takes. With `body` and `renderer`, the result also has a cache entry, by
    which the next turn of the conversation is read faster, unless the prompt was truncated.
    """
    prompt = TokenizedPrompt()
    rendered = read_prompt(request, tokenizer, tokens_max)
    if rendered.token_ids is not None:
        further_lengths = count_further_tokens(request, tokenizer)
        prompt.token_ids = truncate_prompt(rendered.token_ids, request, tokens_max)
        prompt.size = measure_prompts(
            rendered.token_ids, request, tokens_max, further_lengths, is_exact=rendered.is_whole
        )
    try:
        prompt.outline = outline_chat(request) if makes_outline else None
        is_truncated = prompt.token_ids is not rendered.token_ids
        if renderer is not None and not is_truncated:
            prompt.conversation = cache_conversation(request, body, rendered, prompt.outline, renderer)
    except Exception as error:  # noqa: BLE001  the prompt is routed by its ids all the same
        log.warning("a conversation could not be cached: %s: %s", type(error).__name__, error)
    return prompt


class PromptTarget(Protocol):
    """The model for which a prompt is read."""

    @property
    def base_model(self) -> str: ...
    @property
    def tokens_max(self) -> int | None:
        """Most tokens of a prompt, if known."""


class ParsedBody(msgspec.Struct, eq=False):
    """A client's request body after it was parsed, with the token ids of its prompt.

    A body that was parsed whole in this process has `fields`. If a worker process parsed it, it has `spans`, and the
    request lacks the prompt. If it continues a cached conversation, it has a `continuation` with the new messages.
    """

    request: RoutingRequest
    """Fields by which the request is routed, without the cached messages if there is a `continuation`."""
    prompt: TokenizedPrompt
    body: bytes = b""
    """The whole body if `prompt.conversation` is to be cached, else empty."""
    media: MediaPrompt | None = None
    """Digest of the conversation and size of a body with images or other media."""
    spans: FieldSpans | None = None
    """Byte offsets of the top-level fields."""
    fields: dict[str, msgspec.Raw] | None = None
    """Top-level fields as undecoded JSON, which keep the body in memory."""
    first_message_digest: int | None = None
    """Digest of the first user message; None until `digest_first_message` computes it."""
    continuation: Continuation | None = None
    """The prompt as continued from a cached conversation."""

    @classmethod
    def make_continued(cls, continuation: Continuation, body: bytes, tokens_max: int | None) -> ParsedBody:
        """Make the body of a request that continues a cached conversation. `tokens_max`: most tokens of its model."""
        token_ids, request, cache_entry = continuation.token_ids, continuation.request, continuation.cache_entry
        prompt = TokenizedPrompt(
            token_ids=truncate_prompt(token_ids, request, tokens_max),
            seconds=continuation.read_s,
            conversation=cache_entry,
            size=measure_prompts(token_ids, request, tokens_max),
        )
        return cls(
            request=request,
            prompt=prompt,
            body=b"" if cache_entry is None else body,
            first_message_digest=continuation.conversation.first_message_digest,
            continuation=continuation,
        )

    def get_outline(self) -> Outline | None:
        """Return fingerprints of the messages; None if the body is no chat, or if its messages could not be read."""
        if self.continuation is not None:
            return self.continuation.outline()
        return outline_chat(self.request) if self.prompt.outline is None else self.prompt.outline

    def digest_first_message(self) -> int:
        """Return the digest of the first user message, which names a conversation that has no other name."""
        if self.first_message_digest is None:
            self.first_message_digest = digest_first_user_message(self.request)
        return self.first_message_digest
