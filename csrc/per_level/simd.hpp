// Sixteen float lanes, the same interface at each level, for files that are compiled once per level.
//
// Everything here lives in the level's own namespace: an inline function of one level that the linker took for all of
// them would run AVX-512 on a CPU without it. For the same reason code in per_level/ keeps away from inline functions
// of std.
#pragma once

#include <cstdint>

#include "../types.hpp"

#ifndef TF_LEVEL
#error "simd.hpp belongs to files compiled once per level"
#endif

#define TF_INLINE inline __attribute__((always_inline))

#if TF_SIMD_AVX512
#include "simd_avx512.hpp"
#elif TF_SIMD_AVX2
#include "simd_avx2.hpp"
#else
#include "simd_portable.hpp"
#endif

namespace triforce::TF_LEVEL {

// One pair of inputs and sixteen pairs of weights, the step of a bf16 product:
//     dot2(acc, w, x)[i] = acc[i] + w[2i + 1] * x.hi + w[2i] * x.lo     (hi first, as vdpbf16ps does)

// Sixteen sums of four products of int8, all within [-127, 127], which are exact:
//     dot4(acc, x, w)[i] = acc[i] + x[4i] * w[4i] + ... + x[4i + 3] * w[4i + 3]
// dot4_unsigned does so for x within [0, 127], as the instructions want one side; else the other side takes the signs.
TF_INLINE I16 dot4(I16 acc, Signed x, Quads w) { return dot4_unsigned(acc, x.magnitude, times_sign(w, x)); }

/// e^x within 2 ulp; 0 below -87.7, at most e^88.37, NaN for NaN. A lane's bits do not depend on its neighbours.
TF_INLINE F16 exp(F16 x) {
    const F16 rounder = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    x = min(set1(88.37f), max(set1(-88.0f), x));
    const F16 n = fma(x, set1(1.44269504f), rounder) - rounder;
    const F16 r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
    F16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r + set1(1.0f));
    return p * pow2(n);
}

/// Loads and stores by storage type, sixteen at a time; storing bf16 rounds to nearest even.
TF_INLINE F16 load(const bf16* from) { return load_bf16(from); }
TF_INLINE void store(bf16* to, F16 value) { store_bf16(to, value); }

}  // namespace triforce::TF_LEVEL
