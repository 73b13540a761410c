"""The recurrent operations of the Triton backend, and how their kernels are launched over a batch.

Decoding sequences take one launch together, prompts one to three. See `kernels.reference.recurrent` for the shapes.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

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

SCAN_WARPS = 4
"""Warps of the scans over a prompt's chunks: on an H100, 8 warps take twice as long for Mamba-2."""


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor, plan: RecurrentPlan, silu: bool
) -> Tensor:
    """Convolve each channel of a batch over its sequence's last `width` tokens. Returns [tokens, channels].

    The first sequences of the batch decode one token each, in one launch together. The others are prompts.
    x: [tokens, channels]. weight: [channels, width]. tails: [units, width - 1, channels], the inputs of each sequence
    before this step's tokens; updated in place. A sequence's unit, its index in `tails`, is in `plan.units`.
    """
    num_tokens, channels = x.shape
    width = weight.shape[1]
    assert x.stride(1) == tails.stride(2) == 1
    assert weight.is_contiguous()
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    strides = (x.stride(0), tails.stride(0), tails.stride(1), channels)
    bias_or_placeholder = weight if bias is None else bias  # without BIAS, the kernels read no bias
    inputs = (x, weight, bias_or_placeholder, tails)
    constants = {"WIDTH": width, "BIAS": bias is not None, "SILU": silu}
    channels_per_block = min(round_up_to_power_of_two(channels, 16), 256)
    channel_block_count = ceil_div(channels, channels_per_block)
    if plan.decode_count:
        triton_conv.convolve_step[(plan.decode_count, channel_block_count)](
            *inputs, plan.units, out, *strides, BLOCK=channels_per_block, **constants
        )
    prompt_count = plan.sequence_count - plan.decode_count
    if prompt_count:
        tile_block = min(channels_per_block, 64)
        triton_conv.convolve_tile[(plan.tile_seq.shape[0], ceil_div(channels, tile_block))](
            *inputs, plan.query_starts, plan.units, plan.tile_seq, plan.tile_token, out, *strides,
            TOKENS=STATE_CHUNK, BLOCK=tile_block, **constants,
        )  # fmt: skip
        triton_conv.update_tails[(prompt_count, channel_block_count)](
            x, tails, plan.query_starts, plan.units, *strides, plan.decode_count, WIDTH=width, BLOCK=channels_per_block
        )
    return out


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, states: Tensor, plan: RecurrentPlan
) -> Tensor:
    """Apply the gated delta rule to a batch: update the sequences' states, and return the output of each token.

    The rule is defined in `kernels.reference.recurrent`. The batch begins with the decoding sequences, of one token
    each, which one launch advances. Prompts are cut into chunks of `STATE_CHUNK` tokens and take two launches. The
    first does the work that needs no state, for all chunks at once. The second passes each state from chunk to chunk.

    q, k: [tokens, key_heads, key_dim]. v and the result: [tokens, heads, value_dim]. log_decay, rate: [tokens, heads].
    states: [units, heads, key_dim, value_dim].
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
    padded_value_dim = round_up_to_power_of_two(value_dim, 16)
    # Columns of a state are independent, so a program holds few of them in registers. The interpreter runs programs one
    # after another, and takes all.
    block_v = padded_value_dim if INTERPRETED else min(padded_value_dim, 32)
    padded_key_dim = round_up_to_power_of_two(key_dim, 16)
    constants = {"GROUP": num_heads // q.shape[1], "KEY": key_dim, "VALUE": value_dim, "BLOCK_K": padded_key_dim}
    value_block_count = ceil_div(value_dim, block_v)
    if plan.decode_count:
        triton_delta.advance_delta_state[(plan.decode_count, num_heads, value_block_count)](
            q, k, v, log_decay, rate, states, plan.units, out, *qk_strides, *v_strides, states.stride(0), num_heads,
            scale,
            BLOCK_V=block_v, **constants,
        )  # fmt: skip
    prompt_count = plan.sequence_count - plan.decode_count
    if prompt_count:
        # Results of the first launch for the second. A token changes the state S that its chunk begins with by
        # new_v - new_k @ S. `inner` has the product of the token's query with each key of its chunk.
        new_v, new_k, inner = (
            torch.empty((num_tokens, num_heads, size), dtype=torch.float32, device=v.device)
            for size in (value_dim, key_dim, STATE_CHUNK)
        )
        chunk_constants = {"CHUNK": STATE_CHUNK, "PRECISION": choose_dot_precision(v)}
        triton_delta.prepare_delta_chunks[(plan.tile_seq.shape[0], num_heads)](
            q, k, v, log_decay, rate, plan.query_starts, plan.tile_seq, plan.tile_token, new_v, new_k, inner,
            *qk_strides, *v_strides, num_heads, scale, GROUP=num_heads // q.shape[1], KEY=key_dim, VALUE=value_dim,
            LEVELS=STATE_CHUNK.bit_length() - 1, BLOCK=min(64, max(padded_value_dim, padded_key_dim)), num_warps=4,
            **chunk_constants,
        )  # fmt: skip
        triton_delta.scan_delta_chunks[(prompt_count, num_heads, value_block_count)](
            q, k, log_decay, new_v, new_k, inner, states, plan.query_starts, plan.units, out, *qk_strides,
            states.stride(0),
            num_heads, scale, plan.decode_count, BLOCK_V=block_v, num_warps=SCAN_WARPS,
            num_stages=choose_scan_stages(padded_key_dim, v.device), **chunk_constants, **constants,
        )  # fmt: skip
    return out


def state_space(
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor, states: Tensor, plan: RecurrentPlan
) -> Tensor:
    """Advance the Mamba-2 states of a batch in place, and return the outputs: [tokens, heads, head_dim].

    A decoding sequence advances by one token. A prompt is scanned in chunks of `STATE_CHUNK` tokens.
    x: [tokens, heads, head_dim]. b and c: [tokens, groups, state_dim]. states: [units, heads, head_dim, state_dim].
    """
    num_tokens, num_heads, head_dim = x.shape
    state_dim = b.shape[2]
    assert states.stride()[1:] == (head_dim * state_dim, state_dim, 1)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=x.dtype, device=x.device)
    inputs = (x, dt.contiguous(), rate, b, c, skip, states)
    bc_strides = (b.stride(0), b.stride(1), c.stride(0), c.stride(1))
    strides = (x.stride(0), x.stride(1), *bc_strides, states.stride(0), num_heads)
    padded_dim = round_up_to_power_of_two(head_dim, 16)
    dims_per_block = padded_dim if INTERPRETED else min(padded_dim, 32)
    padded_state_dim = round_up_to_power_of_two(state_dim, 16)
    block_sizes = {"BLOCK_P": dims_per_block, "BLOCK_S": padded_state_dim}
    constants = {"PER_GROUP": num_heads // b.shape[1], "DIM": head_dim, "STATE": state_dim, **block_sizes}
    dim_block_count = ceil_div(head_dim, dims_per_block)
    if plan.decode_count:
        triton_ssm.advance_ssm_state[(plan.decode_count, num_heads, dim_block_count)](
            *inputs, plan.units, out, *strides, **constants
        )
    prompt_count = plan.sequence_count - plan.decode_count
    if prompt_count:
        num_groups = b.shape[1]
        chunk_constants = {"CHUNK": STATE_CHUNK, "PRECISION": choose_dot_precision(x)}
        scores = torch.empty((num_tokens, num_groups, STATE_CHUNK), dtype=torch.float32, device=x.device)
        triton_ssm.compute_ssm_scores[(plan.tile_seq.shape[0], num_groups)](
            b, c, plan.query_starts, plan.tile_seq, plan.tile_token, scores, *bc_strides, num_groups,
            STATE=state_dim, BLOCK=min(64, padded_state_dim), **chunk_constants,
        )  # fmt: skip
        triton_ssm.scan_ssm_chunks[(prompt_count, num_heads, dim_block_count)](
            *inputs, scores, plan.query_starts, plan.units, out, *strides, plan.decode_count,
            num_warps=SCAN_WARPS, num_stages=choose_scan_stages(padded_state_dim, x.device),
            **chunk_constants, **constants,
        )  # fmt: skip
    return out


def choose_scan_stages(state_width: int, device: torch.device) -> int:
    """Return how many chunks a scan has in shared memory: two, so that one is loaded meanwhile, if they fit."""
    return 2 if state_width <= 128 and has_large_shared_memory(device) else 1
