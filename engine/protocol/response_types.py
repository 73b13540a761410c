"""The shapes of the answers of the OpenAI endpoints, and nothing else: structs that encode to the JSON clients read.

Fields that only vLLM has appear where they were asked for (`token_ids`, `prompt_token_ids`, `prompt_logprobs`); what
OpenAI's own answers always hold is always there.
"""

from __future__ import annotations

from msgspec import UNSET, Raw, Struct, UnsetType


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
    """`reasoning_tokens`: None where no thought is told apart."""
    return Usage(
        prompt_tokens,
        prompt_tokens + completion_tokens,
        completion_tokens,
        PromptTokensDetails(cached_tokens),
        UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens),
    )


class ChatLogprobs(Struct, frozen=True):
    content: Raw
    """A list, which `engine.protocol.logprobs` wrote position by position."""


class CompletionLogprobs(Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: Raw
    """A list of objects from token to logprob, or null."""


StopReason = str | int | None


class Function(Struct, frozen=True):
    """Function of a tool call; in a stream the name comes first, then the arguments in pieces."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct, frozen=True, kw_only=True):
    """A whole one has no index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET
    """The thought, under vLLM's name; the next is DeepSeek's and older vLLMs'."""
    reasoning_content: str | UnsetType | None = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET


class _ResponseBase(Struct, frozen=True, kw_only=True):
    id: str
    object: str
    created: int
    model: str


class ChatCompletion(_ResponseBase, frozen=True, kw_only=True):
    object: str = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: Raw | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(_ResponseBase, frozen=True, kw_only=True):
    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """Choice of a whole completion, or of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = None
    prompt_logprobs: Raw | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(_ResponseBase, frozen=True, kw_only=True):
    """Whole, and a chunk of one."""

    object: str = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "blockcast"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct, frozen=True):
    prompt: str
