// Attention of single queries straight over the paged cache, and the small operations between matrix products. Compiled once
// for each instruction set: VARIANT names the table that it defines.
//
// Attention: softmax online over tiles of the context (Milakov and Gimelshein, 2018), scores and sums in fp32. All query
// heads of a KV head are computed together, so that a key or value is loaded and widened once. Nothing outside the
// query's positions is read, whatever lies there.
#include "chunk.hpp"
#include "ops.hpp"
#include "product.hpp"
#include "simd.hpp"

namespace blockcast {

namespace {

constexpr int kMixVectors = kLanes == 16 ? 4 : 2;  // of the values' dims, accumulated in registers at a time

// Where the tokens of a tile lie, in elements from the layer's start; rounded up to whole vectors with the last one.
struct Tile {
    i64 at[kTile];
    int count;
};

Tile tile_of(const Span& span, i64 start, i64 block_size, i64 row) {
    Tile tile;
    const i64 left = span.position + 1 - start;
    tile.count = static_cast<int>(left < kTile ? left : kTile);
    i64 block = start / block_size, offset = start % block_size;
    for (int t = 0; t < (tile.count + kLanes - 1) / kLanes * kLanes; ++t) {
        if (t >= left) {
            tile.at[t] = tile.at[t - 1];
            continue;
        }
        tile.at[t] = (span.block_rows[block] + offset) * row;
        if (++offset == block_size) offset = 0, ++block;
    }
    return tile;
}

// Brings a tile's rows into the caches while another is computed, piece by piece, in the order in which they lie: the
// computation goes through them head by head, which the memory does not like.
template <class T>
struct Fetcher {
    const T* rows;
    const Tile& tile;
    i64 width;  // elements of a row
    i64 token = 0, column = 0;

    bool more() const { return token < tile.count; }

    ALWAYS_INLINE void next(i64 elements) {
        if (!more()) return;
        fetch(rows + tile.at[token] + column, elements);
        column += elements;
        if (column >= width) column = 0, ++token;
    }
};

// Scores of N query heads, [N][kTile], against the keys of the tile. q: [N][dim].
template <class T, int N>
void score(const float* q, const T* keys, const Tile& tile, i64 dim, float* scores, Fetcher<T>& ahead) {
    for (int start = 0; start < tile.count; start += kLanes) {
        Floats parts[N][kLanes];
        for (int t = 0; t < kLanes; ++t) {
            const T* key = keys + tile.at[start + t];
            ahead.next(dim);
            Floats part[N] = {};
            for (i64 d = 0; d < dim; d += kLanes) {
                const Floats some = load(key + d);
                for (int n = 0; n < N; ++n) part[n] += some * load(q + n * dim + d);
            }
            for (int n = 0; n < N; ++n) parts[n][t] = part[n];
        }
        for (int n = 0; n < N; ++n) store(scores + n * kTile + start, add_each(parts[n]));
    }
}

// Scores become weights; returns their sum, and by how much older sums shrink. `most`: the largest score so far.
float weigh(float* scores, int count, float* most, float* shrink) {
    for (int t = count; t % kLanes != 0; ++t) scores[t] = kMinusInfinity;
    Floats top = load(scores);
    for (int t = kLanes; t < count; t += kLanes) top = larger(top, load(scores + t));
    const float before = *most, tops = largest(top);
    *most = tops > before ? tops : before;
    Floats total = {};
    for (int t = 0; t < count; t += kLanes) {
        const Floats some = load(scores + t);
        Floats weights = exp2(some - *most);
        weights = some == kMinusInfinity ? Floats{} : weights;
        store(scores + t, weights);
        total += weights;
    }
    *shrink = before == kMinusInfinity ? 0.0f : exp2(every(before - *most))[0];
    return sum(total);
}

// sums = sums * shrink + weights @ values, for N heads and W vectors of dims. sums: [N][dim].
template <class T, int N, int W>
ALWAYS_INLINE void mix_dims(const float* weights, const T* values, const Tile& tile, i64 dim, const float* shrink,
                            float* sums, Fetcher<T>& ahead) {
    Floats mixed[N][W];
    for (int n = 0; n < N; ++n) {
        for (int w = 0; w < W; ++w) mixed[n][w] = load(sums + n * dim + w * kLanes) * shrink[n];
    }
    for (int t = 0; t < tile.count; ++t) {
        const T* value = values + tile.at[t];
        ahead.next(W * kLanes);
        for (int w = 0; w < W; ++w) {
            const Floats some = load(value + w * kLanes);
            for (int n = 0; n < N; ++n) mixed[n][w] += some * weights[n * kTile + t];
        }
    }
    for (int n = 0; n < N; ++n) {
        for (int w = 0; w < W; ++w) store(sums + n * dim + w * kLanes, mixed[n][w]);
    }
}

template <class T, int N>
void mix(const float* weights, const T* values, const Tile& tile, i64 dim, const float* shrink, float* sums,
         Fetcher<T>& ahead) {
    i64 d = 0;
    for (; d + kMixVectors * kLanes <= dim; d += kMixVectors * kLanes) {
        mix_dims<T, N, kMixVectors>(weights, values + d, tile, dim, shrink, sums + d, ahead);
    }
    for (; d < dim; d += kLanes) mix_dims<T, N, 1>(weights, values + d, tile, dim, shrink, sums + d, ahead);
}

// The state of N query heads of one KV head, advanced by a tile.
struct Heads {
    const float* q;  // [heads][dim], times scale and log2(e)
    float *sums, *most, *total, *scores;
};

template <class T, int N>
void advance(const Heads& at, i64 head, const T* k, const T* v, const Tile& tile, i64 dim, Fetcher<T>& ahead_k,
             Fetcher<T>& ahead_v) {
    float* scores = at.scores + head * kTile;
    float shrink[N];
    score<T, N>(at.q + head * dim, k, tile, dim, scores, ahead_k);
    for (int n = 0; n < N; ++n) {
        const float more = weigh(scores + n * kTile, tile.count, at.most + head + n, shrink + n);
        at.total[head + n] = at.total[head + n] * shrink[n] + more;
    }
    mix<T, N>(scores, v, tile, dim, shrink, at.sums + head * dim, ahead_v);
}

template <class T>
void attend(const Attention& a, const Span& span, const Span* next, i64 head, i64 head_end, float* scratch) {
    const i64 group = a.heads / a.kv_heads, row = a.kv_heads * a.dim, count = (head_end - head) * group;
    const T* asked = static_cast<const T*>(a.q) + span.token * a.q_stride + head * group * a.dim;
    float* const q = scratch;
    float* const sums = q + count * a.dim;
    float* const most = sums + count * a.dim;
    const Heads state{q, sums, most, most + count, most + 2 * count};
    for (i64 i = 0; i < count * a.dim; i += kLanes) store(q + i, load(asked + i) * (a.scale * kLog2E));
    for (i64 i = 0; i < count; ++i) {
        for (i64 d = 0; d < a.dim; d += kLanes) store(sums + i * a.dim + d, Floats{});
        state.total[i] = 0;
        state.most[i] = kMinusInfinity;
    }
    const T *k = static_cast<const T*>(a.k) + head * a.dim, *v = static_cast<const T*>(a.v) + head * a.dim;
    const i64 first = span.first_seen(span.position);
    Tile tile = tile_of(span, first, a.block_size, row);
    for (i64 start = first; start <= span.position; start += kTile) {
        Tile then{};
        if (start + kTile <= span.position) then = tile_of(span, start + kTile, a.block_size, row);
        else if (next != nullptr) then = tile_of(*next, next->first_seen(next->position), a.block_size, row);
        Fetcher<T> ahead_k{k, then, (head_end - head) * a.dim}, ahead_v{v, then, (head_end - head) * a.dim};
        for (i64 i = 0; i < count;) {
            const i64 at = i / group * a.dim, rest = group - i % group;
            if (rest >= 4) advance<T, 4>(state, i, k + at, v + at, tile, a.dim, ahead_k, ahead_v), i += 4;
            else if (rest == 3) advance<T, 3>(state, i, k + at, v + at, tile, a.dim, ahead_k, ahead_v), i += 3;
            else if (rest == 2) advance<T, 2>(state, i, k + at, v + at, tile, a.dim, ahead_k, ahead_v), i += 2;
            else advance<T, 1>(state, i, k + at, v + at, tile, a.dim, ahead_k, ahead_v), i += 1;
        }
        while (ahead_k.more()) ahead_k.next(a.dim);
        while (ahead_v.more()) ahead_v.next(a.dim);
        tile = then;
    }
    T* out = static_cast<T*>(a.out) + (span.token * a.heads + head * group) * a.dim;
    for (i64 i = 0; i < count * a.dim; i += kLanes) store(out + i, load(sums + i) / state.total[i / a.dim]);
}

template <class T>
void norm(const Norm& n) {
    for (i64 token = 0; token < n.tokens; ++token) {
        for (i64 head = 0; head < n.heads; ++head) {
            const i64 at = (token * n.heads + head) * n.dim;
            const T* x = static_cast<const T*>(n.x) + token * n.x_stride + head * n.dim;
            const T* weight = static_cast<const T*>(n.weight) + head * n.weight_stride;
            T* out = static_cast<T*>(n.out) + at;
            if (n.residual != nullptr) {
                T* total = static_cast<T*>(n.residual) + at;
                for (i64 i = 0; i < n.dim; i += kLanes) {
                    const i64 left = n.dim - i;
                    store_some(total + i, load_some(x + i, left) + load_some(total + i, left), left);
                }
                x = total;  // rounded to its type, as the next layer will see it
            }
            Floats squares = {};
            for (i64 i = 0; i < n.dim; i += kLanes) {
                const Floats some = load_some(x + i, n.dim - i);
                squares += some * some;
            }
            const float scale = 1 / __builtin_sqrtf(sum(squares) / static_cast<float>(n.dim) + n.eps);
            const float centre = n.zero_centred ? 1.0f : 0.0f;
            for (i64 i = 0; i < n.dim; i += kLanes) {
                const i64 left = n.dim - i;
                store_some(out + i, load_some(x + i, left) * scale * (load_some(weight + i, left) + centre), left);
            }
        }
    }
}

template <class T>
void rotate(const Rotation& r) {
    const i64 half = r.width / 2;
    for (i64 token = 0; token < r.tokens; ++token) {
        const T* cos = static_cast<const T*>(r.cos) + token * r.width;
        const T* sin = static_cast<const T*>(r.signed_sin) + token * r.width;
        for (i64 head = 0; head < r.heads; ++head) {
            const T* x = static_cast<const T*>(r.x) + token * r.x_stride + head * r.dim;
            T* out = static_cast<T*>(r.out) + (token * r.heads + head) * r.dim;
            for (i64 i = 0; i < half; i += kLanes) {
                const i64 left = half - i;
                const Floats low = load_some(x + i, left), high = load_some(x + half + i, left);
                const Floats low_cos = load_some(cos + i, left), low_sin = load_some(sin + i, left);
                const Floats high_cos = load_some(cos + half + i, left), high_sin = load_some(sin + half + i, left);
                store_some(out + i, low * low_cos + high * low_sin, left);
                store_some(out + half + i, high * high_cos + low * high_sin, left);
            }
            for (i64 i = r.width; i < r.dim; ++i) out[i] = x[i];
        }
    }
}

template <class T>
void silu_and_mul(const void* x, void* out, i64 tokens, i64 size) {
    for (i64 token = 0; token < tokens; ++token) {
        const T* gate = static_cast<const T*>(x) + token * 2 * size;
        T* result = static_cast<T*>(out) + token * size;
        for (i64 i = 0; i < size; i += kLanes) {
            const i64 left = size - i;
            const Floats value = load_some(gate + i, left), factor = load_some(gate + size + i, left);
            store_some(result + i, value / (1.0f + exp2(value * -kLog2E)) * factor, left);
        }
    }
}

template <class T>
constexpr Ops ops_of() {
    Ops ops{attend<T>, attend_span<T>, norm<T>, rotate<T>, silu_and_mul<T>, nullptr};
#ifdef __AVX2__
    if (sizeof(T) == sizeof(Bf16)) ops.product = product;
#endif
    return ops;
}

}  // namespace

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define TABLE_OF(name) name##_variant
#define TABLE(name) TABLE_OF(name)
extern const Variant TABLE(VARIANT) = {TEXT(VARIANT), ops_of<Bf16>(), ops_of<float>()};

}  // namespace blockcast
