// The weights of a block of codes as integers of 15 bits, and their products with values. Sums are exact.
//
// With VNNI a weight is two bytes, each with sums of its own. Elsewhere values are widened to 16 bits, in two parts:
// even tokens and odd tokens. The portable level widens each token when it is multiplied.
#pragma once

#include "../attention.hpp"
#include "code_step.hpp"

namespace triforce::TF_LEVEL {

#if TF_SIMD_AVX512VNNI

constexpr int value_parts = 1;
template <int>
TF_INLINE Quads value_part(Quads x) {
    return x;
}
/// The upper and the lower bytes of a block's weights. A word has the bytes of four tokens of a page.
struct alignas(64) Weights {
    uint32_t upper[page_size / 4][block_pages], lower[page_size / 4][block_pages];
};
TF_INLINE void store_weights(Weights& to, const F16 (&x)[block_pages]) {
    __m512i whole[block_pages];
    for (int p = 0; p < block_pages; p++) whole[p] = _mm512_cvtps_epi32(x[p].v);
    const __m512i a = _mm512_packus_epi32(whole[0], whole[1]), b = _mm512_packus_epi32(whole[2], whole[3]);
    const __m512i byte = _mm512_set1_epi16(255);
    _mm512_store_si512(to.upper, _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
    _mm512_store_si512(to.lower, _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)));
}
struct WeightSums {
    I16 upper, lower;
};
template <int>
TF_INLINE WeightSums dot(WeightSums acc, Quads values, const Weights& weights, int page, int step) {
    return {dot4_unsigned(acc.upper, set1_quad(weights.upper[step][page]), values),
            dot4_unsigned(acc.lower, set1_quad(weights.lower[step][page]), values)};
}
TF_INLINE I16 total(WeightSums x) { return {_mm512_add_epi32(_mm512_slli_epi32(x.upper.v, 8), x.lower.v)}; }

#else

/// Weights of tokens 0 and 2 of four, and weights of tokens 1 and 3.
struct WeightWord {
    uint32_t even, odd;
};
struct alignas(64) Weights {
    WeightWord words[block_pages][page_size / 4];
};
TF_INLINE void store_weights(Weights& to, const F16 (&x)[block_pages]) {
    for (int p = 0; p < block_pages; p++) {
        alignas(32) int16_t words[page_size];
        store_int16(words, x[p]);
#if TF_SIMD_AVX512 || TF_SIMD_AVX2
        const __m128i mix = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
        const __m256i mixed = _mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(words)),
                                                  _mm256_broadcastsi128_si256(mix));
        _mm256_store_si256(reinterpret_cast<__m256i*>(to.words[p]), mixed);
#else
        for (int i = 0; i < page_size; i += 4) {
            const int16_t mixed[4] = {words[i], words[i + 2], words[i + 1], words[i + 3]};
            __builtin_memcpy(to.words[p] + i / 4, mixed, sizeof mixed);
        }
#endif
    }
}
using WeightSums = I16;
TF_INLINE I16 total(WeightSums x) { return x; }

#if TF_SIMD_AVX512
constexpr int value_parts = 2;
template <int part>
TF_INLINE Quads value_part(Quads x) {
    return {_mm512_srai_epi16(part ? x.v : _mm512_slli_epi16(x.v, 8), 8)};
}
template <int part>
TF_INLINE WeightSums dot(WeightSums acc, Quads values, const Weights& weights, int page, int step) {
    const WeightWord& word = weights.words[page][step];
    return {dot2(acc.v, values.v, set1_quad(part ? word.odd : word.even).v)};
}
#elif TF_SIMD_AVX2
constexpr int value_parts = 2;
template <int part>
TF_INLINE Quads value_part(Quads x) {
    const auto widened = [](__m256i pair) { return _mm256_srai_epi16(part ? pair : _mm256_slli_epi16(pair, 8), 8); };
    return {widened(x.a), widened(x.b)};
}
template <int part>
TF_INLINE WeightSums dot(WeightSums acc, Quads values, const Weights& weights, int page, int step) {
    const WeightWord& word = weights.words[page][step];
    const Quads both = set1_quad(part ? word.odd : word.even);
    return {dot2(acc.a, values.a, both.a), dot2(acc.b, values.b, both.b)};
}
#else
constexpr int value_parts = 1;
template <int>
TF_INLINE Quads value_part(Quads x) {
    return x;
}
template <int>
TF_INLINE WeightSums dot(WeightSums acc, Quads values, const Weights& weights, int page, int step) {
    const WeightWord& word = weights.words[page][step];
    const auto lower = [](uint32_t pair) { return static_cast<int16_t>(pair); };
    const auto upper = [](uint32_t pair) { return static_cast<int16_t>(pair >> 16); };
    for (int i = 0; i < 4; i++) {
        const U4 codes = (U4)values.v[i];
        const auto token = [&](int t) { return (I4)(codes << (24 - 8 * t)) >> 24; };
        acc.v[i] += token(0) * lower(word.even) + token(2) * upper(word.even);
        acc.v[i] += token(1) * lower(word.odd) + token(3) * upper(word.odd);
    }
    return acc;
}
#endif

#endif

}  // namespace triforce::TF_LEVEL
