// The operations that are compiled once for each instruction set, and what they are given. Plain pointers and counts: every
// check is the caller's (module.cpp).
#pragma once

#include <cstdint>

namespace blockcast {

using i64 = std::int64_t;

// Queries of a sequence that follow each other: a chunk of a prompt, or the one query of a decoding sequence.
struct Span {
    i64 token;              // of the first query, in the batch
    const i64* block_rows;  // token row of the first K of each block of the sequence, in the layer 0
    i64 position, count;    // of the first query in its sequence; of the queries
    i64 window;             // a query sees the last so many positions, itself included; 0: all

    // The first position that the query at a position sees.
    i64 first_seen(i64 query) const { return window != 0 && query >= window ? query + 1 - window : 0; }
};

// Elements, not bytes, throughout.
struct Attention {
    const void *q, *k, *v;  // k and v: the cache's layer
    void* out;              // [tokens, heads, dim]
    i64 q_stride;           // from token to token
    i64 heads, kv_heads, dim, block_size;
    float scale;
};

struct Norm {
    const void *x, *weight;
    void *residual, *out;  // residual: [tokens * heads * dim], x is added to it first; null: none
    i64 tokens, heads, dim, x_stride, weight_stride;  // weight_stride: from head to head, 0: the same for all
    float eps;
    bool zero_centred;
};

struct Rotation {
    const void *x, *cos, *signed_sin;  // cos and signed_sin: [tokens, width]
    void* out;                         // [tokens, heads, dim]
    i64 tokens, heads, dim, width, x_stride;
};

// x @ W^T + bias, in bf16.
struct Product {
    const void *x, *packed, *bias;  // packed: see product.hpp; bias: [outputs], null: none
    void* out;                      // [rows, outputs]
    i64 rows, inputs, outputs, x_stride;
};

constexpr i64 kPanel = 64;  // outputs that are packed together
constexpr i64 kWideRows = 192;  // rows of x that are widened at a time where bf16 is not multiplied as it is

inline i64 product_scratch_floats(i64 rows, i64 inputs) {
    return rows * kPanel + (rows < kWideRows ? rows : kWideRows) * inputs;
}

// For one element type and instruction set.
struct Ops {
    // The KV heads [head, head_end) of a span of one query. `next`: another one, whose context is fetched; null: none.
    // `scratch`: see `scratch_floats`.
    void (*attend)(const Attention&, const Span&, const Span* next, i64 head, i64 head_end, float* scratch);
    // The queries [begin, end) of a span for one KV head. `scratch`: see `span_scratch_floats`.
    void (*attend_span)(const Attention&, const Span&, i64 head, i64 begin, i64 end, float* scratch);
    void (*norm)(const Norm&);
    void (*rotate)(const Rotation&);
    void (*silu_and_mul)(const void* x, void* out, i64 tokens, i64 size);  // x: [tokens, 2 * size]
    // Null where there is none. `scratch`: see `product_scratch_floats`.
    void (*product)(const Product&, i64 begin, i64 end, float* scratch);
};

constexpr i64 kTile = 64;  // tokens of a context that are scored before their values are mixed

inline i64 scratch_floats(i64 query_heads, i64 dim) { return query_heads * (2 * dim + 2 + kTile); }

constexpr i64 kSpanRows = 384;  // rows of queries, all heads of a KV head, that share what is laid out of a tile

// The queries of a span that are attended at a time.
inline i64 span_queries(i64 group) { return group < kSpanRows ? kSpanRows / group : 1; }

inline i64 span_scratch_floats(i64 group, i64 dim) {
    const i64 rows = span_queries(group) * group + 15;
    return 2 * kTile * dim + dim + rows * (2 * dim + 1 + 16) + 15;
}

struct Variant {
    const char* name;
    Ops bf16, fp32;
};

extern const Variant baseline_variant, avx2_variant, avx512_variant, avx512bf16_variant, amx_variant;

}  // namespace blockcast
