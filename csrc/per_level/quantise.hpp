// Numbers rounded to int8 with one scale: each is the nearest multiple of it, and the largest is 127 times it.
#pragma once

#include "../low_bit.hpp"
#include "simd.hpp"

namespace triforce::TF_LEVEL {

/// The scale of n numbers, a multiple of 16: NaN if one of them is not finite, 0 if all are 0.
template <class T>
float scale_of(const T* x, int64_t n) {
    F16 top = zero(), poison = zero();
    for (int64_t i = 0; i < n; i += 16) {
        const F16 some = load(x + i);
        top = max(top, max(some, zero() - some));
        poison = fma(some, zero(), poison);
    }
    return reduce_max(top) / int8_largest + reduce_add(poison);
}

template <class T>
void quantise(const T* x, int64_t n, float scale, int8_t* to) {
    const F16 inverse = set1(scale > 0 ? 1 / scale : 0), most = set1(int8_largest);
    for (int64_t i = 0; i < n; i += 16) store_int8(to + i, min(max(load(x + i) * inverse, zero() - most), most));
}

/// Rounds a group of inputs, and returns what a product knows of it.
template <class T>
GroupInput quantise_group(const T* x, int8_t* to) {
    const float scale = scale_of(x, group_size);
    quantise(x, group_size, scale, to);
    int32_t sums[2] = {};
    for (int i = 0; i < group_size; i++) sums[i / 16] += to[i];
    const int32_t all = sums[0] + sums[1];
    return {scale, scale * static_cast<float>(all), all, sums[0]};
}

}  // namespace triforce::TF_LEVEL
