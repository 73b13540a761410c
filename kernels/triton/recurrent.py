"""The recurrent operations of the Triton backend: how their kernels are launched over a batch.

Decoding sequences take one launch together, prompts one to three. See `interface.Kernels` for the shapes.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.triton import conv as triton_conv
from kernels.triton import delta as triton_delta
from kernels.triton import ssm as triton_ssm
from kernels.triton.plan import INTERPRETED, STATE_CHUNK, RecurrentPlan, dot_precision, next_power_of_two


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor, plan: RecurrentPlan, silu: bool
) -> Tensor:
    tokens, channels = x.shape
    width = weight.shape[1]
    assert x.stride(1) == tails.stride(2) == 1
    assert weight.is_contiguous()
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    at = (x.stride(0), tails.stride(0), tails.stride(1), channels)
    some_bias = weight if bias is None else bias
    kind = {"WIDTH": width, "BIAS": bias is not None, "SILU": silu}
    block = min(next_power_of_two(channels, 16), 256)
    parts = triton.cdiv(channels, block)
    if plan.decode_count:
        triton_conv.conv_step[(plan.decode_count, parts)](
            x, weight, some_bias, tails, plan.units, out, *at, BLOCK=block, **kind
        )
    prompts = plan.sequences - plan.decode_count
    if prompts:
        tile_block = min(block, 64)
        triton_conv.conv_tile[(plan.tile_seq.shape[0], triton.cdiv(channels, tile_block))](
            x, weight, some_bias, tails, plan.starts, plan.units, plan.tile_seq, plan.tile_token, out, *at,
            TOKENS=STATE_CHUNK, BLOCK=tile_block, **kind,
        )  # fmt: skip
        triton_conv.conv_tails[(prompts, parts)](
            x, tails, plan.starts, plan.units, *at, plan.decode_count, WIDTH=width, BLOCK=block
        )
    return out


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, states: Tensor, plan: RecurrentPlan
) -> Tensor:
    tokens, heads, value = v.shape
    key = q.shape[2]
    assert states.stride()[1:] == (key * value, value, 1)
    out = torch.empty((tokens, heads, value), dtype=v.dtype, device=v.device)
    log_decay, rate, scale = log_decay.contiguous(), rate.contiguous(), key**-0.5
    qk_at = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    v_at = (v.stride(0), v.stride(1))
    whole_v = next_power_of_two(value, 16)
    block_v = whole_v if INTERPRETED else min(whole_v, 32)
    whole_k = next_power_of_two(key, 16)
    sizes = {"GROUP": heads // q.shape[1], "KEY": key, "VALUE": value, "BLOCK_K": whole_k}
    parts = triton.cdiv(value, block_v)
    if plan.decode_count:
        triton_delta.delta_step[(plan.decode_count, heads, parts)](
            q, k, v, log_decay, rate, states, plan.units, out, *qk_at, *v_at, states.stride(0), heads, scale,
            BLOCK_V=block_v, **sizes,
        )  # fmt: skip
    prompts = plan.sequences - plan.decode_count
    if prompts:
        new_v, new_k, inner = (
            torch.empty((tokens, heads, size), dtype=torch.float32, device=v.device)
            for size in (value, key, STATE_CHUNK)
        )
        chunks = {"CHUNK": STATE_CHUNK, "PRECISION": dot_precision(v)}
        triton_delta.prepare_chunks[(plan.tile_seq.shape[0], heads)](
            q, k, v, log_decay, rate, plan.starts, plan.tile_seq, plan.tile_token, new_v, new_k, inner,
            *qk_at, *v_at, heads, scale, GROUP=heads // q.shape[1], KEY=key, VALUE=value,
            LEVELS=STATE_CHUNK.bit_length() - 1, BLOCK=min(64, max(whole_v, whole_k)), num_warps=8, **chunks,
        )  # fmt: skip
        triton_delta.scan_chunks[(prompts, heads, parts)](
            q, k, log_decay, new_v, new_k, inner, states, plan.starts, plan.units, out, *qk_at, states.stride(0),
            heads, scale, plan.decode_count, BLOCK_V=block_v, num_warps=8, num_stages=1,
            **chunks, **sizes,
        )  # fmt: skip
    return out


def state_space(
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor, states: Tensor, plan: RecurrentPlan
) -> Tensor:
    tokens, heads, dim = x.shape
    state = b.shape[2]
    assert states.stride()[1:] == (dim * state, state, 1)
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    inputs = (x, dt.contiguous(), rate, b, c, skip, states)
    at = (x.stride(0), x.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1), states.stride(0), heads)
    padded_dim = next_power_of_two(dim, 16)
    block = padded_dim if INTERPRETED else min(padded_dim, 32)
    sizes = {"PER_GROUP": heads // b.shape[1], "DIM": dim, "STATE": state}
    sizes |= {"BLOCK_P": block, "BLOCK_S": next_power_of_two(state, 16)}
    parts = triton.cdiv(dim, block)
    if plan.decode_count:
        triton_ssm.ssm_step[(plan.decode_count, heads, parts)](*inputs, plan.units, out, *at, **sizes)
    prompts = plan.sequences - plan.decode_count
    if prompts:
        groups, chunks = b.shape[1], {"CHUNK": STATE_CHUNK, "PRECISION": dot_precision(x)}
        scores = torch.empty((tokens, groups, STATE_CHUNK), dtype=torch.float32, device=x.device)
        triton_ssm.ssm_scores[(plan.tile_seq.shape[0], groups)](
            b, c, plan.starts, plan.tile_seq, plan.tile_token, scores, *at[2:6], groups,
            STATE=state, BLOCK=min(64, sizes["BLOCK_S"]), **chunks,
        )  # fmt: skip
        triton_ssm.ssm_chunks[(prompts, heads, parts)](
            *inputs, scores, plan.starts, plan.units, out, *at, plan.decode_count,
            num_warps=8, num_stages=1, **chunks, **sizes,
        )  # fmt: skip
    return out
