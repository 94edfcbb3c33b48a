// One step over the inputs of a product, by the type of the weights.
#pragma once

#include "simd.hpp"

namespace triforce::TF_LEVEL {

// A step reads 64 bytes of a block's weights and one row's inputs for all its lanes, and adds to their sums.
template <class T>
struct Step;

struct FloatSums {
    using Sum = F16;
    static TF_INLINE F16 load_sum(const float* from) { return load(from); }
    static TF_INLINE void store_sum(float* to, F16 sum) { store(to, sum); }
};

template <>
struct Step<bf16> : FloatSums {
    static constexpr int inputs = 2;
    static TF_INLINE Pairs weights(const bf16* w) { return load_pairs(w); }
    static TF_INLINE Pairs input(const bf16* x) {
        uint32_t pair;
        __builtin_memcpy(&pair, x, sizeof pair);
        return set1_pair(pair);
    }
    static TF_INLINE F16 add(F16 acc, Pairs w, Pairs x) { return dot2(acc, w, x); }
};

template <>
struct Step<float> : FloatSums {
    static constexpr int inputs = 1;
    static TF_INLINE F16 weights(const float* w) { return load(w); }
    static TF_INLINE F16 input(const float* x) { return set1(*x); }
    static TF_INLINE F16 add(F16 acc, F16 w, F16 x) { return fma(w, x, acc); }
};

template <>
struct Step<int8_t> {
    using Sum = I16;
    static constexpr int inputs = 4;
    static TF_INLINE I16 load_sum(const float* from) { return load_ints(from); }
    static TF_INLINE void store_sum(float* to, I16 sum) { store_ints(to, sum); }
    static TF_INLINE Quads weights(const int8_t* w) { return load_quads(w); }
    static TF_INLINE Signed input(const int8_t* x) {
        uint32_t quad;
        __builtin_memcpy(&quad, x, sizeof quad);
        return with_signs(set1_quad(quad));
    }
    static TF_INLINE I16 add(I16 acc, Quads w, Signed x) { return dot4(acc, x, w); }
};

}  // namespace triforce::TF_LEVEL
