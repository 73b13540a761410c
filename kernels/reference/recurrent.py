"""The operations that keep a state for each sequence: causal convolution, the gated delta rule, Mamba-2's recurrence.

Sums and states are in fp32 (fp64 for fp64 inputs). Decoding sequences are computed together, by the recurrence as it is
defined. Prompts are computed one by one in chunks, which is the same in matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.interface import get_accumulation_dtype

CHUNK_TOKENS = 64
NORM_EPS = 1e-6


class PromptSpan(NamedTuple):
    """A prompt of a batch: its tokens [start, end) in the batch, and the memory unit that holds its state."""

    start: int
    end: int
    unit: int


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Memory units that hold the states of a step's sequences: decoding ones, of one token each, and then prompts."""

    decode_units: Tensor
    """[decoding sequences] int64: unit of each one's state."""
    prompt_spans: list[PromptSpan]


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor, plan: Any, silu: bool) -> Tensor:
    """Apply a causal depthwise convolution: each output channel is a weighted sum of its last `width` inputs.

    The batch has decoding sequences, of one token each, and then prompts. A sequence's last width - 1 inputs, its tail,
    are kept for its next tokens: `tails` [units, width - 1, channels] is updated in place, at the units in the plan.
    x and the result: [tokens, channels]. weight: [channels, width], the newest input's last. bias: [channels]. `silu`:
    whether silu is applied to the sums.
    """
    taps = weight.t().to(get_accumulation_dtype(x.dtype))  # [width, channels]
    out = torch.empty_like(x)
    decode_count = len(plan.decode_units)
    if decode_count:
        window = torch.cat((tails[plan.decode_units], x[:decode_count, None]), 1)  # [sequences, width, channels]
        out[:decode_count] = _add_bias_and_silu((window * taps).sum(1), bias, silu)
        tails[plan.decode_units] = window[:, 1:]
    for start, end, unit in plan.prompt_spans:
        num_tokens = end - start
        padded_input = torch.cat((tails[unit], x[start:end]))
        tails[unit] = padded_input[num_tokens:]
        padded_input = padded_input.to(taps.dtype)
        weighted_sum = padded_input[:num_tokens] * taps[0]
        for i in range(1, taps.shape[0]):
            weighted_sum.addcmul_(padded_input[i : i + num_tokens], taps[i])
        out[start:end] = _add_bias_and_silu(weighted_sum, bias, silu)
    return out


def _add_bias_and_silu(total: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    if bias is not None:
        total = total + bias
    return F.silu(total) if silu else total


def _run_recurrence(
    inputs: tuple[Tensor, ...],
    out: Tensor,
    states: Tensor,
    plan: StatePlan,
    advance_tokens: Callable[..., Tensor],
    advance_chunk: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    """Run a recurrence over a batch of sequences: fill `out` [tokens, ..], and update the sequences' states in place.

    The batch begins with the decoding sequences, of one token each: `advance_tokens` computes all of them at once,
    updates their states [sequences, ..] in place, and returns the outputs. The prompts follow: `advance_chunk` gets a
    chunk of one prompt and its state, and returns the outputs and the next state. `inputs`: [tokens, ..] each, passed
    to both. `states`: [units, ..].
    """
    dtype = inputs[0].dtype
    decode_count = len(plan.decode_units)
    if decode_count:
        state = states[plan.decode_units].to(dtype)
        out[:decode_count] = advance_tokens(*(x[:decode_count] for x in inputs), state)
        states[plan.decode_units] = state.to(states.dtype)
    for start, end, unit in plan.prompt_spans:
        state = states[unit].to(dtype)
        for first_token in range(start, end, CHUNK_TOKENS):
            chunk = slice(first_token, min(first_token + CHUNK_TOKENS, end))
            out[chunk], state = advance_chunk(*(x[chunk] for x in inputs), state)
        states[unit] = state.to(states.dtype)


def _compute_decays(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decays within a chunk: the running sum a_t of log_decay, and exp(a_t - a_j) for each j <= t.

    Shapes: log_decay and a are [..., size], the pairs [..., size, size]. Sums are taken in fp64: under fast decay they
    are large, and their small differences matter.
    """
    decay_sum = log_decay.double().cumsum(-1)
    differences = (decay_sum[..., :, None] - decay_sum[..., None, :]).to(log_decay.dtype)
    is_future = differences.new_ones(differences.shape[-2:], dtype=torch.bool).triu(1)
    return decay_sum.to(log_decay.dtype), differences.masked_fill(is_future, float("-inf")).exp()


def gated_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, states: Tensor, plan: Any) -> Tensor:
    """Apply the gated delta rule: linear attention with a state that decays, and that moves towards each new value.

    q, k: [tokens, key_heads, key_dim], scaled to unit length here. v and the result: [tokens, value_heads, value_dim];
    value_heads is a multiple of key_heads. log_decay, rate: [tokens, value_heads]. states: [units, value_heads,
    key_dim, value_dim], the memory in which each sequence has a unit (see `plan`), updated in place.

    For each value head, with state S [key_dim, value_dim], q and k of unit length, g = log_decay <= 0 and b = rate:
        S <- exp(g_t) S;  u_t = b_t (v_t - k_t S);  S <- S + k_t^T u_t;  o_t = q_t S / sqrt(key_dim)
    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.)
    """
    dtype = get_accumulation_dtype(q.dtype)
    heads_per_key_head = v.shape[1] // q.shape[1]
    q, k = (_scale_to_unit_length(x.to(dtype)).repeat_interleave(heads_per_key_head, 1) for x in (q, k))
    inputs = (q * q.shape[-1] ** -0.5, k, v.to(dtype), log_decay.to(dtype), rate.to(dtype))
    out = torch.empty_like(v)
    _run_recurrence(inputs, out, states, plan, _advance_delta_state, _advance_delta_chunk)
    return out


def _scale_to_unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS)


def _advance_delta_state(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor) -> Tensor:
    """Apply the gated delta rule to one token of each of n sequences. Return the outputs; `state` changes in place.

    q, k: [n, value_heads, key_dim], repeated for the value heads that share a key head. The other shapes are those of
    `gated_delta`, with n instead of tokens and units.
    """
    state.mul_(log_decay.exp()[..., None, None])
    retrieved_value = (k[..., None, :] @ state)[..., 0, :]
    state.add_(k[..., None] * ((v - retrieved_value) * rate[..., None])[..., None, :])
    return (q[..., None, :] @ state)[..., 0, :]


def _advance_delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to a chunk of one sequence's tokens. Return (output, state after the chunk).

    Token t adds k_t^T u_t to the state S. The corrections u of all tokens solve one triangular system, with a_t the sum
    of log_decay up to t, and b = rate: u_t + b_t sum_{j<t} exp(a_t - a_j) (k_t . k_j) u_j = b_t (v_t - exp(a_t) k_t S).
    q, k: [tokens, value_heads, key_dim]. The other shapes are those of `gated_delta`, without an axis of units.
    """
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, tokens, dim]
    log_decay, rate = log_decay.t(), rate.t()
    decay_sum, pair_decay = _compute_decays(log_decay)
    decay_since_start = decay_sum.exp()[..., None]
    system = rate[..., None] * (k @ k.mT) * pair_decay
    target = rate[..., None] * (v - decay_since_start * (k @ state))
    # The solver takes the diagonal as ones, whatever the matrix has there.
    corrections = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    output = decay_since_start * (q @ state) + ((q @ k.mT) * pair_decay) @ corrections
    decay_to_end = pair_decay[:, -1, :, None]
    new_state = state * decay_since_start[:, -1:] + (k * decay_to_end).mT @ corrections
    return output.transpose(0, 1), new_state


def state_space(
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor, states: Tensor, plan: Any
) -> Tensor:
    """Apply Mamba-2's state-space recurrence (SSD) to a batch of decoding sequences and prompts.

    x and the result: [tokens, heads, head_dim]. dt (step size): [tokens, heads], positive. rate (A): [heads], negative.
    skip (D): [heads]. b, c: [tokens, groups, state_dim]; the heads of a group share them. states: [units, heads,
    head_dim, state_dim], the memory in which each sequence has a unit (see `plan`), updated in place.

    For each head, with state h [head_dim, state_dim]:
        h <- exp(A dt_t) h + dt_t x_t B_t^T;  y_t = h C_t + D x_t
    (Dao and Gu, "Transformers are SSMs", 2024.)
    """
    dtype = get_accumulation_dtype(x.dtype)
    values = x.to(dtype)
    dt = dt.to(dtype)
    inputs = (values * dt[..., None], dt * rate.to(dtype), b.to(dtype), c.to(dtype))
    out = torch.empty_like(values)
    _run_recurrence(inputs, out, states, plan, _advance_ssm_state, _advance_ssm_chunk)
    return out.addcmul_(values, skip.to(dtype)[:, None]).to(x.dtype)


def _advance_ssm_state(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """Apply Mamba-2's recurrence to one token of each of n sequences. Return the outputs; `state` changes in place.

    x: [n, heads, head_dim], multiplied by dt; log_decay: [n, heads]; b, c: [n, groups, state_dim].
    """
    heads_per_group = x.shape[1] // b.shape[1]
    state.mul_(log_decay.exp()[..., None, None])
    state.add_(x[..., None] * b.repeat_interleave(heads_per_group, 1)[..., None, :])
    return (state @ c.repeat_interleave(heads_per_group, 1)[..., None])[..., 0]


def _advance_ssm_chunk(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply Mamba-2's recurrence to a chunk of one sequence's tokens. Return (output, state after the chunk).

    x, output: [tokens, heads, dim]; b, c: [tokens, groups, state_dim]; state: [heads, dim, state_dim].
    """
    num_tokens, num_heads, dim = x.shape
    heads_by_group = (b.shape[1], num_heads // b.shape[1])
    x = x.transpose(0, 1).view(*heads_by_group, num_tokens, dim)
    b, c = (inputs.transpose(0, 1)[:, None] for inputs in (b, c))  # [groups, 1, tokens, state_dim]
    state = state.view(*heads_by_group, dim, -1)
    decay_sum, pair_decay = _compute_decays(log_decay.t().view(*heads_by_group, num_tokens))
    decay_since_start = decay_sum.exp()[..., None]
    output = ((c @ b.mT) * pair_decay) @ x + decay_since_start * (c @ state.mT)
    decay_to_end = pair_decay[..., -1, :, None]
    new_state = state * decay_since_start[..., -1:, :] + (x * decay_to_end).mT @ b
    return output.flatten(0, 1).transpose(0, 1), new_state.flatten(0, 1)
