"""Triton kernels: penalties of rows of logits, and counting what was drawn; see `kernels.counts`. One program a row."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row_capacity"])
def penalise_rows(
    logits_ptr, tokens_ptr, values_ptr, lengths_ptr, logits_rows_ptr, count_rows_ptr, repetition_ptr, presence_ptr,
    frequency_ptr,
    logits_row_stride, row_capacity, ALL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Apply the penalties of one row to its logits, in place. The count codes are those of `kernels.counts`.

    ALL: row i of the batch is row i of the logits, else row logits_rows_ptr[i].
    """
    batch_row = tl.program_id(0).to(tl.int64)
    logits_row = batch_row
    if not ALL:
        logits_row = tl.load(logits_rows_ptr + batch_row)
    count_row = tl.load(count_rows_ptr + batch_row)
    length = tl.load(lengths_ptr + count_row).to(tl.int32)
    repetition = tl.load(repetition_ptr + batch_row)
    presence = tl.load(presence_ptr + batch_row)
    frequency = tl.load(frequency_ptr + batch_row)
    for start in range(0, length, BLOCK):
        entry_index = start + tl.arange(0, BLOCK)
        is_used = entry_index < length
        token = tl.load(tokens_ptr + count_row * row_capacity + entry_index, mask=is_used, other=0)
        value = tl.load(values_ptr + count_row * row_capacity + entry_index, mask=is_used, other=0)
        logit_ptrs = logits_ptr + logits_row * logits_row_stride + token
        old_logit = tl.load(logit_ptrs, mask=is_used, other=0.0)
        new_logit = tl.where(
            value > 0, tl.where(old_logit > 0, old_logit / repetition, old_logit * repetition), old_logit
        )
        output_count = (value >> 1).to(tl.float32)
        tl.store(
            logit_ptrs, new_logit - (frequency * output_count + tl.where(output_count > 0, presence, 0.0)), mask=is_used
        )


@triton.jit(do_not_specialize=["row_capacity"])
def count_sampled_rows(
    sampled_ptr, tokens_ptr, values_ptr, lengths_ptr, logits_rows_ptr, count_rows_ptr, row_capacity,
    ALL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Count the token that was drawn for one row: add 2 to its count code, or append it as a new token.

    ALL: as in `penalise_rows`.
    """
    batch_row = tl.program_id(0).to(tl.int64)
    logits_row = batch_row
    if not ALL:
        logits_row = tl.load(logits_rows_ptr + batch_row)
    count_row = tl.load(count_rows_ptr + batch_row)
    length = tl.load(lengths_ptr + count_row).to(tl.int32)
    sampled_token = tl.load(sampled_ptr + logits_row)
    match_count = 0
    for start in range(0, length, BLOCK):
        entry_index = start + tl.arange(0, BLOCK)
        is_used = entry_index < length
        token = tl.load(tokens_ptr + count_row * row_capacity + entry_index, mask=is_used, other=0)
        value = tl.load(values_ptr + count_row * row_capacity + entry_index, mask=is_used, other=0)
        is_match = is_used & (token == sampled_token)
        tl.store(values_ptr + count_row * row_capacity + entry_index, value + 2, mask=is_match)
        match_count += tl.sum(is_match.to(tl.int32), 0)
    is_new = match_count == 0
    tl.store(tokens_ptr + count_row * row_capacity + length, sampled_token, mask=is_new)
    tl.store(values_ptr + count_row * row_capacity + length, 2, mask=is_new)
    tl.store(lengths_ptr + count_row, (length + 1).to(tl.int64), mask=is_new)
