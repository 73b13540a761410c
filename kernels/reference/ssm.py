"""Mamba-2's state-space recurrence (SSD).

For each head, with state h [head_dim, state_dim], step size dt_t > 0 and rate A < 0:
    h <- exp(A dt_t) h + dt_t x_t B_t^T;  y_t = h C_t + D x_t
(Dao and Gu, "Transformers are SSMs", 2024.) B and C are shared by the heads of a group. The chunked form is theirs:
inside a chunk a masked product like attention, between chunks the state. Computed in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import StatePlan, wide
from kernels.reference.delta import running_decay

CHUNK = 64


def state_space(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    states: Tensor,
    plan: StatePlan,
    chunked: bool,
) -> Tensor:
    """See `interface.Kernels.state_space`. Decoding sequences go together, the others one by one."""
    dtype = wide(x.dtype)
    inputs, dt, b, c = x.to(dtype), dt.to(dtype), b.to(dtype), c.to(dtype)
    log_decay, weighted = dt * rate.to(dtype), inputs * dt[..., None]
    out = torch.empty_like(inputs)
    count = plan.batch.decode_count
    if count:
        head = slice(0, count)
        state = states[plan.decode_units].to(dtype)
        out[head] = ssd_step(weighted[head], log_decay[head], b[head], c[head], state)
        states[plan.decode_units] = state.to(states.dtype)
    for start, end, unit in plan.chunks:
        part = slice(start, end)
        scan = ssd_chunks if chunked else ssd_scan
        out[part], state = scan(weighted[part], log_decay[part], b[part], c[part], states[unit].to(dtype))
        states[unit] = state.to(states.dtype)
    return out.addcmul_(inputs, skip.to(dtype)[:, None]).to(x.dtype)


def ssd_step(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """One token of each of `n` sequences; `state` [n, heads, head_dim, state_dim] is updated in place.

    x: [n, heads, head_dim], times dt; log_decay: [n, heads]; b, c: [n, groups, state_dim].
    """
    per_group = x.shape[1] // b.shape[1]
    state.mul_(log_decay.exp()[..., None, None])
    state.add_(x[..., None] * b.repeat_interleave(per_group, 1)[..., None, :])
    return (state @ c.repeat_interleave(per_group, 1)[..., None])[..., 0]


def ssd_scan(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence, token by token: (outputs [tokens, heads, head_dim], last state)."""
    state = state[None].clone()
    out = [ssd_step(x[t, None], log_decay[t, None], b[t, None], c[t, None], state) for t in range(x.shape[0])]
    return torch.cat(out), state[0]


def ssd_chunks(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence, chunk by chunk: (outputs [tokens, heads, head_dim], last state)."""
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
        values, into, outof = x[:, :, part], b[:, :, part], c[:, :, part]
        total, between = running_decay(log_decay[:, :, part], future[:size, :size])
        inside = ((outof @ into.mT) * between) @ values
        out.append(inside + total.exp()[..., None] * (outof @ state.mT))
        to_end = between[..., -1, :, None]
        state = state * total[..., -1:].exp()[..., None] + (values * to_end).mT @ into
    return torch.cat(out, 2).reshape(heads, tokens, dim).transpose(0, 1), state.reshape(heads, dim, -1)
