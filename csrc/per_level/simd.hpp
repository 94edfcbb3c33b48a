// Sixteen float lanes, the same interface at each level, for files that are compiled once per level. Stores of bf16
// round to nearest even.
//
// Everything here lives in the level's own namespace. The linker could otherwise pick one level's inline function for
// all levels, and run AVX-512 on a CPU without it. For the same reason code in per_level/ avoids inline functions of
// std.
#pragma once

#include <cstdint>

#include "../half.hpp"
#include "../types.hpp"

#ifndef TF_LEVEL
#error "simd.hpp belongs to files compiled once per level"
#endif

#define TF_INLINE inline __attribute__((always_inline))
#define TF_INLINED __attribute__((always_inline))  // for lambdas

namespace triforce::TF_LEVEL {

/// Four neighbouring int8 or two neighbouring bf16 of an array.
struct __attribute__((may_alias)) PackedWord {
    uint32_t bits;
};

}  // namespace triforce::TF_LEVEL

#if TF_SIMD_AVX512
#include "simd_avx512.hpp"
#elif TF_SIMD_AVX2
#include "simd_avx2.hpp"
#else
#include "simd_portable.hpp"
#endif

namespace triforce::TF_LEVEL {

#if !TF_SIMD_AVX512
/// x minus its nearest integer, for |x| below 2^22.
TF_INLINE F16 from_nearest(F16 x) {
    const F16 rounder = set1(12582912.0f);  // 1.5 * 2^23: beyond it floats are integers
    return x - ((x + rounder) - rounder);
}
#endif

/// Stores numbers as words of products.
TF_INLINE void store_words(float* to, F16 x) { store(to, x); }
#if !TF_SIMD_AVX512BF16
/// One half of each of sixteen pairs of bf16, as floats: part 0 is the higher half, part 1 the lower half.
template <int part>
TF_INLINE F16 load_pairs(const bf16* at) {
    asm volatile("" : "+r"(at));  // both parts are read from memory: a part in registers would take the place of sums
    return part ? load_lower(at) : load_higher(at);
}
/// Two bf16 numbers that multiply such pairs. They are stored as floats, so that a broadcast from memory suffices.
struct PairWord {
    float lower, higher;
};
template <int part>
TF_INLINE F16 set1_pair(const PairWord& x) {
    return set1(part ? x.lower : x.higher);
}
/// Stores sixteen numbers >= 0, rounded to bf16, as eight words.
TF_INLINE void store_words(PairWord* to, F16 x) { store(reinterpret_cast<float*>(to), nearest_bf16(x)); }
#endif

/// e^x within 2 ulp; 0 below -87.7, at most e^88.37, NaN for NaN. A lane's bits do not depend on its neighbours.
TF_INLINE F16 exp(F16 x) {
    const F16 rounder = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    x = min(set1(88.37f), max(set1(-88.0f), x));
    const F16 n = fma(x, set1(1.44269504f), rounder) - rounder;
    const F16 r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
    F16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r + set1(1.0f));
    return p * pow2(n);
}

/// tanh within 2e-7: 1 - 2 / (e^2x + 1).
TF_INLINE F16 tanh(F16 x) { return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f)); }

TF_INLINE F16 silu(F16 x) {
    x = max(set1(-88.0f), x);  // exp(88) is finite
    return x / (set1(1.0f) + exp(zero() - x));
}

// Rounding of numbers to integer codes with one scale. A number becomes the nearest multiple of the scale; the largest
// magnitude has the largest code.

template <class Code>
constexpr float largest_code = sizeof(Code) == 1 ? int8_largest : int16_largest;
TF_INLINE void store_codes(int8_t* to, F16 x) { store_int8(to, x); }
TF_INLINE void store_codes(int16_t* to, F16 x) { store_int16(to, x); }

/// The scale of n numbers, where n is a multiple of 16. NaN if a number is not finite, 0 if all numbers are 0.
template <class Code, class T>
float scale_of(const T* x, int64_t n) {
    F16 top = zero(), poison = zero();
    for (int64_t i = 0; i < n; i += 16) {
        const F16 some = load(x + i);
        top = max(top, max(some, zero() - some));
        poison = add_product(poison, some, zero());
    }
    return reduce_max(top) / largest_code<Code> + reduce_add(poison);
}

template <class Code, class T>
void quantise(const T* x, int64_t n, float scale, Code* to) {
    const F16 inverse = set1(scale > 0 ? 1 / scale : 0), most = set1(largest_code<Code>);
    for (int64_t i = 0; i < n; i += 16) store_codes(to + i, min(max(load(x + i) * inverse, zero() - most), most));
}

}  // namespace triforce::TF_LEVEL
