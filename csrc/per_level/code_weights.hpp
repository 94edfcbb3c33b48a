// The weights of a block of codes as integers of 15 bits, and their products with values. Sums are exact.
//
// With VNNI a weight is two bytes, each with sums of its own. Elsewhere values are widened to 16 bits.
#pragma once

#include "../attention.hpp"
#include "code_step.hpp"

namespace triforce::TF_LEVEL {

#if TF_SIMD_AVX512VNNI

using ValueCodes = Quads;
TF_INLINE ValueCodes value_codes(Quads x) { return x; }
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
TF_INLINE WeightSums dot(WeightSums acc, ValueCodes values, const Weights& weights, int page, int step) {
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
struct ValueCodes {
    __m512i even, odd;
};
TF_INLINE ValueCodes value_codes(Quads x) {
    return {_mm512_srai_epi16(_mm512_slli_epi16(x.v, 8), 8), _mm512_srai_epi16(x.v, 8)};
}
TF_INLINE WeightSums dot(WeightSums acc, ValueCodes values, const Weights& block_weights, int page, int step) {
    const WeightWord& weights = block_weights.words[page][step];
    acc.v = dot2(acc.v, values.even, _mm512_set1_epi32(static_cast<int>(weights.even)));
    return {dot2(acc.v, values.odd, _mm512_set1_epi32(static_cast<int>(weights.odd)))};
}
#elif TF_SIMD_AVX2
struct ValueCodes {
    I16 even, odd;
};
TF_INLINE ValueCodes value_codes(Quads x) {
    const auto even = [](__m256i words) { return _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 8); };
    return {{even(x.a), even(x.b)}, {_mm256_srai_epi16(x.a, 8), _mm256_srai_epi16(x.b, 8)}};
}
TF_INLINE WeightSums dot(WeightSums acc, ValueCodes values, const Weights& block_weights, int page, int step) {
    const WeightWord& weights = block_weights.words[page][step];
    const __m256i even = _mm256_set1_epi32(static_cast<int>(weights.even));
    acc = {dot2(acc.a, values.even.a, even), dot2(acc.b, values.even.b, even)};
    const __m256i odd = _mm256_set1_epi32(static_cast<int>(weights.odd));
    return {dot2(acc.a, values.odd.a, odd), dot2(acc.b, values.odd.b, odd)};
}
#else
struct ValueCodes {
    I4 tokens[4][4];
};
TF_INLINE ValueCodes value_codes(const Quads& x) {
    ValueCodes values;
    for (int i = 0; i < 4; i++) {
        const U4 words = (U4)x.v[i];
        for (int token = 0; token < 4; token++) values.tokens[token][i] = (I4)(words << (24 - 8 * token)) >> 24;
    }
    return values;
}
TF_INLINE WeightSums dot(WeightSums acc, const ValueCodes& values, const Weights& block_weights, int page, int step) {
    const WeightWord& weights = block_weights.words[page][step];
    const auto lower = [](uint32_t pair) { return static_cast<int16_t>(pair); };
    const auto upper = [](uint32_t pair) { return static_cast<int16_t>(pair >> 16); };
    for (int i = 0; i < 4; i++) {
        const I4(&tokens)[4][4] = values.tokens;
        acc.v[i] += tokens[0][i] * lower(weights.even) + tokens[2][i] * upper(weights.even);
        acc.v[i] += tokens[1][i] * lower(weights.odd) + tokens[3][i] * upper(weights.odd);
    }
    return acc;
}
#endif

#endif

}  // namespace triforce::TF_LEVEL
