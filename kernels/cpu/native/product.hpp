// x @ W^T for bf16. Part of ops.cpp, compiled with it for the instruction sets that have fused multiply-add.
//
// W is packed once: panels of kPanel outputs, each [inputs / 2][kPanel] pairs of inputs. Six rows of x at a time are
// multiplied with as many columns of a panel as fill the registers with sums; the panel stays in the L2 cache meanwhile
// (the loop order of Goto and van de Geijn, 2008). Where the CPU multiplies pairs of bf16 (AVX512-BF16) both operands are
// read as they lie. Elsewhere x is first widened to fp32, and W is widened in the registers. Sums are fp32 either way.
#pragma once

#ifdef __AVX2__

#include "chunk.hpp"
#include "ops.hpp"
#include "simd.hpp"

namespace blockcast {

namespace {

constexpr int kTileWidth = kColumns * kLanes;  // columns that are multiplied at a time
constexpr i64 kPackedBytes = kPanel * 4;  // of one pair of inputs, for all outputs of a panel
constexpr i64 kStretch = 2048;  // pairs of inputs that are multiplied in one go
constexpr i64 kFewRows = 96;  // up to so many rows the time goes into reading W, so that it is fetched ahead
constexpr int kFactors = kPairs<Bf16> ? 1 : 2;  // 32-bit lanes of a row of x for each pair of inputs

// What is multiplied in one go: rows of x by `count` pairs of inputs of a panel.
struct Stretch {
    const char* x;  // its first row, from the first of these inputs on
    i64 x_stride;  // bytes
    const char* weights;
    i64 count;
    bool first, last;  // of the panel
    const char* ahead;  // weights to fetch meanwhile; null: none
};

// With few rows, the first pass over a stretch fetches the next one, which lies right behind, or each of two passes a half.
const char* find_ahead(i64 rows, i64 row, const char* weights, i64 count) {
    if (rows > kFewRows || row > kRows) return nullptr;
    return weights + count * kPackedBytes + (row == 0 ? 0 : count * kPackedBytes / 2);
}

ALWAYS_INLINE float lane_at(const char* at) {
    float lane;
    __builtin_memcpy(&lane, at, sizeof lane);
    return lane;
}

// What the n-th factor of each pair is multiplied with: the pairs themselves, or their n-th numbers, widened.
ALWAYS_INLINE Floats load_weights(const char* pairs, int n) {
    Bits bits;
    __builtin_memcpy(&bits, pairs, sizeof bits);
    if constexpr (!kPairs<Bf16>) bits = n == 0 ? bits << 16 : bits & 0xffff0000u;
    return reinterpret_cast<Floats>(bits);
}

// sums [R][kTileWidth] += R rows of x times kTileWidth columns of the stretch, from `weights` on.
template <int R, int Lines>
ALWAYS_INLINE void multiply_rows(const Stretch& s, const char* weights, Floats (*sums)[kColumns]) {
    for (i64 pair = 0; pair < s.count; ++pair) {
#pragma GCC unroll 8
        for (int line = 0; line < Lines; ++line) __builtin_prefetch(s.ahead + (pair * Lines + line) * 64, 0, 2);
#pragma GCC unroll 8
        for (int n = 0; n < kFactors; ++n) {
            Floats some[kColumns];
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) {
                some[c] = load_weights(weights + pair * kPackedBytes + c * sizeof(Floats), n);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Floats factor = every(lane_at(s.x + r * s.x_stride + (pair * kFactors + n) * 4));
#pragma GCC unroll 8
                for (int c = 0; c < kColumns; ++c) sums[r][c] = multiply_add<Bf16>(sums[r][c], some[c], factor);
            }
        }
    }
}

// What a stretch adds to R rows of kTileWidth outputs, from `row` and `output` on. `partial`: their sums so far and,
// unless it is the last stretch, again afterwards; [R][kPanel].
template <int R>
void product_rows(const Product& p, const Stretch& s, i64 row, i64 output, float* partial) {
    Floats sums[R][kColumns];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) sums[r][c] = s.first ? Floats{} : load(partial + r * kPanel + c * kLanes);
    }
    const char* const weights = s.weights + output % kPanel * 4;
    if (s.ahead == nullptr) multiply_rows<R, 0>(s, weights, sums);
    else if (p.rows > kRows) multiply_rows<R, 2>(s, weights, sums);
    else multiply_rows<R, 4>(s, weights, sums);
    if (!s.last) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) store(partial + r * kPanel + c * kLanes, sums[r][c]);
        }
        return;
    }
    const auto* bias = static_cast<const Bf16*>(p.bias);
    for (int c = 0; c < kColumns; ++c) {
        const i64 at = output + c * kLanes, left = p.outputs - at;
        if (left <= 0) break;
        const Floats more = bias == nullptr ? Floats{} : load_some(bias + at, left);
        for (int r = 0; r < R; ++r) {
            store_some(static_cast<Bf16*>(p.out) + (row + r) * p.outputs + at, sums[r][c] + more, left);
        }
    }
}

// `product_rows` of as many rows as there are, but at most R.
template <int R>
void product_up_to(i64 rows, const Product& p, const Stretch& s, i64 row, i64 output, float* partial) {
    if constexpr (R > 1) {
        if (rows < R) return product_up_to<R - 1>(rows, p, s, row, output, partial);
    }
    product_rows<R>(p, s, row, output, partial);
}

void widen_rows(const Product& p, i64 begin, i64 end, float* wide) {
    for (i64 row = begin; row < end; ++row, wide += p.inputs) {
        const Bf16* const x = static_cast<const Bf16*>(p.x) + row * p.x_stride;
        for (i64 i = 0; i < p.inputs; i += kLanes) store_some(wide + i, load_some(x + i, p.inputs - i), p.inputs - i);
    }
}

// The panels [begin, end). scratch: see `product_scratch_floats`. Rows that are widened are multiplied in blocks, so that
// they stay in the caches.
void product(const Product& p, i64 begin, i64 end, float* scratch) {
    const i64 pairs = p.inputs / 2, block_rows = kPairs<Bf16> ? p.rows : kWideRows;
    float* const x_wide = scratch + p.rows * kPanel;
    for (i64 block = 0; block < p.rows; block += block_rows) {
        const i64 block_end = block + block_rows < p.rows ? block + block_rows : p.rows;
        const char* x = static_cast<const char*>(p.x);
        i64 x_stride = p.x_stride * 2;
        if (!kPairs<Bf16>) {
            widen_rows(p, block, block_end, x_wide);
            x = reinterpret_cast<const char*>(x_wide);
            x_stride = p.inputs * 4;
        }
        for (i64 panel = begin; panel < end; ++panel) {
            for (i64 at = 0; at < pairs; at += kStretch) {
                const i64 count = at + kStretch < pairs ? kStretch : pairs - at;
                const char* const weights = static_cast<const char*>(p.packed) + (panel * pairs + at) * kPackedBytes;
                for (i64 row = block; row < block_end; row += kRows) {
                    const char* const from = x + (row - block) * x_stride + at * kFactors * 4;
                    for (i64 column = 0; column < kPanel; column += kTileWidth) {
                        const Stretch s{from, x_stride, weights, count, at == 0, at + count == pairs,
                                        column == 0 ? find_ahead(p.rows, row, weights, count) : nullptr};
                        product_up_to<kRows>(block_end - row, p, s, row, panel * kPanel + column,
                                             scratch + row * kPanel + column);
                    }
                }
            }
        }
    }
}

}  // namespace

}  // namespace blockcast

#endif  // __AVX2__
