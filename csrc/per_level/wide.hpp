// Pairs of int16 in registers of the level, for integer products of codes: a code of int8 is widened where it is read.
#pragma once

#include "simd.hpp"

namespace triforce::TF_LEVEL {

#if TF_SIMD_AVX512

struct Wide {
    __m512i v;
};
/// Sixteen pairs of int8.
TF_INLINE Wide load_wide(const int8_t* from) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
TF_INLINE Wide set1_wide(uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
/// Sixteen sums of two products.
TF_INLINE I16 dot(I16 acc, Wide x, Wide y) { return {dot2(acc.v, x.v, y.v)}; }

#elif TF_SIMD_AVX2

struct Wide {
    __m256i a, b;
};
TF_INLINE Wide load_wide(const int8_t* from) {
    const auto* at = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(at)), _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1))};
}
TF_INLINE Wide set1_wide(uint32_t pair) {
    const __m256i both = _mm256_set1_epi32(static_cast<int>(pair));
    return {both, both};
}
TF_INLINE I16 dot(I16 acc, Wide x, Wide y) { return {dot2(acc.a, x.a, y.a), dot2(acc.b, x.b, y.b)}; }

#else

struct Wide {
    I4 lower[4], upper[4];  // of each pair
};
TF_INLINE Wide load_wide(const int8_t* from) {
    Wide x;
    for (int i = 0; i < 4; i++, from += 8) {
        x.lower[i] = I4{from[0], from[2], from[4], from[6]};
        x.upper[i] = I4{from[1], from[3], from[5], from[7]};
    }
    return x;
}
TF_INLINE Wide set1_wide(uint32_t pair) {
    const int lower = static_cast<int16_t>(pair), upper = static_cast<int16_t>(pair >> 16);
    Wide x;
    for (int i = 0; i < 4; i++) x.lower[i] = I4{} + lower, x.upper[i] = I4{} + upper;
    return x;
}
TF_INLINE I16 dot(I16 acc, const Wide& x, const Wide& y) {
    for (int i = 0; i < 4; i++) acc.v[i] += x.lower[i] * y.lower[i] + x.upper[i] * y.upper[i];
    return acc;
}

#endif

}  // namespace triforce::TF_LEVEL
