// F16 as one AVX-512 register. Included by simd.hpp.
#pragma once

#include <immintrin.h>

namespace triforce::TF_LEVEL {

struct F16 {
    __m512 v;
};

TF_INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
TF_INLINE F16 zero() { return {_mm512_setzero_ps()}; }
TF_INLINE F16 load(const float* from) { return {_mm512_loadu_ps(from)}; }
TF_INLINE void store(float* to, F16 x) { _mm512_storeu_ps(to, x.v); }

TF_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
TF_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
TF_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
TF_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
TF_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TF_INLINE F16 add_product(F16 acc, F16 x, F16 y) { return fma(x, y, acc); }
/// Lanes have the second operand if either operand is NaN.
TF_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
TF_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }

TF_INLINE __mmask16 first(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1); }

/// Lanes [0, n) of a, the others of b.
TF_INLINE F16 first_n(int n, F16 a, F16 b) { return {_mm512_mask_blend_ps(first(n), b.v, a.v)}; }
/// `load_n` and `store_n` do not touch memory beyond the first n numbers. Other loaded lanes are zero.
TF_INLINE F16 load_n(const float* from, int n) { return {_mm512_maskz_loadu_ps(first(n), from)}; }
TF_INLINE void store_n(float* to, F16 x, int n) { _mm512_mask_storeu_ps(to, first(n), x.v); }

/// Adds halves: 8 + 8, 4 + 4, 2 + 2, 1 + 1. The tree is the same at each level.
TF_INLINE float reduce_add(F16 x) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
TF_INLINE float reduce_max(F16 x) { return _mm512_reduce_max_ps(x.v); }

TF_INLINE F16 from_nearest(F16 x) { return {_mm512_reduce_ps(x.v, 0)}; }
TF_INLINE bool any_above(F16 x, F16 limits) { return _mm512_cmp_ps_mask(x.v, limits.v, _CMP_GT_OQ); }

TF_INLINE F16 add_to_exponent(F16 x, F16 count) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(count.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.v), n))};
}

/// 2^n for integers n in [-127, 127]; 0 at -127.
TF_INLINE F16 pow2(F16 n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}

TF_INLINE F16 load(const bf16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}

TF_INLINE F16 load(const half* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}

/// The integers nearest to lanes within [-127, 127].
TF_INLINE void store_int8(int8_t* to, F16 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

/// The integers nearest to lanes within [-32767, 32767].
TF_INLINE void store_int16(int16_t* to, F16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v)));
}

struct I16 {
    __m512i v;
};
TF_INLINE I16 load_ints(const void* from) { return {_mm512_loadu_si512(from)}; }
TF_INLINE void store(void* to, I16 x) { _mm512_storeu_si512(to, x.v); }
/// Adds two products of int16 to each of sixteen sums.
TF_INLINE __m512i dot2(__m512i sum, __m512i x, __m512i y) {
#if TF_SIMD_AVX512VNNI
    return _mm512_dpwssd_epi32(sum, x, y);
#else
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(x, y));
    asm("" : "+v"(sum));  // else the compiler makes many products before it adds them, and spills
    return sum;
#endif
}
TF_INLINE F16 floats(I16 x) { return {_mm512_cvtepi32_ps(x.v)}; }

/// Bit i is the sign of lane i.
TF_INLINE uint16_t sign_bits(F16 x) { return _mm512_movepi32_mask(_mm512_castps_si512(x.v)); }

/// Sixteen sums of 16-bit words. Sum i is kept in two halves, words i and i + 16.
struct Words {
    __m512i v;
};
/// Adds the words of x (32) whose bits are set: word i to sum i % 16.
TF_INLINE Words add_where(Words acc, uint32_t bits, const int16_t* x) {
    return {_mm512_mask_add_epi16(acc.v, bits, acc.v, _mm512_loadu_si512(x))};
}
TF_INLINE F16 floats(Words x) {
    const __m256i sums = _mm256_add_epi16(_mm512_castsi512_si256(x.v), _mm512_extracti64x4_epi64(x.v, 1));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(sums))};
}

struct Quads {
    __m512i v;
};
TF_INLINE Quads load_quads(const int8_t* from) { return {_mm512_loadu_si512(from)}; }
TF_INLINE void store(int8_t* to, Quads x) { _mm512_storeu_si512(to, x.v); }
TF_INLINE Quads set1_quad(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
TF_INLINE Quads operator^(Quads x, Quads y) { return {_mm512_xor_si512(x.v, y.v)}; }
/// Adds four products of x and w to each sum. x lies in [0, 128] and w in [-127, 127], so that 16-bit sums of two
/// products, at most 2 * 128 * 127 = 32,512, do not saturate. With VNNI there are no 16-bit sums, and x may be any
/// byte.
TF_INLINE I16 dot4_unsigned(I16 acc, Quads x, Quads w) {
#if TF_SIMD_AVX512VNNI
    return {_mm512_dpbusd_epi32(acc.v, x.v, w.v)};
#else
    const __m512i pairs = _mm512_maddubs_epi16(x.v, w.v);
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
}

struct Signed {
    Quads magnitude;
    __mmask64 negative;
};
TF_INLINE Signed with_signs(Quads x) { return {{_mm512_abs_epi8(x.v)}, _mm512_movepi8_mask(x.v)}; }
TF_INLINE Quads times_sign(Quads w, Signed x) {
    return {_mm512_mask_sub_epi8(w.v, x.negative, _mm512_setzero_si512(), w.v)};
}

#if TF_SIMD_AVX512BF16

TF_INLINE void store(bf16* to, F16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x.v));
}

struct Pairs {
    __m512bh v;
};
template <int>
TF_INLINE Pairs load_pairs(const bf16* from) {
    return {(__m512bh)_mm512_loadu_si512(from)};
}
using PairWord = PackedWord;
template <int>
TF_INLINE Pairs set1_pair(PairWord x) { return {(__m512bh)_mm512_set1_epi32(static_cast<int>(x.bits))}; }
TF_INLINE void store_words(PairWord* to, F16 x) { store(reinterpret_cast<bf16*>(to), x); }
TF_INLINE F16 dot(F16 acc, Pairs w, Pairs x) { return {_mm512_dpbf16_ps(acc.v, w.v, x.v)}; }

#else

TF_INLINE void store(bf16* to, F16 x) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i even = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i rounded = _mm512_mask_mov_epi32(even, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

TF_INLINE F16 nearest_bf16(F16 x) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i even = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return {_mm512_castsi512_ps(_mm512_and_si512(even, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}

TF_INLINE F16 load_lower(const bf16* pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16))};
}
TF_INLINE F16 load_higher(const bf16* pairs) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), upper))};
}

#endif

}  // namespace triforce::TF_LEVEL
