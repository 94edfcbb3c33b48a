// One step of a product: 64 bytes of weights or of a page, times one word for all lanes. A step of half weights has 32
// bytes and a float as its word. A step of codes in nibbles has 32 bytes of upper nibbles and 32 bytes of lower
// nibbles.
//
// Without vdpbf16ps a step of bf16 has two parts, each multiplied as floats: first the higher half of each pair, then
// the lower half, as vdpbf16ps does.
#pragma once

#include <type_traits>

#include "../pages.hpp"
#include "code_step.hpp"

namespace triforce::TF_LEVEL {

template <class T>
constexpr int step_size = in_nibbles<T> ? 32 : 64 / sizeof(T);
template <class T>
constexpr int numbers_of_word = packed_numbers<T>;
#if TF_SIMD_AVX512BF16
template <class T>
constexpr int parts = 1;
#else
template <class T>
constexpr int parts = std::is_same_v<T, bf16> ? 2 : 1;
#endif

// Rows of the tallest tile whose sums and operands fit in registers. More rows take several tiles, and each tile reads
// a step again.
#if TF_SIMD_AVX512
constexpr int tallest_tile = 8;
#elif TF_SIMD_AVX2
constexpr int tallest_tile = 6;
#else
constexpr int tallest_tile = 4;
#endif

/// Rows of the next tile when `left` rows remain. Tiles are equally tall, except with AVX2. There at least ten chains
/// are needed to hide the latency of a sum. A tile of two rows has as many chains as a tile of six, because it takes
/// more steps at once.
constexpr int next_tile(int left) {
#if TF_SIMD_AVX2
    return left < tallest_tile ? left : tallest_tile;
#else
    const int tiles = (left + tallest_tile - 1) / tallest_tile;
    return (left + tiles - 1) / tiles;
#endif
}

template <class T>
using Sum = std::conditional_t<sizeof(T) == 1, I16, F16>;

/// The type of the inputs of weights of type T.
template <class T>
using Input = std::conditional_t<std::is_same_v<T, half>, float, T>;

/// A word in memory that is broadcast to all lanes: four int8, two bf16 or one float.
template <class T>
using Word = std::conditional_t<is_code<T>, QueryWord,
                                std::conditional_t<sizeof(T) == 1, PackedWord,
                                                   std::conditional_t<sizeof(T) == 2, PairWord, float>>>;

template <class T, int part>
TF_INLINE auto load_step(At<T> at) {
    if constexpr (is_code<T>)
        return key_codes(codes_at<T>(at));
    else if constexpr (sizeof(T) == 1)
        return load_quads(at);
    else if constexpr (!std::is_same_v<T, bf16>)
        return load(at);
    else
        return load_pairs<part>(at);
}

template <class T, int part>
TF_INLINE auto spread(const Word<T>& word) {
    if constexpr (is_code<T>)
        return query_codes(word);
    else if constexpr (sizeof(T) == 1)
        return with_signs(set1_quad(word.bits));
    else if constexpr (sizeof(T) == 4)
        return set1(word);
    else
        return set1_pair<part>(word);
}

// dot(acc, step, word): adds the products of a step and a word to sixteen sums. Sums of int8, all within [-127, 127],
// are exact. dot4_unsigned needs one unsigned factor, so the signs of the word move to the step.
TF_INLINE F16 dot(F16 acc, F16 step, F16 word) { return add_product(acc, step, word); }
TF_INLINE I16 dot(I16 acc, Quads step, Signed word) {
    return dot4_unsigned(acc, word.magnitude, times_sign(step, word));
}

/// Adds the products of R words, `stride` apart, and the steps at C places.
template <class T, int R, int C, int part = 0>
TF_INLINE void multiply(Sum<T> (&acc)[R][C], const Word<Input<T>>* words, int64_t stride, const At<T> (&at)[C]) {
    decltype(load_step<T, part>(at[0])) step[C];
    for (int c = 0; c < C; c++) step[c] = load_step<T, part>(at[c]);
    for (int r = 0; r < R; r++) {
        const auto word = spread<Input<T>, part>(words[r * stride]);
        for (int c = 0; c < C; c++) acc[r][c] = dot(acc[r][c], step[c], word);
    }
    if constexpr (part + 1 < parts<T>) multiply<T, R, C, part + 1>(acc, words, stride, at);
}

/// Writes the words of n numbers; n is a multiple of 16.
template <class T>
void make_words(const T* from, int64_t n, Word<T>* to) {
    if constexpr (parts<T> == 1)
        __builtin_memcpy(to, from, n * sizeof(T));
    else
        for (int64_t i = 0; i < n; i += 16) store(reinterpret_cast<float*>(to) + i, load(from + i));
}

}  // namespace triforce::TF_LEVEL
