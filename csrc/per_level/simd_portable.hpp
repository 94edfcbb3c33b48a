// F16 as four vectors of four, in the vector extension of GCC and Clang: SSE2, NEON or whatever the target has.
// Included by simd.hpp.
#pragma once

#include <cstring>

#include "fma_portable.hpp"

namespace triforce::TF_LEVEL {

struct F16 {
    V4 v[4];
};

template <class Body>
TF_INLINE F16 each(Body body) {
    return {{body(0), body(1), body(2), body(3)}};
}

TF_INLINE F16 set1(float x) {
    return each([=](int) { return V4{x, x, x, x}; });
}
TF_INLINE F16 zero() { return set1(0.0f); }
TF_INLINE F16 load(const float* from) {
    F16 x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
TF_INLINE void store(float* to, F16 x) { std::memcpy(to, &x, sizeof x); }

TF_INLINE F16 operator+(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
TF_INLINE F16 operator-(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
TF_INLINE F16 operator*(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
TF_INLINE F16 operator/(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
TF_INLINE F16 fma(F16 a, F16 b, F16 c) {
    return each([&](int i) { return fma(a.v[i], b.v[i], c.v[i]); });
}
/// acc + x * y in hot loops. Without an FMA instruction it rounds twice, unless the product is a float: the product of
/// two bf16, or of a bf16 and a half.
TF_INLINE F16 add_product(F16 acc, F16 x, F16 y) {
#ifdef __FP_FAST_FMAF
    return fma(x, y, acc);
#else
    return acc + x * y;
#endif
}
/// Lanes have the second operand if either operand is NaN.
TF_INLINE F16 max(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
TF_INLINE F16 min(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}

/// Lanes [0, n) of a, the others of b.
TF_INLINE F16 first_n(int n, F16 a, F16 b) {
    const I4 lane = {0, 1, 2, 3};
    return each([&](int i) { return lane + 4 * i < n ? a.v[i] : b.v[i]; });
}
/// `load_n` and `store_n` do not touch memory beyond the first n numbers. Other loaded lanes are zero.
TF_INLINE F16 load_n(const float* from, int n) {
    F16 x = zero();
    if (n > 0) std::memcpy(&x, from, sizeof(float) * (n < 16 ? n : 16));
    return x;
}
TF_INLINE void store_n(float* to, F16 x, int n) {
    if (n > 0) std::memcpy(to, &x, sizeof(float) * (n < 16 ? n : 16));
}

/// Adds halves: 8 + 8, 4 + 4, 2 + 2, 1 + 1. The tree is the same at each level.
TF_INLINE float reduce_add(F16 x) {
    const V4 y = (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]);
    return (y[0] + y[2]) + (y[1] + y[3]);
}
TF_INLINE float reduce_max(F16 x) {
    float most = x.v[0][0];
    for (int i = 1; i < 16; i++) most = x.v[i / 4][i % 4] > most ? x.v[i / 4][i % 4] : most;
    return most;
}

TF_INLINE bool any_above(F16 x, F16 limits) {
    for (int i = 0; i < 16; i++)
        if (x.v[i / 4][i % 4] > limits.v[i / 4][i % 4]) return true;
    return false;
}

TF_INLINE F16 add_to_exponent(F16 x, F16 count) {
    return each([&](int i) { return (V4)((U4)x.v[i] + ((U4)count.v[i] << 23)); });
}

/// 2^n for integers n in [-127, 127]; 0 at -127.
TF_INLINE F16 pow2(F16 n) {
    return each([&](int i) { return (V4)((__builtin_convertvector(n.v[i], I4) + 127) << 23); });
}

TF_INLINE F16 load(const bf16* from) {
    return each([&](int i) {
        const bf16* at = from + 4 * i;
        return (V4)(U4{at[0].bits, at[1].bits, at[2].bits, at[3].bits} << 16);
    });
}
TF_INLINE F16 load(const half* from) {
    return each([&](int i) {
        const half* at = from + 4 * i;
        return V4{to_float(at[0]), to_float(at[1]), to_float(at[2]), to_float(at[3])};
    });
}
TF_INLINE void store(bf16* to, F16 x) {
    for (int i = 0; i < 4; i++) {
        const U4 bits = (U4)x.v[i];
        const U4 even = bits + ((bits >> 16) & 1) + 0x7fff;
        const U4 rounded = (x.v[i] == x.v[i] ? even : bits | 0x400000) >> 16;
        for (int j = 0; j < 4; j++) to[4 * i + j].bits = static_cast<uint16_t>(rounded[j]);
    }
}

/// The integers nearest to lanes within [-32767, 32767].
template <class Code>
TF_INLINE void store_integers(Code* to, F16 x) {
    for (int i = 0; i < 4; i++) {
        const U4 bits = (U4)(x.v[i] + 12582912.0f);  // 1.5 * 2^23: the lowest bits are the integer's
        for (int j = 0; j < 4; j++) to[4 * i + j] = static_cast<Code>(bits[j]);
    }
}
TF_INLINE void store_int16(int16_t* to, F16 x) { store_integers(to, x); }
/// The integers nearest to lanes within [-127, 127].
TF_INLINE void store_int8(int8_t* to, F16 x) { store_integers(to, x); }

typedef int16_t I8 __attribute__((vector_size(16)));
typedef uint16_t U8 __attribute__((vector_size(16)));

struct I16 {
    I4 v[4];
};
TF_INLINE I16 load_ints(const void* from) {
    I16 x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
TF_INLINE void store(void* to, I16 x) { std::memcpy(to, &x, sizeof x); }
TF_INLINE F16 floats(I16 x) {
    return each([&](int i) { return __builtin_convertvector(x.v[i], V4); });
}

/// Bit i is the sign of lane i.
TF_INLINE uint16_t sign_bits(F16 x) {
    uint16_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= static_cast<uint16_t>(((I4)x.v[i / 4])[i % 4] < 0) << i;
    return bits;
}

/// Sixteen sums of 16-bit words.
struct Words {
    I8 v[2];
};
/// Adds the words of x (32) whose bits are set: word i to sum i % 16.
TF_INLINE Words add_where(Words acc, uint32_t bits, const int16_t* x) {
    const U8 each = {1, 2, 4, 8, 16, 32, 64, 128};
    for (int i = 0; i < 4; i++, bits >>= 8) {
        I8 words;
        std::memcpy(&words, x + 8 * i, sizeof words);
        acc.v[i % 2] += (I8)(((U8{} + static_cast<uint16_t>(bits & 0xff)) & each) == each) & words;
    }
    return acc;
}
TF_INLINE F16 floats(Words x) {
    return each([&](int i) {
        const I8 words = x.v[i / 2];
        const int at = i % 2 * 4;
        return V4{float(words[at]), float(words[at + 1]), float(words[at + 2]), float(words[at + 3])};
    });
}

struct Quads {
    I8 v[4];
};
TF_INLINE Quads load_quads(const int8_t* from) {
    Quads x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
TF_INLINE void store(int8_t* to, Quads x) { std::memcpy(to, &x, sizeof x); }
TF_INLINE Quads set1_quad(uint32_t x) {
    const I8 all = (I8)(U4{x, x, x, x});
    return {{all, all, all, all}};
}
TF_INLINE Quads operator^(Quads x, Quads y) {
    for (int i = 0; i < 4; i++) x.v[i] ^= y.v[i];
    return x;
}
/// Adds four products of x and w to each sum: products of the lower bytes of 16-bit words, and of the upper bytes. A
/// sum of two products fits into a word.
TF_INLINE I16 dot4_unsigned(I16 acc, Quads x, Quads w) {
    for (int i = 0; i < 4; i++) {
        const I8 low_x = (I8)((U8)x.v[i] << 8) >> 8, low_w = (I8)((U8)w.v[i] << 8) >> 8;
        const I8 pairs = low_x * low_w + (x.v[i] >> 8) * (w.v[i] >> 8);
        acc.v[i] += ((I4)((U4)pairs << 16) >> 16) + ((I4)pairs >> 16);
    }
    return acc;
}

struct Signed {
    Quads magnitude;
};
TF_INLINE Signed with_signs(Quads x) { return {x}; }
TF_INLINE Quads times_sign(Quads w, Signed) { return w; }

TF_INLINE F16 nearest_bf16(F16 x) {
    return each([&](int i) {
        const U4 bits = (U4)x.v[i];
        return (V4)((bits + ((bits >> 16) & 1) + 0x7fff) & 0xffff0000u);
    });
}

// Pairs are little-endian, as in checkpoints.
TF_INLINE F16 load_lower(const bf16* pairs) {
    const F16 x = load(reinterpret_cast<const float*>(pairs));
    return each([&](int i) { return (V4)((U4)x.v[i] << 16); });
}
TF_INLINE F16 load_higher(const bf16* pairs) {
    const F16 x = load(reinterpret_cast<const float*>(pairs));
    return each([&](int i) { return (V4)((U4)x.v[i] & 0xffff0000u); });
}

}  // namespace triforce::TF_LEVEL
