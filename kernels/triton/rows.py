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
    x_ptr, cos_ptr, sin_ptr, out_ptr, rows, heads, x_token, x_head, cos_token, sin_token,
    DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr
):  # fmt: skip
    """Rotate the first 2 * HALF dims of ROWS (token, head) rows, halves against each other; copy the rest."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // heads).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (dim < HALF)[None, :]
    source = x_ptr + token[:, None] * x_token + (row % heads)[:, None] * x_head
    target = out_ptr + row.to(tl.int64)[:, None] * DIM
    first = tl.load(source + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    cos_at = cos_ptr + token[:, None] * cos_token + dim[None, :]
    sin_at = sin_ptr + token[:, None] * sin_token + dim[None, :]
    low = first * tl.load(cos_at, mask=mask, other=0.0) + second * tl.load(sin_at, mask=mask, other=0.0)
    high = second * tl.load(cos_at + HALF, mask=mask, other=0.0) + first * tl.load(sin_at + HALF, mask=mask, other=0.0)
    tl.store(target + dim[None, :], low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HALF + dim[None, :], high.to(out_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        mask = (row < rows)[:, None] & (rest < DIM)[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def norm_and_rotate_rows(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, rows, heads, x_token, x_head, weight_head, cos_token, sin_token, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, ZERO_CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr
):  # fmt: skip
    """`norm_rows` without another operand, then `rotate_rows`, of ROWS (token, head) rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // heads).to(tl.int64)
    head = row % heads
    dim = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (dim < HALF)[None, :]
    source = x_ptr + token[:, None] * x_token + head[:, None] * x_head
    gains = weight_ptr + head[:, None] * weight_head
    target = out_ptr + row.to(tl.int64)[:, None] * DIM
    first = tl.load(source + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if BLOCK_REST > 0:
        last = 2 * HALF + tl.arange(0, BLOCK_REST)
        mask_rest = (row < rows)[:, None] & (last < DIM)[None, :]
        rest = tl.load(source + last[None, :], mask=mask_rest, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
    scale = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
    offset = 1.0 if ZERO_CENTRED else 0.0
    first = first * scale * (tl.load(gains + dim[None, :], mask=mask, other=0.0).to(tl.float32) + offset)
    second = second * scale * (tl.load(gains + HALF + dim[None, :], mask=mask, other=0.0).to(tl.float32) + offset)
    cos_at = cos_ptr + token[:, None] * cos_token + dim[None, :]
    sin_at = sin_ptr + token[:, None] * sin_token + dim[None, :]
    low = first * tl.load(cos_at, mask=mask, other=0.0) + second * tl.load(sin_at, mask=mask, other=0.0)
    high = second * tl.load(cos_at + HALF, mask=mask, other=0.0) + first * tl.load(sin_at + HALF, mask=mask, other=0.0)
    tl.store(target + dim[None, :], low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HALF + dim[None, :], high.to(out_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        gain = tl.load(gains + last[None, :], mask=mask_rest, other=0.0).to(tl.float32) + offset
        tl.store(target + last[None, :], (rest * scale * gain).to(out_ptr.dtype.element_ty), mask=mask_rest)


@triton.jit
def activate_and_mul(x_ptr, out_ptr, x_row, HALF: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, parts): act(first half) * second half; silu, or gelu in its tanh approximation."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < HALF
    gate = tl.load(x_ptr + row * x_row + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + HALF + at, mask=mask, other=0.0).to(tl.float32)
    if GELU:  # gelu(x) = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
        gate = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * HALF + at, (gate * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def square_relu(x_ptr, out_ptr, x_row, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, parts): relu(x) ** 2."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.maximum(tl.load(x_ptr + row * x_row + at, mask=at < DIM, other=0.0).to(tl.float32), 0.0)
    tl.store(out_ptr + row * DIM + at, (x * x).to(out_ptr.dtype.element_ty), mask=at < DIM)
