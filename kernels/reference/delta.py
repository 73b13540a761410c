"""The gated delta rule: a linear attention whose state forgets (decay) and corrects itself (delta).

For each value head, with state S [key_dim, value_dim], q and k of unit length, decay g <= 0 (log) and rate b:
    S <- exp(g_t) S;  u_t = b_t (v_t - k_t S);  S <- S + k_t^T u_t;  o_t = q_t S / sqrt(key_dim)
(Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.) The chunked form unrolls the recurrence over a chunk: with
a_t the running sum of g, the u_t solve the unit lower triangular system
    u_t + b_t sum_{j<t} exp(a_t - a_j) (k_t . k_j) u_j = b_t (v_t - exp(a_t) k_t S_0)
so that a chunk costs matrix products and one triangular solve. Everything is computed in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import StatePlan, wide

CHUNK = 64
NORM_EPS = 1e-6


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, states: Tensor, plan: StatePlan, chunked: bool
) -> Tensor:
    """See `interface.Kernels.gated_delta`. Decoding sequences go together, the others one by one."""
    dtype = wide(q.dtype)
    groups = v.shape[1] // q.shape[1]
    q, k = (_unit(x.to(dtype)).repeat_interleave(groups, 1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    values, log_decay, rate = v.to(dtype), log_decay.to(dtype), rate.to(dtype)
    out = torch.empty_like(v)
    count = plan.batch.decode_count
    if count:
        head = slice(0, count)
        state = states[plan.decode_units].to(dtype)
        out[head] = delta_step(q[head], k[head], values[head], log_decay[head], rate[head], state)
        states[plan.decode_units] = state.to(states.dtype)
    for start, end, unit in plan.chunks:
        part = slice(start, end)
        scan = delta_chunks if chunked else delta_scan
        out[part], state = scan(q[part], k[part], values[part], log_decay[part], rate[part], states[unit].to(dtype))
        states[unit] = state.to(states.dtype)
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS)


def running_decay(log_decay: Tensor, future: Tensor) -> tuple[Tensor, Tensor]:
    """Within a chunk: the running sum a_t of log_decay [..., size], and exp(a_t - a_j) [..., size, size] for j <= t.

    Sums are taken in fp64: under fast decay they are large, and their small differences matter.
    """
    total = log_decay.double().cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).to(log_decay.dtype).masked_fill(future, float("-inf")).exp()
    return total.to(log_decay.dtype), between


def delta_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor) -> Tensor:
    """One token of each of `n` sequences; `state` [n, heads, key_dim, value_dim] is updated in place.

    q, k: [n, heads, key_dim] (unit length, q scaled); v: [n, heads, value_dim]; log_decay, rate: [n, heads].
    """
    state.mul_(log_decay.exp()[..., None, None])
    told = (k[..., None, :] @ state)[..., 0, :]
    state.add_(k[..., None] * ((v - told) * rate[..., None])[..., None, :])
    return (q[..., None, :] @ state)[..., 0, :]


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence, token by token: (outputs [tokens, heads, value_dim], last state)."""
    state = state[None].clone()
    out = [
        delta_step(q[t, None], k[t, None], v[t, None], log_decay[t, None], rate[t, None], state)
        for t in range(q.shape[0])
    ]
    return torch.cat(out), state[0]


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence, chunk by chunk: (outputs [tokens, heads, value_dim], last state)."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, tokens, dim]
    log_decay, rate = log_decay.t(), rate.t()[..., None]
    tokens = q.shape[1]
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    out = []
    for start in range(0, tokens, CHUNK):
        part = slice(start, min(start + CHUNK, tokens))
        size = part.stop - start
        keys = k[:, part]
        total, between = running_decay(log_decay[:, part], future[:size, :size])
        since_start = total.exp()[..., None]
        system = rate[:, part] * (keys @ keys.mT) * between
        target = rate[:, part] * (v[:, part] - since_start * (keys @ state))
        update = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
        queries = q[:, part]
        out.append(since_start * (queries @ state) + ((queries @ keys.mT) * between) @ update)
        to_end = between[:, -1, :, None]
        state = state * since_start[:, -1:] + (keys * to_end).mT @ update
    return torch.cat(out, 1).transpose(0, 1), state
