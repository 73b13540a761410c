"""Triton kernels: storing K and V in the paged cache, and causal attention over it, for decode and for prefill.

Work on a whole ragged batch at once; every size that varies from step to step is read from device memory, so the
launches of a decode batch can be captured in a CUDA graph. A tile of keys is gathered by token row (block table entry
plus offset), so any block size and any stride between units works. Keys outside a sequence's context or window are
never loaded, whatever bytes lie there.

The running softmax over tiles is FlashAttention's (Dao, 2023); decode is cut along the context and put together
afterwards as in Flash-Decoding (Dao et al., 2023); the query heads of one KV head share a tile of keys.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """acc + a @ b, summed in fp32. WIDE multiplies in fp32: the interpreter has no 16-bit products."""
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["layer_row"])
def store_kv(
    k_ptr, v_ptr, cache_ptr, slots_ptr, k_token, k_head, v_token, v_head, layer_row,
    DIM: tl.constexpr, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a token: its K and V rows go to the slot's row; a negative slot is padding."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < tl.where(slot >= 0, ROW, 0)
    head = at // DIM
    dim = at % DIM
    k = tl.load(k_ptr + token * k_token + head * k_head + dim, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * v_token + head * v_head + dim, mask=mask, other=0.0)
    target = cache_ptr + (slot + layer_row) * ROW + at
    tl.store(target, k, mask=mask)
    tl.store(target + BLOCK_SIZE * ROW, v, mask=mask)


@triton.jit
def attend_tile(
    acc, total, peak, q, cache_ptr, table_ptr, table_block, start, end, query_at, offset, layer_row, scale,
    dim, DIM: tl.constexpr, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Take the keys [start, start + BLOCK_N), cut at `end`, into a running softmax.

    q: [M, D]; query_at: [M], position of each query; acc [M, D], total [M], peak [M] are its state, in powers of two.
    Without MASKED all keys lie before `end` and are seen by every query.
    """
    key_at = start + tl.arange(0, BLOCK_N)
    if MASKED:
        inside = key_at < end
        entry = tl.load(table_ptr + key_at // BLOCK_SIZE * table_block, mask=inside, other=0)
        load_mask = inside[:, None] & (dim < DIM)[None, :]
    else:
        entry = tl.load(table_ptr + key_at // BLOCK_SIZE * table_block)
        load_mask = (dim < DIM)[None, :]
    row = (entry + key_at % BLOCK_SIZE + layer_row).to(tl.int64) * ROW + offset
    source = cache_ptr + row[:, None] + dim[None, :]
    k = tl.load(source, mask=load_mask, other=0.0)
    scores = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
    scores = dot(q, tl.trans(k), scores, PRECISION, WIDE) * scale
    if MASKED:
        is_visible = (key_at[None, :] <= query_at[:, None]) & inside[None, :]
        if WINDOW > 0:
            is_visible = is_visible & (key_at[None, :] > query_at[:, None] - WINDOW)
        scores = tl.where(is_visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no key seen yet: everything stays zero
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weights, 1)
    v = tl.load(source + BLOCK_SIZE * ROW, mask=load_mask, other=0.0)
    acc = dot(weights.to(v.dtype), v, acc * fade[:, None], PRECISION, WIDE)
    return acc, total, new_peak


@triton.jit(do_not_specialize=["table_block", "layer_row"])
def decode_attention(
    q_ptr, out_ptr, part_ptr, part_scale_ptr, cache_ptr, table_ptr, lens_ptr, q_token, q_head, table_block,
    layer_row, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Grid (sequences, kv heads, splits): the query heads of one KV head over one part of a sequence's context.

    Without SPLIT the result goes to out [sequences, heads, dim], else to part [sequences, heads, splits, dim] and its
    log2 of the softmax's sum to part_scale [sequences, heads, splits], for `join_splits`.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(lens_ptr + seq).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    splits = tl.num_programs(2)
    share = tl.cdiv(tl.cdiv(context - first, splits), BLOCK_N) * BLOCK_N
    start = first + split * share
    end = tl.minimum(start + share, context)

    heads = tl.num_programs(1) * GROUP
    member = tl.arange(0, BLOCK_M)
    if SPLIT:  # noqa: SIM102 - known when it is compiled
        if start >= end:  # a short context has fewer parts: `join_splits` passes over those without weight
            place = (seq * heads + kv_head * GROUP + member) * splits + split
            tl.store(part_scale_ptr + place, tl.zeros((BLOCK_M,), tl.float32) - float("inf"), member < GROUP)
            return
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + member
    query_mask = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    q = tl.load(q_ptr + seq * q_token + head[:, None] * q_head + dim[None, :], mask=query_mask, other=0.0)
    query_at = tl.zeros((BLOCK_M,), tl.int32) + context - 1
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.zeros((BLOCK_M,), tl.float32) - float("inf")
    for at in range(start, end, BLOCK_N):
        acc, total, peak = attend_tile(
            acc, total, peak, q, cache_ptr, table_ptr + seq, table_block, at, end, query_at, kv_head * DIM, layer_row,
            scale, dim, DIM, ROW, BLOCK_SIZE, BLOCK_N, WINDOW, True, PRECISION, WIDE,
        )  # fmt: skip
    total = tl.where(total > 0.0, total, 1.0)
    acc = acc / total[:, None]
    if SPLIT:
        place = (seq * heads + head) * splits + split
        tl.store(part_ptr + place[:, None] * DIM + dim[None, :], acc, query_mask)
        tl.store(part_scale_ptr + place, peak + tl.log2(total), member < GROUP)
    else:
        tl.store(
            out_ptr + (seq * heads + head[:, None]) * DIM + dim[None, :], acc.to(out_ptr.dtype.element_ty), query_mask
        )


@triton.jit(do_not_specialize=["splits"])
def join_splits(
    out_ptr, part_ptr, part_scale_ptr, splits, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Grid (sequences, heads): the up to BLOCK parts of one head's context as one, each weighed by its softmax sum."""
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, BLOCK)
    dim = tl.arange(0, BLOCK_D)
    scale = tl.load(part_scale_ptr + row * splits + split, mask=split < splits, other=float("-inf"))
    peak = tl.max(scale, 0)
    weight = tl.exp2(scale - tl.where(peak == float("-inf"), 0.0, peak))
    dim_mask = dim < DIM
    part_mask = dim_mask[None, :] & (weight > 0.0)[:, None]
    part = tl.load(part_ptr + (row * splits + split[:, None]) * DIM + dim[None, :], mask=part_mask, other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * DIM + dim, out.to(out_ptr.dtype.element_ty), dim_mask)


@triton.jit(do_not_specialize=["table_block", "layer_row"])
def prefill_attention(
    q_ptr, out_ptr, cache_ptr, table_ptr, starts_ptr, lens_ptr, tile_seq_ptr, tile_query_ptr, q_token, q_head,
    table_block, layer_row, scale, heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Grid (tiles, kv heads): BLOCK_Q queries of a sequence, times the GROUP query heads of one KV head.

    Tile i is the queries from tile_query[i] of sequence tile_seq[i]. Keys that every query of the tile sees are taken
    without a mask, the rest (the diagonal, a window's edge) with one.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.load(tile_seq_ptr + tile).to(tl.int64)
    query = tl.load(tile_query_ptr + tile)
    begin = tl.load(starts_ptr + seq)
    count = tl.load(starts_ptr + seq + 1) - begin
    context_before = tl.load(lens_ptr + seq) - count  # position of the sequence's first query

    member = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    index = query + member // GROUP
    head = kv_head * GROUP + member % GROUP
    query_mask = ((member < BLOCK_Q * GROUP) & (index < count))[:, None] & (dim < DIM)[None, :]
    token = (begin + index).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * q_token + head[:, None] * q_head + dim[None, :], mask=query_mask, other=0.0)
    query_at = context_before + index
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.zeros((BLOCK_M,), tl.float32) - float("inf")

    table_ptr += seq
    end = context_before + tl.minimum(query + BLOCK_Q, count)
    masked_from = 0
    if WINDOW > 0:
        masked_from = tl.maximum(context_before + query - WINDOW + 1, 0)
    else:
        masked_from = (context_before + query + 1) // BLOCK_N * BLOCK_N
        for at in range(0, masked_from, BLOCK_N):
            acc, total, peak = attend_tile(
                acc, total, peak, q, cache_ptr, table_ptr, table_block, at, end, query_at, kv_head * DIM, layer_row,
                scale, dim, DIM, ROW, BLOCK_SIZE, BLOCK_N, WINDOW, False, PRECISION, WIDE,
            )  # fmt: skip
    for at in range(masked_from, end, BLOCK_N):
        acc, total, peak = attend_tile(
            acc, total, peak, q, cache_ptr, table_ptr, table_block, at, end, query_at, kv_head * DIM, layer_row, scale,
            dim, DIM, ROW, BLOCK_SIZE, BLOCK_N, WINDOW, True, PRECISION, WIDE,
        )  # fmt: skip
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = out_ptr + (token[:, None] * heads + head[:, None]) * DIM + dim[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), query_mask)
