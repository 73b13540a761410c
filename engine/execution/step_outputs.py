"""A step's result, from the outputs of the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress, islice
from typing import Any

from engine.execution.logprobs import LOGPROB_TENSORS, read_logprobs
from engine.execution.prepared_step import PreparedStep
from engine.types import StepResult


def build_result(step: PreparedStep, outputs: list[list[Any]]) -> StepResult:
    """Build the result of a step, in the order of its plan.

    `outputs`: columns, each with a value for every draw: the drawn tokens, whether their logits are NaN, and if wanted
    LOGPROB_TENSORS columns of logprobs. As many columns follow for each prompt of which logprobs are wanted. On a rank
    that does not sample, there are none.
    """
    result = StepResult([None] * len(step.chunks))
    if not outputs:
        return result
    columns = iter(outputs)
    if step.sampling_inputs is not None:
        _add_samples(result, step, columns)
    for i in step.prompt_logprob_chunks:
        top_count = step.chunks[i].seq.request.params.prompt_logprobs or 0
        logprob_columns = list(islice(columns, LOGPROB_TENSORS))
        row_count = len(logprob_columns[0])
        result.prompt_logprobs_by_chunk[step.order[i]] = read_logprobs(logprob_columns, [top_count] * row_count)
    return result


def _add_samples(result: StepResult, step: PreparedStep, columns: Iterator[list[Any]]) -> None:
    """Add the tokens that a step drew to its result, with their logprobs and failures.

    Takes what belongs to the draws from `columns`. A step draws a token for each sequence, unless it computes only the
    middle of its prompt. The draws are in the order of `sampled_chunks`, the result is in the order of the plan.
    """
    inputs = step.sampling_inputs
    assert inputs is not None
    plan_index_by_draw = [step.order[chunk_index] for chunk_index in step.batch_state.sampled_chunks]
    drawn_tokens, nan_flags = next(columns), next(columns)
    for plan_index, token in zip(plan_index_by_draw, drawn_tokens, strict=True):
        result.sampled_tokens[plan_index] = token
    result.nan_chunks.update(compress(plan_index_by_draw, nan_flags))
    if inputs.token_masks is not None:
        for draw, reason in inputs.token_masks.result().failures.items():
            result.failure_by_chunk[plan_index_by_draw[draw]] = reason
    logprob_rows = inputs.batch.logprobs
    if logprob_rows is not None:  # some requests want logprobs
        logprobs = read_logprobs(list(islice(columns, LOGPROB_TENSORS)), logprob_rows.top_counts)
        for draw, token_logprobs in zip(logprob_rows.rows, logprobs, strict=True):
            result.logprobs_by_chunk[plan_index_by_draw[draw]] = token_logprobs
