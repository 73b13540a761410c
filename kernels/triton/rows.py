"""Triton kernels that work row by row: norms with residual or gate, rotary embedding, gated activations.

Rows lie in a [outer, inner, dim] view with any strides of the first two axes, so the parts of a fused projection are
read where they are. Results are contiguous. Sums are taken in fp32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def norm_rows(
    x_ptr, other_ptr, weight_ptr, out_ptr, rows, inner, x_outer, x_inner, other_outer, other_inner, weight_inner, eps,
    DIM: tl.constexpr, MODE: tl.constexpr, ZERO_CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Root mean square norm of ROWS rows. `other` is, by MODE: "plain" nothing; "add" a residual, to which x is added,
    which is normed and keeps the sum; "before" and "after" a gate whose silu multiplies before or after the norm."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK)
    outer = (row // inner).to(tl.int64)
    place = row % inner
    mask = (row < rows)[:, None] & (dim < DIM)[None, :]
    x = tl.load(x_ptr + outer[:, None] * x_outer + place[:, None] * x_inner + dim[None, :], mask=mask, other=0.0)
    value = x.to(tl.float32)
    other_at = other_ptr + outer[:, None] * other_outer + place[:, None] * other_inner + dim[None, :]
    if MODE == "add":
        total = (value + tl.load(other_at, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(other_at, total, mask=mask)
        value = total.to(tl.float32)
    if MODE == "before":
        gate = tl.load(other_at, mask=mask, other=0.0).to(tl.float32)
        value = value * gate / (1.0 + tl.exp(-gate))
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / DIM + eps)
    gain = tl.load(weight_ptr + place[:, None] * weight_inner + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        gain += 1.0
    value = value * scale[:, None] * gain
    if MODE == "after":
        gate = tl.load(other_at, mask=mask, other=0.0).to(tl.float32)
        value = value * gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row.to(tl.int64)[:, None] * DIM + dim[None, :], value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def rotate_rows(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, rows, heads, x_token, x_head, weight_head, cos_token, sin_token, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ZERO_CENTRED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr
):  # fmt: skip
    """Rotate the first 2 * HALF dims of ROWS (token, head) rows, halves against each other; the rest stays. With NORM
    of rows that are normed first, as by `norm_rows` "plain"."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // heads).to(tl.int64)
    head = row % heads
    dim = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (dim < HALF)[None, :]
    source = x_ptr + token[:, None] * x_token + head[:, None] * x_head
    target = out_ptr + row.to(tl.int64)[:, None] * DIM
    first = tl.load(source + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    if BLOCK_REST > 0:
        last = 2 * HALF + tl.arange(0, BLOCK_REST)
        tail_mask = (row < rows)[:, None] & (last < DIM)[None, :]
        tail = tl.load(source + last[None, :], mask=tail_mask, other=0.0).to(tl.float32)
    if NORM:
        gains = weight_ptr + head[:, None] * weight_head
        offset = 1.0 if ZERO_CENTRED else 0.0
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if BLOCK_REST > 0:
            squares += tl.sum(tail * tail, 1)
        scale = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        first = first * scale * (tl.load(gains + dim[None, :], mask=mask, other=0.0).to(tl.float32) + offset)
        second = second * scale * (tl.load(gains + HALF + dim[None, :], mask=mask, other=0.0).to(tl.float32) + offset)
        if BLOCK_REST > 0:
            tail = tail * scale * (tl.load(gains + last[None, :], tail_mask, other=0.0).to(tl.float32) + offset)
    cos_at = cos_ptr + token[:, None] * cos_token + dim[None, :]
    sin_at = sin_ptr + token[:, None] * sin_token + dim[None, :]
    low = first * tl.load(cos_at, mask=mask, other=0.0) + second * tl.load(sin_at, mask=mask, other=0.0)
    high = second * tl.load(cos_at + HALF, mask=mask, other=0.0) + first * tl.load(sin_at + HALF, mask=mask, other=0.0)
    tl.store(target + dim[None, :], low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HALF + dim[None, :], high.to(out_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        tl.store(target + last[None, :], tail.to(out_ptr.dtype.element_ty), mask=tail_mask)


@triton.jit
def activate_rows(x_ptr, out_ptr, x_row, SIZE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, parts): [SIZE] of each row. KIND "silu" and "gelu" (its tanh approximation): act(first half of x)
    * second half; "relu squared": relu(x) ** 2."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    x = tl.load(x_ptr + row * x_row + at, mask=mask, other=0.0).to(tl.float32)
    if KIND == "relu squared":
        x = tl.maximum(x, 0.0)
        out = x * x
    else:
        up = tl.load(x_ptr + row * x_row + SIZE + at, mask=mask, other=0.0).to(tl.float32)
        inside = x
        if KIND == "gelu":  # x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
            inside = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        out = x / (1.0 + tl.exp(-inside)) * up
    tl.store(out_ptr + row * SIZE + at, out.to(out_ptr.dtype.element_ty), mask=mask)
