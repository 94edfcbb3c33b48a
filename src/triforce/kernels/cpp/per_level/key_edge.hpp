// One block of keys of which a query sees a part: the last ones of its list, a window's first ones, and the sinks.
//
// Each sum runs as in a block that is seen whole, over the visible tokens alone. What the other slots hold, perhaps
// NaN, is never an operand: a hidden page is not read, a hidden token's lane is replaced.
#pragma once

#include "key_block.hpp"

namespace triforce::TF_LEVEL {

/// The tokens [start, stop) of a page that a query sees.
struct Sight {
    int start, stop;

    bool sees(int token) const { return start <= token && token < stop; }
    bool none() const { return start >= stop; }
    TF_INLINE F16 select(F16 seen, F16 hidden) const { return first_n(start, hidden, first_n(stop, seen, hidden)); }
};

struct Sights {
    Sight of[block_pages];
    int sinks;  // pages of the block that meet the queries turned for sinks

    bool none() const {
        for (const Sight& each : of)
            if (!each.none()) return false;
        return true;
    }
};

/// Which bits of the words of a step belong to visible tokens.
template <class T>
uint32_t visible_bits(const Sight& sight, int step) {
    constexpr int per_step = tokens_of_step<T>;
    uint32_t bits = 0;
    for (int i = 0; i < per_step; i++)
        if (sight.sees(step * per_step + i)) bits |= (~0u >> (32 - 32 / per_step)) << (i * 32 / per_step);
    return bits;
}

template <class T>
TF_INLINE auto load_visible(const T* at, uint32_t bits) {
    uint32_t visible[16];
    __builtin_memcpy(visible, at, sizeof visible);
    for (uint32_t& each : visible) each &= bits;
    return load_step(reinterpret_cast<const T*>(visible));
}

template <class T, int C>
void mix_visible(const KeyBlock<T>& block, const Sights& sights, const uint32_t* words, int dim, int column,
                 float* mixed) {
    F16 acc[C];
    for (int c = 0; c < C; c++) acc[c] = load(mixed + column + c * 16);
    for (int i = 0; i < block_pages * steps_of_page<T>; i++) {
        const int page = i / steps_of_page<T>, step = i % steps_of_page<T>;
        const uint32_t bits = visible_bits<T>(sights.of[page], step);
        if (!bits) continue;
        const T* values = block.values[page] + (step * dim + column) * tokens_of_step<T>;
        const auto word = Word<T>::spread(words[i]);
        for (int c = 0; c < C; c++) {
            const T* at = values + c * step_size<T>;
            acc[c] = dot(acc[c], bits == ~0u ? load_step(at) : load_visible(at, bits), word);
        }
    }
    for (int c = 0; c < C; c++) store(mixed + column + c * 16, acc[c]);
}

/// Scores of all pages; those of hidden ones mean nothing: another page is read in their place.
template <class T>
void score_visible(const Tile& tile, int row, KeyBlock<T> block, const Sights& sights, F16 (&scores)[1][block_pages]) {
    const T* any = nullptr;
    for (int p = 0; p < block_pages; p++)
        if (!sights.of[p].none()) any = block.keys[p];
    for (int p = 0; p < block_pages; p++) {
        if (sights.of[p].none()) block.keys[p] = any;
        block.keys_ahead[p] = block.keys[p];
    }
    score<T, 1>(tile.words + row, tile.height, tile.dim, block, scores);
    if (!sights.sinks) return;
    F16 turned[1][block_pages];
    score<T, 1>(tile.words_of_sinks + row, tile.height, tile.dim, block, turned);
    for (int p = 0; p < sights.sinks; p++) scores[0][p] = turned[0][p];
}

template <class T>
void attend_edge(const Tile& tile, int row, const KeyBlock<T>& block, const Sights& sights, int page) {
    if (sights.none()) return;
    F16 all[1][block_pages];
    F16(&scores)[block_pages] = all[0];
    score_visible(tile, row, block, sights, all);
    F16 top = set1(nothing_seen);
    for (int p = 0; p < block_pages; p++) top = max(sights.of[p].select(scores[p], top), top);
    if (any_above(top, tile.most[row])) raise(tile, row, top);
    alignas(64) uint32_t words[block_tokens / tokens_of_step<T>];
    for (int p = 0; p < block_pages; p++) {
        scores[p] = sights.of[p].select(weight(scores[p], tile, row), zero());
        store(reinterpret_cast<T*>(words) + p * page_size, scores[p]);
    }
    store_sums(tile.sums + row * split_pages + page, scores);
    by_columns(tile.dim, [&](auto columns, int column) {
        mix_visible<T, columns.count>(block, sights, words, tile.dim, column, tile.mixed + row * tile.dim);
    });
}

}  // namespace triforce::TF_LEVEL
