// One step of a product, by the type of numbers: 64 bytes of weights or of a page, times one 32-bit word for all lanes.
// Of half a step is 32 bytes, and the word a float.
#pragma once

#include <type_traits>

#include "simd.hpp"

namespace triforce::TF_LEVEL {

template <class T>
constexpr int step_size = 64 / sizeof(T);
template <class T>
constexpr int numbers_of_word = sizeof(uint32_t) / sizeof(T);

template <class T>
using Sum = std::conditional_t<sizeof(T) == 1, I16, F16>;

/// The type of what weights of type T are multiplied with.
template <class T>
using Input = std::conditional_t<std::is_same_v<T, half>, float, T>;

TF_INLINE Pairs load_step(const bf16* at) { return load_pairs(at); }
TF_INLINE F16 load_step(const float* at) { return load(at); }
TF_INLINE F16 load_step(const half* at) { return load(at); }
TF_INLINE Quads load_step(const int8_t* at) { return load_quads(at); }

/// A word of one or more numbers of type T, in each lane.
template <class T>
TF_INLINE auto spread(uint32_t word) {
    if constexpr (sizeof(T) == 1) {
        return with_signs(set1_quad(word));
    } else if constexpr (sizeof(T) == 2) {
        return set1_pair(word);
    } else {
        float value;
        __builtin_memcpy(&value, &word, sizeof value);
        return set1(value);
    }
}

// dot(acc, step, word): sixteen sums of the products of a step and a word. In bf16 the higher half of each pair goes
// first, as vdpbf16ps does. Those of int8, all within [-127, 127], are exact; dot4_unsigned wants x within [0, 127], as
// the instructions want one side, so the other side takes the signs.
TF_INLINE F16 dot(F16 acc, F16 step, F16 word) { return fma(step, word, acc); }
TF_INLINE I16 dot(I16 acc, Quads step, Signed word) {
    return dot4_unsigned(acc, word.magnitude, times_sign(step, word));
}

}  // namespace triforce::TF_LEVEL
