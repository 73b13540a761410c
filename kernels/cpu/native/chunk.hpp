// Attention of many queries of one sequence over the paged cache: a chunk of a prompt. Part of ops.cpp, compiled with it for
// each instruction set; T is the type of the tensors.
//
// FlashAttention's order (Dao et al., 2022): a block of query rows (all the query heads of a KV head, folded) passes over
// the context in tiles of kTile tokens, softmax online (Milakov and Gimelshein, 2018). A tile's keys and values are laid out
// once for all rows of the block so that six rows at a time are multiplied with whole vectors of them, sums in
// registers. Scores, weights' sums and the result are fp32. Where the CPU multiplies pairs of bf16 (AVX512-BF16), keys
// and values stay bf16 and the weights are rounded to it; elsewhere all is widened to fp32. AMX multiplies sixteen rows at
// a time with the same layout.
#pragma once

#include "ops.hpp"
#include "simd.hpp"

namespace blockcast {

namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr int kRows = 6;  // that are multiplied at a time
constexpr int kColumns = kLanes == 16 ? 4 : 2;  // by so many vectors: their products fill the registers

// Rows of one head lie apart, so that the hardware does not see them coming.
template <class T>
ALWAYS_INLINE void fetch(const T* row, i64 dim) {
    for (i64 d = 0; d < dim; d += 64 / static_cast<i64>(sizeof(T))) __builtin_prefetch(row + d);
}

// What a 32-bit lane of packed operands holds: one number, or two neighbours in bf16. Pairs travel as the bits of a float.
template <class T>
constexpr bool kPairs = false;
template <class T>
constexpr int kDepth = kPairs<T> ? 2 : 1;

// sums + a * b, in each lane.
template <class T>
ALWAYS_INLINE Floats multiply_add(Floats sums, Floats a, Floats b) { return sums + a * b; }

// The dims [d, d + kLanes) of the values of a lane's tokens: of one, or of two whose numbers become pairs.
template <class T>
ALWAYS_INLINE Floats pack_lanes(const T* const* rows, i64 d) { return load(rows[0] + d); }

// Writes `count` vectors of weights, packed.
template <class T>
ALWAYS_INLINE void store_packed(float* at, const Floats* weights, int count) {
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) store(at + i * kLanes, weights[i]);
}

#ifdef __AVX512BF16__
template <>
constexpr bool kPairs<Bf16> = true;

template <>
ALWAYS_INLINE Floats multiply_add<Bf16>(Floats sums, Floats a, Floats b) {
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(
        reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
}

template <>
ALWAYS_INLINE Floats pack_lanes(const Bf16* const* rows, i64 d) {
    Halves low, high;
    __builtin_memcpy(&low, rows[0] + d, sizeof low);
    __builtin_memcpy(&high, rows[1] + d, sizeof high);
    return reinterpret_cast<Floats>(__builtin_convertvector(low, Bits) | __builtin_convertvector(high, Bits) << 16);
}

template <>
ALWAYS_INLINE void store_packed<Bf16>(float* at, const Floats* weights, int count) {
#pragma GCC unroll 16
    for (int i = 0; i < count; i += 2) {
        const auto low = reinterpret_cast<__m512>(weights[i]), high = reinterpret_cast<__m512>(weights[i + 1]);
        store(at + i / 2 * kLanes, reinterpret_cast<Floats>(_mm512_cvtne2ps_pbh(high, low)));
    }
}
#endif

// Whether operands are multiplied in tiles (AMX).
template <class T>
constexpr bool kTiles = false;
#ifdef __AMX_BF16__
template <>
constexpr bool kTiles<Bf16> = true;
#endif

// Rows of queries that are multiplied at a time.
template <class T>
constexpr int kQueryRows = kTiles<T> ? 16 : kRows;

// Rows and columns of kLanes x kLanes change places: an index of 2n bits is rotated by n, one bit a round.
ALWAYS_INLINE void transpose(Floats* rows) {
    for (int bits = kLanes; bits > 1; bits /= 2) {
        Floats next[kLanes];
        for (int i = 0; i < kLanes / 2; ++i) {
            next[i] = even(rows[2 * i], rows[2 * i + 1]);
            next[kLanes / 2 + i] = odd(rows[2 * i], rows[2 * i + 1]);
        }
        for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
    }
}

// As many lanes as fit, packed: numbers widened, or pairs as they lie; zeros after the first `left` of them.
template <class T>
ALWAYS_INLINE Floats load_packed(const T* at, i64 left) {
    if constexpr (kPairs<T>) {
        return load_some(reinterpret_cast<const float*>(at), left);
    } else {
        return load(at);
    }
}

// Lanes of a packed row of q, and of a packed key; zeros fill AMX's last tile.
template <class T>
constexpr i64 steps_of(i64 dim) {
    return kTiles<T> ? (dim + 31) / 32 * 16 : dim / kDepth<T>;
}

// The tile's keys as [steps_of<T>(dim)][kTile].
template <class T>
void pack_keys(const T* const* rows, i64 dim, float* packed) {
    for (int t = 0; t < kTile; t += kLanes) {
        for (i64 d = 0; d < steps_of<T>(dim); d += kLanes) {
            Floats block[kLanes];
            for (int i = 0; i < kLanes; ++i) block[i] = load_packed(rows[t + i] + d * kDepth<T>, dim / kDepth<T> - d);
            transpose(block);
            for (int i = 0; i < kLanes; ++i) store(packed + (d + i) * kTile + t, block[i]);
        }
    }
}

// The tile's values as [kTile / kDepth][dim].
template <class T>
void pack_values(const T* const* rows, i64 dim, float* packed) {
    for (int t = 0; t < kTile; t += kDepth<T>) {
        for (i64 d = 0; d < dim; d += kLanes) {
            store(packed + t / kDepth<T> * dim + d, pack_lanes(rows + t, d));
        }
    }
}

#ifdef __AMX_BF16__
// Every tile of this thread becomes 16 rows of 16 lanes. Until `_tile_release` the kernel saves them with each switch.
ALWAYS_INLINE void configure_tiles() {
    alignas(64) std::uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
    asm volatile("" ::: "memory");
    _tile_loadconfig(config);
}

// sums (from zero unless `resumes`) + a @ b for 16 rows and C tiles of columns. Shapes: see `multiply_columns`; steps:
// whole tiles. Tiles 0 to 3 hold sums, 4 holds a, 5 to 7 hold b.
template <int C>
ALWAYS_INLINE void multiply_tiles(const float* a, i64 steps, const float* b, i64 width, bool resumes, float* sums) {
    asm volatile("" ::: "memory");  // GCC does not know that tiles are loaded from memory: what is to be read is written by now
    if (resumes) {
        _tile_loadd(0, sums, width * 4);
        if constexpr (C > 1) _tile_loadd(1, sums + 16, width * 4);
        if constexpr (C > 2) _tile_loadd(2, sums + 32, width * 4);
        if constexpr (C > 2) _tile_loadd(3, sums + 48, width * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (i64 step = 0; step < steps; step += 16) {
        const float* const at = b + step * width;
        _tile_loadd(4, a + step, steps * 4);
        _tile_loadd(5, at, width * 4);
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (C > 1) _tile_loadd(6, at + 16, width * 4);
        if constexpr (C > 1) _tile_dpbf16ps(1, 4, 6);
        if constexpr (C > 2) _tile_loadd(7, at + 32, width * 4);
        if constexpr (C > 2) _tile_dpbf16ps(2, 4, 7);
        if constexpr (C > 2) _tile_loadd(5, at + 48, width * 4);
        if constexpr (C > 2) _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, width * 4);
    if constexpr (C > 1) _tile_stored(1, sums + 16, width * 4);
    if constexpr (C > 2) _tile_stored(2, sums + 32, width * 4);
    if constexpr (C > 2) _tile_stored(3, sums + 48, width * 4);
}
#endif

// sums = sums * shrink + a @ b for kQueryRows<T> rows and C vectors of columns; where shrink is null, sums begin at zero.
// a: [kQueryRows<T>][steps], b: [steps][width], both packed; sums: [kQueryRows<T>][width].
template <class T, int C>
ALWAYS_INLINE void multiply_columns(const float* a, i64 steps, const float* b, i64 width, const float* shrink, float* sums) {
    constexpr int R = kQueryRows<T>;
#ifdef __AMX_BF16__
    if constexpr (kTiles<T>) {
        for (int r = 0; shrink && r < R; ++r) {
            float* const row = sums + r * width;
            for (int c = 0; c < C && shrink[r] != 1.0f; ++c) store(row + c * kLanes, load(row + c * kLanes) * shrink[r]);
        }
        return multiply_tiles<C>(a, steps, b, width, shrink, sums);
    }
#endif
    Floats mixed[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) mixed[r][c] = shrink ? load(sums + r * width + c * kLanes) * shrink[r] : Floats{};
    }
    for (i64 step = 0; step < steps; ++step) {
        Floats some[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) some[c] = load(b + step * width + c * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Floats factor = every(a[r * steps + step]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) mixed[r][c] = multiply_add<T>(mixed[r][c], some[c], factor);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(sums + r * width + c * kLanes, mixed[r][c]);
    }
}

// The same for all columns.
template <class T>
ALWAYS_INLINE void multiply_block(const float* a, i64 steps, const float* b, i64 width, const float* shrink, float* sums) {
    constexpr int kWide = kColumns * kLanes;
    i64 c = 0;
    for (; c + kWide <= width; c += kWide) multiply_columns<T, kColumns>(a, steps, b + c, width, shrink, sums + c);
    for (; c + 2 * kLanes <= width; c += 2 * kLanes) multiply_columns<T, 2>(a, steps, b + c, width, shrink, sums + c);
    for (; c < width; c += kLanes) multiply_columns<T, 1>(a, steps, b + c, width, shrink, sums + c);
}

// One row's scores become packed weights; its running maximum and (by lane) sum go on. Returns by how much older sums shrink.
template <class T>
ALWAYS_INLINE float weigh_row(const float* scores, float scale, float* most, float* total, float* weights) {
    constexpr int kVectors = kTile / kLanes;
    Floats some[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) some[i] = load(scores + i * kLanes) * scale;
    Floats top = some[0];
#pragma GCC unroll 16
    for (int i = 1; i < kVectors; ++i) top = larger(top, some[i]);
    const float before = *most, highest = largest(top);
    const float now = highest > before ? highest : before;
    const float base = now == kMinusInfinity ? 0.0f : now;  // nothing seen yet: weights of zero, not NaN
    const float shrink = now == before ? 1.0f : exp2(every(before - base))[0];
    Floats sum = load(total) * shrink;
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
        some[i] = exp2<kPairs<T> ? 4 : 6>(some[i] - base);
        sum += some[i];
    }
    *most = now;
    store(total, sum);
    store_packed<T>(weights, some, kVectors);
    return shrink;
}

// Where the rows of a block stand: row r is query `begin + r / group` of the span.
struct Rows {
    i64 count, group, position;  // position: of the first row's query in its sequence
    i64 window;
    float *q, *sums, *most, *total;
};

// Advances kQueryRows<T> rows from `row` on by the tile of tokens [start, start + kTile).
template <class T>
void advance_rows(const Rows& rows, i64 row, i64 start, const float* keys, const float* values, i64 dim, float scale) {
    const i64 first_query = rows.position + row / rows.group;
    const i64 last_row = (row + kQueryRows<T> < rows.count ? row + kQueryRows<T> : rows.count) - 1;
    const i64 last_query = rows.position + last_row / rows.group;
    if (start > last_query || (rows.window && start + kTile <= first_query - rows.window + 1)) return;
    alignas(64) float scores[kQueryRows<T> * kTile], weights[kQueryRows<T> * kTile / kDepth<T>];
    float shrink[kQueryRows<T>];
    const i64 steps = steps_of<T>(dim);
    multiply_block<T>(rows.q + row * steps, steps, keys, kTile, nullptr, scores);
    const bool all = start + kTile <= first_query + 1 && row + kQueryRows<T> <= rows.count &&
                     (rows.window == 0 || start > last_query - rows.window);
    for (int r = 0; r < kQueryRows<T>; ++r) {
        if (!all) {
            const i64 query = rows.position + (row + r) / rows.group;
            const i64 end = row + r < rows.count ? query + 1 - start : 0;
            const i64 begin = rows.window ? query + 1 - rows.window - start : 0;
            for (i64 t = 0; t < kTile; ++t) {
                if (t < begin || t >= end) scores[r * kTile + t] = kMinusInfinity;
            }
        }
        shrink[r] = weigh_row<T>(scores + r * kTile, scale, rows.most + row + r, rows.total + (row + r) * kLanes,
                                 weights + r * kTile / kDepth<T>);
    }
    multiply_block<T>(weights, kTile / kDepth<T>, values, dim, shrink, rows.sums + row * dim);
}

// Attends the queries [begin, end) of a span, for one KV head. scratch: see `span_scratch_floats`.
template <class T>
void attend_span(const Attention& a, const Span& span, i64 head, i64 begin, i64 end, float* scratch) {
    const i64 group = a.heads / a.kv_heads, dim = a.dim, width = a.kv_heads * dim, count = (end - begin) * group;
    const i64 token = span.token + begin, position = span.position + begin, seen = span.position + end;
    const i64 padded = (count + kQueryRows<T> - 1) / kQueryRows<T> * kQueryRows<T>, steps = steps_of<T>(dim);
    // Whole cache lines: a load of two at once takes twice as long.
    float* const keys = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(scratch) + 63) / 64 * 64);
    float* const values = keys + kTile * dim;
    float* const nothing = values + kTile * dim;
    const Rows rows{count, group, position, span.window, nothing + dim, nothing + dim + padded * dim,
                    nothing + dim + 2 * padded * dim, nothing + dim + 2 * padded * dim + padded};
#ifdef __AMX_BF16__
    if constexpr (kTiles<T>) configure_tiles();
#endif
    for (i64 i = 0; i < dim; ++i) nothing[i] = 0;
    for (i64 i = 0; i < padded * dim; ++i) rows.sums[i] = 0;
    for (i64 i = 0; i < padded * kLanes; ++i) rows.total[i] = 0;
    for (i64 i = 0; i < padded; ++i) rows.most[i] = kMinusInfinity;
    for (i64 row = 0; row < padded; ++row) {
        const T* asked = row < count ? static_cast<const T*>(a.q) + (token + row / group) * a.q_stride +
                                           (head * group + row % group) * dim
                                     : nullptr;
        for (i64 d = 0; d < steps; d += kLanes) {
            store(rows.q + row * steps + d, row < count ? load_packed(asked + d * kDepth<T>, dim / kDepth<T> - d) : Floats{});
        }
    }
    const T *k = static_cast<const T*>(a.k) + head * dim, *v = static_cast<const T*>(a.v) + head * dim;
    const i64 first = span.first_seen(position);
    for (i64 start = first / kTile * kTile; start < seen; start += kTile) {
        const T *key_rows[kTile], *value_rows[kTile];
        for (i64 t = 0; t < kTile; ++t) {
            const i64 at = start + t;
            const bool there = at < seen && at >= first;  // nothing else is read, whatever lies there
            const i64 place = there ? (span.block_rows[at / a.block_size] + at % a.block_size) * width : 0;
            key_rows[t] = there ? k + place : reinterpret_cast<const T*>(nothing);
            value_rows[t] = there ? v + place : reinterpret_cast<const T*>(nothing);
            fetch(value_rows[t], dim);
        }
        pack_keys(key_rows, dim, keys);
        pack_values(value_rows, dim, values);
        for (i64 row = 0; row < count; row += kQueryRows<T>) {
            advance_rows<T>(rows, row, start, keys, values, dim, a.scale * kLog2E);
        }
    }
#ifdef __AMX_BF16__
    if constexpr (kTiles<T>) _tile_release();
#endif
    for (i64 row = 0; row < count; ++row) {
        T* out = static_cast<T*>(a.out) + ((token + row / group) * a.heads + head * group + row % group) * dim;
        const float total = sum(load(rows.total + row * kLanes));
        for (i64 d = 0; d < dim; d += kLanes) store(out + d, load(rows.sums + row * dim + d) / total);
    }
}

}  // namespace

}  // namespace blockcast
