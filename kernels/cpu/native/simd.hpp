// As many floats at a time as a register holds, in the vector extensions of GCC and Clang: the same source is compiled for several instruction
// sets (CMakeLists.txt), so nothing here may be visible outside its translation unit, and no template of the standard
// library may be used in it: the linker would keep one copy, perhaps the one this CPU cannot run.
#pragma once

#include <cstdint>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

#define ALWAYS_INLINE inline __attribute__((always_inline))

// Wider vectors than the registers compile too, but go through memory.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = std::int32_t __attribute__((vector_size(4 * kLanes)));
using Bits = std::uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = std::uint16_t __attribute__((vector_size(2 * kLanes)));

struct Bf16 {
    std::uint16_t bits;
};

ALWAYS_INLINE Floats load(const float* at) {
    Floats value;
    __builtin_memcpy(&value, at, sizeof value);
    return value;
}

// A bf16 is the upper half of a float.
ALWAYS_INLINE Floats load(const Bf16* at) {
    Halves halves;
    __builtin_memcpy(&halves, at, sizeof halves);
    return reinterpret_cast<Floats>(__builtin_convertvector(halves, Bits) << 16);
}

ALWAYS_INLINE void store(float* at, Floats value) { __builtin_memcpy(at, &value, sizeof value); }

// Rounded to the nearest, ties to even; NaN stays NaN.
ALWAYS_INLINE void store(Bf16* at, Floats value) {
    const Bits bits = reinterpret_cast<Bits>(value);
    const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Bits number = reinterpret_cast<Bits>(value == value);
    const Halves halves = __builtin_convertvector((rounded & number) | (~number & 0x7fc0), Halves);
    __builtin_memcpy(at, &halves, sizeof halves);
}

// The first `count` elements, of which at most kLanes are read; after them come zeros.
template <class T>
ALWAYS_INLINE Floats load_some(const T* at, std::int64_t count) {
    if (count >= kLanes) return load(at);
    T padded[kLanes] = {};
    for (int i = 0; i < count; ++i) padded[i] = at[i];
    return load(padded);
}

// Writes the first `count` elements of a vector, at most kLanes.
template <class T>
ALWAYS_INLINE void store_some(T* at, Floats value, std::int64_t count) {
    if (count >= kLanes) return store(at, value);
    T padded[kLanes];
    store(padded, value);
    for (int i = 0; i < count; ++i) at[i] = padded[i];
}

// Less nothing, not plus nothing: that would change -0, so the addition would be done.
ALWAYS_INLINE Floats every(float value) { return value - Floats{}; }

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC knows the other one from version 12 on
#define PICK(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Lanes n, n + 2, .. of a and then of b.
template <int n>
ALWAYS_INLINE Floats every_second(Floats a, Floats b) {
#if defined(__AVX512F__)
    return PICK(a, b, n, n + 2, n + 4, n + 6, n + 8, n + 10, n + 12, n + 14,
                n + 16, n + 18, n + 20, n + 22, n + 24, n + 26, n + 28, n + 30);
#elif defined(__AVX__)
    return PICK(a, b, n, n + 2, n + 4, n + 6, n + 8, n + 10, n + 12, n + 14);
#else
    return PICK(a, b, n, n + 2, n + 4, n + 6);
#endif
}

ALWAYS_INLINE Floats even(Floats a, Floats b) { return every_second<0>(a, b); }
ALWAYS_INLINE Floats odd(Floats a, Floats b) { return every_second<1>(a, b); }

ALWAYS_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

ALWAYS_INLINE float sum(Floats value) {
    for (int left = kLanes; left > 1; left /= 2) value = even(value, value) + odd(value, value);
    return value[0];
}

ALWAYS_INLINE float largest(Floats value) {
    for (int left = kLanes; left > 1; left /= 2) value = larger(even(value, value), odd(value, value));
    return value[0];
}

// 2 ** x; NaN stays NaN. To about 2 units in the last place with Degree 6, to 5e-5 with 4. x below -126 counts as -126,
// above 127 as 127.
template <int Degree = 6>
ALWAYS_INLINE Floats exp2(Floats x) {
    x = x < -126.0f ? every(-126.0f) : x;
    x = x > 127.0f ? every(127.0f) : x;
    const Floats shifted = x + 12582912.0f;  // 1.5 * 2**23: the nearest integer stands in the low bits
    const Floats f = x - (shifted - 12582912.0f);
    Floats y = every(9.61812911e-3f);  // Taylor: ln(2)**n / n!
    if (Degree >= 6) {
        y = every(1.54035304e-4f);
        y = y * f + 1.33335581e-3f;
        y = y * f + 9.61812911e-3f;
    }
    y = y * f + 5.55041087e-2f;
    y = y * f + 2.40226507e-1f;
    y = y * f + 6.93147181e-1f;
    y = y * f + 1.0f;
    const Ints whole = reinterpret_cast<Ints>(shifted) - 0x4b400000;
    return y * reinterpret_cast<Floats>((whole + 127) << 23);
}

// Lane i becomes the sum of parts[i], of which there are kLanes; they are used up.
ALWAYS_INLINE Floats add_each(Floats* parts) {
    for (int left = kLanes / 2; left >= 1; left /= 2) {
        for (int i = 0; i < left; ++i) {
            const Floats a = parts[2 * i], b = parts[2 * i + 1];
            parts[i] = even(a, b) + odd(a, b);
        }
    }
    return parts[0];
}

}  // namespace
