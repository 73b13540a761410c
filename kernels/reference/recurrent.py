"""The operations that keep a state for each sequence: causal convolution, the gated delta rule, Mamba-2's recurrence.

Sums and states are taken in fp32 (fp64 for fp64 inputs). Decoding sequences go together, the others one by one; those
token by token as the recurrence is defined, or in chunks (`chunked`), which is the same in matrix products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.interface import StatePlan, get_accumulation_dtype

CHUNK = 64
NORM_EPS = 1e-6

Step = Callable[..., Tensor]
"""(inputs of one token of each of n sequences, [n, ..] each, their states [n, ..], updated in place) -> outputs."""
Chunks = Callable[..., tuple[Tensor, Tensor]]
"""(inputs of all tokens of one sequence, [tokens, ..] each, its state) -> outputs and last state."""


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor, plan: StatePlan, silu: bool) -> Tensor:
    """See `interface.Kernels.causal_conv`. A tail is the `width - 1` inputs before the next token, oldest first."""
    taps = weight.t().to(get_accumulation_dtype(x.dtype))  # [width, channels]
    out = torch.empty_like(x)
    count = plan.batch.decode_count
    if count:
        window = torch.cat((tails[plan.decode_units], x[:count, None]), 1)  # [sequences, width, channels]
        out[:count] = _finish((window * taps).sum(1), bias, silu)
        tails[plan.decode_units] = window[:, 1:]
    for start, end, unit in plan.chunks:
        padded_input = torch.cat((tails[unit], x[start:end]))
        tails[unit] = padded_input[end - start :]
        padded_input = padded_input.to(taps.dtype)
        total = padded_input[: end - start] * taps[0]
        for i in range(1, taps.shape[0]):
            total.addcmul_(padded_input[i : i + end - start], taps[i])
        out[start:end] = _finish(total, bias, silu)
    return out


def _finish(total: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    if bias is not None:
        total = total + bias
    return F.silu(total) if silu else total


def _recur(
    inputs: tuple[Tensor, ...], out: Tensor, states: Tensor, plan: StatePlan, step: Step, chunks: Chunks | None
) -> None:
    """Fill `out` [tokens, ..] and move the states on. Without `chunks` prompts go token by token, by `step`."""
    dtype = inputs[0].dtype
    count = plan.batch.decode_count
    if count:
        state = states[plan.decode_units].to(dtype)
        out[:count] = step(*(x[:count] for x in inputs), state)
        states[plan.decode_units] = state.to(states.dtype)
    for start, end, unit in plan.chunks:
        state = states[unit].to(dtype)
        if chunks is not None:
            out[start:end], state = chunks(*(x[start:end] for x in inputs), state)
        else:
            state = state.clone()
            for t in range(start, end):
                out[t] = step(*(x[t, None] for x in inputs), state[None])[0]
        states[unit] = state.to(states.dtype)


def _running_decay(log_decay: Tensor, future: Tensor) -> tuple[Tensor, Tensor]:
    """Within a chunk: the running sum a_t of log_decay [..., size], and exp(a_t - a_j) [..., size, size] for j <= t.

    Sums are taken in fp64: under fast decay they are large, and their small differences matter.
    """
    total = log_decay.double().cumsum(-1)
    pair_decay = (
        (total[..., :, None] - total[..., None, :]).to(log_decay.dtype).masked_fill(future, float("-inf")).exp()
    )
    return total.to(log_decay.dtype), pair_decay


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, states: Tensor, plan: StatePlan, is_chunked: bool
) -> Tensor:
    """A linear attention whose state forgets (decay) and corrects itself (delta); `interface.Kernels.gated_delta`.

    For each value head, with state S [key_dim, value_dim], q and k of unit length, decay g <= 0 (log) and rate b:
        S <- exp(g_t) S;  u_t = b_t (v_t - k_t S);  S <- S + k_t^T u_t;  o_t = q_t S / sqrt(key_dim)
    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.) The chunked form unrolls the recurrence over a chunk: with
    a_t the running sum of g, the u_t solve the unit lower triangular system
        u_t + b_t sum_{j<t} exp(a_t - a_j) (k_t . k_j) u_j = b_t (v_t - exp(a_t) k_t S_0)
    so that a chunk costs matrix products and one triangular solve.
    """
    dtype = get_accumulation_dtype(q.dtype)
    groups = v.shape[1] // q.shape[1]
    q, k = (_unit(x.to(dtype)).repeat_interleave(groups, 1) for x in (q, k))
    inputs = (q * q.shape[-1] ** -0.5, k, v.to(dtype), log_decay.to(dtype), rate.to(dtype))
    out = torch.empty_like(v)
    _recur(inputs, out, states, plan, _delta_step, _delta_chunks if is_chunked else None)
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS)


def _delta_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor) -> Tensor:
    """q, k: [n, heads, key_dim]; v: [n, heads, value_dim]; log_decay, rate: [n, heads]."""
    state.mul_(log_decay.exp()[..., None, None])
    retrieved_value = (k[..., None, :] @ state)[..., 0, :]
    state.add_(k[..., None] * ((v - retrieved_value) * rate[..., None])[..., None, :])
    return (q[..., None, :] @ state)[..., 0, :]


def _delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, tokens, dim]
    log_decay, rate = log_decay.t(), rate.t()[..., None]
    tokens = q.shape[1]
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    out = []
    for start in range(0, tokens, CHUNK):
        part = slice(start, min(start + CHUNK, tokens))
        size = part.stop - start
        keys = k[:, part]
        total, pair_decay = _running_decay(log_decay[:, part], future[:size, :size])
        decay_since_start = total.exp()[..., None]
        system = rate[:, part] * (keys @ keys.mT) * pair_decay
        target = rate[:, part] * (v[:, part] - decay_since_start * (keys @ state))
        update = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
        queries = q[:, part]
        out.append(decay_since_start * (queries @ state) + ((queries @ keys.mT) * pair_decay) @ update)
        decay_to_end = pair_decay[:, -1, :, None]
        state = state * decay_since_start[:, -1:] + (keys * decay_to_end).mT @ update
    return torch.cat(out, 1).transpose(0, 1), state


def state_space(
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor, states: Tensor, plan: StatePlan,
    is_chunked: bool,
) -> Tensor:  # fmt: skip
    """Mamba-2's state-space recurrence (SSD); see `interface.Kernels.state_space`.

    For each head, with state h [head_dim, state_dim], step size dt_t > 0 and rate A < 0:
        h <- exp(A dt_t) h + dt_t x_t B_t^T;  y_t = h C_t + D x_t
    (Dao and Gu, "Transformers are SSMs", 2024.) B and C are shared by the heads of a group. The chunked form is theirs:
    inside a chunk a masked product like attention, between chunks the state.
    """
    dtype = get_accumulation_dtype(x.dtype)
    values, dt = x.to(dtype), dt.to(dtype)
    inputs = (values * dt[..., None], dt * rate.to(dtype), b.to(dtype), c.to(dtype))
    out = torch.empty_like(values)
    _recur(inputs, out, states, plan, _ssd_step, _ssd_chunks if is_chunked else None)
    return out.addcmul_(values, skip.to(dtype)[:, None]).to(x.dtype)


def _ssd_step(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """x: [n, heads, head_dim], times dt; log_decay: [n, heads]; b, c: [n, groups, state_dim]."""
    per_group = x.shape[1] // b.shape[1]
    state.mul_(log_decay.exp()[..., None, None])
    state.add_(x[..., None] * b.repeat_interleave(per_group, 1)[..., None, :])
    return (state @ c.repeat_interleave(per_group, 1)[..., None])[..., 0]


def _ssd_chunks(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = x.shape
    groups = b.shape[1]
    x = x.transpose(0, 1).reshape(groups, heads // groups, tokens, dim)  # [groups, heads of a group, tokens, dim]
    log_decay = log_decay.t().reshape(groups, heads // groups, tokens)
    b, c = b.transpose(0, 1)[:, None], c.transpose(0, 1)[:, None]  # [groups, 1, tokens, state_dim]
    state = state.view(groups, heads // groups, dim, -1)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    out = []
    for start in range(0, tokens, CHUNK):
        part = slice(start, min(start + CHUNK, tokens))
        size = part.stop - start
        values, input_map, output_map = x[:, :, part], b[:, :, part], c[:, :, part]
        total, pair_decay = _running_decay(log_decay[:, :, part], future[:size, :size])
        within_chunk = ((output_map @ input_map.mT) * pair_decay) @ values
        out.append(within_chunk + total.exp()[..., None] * (output_map @ state.mT))
        decay_to_end = pair_decay[..., -1, :, None]
        state = state * total[..., -1:].exp()[..., None] + (values * decay_to_end).mT @ input_map
    return torch.cat(out, 2).reshape(heads, tokens, dim).transpose(0, 1), state.reshape(heads, dim, -1)
