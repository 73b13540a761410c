"""A step's result, from the outputs of the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress, islice
from typing import Any

from engine.execution.logprobs import LOGPROB_TENSORS, read_logprobs
from engine.execution.prepared_step import PreparedStep
from engine.execution.sampler import SamplingInputs
from engine.types import StepResult


def build_result(step: PreparedStep, outputs: list[list[Any]]) -> StepResult:
    """Build the result of a step from what the device has computed, so that the scheduler can apply it.

    `outputs`: lists of numbers. The lists of the drawn tokens come first (`_add_drawn_tokens`), then LOGPROB_TENSORS
    lists for each prompt of which logprobs are wanted. A tensor-parallel rank that draws no tokens has no outputs.
    """
    result = StepResult([None] * len(step.chunks))
    if not outputs:
        return result
    unread_outputs = iter(outputs)
    if step.sampling_inputs is not None:
        # A step draws one token for each of `sampled_chunks`, and none for a chunk that ends within its prompt.
        plan_indices = [step.order[chunk_index] for chunk_index in step.batch_state.sampled_chunks]
        _add_drawn_tokens(result, plan_indices, step.sampling_inputs, unread_outputs)
    for chunk_index in step.prompt_logprob_chunks:
        top_count = step.chunks[chunk_index].seq.request.params.prompt_logprobs or 0
        columns = list(islice(unread_outputs, LOGPROB_TENSORS))
        prompt_logprobs = read_logprobs(columns, [top_count] * len(columns[0]))
        result.prompt_logprobs_by_chunk[step.order[chunk_index]] = prompt_logprobs
    return result


def _add_drawn_tokens(
    result: StepResult, plan_indices: list[int], inputs: SamplingInputs, outputs: Iterator[list[Any]]
) -> None:
    """Add the drawn tokens to a step's result, with what is known of each. Takes their lists from `outputs`.

    Token i was drawn for the chunk with index `plan_indices[i]` in the step's plan. If two tokens are drawn, for chunks
    0 and 4, the lists are

        [7, 3]            the drawn tokens: chunk 0 gets token 7, chunk 4 gets token 3
        [False, False]    whether the logits of each were NaN
        ...               LOGPROB_TENSORS lists of logprobs, if a request wants those of its answer
    """
    drawn_tokens, nan_flags = next(outputs), next(outputs)
    for plan_index, token in zip(plan_indices, drawn_tokens, strict=True):
        result.sampled_tokens[plan_index] = token
    result.nan_chunks.update(compress(plan_indices, nan_flags))
    if inputs.token_masks is not None:  # some answers must match a grammar, which may have failed
        for draw, reason in inputs.token_masks.result().failures.items():
            result.failure_by_chunk[plan_indices[draw]] = reason
    logprob_rows = inputs.batch.logprobs
    if logprob_rows is not None:
        logprobs = read_logprobs(list(islice(outputs, LOGPROB_TENSORS)), logprob_rows.top_counts)
        for draw, token_logprobs in zip(logprob_rows.rows, logprobs, strict=True):
            result.logprobs_by_chunk[plan_indices[draw]] = token_logprobs
