"""Triton kernel: a token from each row of logits, by temperature, min_p, top_k and top_p; see `kernels.sampling`.

Nothing is sorted: a row's tokens are kept down to an edge, which is found by a search over the order of the logits'
bits. 16-bit logits take eight passes over the row at most, usually four or five. One program computes one row, so that
a row's sums do not depend on the batch. Sums inside a tile are fp32, over tiles fp64.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import launch_cheaply

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MAX_LOGIT = tl.constexpr(3.3895313892515355e38)  # the largest bf16
KEEP_ALL = tl.constexpr(2147483647)


@triton.jit
def load_logits(row_ptr, token_ids, vocab, floor):
    """Return fp32 logits at `token_ids`; -inf past the vocabulary, for NaN, and below `floor`."""
    logits = tl.load(row_ptr + token_ids, mask=token_ids < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(logits >= floor, tl.minimum(logits, MAX_LOGIT), float("-inf"))


@triton.jit
def encode_order(x, SHIFT: tl.constexpr):
    """Return the key of x: an int32 for each fp32 number, such that a larger number has a larger key.

    SHIFT: number of bits at the end of x that are always zero, as in a logit that was 16 bits wide. They are left out.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # one zero, not two
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def decode_order(key, SHIFT: tl.constexpr):
    """Return the number x of which `encode_order` returned `key`."""
    low = (1 << SHIFT) - 1
    bits = key << SHIFT
    bits = tl.where(key < 0, (bits | low) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def select_part(part, value_0, value_1, value_2, value_3):
    """Return the value of one of four parts; `part` is 0, 1, 2 or 3."""
    return tl.where(part == 3, value_3, tl.where(part == 2, value_2, tl.where(part == 1, value_1, value_0)))


@triton.jit
def count_tokens_from(row_ptr, vocab, floor, key, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Count the tokens with a key of at least `key`."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        keys = encode_order(load_logits(row_ptr, start + lane, vocab, floor), SHIFT)
        count += ((keys >= key) & (start + lane < vocab)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def find_edge(
    row_ptr, vocab, floor, peak, scale, target, low, high, at_low,
    COUNTS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the edge of top_k or top_p in a row of logits, without sorting: the key of the last token that is kept.

    A key is an integer in the order of the logits (`encode_order`, which explains SHIFT). The edge is the largest key
    for which the tokens with this key or a larger one amount to at least `target`. For top_k (COUNTS), tokens amount to
    their number: with keys 9, 7, 7, 3 and target 2, the edge is 7, as one token has a key of at least 8, and three have
    one of at least 7. For top_p, they amount to the sum of their weights, 2 ** ((logit - peak) * scale) each. Logits
    below `floor` count as -inf.

    The search halves the interval [low, high) twice in each pass over the row, by the amounts from three pivots on. At
    the start, the tokens from `low` on amount to `at_low`, at least `target`, and no token has a key of `high` or more.
    low and high are int64. Returns (edge, amount from the edge on, amount above the edge). A search that counts ends
    early at a key from which on there are exactly `target` tokens; the amount above it then has no meaning.
    """
    lane = tl.arange(0, BLOCK)
    lane_type: tl.constexpr = tl.int32 if COUNTS else tl.float32
    sum_type: tl.constexpr = tl.int32 if COUNTS else tl.float64
    at_high = at_low * 0
    amount_that_ends = target if COUNTS else -1
    while (high - low > 1) & (at_low != amount_that_ends):
        step = tl.maximum((high - low) // 4, 1)
        pivot_1 = tl.minimum(low + step, high - 1)
        pivot_2 = tl.minimum(pivot_1 + step, high - 1)
        pivot_3 = tl.minimum(pivot_2 + step, high - 1)
        key_1, key_2, key_3 = pivot_1.to(tl.int32), pivot_2.to(tl.int32), pivot_3.to(tl.int32)
        sums_1 = tl.zeros((BLOCK,), lane_type)
        sums_2 = tl.zeros((BLOCK,), lane_type)
        sums_3 = tl.zeros((BLOCK,), lane_type)
        for tile_start in tl.range(0, vocab, BLOCK, num_stages=3):
            logits = load_logits(row_ptr, tile_start + lane, vocab, floor)
            keys = encode_order(logits, SHIFT)
            amount = 1 if COUNTS else tl.exp2((logits - peak) * scale)
            sums_1 += tl.where(keys >= key_1, amount, 0)
            sums_2 += tl.where(keys >= key_2, amount, 0)
            sums_3 += tl.where(keys >= key_3, amount, 0)
        at_1 = tl.sum(sums_1.to(sum_type), 0)
        at_2 = tl.sum(sums_2.to(sum_type), 0)
        at_3 = tl.sum(sums_3.to(sum_type), 0)
        part = (at_1 >= target).to(tl.int32) + (at_2 >= target).to(tl.int32) + (at_3 >= target).to(tl.int32)
        low = select_part(part, low, pivot_1, pivot_2, pivot_3)
        high = select_part(part, pivot_1, pivot_2, pivot_3, high)
        at_low = select_part(part, at_low, at_1, at_2, at_3)
        at_high = select_part(part, at_1, at_2, at_3, at_high)
    return low, at_low, at_high


@triton.jit
def sum_mass_above(row_ptr, vocab, floor, peak, scale, edge, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return (weight of the tokens above the edge, number of tokens on the edge)."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.float32)
    tie_count = tl.zeros((BLOCK,), tl.int32)
    for tile_start in tl.range(0, vocab, BLOCK, num_stages=3):
        logits = load_logits(row_ptr, tile_start + lane, vocab, floor)
        keys = encode_order(logits, SHIFT)
        mass += tl.where(keys > edge, tl.exp2((logits - peak) * scale), 0.0)
        tie_count += (keys == edge).to(tl.int32)
    return tl.sum(mass.to(tl.float64), 0), tl.sum(tie_count, 0)


@triton.jit
def find_token(
    row_ptr, vocab, floor, peak, scale, edge, quota, target_mass, token, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Draw a token: add up the weights of a row's kept tokens by rising id, and return the one that passes the target.

    With weights 3, 1, 2 and target_mass 3.5, that is the second token. The caller takes `target_mass` at random, below
    the sum of all. So a token is drawn in proportion to its weight, 2 ** ((logit - peak) * scale). A token is kept if
    its key (`encode_order`, an integer in the order of logits) is above `edge`, and so are the first `quota` tokens on
    the edge. Logits below `floor` count as -inf. Returns `token` if by rounding no sum passes `target_mass`.
    """
    lane = tl.arange(0, BLOCK)
    mass_before = target_mass * 0.0  # weight of the tiles before this one; zero of the same type
    tile_start = tl.full((), 0, tl.int32)
    while tile_start < vocab:
        logits = load_logits(row_ptr, tile_start + lane, vocab, floor)
        keys = encode_order(logits, SHIFT)
        is_on_edge = (keys == edge).to(tl.int32)
        edge_count = tl.sum(is_on_edge, 0)
        is_kept = keys >= edge
        if edge_count > quota:  # only the first of the tokens on the edge are kept
            is_kept = (keys > edge) | ((is_on_edge > 0) & (tl.cumsum(is_on_edge, 0) <= quota))
        weight = tl.where(is_kept, tl.exp2((logits - peak) * scale), 0.0)
        mass = tl.sum(weight, 0).to(tl.float64)
        if mass_before + mass > target_mass:
            running_mass = mass_before + tl.cumsum(weight, 0).to(tl.float64)
            is_past = (running_mass > target_mass) & (weight > 0.0)
            first_past = tl.min(tl.where(is_past, tile_start + lane, vocab), 0)
            last_kept = tl.max(tl.where(weight > 0.0, tile_start + lane, 0), 0)
            token = tl.minimum(first_past, last_kept)  # by rounding, no token may be past
            tile_start = tile_start * 0 + vocab  # ends the loop
        else:
            mass_before += mass
            quota -= tl.minimum(edge_count, quota)
            tile_start += BLOCK
    return token


@launch_cheaply
@triton.jit
def draw_rows(
    logits_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, uniforms_ptr, out_ptr, logits_row_stride, vocab,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Draw the token of one row of logits, as `kernels.sampling` defines it. The grid is (rows).

    The likeliest token is drawn if the temperature is 0. Else top_k and top_p move the edge up, the key of the last
    token that is kept, and `quota` says how many tokens on the edge are kept. Then `find_token` draws a kept token.
    SHIFT: number of bits that fp32 has more than the type of the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row_stride
    lane = tl.arange(0, BLOCK)
    lane_best = tl.full((BLOCK,), float("-inf"), tl.float32)
    lane_best_id = tl.zeros((BLOCK,), tl.int32)
    for tile_start in tl.range(0, vocab, BLOCK, num_stages=3):
        logits = load_logits(row_ptr, tile_start + lane, vocab, float("-inf"))
        is_better = logits > lane_best
        lane_best = tl.where(is_better, logits, lane_best)
        lane_best_id = tl.where(is_better, tile_start + lane, lane_best_id)
    highest = tl.max(lane_best, 0)
    token = tl.min(tl.where(lane_best == highest, lane_best_id, vocab), 0)
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0.0) & (highest > float("-inf")):
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        scale = LOG2_E / temperature
        lowest = encode_order(tl.full((), float("-inf"), tl.float32), SHIFT)
        floor = tl.full((), float("-inf"), tl.float32)
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0.0:
            floor = highest + temperature * tl.log2(min_p) * LN_2
        edge = lowest.to(tl.int64)
        end = encode_order(highest, SHIFT).to(tl.int64) + 1
        quota = tl.full((), KEEP_ALL, tl.int32)
        if top_k < vocab:
            # Every lane of the first pass has a token as large as its best: BLOCK tokens are as large as their least.
            low_value = tl.where(top_k <= BLOCK, tl.maximum(tl.min(lane_best, 0), floor), floor)
            low = encode_order(low_value, SHIFT)
            count = count_tokens_from(row_ptr, vocab, floor, low, SHIFT, BLOCK)
            if count >= top_k:
                edge, from_edge, over_edge = find_edge(
                    row_ptr, vocab, floor, highest, scale, top_k, low.to(tl.int64), end, count, True, SHIFT, BLOCK
                )
                quota = tl.where(from_edge == top_k, KEEP_ALL, top_k - over_edge)
        mass_over_edge, ties = sum_mass_above(row_ptr, vocab, floor, highest, scale, edge.to(tl.int32), SHIFT, BLOCK)
        edge_weight = tl.exp2((decode_order(edge.to(tl.int32), SHIFT) - highest) * scale).to(tl.float64)
        total_mass = mass_over_edge + tl.minimum(ties, quota).to(tl.float64) * edge_weight
        if top_p < 1.0:
            target_mass = top_p * total_mass
            # All tokens lighter than this together weigh less than what may be left out.
            negligible_mass = (1.0 - top_p) * total_mass / (2.0 * vocab)
            low_value = highest + temperature * tl.log2(negligible_mass.to(tl.float32)) * LN_2
            low = tl.maximum(edge, tl.minimum(encode_order(low_value, SHIFT).to(tl.int64), end - 1))
            new_edge, _, mass_over_edge = find_edge(
                row_ptr, vocab, floor, highest, scale, target_mass, low, end, target_mass, False, SHIFT, BLOCK
            )
            edge_weight = tl.exp2((decode_order(new_edge.to(tl.int32), SHIFT) - highest) * scale).to(tl.float64)
            new_quota = tl.maximum(tl.ceil((target_mass - mass_over_edge) / edge_weight), 1.0)
            new_quota = tl.minimum(new_quota, 2147483647.0).to(tl.int32)
            quota = tl.where(new_edge == edge, tl.minimum(quota, new_quota), new_quota)
            edge = new_edge
            total_mass = mass_over_edge + quota.to(tl.float64) * edge_weight
        token_target_mass = tl.load(uniforms_ptr + row).to(tl.float64) * total_mass
        token = find_token(
            row_ptr, vocab, floor, highest, scale, edge.to(tl.int32), quota, token_target_mass, token, SHIFT, BLOCK
        )  # fmt: skip
    tl.store(out_ptr + row, token.to(tl.int64))
