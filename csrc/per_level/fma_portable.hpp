// a * b + c of four floats, rounded once, with an instruction for it or without. Included by simd_portable.hpp.
#pragma once

#include <cstdint>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace triforce::TF_LEVEL {

typedef float V4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));

/// Compilers use one instruction for all four lanes if the target has it; otherwise this is slow.
TF_INLINE V4 fma_by_lane(V4 a, V4 b, V4 c) {
    return V4{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
              __builtin_fmaf(a[3], b[3], c[3])};
}

#if defined(__FP_FAST_FMAF) || !defined(__SSE2__)
TF_INLINE V4 fma(V4 a, V4 b, V4 c) { return fma_by_lane(a, b, c); }
#else
__attribute__((noinline)) inline V4 slow_fma(V4 a, V4 b, V4 c) { return fma_by_lane(a, b, c); }

/// a * b + c in doubles. The product of floats is exact. The sum is rounded to a double, and later to a float. Two
/// roundings equal one, unless the double lies halfway between two floats (or is subnormal, for which no result is
/// promised). GCC 12 leaves out such conversions of vectors to float and back, so intrinsics do them.
TF_INLINE __m128d sum_in_double(__m128 a, __m128 b, __m128 c) {
    return _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(a), _mm_cvtps_pd(b)), _mm_cvtps_pd(c));
}
TF_INLINE V4 fma(V4 a, V4 b, V4 c) {
    const auto upper = [](__m128 x) { return _mm_movehl_ps(x, x); };
    const __m128d x = sum_in_double(a, b, c), y = sum_in_double(upper(a), upper(b), upper(c));
    const __m128i rest = _mm_castps_si128(_mm_shuffle_ps(_mm_castpd_ps(x), _mm_castpd_ps(y), 0x88));  // lower words
    const __m128i beyond_float = _mm_and_si128(rest, _mm_set1_epi32(0x1fffffff));
    const __m128i halfway = _mm_cmpeq_epi32(beyond_float, _mm_set1_epi32(0x10000000));
    if (__builtin_expect(_mm_movemask_epi8(halfway), 0)) return slow_fma(a, b, c);
    return _mm_movelh_ps(_mm_cvtpd_ps(x), _mm_cvtpd_ps(y));
}
#endif

}  // namespace triforce::TF_LEVEL
