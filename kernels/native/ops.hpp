// The operations that are compiled once for each instruction set, and what they are given. Plain pointers and counts: every
// check is the caller's (module.cpp, plan.cpp).
#pragma once

#include <cstdint>

namespace blockcast {

using i64 = std::int64_t;

// One query's attention: the positions [first, end) of its sequence.
struct Query {
    i64 token;              // in the batch
    const i64* block_rows;  // token row of the first K of each block of the sequence, in the layer 0
    i64 first, end;
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

// For one element type and instruction set.
struct Ops {
    // The KV heads [head, head_end) of a query. `scratch`: see `scratch_floats`.
    void (*attend)(const Attention&, const Query&, i64 head, i64 head_end, float* scratch);
    void (*norm)(const Norm&);
    void (*rotate)(const Rotation&);
    void (*silu_and_mul)(const void* x, void* out, i64 tokens, i64 size);  // x: [tokens, 2 * size]
};

constexpr i64 kTile = 64;  // tokens of a context that are scored before their values are mixed

inline i64 scratch_floats(i64 query_heads, i64 dim) { return query_heads * (2 * dim + 2 + kTile); }

struct Variant {
    const char* name;
    Ops bf16, fp32;
};

extern const Variant baseline_variant;
#ifdef BLOCKCAST_X86_VARIANTS
extern const Variant avx2_variant, avx512_variant;
#endif

}  // namespace blockcast
