"""Triton kernels: the gated delta rule of `kernels.reference.recurrent`, one token at a time and chunk by chunk.

A prompt takes two launches. `prepare_delta_chunks` does the work without state, in parallel over chunks and heads. With
T, the inverse of the triangular system I + L of a chunk's updates (see the reference), it writes for each token

    new_v = T b v,    new_k = T b exp(a) k,    inner = q k^T, decayed and zero for later keys.

`scan_delta_chunks` then passes the state from chunk to chunk (the WY form of Yang et al., 2024). T is built by joining
inverses of diagonal blocks of 1, 2, 4, .. rows: [[A, 0], [B, C]]^-1 has -C^-1 B A^-1 below, which is stable. Decays are
summed in fp64, as in the reference.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import launch_cheaply

NORM_EPS = tl.constexpr(1e-6)


@launch_cheaply
@triton.jit
def advance_delta_state(
    q_ptr, k_ptr, v_ptr, decay_ptr, rate_ptr, states_ptr, units_ptr, out_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, states_unit_stride,
    heads, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Apply the gated delta rule to one token of each decoding sequence: update its state, and write the output.

    For each value head the state [KEY, VALUE] decays by exp(decay), then the value that it holds for the key k moves
    towards v by the share `rate`, and the output is the value that it holds for the query q. q, k: [sequences, heads /
    GROUP, KEY]; GROUP value heads share a key head. v, out: [sequences, heads, VALUE]. decay, rate: [sequences, heads].
    units: [sequences], index into states; a negative one marks padding, which has no state. The grid is (sequences,
    heads, blocks of BLOCK_V value columns).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // GROUP
    dim_k = tl.arange(0, BLOCK_K)
    dim_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    unit = tl.load(units_ptr + token).to(tl.int64)
    in_k = dim_k < tl.where(unit >= 0, KEY, 0)
    in_v = dim_v < tl.where(unit >= 0, VALUE, 0)
    q_ptrs = q_ptr + token * q_token_stride + key_head * q_head_stride + dim_k
    k_ptrs = k_ptr + token * k_token_stride + key_head * k_head_stride + dim_k
    v_ptrs = v_ptr + token * v_token_stride + head * v_head_stride + dim_v
    q = tl.load(q_ptrs, mask=in_k, other=0.0).to(tl.float32)
    k = tl.load(k_ptrs, mask=in_k, other=0.0).to(tl.float32)
    v = tl.load(v_ptrs, mask=in_v, other=0.0).to(tl.float32)
    q = q / tl.sqrt(tl.sum(q * q, 0) + NORM_EPS) * scale
    k = k / tl.sqrt(tl.sum(k * k, 0) + NORM_EPS)
    decay = tl.load(decay_ptr + token * heads + head).to(tl.float32)
    rate = tl.load(rate_ptr + token * heads + head).to(tl.float32)
    state_ptrs = states_ptr + unit * states_unit_stride + head * (KEY * VALUE) + dim_k[:, None] * VALUE + dim_v[None, :]
    mask = in_k[:, None] & in_v[None, :]
    state = tl.load(state_ptrs, mask=mask, other=0.0).to(tl.float32) * tl.exp(decay)
    retrieved_value = tl.sum(state * k[:, None], 0)
    state += k[:, None] * ((v - retrieved_value) * rate)[None, :]
    tl.store(state_ptrs, state.to(states_ptr.dtype.element_ty), mask=mask)
    out = tl.sum(state * q[:, None], 0)
    tl.store(out_ptr + (token * heads + head) * VALUE + dim_v, out.to(out_ptr.dtype.element_ty), mask=dim_v < VALUE)


@launch_cheaply
@triton.jit
def prepare_delta_chunks(
    q_ptr, k_ptr, v_ptr, decay_ptr, rate_ptr, starts_ptr, chunk_seq_ptr, chunk_token_ptr,
    new_v_ptr, new_k_ptr, inner_ptr, q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride,
    v_head_stride, heads, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Compute new_v, new_k and inner for all chunks of all prompts: the work of the gated delta rule without state.

    The module's docstring defines the three. They are fp32: [tokens, heads, VALUE], [tokens, heads, KEY] and [tokens,
    heads, CHUNK]. The grid is (chunks, value heads). The inverse of a chunk's system is built in LEVELS steps, with
    2 ** LEVELS == CHUNK. Rows of q, k and v are read BLOCK columns at a time.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    end = tl.load(starts_ptr + tl.load(chunk_seq_ptr + chunk) + 1)
    chunk_offset = tl.arange(0, CHUNK)
    token = (tl.load(chunk_token_ptr + chunk) + chunk_offset).to(tl.int64)
    is_valid = token < end
    q_ptrs = (q_ptr + token * q_token_stride + head // GROUP * q_head_stride)[:, None]
    k_ptrs = (k_ptr + token * k_token_stride + head // GROUP * k_head_stride)[:, None]
    v_ptrs = (v_ptr + token * v_token_stride + head * v_head_stride)[:, None]

    system = tl.zeros((CHUNK, CHUNK), tl.float32)
    inner = tl.zeros((CHUNK, CHUNK), tl.float32)
    q_square = tl.zeros((CHUNK,), tl.float32)
    k_square = tl.zeros((CHUNK,), tl.float32)
    for first_dim in range(0, KEY, BLOCK):
        dim = first_dim + tl.arange(0, BLOCK)
        mask = is_valid[:, None] & (dim < KEY)[None, :]
        q = tl.load(q_ptrs + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        k = tl.load(k_ptrs + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        system = tl.dot(k, tl.trans(k), system, input_precision=PRECISION)
        inner = tl.dot(q, tl.trans(k), inner, input_precision=PRECISION)
        q_square += tl.sum(q * q, 1)
        k_square += tl.sum(k * k, 1)
    q_scale = scale / tl.sqrt(q_square + NORM_EPS)
    k_scale = 1.0 / tl.sqrt(k_square + NORM_EPS)
    rate = tl.load(rate_ptr + token * heads + head, mask=is_valid, other=0.0).to(tl.float32)
    decay_sum = tl.cumsum(tl.load(decay_ptr + token * heads + head, mask=is_valid, other=0.0).to(tl.float64), 0)
    row = chunk_offset[:, None]
    column = chunk_offset[None, :]
    differences = (decay_sum[:, None] - decay_sum[None, :]).to(tl.float32)
    pair_decay = tl.exp(tl.where(row >= column, differences, float("-inf"))) * k_scale[None, :]
    head_row = token * heads + head
    inner_ptrs = inner_ptr + head_row[:, None] * CHUNK + column
    tl.store(inner_ptrs, inner * pair_decay * q_scale[:, None], mask=is_valid[:, None])

    system = system * pair_decay * (rate * k_scale)[:, None]
    inverse = tl.where(row == column, 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        same_block = row // (2 << level) == column // (2 << level)
        joins = same_block & (row // (1 << level) % 2 == 1) & (column // (1 << level) % 2 == 0)
        lower = tl.where(joins, system, 0.0)
        if level == 0:  # the blocks are single ones
            inverse = inverse - lower
        else:
            lower = tl.dot(inverse, lower, input_precision=PRECISION)
            inverse = inverse - tl.dot(lower, inverse, input_precision=PRECISION)

    key_decay = rate * tl.exp(decay_sum.to(tl.float32)) * k_scale
    for first_dim in range(0, KEY, BLOCK):
        dim = first_dim + tl.arange(0, BLOCK)
        mask = is_valid[:, None] & (dim < KEY)[None, :]
        k = tl.load(k_ptrs + dim[None, :], mask=mask, other=0.0).to(tl.float32) * key_decay[:, None]
        new_k = tl.dot(inverse, k, input_precision=PRECISION)
        tl.store(new_k_ptr + head_row[:, None] * KEY + dim[None, :], new_k, mask=mask)
    for first_dim in range(0, VALUE, BLOCK):
        dim = first_dim + tl.arange(0, BLOCK)
        mask = is_valid[:, None] & (dim < VALUE)[None, :]
        v = tl.load(v_ptrs + dim[None, :], mask=mask, other=0.0).to(tl.float32) * rate[:, None]
        new_v = tl.dot(inverse, v, input_precision=PRECISION)
        tl.store(new_v_ptr + head_row[:, None] * VALUE + dim[None, :], new_v, mask=mask)


@launch_cheaply
@triton.jit(do_not_specialize=["first_seq"])
def scan_delta_chunks(
    q_ptr, k_ptr, decay_ptr, new_v_ptr, new_k_ptr, inner_ptr, states_ptr, starts_ptr, units_ptr, out_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, states_unit_stride, heads, scale, first_seq,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Compute the gated delta rule of prompts: pass each state from chunk to chunk of tokens, and write the outputs.

    `prepare_delta_chunks` has computed new_v [tokens, heads, VALUE], new_k [tokens, heads, KEY] and inner [tokens,
    heads, CHUNK]. S [KEY, VALUE] is the state, and a_t the sum of the decays (logs) from the chunk's start to token t:

        update = new_v - new_k S;   out_t = exp(a_t) q_t S + inner_t update
        S <- exp(a_end) S + sum_t exp(a_end - a_t) k_t^T update_t

    q, k: [tokens, key heads, KEY], scaled to unit length, and q by `scale`. decay: [tokens, heads]. out: as new_v. The
    grid is (prompts, heads, blocks of BLOCK_V value columns); prompts are the sequences from first_seq on.
    """
    seq = first_seq + tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // GROUP
    dim_k = tl.arange(0, BLOCK_K)
    dim_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = dim_k < KEY
    in_v = dim_v < VALUE
    unit = tl.load(units_ptr + seq).to(tl.int64)
    state_ptrs = states_ptr + unit * states_unit_stride + head * (KEY * VALUE) + dim_k[:, None] * VALUE + dim_v[None, :]
    state = tl.load(state_ptrs, mask=in_k[:, None] & in_v[None, :], other=0.0).to(tl.float32)
    chunk_offset = tl.arange(0, CHUNK)
    end = tl.load(starts_ptr + seq + 1)
    for chunk_start in range(tl.load(starts_ptr + seq), end, CHUNK):
        token = (chunk_start + chunk_offset).to(tl.int64)
        is_valid = token < end
        mask_k = is_valid[:, None] & in_k[None, :]
        mask_v = is_valid[:, None] & in_v[None, :]
        head_row = (token * heads + head)[:, None]
        decay = tl.load(decay_ptr + token * heads + head, mask=is_valid, other=0.0).to(tl.float64)
        decay_sum = tl.cumsum(decay, 0)
        last_decay_sum = tl.min(decay_sum, 0)  # decays are not positive, so the sum only falls
        new_k = tl.load(new_k_ptr + head_row * KEY + dim_k[None, :], mask=mask_k, other=0.0)
        update = tl.load(new_v_ptr + head_row * VALUE + dim_v[None, :], mask=mask_v, other=0.0)
        update -= tl.dot(new_k, state, input_precision=PRECISION)

        q_ptrs = q_ptr + token[:, None] * q_token_stride + key_head * q_head_stride + dim_k[None, :]
        q = tl.load(q_ptrs, mask_k, 0.0).to(tl.float32)
        q_scale = scale / tl.sqrt(tl.sum(q * q, 1) + NORM_EPS)
        out = tl.dot(q, state, input_precision=PRECISION)
        out = out * (q_scale * tl.exp(decay_sum.to(tl.float32)))[:, None]
        inner = tl.load(inner_ptr + head_row * CHUNK + chunk_offset[None, :], mask=is_valid[:, None], other=0.0)
        out = tl.dot(inner, update, out, input_precision=PRECISION)
        tl.store(out_ptr + head_row * VALUE + dim_v[None, :], out.to(out_ptr.dtype.element_ty), mask=mask_v)

        k_ptrs = k_ptr + token[:, None] * k_token_stride + key_head * k_head_stride + dim_k[None, :]
        k = tl.load(k_ptrs, mask_k, 0.0).to(tl.float32)
        decay_to_end = tl.exp((last_decay_sum - decay_sum).to(tl.float32))
        update = update * (decay_to_end / tl.sqrt(tl.sum(k * k, 1) + NORM_EPS))[:, None]
        state = tl.dot(tl.trans(k), update, state * tl.exp(last_decay_sum.to(tl.float32)), input_precision=PRECISION)
    tl.store(state_ptrs, state.to(states_ptr.dtype.element_ty), mask=in_k[:, None] & in_v[None, :])
