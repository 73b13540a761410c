"""Triton kernels: penalties of rows of logits, and counting what was drawn; see `kernels.counts`. One program a row."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["room"])
def penalise_rows(
    logits_ptr, tokens_ptr, values_ptr, lengths_ptr, at_ptr, rows_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    logits_row, room, ALL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """ALL: row i of the logits is the i-th; else the at_ptr[i]-th."""
    i = tl.program_id(0).to(tl.int64)
    at = i
    if not ALL:
        at = tl.load(at_ptr + i)
    row = tl.load(rows_ptr + i)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    repetition = tl.load(repetition_ptr + i)
    presence = tl.load(presence_ptr + i)
    frequency = tl.load(frequency_ptr + i)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < length
        token = tl.load(tokens_ptr + row * room + place, mask=inside, other=0)
        value = tl.load(values_ptr + row * room + place, mask=inside, other=0)
        logit = logits_ptr + at * logits_row + token
        old_logit = tl.load(logit, mask=inside, other=0.0)
        new_logit = tl.where(
            value > 0, tl.where(old_logit > 0, old_logit / repetition, old_logit * repetition), old_logit
        )
        count = (value >> 1).to(tl.float32)
        tl.store(logit, new_logit - (frequency * count + tl.where(count > 0, presence, 0.0)), mask=inside)


@triton.jit(do_not_specialize=["room"])
def count_rows(
    sampled_ptr, tokens_ptr, values_ptr, lengths_ptr, at_ptr, rows_ptr, room, ALL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    at = i
    if not ALL:
        at = tl.load(at_ptr + i)
    row = tl.load(rows_ptr + i)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    sampled_token = tl.load(sampled_ptr + at)
    hits = 0
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < length
        token = tl.load(tokens_ptr + row * room + place, mask=inside, other=0)
        value = tl.load(values_ptr + row * room + place, mask=inside, other=0)
        is_match = inside & (token == sampled_token)
        tl.store(values_ptr + row * room + place, value + 2, mask=is_match)
        hits += tl.sum(is_match.to(tl.int32), 0)
    is_new = hits == 0
    tl.store(tokens_ptr + row * room + length, sampled_token, mask=is_new)
    tl.store(values_ptr + row * room + length, 2, mask=is_new)
    tl.store(lengths_ptr + row, (length + 1).to(tl.int64), mask=is_new)
