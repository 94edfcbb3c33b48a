// Rotation of a head's channels by Hadamard matrices before they are rounded to int8. After it, no channel is much
// larger than the others (QuaRot, Ashkboos et al. 2024).
#pragma once

#include "simd.hpp"

namespace triforce::TF_LEVEL {

/// Replaces pairs of channels at distance `distance` by their sums and differences.
template <int distance>
TF_INLINE void add_and_subtract(float* x, int dim) {
    for (int i = 0; i < dim; i += 2 * distance)
        for (int at = i; at < i + distance; at++) {
            const float a = x[at], b = x[at + distance];
            x[at] = a + b, x[at + distance] = a - b;
        }
}

/// Rotates x (dim) in blocks. Their size is the largest power of two that divides `dim`, at least 16. The rotation is
/// its own inverse.
inline void hadamard(float* x, int dim) {
    const int size = dim & -dim;
    add_and_subtract<1>(x, dim), add_and_subtract<2>(x, dim), add_and_subtract<4>(x, dim), add_and_subtract<8>(x, dim);
    if (size > 16) add_and_subtract<16>(x, dim);
    if (size > 32) add_and_subtract<32>(x, dim);
    if (size > 64) add_and_subtract<64>(x, dim);
    if (size > 128) add_and_subtract<128>(x, dim);
    const F16 scale = set1(static_cast<float>(1 / __builtin_sqrt(static_cast<double>(size))));
    for (int d = 0; d < dim; d += 16) store(x + d, load(x + d) * scale);
}

}  // namespace triforce::TF_LEVEL
