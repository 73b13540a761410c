"""A step's result, from the outputs of the device."""

from __future__ import annotations

from itertools import compress, islice
from typing import Any

from engine.execution.logprobs import LOGPROB_TENSORS, read_logprobs
from engine.execution.prepared_step import PreparedStep
from engine.types import StepResult


def build_result(step: PreparedStep, outputs: list[list[Any]]) -> StepResult:
    """Build the result of a step from what the device has computed. Chunks have their index in the step's plan.

    `outputs` are lists of numbers, one after the other. If the step draws two tokens, they begin with

        [7, 3]            the drawn tokens
        [False, False]    whether the logits of each were NaN
        ...               LOGPROB_TENSORS lists of logprobs, if a request wants those of its answer

    For each prompt of which logprobs are wanted, LOGPROB_TENSORS lists follow. A tensor-parallel rank that draws no
    tokens has no outputs.
    """
    result = StepResult([None] * len(step.chunks))
    if not outputs:
        return result
    unread_outputs = iter(outputs)
    inputs = step.sampling_inputs
    if inputs is not None:
        # A step draws one token for each of `sampled_chunks`, and none for a chunk that ends within its prompt.
        plan_index_by_draw = [step.order[chunk_index] for chunk_index in step.batch_state.sampled_chunks]
        drawn_tokens, nan_flags = next(unread_outputs), next(unread_outputs)
        for plan_index, token in zip(plan_index_by_draw, drawn_tokens, strict=True):
            result.sampled_tokens[plan_index] = token
        result.nan_chunks.update(compress(plan_index_by_draw, nan_flags))
        if inputs.token_masks is not None:  # some answers must match a grammar, which may have failed
            for draw, reason in inputs.token_masks.result().failures.items():
                result.failure_by_chunk[plan_index_by_draw[draw]] = reason
        logprob_rows = inputs.batch.logprobs
        if logprob_rows is not None:
            logprobs = read_logprobs(list(islice(unread_outputs, LOGPROB_TENSORS)), logprob_rows.top_counts)
            for draw, token_logprobs in zip(logprob_rows.rows, logprobs, strict=True):
                result.logprobs_by_chunk[plan_index_by_draw[draw]] = token_logprobs
    for i in step.prompt_logprob_chunks:
        top_count = step.chunks[i].seq.request.params.prompt_logprobs or 0
        columns = list(islice(unread_outputs, LOGPROB_TENSORS))
        result.prompt_logprobs_by_chunk[step.order[i]] = read_logprobs(columns, [top_count] * len(columns[0]))
    return result
