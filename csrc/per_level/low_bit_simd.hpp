// Codes of a step, sums of a group and floats of outputs, in registers of the level: for low_bit_sum.hpp.
#pragma once

#include "../half.hpp"
#include "simd.hpp"

namespace triforce::TF_LEVEL {

// A register has four codes each of `lanes` outputs; sixteen outputs are `parts_of_a_block` registers.
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
TF_INLINE Codes broadcast(const int8_t* quad) {
    int32_t x;
    __builtin_memcpy(&x, quad, sizeof x);
    return {_mm512_set1_epi32(x)};
}
TF_INLINE Codes lower_nibbles(Codes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
TF_INLINE Codes upper_nibbles(Codes x) { return lower_nibbles({_mm512_srli_epi16(x.v, 4)}); }
/// Adds bits of `plane`, moved to the left by `by` (to the right if negative), where `mask` has them.
template <int by>
TF_INLINE Codes with_bits(Codes x, Codes plane, int mask) {
    const __m512i moved = by >= 0 ? _mm512_slli_epi16(plane.v, by) : _mm512_srli_epi16(plane.v, -by);
    return {_mm512_ternarylogic_epi32(x.v, moved, _mm512_set1_epi8(static_cast<char>(mask)), 0xf8)};  // x | moved & mask
}
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
TF_INLINE Ints less(Ints x, int32_t y) { return {_mm512_sub_epi32(x.v, _mm512_set1_epi32(y))}; }

#if TF_SIMD_AVX512VNNI
constexpr int bias = 128;  // is added to signed codes, as the instruction wants one side unsigned
TF_INLINE Codes biased(Codes x) { return {_mm512_xor_si512(x.v, _mm512_set1_epi8(static_cast<char>(128)))}; }
#else
constexpr int bias = 0;
TF_INLINE Codes biased(Codes x) { return x; }
#endif

/// A sum of products of codes, all below 2^bits (bits = 8: signed, with the bias if there is one), and int8.
template <int bits>
struct Dot {
    __m512i sum = _mm512_setzero_si512();
    TF_INLINE void add(Codes w, Codes x, int) {
        if constexpr (bits == 8 && !bias)
            sum = dot4_unsigned({sum}, {_mm512_abs_epi8(w.v)}, times_sign({x.v}, with_signs({w.v}))).v;
        else
            sum = dot4_unsigned({sum}, {w.v}, {x.v}).v;
    }
    TF_INLINE Ints total() const { return {sum}; }
};

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
TF_INLINE Codes broadcast(const int8_t* quad) {
    int32_t x;
    __builtin_memcpy(&x, quad, sizeof x);
    return {_mm256_set1_epi32(x)};
}
TF_INLINE Codes lower_nibbles(Codes x) { return {_mm256_and_si256(x.v, _mm256_set1_epi8(15))}; }
TF_INLINE Codes upper_nibbles(Codes x) { return lower_nibbles({_mm256_srli_epi16(x.v, 4)}); }
template <int by>
TF_INLINE Codes with_bits(Codes x, Codes plane, int mask) {
    const __m256i moved = by >= 0 ? _mm256_slli_epi16(plane.v, by) : _mm256_srli_epi16(plane.v, -by);
    return {_mm256_or_si256(x.v, _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask))))};
}
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
TF_INLINE Ints less(Ints x, int32_t y) { return {_mm256_sub_epi32(x.v, _mm256_set1_epi32(y))}; }

/// Pairs of products are words: of codes below 2^bits as many steps' as fit are added as such, 8 * 2 * 15 * 127 = 30480.
template <int bits>
struct Dot {
    static constexpr int together = bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
    __m256i sum = _mm256_setzero_si256(), words = _mm256_setzero_si256();
    TF_INLINE void add(Codes w, Codes x, int step) {
        const __m256i pairs = bits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w.v), _mm256_sign_epi8(x.v, w.v))
                                        : _mm256_maddubs_epi16(w.v, x.v);
        words = step % together ? _mm256_add_epi16(words, pairs) : pairs;
        if (step % together == together - 1) {
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
            words = _mm256_setzero_si256();
        }
    }
    /// Adds what is left of a sum of fewer steps.
    TF_INLINE Ints total() const { return {_mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)))}; }
};

#else

constexpr int lanes = 16;
struct Codes {
    uint8_t v[64];
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
TF_INLINE Codes broadcast(const int8_t* quad) {
    Codes x;
    for (int i = 0; i < 64; i++) x.v[i] = static_cast<uint8_t>(quad[i % 4]);
    return x;
}
TF_INLINE Codes lower_nibbles(Codes x) {
    for (uint8_t& code : x.v) code &= 15;
    return x;
}
TF_INLINE Codes upper_nibbles(Codes x) {
    for (uint8_t& code : x.v) code >>= 4;
    return x;
}
template <int by>
TF_INLINE Codes with_bits(Codes x, Codes plane, int mask) {
    for (int i = 0; i < 64; i++) {
        const int bits = plane.v[i];
        x.v[i] |= static_cast<uint8_t>((by >= 0 ? bits << by : bits >> -by) & mask);
    }
    return x;
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
TF_INLINE Ints less(Ints x, int32_t y) {
    for (int32_t& each : x.v) each -= y;
    return x;
}

template <int bits>
struct Dot {
    Ints sum{};
    TF_INLINE void add(Codes w, Codes x, int) {
        for (int i = 0; i < 64; i++)
            sum.v[i / 4] += (bits == 8 ? static_cast<int8_t>(w.v[i]) : w.v[i]) * static_cast<int8_t>(x.v[i]);
    }
    TF_INLINE Ints total() const { return sum; }
};

#endif

#if !TF_SIMD_AVX512
constexpr int bias = 0;
TF_INLINE Codes biased(Codes x) { return x; }
#endif

constexpr int parts_of_a_block = 16 / lanes;

}  // namespace triforce::TF_LEVEL
