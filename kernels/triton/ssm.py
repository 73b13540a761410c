"""Triton kernels: Mamba-2's recurrence of `kernels.reference.recurrent`, one token at a time and chunk by chunk.

A prompt takes two launches (Dao and Gu, 2024): `compute_ssm_scores` does what needs neither state nor head, in parallel
over chunks; `scan_ssm_chunks` then carries the state from chunk to chunk. Decays are summed in fp64.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import launch_cheaply


@triton.jit
def subtract_pairwise(running_sum):
    """Return running_sum[i] - running_sum[j], exact to fp32. In fp64 it would take four times the registers."""
    high = running_sum.to(tl.float32)
    low = (running_sum - high.to(tl.float64)).to(tl.float32)
    return (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])


@launch_cheaply
@triton.jit
def advance_ssm_state(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, states_ptr, units_ptr, out_ptr,
    x_token_stride, x_head_stride, b_token_stride, b_group_stride, c_token_stride, c_group_stride, states_unit_stride,
    heads,
    PER_GROUP: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Advance the Mamba-2 states of decoding sequences by one token each, and write the outputs.

    For each head: state <- exp(dt * rate) * state + dt * x b^T, and the output is state c + skip * x. A state is [DIM,
    STATE]. x, out: [sequences, heads, DIM]. dt: [sequences, heads]. rate, skip: [heads]. b, c: [sequences, groups,
    STATE]; the PER_GROUP heads of a group share them. units: [sequences], index into states; a negative one marks
    padding, which has no state. The grid is (sequences, heads, blocks of BLOCK_P dims).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    state_dim = tl.arange(0, BLOCK_S)
    unit = tl.load(units_ptr + token).to(tl.int64)
    in_dim = dim < tl.where(unit >= 0, DIM, 0)
    in_state = state_dim < STATE
    group = head // PER_GROUP
    x_ptrs = x_ptr + token * x_token_stride + head * x_head_stride + dim
    b_ptrs = b_ptr + token * b_token_stride + group * b_group_stride + state_dim
    c_ptrs = c_ptr + token * c_token_stride + group * c_group_stride + state_dim
    x = tl.load(x_ptrs, mask=in_dim, other=0.0).to(tl.float32)
    b = tl.load(b_ptrs, mask=in_state, other=0.0).to(tl.float32)
    c = tl.load(c_ptrs, mask=in_state, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + token * heads + head).to(tl.float32)
    decay = tl.exp(dt * tl.load(rate_ptr + head).to(tl.float32))
    state_ptr = states_ptr + unit * states_unit_stride + head * (DIM * STATE)
    state_ptrs = state_ptr + dim[:, None] * STATE + state_dim[None, :]
    mask = in_dim[:, None] & in_state[None, :]
    state = tl.load(state_ptrs, mask=mask, other=0.0).to(tl.float32) * decay + (x * dt)[:, None] * b[None, :]
    tl.store(state_ptrs, state.to(states_ptr.dtype.element_ty), mask=mask)
    out = tl.sum(state * c[None, :], 1) + x * tl.load(skip_ptr + head).to(tl.float32)
    tl.store(out_ptr + (token * heads + head) * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)


@launch_cheaply
@triton.jit
def compute_ssm_scores(
    b_ptr, c_ptr, starts_ptr, chunk_seq_ptr, chunk_token_ptr, scores_ptr, b_token_stride, b_group_stride,
    c_token_stride, c_group_stride, groups,
    STATE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Compute Mamba-2's scores of each chunk of CHUNK tokens: the products c_t . b_j of its tokens t and j.

    As in attention, they say how much token j adds to the output of token t. `scan_ssm_chunks` weighs them with decays,
    and leaves out those with j > t. All heads of a group share them. chunk_seq, chunk_token: sequence and first token
    of each chunk. starts: first token of each sequence, then the end of the last. b, c: [tokens, groups, STATE], read
    BLOCK columns at a time. scores: [tokens t, groups, CHUNK]; j counts from the chunk's start. Grid: (chunks, groups).
    """
    chunk = tl.program_id(0)
    group = tl.program_id(1)
    end = tl.load(starts_ptr + tl.load(chunk_seq_ptr + chunk) + 1)
    chunk_offset = tl.arange(0, CHUNK)
    token = (tl.load(chunk_token_ptr + chunk) + chunk_offset).to(tl.int64)
    is_valid = token < end
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for first_dim in range(0, STATE, BLOCK):
        state_dim = first_dim + tl.arange(0, BLOCK)
        mask = is_valid[:, None] & (state_dim < STATE)[None, :]
        b_ptrs = b_ptr + token[:, None] * b_token_stride + group * b_group_stride + state_dim[None, :]
        c_ptrs = c_ptr + token[:, None] * c_token_stride + group * c_group_stride + state_dim[None, :]
        b = tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)
        c = tl.load(c_ptrs, mask=mask, other=0.0).to(tl.float32)
        scores = tl.dot(c, tl.trans(b), scores, input_precision=PRECISION)
    target = scores_ptr + (token * groups + group)[:, None] * CHUNK + chunk_offset[None, :]
    tl.store(target, scores, mask=is_valid[:, None])


@launch_cheaply
@triton.jit(do_not_specialize=["first_seq"])
def scan_ssm_chunks(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, states_ptr, scores_ptr, starts_ptr, units_ptr, out_ptr,
    x_token_stride, x_head_stride, b_token_stride, b_group_stride, c_token_stride, c_group_stride, states_unit_stride,
    heads, first_seq,
    PER_GROUP: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Pass the Mamba-2 state of each prompt from chunk to chunk, and write the outputs.

    A chunk's output is that of the state before it, decayed, plus `scores` (written by `compute_ssm_scores`), decayed,
    times the chunk's inputs. The grid is (sequences, heads, dim blocks).
    """
    seq = first_seq + tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    state_dim = tl.arange(0, BLOCK_S)
    in_dim = dim < DIM
    in_state = state_dim < STATE
    group = head // PER_GROUP
    rate = tl.load(rate_ptr + head).to(tl.float32)
    skip = tl.load(skip_ptr + head).to(tl.float32)
    unit = tl.load(units_ptr + seq).to(tl.int64)
    state_ptr = states_ptr + unit * states_unit_stride + head * (DIM * STATE)
    state_ptrs = state_ptr + dim[:, None] * STATE + state_dim[None, :]
    state = tl.load(state_ptrs, mask=in_dim[:, None] & in_state[None, :], other=0.0).to(tl.float32)
    chunk_offset = tl.arange(0, CHUNK)
    is_causal = chunk_offset[:, None] >= chunk_offset[None, :]
    end = tl.load(starts_ptr + seq + 1)
    for chunk_start in range(tl.load(starts_ptr + seq), end, CHUNK):
        token = (chunk_start + chunk_offset).to(tl.int64)
        is_valid = token < end
        mask_x = is_valid[:, None] & in_dim[None, :]
        mask_s = is_valid[:, None] & in_state[None, :]
        dt = tl.load(dt_ptr + token * heads + head, mask=is_valid, other=0.0).to(tl.float32)
        decay_sum = tl.cumsum((dt * rate).to(tl.float64), 0)
        last_decay_sum = tl.min(decay_sum, 0)  # decays are not positive, so the sum only falls
        c_ptrs = c_ptr + token[:, None] * c_token_stride + group * c_group_stride + state_dim[None, :]
        c = tl.load(c_ptrs, mask=mask_s, other=0.0).to(tl.float32)
        out = tl.dot(c, tl.trans(state), input_precision=PRECISION)
        out = out * tl.exp(decay_sum.to(tl.float32))[:, None]
        x_ptrs = x_ptr + token[:, None] * x_token_stride + head * x_head_stride + dim[None, :]
        x = tl.load(x_ptrs, mask=mask_x, other=0.0).to(tl.float32)
        scaled_x = x * dt[:, None]
        pair_decay = tl.exp(tl.where(is_causal, subtract_pairwise(decay_sum), float("-inf")))
        score_rows = (token * (heads // PER_GROUP) + group)[:, None] * CHUNK + chunk_offset[None, :]
        chunk_scores = tl.load(scores_ptr + score_rows, mask=is_valid[:, None], other=0.0) * pair_decay
        out = tl.dot(chunk_scores, scaled_x, out, input_precision=PRECISION) + x * skip
        target = out_ptr + (token * heads + head)[:, None] * DIM + dim[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask_x)
        decayed_x = scaled_x * tl.exp((last_decay_sum - decay_sum).to(tl.float32))[:, None]
        b_ptrs = b_ptr + token[:, None] * b_token_stride + group * b_group_stride + state_dim[None, :]
        b = tl.load(b_ptrs, mask=mask_s, other=0.0)
        state = state * tl.exp(last_decay_sum.to(tl.float32))
        state = tl.dot(tl.trans(decayed_x), b.to(tl.float32), state, input_precision=PRECISION)
    tl.store(state_ptrs, state.to(states_ptr.dtype.element_ty), mask=in_dim[:, None] & in_state[None, :])
