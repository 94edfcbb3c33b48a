// Codes of int8 KV in registers of the level: joined from their nibbles. Codes of keys are then multiplied with four
// int8 of a query. Sums are exact.
//
// Byte products need one unsigned factor. With VNNI the key is shifted by 128. Without VNNI products of shifted keys do
// not fit: the query's magnitude is multiplied with the key k, or with ~k = -k - 1 where the query is negative. Either
// way a number of the query adds a constant, `product_bias`, to each product.
#pragma once

#include <type_traits>

#include "../pages.hpp"
#include "simd.hpp"

namespace triforce::TF_LEVEL {

#if TF_SIMD_AVX512

/// Sixteen quads of codes, with upper nibbles from `upper`. Lower nibbles are from `lower` if `whole`; else they are 8,
/// the middle of their range.
template <bool whole>
TF_INLINE Quads load_codes(const uint8_t* upper, const uint8_t* lower) {
    const auto twice = [](const uint8_t* from) {
        return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    };
    const __m512i up =
        _mm512_sllv_epi32(twice(upper), _mm512_setr_epi32(4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0));
    __m512i down = _mm512_set1_epi8(8);
    if constexpr (whole)
        down = _mm512_srlv_epi32(twice(lower), _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4));
    const __m512i top = _mm512_set1_epi8(static_cast<char>(0xf0));
    return {_mm512_ternarylogic_epi32(top, up, down, 0xca)};  // top ? up : down
}

#elif TF_SIMD_AVX2

template <bool whole>
TF_INLINE Quads load_codes(const uint8_t* upper, const uint8_t* lower) {
    const __m256i top = _mm256_set1_epi8(static_cast<char>(0xf0)), bottom = _mm256_set1_epi8(15);
    const __m256i up = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper));
    __m256i a = _mm256_set1_epi8(8), b = a;
    if constexpr (whole) {
        const __m256i down = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lower));
        a = _mm256_and_si256(down, bottom), b = _mm256_and_si256(_mm256_srli_epi16(down, 4), bottom);
    }
    a = _mm256_or_si256(a, _mm256_and_si256(_mm256_slli_epi16(up, 4), top));
    b = _mm256_or_si256(b, _mm256_and_si256(up, top));
    return {a, b};
}

#else

template <bool whole>
TF_INLINE Quads load_codes(const uint8_t* upper, const uint8_t* lower) {
    int8_t codes[64];
    for (int i = 0; i < 32; i++) {
        const int below = whole ? lower[i] : 0x88;
        codes[i] = static_cast<int8_t>(upper[i] << 4 | (below & 15));
        codes[i + 32] = static_cast<int8_t>((upper[i] & 0xf0) | below >> 4);
    }
    return load_quads(codes);
}

#endif

/// Loads a step of codes of type P.
template <class P>
TF_INLINE Quads codes_at(CodeAt at) {
    if constexpr (in_nibbles<P>)
        return load_codes<std::is_same_v<P, Code>>(at.upper, at.upper + at.lower);
    else
        return load_quads(reinterpret_cast<const int8_t*>(at.upper));
}

/// Packs four numbers of a query for a product with int8 copies.
TF_INLINE void pack_word(const int8_t* four, PackedWord& to) { __builtin_memcpy(&to.bits, four, sizeof to.bits); }

#if TF_SIMD_AVX512VNNI

using QueryWord = PackedWord;
struct KeyCodes {
    Quads biased;
};
TF_INLINE KeyCodes key_codes(Quads x) { return {x ^ set1_quad(0x80808080)}; }
TF_INLINE Quads query_codes(QueryWord word) { return set1_quad(word.bits); }
TF_INLINE I16 dot(I16 acc, KeyCodes keys, Quads query) { return dot4_unsigned(acc, keys.biased, query); }
/// What products of shifted keys with a number of a query have too much.
constexpr int product_bias(int8_t number) { return 128 * number; }

#else

/// The magnitudes of four numbers of a query, and bytes of ones where a number is negative.
struct QueryWord {
    uint32_t magnitudes, signs;
};
struct QueryCodes {
    Quads magnitudes, signs;
};
TF_INLINE void pack_word(const int8_t* four, QueryWord& to) {
    uint32_t bits;
    __builtin_memcpy(&bits, four, sizeof bits);
    const uint32_t negative = bits >> 7 & 0x01010101;
    to.signs = negative * 0xff;
    to.magnitudes = (bits ^ to.signs) + negative;
}
using KeyCodes = Quads;
TF_INLINE KeyCodes key_codes(Quads x) { return x; }
TF_INLINE QueryCodes query_codes(QueryWord word) { return {set1_quad(word.magnitudes), set1_quad(word.signs)}; }
TF_INLINE I16 dot(I16 acc, KeyCodes keys, const QueryCodes& query) {
    return dot4_unsigned(acc, query.magnitudes, keys ^ query.signs);
}
/// What products of keys with a number of a query have too much, as ~k = -k - 1.
constexpr int product_bias(int8_t number) { return number < 0 ? number : 0; }

#endif

}  // namespace triforce::TF_LEVEL
