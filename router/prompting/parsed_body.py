"""A client's body before and after router/prompting/prompt_reader.py parses it, and its tokenised prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from prompts.routing import ApiKind, RoutingRequest
from prompts.tokenizer import Tokenizer
from router.prompting.body_fields import FieldSpans
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.continued_conversation import Continuation, cache_conversation
from router.prompting.conversation_cache import CachedConversation
from router.prompting.encode import (
    PromptSize,
    build_tokenize_request,
    count_further_tokens,
    measure_prompts,
    read_prompt,
    truncate_prompt,
)
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
    tokenize_request: bytes | None = None
    """Body of the `/tokenize` request by which an engine tokenises the prompt; None if no engine is to do that."""
    further_lengths: Sequence[int] = ()
    """Tokens of each prompt after the first, if an engine tokenises the first."""

    def set_ids(
        self,
        token_ids: Sequence[int] | None,
        request: RoutingRequest,
        tokens_max: int | None,
        further_lengths: Sequence[int] = (),
        *,
        is_whole: bool = True,
    ) -> None:
        """Set the ids of the first prompt, truncated to what a worker would use, and the size of all prompts.

        For example, `tokens_max` = 4,096 (the model's context) keeps the first 4,097 ids of 10,000: more are not looked
        up in any cache. The size is 10,000 all the same. `is_whole`: False if a part of the first prompt has no ids.
        `further_lengths`: tokens of each other prompt, as a completion request can have several.
        """
        self.token_ids = truncate_prompt(token_ids, request, tokens_max)
        self.size = measure_prompts(token_ids, request, tokens_max, further_lengths, is_exact=is_whole)


def tokenize_prompt(
    request: RoutingRequest,
    tokenizer: Tokenizer | None,
    tokens_max: int | None = None,
    *,
    body: bytes = b"",
    renderer: BoundaryRenderer | None = None,
    makes_outline: bool = False,
    remote_model: str | None = None,
) -> TokenizedPrompt:
    """Tokenise the prompt of a body for routing, truncated to what a worker would use. Raises RequestError.

    `tokens_max`: most tokens that the model takes. With `body` and `renderer`, the result also has a cache entry, by
    which the next turn of the conversation is read faster, unless the prompt was truncated. `remote_model`: model that
    engines tokenise for; the result has the request to one, unless the body has token ids.
    """
    prompt = TokenizedPrompt()
    rendered = read_prompt(request, tokenizer, tokens_max)
    if rendered.token_ids is not None:
        further_lengths = count_further_tokens(request, tokenizer)
        prompt.set_ids(rendered.token_ids, request, tokens_max, further_lengths, is_whole=rendered.is_whole)
    elif remote_model is not None:
        prompt.tokenize_request = build_tokenize_request(request, remote_model)
        prompt.further_lengths = count_further_tokens(request, tokenizer)
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


class BodyToRead(msgspec.Struct, frozen=True, eq=False):
    """A client's body that is to be read."""

    pieces: tuple[bytes, ...]
    kind: ApiKind | None
    """API of the body's path; None if the body decides."""
    find_target: Callable[[RoutingRequest], PromptTarget]
    is_wanted: Callable[[], bool]
    """Whether the client is still connected."""
    tenant: str = ""
    needs_opening: bool = False
    """Whether the conversation's beginning may decide the model, as with canaries."""

    @property
    def byte_count(self) -> int:
        return sum(map(len, self.pieces))

    def join(self) -> bytes:
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


class ParsedBody(msgspec.Struct, eq=False):
    """A client's request body after it was parsed, with the token ids of its prompt.

    A body that was parsed whole in this process has `fields`. A large body is parsed by a worker process: it has
    `spans`, and its request lacks the prompt. A body that continues a cached conversation has a `continuation`, and its
    request lacks the messages that are cached.
    """

    request: RoutingRequest
    """Fields by which the request is routed."""
    prompt: TokenizedPrompt
    body: bytes = b""
    """The whole body if `prompt.conversation` is to be cached, else empty."""
    media: MediaPrompt | None = None
    """Digest of the conversation and size of a body with images or other media."""
    spans: FieldSpans | None = None
    """Byte offsets of the top-level fields, by which some can be replaced for the worker."""
    fields: dict[str, msgspec.Raw] | None = None
    """Top-level fields as undecoded JSON, which keep the body in memory."""
    first_message_digest: int | None = None
    """Digest of the first user message; None until `digest_first_message` computes it."""
    continuation: Continuation | None = None
    """The new messages, and the cached conversation that they continue."""

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
