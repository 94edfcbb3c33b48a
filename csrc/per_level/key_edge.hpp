// One block of keys of which some query of a tile sees a part: the last ones of its list, a window's first ones, and
// the sinks.
//
// Each sum runs as in a block that is seen whole, over the visible tokens alone. What the other slots hold, perhaps
// NaN, is never an operand: a page hidden from the tile is not read, a hidden token's lane is replaced.
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

/// What one query sees of a block.
struct Sights {
    Sight of[block_pages];

    bool none() const {
        for (const Sight& each : of)
            if (!each.none()) return false;
        return true;
    }
};

/// Which bits of the words of a step belong to visible tokens.
template <class T>
uint32_t visible_bits(const Sights& sights, int step) {
    constexpr int per_step = tokens_of_step<T>;
    constexpr uint32_t token = ~0u >> (32 - 32 / per_step);
    const int page = step / steps_of_page<T>, first = (step - page * steps_of_page<T>) * per_step;
    uint32_t bits = 0;
    for (int i = 0; i < per_step; i++)
        if (sights.of[page].sees(first + i)) bits |= token << (i * 32 / per_step);
    return bits;
}

template <class T>
TF_INLINE auto load_visible(const T* at, uint32_t bits) {
    uint32_t visible[16];
    __builtin_memcpy(visible, at, sizeof visible);
    for (uint32_t& each : visible) each &= bits;
    return load_step(reinterpret_cast<const T*>(visible));
}

/// Adds one step, of which a query sees a part, to its mix.
template <class T>
void mix_step(const Tile& tile, int row, const KeyBlock<T>& block, uint32_t word, int step, uint32_t bits) {
    const T* values = block.values[step / steps_of_page<T>];
    values += step % steps_of_page<T> * tile.dim * tokens_of_step<T>;
    for (int d = 0; d < tile.dim; d += 16) {
        float* mixed = tile.mixed + row * tile.dim + d;
        store(mixed, dot(load(mixed), load_visible(values + d * tokens_of_step<T>, bits), Word<T>::spread(word)));
    }
}

/// Adds steps [first, last) of a block, which all queries see, to their mixes.
template <class T, int R>
void mix_steps(const Tile& tile, const KeyBlock<T>& block, const uint32_t (*words)[block_steps<T>], int first,
               int last) {
    constexpr int of_page = steps_of_page<T>;
    by_columns<R>(tile.dim, [&](auto columns, int column) {
        Mix<T, R, columns.count> mix(tile, column);
        for (int step = first, end; step < last; step = end) {
            const int page = step / of_page, stop = (page + 1) * of_page;
            end = stop < last ? stop : last;
            mix.add(tile, block, words, column, page, step - page * of_page, end - page * of_page);
        }
        mix.keep(tile, column);
    });
}

template <class T, int R>
void mix_visible(const Tile& tile, const KeyBlock<T>& block, const Sights (&sights)[R],
                 const uint32_t (*words)[block_steps<T>]) {
    uint32_t bits[R][block_steps<T>];
    bool seen_by_all[block_steps<T> + 1] = {};
    for (int step = 0; step < block_steps<T>; step++) {
        uint32_t all = ~0u;
        for (int r = 0; r < R; r++) all &= bits[r][step] = visible_bits<T>(sights[r], step);
        seen_by_all[step] = all == ~0u;
    }
    for (int step = 0, next; step < block_steps<T>; step = next) {
        for (next = step; seen_by_all[next];) next++;
        if (next > step) {
            mix_steps<T, R>(tile, block, words, step, next);
            continue;
        }
        for (int r = 0; r < R; r++)
            if (bits[r][step]) mix_step(tile, r, block, words[r][step], step, bits[r][step]);
        next = step + 1;
    }
}

/// Scores of all pages; those of pages hidden from the tile mean nothing: another page is read in their place.
template <class T, int R>
void score_visible(const Tile& tile, KeyBlock<T>& block, const Sights (&sights)[R], int sinks,
                   F16 (&scores)[R][block_pages]) {
    bool hidden[block_pages];
    const T* any = nullptr;
    for (int p = 0; p < block_pages; p++) {
        hidden[p] = true;
        for (const Sights& each : sights) hidden[p] = hidden[p] && each.of[p].none();
        if (!hidden[p]) any = block.keys[p];
    }
    for (int p = 0; p < block_pages; p++)
        if (hidden[p]) block.keys[p] = block.keys_ahead[p] = any;
    score<T, R>(tile.words, R, tile.dim, block, scores);
    if (!sinks) return;
    F16 turned[R][block_pages];
    score<T, R>(tile.words_of_sinks, R, tile.dim, block, turned);
    for (int r = 0; r < R; r++)
        for (int p = 0; p < sinks; p++) scores[r][p] = turned[r][p];
}

/// `sinks`: pages of the block that meet the queries turned for sinks.
template <class T, int R>
void attend_edge(const Tile& tile, KeyBlock<T> block, const Sights (&sights)[R], int sinks, int page) {
    F16 scores[R][block_pages];
    score_visible<T, R>(tile, block, sights, sinks, scores);
    alignas(64) uint32_t words[R][block_steps<T>];
    for (int r = 0; r < R; r++) {
        if (sights[r].none()) continue;
        F16(&s)[block_pages] = scores[r];
        F16 top = set1(nothing_seen);
        for (int p = 0; p < block_pages; p++) top = max(sights[r].of[p].select(s[p], top), top);
        if (any_above(top, tile.most[r])) raise(tile, r, top);
        for (int p = 0; p < block_pages; p++) s[p] = sights[r].of[p].select(weight(s[p], tile, r), zero());
        store_words<T>(words[r], s);
        count(tile, r, s, page);
    }
    mix_visible<T, R>(tile, block, sights, words);
}

}  // namespace triforce::TF_LEVEL
