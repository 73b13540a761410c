"""Token counts in answers: the usage of OpenAI's endpoints, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def make_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None) -> Usage:
    """Return the usage of an answer. `reasoning_tokens`: None if reasoning is not parsed."""
    return Usage(
        prompt_tokens,
        prompt_tokens + completion_tokens,
        completion_tokens,
        PromptTokensDetails(cached_tokens),
        UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens),
    )


class TokenCount(Struct, frozen=True):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int
