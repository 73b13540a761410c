"""A step's result, from the outputs of the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.execution.logprobs import LOGPROB_TENSORS, read_logprobs
from engine.execution.prepared_step import PreparedStep
from engine.types import StepResult, TokenLogprobs


def build_result(step: PreparedStep, outputs: list[list[Any]], failures: Mapping[int, str]) -> StepResult:
    """Build the result of a step, in the order of its plan.

    outputs: the drawn tokens, their logprobs, then logprobs of prompts, as far as the step has them.
    failures: index among the drawn tokens -> reason why the answer cannot go on.
    """
    result = StepResult([None] * len(step.chunks))
    if step.sampling_inputs is not None:
        _add_samples(result, step, outputs, failures)
    for i in step.prompt_logprob_chunks:
        top_count = step.chunks[i].seq.request.params.prompt_logprobs or 0
        result.prompt_logprobs_by_chunk[step.order[i]] = _take_logprobs(outputs, [top_count] * len(outputs[0]))
    return result


def _add_samples(result: StepResult, step: PreparedStep, outputs: list[list[Any]], failures: Mapping[int, str]) -> None:
    """Add the drawn tokens and their logprobs to the result, and remove both from the front of `outputs`.

    Results are listed in the order of the plan, but the step may have run its chunks in another order: the i-th token
    belongs to chunk `plan_indices[i]` of the plan. A chunk that ends within a prompt draws no token.
    """
    assert step.sampling_inputs is not None
    plan_indices = [step.order[chunk_index] for chunk_index in step.batch_state.sampled_chunks]
    for plan_index, token in zip(plan_indices, outputs.pop(0), strict=True):
        result.sampled_tokens[plan_index] = token
    result.failure_by_chunk = {plan_indices[i]: reason for i, reason in failures.items()}
    logprob_rows = step.sampling_inputs.batch.logprobs
    if logprob_rows is not None:
        entries = _take_logprobs(outputs, logprob_rows.top_counts)
        result.logprobs_by_chunk = {
            plan_indices[row]: entry for row, entry in zip(logprob_rows.rows, entries, strict=True)
        }


def _take_logprobs(outputs: list[list[Any]], counts: list[int]) -> list[TokenLogprobs]:
    """Remove the tensors of one `compute_token_logprobs` from the outputs, and return their logprobs."""
    columns = outputs[:LOGPROB_TENSORS]
    del outputs[:LOGPROB_TENSORS]
    return read_logprobs(columns, counts)
