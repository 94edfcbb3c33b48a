// Codes of a step, sums of a group and floats of outputs, in registers of the level: for low_bit_sum.hpp.
#pragma once

#include <type_traits>
#include <utility>

#include "../half.hpp"
#include "simd.hpp"

namespace triforce::TF_LEVEL {

// A register of codes has 32 bits for each of `lanes` outputs: two words for inputs of int16, four bytes for inputs of
// int8. Sixteen outputs take `parts_of_a_block` registers. `shifted` moves the bits of each word to the left, or to the
// right if `by` is negative.
#if TF_SIMD_AVX512

constexpr int lanes = 16;
struct Codes {
    __m512i v;
};
struct Ints {
    __m512i v;
};
struct Row {
    __m512 v;
};
TF_INLINE Codes load_codes(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
TF_INLINE Codes broadcast(const void* inputs) {
    int32_t x;
    __builtin_memcpy(&x, inputs, sizeof x);
    return {_mm512_set1_epi32(x)};
}
template <int by>
TF_INLINE Codes shifted(Codes x) {
    if constexpr (by < 0) return {_mm512_srli_epi16(x.v, -by)};
    return {_mm512_slli_epi16(x.v, by < 0 ? 0 : by)};
}
TF_INLINE Codes masked(Codes x, int16_t mask) { return {_mm512_and_si512(x.v, _mm512_set1_epi16(mask))}; }
/// x | (y & mask).
TF_INLINE Codes with_bits(Codes x, Codes y, int16_t mask) {
    return {_mm512_ternarylogic_epi32(x.v, y.v, _mm512_set1_epi16(mask), 0xf8)};
}
TF_INLINE Codes signed_upper_bytes(Codes x) { return {_mm512_srai_epi16(x.v, 8)}; }
TF_INLINE Ints zeros() { return {_mm512_setzero_si512()}; }
TF_INLINE Ints set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
TF_INLINE Ints operator+(Ints x, Ints y) { return {_mm512_add_epi32(x.v, y.v)}; }
TF_INLINE Ints operator-(Ints x, Ints y) { return {_mm512_sub_epi32(x.v, y.v)}; }
TF_INLINE Ints shifted_left(Ints x, int by) { return {_mm512_slli_epi32(x.v, by)}; }
TF_INLINE Ints dot2(Ints sum, Codes w, Codes x) { return {dot2(sum.v, w.v, x.v)}; }
TF_INLINE Codes flipped_signs(Codes x) { return {_mm512_xor_si512(x.v, _mm512_set1_epi8(-128))}; }
#if TF_SIMD_AVX512VNNI
TF_INLINE Ints dot4(Ints sum, Codes w, Codes x) { return {_mm512_dpbusd_epi32(sum.v, w.v, x.v)}; }
#else
struct PairSums {
    __m512i v;
};
TF_INLINE PairSums no_pair_sums() { return {_mm512_setzero_si512()}; }
TF_INLINE PairSums dot4(PairSums sum, Codes w, Codes x) {
    sum.v = _mm512_add_epi16(sum.v, _mm512_maddubs_epi16(w.v, x.v));
    asm("" : "+v"(sum.v));  // as in dot2
    return sum;
}
TF_INLINE Ints ints(PairSums x) { return {_mm512_madd_epi16(x.v, _mm512_set1_epi16(1))}; }
TF_INLINE Codes magnitudes(Codes x) { return {_mm512_abs_epi8(x.v)}; }
TF_INLINE Codes times_sign(Codes x, Codes w) {
    return {_mm512_mask_sub_epi8(x.v, _mm512_movepi8_mask(w.v), _mm512_setzero_si512(), x.v)};
}
#endif
TF_INLINE Row load_row(const float* from) { return {_mm512_loadu_ps(from)}; }
TF_INLINE void store_row(float* to, Row x) { _mm512_storeu_ps(to, x.v); }
TF_INLINE Row set1_row(float x) { return {_mm512_set1_ps(x)}; }
TF_INLINE Row load_halves(const uint8_t* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
template <bool is_signed>
TF_INLINE Row load_bytes(const uint8_t* from) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x))};
}
TF_INLINE Row operator*(Row a, Row b) { return {_mm512_mul_ps(a.v, b.v)}; }
TF_INLINE Row operator-(Row a) { return {_mm512_sub_ps(_mm512_setzero_ps(), a.v)}; }
TF_INLINE Row fma(Row a, Row b, Row c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TF_INLINE Row floats(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }

#elif TF_SIMD_AVX2

constexpr int lanes = 8;
struct Codes {
    __m256i v;
};
struct Ints {
    __m256i v;
};
struct Row {
    __m256 v;
};
TF_INLINE Codes load_codes(const uint8_t* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))};
}
TF_INLINE Codes broadcast(const void* inputs) {
    int32_t x;
    __builtin_memcpy(&x, inputs, sizeof x);
    return {_mm256_set1_epi32(x)};
}
template <int by>
TF_INLINE Codes shifted(Codes x) {
    if constexpr (by < 0) return {_mm256_srli_epi16(x.v, -by)};
    return {_mm256_slli_epi16(x.v, by < 0 ? 0 : by)};
}
TF_INLINE Codes masked(Codes x, int16_t mask) { return {_mm256_and_si256(x.v, _mm256_set1_epi16(mask))}; }
TF_INLINE Codes with_bits(Codes x, Codes y, int16_t mask) {
    return {_mm256_or_si256(x.v, _mm256_and_si256(y.v, _mm256_set1_epi16(mask)))};
}
TF_INLINE Codes signed_upper_bytes(Codes x) { return {_mm256_srai_epi16(x.v, 8)}; }
TF_INLINE Ints zeros() { return {_mm256_setzero_si256()}; }
TF_INLINE Ints set1_int(int32_t x) { return {_mm256_set1_epi32(x)}; }
TF_INLINE Ints operator+(Ints x, Ints y) { return {_mm256_add_epi32(x.v, y.v)}; }
TF_INLINE Ints operator-(Ints x, Ints y) { return {_mm256_sub_epi32(x.v, y.v)}; }
TF_INLINE Ints shifted_left(Ints x, int by) { return {_mm256_slli_epi32(x.v, by)}; }
TF_INLINE Ints dot2(Ints sum, Codes w, Codes x) { return {dot2(sum.v, w.v, x.v)}; }
TF_INLINE Codes flipped_signs(Codes x) { return {_mm256_xor_si256(x.v, _mm256_set1_epi8(-128))}; }
#if TF_SIMD_AVXVNNI
TF_INLINE Ints dot4(Ints sum, Codes w, Codes x) { return {_mm256_dpbusd_avx_epi32(sum.v, w.v, x.v)}; }
#else
struct PairSums {
    __m256i v;
};
TF_INLINE PairSums no_pair_sums() { return {_mm256_setzero_si256()}; }
TF_INLINE PairSums dot4(PairSums sum, Codes w, Codes x) {
    sum.v = _mm256_add_epi16(sum.v, _mm256_maddubs_epi16(w.v, x.v));
    asm("" : "+x"(sum.v));  // as in dot2
    return sum;
}
TF_INLINE Ints ints(PairSums x) { return {_mm256_madd_epi16(x.v, _mm256_set1_epi16(1))}; }
TF_INLINE Codes magnitudes(Codes x) { return {_mm256_abs_epi8(x.v)}; }
TF_INLINE Codes times_sign(Codes x, Codes w) { return {_mm256_sign_epi8(x.v, w.v)}; }
#endif
TF_INLINE Row load_row(const float* from) { return {_mm256_loadu_ps(from)}; }
TF_INLINE void store_row(float* to, Row x) { _mm256_storeu_ps(to, x.v); }
TF_INLINE Row set1_row(float x) { return {_mm256_set1_ps(x)}; }
TF_INLINE Row load_halves(const uint8_t* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}
template <bool is_signed>
TF_INLINE Row load_bytes(const uint8_t* from) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x))};
}
TF_INLINE Row operator*(Row a, Row b) { return {_mm256_mul_ps(a.v, b.v)}; }
TF_INLINE Row operator-(Row a) { return {_mm256_sub_ps(_mm256_setzero_ps(), a.v)}; }
TF_INLINE Row fma(Row a, Row b, Row c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
TF_INLINE Row floats(Ints x) { return {_mm256_cvtepi32_ps(x.v)}; }

#else

constexpr int lanes = 16;
struct Codes {
    uint16_t v[2 * lanes];
};
struct Ints {
    int32_t v[lanes];
};
typedef F16 Row;
TF_INLINE Codes load_codes(const uint8_t* from) {
    Codes x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
TF_INLINE Codes broadcast(const void* inputs) {
    Codes x;
    for (int i = 0; i < lanes; i++) std::memcpy(x.v + 2 * i, inputs, 4);
    return x;
}
template <int by>
TF_INLINE Codes shifted(Codes x) {
    constexpr int left = by < 0 ? 0 : by, right = by < 0 ? -by : 0;
    for (uint16_t& word : x.v) word = static_cast<uint16_t>(word << left >> right);
    return x;
}
TF_INLINE Codes masked(Codes x, int16_t mask) {
    for (uint16_t& word : x.v) word &= static_cast<uint16_t>(mask);
    return x;
}
TF_INLINE Codes with_bits(Codes x, Codes y, int16_t mask) {
    for (int i = 0; i < 2 * lanes; i++) x.v[i] |= static_cast<uint16_t>(y.v[i] & mask);
    return x;
}
TF_INLINE Codes signed_upper_bytes(Codes x) {
    for (uint16_t& word : x.v) word = static_cast<uint16_t>(static_cast<int8_t>(word >> 8));
    return x;
}
TF_INLINE Ints zeros() { return {}; }
TF_INLINE Ints set1_int(int32_t x) {
    Ints all;
    for (int32_t& each : all.v) each = x;
    return all;
}
TF_INLINE Ints operator+(Ints x, Ints y) {
    for (int i = 0; i < lanes; i++) x.v[i] += y.v[i];
    return x;
}
TF_INLINE Ints operator-(Ints x, Ints y) {
    for (int i = 0; i < lanes; i++) x.v[i] -= y.v[i];
    return x;
}
TF_INLINE Ints shifted_left(Ints x, int by) {
    for (int32_t& each : x.v) each *= 1 << by;
    return x;
}
TF_INLINE Ints dot2(Ints sum, Codes w, Codes x) {
    for (int i = 0; i < 2 * lanes; i++) sum.v[i / 2] += static_cast<int16_t>(w.v[i]) * static_cast<int16_t>(x.v[i]);
    return sum;
}
TF_INLINE Codes flipped_signs(Codes x) {
    for (uint16_t& word : x.v) word ^= 0x8080;
    return x;
}
TF_INLINE Ints dot4(Ints sum, Codes w, Codes x) {
    for (int i = 0; i < 2 * lanes; i++)
        sum.v[i / 2] += (w.v[i] & 255) * static_cast<int8_t>(x.v[i]) + (w.v[i] >> 8) * static_cast<int8_t>(x.v[i] >> 8);
    return sum;
}
TF_INLINE Row load_row(const float* from) { return load(from); }
TF_INLINE void store_row(float* to, Row x) { store(to, x); }
TF_INLINE Row set1_row(float x) { return set1(x); }
TF_INLINE Row load_halves(const uint8_t* from) {
    uint16_t halves[lanes];
    float x[lanes];
    std::memcpy(halves, from, sizeof halves);
    for (int i = 0; i < lanes; i++) x[i] = half_to_float(halves[i]);
    return load(x);
}
template <bool is_signed>
TF_INLINE Row load_bytes(const uint8_t* from) {
    float x[lanes];
    for (int i = 0; i < lanes; i++) x[i] = is_signed ? static_cast<int8_t>(from[i]) : from[i];
    return load(x);
}
TF_INLINE Row operator-(Row a) { return zero() - a; }
TF_INLINE Row floats(Ints x) { return floats(load_ints(x.v)); }

#endif

#if TF_SIMD_AVX512 || TF_SIMD_AVX2
/// Puts both halves of sixteen words into the order 0, 2, 4, 6, 1, 3, 5, 7. Returns the sum of all words.
TF_INLINE int32_t reorder(int16_t* words) {
    const __m128i of_eight = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words),
                        _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(of_eight)));
    const __m256i pairs = _mm256_madd_epi16(x, _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
#else
TF_INLINE int32_t reorder(int16_t* words) {
    constexpr int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    int16_t before[16];
    std::memcpy(before, words, sizeof before);
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += before[i], words[i] = before[i / 8 * 8 + order[i % 8]];
    return sum;
}
#endif

constexpr int parts_of_a_block = 16 / lanes;

// How a tile adds products of codes and inputs. `Sum` is the type of its partial sums. After `most_steps` steps they go
// to sums of 32 bits, before they overflow.

/// Words of two inputs, summed in 32 bits.
struct WordSums {
    typedef Ints Sum;
    static constexpr int most_steps = 16;
    static TF_INLINE Sum start(Ints sum) { return sum; }
    static TF_INLINE Sum dot(Sum sum, Codes w, Codes x) { return dot2(sum, w, x); }
    static TF_INLINE Ints total(Ints, Sum sum) { return sum; }
};

#if TF_SIMD_AVX512VNNI || TF_SIMD_AVXVNNI || !(TF_SIMD_AVX512 || TF_SIMD_AVX2)
constexpr int signed_byte_offset = 128;  // makes signed codes of 8 bits unsigned
/// Bytes of four inputs, summed in 32 bits.
template <int>
struct ByteSums {
    typedef Ints Sum;
    static constexpr int most_steps = 8;
    static TF_INLINE Sum start(Ints sum) { return sum; }
    static TF_INLINE Sum dot(Sum sum, Codes w, Codes x) { return dot4(sum, w, x); }
    static TF_INLINE Ints total(Ints, Sum sum) { return sum; }
};
constexpr int byte_sum_bits(int) { return 0; }
#else
constexpr int signed_byte_offset = 0;
/// Bytes of four inputs, summed in pairs in 16 bits. A pair's products are at most 2 * 127 * (2^bits - 1).
template <int bits>
struct ByteSums {
    typedef PairSums Sum;
    static constexpr int most_steps = bits == 8 ? 1 : 1 << (7 - bits);
    static TF_INLINE Sum start(Ints) { return no_pair_sums(); }
    static TF_INLINE Sum dot(Sum sum, Codes w, Codes x) {
        if constexpr (bits == 8) return dot4(sum, magnitudes(w), times_sign(x, w));
        return dot4(sum, w, x);
    }
    static TF_INLINE Ints total(Ints before, Sum sum) { return before + ints(sum); }
};
constexpr int byte_sum_bits(int bits) { return bits; }
#endif
template <class In, int bits>
using TileSums = std::conditional_t<sizeof(In) == 2, WordSums, ByteSums<byte_sum_bits(bits)>>;

/// Calls body with compile-time constants 0 to n - 1.
template <int... i, class F>
TF_INLINE void unrolled(std::integer_sequence<int, i...>, F body) {
    (body(std::integral_constant<int, i>{}), ...);
}

}  // namespace triforce::TF_LEVEL
