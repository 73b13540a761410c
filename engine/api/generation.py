"""One HTTP request to a completion endpoint as sequences for the core, and their choices as they grow.

Fans a body with several prompts and n > 1 out into sequences (choice index = prompt * n + sample) and adds up usage.
Pure: ids, prompts and parameters in, `Request`s out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.api.choice import PLAIN_TEXT_CONFIG, Choice, new_choice
from engine.api.detokenizer import DetokenizerFactory
from engine.api.output_parser import OutputParserConfig
from engine.api.params import ModelLimits, check_answered, echoes_only, sampling_params
from engine.api.response_types import Usage, make_usage
from engine.types import Constraint, Request, SamplingParams
from prompts import ChatRequest, CompletionRequest
from prompts.errors import bad_value


@dataclass(slots=True)
class Generation:
    """`prompts[i]` are token ids; `choices[i * n + j]` continues prompt i."""

    id: str
    model: str
    body: ChatRequest | CompletionRequest
    prompts: list[list[int]]
    n: int
    choices: list[Choice]
    requests: list[Request]
    created: int = field(default_factory=lambda: int(time.time()))
    echo_only: bool = False
    plan: OutputParserConfig = PLAIN_TEXT_CONFIG
    by_id: dict[str, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_id = {request.request_id: choice for request, choice in zip(self.requests, self.choices)}

    def head(self) -> dict[str, Any]:
        """What every answer and every chunk of one begins with."""
        return {"id": self.id, "created": self.created, "model": self.model}

    def prompt_of(self, choice: Choice) -> list[int]:
        return self.prompts[choice.index // self.n]

    def usage(self) -> Usage:
        """Of all choices so far. A prompt counts once, however many samples continue it."""
        return make_usage(
            sum(map(len, self.prompts)),
            0 if self.echo_only else sum(choice.completion_tokens for choice in self.choices),
            sum(choice.cached_tokens for choice in self.choices[:: self.n]),
            sum(choice.thought_tokens for choice in self.choices) if self.plan.reasoning_format else None,
        )

    def usage_of(self, choice: Choice) -> Usage:
        """Of one choice, for `continuous_usage_stats`."""
        thought = choice.thought_tokens if self.plan.reasoning_format else None
        return make_usage(len(self.prompt_of(choice)), choice.completion_tokens, choice.cached_tokens, thought)


def plan_generation(
    body: ChatRequest | CompletionRequest,
    prompts: list[list[int]],
    *,
    id: str,
    unique: str,
    model: str,
    limits: ModelLimits,
    factory: DetokenizerFactory,
    plan: OutputParserConfig = PLAIN_TEXT_CONFIG,
    constraint: Constraint | None = None,
) -> Generation:
    """Check the parameters against the model and lay out the sequences of prompts that fit it. Raises RequestError.

    `unique` makes the sequences' names unique in the core; `id` is the client's to choose.
    """
    skips_special = body.skip_special_tokens is not False
    requests: list[Request] = []
    answered = check_answered(body, prompts)
    for prompt in prompts:
        params = sampling_params(body, limits, len(prompt) - answered, constraint)
        requests += samples(unique, len(requests), prompt, params, body.cache_salt, body.priority or 0, answered)
    choices = [
        new_choice(index, request.params, factory, keep=not body.stream, skip_special_tokens=skips_special, plan=plan)
        for index, request in enumerate(requests)
    ]
    if answered:
        choices[0].go_on(prompts[0][-answered:])
        if choices[0].finish_reason is not None:
            raise bad_value("answered_tokens", answered, "tokens of an answer that no stop string has ended")
        prompts = [prompts[0][:-answered]]
    return Generation(
        id=id, model=model, body=body, prompts=prompts, n=body.n or 1, choices=choices, requests=requests,
        echo_only=echoes_only(body), plan=plan,
    )  # fmt: skip


def samples(
    name: str,
    first: int,
    prompt: list[int],
    params: SamplingParams,
    cache_salt: str | None,
    priority: int,
    answered: int = 0,
) -> list[Request]:
    """The n sequences of one prompt, numbered from `first`: of a seed, each sample takes the next."""
    return [
        Request(
            request_id=f"{name}-{first + sample}",
            token_ids=prompt,
            params=params if params.seed is None else msgspec.structs.replace(params, seed=_next(params.seed, sample)),
            cache_salt=cache_salt,
            priority=priority,
            answered=answered,
        )
        for sample in range(params.n)
    ]


def _next(seed: int, sample: int) -> int:
    """Samplers look at 64 bits: after the largest seed comes the smallest."""
    return (seed + sample + 2**63) % 2**64 - 2**63
