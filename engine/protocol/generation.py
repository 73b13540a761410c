"""Sequences of one HTTP request for the core, and their choices while they grow. No I/O.

A body with several prompts and n > 1 becomes one sequence for each sample: choice index = prompt * n + sample.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.output.choice import Choice
from engine.output.detokenizer import DetokenizerFactory
from engine.output.parser import OutputParserConfig
from engine.protocol.params import ModelLimits, make_sampling_params, read_answered_tokens
from engine.protocol.parsed_request import ParsedRequest
from engine.types import Constraint, KVSource, Request, SamplingParams
from prompts import ChatRequest, CompletionRequest
from prompts.errors import bad_value


@dataclass(slots=True)
class Generation:
    """State of one HTTP request while it is answered: its prompts, its answers, and the engine's requests for them.

    A request may have several prompts, and ask for `n` answers (samples) to each.
    """

    id: str
    """The answer's id, which the client sees."""
    model: str
    body: ChatRequest | CompletionRequest
    prompts: list[list[int]]
    """Token ids of each prompt."""
    n: int
    """Number of answers to each prompt."""
    choices: list[Choice]
    """The answers: `choices[i * n + j]` is the j-th answer to `prompts[i]`."""
    requests: list[Request]
    """Requests to the engine core: one for each choice, in the same order."""
    created: int = field(default_factory=lambda: int(time.time()))
    is_prompt_only: bool = False
    """Whether the prompt is only to be cached or echoed. The one token that is generated nevertheless is dropped."""

    @property
    def parser_config(self) -> OutputParserConfig:
        """How the text of each choice is parsed."""
        return self.choices[0].parser.config

    def get_choice_prompt(self, choice: Choice) -> list[int]:
        return self.prompts[choice.index // self.n]

    def compute_usage(self, choice: Choice | None = None) -> dict[str, Any]:
        """Return the token counts so far, for the `usage` field of a response: of all choices, or of one alone.

        A prompt counts once, however many answers it has. Reasoning is counted if the model's format is known.
        """
        choices = self.choices if choice is None else [choice]
        first_answers = choices[:: self.n]  # the first answer to each prompt
        prompt_tokens = sum(len(self.get_choice_prompt(answer)) for answer in first_answers)
        completion_tokens = sum(answer.completion_tokens for answer in choices)
        usage = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in first_answers)},
        }
        if self.parser_config.reasoning_format:
            reasoning_tokens = sum(answer.reasoning_tokens for answer in choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return usage


def make_generation(
    parsed_request: ParsedRequest,
    *,
    id: str,
    request_prefix: str,
    model: str,
    limits: ModelLimits,
    factory: DetokenizerFactory,
    constraint: Constraint | None = None,
    kv_source: KVSource | None = None,
) -> Generation:
    """Create the state of an HTTP request: the engine's requests, and a choice for each answer. Raises RequestError.

    `id`: id that the client sees. `request_prefix`: prefix that makes the engine's request ids unique. `constraint`:
    checked grammar of the format that the answers must match. `kv_source`: engine from which cached blocks of the
    prompts may be fetched.
    """
    body, prompts = parsed_request.body, parsed_request.prompts
    # If a router moved a request here, its prompt ends with the tokens that another engine has already generated.
    answered_tokens = read_answered_tokens(body, prompts)
    requests: list[Request] = []
    for prompt in prompts:
        request = Request(
            request_id=request_prefix,
            token_ids=prompt,
            params=make_sampling_params(body, limits, len(prompt) - answered_tokens, constraint),
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
            resumed_output_len=answered_tokens,
            kv_source=kv_source,
        )
        requests += make_sample_requests(request, request_prefix, len(requests))
    choices = [
        Choice(
            index,
            request.params,
            factory,
            keeps_text=not body.stream,
            skip_special_tokens=body.skip_special_tokens is not False,
            parser_config=parsed_request.parser_config,
        )
        for index, request in enumerate(requests)
    ]
    if answered_tokens:
        choices[0].resume(prompts[0][-answered_tokens:])
        if choices[0].finish_reason is not None:
            raise bad_value("answered_tokens", answered_tokens, "tokens of an answer that no stop string has ended")
        prompts = [prompts[0][:-answered_tokens]]
    return Generation(
        id=id,
        model=model,
        body=body,
        prompts=prompts,
        n=body.n or 1,
        choices=choices,
        requests=requests,
        is_prompt_only=parsed_request.is_prompt_only,
    )


def make_sample_requests(request: Request, id_prefix: str, first_choice_index: int) -> list[Request]:
    """Return the engine's requests for the n samples of one prompt: copies of `request`, each with its own id.

    With the prefix "a7", n = 2 and `first_choice_index` = 4 their ids are "a7-4" and "a7-5". If the client gives a
    seed, sample i has seed + i, so that the samples differ.
    """
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{id_prefix}-{first_choice_index + sample}",
            params=_offset_seed(request.params, sample),
        )
        for sample in range(request.params.n)
    ]


def _offset_seed(params: SamplingParams, sample: int) -> SamplingParams:
    """Return the parameters with a seed that is greater by `sample`; after the largest int64 comes the smallest."""
    if params.seed is None:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + sample + 2**63) % 2**64 - 2**63)
