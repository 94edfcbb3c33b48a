// One block of 64 keys against the few queries of a tile: scores, softmax, weighted values.
//
// Neither a tile's height nor the order in which its registers are filled changes a bit: each score is one chain of
// sums over the channels, and each channel of the output is one chain over the tokens.
#pragma once

#include "softmax.hpp"

namespace triforce::TF_LEVEL {

// The tallest tile, and the pages (scores) or columns (values) that it takes at once: so many that their sums and
// operands fit into the registers.
#if TF_SIMD_AVX512BF16
constexpr int tallest_tile = 8;
constexpr int at_once(int queries) { return queries > 6 ? 2 : 4; }
#elif TF_SIMD_AVX512
constexpr int tallest_tile = 6;
constexpr int at_once(int) { return 2; }
#elif TF_SIMD_AVX2
constexpr int tallest_tile = 3;
constexpr int at_once(int) { return 1; }
#else
constexpr int tallest_tile = 2;
constexpr int at_once(int) { return 1; }
#endif

template <class T>
constexpr int block_steps = block_pages * steps_of_page<T>;

template <class T>
struct KeyBlock {
    const T* keys[block_pages];
    const T* values[block_pages];
    // Pages of the next block. Each of their lines is prefetched when the same line of this block is read, so that
    // requests to memory come at an even pace. Where there is nothing to prefetch, the pages of this block.
    const T* keys_ahead[block_pages];
    const T* values_ahead[block_pages];
};

struct Tile {
    const uint32_t* words;  // [steps of the keys][height]
    const uint32_t* sink_words;
    float* acc;        // [height][dim]: weighted values
    float* max;        // [height]: of the scores
    float* lane_sums;  // [height][16], which add up to the sum of the weights
    float* page_sums;  // [height][split_pages]: of the weights in each page; or null
    int height, dim;
    float scale;  // of scores, to base 2
    // Keys are read page by page. For keys in a cache that is slower than several pages at once; from memory it is
    // faster, because the reads are one stream.
    bool page_sequential;
};

/// Into the second-level cache: the first one is full of this block.
TF_INLINE void prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }

/// Raises a row's maximum to that of `scores` and rescales its sums to it.
inline void raise_max(const Tile& tile, int row, F16 scores) {
    const float new_max = reduce_max(scores);
    const F16 factor = exp2(set1((tile.max[row] - new_max) * tile.scale));
    tile.max[row] = new_max;
    float* acc = tile.acc + row * tile.dim;
    for (int d = 0; d < tile.dim; d += 16) store(acc + d, load(acc + d) * factor);
    store(tile.lane_sums + row * 16, load(tile.lane_sums + row * 16) * factor);
    if (!tile.page_sums) return;
    float* sums = tile.page_sums + row * split_pages;
    for (int i = 0; i < split_pages; i += 16) store(sums + i, load(sums + i) * factor);
}

TF_INLINE F16 weight(F16 score, const Tile& tile, int row) {
    return exp2((score - set1(tile.max[row])) * set1(tile.scale));
}

/// Rounds weights to the 32-bit words that values are multiplied with.
template <class T>
TF_INLINE void store_words(uint32_t (&words)[block_steps<T>], const F16 (&weights)[block_pages]) {
    for (int p = 0; p < block_pages; p++) store(reinterpret_cast<T*>(words) + p * page_size, weights[p]);
}

/// Adds the weights of a block to a row's sums. `page`: where the block begins in the split.
TF_INLINE void add_weights(const Tile& tile, int row, const F16 (&weights)[block_pages], int page) {
    const F16 sum = (weights[0] + weights[1]) + (weights[2] + weights[3]);
    store(tile.lane_sums + row * 16, load(tile.lane_sums + row * 16) + sum);
    if (tile.page_sums) store_sums(tile.page_sums + row * split_pages + page, weights);
}

/// Scores of R queries against a block, `pages` pages at a time. `height`: queries of the tile.
template <class T, int R, int pages = at_once(R)>
TF_INLINE void score(const uint32_t* words, int height, int dim, const KeyBlock<T>& block,
                     Sum<T> (&scores)[R][block_pages]) {
    const int steps = dim / numbers_of_word<T>;
    for (int page = 0; page < block_pages; page += pages) {
        Sum<T> acc[R][pages] = {};
        for (int step = 0; step < steps; step++) {
            decltype(load_step(block.keys[0])) key[pages];
            for (int p = 0; p < pages; p++) {
                key[p] = load_step(block.keys[page + p] + step * step_size<T>);
                prefetch(block.keys_ahead[page + p] + step * step_size<T>);
            }
            for (int r = 0; r < R; r++) {
                const auto word = spread<T>(words[step * height + r]);
                for (int p = 0; p < pages; p++) acc[r][p] = dot(acc[r][p], key[p], word);
            }
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < pages; p++) scores[r][page + p] = acc[r][p];
    }
}

/// The weighted values of R queries in C columns, in registers.
template <class T, int R, int C>
struct Accumulator {
    F16 acc[R][C];

    TF_INLINE Accumulator(const Tile& tile, int column) {
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) acc[r][c] = load(tile.acc + r * tile.dim + column + c * 16);
    }

    TF_INLINE void store_to(const Tile& tile, int column) const {
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) store(tile.acc + r * tile.dim + column + c * 16, acc[r][c]);
    }

    /// Adds steps [first, last) of a page.
    TF_INLINE void add(const Tile& tile, const KeyBlock<T>& block, const uint32_t (*words)[block_steps<T>], int column,
                       int page, int first, int last) {
        const T* values = block.values[page] + (first * tile.dim + column) * numbers_of_word<T>;
        const int64_t ahead = block.values_ahead[page] - block.values[page];
        for (int step = first; step < last; step++, values += tile.dim * numbers_of_word<T>) {
            decltype(load_step(values)) value[C];
            for (int c = 0; c < C; c++) {
                value[c] = load_step(values + c * step_size<T>);
                prefetch(values + c * step_size<T> + ahead);
            }
            for (int r = 0; r < R; r++) {
                const auto word = spread<T>(words[r][page * steps_of_page<T> + step]);
                for (int c = 0; c < C; c++) acc[r][c] = dot(acc[r][c], value[c], word);
            }
        }
    }
};

/// A number known when compiling.
template <int N>
struct Constant {
    static constexpr int value = N;
};

/// Calls body(Constant<C>, first channel) for all channels, C * 16 at a time: as many as registers hold for R queries.
template <int R, class Body>
TF_INLINE void by_columns(int dim, Body body) {
    constexpr int widest = at_once(R);
    const int columns = dim / 16, parts = (columns + widest - 1) / widest;
    for (int part = 0; part < parts; part++) {
        const int from = columns * part / parts, count = columns * (part + 1) / parts - from;
        if (count == widest) body(Constant<widest>{}, from * 16);
        if constexpr (widest > 3)
            if (count == 3) body(Constant<3>{}, from * 16);
        if constexpr (widest > 2)
            if (count == 2) body(Constant<2>{}, from * 16);
        if constexpr (widest > 1)
            if (count == 1) body(Constant<1>{}, from * 16);
    }
}

/// Calls body(Constant<height>): a height known when running becomes one known when compiling.
template <int R = 1, class Body>
TF_INLINE void by_height(int height, Body body) {
    if (height == R) return body(Constant<R>{});
    if constexpr (R < tallest_tile) by_height<R + 1>(height, body);
}

/// Attends to a block that all queries of the tile see whole. `page`: where it begins in the split.
template <class T, int R>
void attend_block(const Tile& tile, const KeyBlock<T>& block, int page) {
    F16 scores[R][block_pages];
    if (tile.page_sequential)
        score<T, R, 1>(tile.words, R, tile.dim, block, scores);
    else
        score<T, R>(tile.words, R, tile.dim, block, scores);
    alignas(64) uint32_t words[R][block_steps<T>];
    for (int r = 0; r < R; r++) {
        F16(&s)[block_pages] = scores[r];
        const F16 top = max(max(s[0], s[1]), max(s[2], s[3]));
        if (any_above(top, tile.max[r])) raise_max(tile, r, top);
        for (int p = 0; p < block_pages; p++) s[p] = weight(s[p], tile, r);
        store_words<T>(words[r], s);
        add_weights(tile, r, s, page);
    }
    by_columns<R>(tile.dim, [&](auto columns, int column) {
        Accumulator<T, R, columns.value> sum(tile, column);
        for (int p = 0; p < block_pages; p++) sum.add(tile, block, words, column, p, 0, steps_of_page<T>);
        sum.store_to(tile, column);
    });
}

}  // namespace triforce::TF_LEVEL
