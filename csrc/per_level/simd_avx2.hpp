// F16 as two AVX2 registers, at levels with AVX-VNNI or without. Included by simd.hpp.
#pragma once

#include <immintrin.h>

namespace triforce::TF_LEVEL {

struct F16 {
    __m256 a, b;
};

TF_INLINE F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TF_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TF_INLINE F16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
TF_INLINE void store(float* to, F16 x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
}

TF_INLINE F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TF_INLINE F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TF_INLINE F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TF_INLINE F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
TF_INLINE F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
/// fma(x, y, acc), computed in the register of acc. Compilers copy acc at times, and none of the sixteen registers is
/// free for a copy.
TF_INLINE F16 add_product(F16 acc, F16 x, F16 y) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(acc.a) : "x"(x.a), "x"(y.a));
    asm("vfmadd231ps %2, %1, %0" : "+x"(acc.b) : "x"(x.b), "x"(y.b));
    return acc;
}
/// Lanes have the second operand if either operand is NaN.
TF_INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
TF_INLINE F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

TF_INLINE __m256i first8(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/// Lanes [0, n) of x, the others of y.
TF_INLINE F16 first_n(int n, F16 x, F16 y) {
    return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(first8(n))),
            _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(first8(n - 8)))};
}
/// `load_n` and `store_n` do not touch memory beyond the first n numbers. Other loaded lanes are zero.
TF_INLINE F16 load_n(const float* from, int n) {
    return {_mm256_maskload_ps(from, first8(n)), _mm256_maskload_ps(from + 8, first8(n - 8))};
}
TF_INLINE void store_n(float* to, F16 x, int n) {
    _mm256_maskstore_ps(to, first8(n), x.a);
    _mm256_maskstore_ps(to + 8, first8(n - 8), x.b);
}

/// Adds halves: 8 + 8, 4 + 4, 2 + 2, 1 + 1. The tree is the same at each level.
TF_INLINE float reduce_add(F16 x) {
    const __m256 y = _mm256_add_ps(x.a, x.b);
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
TF_INLINE float reduce_max(F16 x) {
    const __m256 y = _mm256_max_ps(x.a, x.b);
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}

TF_INLINE bool any_above(F16 x, F16 limits) {
    const __m256 a = _mm256_cmp_ps(x.a, limits.a, _CMP_GT_OQ), b = _mm256_cmp_ps(x.b, limits.b, _CMP_GT_OQ);
    return _mm256_movemask_ps(_mm256_or_ps(a, b));
}

TF_INLINE __m256 add_to_exponent(__m256 x, __m256 count) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(count), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), n));
}
TF_INLINE F16 add_to_exponent(F16 x, F16 count) {
    return {add_to_exponent(x.a, count.a), add_to_exponent(x.b, count.b)};
}

TF_INLINE __m256 pow2(__m256 n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
/// 2^n for integers n in [-127, 127]; 0 at -127.
TF_INLINE F16 pow2(F16 n) { return {pow2(n.a), pow2(n.b)}; }

TF_INLINE __m256 widen(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
TF_INLINE F16 load(const bf16* from) {
    const auto* at = reinterpret_cast<const __m128i*>(from);
    return {widen(_mm_loadu_si128(at)), widen(_mm_loadu_si128(at + 1))};
}

TF_INLINE F16 load(const half* from) {
    const auto* at = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}

TF_INLINE __m256 nearest_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_castsi256_ps(_mm256_and_si256(even, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
TF_INLINE F16 nearest_bf16(F16 x) { return {nearest_bf16(x.a), nearest_bf16(x.b)}; }

TF_INLINE __m256i round_to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(even, quiet, unordered), 16);
}
TF_INLINE void store(bf16* to, F16 x) {
    const __m256i packed = _mm256_packus_epi32(round_to_bf16(x.a), round_to_bf16(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}

/// The integers nearest to lanes within [-32767, 32767].
TF_INLINE __m256i to_int16(F16 x) {
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    return _mm256_permute4x64_epi64(mixed, 0xd8);
}
TF_INLINE void store_int16(int16_t* to, F16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_int16(x));
}

/// The integers nearest to lanes within [-127, 127].
TF_INLINE void store_int8(int8_t* to, F16 x) {
    const __m256i words = to_int16(x);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

struct I16 {
    __m256i a, b;
};
TF_INLINE I16 load_ints(const void* from) {
    const auto* at = static_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
TF_INLINE void store(void* to, I16 x) {
    auto* at = static_cast<__m256i*>(to);
    _mm256_storeu_si256(at, x.a);
    _mm256_storeu_si256(at + 1, x.b);
}
TF_INLINE F16 floats(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

/// Bit i is the sign of lane i.
TF_INLINE uint16_t sign_bits(F16 x) {
    return static_cast<uint16_t>(_mm256_movemask_ps(x.a) | _mm256_movemask_ps(x.b) << 8);
}

/// Sixteen sums of 16-bit words.
struct Words {
    __m256i v;
};
TF_INLINE __m256i words_where(uint32_t bits, const int16_t* x) {
    const __m256i each = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384,
                                           static_cast<int16_t>(-32768));
    const __m256i set = _mm256_and_si256(_mm256_set1_epi16(static_cast<int16_t>(bits)), each);
    return _mm256_and_si256(_mm256_cmpeq_epi16(set, each), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
/// Adds the words of x (32) whose bits are set: word i to sum i % 16.
TF_INLINE Words add_where(Words acc, uint32_t bits, const int16_t* x) {
    return {_mm256_add_epi16(acc.v, _mm256_add_epi16(words_where(bits, x), words_where(bits >> 16, x + 16)))};
}
TF_INLINE F16 floats(Words x) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(x.v))),
            _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(x.v, 1)))};
}

/// Adds two products of int16 to each of eight sums.
TF_INLINE __m256i dot2(__m256i sum, __m256i x, __m256i y) {
#if TF_SIMD_AVXVNNI
    return _mm256_dpwssd_avx_epi32(sum, x, y);
#else
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
    asm("" : "+x"(sum));  // else the compiler makes many products before it adds them, and spills
    return sum;
#endif
}

struct Quads {
    __m256i a, b;
};
TF_INLINE Quads load_quads(const int8_t* from) {
    const I16 x = load_ints(from);
    return {x.a, x.b};
}
TF_INLINE void store(int8_t* to, Quads x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), x.b);
}
TF_INLINE Quads set1_quad(uint32_t x) {
    const __m256i both = _mm256_set1_epi32(static_cast<int>(x));
    return {both, both};
}
TF_INLINE Quads operator^(Quads x, Quads y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
/// Adds four products of x and w to each sum. x lies in [0, 128] and w in [-127, 127], so that 16-bit sums of two
/// products, at most 2 * 128 * 127 = 32,512, do not saturate. With VNNI there are no 16-bit sums, and x may be any
/// byte.
TF_INLINE __m256i dot4_unsigned(__m256i acc, __m256i x, __m256i w) {
#if TF_SIMD_AVXVNNI
    return _mm256_dpbusd_avx_epi32(acc, x, w);
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)));
#endif
}
TF_INLINE I16 dot4_unsigned(I16 acc, Quads x, Quads w) {
    return {dot4_unsigned(acc.a, x.a, w.a), dot4_unsigned(acc.b, x.b, w.b)};
}

struct Signed {
    Quads magnitude, signs;
};
TF_INLINE Signed with_signs(Quads x) { return {{_mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b)}, x}; }
TF_INLINE Quads times_sign(Quads w, Signed x) {
    return {_mm256_sign_epi8(w.a, x.signs.a), _mm256_sign_epi8(w.b, x.signs.b)};
}

TF_INLINE __m256 lower(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
/// The mask is read from memory, because a mask in a register would take the place of a sum.
TF_INLINE __m256 higher(__m256i x) {
    alignas(32) static const uint16_t mask[16] = {0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff,
                                                  0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff};
    __m256 y;
    asm("vpand %1, %2, %0" : "=x"(y) : "m"(mask), "x"(x));
    return y;
}
TF_INLINE F16 load_lower(const bf16* pairs) {
    const I16 x = load_ints(pairs);
    return {lower(x.a), lower(x.b)};
}
TF_INLINE F16 load_higher(const bf16* pairs) {
    const I16 x = load_ints(pairs);
    return {higher(x.a), higher(x.b)};
}

}  // namespace triforce::TF_LEVEL
