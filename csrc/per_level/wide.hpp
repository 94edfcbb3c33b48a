// Pairs of int16 in registers of the level, for integer products of codes: a code is put together and widened where it
// is read.
#pragma once

#include "simd.hpp"

namespace triforce::TF_LEVEL {

#if TF_SIMD_AVX512

struct Wide {
    __m512i v;
};
/// Sixteen pairs of codes: the nibbles of `upper`, over those of `lower` or, where these are not read, half a step.
template <bool whole>
TF_INLINE Wide load_codes(const uint8_t* upper, const uint8_t* lower) {
    const auto twice = [](const uint8_t* from) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    };
    const __m256i up = _mm256_sllv_epi32(twice(upper), _mm256_setr_epi32(4, 4, 4, 4, 0, 0, 0, 0));
    __m256i down = _mm256_set1_epi8(8);
    if constexpr (whole) down = _mm256_srlv_epi32(twice(lower), _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    const __m256i top = _mm256_set1_epi8(static_cast<char>(0xf0));
    return {_mm512_cvtepi8_epi16(_mm256_ternarylogic_epi32(top, up, down, 0xca))};  // top ? up : down
}
TF_INLINE Wide set1_wide(uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
/// Sixteen sums of two products.
TF_INLINE I16 dot(I16 acc, Wide x, Wide y) { return {dot2(acc.v, x.v, y.v)}; }

#elif TF_SIMD_AVX2

struct Wide {
    __m256i a, b;
};
template <bool whole>
TF_INLINE Wide load_codes(const uint8_t* upper, const uint8_t* lower) {
    const __m128i top = _mm_set1_epi8(static_cast<char>(0xf0)), bottom = _mm_set1_epi8(15);
    const __m128i up = _mm_loadu_si128(reinterpret_cast<const __m128i*>(upper));
    __m128i a = _mm_set1_epi8(8), b = a;
    if constexpr (whole) {
        const __m128i down = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lower));
        a = _mm_and_si128(down, bottom), b = _mm_and_si128(_mm_srli_epi16(down, 4), bottom);
    }
    a = _mm_or_si128(a, _mm_and_si128(_mm_slli_epi16(up, 4), top));
    b = _mm_or_si128(b, _mm_and_si128(up, top));
    return {_mm256_cvtepi8_epi16(a), _mm256_cvtepi8_epi16(b)};
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
template <bool whole>
TF_INLINE Wide load_codes(const uint8_t* upper, const uint8_t* lower) {
    int8_t codes[32];
    for (int i = 0; i < 16; i++) {
        const int below = whole ? lower[i] : 0x88;
        codes[i] = static_cast<int8_t>(upper[i] << 4 | (below & 15));
        codes[i + 16] = static_cast<int8_t>((upper[i] & 0xf0) | below >> 4);
    }
    Wide x;
    const int8_t* from = codes;
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
