// x @ W^T for bf16. Part of ops.cpp, compiled with it for the instruction sets that have fused multiply-add.
//
// W is packed once: panels of kPanel outputs, [inputs / 2][kPanel] pairs each. Six rows of x at a time are multiplied with as
// many columns of a panel as fill the registers with sums; the panel stays in the L2 cache meanwhile (the loop order of Goto
// and van de Geijn, 2008). Where the CPU multiplies pairs of bf16 (AVX512-BF16) both operands are read as they lie.
// Elsewhere x is widened to fp32 first, and a panel by as much as fits the L1 cache or, with few rows, in the registers.
// Sums are fp32 either way. With few rows all the time goes into reading W: what comes next is fetched into the L2 cache
// while this is multiplied.
#pragma once

#ifdef __AVX2__

#include "chunk.hpp"
#include "ops.hpp"
#include "simd.hpp"

namespace blockcast {

namespace {

constexpr int kTileWidth = kColumns * kLanes;  // columns that are multiplied at a time
constexpr i64 kPackedBytes = kPanel * 4;  // of a panel's pairs
constexpr i64 kStretch = 2048;  // pairs of inputs that are multiplied in one go
constexpr i64 kFewRows = 96;  // up to so many rows the time goes into reading W, and
constexpr i64 kPairedRows = 24;  // W is widened anew for each six of them sooner than written down

// Both numbers of each lane's pair, widened.
ALWAYS_INLINE void widen(const char* pairs, Floats* low, Floats* high) {
    Bits bits;
    __builtin_memcpy(&bits, pairs, sizeof bits);
    *low = reinterpret_cast<Floats>(bits << 16);
    *high = reinterpret_cast<Floats>(bits & 0xffff0000u);
}

// Where the operands of one go lie. A step is a lane of x and a vector of the panel: a pair, or widened one number.
struct Operands {
    const char* x;
    i64 x_stride;  // bytes
    const char* panel;
    i64 panel_stride;  // bytes
    i64 steps;
    const char* ahead;  // what is fetched meanwhile
};

ALWAYS_INLINE float lane_at(const char* at) {
    float lane;
    __builtin_memcpy(&lane, at, sizeof lane);
    return lane;
}

// sums [R][kTileWidth] += x [R][steps] times [steps][kTileWidth]; `Lines` cache lines are fetched a step.
template <int R, int Lines>
ALWAYS_INLINE void multiply_rows(const Operands& o, Floats (*sums)[kColumns]) {
    for (i64 step = 0; step < o.steps; ++step) {
        Floats some[kColumns];
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
            __builtin_memcpy(&some[c], o.panel + step * o.panel_stride + c * sizeof(Floats), sizeof some[c]);
        }
#pragma GCC unroll 8
        for (int line = 0; line < Lines; ++line) __builtin_prefetch(o.ahead + (step * Lines + line) * 64, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Floats asked = every(lane_at(o.x + r * o.x_stride + step * 4));
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) sums[r][c] = multiply_add<Bf16>(sums[r][c], some[c], asked);
        }
    }
}

// The same with a panel's pairs, widened on the way; a step is a pair, of x too.
template <int R, int Lines>
ALWAYS_INLINE void multiply_pairs(const Operands& o, Floats (*sums)[kColumns]) {
    for (i64 step = 0; step < o.steps; ++step) {
#pragma GCC unroll 8
        for (int line = 0; line < Lines; ++line) __builtin_prefetch(o.ahead + (step * Lines + line) * 64, 0, 2);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
            Floats low, high;
            widen(o.panel + step * o.panel_stride + c * sizeof(Floats), &low, &high);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const char* const asked = o.x + r * o.x_stride + step * 8;
                sums[r][c] = multiply_add<Bf16>(sums[r][c], low, every(lane_at(asked)));
                sums[r][c] = multiply_add<Bf16>(sums[r][c], high, every(lane_at(asked + 4)));
            }
        }
    }
}

// What a stretch of inputs adds to R rows of kTileWidth outputs from `column` on. `partial`: their sums so far and, unless
// it is the last stretch, again afterwards; [R][kPanel].
template <int R, int Lines, bool Paired>
void product_rows(const Product& p, const Operands& o, i64 row, i64 column, bool first, bool last, float* partial) {
    Floats sums[R][kColumns];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) sums[r][c] = first ? Floats{} : load(partial + r * kPanel + c * kLanes);
    }
    if constexpr (Paired) multiply_pairs<R, Lines>(o, sums);
    else multiply_rows<R, Lines>(o, sums);
    if (!last) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) store(partial + r * kPanel + c * kLanes, sums[r][c]);
        }
        return;
    }
    const auto* bias = static_cast<const Bf16*>(p.bias);
    for (int c = 0; c < kColumns; ++c) {
        const i64 at = column + c * kLanes, left = p.outputs - at;
        if (left <= 0) break;
        const int lanes = static_cast<int>(left < kLanes ? left : kLanes);
        const Floats more = bias == nullptr ? Floats{} : lanes == kLanes ? load(bias + at) : load_some(bias + at, lanes);
        for (int r = 0; r < R; ++r) {
            Bf16* out = static_cast<Bf16*>(p.out) + (row + r) * p.outputs + at;
            if (lanes == kLanes) store_rounded(out, sums[r][c] + more);
            else store_some(out, sums[r][c] + more, lanes);
        }
    }
}

template <int Lines, bool Paired>
void product_some(const Product& p, const Operands& o, i64 row, i64 rows, i64 column, bool first, bool last, float* partial) {
    switch (rows) {
        case 1: return product_rows<1, Lines, Paired>(p, o, row, column, first, last, partial);
        case 2: return product_rows<2, Lines, Paired>(p, o, row, column, first, last, partial);
        case 3: return product_rows<3, Lines, Paired>(p, o, row, column, first, last, partial);
        case 4: return product_rows<4, Lines, Paired>(p, o, row, column, first, last, partial);
        case 5: return product_rows<5, Lines, Paired>(p, o, row, column, first, last, partial);
        default: return product_rows<6, Lines, Paired>(p, o, row, column, first, last, partial);
    }
}

#ifdef __AVX512BF16__

// The panels [begin, end), operands as they lie. scratch: see `product_scratch_floats`.
void product(const Product& p, i64 begin, i64 end, float* scratch) {
    const i64 pairs = p.inputs / 2, stride = p.x_stride * 2;
    for (i64 panel = begin; panel < end; ++panel) {
        for (i64 at = 0; at < pairs; at += kStretch) {
            const i64 next = at + kStretch < pairs ? at + kStretch : pairs, bytes = (next - at) * kPackedBytes;
            const bool first = at == 0, last = next == pairs;
            const char* const here = static_cast<const char*>(p.packed) + (panel * pairs + at) * kPackedBytes;
            // The first passes over this stretch fetch the next one, which lies right behind.
            const bool more = p.rows <= kFewRows && (!last || panel + 1 < end);
            for (i64 row = 0; row < p.rows; row += kRows) {
                const i64 left = p.rows - row, column = panel * kPanel;
                const char* const x = static_cast<const char*>(p.x) + row * stride + at * 4;
                Operands o{x, stride, here, kPackedBytes, next - at, here + bytes};
                float* const sums = scratch + row * kPanel;
                if (!more || row > kRows) product_some<0, false>(p, o, row, left, column, first, last, sums);
                else if (left <= kRows && row == 0) product_some<4, false>(p, o, row, left, column, first, last, sums);
                else {
                    if (row != 0) o.ahead += bytes / 2;
                    product_some<2, false>(p, o, row, left, column, first, last, sums);
                }
            }
        }
    }
}

#else

void widen_rows(const Product& p, i64 begin, i64 end, float* wide) {
    for (i64 row = begin; row < end; ++row, wide += p.inputs) {
        const Bf16* const x = static_cast<const Bf16*>(p.x) + row * p.x_stride;
        i64 i = 0;
        for (; i + kLanes <= p.inputs; i += kLanes) store(wide + i, load(x + i));
        if (i < p.inputs) store_some(wide + i, load_some(x + i, static_cast<int>(p.inputs - i)), static_cast<int>(p.inputs - i));
    }
}

// Pairs of a panel as fp32: [kPanel / kTileWidth][2 * pairs][kTileWidth].
void widen_panel(const char* panel, i64 pairs, float* wide) {
    for (i64 pair = 0; pair < pairs; ++pair) {
        for (i64 column = 0; column < kPanel; column += kLanes) {
            Floats low, high;
            widen(panel + pair * kPackedBytes + column * 4, &low, &high);
            float* const at = wide + (column / kTileWidth * pairs + pair) * 2 * kTileWidth + column % kTileWidth;
            store(at, low);
            store(at + kTileWidth, high);
        }
    }
}

// A stretch of a panel: the pairs [at, at + count).
struct Stretch {
    const char* pairs;
    i64 panel, at, count;
    bool first, last, more;  // more: another one lies right behind
};

// What a stretch adds to the rows [begin, end). x_wide: [rows][inputs] from `begin` on; wide: the stretch widened, where
// its rows are not `Paired`. The first passes fetch the next stretch.
template <bool Paired>
void multiply_stretch(const Product& p, const Stretch& s, i64 begin, i64 end, const float* x_wide, const float* wide,
                      float* partial) {
    const i64 bytes = s.count * kPackedBytes, stride = p.inputs * 4;
    for (i64 row = begin; row < end; row += kRows) {
        const i64 left = end - row, pass = (row - begin) / kRows;
        const char* const x = reinterpret_cast<const char*>(x_wide + (row - begin) * p.inputs + 2 * s.at);
        for (i64 column = 0; column < kPanel; column += kTileWidth) {
            float* const sums = partial + (row - begin) * kPanel + column;
            const i64 output = s.panel * kPanel + column;
            const bool fetches = s.more && column == 0;
            if constexpr (Paired) {
                const Operands o{x, stride, s.pairs + column * 4, kPackedBytes, s.count, s.pairs + bytes};
                if (fetches && pass == 0) product_some<4, true>(p, o, row, left, output, s.first, s.last, sums);
                else product_some<0, true>(p, o, row, left, output, s.first, s.last, sums);
            } else {
                const char* const columns = reinterpret_cast<const char*>(wide + column * 2 * s.count);
                const Operands o{x, stride, columns, kTileWidth * 4, 2 * s.count, s.pairs + bytes + pass * bytes / 2};
                if (fetches && pass < 2) product_some<1, false>(p, o, row, left, output, s.first, s.last, sums);
                else product_some<0, false>(p, o, row, left, output, s.first, s.last, sums);
            }
        }
    }
}

// The panels [begin, end), operands widened: blocks of rows, so that x stays in the caches too.
void product(const Product& p, i64 begin, i64 end, float* scratch) {
    const bool paired = p.rows <= kPairedRows;
    const i64 pairs = p.inputs / 2, most = paired ? kStretch : kWideStretch / 2;
    float* const wide = scratch;
    float* const partial = wide + kWideStretch * kPanel;
    float* const x_wide = partial + kWideRows * kPanel;
    for (i64 row = 0; row < p.rows; row += kWideRows) {
        const i64 row_end = row + kWideRows < p.rows ? row + kWideRows : p.rows;
        widen_rows(p, row, row_end, x_wide);
        for (i64 panel = begin; panel < end; ++panel) {
            for (i64 at = 0; at < pairs; at += most) {
                const i64 count = at + most < pairs ? most : pairs - at;
                const bool last = at + count == pairs;
                const char* const here = static_cast<const char*>(p.packed) + (panel * pairs + at) * kPackedBytes;
                const Stretch s{here, panel, at, count, at == 0, last, !last || panel + 1 < end};
                if (paired) {
                    multiply_stretch<true>(p, s, row, row_end, x_wide, nullptr, partial);
                } else {
                    widen_panel(here, count, wide);
                    multiply_stretch<false>(p, s, row, row_end, x_wide, wide, partial);
                }
            }
        }
    }
}

#endif  // __AVX512BF16__

}  // namespace

}  // namespace blockcast

#endif  // __AVX2__
