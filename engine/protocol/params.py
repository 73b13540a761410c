"""Check parameters and prompts against the loaded model, for HTTP bodies and for `LLM`. No I/O.

`prompts.chat_completions` checks types and ranges. The checks here need the model: its context length, its vocabulary
and the defaults of its generation_config.json. They run before anything is queued or computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from engine.types import Constraint, SamplingParams
from prompts.chat_completions import ChatRequest, CompletionRequest
from prompts.errors import RequestError, bad_value, describe_context_overflow, field_error
from simulation.spec import ScriptTurn

_SHARED_FIELDS = set(SamplingParams.__struct_fields__) - {
    "n", "max_tokens", "stop", "stop_token_ids", "logit_bias", "logprobs", "prompt_logprobs", "constraint",
    "structured_outputs",
}  # fmt: skip
"""Fields that SamplingParams takes from a body as they are. The other ones are converted or computed."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the loaded model by which requests are validated and completed with defaults."""

    max_model_len: int
    vocab_size: int
    default_sampling: Mapping[str, float | int] = {}
    """Defaults of sampling parameters, from the model's generation_config.json."""
    call_format: str | None = None
    """Name of the format in which the model writes tool calls; None: calls are left in the text."""
    reasoning_format: str | None = None
    """Name of the format in which the model writes reasoning; None: reasoning is left in the text."""
    constraint_refusal: str | None = None
    """Reason why structured outputs are refused; None: they are served."""
    script: tuple[ScriptTurn, ...] = ()
    """Answers that a simulated engine gives, in turn; empty: its answers are random."""
    has_transfers: bool = False
    """Whether the engine fetches KV blocks from other engines. Otherwise `kv_transfer_params` are ignored."""


def make_sampling_params(
    request: ChatRequest | CompletionRequest, limits: ModelLimits, prompt_len: int, constraint: Constraint | None = None
) -> SamplingParams:
    """Convert a request's fields to sampling parameters, for a prompt of `prompt_len` tokens, and check them.

    A field that the request leaves out has the model's default (generation_config.json), or that of SamplingParams.
    Raises RequestError.
    """
    fields: dict[str, Any] = {name: value for name, value in limits.default_sampling.items() if name in _SHARED_FIELDS}
    for name in _SHARED_FIELDS:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    params = SamplingParams(
        **fields,
        n=request.n or 1,
        max_tokens=_compute_max_tokens(request, limits, prompt_len),
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=request.logit_bias or None,
        logprobs=_get_logprobs(request),
        prompt_logprobs=_get_prompt_logprobs(request),
        constraint=constraint,
    )
    return check_params(params, limits)


def is_echo_only_request(request: ChatRequest | CompletionRequest) -> bool:
    """Return whether a request wants its prompt back, usually with logprobs, and no new token."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0


def read_answered_tokens(request: ChatRequest | CompletionRequest, prompts: list[list[int]]) -> int:
    """Return the number of tokens at the end of the prompt that another engine has already generated as its answer.

    A router sends such a request to continue an answer of an engine that failed; the number of any other request is 0.
    Raises RequestError if there are several prompts or answers, if no prompt is left before these tokens, or if
    max_tokens allows no token after them.
    """
    answered_tokens = request.answered_tokens or 0
    if not answered_tokens:
        return 0
    has_one_answer = len(prompts) == 1 and (request.n or 1) == 1
    if not has_one_answer or request.echo:
        raise bad_value("answered_tokens", answered_tokens, "one prompt of which one answer is to be continued")
    _, max_tokens = _get_max_tokens(request)
    prompt_len = len(prompts[0])
    limit = min(prompt_len, max_tokens or prompt_len) - 1
    if answered_tokens > limit:
        expected = f"at most {limit}: fewer than the prompt's, and than max_tokens"
        raise bad_value("answered_tokens", answered_tokens, expected)
    return answered_tokens


def check_params(params: SamplingParams, limits: ModelLimits) -> SamplingParams:
    """Check the types and ranges of sampling parameters, and that token ids are in the vocabulary. Raises RequestError.

    Returns the parameters in their canonical form: a caller may have given lists instead of tuples, or one stop string.
    """
    stop: object = params.stop
    fields = msgspec.structs.asdict(params)
    fields["stop"] = (stop,) if isinstance(stop, str) else stop
    try:
        params = msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        raise _make_field_error(str(error), fields) from None
    _check_vocabulary("stop_token_ids", params.stop_token_ids, limits)
    _check_vocabulary("logit_bias", params.logit_bias or (), limits)
    if params.n > 1 and params.temperature == 0:
        raise bad_value("n", params.n, "1 where temperature is 0: greedy samples would all be the same")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise bad_value("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    if params.top_k < 0:  # no limit, as 0
        return msgspec.structs.replace(params, top_k=0)
    return params


def _make_field_error(message: str, fields: Mapping[str, Any]) -> RequestError:
    """Return msgspec's "Expected `int` >= 0 - at `$.top_k`" as an error with the field's name and value."""
    expectation, _, path = message.replace("`", "").partition(" - at ")
    name = path.removeprefix("key in ").removeprefix("$.").partition("[")[0]
    return bad_value(name, fields.get(name), expectation.removeprefix("Expected "))


def _check_vocabulary(param: str, token_ids: Iterable[int], limits: ModelLimits) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise bad_value(param, token_id, f"token ids from 0 to {limits.vocab_size - 1}")


def fit_max_tokens(params: SamplingParams, limits: ModelLimits, prompt_len: int) -> SamplingParams:
    """Return the parameters with `max_tokens` at most the rest of the context; None becomes all of it."""
    room = limits.max_model_len - prompt_len
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    return params if max_tokens == params.max_tokens else msgspec.structs.replace(params, max_tokens=max_tokens)


def check_prompt(token_ids: list[int], limits: ModelLimits, param: str, path: str = "") -> None:
    """Raise RequestError unless the model can read the prompt and answer with at least one token.

    `param`: field of the prompt; `path`: path of the API, which decides the words of the error.
    """
    if not token_ids:
        raise field_error(param, "the prompt has no tokens, expected at least one")
    _check_vocabulary(param, (min(token_ids), max(token_ids)), limits)
    if len(token_ids) >= limits.max_model_len:
        # Clients recognise these words and shorten the conversation: a field's name before them would hide them.
        message = describe_context_overflow(path, len(token_ids), limits.max_model_len)
        raise RequestError(message, param=param, code="context_length_exceeded")


def _compute_max_tokens(request: ChatRequest | CompletionRequest, limits: ModelLimits, prompt_len: int) -> int:
    """Return how many tokens may be generated: the request's limit or the default, but no more than fit the context."""
    if is_echo_only_request(request):
        return 1  # the step that reads the prompt samples a token, which is dropped
    name, max_tokens = _get_max_tokens(request)
    if max_tokens is not None and max_tokens < 1:
        raise bad_value(name, max_tokens, "at least 1")
    remaining_context = limits.max_model_len - prompt_len
    if max_tokens is None:
        max_tokens = _get_default_max_tokens(request, limits) or remaining_context
    return min(max_tokens, remaining_context)


def _get_max_tokens(request: ChatRequest | CompletionRequest) -> tuple[str, int | None]:
    """Return (field, value) of the request's limit on generated tokens."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _get_default_max_tokens(request: ChatRequest | CompletionRequest, limits: ModelLimits) -> int | None:
    """Return the limit for a request without one: the model's, OpenAI's for a completion, or None for no limit."""
    default = limits.default_sampling.get("max_tokens")
    if default is not None:
        return max(1, int(default))
    is_new_completion = isinstance(request, CompletionRequest) and not request.answered_tokens
    return DEFAULT_COMPLETION_TOKENS if is_new_completion else None


def _get_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return request.top_logprobs or 0 if request.logprobs else None


def _get_prompt_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is not None and request.stream:
        raise bad_value("prompt_logprobs", prompt_logprobs, "none where stream is true")
    if prompt_logprobs is None and isinstance(request, CompletionRequest) and request.echo:
        return request.logprobs
    return prompt_logprobs
