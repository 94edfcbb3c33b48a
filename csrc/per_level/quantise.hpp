// Numbers rounded to int8 with one scale: each is the nearest multiple of it, and the largest is 127 times it.
#pragma once

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

}  // namespace triforce::TF_LEVEL
