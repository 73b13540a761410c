// x @ W^T for bf16 where the CPU multiplies pairs of bf16 (AVX512-BF16). Part of ops.cpp, compiled with it.
//
// W is packed once: panels of kPanel outputs, [inputs / 2][kPanel] pairs each, so that a row of the panel is four vectors.
// Six rows of x at a time are multiplied with a panel that stays in the L2 cache, sums in 24 registers (the loop order of
// Goto and van de Geijn, 2008). With few rows all the time goes into reading W: the next panel is fetched into the L2
// cache while this one is multiplied.
#pragma once

#ifdef __AVX512BF16__

#include "chunk.hpp"
#include "ops.hpp"
#include "simd.hpp"

namespace blockcast {

namespace {

constexpr int kPanelVectors = kPanel / kLanes;
constexpr i64 kStretch = 2048;  // pairs of inputs that are multiplied in one go: half a MiB of a panel
constexpr i64 kFewRows = 96;  // up to so many rows the time goes into reading W

void pack_matrix(const void* weight, i64 outputs, i64 inputs, void* packed) {
    const auto* rows = static_cast<const std::uint16_t*>(weight);
    auto* out = static_cast<std::uint16_t*>(packed);
    for (i64 panel = 0; panel * kPanel < outputs; ++panel) {
        for (i64 pair = 0; pair < inputs / 2; ++pair) {
            for (i64 o = panel * kPanel; o < (panel + 1) * kPanel; ++o) {
                *out++ = o < outputs ? rows[o * inputs + 2 * pair] : 0;
                *out++ = o < outputs ? rows[o * inputs + 2 * pair + 1] : 0;
            }
        }
    }
}

// sums [R][kPanel] += x [R][pairs] times a panel's rows [pairs][kPanel]; `ahead` is fetched, `lines` of it a row.
template <int R, int Lines>
ALWAYS_INLINE void multiply_rows(const Bf16* x, i64 x_stride, const float* panel, i64 pairs, const char* ahead,
                                 Floats (*sums)[kPanelVectors]) {
    for (i64 pair = 0; pair < pairs; ++pair) {
        Floats some[kPanelVectors];
#pragma GCC unroll 8
        for (int c = 0; c < kPanelVectors; ++c) some[c] = load(panel + pair * kPanel + c * kLanes);
#pragma GCC unroll 8
        for (int line = 0; line < Lines; ++line) __builtin_prefetch(ahead + (pair * Lines + line) * 64, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float bits;
            __builtin_memcpy(&bits, x + r * x_stride + 2 * pair, sizeof bits);
            const Floats asked = every(bits);
#pragma GCC unroll 8
            for (int c = 0; c < kPanelVectors; ++c) sums[r][c] = add_products_of_pairs(sums[r][c], some[c], asked);
        }
    }
}

// What a stretch of inputs adds to R rows of a panel's outputs. `partial`: their sums so far and again afterwards.
template <int R, int Lines>
void product_rows(const Product& p, i64 row, i64 panel, i64 first, i64 end, const char* ahead, float* partial) {
    const float* const rows = static_cast<const float*>(p.packed) + (panel * (p.inputs / 2) + first) * kPanel;
    Floats sums[R][kPanelVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < kPanelVectors; ++c) {
            sums[r][c] = first == 0 ? Floats{} : load(partial + r * kPanel + c * kLanes);
        }
    }
    multiply_rows<R, Lines>(static_cast<const Bf16*>(p.x) + row * p.x_stride + 2 * first, p.x_stride, rows, end - first,
                            ahead, sums);
    if (end < p.inputs / 2) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int c = 0; c < kPanelVectors; ++c) store(partial + r * kPanel + c * kLanes, sums[r][c]);
        }
        return;
    }
    const auto* bias = static_cast<const Bf16*>(p.bias);
    for (int c = 0; c < kPanelVectors; ++c) {
        const i64 column = panel * kPanel + c * kLanes, left = p.outputs - column;
        if (left <= 0) break;
        const int lanes = static_cast<int>(left < kLanes ? left : kLanes);
        const Floats more = bias == nullptr ? Floats{} : lanes == kLanes ? load(bias + column) : load_some(bias + column, lanes);
        for (int r = 0; r < R; ++r) {
            Bf16* out = static_cast<Bf16*>(p.out) + (row + r) * p.outputs + column;
            if (lanes == kLanes) store_rounded(out, sums[r][c] + more);
            else store_some(out, sums[r][c] + more, lanes);
        }
    }
}

template <int Lines>
void product_some(const Product& p, i64 row, i64 rows, i64 panel, i64 first, i64 end, const char* ahead, float* partial) {
    switch (rows) {
        case 1: return product_rows<1, Lines>(p, row, panel, first, end, ahead, partial);
        case 2: return product_rows<2, Lines>(p, row, panel, first, end, ahead, partial);
        case 3: return product_rows<3, Lines>(p, row, panel, first, end, ahead, partial);
        case 4: return product_rows<4, Lines>(p, row, panel, first, end, ahead, partial);
        case 5: return product_rows<5, Lines>(p, row, panel, first, end, ahead, partial);
        default: return product_rows<6, Lines>(p, row, panel, first, end, ahead, partial);
    }
}

// The panels [begin, end). partial: [rows][kPanel].
void product(const Product& p, i64 begin, i64 end, float* partial) {
    const i64 pairs = p.inputs / 2;
    for (i64 panel = begin; panel < end; ++panel) {
        for (i64 first = 0; first < pairs; first += kStretch) {
            const i64 last = first + kStretch < pairs ? first + kStretch : pairs, bytes = (last - first) * kPanel * 4;
            // The first passes over this stretch fetch the next one, which lies right behind.
            const bool more = p.rows <= kFewRows && (last < pairs || panel + 1 < end);
            const char* ahead = static_cast<const char*>(p.packed) + ((panel * pairs + first) * kPanel * 4 + (more ? bytes : 0));
            for (i64 row = 0; row < p.rows; row += kRows) {
                const i64 left = p.rows - row;
                float* const sums = partial + row * kPanel;
                if (!more || row > kRows) product_some<0>(p, row, left, panel, first, last, ahead, sums);
                else if (left <= kRows && row == 0) product_some<4>(p, row, left, panel, first, last, ahead, sums);
                else product_some<2>(p, row, left, panel, first, last, ahead + (row == 0 ? 0 : bytes / 2), sums);
            }
        }
    }
}

}  // namespace

}  // namespace blockcast

#endif
