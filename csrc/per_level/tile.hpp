// Sums of products of weights of one type, in register tiles.
#pragma once

#include "../linear.hpp"
#include "step.hpp"

namespace triforce::TF_LEVEL {
namespace {

// Blocks of a register tile, by its number of rows: as many as registers hold. These are also enough chains to hide the
// latency of an addition. A step of int8 takes two registers, because it gets the signs of each word in turn.
#if TF_SIMD_AVX512
template <class T>
constexpr int wide(int rows) {
    return rows <= 2 ? 8 : rows <= (sizeof(T) == 1 ? 4 : 6) ? 4 : 2;
}
#else
template <class T>
constexpr int wide(int rows) {
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}
#endif
constexpr int widest = 8;        // blocks of a group if the rows are few enough for a tile of this width
constexpr int group = 4;         // blocks of a group otherwise: their part of a panel stays in L2 for all rows
constexpr int64_t panel = 1024;  // inputs of a panel

template <class T>
TF_INLINE Sum<T> load_sum(const float* from) {
    if constexpr (sizeof(T) == 1)
        return load_ints(from);
    else
        return load(from);
}

/// Distance of prefetches in inputs, for tiles that read few streams. Without prefetches memory does not keep up with
/// them.
template <class T>
constexpr int64_t inputs_ahead = 64 * numbers_of_word<Input<T>>;
/// Cache level of a prefetch. The second level takes more requests, which matters if memory limits a product. Products
/// of int8 are limited by arithmetic.
template <class T>
constexpr int closeness = sizeof(T) == 1 ? 3 : 2;

/// A range of inputs for some rows and blocks.
template <class T>
struct Panel {
    const Word<Input<T>>* x;  // of the first row
    int64_t x_stride;
    const T* w;
    int64_t w_stride;
    int64_t k;
    bool begin;  // whether the chains begin with this panel
    int blocks;
};

/// Adds the products of a panel to the sums of M rows and B blocks, in registers. If B is `group`, two blocks from
/// `ahead` on are prefetched meanwhile.
template <class T, int M, int B>
void tile(const Panel<T>& p, int64_t row, int first, const T* ahead, float* sums) {
    const Word<Input<T>>* x = p.x + row * p.x_stride;
    const T* w[B];
    for (int b = 0; b < B; b++) w[b] = p.w + (first + b) * p.w_stride;
    const int stride = p.blocks * block_size;
    sums += row * stride + first * block_size;
    Sum<T> acc[M][B];
    for (int m = 0; m < M; m++)
        for (int b = 0; b < B; b++)
            acc[m][b] = p.begin ? Sum<T>{} : load_sum<T>(sums + m * stride + b * block_size);
    for (int64_t i = 0; i < p.k; i += numbers_of_word<Input<T>>, x++) {
        if (B == group) {
            __builtin_prefetch(ahead + i * block_size, 0, 2);
            __builtin_prefetch(ahead + p.w_stride + i * block_size, 0, 2);
        } else if (B < group) {
            const int64_t next = i + inputs_ahead<T> < p.k ? 0 : B * p.w_stride - p.k * block_size;
            for (int b = 0; b < B; b++) __builtin_prefetch(w[b] + inputs_ahead<T> * block_size + next, 0, closeness<T>);
        }
        multiply<T, M, B>(acc, x, p.x_stride, w);
        for (const T*& each : w) each += numbers_of_word<Input<T>> * block_size;
    }
    for (int m = 0; m < M; m++)
        for (int b = 0; b < B; b++) store(sums + m * stride + b * block_size, acc[m][b]);
}

template <class T, int M>
void add_rows(const Panel<T>& p, int64_t row, const T* ahead, float* sums) {
    constexpr int B = wide<T>(M);
    int b = 0;
    for (; b + B <= p.blocks; b += B) tile<T, M, B>(p, row, b, ahead, sums);
    for (; b < p.blocks; b++) tile<T, M, 1>(p, row, b, ahead, sums);
}

template <class T, int M = 1>
TF_INLINE void add_rows(int rows, const Panel<T>& p, int64_t row, const T* ahead, float* sums) {
    if (rows == M) return add_rows<T, M>(p, row, ahead, sums);
    if constexpr (M < tallest_tile) add_rows<T, M + 1>(rows, p, row, ahead, sums);
}

/// Writes the sums of `rows` rows and some blocks. A panel continues each chain from its sum so far.
template <class T>
void sum(const Linear& l, int64_t top, int rows, int64_t first, int blocks, bool last, float* sums) {
    const int64_t stride = block_size * l.weights.inputs;
    for (int64_t k = 0; k < l.weights.inputs; k += panel) {
        const int64_t left = l.weights.inputs - k, count = left < panel ? left : panel;
        const int64_t to_next = left > panel ? panel * block_size : last ? 0 : blocks * stride - k * block_size;
        const Panel<T> p{static_cast<const Word<Input<T>>*>(l.x) + (top * l.x_stride + k) / numbers_of_word<Input<T>>,
                         l.x_stride / numbers_of_word<Input<T>>,
                         static_cast<const T*>(l.weights.data) + first * stride + k * block_size, stride, count, k == 0,
                         blocks};
        for (int row = 0, next, t = 0; row < rows; row = next, t++) {
            next = row + next_tile(rows - row);
            // All tiles but the first find their weights in L2. The first two tiles prefetch the next panel meanwhile.
            const T* ahead = next - row < rows && t < 2 && to_next ? p.w + to_next + 2 * t * stride : p.w;
            add_rows<T>(next - row, p, row, ahead, sums);
        }
    }
}

}  // namespace

/// `sum` for half weights.
void sum_half(const Linear& l, int64_t top, int rows, int64_t first, int blocks, bool last, float* sums);

}  // namespace triforce::TF_LEVEL
