"""Triton kernels: causal depthwise convolution over a ragged batch, and the tails of inputs that later tokens need.

The same operation as in `kernels.reference.recurrent`. A prompt takes two launches, because all tiles must have read
the old tail before it changes. A decoding token takes one launch.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import launch_cheaply


@triton.jit
def add_bias_and_silu(total, bias_ptr, channel, mask, BIAS: tl.constexpr, SILU: tl.constexpr):
    """Add the bias if BIAS, and apply silu if SILU."""
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@launch_cheaply
@triton.jit
def convolve_step(
    x_ptr, weight_ptr, bias_ptr, tails_ptr, units_ptr, out_ptr, x_token_stride, tails_unit_stride, tails_row_stride,
    channels,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Apply a causal depthwise convolution to the one token of each decoding sequence, and update the kept inputs.

    A channel's output is the weighted sum of its last WIDTH inputs: the WIDTH - 1 in the sequence's tail, and the
    token's. The tail then drops its oldest input and takes the token's. x, out: [sequences, channels]. weight:
    [channels, WIDTH], oldest input first. tails: [units, WIDTH - 1, channels]. units: [sequences], index into tails; a
    negative one marks padding, which has no tail. The grid is (sequences, blocks of BLOCK channels).
    """
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    unit = tl.load(units_ptr + token).to(tl.int64)
    mask = channel < tl.where(unit >= 0, channels, 0)
    tail_ptrs = tails_ptr + unit * tails_unit_stride + channel
    x = tl.load(x_ptr + token * x_token_stride + channel, mask=mask, other=0.0)
    weight_ptrs = weight_ptr + channel * WIDTH
    newest_weight = tl.load(weight_ptrs + WIDTH - 1, mask=mask, other=0.0).to(tl.float32)
    total = x.to(tl.float32) * newest_weight
    for i in tl.static_range(WIDTH - 1):  # each thread reads its channel's row i before it overwrites row i - 1
        old_tail = tl.load(tail_ptrs + i * tails_row_stride, mask=mask, other=0.0)
        weight = tl.load(weight_ptrs + i, mask=mask, other=0.0).to(tl.float32)
        total += old_tail.to(tl.float32) * weight
        if i > 0:
            tl.store(tail_ptrs + (i - 1) * tails_row_stride, old_tail, mask=mask)
    tl.store(tail_ptrs + (WIDTH - 2) * tails_row_stride, x, mask=mask)
    total = add_bias_and_silu(total, bias_ptr, channel, mask, BIAS, SILU)
    tl.store(out_ptr + token * channels + channel, total.to(out_ptr.dtype.element_ty), mask=channel < channels)


@launch_cheaply
@triton.jit
def convolve_tile(
    x_ptr, weight_ptr, bias_ptr, tails_ptr, starts_ptr, units_ptr, tile_seq_ptr, tile_token_ptr, out_ptr,
    x_token_stride, tails_unit_stride, tails_row_stride, channels,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Apply a causal depthwise convolution to a tile of TOKENS tokens of a prompt, for one block of channels.

    A channel's output is the weighted sum of its last WIDTH inputs. Inputs before this step's tokens are in the
    sequence's tail. x, out: [tokens, channels]. weight: [channels, WIDTH], oldest input first. tails: [units,
    WIDTH - 1, channels]. starts: first token of each sequence, then the end of the last. units: each sequence's index
    into tails. tile_seq, tile_token: sequence and first token of each tile. The grid is (tiles, blocks of BLOCK
    channels).
    """
    tile = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seq = tl.load(tile_seq_ptr + tile)
    first_token = tl.load(starts_ptr + seq)
    end = tl.load(starts_ptr + seq + 1)
    tail_ptr = tails_ptr + tl.load(units_ptr + seq).to(tl.int64) * tails_unit_stride
    token = tl.load(tile_token_ptr + tile) + tl.arange(0, TOKENS)
    mask = (token < end)[:, None] & (channel < channels)[None, :]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for i in tl.static_range(WIDTH):
        source = token - (WIDTH - 1) + i
        is_current = (source >= first_token)[:, None]
        row = source.to(tl.int64)[:, None]
        x = tl.load(x_ptr + row * x_token_stride + channel[None, :], mask=mask & is_current, other=0.0)
        old_tail = tl.load(
            tail_ptr + (row - first_token + WIDTH - 1) * tails_row_stride + channel[None, :],
            mask=mask & (source < first_token)[:, None], other=0.0,
        )  # fmt: skip
        weight = tl.load(weight_ptr + channel * WIDTH + i, mask=channel < channels, other=0.0).to(tl.float32)
        total += tl.where(is_current, x, old_tail).to(tl.float32) * weight[None, :]
    total = add_bias_and_silu(total, bias_ptr, channel[None, :], (channel < channels)[None, :], BIAS, SILU)
    target = out_ptr + token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=mask)


@launch_cheaply
@triton.jit(do_not_specialize=["first_seq"])
def update_tails(
    x_ptr, tails_ptr, starts_ptr, units_ptr, x_token_stride, tails_unit_stride, tails_row_stride, channels, first_seq,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Keep the last WIDTH - 1 inputs of each prompt (its tail), which the convolution of its next tokens needs.

    They are the last rows of the old tail with this step's inputs after it. x: [tokens, channels]. tails: [units,
    WIDTH - 1, channels]. starts: first token of each sequence, then the end of the last. units: each sequence's index
    into tails. The prompts are the sequences from first_seq on. The grid is (prompts, blocks of BLOCK channels).
    """
    seq = first_seq + tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < channels
    first_token = tl.load(starts_ptr + seq)
    token_count = tl.load(starts_ptr + seq + 1) - first_token
    tail_ptrs = tails_ptr + tl.load(units_ptr + seq).to(tl.int64) * tails_unit_stride + channel
    for i in tl.static_range(WIDTH - 1):
        source_row = token_count + i  # greater than i, so an old row is read before it is overwritten
        is_old = channel < tl.where(source_row < WIDTH - 1, channels, 0)  # all channels or none
        old_tail = tl.load(tail_ptrs + source_row * tails_row_stride, mask=is_old, other=0.0)
        token = (first_token + source_row - (WIDTH - 1)).to(tl.int64)
        x = tl.load(x_ptr + token * x_token_stride + channel, mask=mask & (is_old == 0), other=0.0)
        tl.store(tail_ptrs + i * tails_row_stride, tl.where(is_old, old_tail, x), mask=mask)
