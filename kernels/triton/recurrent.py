"""The recurrent operations of the Triton backend, and how their kernels are launched over a batch.

`kernels.reference.recurrent` defines the operations, and gives the shapes. A batch begins with the decoding sequences,
of one token each, which take one launch together. Prompts take two.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.interface import ceil_div
from kernels.triton import conv as triton_conv
from kernels.triton import delta as triton_delta
from kernels.triton import ssm as triton_ssm
from kernels.triton.plan import (
    INTERPRETED,
    STATE_CHUNK,
    RecurrentPlan,
    choose_dot_precision,
    has_large_shared_memory,
    round_up_to_power_of_two,
)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor, plan: RecurrentPlan, silu: bool
) -> Tensor:
    """Apply a causal depthwise convolution: each output channel is a weighted sum of its last `width` inputs."""
    num_tokens, channels = x.shape
    width = weight.shape[1]
    assert x.stride(1) == tails.stride(2) == 1
    assert weight.is_contiguous()
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    strides = (x.stride(0), tails.stride(0), tails.stride(1), channels)
    bias_or_unused = weight if bias is None else bias  # without BIAS, the kernels read no bias
    inputs = (x, weight, bias_or_unused, tails)
    constants = {"WIDTH": width, "BIAS": bias is not None, "SILU": silu}
    channels_per_block = min(round_up_to_power_of_two(channels, 16), 256)
    channel_block_count = ceil_div(channels, channels_per_block)

    if plan.decode_count:
        triton_conv.convolve_step[(plan.decode_count, channel_block_count)](
            *inputs, plan.units, out, *strides, BLOCK=channels_per_block, **constants
        )
    if plan.prompt_count:
        tile_block = min(channels_per_block, 64)
        triton_conv.convolve_tile[(plan.tile_seq.shape[0], ceil_div(channels, tile_block))](
            *inputs, plan.query_starts, plan.units, plan.tile_seq, plan.tile_token, out, *strides,
            TOKENS=STATE_CHUNK, BLOCK=tile_block, **constants,
        )  # fmt: skip
        triton_conv.update_tails[(plan.prompt_count, channel_block_count)](
            x, tails, plan.query_starts, plan.units, *strides, plan.decode_count, WIDTH=width, BLOCK=channels_per_block
        )
    return out


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, states: Tensor, plan: RecurrentPlan
) -> Tensor:
    """Apply the gated delta rule (linear attention) to a batch: update the sequences' states, and return the outputs.

    Of prompts, a first launch does the work that needs no state, for all chunks of `STATE_CHUNK` tokens at once. A
    second one passes each state from chunk to chunk.
    """
    num_tokens, num_heads, value_dim = v.shape
    key_dim = q.shape[2]
    assert states.stride()[1:] == (key_dim * value_dim, value_dim, 1)
    out = torch.empty((num_tokens, num_heads, value_dim), dtype=v.dtype, device=v.device)
    log_decay = log_decay.contiguous()
    rate = rate.contiguous()
    scale = key_dim**-0.5
    qk_strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    v_strides = (v.stride(0), v.stride(1))
    padded_key_dim = round_up_to_power_of_two(key_dim, 16)
    padded_value_dim = round_up_to_power_of_two(value_dim, 16)
    # A program holds few columns of a state in registers. The interpreter takes all, as its programs are slow.
    block_v = padded_value_dim if INTERPRETED else min(padded_value_dim, 32)
    value_block_count = ceil_div(value_dim, block_v)
    constants: dict[str, Any] = {"GROUP": num_heads // q.shape[1], "KEY": key_dim, "VALUE": value_dim}

    if plan.decode_count:
        triton_delta.advance_delta_state[(plan.decode_count, num_heads, value_block_count)](
            q, k, v, log_decay, rate, states, plan.units, out,
            *qk_strides, *v_strides, states.stride(0), num_heads, scale,
            BLOCK_K=padded_key_dim, BLOCK_V=block_v, **constants,
        )  # fmt: skip
    if plan.prompt_count:
        # A token changes the state S that its chunk begins with by new_v - new_k @ S. `inner` has the products of the
        # token's query with the keys of its chunk.
        new_v = torch.empty((num_tokens, num_heads, value_dim), dtype=torch.float32, device=v.device)
        new_k = torch.empty((num_tokens, num_heads, key_dim), dtype=torch.float32, device=v.device)
        inner = torch.empty((num_tokens, num_heads, STATE_CHUNK), dtype=torch.float32, device=v.device)
        constants |= {"CHUNK": STATE_CHUNK, "PRECISION": choose_dot_precision(v)}
        triton_delta.prepare_delta_chunks[(plan.tile_seq.shape[0], num_heads)](
            q, k, v, log_decay, rate, plan.query_starts, plan.tile_seq, plan.tile_token, new_v, new_k, inner,
            *qk_strides, *v_strides, num_heads, scale,
            LEVELS=STATE_CHUNK.bit_length() - 1, BLOCK=min(64, max(padded_value_dim, padded_key_dim)), num_warps=4,
            **constants,
        )  # fmt: skip
        triton_delta.scan_delta_chunks[(plan.prompt_count, num_heads, value_block_count)](
            q, k, log_decay, new_v, new_k, inner, states, plan.query_starts, plan.units, out,
            *qk_strides, states.stride(0), num_heads, scale, plan.decode_count,
            BLOCK_K=padded_key_dim, BLOCK_V=block_v, **choose_scan_options(padded_key_dim, v.device), **constants,
        )  # fmt: skip
    return out


def state_space(
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor, states: Tensor, plan: RecurrentPlan
) -> Tensor:
    """Apply Mamba-2's recurrence to a batch: update the sequences' states, and return the outputs."""
    num_tokens, num_heads, head_dim = x.shape
    num_groups, state_dim = b.shape[1:]
    assert states.stride()[1:] == (head_dim * state_dim, state_dim, 1)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=x.dtype, device=x.device)
    inputs = (x, dt.contiguous(), rate, b, c, skip, states)

    bc_strides = (b.stride(0), b.stride(1), c.stride(0), c.stride(1))
    strides = (x.stride(0), x.stride(1), *bc_strides, states.stride(0), num_heads)
    padded_dim = round_up_to_power_of_two(head_dim, 16)
    dims_per_block = padded_dim if INTERPRETED else min(padded_dim, 32)
    padded_state_dim = round_up_to_power_of_two(state_dim, 16)
    block_sizes = {"BLOCK_P": dims_per_block, "BLOCK_S": padded_state_dim}
    constants = {"PER_GROUP": num_heads // num_groups, "DIM": head_dim, "STATE": state_dim, **block_sizes}
    dim_block_count = ceil_div(head_dim, dims_per_block)

    if plan.decode_count:
        triton_ssm.advance_ssm_state[(plan.decode_count, num_heads, dim_block_count)](
            *inputs, plan.units, out, *strides, **constants
        )
    if plan.prompt_count:
        chunk_constants = {"CHUNK": STATE_CHUNK, "PRECISION": choose_dot_precision(x)}
        # Products of each token's C with the B of the tokens of its chunk, which the heads of a group share.
        scores = torch.empty((num_tokens, num_groups, STATE_CHUNK), dtype=torch.float32, device=x.device)
        triton_ssm.compute_ssm_scores[(plan.tile_seq.shape[0], num_groups)](
            b, c, plan.query_starts, plan.tile_seq, plan.tile_token, scores, *bc_strides, num_groups,
            STATE=state_dim, BLOCK=min(64, padded_state_dim), **chunk_constants,
        )  # fmt: skip
        triton_ssm.scan_ssm_chunks[(plan.prompt_count, num_heads, dim_block_count)](
            *inputs, scores, plan.query_starts, plan.units, out, *strides, plan.decode_count,
            **choose_scan_options(padded_state_dim, x.device), **chunk_constants, **constants,
        )  # fmt: skip
    return out


def choose_scan_options(state_width: int, device: torch.device) -> dict[str, int]:
    """Return the options of a scan over a prompt's chunks. On an H100, 8 warps take twice as long for Mamba-2.

    Two chunks are in shared memory, so that one is loaded meanwhile, if they fit.
    """
    return {"num_warps": 4, "num_stages": 2 if state_width <= 128 and has_large_shared_memory(device) else 1}
