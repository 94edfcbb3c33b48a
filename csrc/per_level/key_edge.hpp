// One block of keys that some query of a tile sees in part: the last keys of a list, the first of a window, the
// sinks.
//
// Each sum has the order of a block that is seen whole, over the visible tokens alone. Slots of hidden tokens may hold
// NaN, so they are never operands. If a page is hidden from the whole tile, another page is read in its place. In other
// pages the lanes of hidden tokens are replaced.
#pragma once

#include "key_block.hpp"

namespace triforce::TF_LEVEL {

/// The tokens [start, stop) of a page that a query sees.
struct VisibleRange {
    int start, stop;

    bool contains(int token) const { return start <= token && token < stop; }
    bool empty() const { return start >= stop; }
    TF_INLINE F16 select(F16 visible, F16 hidden) const {
        return first_n(start, hidden, first_n(stop, visible, hidden));
    }
};

/// The tokens of a block that one query sees.
struct VisibleRanges {
    VisibleRange pages[block_pages];

    bool empty() const {
        for (const VisibleRange& each : pages)
            if (!each.empty()) return false;
        return true;
    }
};

/// The mask of bits that belong to visible tokens, in each word of a step.
template <class T>
uint32_t visible_bits(const VisibleRanges& visible, int step) {
    constexpr int per_step = numbers_of_word<T>;
    constexpr uint32_t token = ~0u >> (32 - 32 / per_step);
    const int page = step / steps_of_page<T>, first = (step - page * steps_of_page<T>) * per_step;
    uint32_t bits = 0;
    for (int i = 0; i < per_step; i++)
        if (visible.pages[page].contains(first + i)) bits |= token << (i * 32 / per_step);
    return bits;
}

/// Adds one step of the values, which a query sees in part, to the query's sums.
template <class T>
void add_step(const Tile<T>& tile, int row, const KeyBlock<T>& block, const Word<T>& word, int step, uint32_t bits) {
    const T* values = block.values[step / steps_of_page<T>];
    values += step % steps_of_page<T> * tile.dim * numbers_of_word<T>;
    for (int d = 0; d < tile.dim; d += 16) {
        uint32_t visible[16];
        __builtin_memcpy(visible, values + d * numbers_of_word<T>, sizeof visible);
        for (uint32_t& each : visible) each &= bits;
        float* acc = tile.acc + row * tile.dim + d;
        F16 sum[1][1] = {{load(acc)}};
        multiply<T, 1, 1>(sum, &word, 0, {reinterpret_cast<const T*>(visible)});
        store(acc, sum[0][0]);
    }
}

/// Adds steps [first, last) of a block's values, which all queries see, to the queries' sums.
template <class T, int R>
void add_steps(const Tile<T>& tile, const KeyBlock<T>& block, const Word<T> (*words)[block_steps<T>], int first,
               int last) {
    constexpr int page_steps = steps_of_page<T>;
    by_columns<at_once(R)>(tile.dim, [&](auto columns, int column) {
        Accumulator<T, R, columns.value> sum(tile, column);
        for (int step = first, end; step < last; step = end) {
            const int page = step / page_steps, stop = (page + 1) * page_steps;
            end = stop < last ? stop : last;
            sum.add(tile, block, words, column, page, step - page * page_steps, end - page * page_steps);
        }
        sum.store_to(tile, column);
    });
}

/// Adds the visible values of a block to the sums of R queries.
template <class T, int R>
void add_visible(const Tile<T>& tile, const KeyBlock<T>& block, const VisibleRanges (&visible)[R],
                 const Word<T> (*words)[block_steps<T>]) {
    uint32_t bits[R][block_steps<T>];
    bool seen_by_all[block_steps<T> + 1] = {};
    for (int step = 0; step < block_steps<T>; step++) {
        uint32_t all = ~0u;
        for (int r = 0; r < R; r++) all &= bits[r][step] = visible_bits<T>(visible[r], step);
        seen_by_all[step] = all == ~0u;
    }
    for (int step = 0, next; step < block_steps<T>; step = next) {
        for (next = step; seen_by_all[next];) next++;
        if (next > step) {
            add_steps<T, R>(tile, block, words, step, next);
            continue;
        }
        for (int r = 0; r < R; r++)
            if (bits[r][step]) add_step(tile, r, block, words[r][step], step, bits[r][step]);
        next = step + 1;
    }
}

/// Replaces the pages that are hidden from the tile by another page of the block.
template <class T, int R>
void replace_hidden(KeyBlock<T>& block, const VisibleRanges* visible) {
    bool hidden[block_pages];
    int any = 0;
    for (int p = 0; p < block_pages; p++) {
        hidden[p] = true;
        for (int r = 0; r < R; r++) hidden[p] = hidden[p] && visible[r].pages[p].empty();
        if (!hidden[p]) any = p;
    }
    for (int p = 0; p < block_pages; p++)
        if (hidden[p]) {
            block.keys[p] = block.keys_ahead[p] = block.keys[any];
            block.values[p] = block.values_ahead[p] = block.values[any];
        }
}

/// Writes the scores of all pages. Scores of pages that are hidden from the tile have no meaning, because another page
/// is read in their place.
template <class T, int R>
void score_visible(const Tile<T>& tile, KeyBlock<T>& block, const VisibleRanges (&visible)[R], int sinks,
                   F16 (&scores)[R][block_pages]) {
    replace_hidden<T, R>(block, visible);
    score<T, R>(tile.words, R, tile.dim, block, scores);
    if (!sinks) return;
    F16 sink_scores[R][block_pages];
    score<T, R>(tile.sink_words, R, tile.dim, block, sink_scores);
    for (int r = 0; r < R; r++)
        for (int p = 0; p < sinks; p++) scores[r][p] = sink_scores[r][p];
}

/// Attends to a block that is seen in part. sinks: number of its first pages whose keys meet the queries rotated for
/// sinks. page: index of the block's first page in the split.
template <class T, int R>
void attend_edge(const Tile<T>& tile, KeyBlock<T> block, const VisibleRanges (&visible)[R], int sinks, int page) {
    F16 scores[R][block_pages];
    score_visible<T, R>(tile, block, visible, sinks, scores);
    alignas(64) Word<T> words[R][block_steps<T>];
    for (int r = 0; r < R; r++) {
        if (visible[r].empty()) continue;
        F16(&s)[block_pages] = scores[r];
        for (F16& each : s) each = each * set1(tile.scale);
        cap_scores(tile, s);
        F16 top = set1(nothing_seen);
        for (int p = 0; p < block_pages; p++) top = max(visible[r].pages[p].select(s[p], top), top);
        raise_shift(tile, r, top);
        for (int p = 0; p < block_pages; p++) s[p] = visible[r].pages[p].select(weight(s[p], tile, r), zero());
        store_weights<T>(words[r], s);
        add_weights(tile, r, s, page);
    }
    add_visible<T, R>(tile, block, visible, words);
}

}  // namespace triforce::TF_LEVEL
