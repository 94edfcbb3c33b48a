// a * b + c of four floats, rounded once, where there is an instruction for it and where there is none. Included by
// simd_portable.hpp.
#pragma once

#include <cstdint>

namespace triforce::TF_LEVEL {

typedef float V4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));

#ifdef __FP_FAST_FMAF
TF_INLINE V4 fma(V4 a, V4 b, V4 c) {
    return V4{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
              __builtin_fmaf(a[3], b[3], c[3])};
}
#else
typedef double D2 __attribute__((vector_size(16)));
typedef int64_t L2 __attribute__((vector_size(16)));

__attribute__((noinline)) inline V4 fma_by_library(V4 a, V4 b, V4 c) {
    for (int i = 0; i < 4; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}

/// In doubles a product of floats is exact, but its sum is rounded, and then once more to a float. That is the same as
/// rounding once, unless the sum lies halfway between two floats or is subnormal.
TF_INLINE V4 fma(V4 a, V4 b, V4 c) {
    const D2 x = D2{a[0], a[1]} * D2{b[0], b[1]} + D2{c[0], c[1]}, y = D2{a[2], a[3]} * D2{b[2], b[3]} + D2{c[2], c[3]};
    const U4 of_x = (U4)x, of_y = (U4)y;
    const U4 lower = {of_x[0], of_x[2], of_y[0], of_y[2]}, upper = {of_x[1], of_x[3], of_y[1], of_y[3]};
    const I4 halfway = (lower & 0x1fffffff) == 0x10000000, subnormal = (upper & 0x7fffffff) - 1 < 0x380fffff;
    const L2 rare = (L2)(halfway | subnormal);
    if (__builtin_expect((rare[0] | rare[1]) != 0, 0)) return fma_by_library(a, b, c);
    return V4{float(x[0]), float(x[1]), float(y[0]), float(y[1])};
}
#endif

}  // namespace triforce::TF_LEVEL
