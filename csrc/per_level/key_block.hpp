// One block of 64 keys against the few queries of a tile: scores, softmax, weighted values.
//
// Neither a tile's height nor the order in which its registers are filled changes a bit: each score is one chain of
// sums over the channels, and each channel of the output is one chain over the tokens.
#pragma once

#include "softmax.hpp"

namespace triforce::TF_LEVEL {

// Pages (scores) or columns of 16 channels (values) that a tile takes at once.
#if TF_SIMD_AVX512
constexpr int at_once(int queries) { return queries > 6 ? 2 : 4; }
#else
constexpr int at_once(int queries) { return queries > 2 ? 1 : 4 / queries; }
#endif

template <class T>
constexpr int block_steps = block_pages * steps_of_page<T>;

template <class T>
struct KeyBlock {
    At<T> keys[block_pages];
    At<T> values[block_pages];
    // Pages of the next block. Each of their cache lines is prefetched when the same line of this block is read, so
    // that requests to memory come at an even pace. If there is nothing to prefetch: the pages of this block.
    At<T> keys_ahead[block_pages];
    At<T> values_ahead[block_pages];
};

template <class T>
struct Tile {
    const Word<T>* words;  // [steps of the keys][height]
    const Word<T>* sink_words;
    float* acc;        // [height][dim]: sums of weighted values
    float* shift;      // [height]: as in Partial
    float* lane_sums;  // [height][16]: the sum of the weights, in 16 parts
    float* page_sums;  // [height][split_pages]: sum of the weights in each page; or null
    int height, dim;
    float scale;  // factor of products of queries and keys; scores are exponents of 2
    float cap;    // cap of scores, as an exponent of 2; or 0
    // Whether keys that are not codes are read page by page. From memory this is faster than several pages at once,
    // because the reads are one stream. For keys in a cache it is slower.
    bool page_sequential;
};

/// The scale of a query's int8 numbers, and the bias of their products with codes (see `product_bias`).
struct IntegerQuery {
    float scale;
    int32_t bias;
};

/// Prefetches a line into the second-level cache. The first level is full of this block.
TF_INLINE void prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }

/// Prefetches the line of a step. A line of nibbles has two steps: even steps prefetch the upper nibbles of both, odd
/// steps the lower nibbles. Whole codes are already in the caches.
template <class T>
TF_INLINE void prefetch_step(At<T> page, int step) {
    if constexpr (std::is_same_v<T, WholeCode>) return;
    else if constexpr (is_code<T>)
        prefetch(page.upper + step * step_size<T> + (std::is_same_v<T, Code> && step % 2 ? page.lower : 0));
    else
        prefetch(page + step * step_size<T>);
}

/// A row's sums are rescaled only when a score exceeds the shift by more than `shift_margin`, in base 2. Weights may
/// then be larger than 1, up to `largest_weight`, but are no less exact (FlashAttention-4, Dao et al. 2025).
constexpr float shift_margin = 8, largest_weight = 256;

struct BlockScores {
    F16 pages[block_pages];
};

/// A separate function, because few models have a cap, and its code would take registers of the loops over blocks.
[[gnu::noinline]] inline BlockScores under_cap(BlockScores scores, float cap) {
    for (F16& each : scores.pages) each = set1(cap) * tanh(each / set1(cap));
    return scores;
}

/// Caps scores, if the tile has a cap.
template <class T>
TF_INLINE void cap_scores(const Tile<T>& tile, F16 (&s)[block_pages]) {
    if (tile.cap == 0) return;
    BlockScores scores;
    for (int p = 0; p < block_pages; p++) scores.pages[p] = s[p];
    scores = under_cap(scores, tile.cap);
    for (int p = 0; p < block_pages; p++) s[p] = scores.pages[p];
}

/// Sets the row's shift to the largest of `scores`, and rescales its sums to this shift.
template <class T>
void rescale_sums(const Tile<T>& tile, int row, F16 scores) {
    const float shift = reduce_max(scores);
    const F16 factor = exp2(set1(tile.shift[row] - shift));
    tile.shift[row] = shift;
    float* acc = tile.acc + row * tile.dim;
    for (int d = 0; d < tile.dim; d += 16) store(acc + d, load(acc + d) * factor);
    store(tile.lane_sums + row * 16, load(tile.lane_sums + row * 16) * factor);
    if (!tile.page_sums) return;
    float* sums = tile.page_sums + row * split_pages;
    for (int i = 0; i < split_pages; i += 16) store(sums + i, load(sums + i) * factor);
}

/// Raises a row's shift to the largest of `scores` if this is more than `shift_margin` above the shift.
template <class T>
TF_INLINE void raise_shift(const Tile<T>& tile, int row, F16 scores) {
    if (any_above(scores, set1(tile.shift[row] + shift_margin))) rescale_sums(tile, row, scores);
}

template <class T>
TF_INLINE F16 weight(F16 score, const Tile<T>& tile, int row) {
    return exp2(score - set1(tile.shift[row]));
}

/// Rounds weights to the words that values are multiplied with.
template <class T>
TF_INLINE void store_weights(Word<T> (&words)[block_steps<T>], const F16 (&weights)[block_pages]) {
    for (int p = 0; p < block_pages; p++) store_words(words + p * steps_of_page<T>, weights[p]);
}

/// Adds the weights of a block to a row's sums. page: index of the block's first page in the split.
template <class T>
TF_INLINE void add_weights(const Tile<T>& tile, int row, const F16 (&weights)[block_pages], int page) {
    const F16 sum = (weights[0] + weights[1]) + (weights[2] + weights[3]);
    store(tile.lane_sums + row * 16, load(tile.lane_sums + row * 16) + sum);
    if (tile.page_sums) store_sums(tile.page_sums + row * split_pages + page, weights);
}

/// Writes the scores of R queries for a block, `pages` pages at a time. height: queries of the tile.
template <class T, int R, int pages = at_once(R)>
TF_INLINE void score(const Word<T>* words, int height, int dim, const KeyBlock<T>& block,
                     Sum<T> (&scores)[R][block_pages]) {
    const int steps = dim / numbers_of_word<T>;
    for (int page = 0; page < block_pages; page += pages) {
        Sum<T> acc[R][pages] = {};
        At<T> keys[pages];
        for (int p = 0; p < pages; p++) keys[p] = block.keys[page + p];
        for (int step = 0; step < steps; step++) {
            multiply<T, R, pages>(acc, words + step * height, 1, keys);
            for (int p = 0; p < pages; p++) {
                prefetch_step<T>(block.keys_ahead[page + p], step);
                keys[p] = keys[p] + step_size<T>;
            }
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < pages; p++) scores[r][page + p] = acc[r][p];
    }
}

/// Sums of the weighted values of R queries in C columns, in registers.
template <class T, int R, int C>
struct Accumulator {
    F16 acc[R][C];

    TF_INLINE Accumulator(const Tile<T>& tile, int column) {
        const float* from = tile.acc + column;
        for (int r = 0; r < R; r++, from += tile.dim)
            for (int c = 0; c < C; c++) acc[r][c] = load(from + c * 16);
    }

    TF_INLINE void store_to(const Tile<T>& tile, int column) const {
        float* to = tile.acc + column;
        const int64_t dim = tile.dim;
        for (int r = 0; r < R; r++, to += dim)
            for (int c = 0; c < C; c++) store(to + c * 16, acc[r][c]);
    }

    /// Adds steps [first, last) of a page.
    TF_INLINE void add(const Tile<T>& tile, const KeyBlock<T>& block, const Word<T> (*words)[block_steps<T>],
                       int column, int page, int first, int last) {
        const T* values = block.values[page] + (first * tile.dim + column) * numbers_of_word<T>;
        const int64_t ahead = block.values_ahead[page] - block.values[page];
        for (int step = first; step < last; step++, values += tile.dim * numbers_of_word<T>) {
            const T* at[C];
            for (int c = 0; c < C; c++) at[c] = values + c * step_size<T>;
            multiply<T, R, C>(acc, words[0] + page * steps_of_page<T> + step, block_steps<T>, at);
            for (int c = 0; c < C; c++) prefetch(at[c] + ahead);
        }
    }
};

/// A compile-time constant.
template <int N>
struct Constant {
    static constexpr int value = N;
};

/// Calls body(Constant<C>, first channel) for parts of C * 16 channels that cover `dim`. C is at most `widest`.
template <int widest, class Body>
TF_INLINE void by_columns(int dim, Body body) {
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

/// Calls body(Constant<height>): turns a height at run time into a compile-time constant.
template <int R = 1, class Body>
TF_INLINE void by_height(int height, Body body) {
    if (height == R) return body(Constant<R>{});
    if constexpr (R < tallest_tile) by_height<R + 1>(height, body);
}

/// Attends to a block that all queries of the tile see whole. page: index of the block's first page in the split.
template <class T, int R>
void attend_block(const Tile<T>& tile, const KeyBlock<T>& block, int page) {
    F16 scores[R][block_pages];
    if (tile.page_sequential)
        score<T, R, 1>(tile.words, R, tile.dim, block, scores);
    else
        score<T, R>(tile.words, R, tile.dim, block, scores);
    alignas(64) Word<T> words[R][block_steps<T>];
    for (int r = 0; r < R; r++) {
        F16(&s)[block_pages] = scores[r];
        for (F16& each : s) each = each * set1(tile.scale);
        cap_scores(tile, s);
        raise_shift(tile, r, max(max(s[0], s[1]), max(s[2], s[3])));
        for (int p = 0; p < block_pages; p++) s[p] = weight(s[p], tile, r);
        store_weights<T>(words[r], s);
        add_weights(tile, r, s, page);
    }
    by_columns<at_once(R)>(tile.dim, [&](auto columns, int column) {
        Accumulator<T, R, columns.value> sum(tile, column);
        for (int p = 0; p < block_pages; p++) sum.add(tile, block, words, column, p, 0, steps_of_page<T>);
        sum.store_to(tile, column);
    });
}

}  // namespace triforce::TF_LEVEL
