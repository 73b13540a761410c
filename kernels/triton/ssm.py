"""Triton kernels: Mamba-2's recurrence of `kernels.reference.recurrent`, one token at a time and chunk by chunk.

A chunk is a masked product like attention plus what the state brings (Dao and Gu, 2024). A prompt takes two launches:
`ssm_scores` does what needs neither state nor head, in parallel over chunks; `ssm_chunks` then carries the state, in
registers, from chunk to chunk. Decays are summed in fp64, as in the reference.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def differences(total):
    """total[i] - total[j] in fp32, of fp64 sums: as exact as fp64 ones rounded, in a quarter of the registers."""
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    return (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])


@triton.jit
def ssm_step(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, states_ptr, units_ptr, out_ptr,
    x_token, x_head, b_token, b_group, c_token, c_group, states_unit, heads,
    PER_GROUP: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Grid (sequences, heads, dim blocks): one token each. A negative unit is padding."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    at = tl.arange(0, BLOCK_S)
    unit = tl.load(units_ptr + token).to(tl.int64)
    in_dim = dim < tl.where(unit >= 0, DIM, 0)
    in_state = at < STATE
    group = head // PER_GROUP
    x = tl.load(x_ptr + token * x_token + head * x_head + dim, mask=in_dim, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * b_token + group * b_group + at, mask=in_state, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + token * c_token + group * c_group + at, mask=in_state, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + token * heads + head).to(tl.float32)
    fade = tl.exp(dt * tl.load(rate_ptr + head).to(tl.float32))
    place = states_ptr + unit * states_unit + head * (DIM * STATE) + dim[:, None] * STATE + at[None, :]
    mask = in_dim[:, None] & in_state[None, :]
    state = tl.load(place, mask=mask, other=0.0).to(tl.float32) * fade + (x * dt)[:, None] * b[None, :]
    tl.store(place, state.to(states_ptr.dtype.element_ty), mask=mask)
    out = tl.sum(state * c[None, :], 1) + x * tl.load(skip_ptr + head).to(tl.float32)
    tl.store(out_ptr + (token * heads + head) * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)


@triton.jit
def ssm_scores(
    b_ptr, c_ptr, starts_ptr, tile_seq_ptr, tile_token_ptr, scores_ptr, b_token, b_group, c_token, c_group, groups,
    STATE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Grid (chunks, groups): C B^T of a chunk, which the heads of a group share; scores is [tokens, groups, CHUNK].

    Rows of b and c are taken BLOCK columns at a time.
    """
    tile = tl.program_id(0)
    group = tl.program_id(1)
    end = tl.load(starts_ptr + tl.load(tile_seq_ptr + tile) + 1)
    step = tl.arange(0, CHUNK)
    token = (tl.load(tile_token_ptr + tile) + step).to(tl.int64)
    is_valid = token < end
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for first in range(0, STATE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = is_valid[:, None] & (at < STATE)[None, :]
        b = tl.load(b_ptr + token[:, None] * b_token + group * b_group + at[None, :], mask=mask, other=0.0)
        c = tl.load(c_ptr + token[:, None] * c_token + group * c_group + at[None, :], mask=mask, other=0.0)
        scores = tl.dot(c.to(tl.float32), tl.trans(b.to(tl.float32)), scores, input_precision=PRECISION)
    target = scores_ptr + (token * groups + group)[:, None] * CHUNK + step[None, :]
    tl.store(target, scores, mask=is_valid[:, None])


@triton.jit(do_not_specialize=["first_seq"])
def ssm_chunks(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, states_ptr, scores_ptr, starts_ptr, units_ptr, out_ptr,
    x_token, x_head, b_token, b_group, c_token, c_group, states_unit, heads, first_seq,
    PER_GROUP: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Grid (sequences, heads, dim blocks): a sequence's chunks in order, given their `ssm_scores`."""
    seq = first_seq + tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    at = tl.arange(0, BLOCK_S)
    in_dim = dim < DIM
    in_state = at < STATE
    group = head // PER_GROUP
    rate = tl.load(rate_ptr + head).to(tl.float32)
    skip = tl.load(skip_ptr + head).to(tl.float32)
    unit = tl.load(units_ptr + seq).to(tl.int64)
    state_at = states_ptr + unit * states_unit + head * (DIM * STATE) + dim[:, None] * STATE + at[None, :]
    state = tl.load(state_at, mask=in_dim[:, None] & in_state[None, :], other=0.0).to(tl.float32)
    step = tl.arange(0, CHUNK)
    is_causal = step[:, None] >= step[None, :]
    end = tl.load(starts_ptr + seq + 1)
    for first in range(tl.load(starts_ptr + seq), end, CHUNK):
        token = (first + step).to(tl.int64)
        is_valid = token < end
        mask_x = is_valid[:, None] & in_dim[None, :]
        mask_s = is_valid[:, None] & in_state[None, :]
        dt = tl.load(dt_ptr + token * heads + head, mask=is_valid, other=0.0).to(tl.float32)
        total = tl.cumsum((dt * rate).to(tl.float64), 0)
        last = tl.min(total, 0)  # decays are not positive, so the sum only falls
        c = tl.load(c_ptr + token[:, None] * c_token + group * c_group + at[None, :], mask=mask_s, other=0.0)
        out = tl.dot(c.to(tl.float32), tl.trans(state), input_precision=PRECISION)
        out = out * tl.exp(total.to(tl.float32))[:, None]
        x = tl.load(x_ptr + token[:, None] * x_token + head * x_head + dim[None, :], mask=mask_x, other=0.0)
        x = x.to(tl.float32)
        scaled_x = x * dt[:, None]
        pair_decay = tl.exp(tl.where(is_causal, differences(total), float("-inf")))
        place = (token * (heads // PER_GROUP) + group)[:, None] * CHUNK + step[None, :]
        chunk_scores = tl.load(scores_ptr + place, mask=is_valid[:, None], other=0.0) * pair_decay
        out = tl.dot(chunk_scores, scaled_x, out, input_precision=PRECISION) + x * skip
        target = out_ptr + (token * heads + head)[:, None] * DIM + dim[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask_x)
        decayed_x = scaled_x * tl.exp((last - total).to(tl.float32))[:, None]
        b = tl.load(b_ptr + token[:, None] * b_token + group * b_group + at[None, :], mask=mask_s, other=0.0)
        state = state * tl.exp(last.to(tl.float32))
        state = tl.dot(tl.trans(decayed_x), b.to(tl.float32), state, input_precision=PRECISION)
    tl.store(state_at, state.to(states_ptr.dtype.element_ty), mask=in_dim[:, None] & in_state[None, :])
