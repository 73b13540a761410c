"""From a checked OpenAI body to the engine's SamplingParams: defaults, this model's limits, errors that name the field.

`prompts` has checked types and ranges; what is left needs to know the model: its context length, its vocabulary and the
defaults of its generation_config.json. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from engine.types import SamplingParams
from prompts.errors import RequestError, bad_value
from prompts.schemas import ChatRequest, CompletionRequest

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64

_PLAIN_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
)
"""Fields that mean the same in a body and in SamplingParams."""


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What of the loaded model decides whether parameters can be served."""

    max_model_len: int
    vocab_size: int
    default_sampling: Mapping[str, float | int] = {}


def sampling_params(request: ChatRequest | CompletionRequest, limits: ModelLimits, prompt_len: int) -> SamplingParams:
    """The parameters of one sequence with a prompt of `prompt_len` tokens. Raises RequestError."""
    fields: dict[str, Any] = {
        name: value for name, value in limits.default_sampling.items() if name in _PLAIN_FIELDS or name == "top_k"
    }
    for name in _PLAIN_FIELDS:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.top_k is not None:
        fields["top_k"] = request.top_k
    if fields.get("top_k", 0) < 0:
        fields["top_k"] = 0  # vLLM's other word for "all"
    n = request.n or 1
    if n > MAX_N:
        raise bad_value("n", n, f"at most {MAX_N}")
    if n > 1 and fields.get("temperature", 1.0) == 0:
        raise bad_value("n", n, "1 where temperature is 0: greedy samples would all be the same")
    params = SamplingParams(
        **fields,
        n=n,
        max_tokens=_max_tokens(request, limits, prompt_len),
        stop=_stops(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=_logit_bias(request, limits),
        logprobs=_logprobs(request),
        prompt_logprobs=_prompt_logprobs(request),
    )
    if params.min_tokens > (params.max_tokens or 0):
        raise bad_value("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    return params


def echoes_only(request: ChatRequest | CompletionRequest) -> bool:
    """A completion that asks for its prompt back (usually with logprobs) and for no new token."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: v >= 0, "at least 0"),
    "top_p": (lambda v: 0 < v <= 1, "above 0, at most 1"),
    "min_p": (lambda v: 0 <= v <= 1, "0 to 1"),
    "top_k": (lambda v: v >= -1, "-1 or 0 for all, or at least 1"),
    "repetition_penalty": (lambda v: v > 0, "above 0"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "-2 to 2"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "-2 to 2"),
    "max_tokens": (lambda v: v is None or v >= 1, "at least 1, or None"),
    "min_tokens": (lambda v: v >= 0, "at least 0"),
    "n": (lambda v: 1 <= v <= MAX_N, f"1 to {MAX_N}"),
    "logprobs": (lambda v: v is None or 0 <= v <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or None"),
    "prompt_logprobs": (lambda v: v is None or 0 <= v <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or None"),
    "stop": (all, "strings of at least one character"),
}


def check_params(params: SamplingParams, limits: ModelLimits) -> SamplingParams:
    """Parameters that a program made (not an HTTP body): types, ranges, and lists where the engine has tuples.

    Raises RequestError.
    """
    stop: object = params.stop
    fields = msgspec.structs.asdict(params)
    fields["stop"] = (stop,) if isinstance(stop, str) else stop
    try:
        params = msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"SamplingParams: {error}", param=None) from None
    for name, (holds, expectation) in _RANGES.items():
        value = getattr(params, name)
        if not holds(value):
            raise bad_value(name, value, expectation)
    for token_id in params.logit_bias or ():
        if not 0 <= token_id < limits.vocab_size:
            raise bad_value("logit_bias", token_id, f"token ids from 0 to {limits.vocab_size - 1}")
    return msgspec.structs.replace(params, top_k=max(params.top_k, 0))


def fit_max_tokens(params: SamplingParams, limits: ModelLimits, prompt_len: int) -> SamplingParams:
    """None becomes all the room the model has; more than that is cut to it."""
    room = limits.max_model_len - prompt_len
    wanted = room if params.max_tokens is None else min(params.max_tokens, room)
    return params if wanted == params.max_tokens else msgspec.structs.replace(params, max_tokens=wanted)


def check_prompt(token_ids: list[int], limits: ModelLimits, param: str) -> None:
    """Whether the model can read the prompt and answer with at least one token. Raises RequestError."""
    if not token_ids:
        raise RequestError(f"{param}: the prompt has no tokens, expected at least one", param=param)
    largest = max(token_ids)
    if largest >= limits.vocab_size:
        raise bad_value(param, largest, f"token ids below the vocabulary's size ({limits.vocab_size})")
    if len(token_ids) >= limits.max_model_len:
        raise RequestError(
            f"{param}: the prompt has {len(token_ids)} tokens, but this model's maximum context length (max_model_len) "
            f"is {limits.max_model_len} tokens, of which at least one is for the answer",
            param=param,
            code="context_length_exceeded",
        )


def _max_tokens(request: ChatRequest | CompletionRequest, limits: ModelLimits, prompt_len: int) -> int:
    room = limits.max_model_len - prompt_len
    name, wanted = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        name, wanted = "max_completion_tokens", request.max_completion_tokens
    if echoes_only(request):
        return 1  # the step that reads the prompt samples one token; it is dropped
    if wanted is None:
        default = limits.default_sampling.get("max_tokens")
        if default is None and isinstance(request, CompletionRequest):
            default = 16
        return room if default is None else max(1, min(int(default), room))
    if wanted < 1:
        raise bad_value(name, wanted, "at least 1")
    if wanted > room:
        raise RequestError(
            f"{name}: got {wanted}, but the prompt has {prompt_len} tokens and this model's maximum context length "
            f"(max_model_len) is {limits.max_model_len} tokens: expected at most {room}",
            param=name,
            code="context_length_exceeded",
        )
    return wanted


def _stops(request: ChatRequest | CompletionRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: got {len(stops)} strings, expected at most {MAX_STOPS}", param="stop")
    return stops


def _logit_bias(request: ChatRequest | CompletionRequest, limits: ModelLimits) -> dict[int, float] | None:
    if not request.logit_bias:
        return None
    for token_id in request.logit_bias:
        if not 0 <= token_id < limits.vocab_size:
            raise bad_value("logit_bias", token_id, f"token ids from 0 to {limits.vocab_size - 1}")
    return request.logit_bias


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return _logprob_count("logprobs", request.logprobs)
    if not request.logprobs:
        return None
    return _logprob_count("top_logprobs", request.top_logprobs) or 0


def _prompt_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    asked = _logprob_count("prompt_logprobs", request.prompt_logprobs)
    if asked is not None and request.stream:
        raise bad_value("prompt_logprobs", asked, "none where stream is true")
    if asked is None and isinstance(request, CompletionRequest) and request.echo:
        return _logprobs(request)
    return asked


def _logprob_count(param: str, value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise bad_value(param, value, f"0 to {MAX_LOGPROBS}")
    return value
