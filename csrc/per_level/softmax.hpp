// The arithmetic of a softmax in base 2.
#pragma once

#include "../attention.hpp"
#include "step.hpp"

namespace triforce::TF_LEVEL {

template <class T>
constexpr int steps_of_page = page_size / numbers_of_word<T>;

/// 2^x within 1e-7, for x up to 100: 1 at 0, at least 2^-126, NaN for the NaN that arithmetic makes.
TF_INLINE F16 exp2(F16 x) {
    const F16 rounder = set1(12582912.0f);  // 1.5 * 2^23: a sum with it ends in the nearest integer
    x = max(set1(-125.0f), x);
    const F16 n = x + rounder, f = from_nearest(x);
    F16 p = set1(1.3264727065e-3f);
    p = fma(p, f, set1(9.6715126489e-3f));
    p = fma(p, f, set1(5.5507337437e-2f));
    p = fma(p, f, set1(2.4022242085e-1f));
    p = fma(p, f, set1(6.9314697760e-1f));
    p = fma(p, f, set1(1.0f));
    return add_to_exponent(p, n);
}

/// Stores the sum of each of four registers, by the tree of reduce_add.
TF_INLINE void store_sums(float* to, const F16 (&x)[block_pages]) {
#if TF_SIMD_AVX512
    const auto low = [](__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0x44); };
    const auto high = [](__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0xee); };
    const __m512 a = _mm512_add_ps(low(x[0].v, x[1].v), high(x[0].v, x[1].v));
    const __m512 b = _mm512_add_ps(low(x[2].v, x[3].v), high(x[2].v, x[3].v));
    __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    y = _mm512_add_ps(y, _mm512_permute_ps(y, 0x4e));
    y = _mm512_add_ps(y, _mm512_permute_ps(y, 0xb1));
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, y)));
#else
    for (int i = 0; i < block_pages; i++) to[i] = reduce_add(x[i]);
#endif
}

}  // namespace triforce::TF_LEVEL
