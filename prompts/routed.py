"""What is read of a request's body for routing, and the fields that it is read of: structures, and no code.

Apart from prompts/routing.py, which is compiled where msgspec's structures cannot be.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from prompts.anthropic import CountRequest
from prompts.responses import ResponsesRequest
from prompts.schemas import Message, Prompt

Kind = Literal["chat", "completion", "messages", "responses", "other"]


class RoutingRequest(Struct, kw_only=True, frozen=True):
    """The routing view of a body. `messages` is None where the body has none that could be rendered."""

    kind: Kind
    source: CountRequest | ResponsesRequest | None = None
    """A body of another API, which is the chat that `chat_of` makes of it; None where the worker will refuse it."""
    model: str | None = None
    messages: list[Message] | None = None
    prompt: Prompt | None = None
    tools: list[Message] | None = None
    documents: list[Message] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    priority: int = 0
    stream: bool = False
    output_max: int = 0
    """Most tokens the client lets all choices have; 0 where it sets no limit."""
    output_min: int = 0
    """Fewest tokens that all choices will have, by `min_tokens`, or by `ignore_eos` where nothing else ends them."""
    user: str | None = None
    prompt_cache_key: str | None = None
    metadata_user_id: str | None = None
    """`metadata.user_id`."""
    stored: str | None = None
    """Name of the response that it goes on from: the worker that holds it knows the rest of the prompt."""
    scores_prompt: bool = False
    """True where every prompt token gets a logprob: engines then compute the whole prompt and reuse nothing of it."""
    echoes_chat: bool = False
    """A chat with `echo`: vLLM then scores its prompt too, our engine does not."""
    has_media: bool = False
    """True where the prompt holds images or other media: only the text before the first can be routed on."""


class RoutedBody(Struct):
    """Every field is Any: nothing a worker might accept is refused here."""

    model: Any = None
    messages: Any = None
    prompt: Any = None
    tools: Any = None
    documents: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    add_special_tokens: Any = None
    reasoning_effort: Any = None
    truncate_prompt_tokens: Any = None
    cache_salt: Any = None
    priority: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    user: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    logprobs: Any = None
    top_logprobs: Any = 0


decoder = msgspec.json.Decoder(RoutedBody)
