"""Triton kernels: storing K and V in the paged cache, and causal attention over it, for decode and for prefill.

They work on a whole ragged batch. Sizes that vary from step to step are read from device memory, so a decode batch can
be captured in a CUDA graph. Keys outside a sequence's context or window are never loaded, whatever bytes lie there. The
softmax over tiles is FlashAttention's (Dao, 2023); decodes are cut along the context (Flash-Decoding, 2023).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import launch_cheaply


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """Return acc + a @ b, summed in fp32. WIDE multiplies in fp32, as the interpreter has no 16-bit products."""
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@launch_cheaply
@triton.jit(do_not_specialize=["layer_row"])
def store_kv(
    k_ptr, v_ptr, cache_ptr, slots_ptr, k_token_stride, k_head_stride, v_token_stride, v_head_stride, layer_row,
    DIM: tl.constexpr, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store K and V of each token of a step in one layer of the paged cache. One program stores one token.

    The cache is an array of rows of ROW = kv heads * DIM elements, each K or V of one token in one layer. A cache block
    of BLOCK_SIZE tokens has for each layer BLOCK_SIZE rows of K and then BLOCK_SIZE rows of V.

    k, v: [tokens, kv heads, DIM]. slots: [tokens], row for a token's K in the first layer; negative: padding.
    layer_row: rows from the first layer's K to this layer's. BLOCK: ROW, rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    element = tl.arange(0, BLOCK)
    mask = element < tl.where(slot >= 0, ROW, 0)
    head = element // DIM
    dim = element % DIM
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=mask, other=0.0)
    target = cache_ptr + (slot + layer_row) * ROW + element
    tl.store(target, k, mask=mask)
    tl.store(target + BLOCK_SIZE * ROW, v, mask=mask)


@triton.jit
def attend_keys(
    acc, weight_sum, peak, q, cache_ptr, table_ptr, table_stride, start, end, query_positions, head_offset, layer_row,
    scale, dim, DIM: tl.constexpr, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Add the keys and values at positions [start, end) of a sequence to the attention of M queries, as FlashAttention.

    The running sums go in and come out: acc [M, D] of the weighted values, weight_sum [M] of the weights, and peak [M],
    the largest score so far. Weights are 2 ** (score - peak), so a larger score scales the sums down. With MASKED, keys
    after a query and keys outside WINDOW are left out; otherwise all queries see all keys, whole tiles of BLOCK_N.

    q [M, D]: queries, at query_positions [M]. table: the cache row at which each block of the sequence begins, one
    every `table_stride` elements. `store_kv` explains the rows and layer_row. A row has ROW elements, those of this KV
    head from head_offset on. dim [D]: 0, 1 ... D - 1, of which DIM are real and the others padding. scale: factor of
    the scores. `dot` explains PRECISION and WIDE.
    """
    for first_key in range(start, end, BLOCK_N):
        key_positions = first_key + tl.arange(0, BLOCK_N)
        block_ptrs = table_ptr + key_positions // BLOCK_SIZE * table_stride
        load_mask = (dim < DIM)[None, :]
        if MASKED:
            is_inside = key_positions < end
            block_row = tl.load(block_ptrs, mask=is_inside, other=0)
            load_mask = is_inside[:, None] & load_mask
        else:
            block_row = tl.load(block_ptrs)
        key_row = block_row + key_positions % BLOCK_SIZE + layer_row
        source = cache_ptr + (key_row.to(tl.int64) * ROW + head_offset)[:, None] + dim[None, :]
        k = tl.load(source, mask=load_mask, other=0.0)
        zeros = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
        scores = dot(q, tl.trans(k), zeros, PRECISION, WIDE) * scale
        if MASKED:
            is_visible = (key_positions[None, :] <= query_positions[:, None]) & is_inside[None, :]
            if WINDOW > 0:
                is_visible = is_visible & (key_positions[None, :] > query_positions[:, None] - WINDOW)
            scores = tl.where(is_visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no key seen yet: everything stays zero
        weights = tl.exp2(scores - finite_peak[:, None])
        rescale = tl.exp2(peak - finite_peak)
        weight_sum = weight_sum * rescale + tl.sum(weights, 1)
        v = tl.load(source + BLOCK_SIZE * ROW, mask=load_mask, other=0.0)  # V is BLOCK_SIZE rows after K
        acc = dot(weights.to(v.dtype), v, acc * rescale[:, None], PRECISION, WIDE)
        peak = new_peak
    return acc, weight_sum, peak


@launch_cheaply
@triton.jit(do_not_specialize=["table_block", "layer_row"])
def decode_attention(
    q_ptr, out_ptr, part_ptr, part_log2_sum_ptr, cache_ptr, table_ptr, lens_ptr, q_token_stride, q_head_stride,
    table_block, layer_row, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Attend with one query of each sequence, for the query heads of one KV head, over one part of the context.

    The grid is (sequences, kv heads, splits). Without SPLIT the result goes to out [sequences, heads, dim]. Else it
    goes to part [sequences, heads, splits, dim], and the log2 of its softmax sum to part_log2_sum [sequences, heads,
    splits]. Then `combine_splits` combines the parts. Split contexts let few sequences fill the device.

    GROUP query heads share a KV head; BLOCK_M and BLOCK_D are GROUP and DIM, padded to what a matrix product takes.
    table: [blocks, sequences], a block's first row; lens: [sequences], the contexts' lengths. `store_kv` explains ROW
    and layer_row, `dot` explains PRECISION and WIDE.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(lens_ptr + seq).to(tl.int32)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(context_len - WINDOW, 0)
    splits = tl.num_programs(2)
    keys_per_split = tl.cdiv(tl.cdiv(context_len - first_key, splits), BLOCK_N) * BLOCK_N
    start = first_key + split * keys_per_split
    end = tl.minimum(start + keys_per_split, context_len)

    heads = tl.num_programs(1) * GROUP
    group_head = tl.arange(0, BLOCK_M)
    if SPLIT:  # noqa: SIM102 - known when it is compiled
        if start >= end:  # a short context has fewer parts: `combine_splits` ignores parts without weight
            part_index = (seq * heads + kv_head * GROUP + group_head) * splits + split
            no_weight = tl.zeros((BLOCK_M,), tl.float32) - float("inf")
            tl.store(part_log2_sum_ptr + part_index, no_weight, group_head < GROUP)
            return
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + group_head
    query_mask = (group_head < GROUP)[:, None] & (dim < DIM)[None, :]
    q = tl.load(q_ptr + seq * q_token_stride + head[:, None] * q_head_stride + dim[None, :], mask=query_mask, other=0.0)
    query_positions = tl.zeros((BLOCK_M,), tl.int32) + context_len - 1
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.zeros((BLOCK_M,), tl.float32) - float("inf")
    acc, weight_sum, peak = attend_keys(
        acc, weight_sum, peak, q, cache_ptr, table_ptr + seq, table_block, start, end, query_positions, kv_head * DIM,
        layer_row, scale, dim, DIM, ROW, BLOCK_SIZE, BLOCK_N, WINDOW, MASKED=True, PRECISION=PRECISION, WIDE=WIDE,
    )  # fmt: skip
    weight_sum = tl.where(weight_sum > 0.0, weight_sum, 1.0)
    acc = acc / weight_sum[:, None]
    if SPLIT:
        part_index = (seq * heads + head) * splits + split
        tl.store(part_ptr + part_index[:, None] * DIM + dim[None, :], acc, query_mask)
        tl.store(part_log2_sum_ptr + part_index, peak + tl.log2(weight_sum), group_head < GROUP)
    else:
        out_ptrs = out_ptr + (seq * heads + head[:, None]) * DIM + dim[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), query_mask)


@launch_cheaply
@triton.jit(do_not_specialize=["splits"])
def combine_splits(
    out_ptr, part_ptr, part_log2_sum_ptr, splits,
    DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Combine the attention over the parts ("splits") of a context into the attention over the whole context.

    It is the mean of the parts' results, weighed by the parts' sums of exponentials (Flash-Decoding). The sums are
    given as log2, and are divided by the largest one, so that they do not overflow.

    One program computes one head of one sequence: the grid is (sequences, heads). part: [sequences, heads, splits,
    DIM], attention over one part alone. part_log2_sum: [sequences, heads, splits]; -inf for a part without keys. out:
    [sequences, heads, DIM]. BLOCK_SPLITS, BLOCK_D: the largest number of splits, and DIM, rounded up to powers of two.
    """
    head_row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, BLOCK_SPLITS)
    dim = tl.arange(0, BLOCK_D)
    log2_sum = tl.load(part_log2_sum_ptr + head_row * splits + split, mask=split < splits, other=float("-inf"))
    peak = tl.max(log2_sum, 0)
    weight = tl.exp2(log2_sum - tl.where(peak == float("-inf"), 0.0, peak))
    dim_mask = dim < DIM
    part_mask = dim_mask[None, :] & (weight > 0.0)[:, None]
    part = tl.load(part_ptr + (head_row * splits + split[:, None]) * DIM + dim[None, :], mask=part_mask, other=0.0)
    weight_sum = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(weight_sum > 0.0, weight_sum, 1.0)
    tl.store(out_ptr + head_row * DIM + dim, out.to(out_ptr.dtype.element_ty), dim_mask)


@launch_cheaply
@triton.jit(do_not_specialize=["table_block", "layer_row"])
def prefill_attention(
    q_ptr, out_ptr, cache_ptr, table_ptr, starts_ptr, lens_ptr, tile_seq_ptr, tile_query_ptr, q_token_stride,
    q_head_stride, table_block, layer_row, scale, heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Compute causal attention of prompt tokens over the paged KV cache, with a running softmax.

    The grid is (tiles, kv heads). Tile i has BLOCK_Q queries of sequence tile_seq[i], from tile_query[i] on. A program
    computes one tile for the GROUP query heads that share one KV head, so it has BLOCK_M >= BLOCK_Q * GROUP rows, and
    goes over BLOCK_N keys at a time. Keys that every query of the tile sees are read without a mask; keys on the
    diagonal and at a window's edge are masked. BLOCK_D: DIM, rounded up to a power of two.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.load(tile_seq_ptr + tile).to(tl.int64)
    tile_query = tl.load(tile_query_ptr + tile)
    first_token = tl.load(starts_ptr + seq)
    query_count = tl.load(starts_ptr + seq + 1) - first_token
    first_position = tl.load(lens_ptr + seq) - query_count  # position of the sequence's first query

    tile_row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query_index = tile_query + tile_row // GROUP
    head = kv_head * GROUP + tile_row % GROUP
    query_mask = ((tile_row < BLOCK_Q * GROUP) & (query_index < query_count))[:, None] & (dim < DIM)[None, :]
    token = (first_token + query_index).to(tl.int64)
    q_ptrs = q_ptr + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    q = tl.load(q_ptrs, mask=query_mask, other=0.0)
    query_positions = first_position + query_index
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.zeros((BLOCK_M,), tl.float32) - float("inf")

    table_ptr += seq
    end = first_position + tl.minimum(tile_query + BLOCK_Q, query_count)
    if WINDOW > 0:
        masked_start = tl.maximum(first_position + tile_query - WINDOW + 1, 0)
    else:
        masked_start = (first_position + tile_query + 1) // BLOCK_N * BLOCK_N
        acc, weight_sum, peak = attend_keys(
            acc, weight_sum, peak, q, cache_ptr, table_ptr, table_block, 0, masked_start, query_positions,
            kv_head * DIM, layer_row, scale, dim, DIM, ROW, BLOCK_SIZE, BLOCK_N, WINDOW, MASKED=False,
            PRECISION=PRECISION, WIDE=WIDE,
        )  # fmt: skip
    acc, weight_sum, peak = attend_keys(
        acc, weight_sum, peak, q, cache_ptr, table_ptr, table_block, masked_start, end, query_positions, kv_head * DIM,
        layer_row, scale, dim, DIM, ROW, BLOCK_SIZE, BLOCK_N, WINDOW, MASKED=True, PRECISION=PRECISION, WIDE=WIDE,
    )  # fmt: skip
    acc = acc / tl.where(weight_sum > 0.0, weight_sum, 1.0)[:, None]
    target = out_ptr + (token[:, None] * heads + head[:, None]) * DIM + dim[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), query_mask)
