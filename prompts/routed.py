"""The fields of a request's body that routing reads: a structure, and no code.

Apart from prompts/routing.py, which is compiled where msgspec's structures cannot be.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


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
