"""Triton kernels that work row by row: norms with residual or gate, rotary embedding, gated activations.

Rows lie in a [outer, inner, dim] view with any strides of the first two axes, so the parts of a fused projection are
read where they are. Results are contiguous. Sums are taken in fp32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import launch_cheaply


@launch_cheaply
@triton.jit(do_not_specialize=["rows"])
def norm_rows(
    x_ptr, other_ptr, weight_ptr, out_ptr, rows, inner, x_outer_stride, x_inner_stride, other_outer_stride,
    other_inner_stride, weight_inner_stride, eps,
    DIM: tl.constexpr, MODE: tl.constexpr, ZERO_CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Apply root mean square norm to ROWS of `rows` rows, each of DIM elements, with a residual or a gate.

    x, other, out: [rows / inner, inner, DIM], such as [tokens, heads, DIM]. weight: [DIM], or [inner, DIM].
    MODE: "plain"; "add" adds x to the residual `other`, stores the sum there and norms it; "before" and "after"
    multiply by the silu of the gate `other` before or after the norm. ZERO_CENTRED: the weight is the gain minus one.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK)[None, :]
    outer_index = (row // inner).to(tl.int64)[:, None]
    inner_index = (row % inner)[:, None]
    mask = (row < rows)[:, None] & (dim < DIM)
    x_ptrs = x_ptr + outer_index * x_outer_stride + inner_index * x_inner_stride + dim
    other_ptrs = other_ptr + outer_index * other_outer_stride + inner_index * other_inner_stride + dim
    weight_ptrs = weight_ptr + inner_index * weight_inner_stride + dim
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    value = x.to(tl.float32)
    if MODE == "add":
        total = (value + tl.load(other_ptrs, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(other_ptrs, total, mask=mask)
        value = total.to(tl.float32)
    if MODE == "before":
        gate = tl.load(other_ptrs, mask=mask, other=0.0).to(tl.float32)
        value = value * gate / (1.0 + tl.exp(-gate))
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / DIM + eps)
    gain = tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        gain += 1.0
    value = value * scale[:, None] * gain
    if MODE == "after":
        gate = tl.load(other_ptrs, mask=mask, other=0.0).to(tl.float32)
        value = value * gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row.to(tl.int64)[:, None] * DIM + dim, value.to(out_ptr.dtype.element_ty), mask=mask)


@launch_cheaply
@triton.jit(do_not_specialize=["rows"])
def rotate_rows(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, rows, heads, x_token_stride, x_head_stride, weight_head_stride,
    cos_token_stride, sin_token_stride, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ZERO_CENTRED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_COPIED: tl.constexpr
):  # fmt: skip
    """Apply rotary embedding to ROWS of `rows` rows, after a root mean square norm if NORM. A row is a head of a token.

    Dims i and HALF + i are rotated together, by angle i of the token. The dims from 2 * HALF on are copied. `sin_ptr`
    has -sin for the first half of these dims and +sin for the second: first * cos - second * sin, second * cos + first
    * sin. x, out: [tokens, heads, DIM]. cos, sin: [tokens, 2 * HALF]. weight: gains of the norm, [DIM] or [heads, DIM];
    ZERO_CENTRED: they are stored minus one. BLOCK, BLOCK_COPIED: HALF and the number of copied dims, rounded up to
    powers of two; BLOCK_COPIED may be 0.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // heads).to(tl.int64)[:, None]
    head = (row % heads)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows)[:, None] & (dim < HALF)
    source = x_ptr + token * x_token_stride + head * x_head_stride
    target = out_ptr + row.to(tl.int64)[:, None] * DIM
    first = tl.load(source + dim, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim, mask=mask, other=0.0).to(tl.float32)
    if BLOCK_COPIED > 0:
        copied_dim = 2 * HALF + tl.arange(0, BLOCK_COPIED)[None, :]
        copied_mask = (row < rows)[:, None] & (copied_dim < DIM)
        copied = tl.load(source + copied_dim, mask=copied_mask, other=0.0).to(tl.float32)
    if NORM:
        gains = weight_ptr + head * weight_head_stride
        offset = 1.0 if ZERO_CENTRED else 0.0
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if BLOCK_COPIED > 0:
            squares += tl.sum(copied * copied, 1)
        scale = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        first = first * scale * (tl.load(gains + dim, mask=mask, other=0.0).to(tl.float32) + offset)
        second = second * scale * (tl.load(gains + HALF + dim, mask=mask, other=0.0).to(tl.float32) + offset)
        if BLOCK_COPIED > 0:
            copied = copied * scale * (tl.load(gains + copied_dim, copied_mask, other=0.0).to(tl.float32) + offset)
    cos_ptrs = cos_ptr + token * cos_token_stride + dim
    sin_ptrs = sin_ptr + token * sin_token_stride + dim
    first_cos = tl.load(cos_ptrs, mask=mask, other=0.0)
    first_sin = tl.load(sin_ptrs, mask=mask, other=0.0)
    second_cos = tl.load(cos_ptrs + HALF, mask=mask, other=0.0)
    second_sin = tl.load(sin_ptrs + HALF, mask=mask, other=0.0)
    first_out = first * first_cos + second * first_sin
    second_out = second * second_cos + first * second_sin
    tl.store(target + dim, first_out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HALF + dim, second_out.to(out_ptr.dtype.element_ty), mask=mask)
    if BLOCK_COPIED > 0:
        tl.store(target + copied_dim, copied.to(out_ptr.dtype.element_ty), mask=copied_mask)


@launch_cheaply
@triton.jit
def activate_rows(x_ptr, out_ptr, x_row_stride, SIZE: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the activation of a gated MLP: out = activation(first half of x's row) * second half.

    The activation is silu, or gelu (with tanh) if GELU. x: [rows, 2 * SIZE]. out: [rows, SIZE]. Grid: (rows, blocks).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row_stride + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid_input = x
    if GELU:  # x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
        sigmoid_input = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    out = x / (1.0 + tl.exp(-sigmoid_input)) * up
    tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=mask)
