"""A step's result, from the outputs of the device."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any

from engine.execution.logprobs import LOGPROB_TENSORS, read_logprobs
from engine.execution.prepared_step import PreparedStep
from engine.types import StepResult, TokenLogprobs


def build_result(step: PreparedStep, outputs: list[list[Any]], failures: Mapping[int, str]) -> StepResult:
    """Build the result of a step, in the order of its plan.

    outputs: the drawn tokens, whether their logits are NaN, their logprobs, then logprobs of prompts, as far as the
    step has them.
    failures: index among the drawn tokens -> reason why the answer cannot go on.
    """
    result = StepResult([None] * len(step.chunks))
    if step.sampling_inputs is not None:
        _add_samples(result, step, outputs, failures)
    for i in step.prompt_logprob_chunks:
        top_count = step.chunks[i].seq.request.params.prompt_logprobs or 0
        result.prompt_logprobs_by_chunk[step.order[i]] = _pop_logprobs(outputs, [top_count] * len(outputs[0]))
    return result


def _add_samples(result: StepResult, step: PreparedStep, outputs: list[list[Any]], failures: Mapping[int, str]) -> None:
    """Add the tokens that a step drew to its result, with their logprobs and failures.

    Removes what belongs to the draws from the front of `outputs`. A step draws a token for each sequence, unless
    it computes only the middle of its prompt. `outputs` and `failures` are in the order of these draws. The result is
    in the order of the step's plan.
    """
    assert step.sampling_inputs is not None
    plan_index_by_draw = [step.order[chunk_index] for chunk_index in step.batch_state.sampled_chunks]
    drawn_tokens, nan_flags = outputs.pop(0), outputs.pop(0)
    for plan_index, token in zip(plan_index_by_draw, drawn_tokens, strict=True):
        result.sampled_tokens[plan_index] = token
    result.nan_chunks.update(compress(plan_index_by_draw, nan_flags))
    for draw, reason in failures.items():
        result.failure_by_chunk[plan_index_by_draw[draw]] = reason
    logprob_rows = step.sampling_inputs.batch.logprobs
    if logprob_rows is not None:  # some requests want logprobs
        logprobs = _pop_logprobs(outputs, logprob_rows.top_counts)
        for draw, token_logprobs in zip(logprob_rows.rows, logprobs, strict=True):
            result.logprobs_by_chunk[plan_index_by_draw[draw]] = token_logprobs


def _pop_logprobs(outputs: list[list[Any]], counts: list[int]) -> list[TokenLogprobs]:
    """Remove the tensors of one `compute_token_logprobs` from the outputs, and return their logprobs."""
    columns = outputs[:LOGPROB_TENSORS]
    del outputs[:LOGPROB_TENSORS]
    return read_logprobs(columns, counts)
