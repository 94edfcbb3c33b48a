// One block of codes against the few queries of a tile: the full tier's int8.
//
// As key_block.hpp, in exact integers: a query is rounded to int16 with a scale of its own, and so are its weights of a
// block, each of them times its value's scale, the largest of which is 32767. So sums are the same at each level. What a
// query does not see has weight 0, whatever it holds. P is Code, or UpperCode where half of each is read.
#pragma once

#include "key_edge.hpp"

namespace triforce::TF_LEVEL {

/// The scales of a tile's queries, times what scores are multiplied with; and of those for the sinks.
struct QueryScales {
    const float *window, *sinks;
};

/// What a tile sees of a block; without ranges all of it. `sinks`: its first pages, which meet the queries for sinks.
struct Sight {
    const VisibleRanges* ranges;  // of each query
    int sinks;
};

constexpr float least_weight = 1e-30f;  // a block whose weighted values are all below it adds nothing

TF_INLINE const bf16* scales_behind(CodeAt keys, int dim) {
    return reinterpret_cast<const bf16*>(keys.upper + page_size * dim);
}

/// Lanes that a query sees, and `hidden` in the others.
TF_INLINE F16 seen(const VisibleRanges* ranges, int page, F16 x, F16 hidden) {
    return ranges ? ranges->pages[page].select(x, hidden) : x;
}

/// Makes a row's scores its weights, adds them to its sums, and rounds them, times scales of values, to `words`. Returns
/// the scale of the words; 0 where there is nothing to add. Weights become NaN with their values' scales.
template <class P>
TF_INLINE float weigh(const Tile<Code>& tile, int row, const KeyBlock<P>& block, const VisibleRanges* ranges,
                      F16 (&s)[block_pages], int16_t* words, int page) {
    F16 top = set1(nothing_seen), most = zero();
    for (int p = 0; p < block_pages; p++) top = max(seen(ranges, p, s[p], top), top);
    raise_shift(tile, row, top);
    F16 weighted[block_pages];
    for (int p = 0; p < block_pages; p++) {
        s[p] = seen(ranges, p, weight(s[p], tile, row), zero());
        weighted[p] = seen(ranges, p, s[p] * load(scales_behind(block.keys[p], tile.dim) + page_size), zero());
        most = max(weighted[p], most);
        s[p] = s[p] + weighted[p] * zero();
    }
    add_weights(tile, row, s, page);
    const float largest = reduce_max(most);
    const bool adds = largest > least_weight;
    const F16 inverse = set1(adds ? int16_largest / largest : 0);
    for (int p = 0; p < block_pages; p++) store_int16(words + p * page_size, weighted[p] * inverse);
    return adds ? largest / int16_largest : 0;
}

template <class P, int R>
TF_INLINE void add_codes(const Tile<Code>& tile, const KeyBlock<P>& block,
                         const Word<Code> (*words)[block_steps<Code>], const float* scales) {
    constexpr int steps = steps_of_page<Code>;
    by_columns<R>(tile.dim, [&](auto columns, int column) {
        constexpr int C = columns.value;
        I16 acc[R][C] = {};
        for (int page = 0; page < block_pages; page++) {
            CodeAt values = block.values[page] + column;
            const int64_t ahead = block.values_ahead[page].upper - block.values[page].upper;
            for (int step = 0; step < steps; step++, values = values + tile.dim) {
                CodeAt at[C];
                for (int c = 0; c < C; c++) at[c] = values + c * step_size<P>;
                multiply<P, R, C>(acc, words[0] + page * steps + step, block_steps<Code>, at);
                prefetch(values.upper + ahead);
                if constexpr (std::is_same_v<P, Code>) prefetch(at[C / 3 * 2].upper + values.lower + ahead);
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C && scales[r] != 0; c++) {
                float* to = tile.acc + r * tile.dim + column + c * 16;
                store(to, load(to) + floats(acc[r][c]) * set1(scales[r]));
            }
    });
}

/// Attends to a block of codes. `page`: where it begins in the split.
template <class P, int R>
void attend_codes(const Tile<Code>& tile, const QueryScales& queries, KeyBlock<P> block, const Sight& sight,
                  int page) {
    I16 products[R][block_pages], of_sinks[R][block_pages];
    if (sight.ranges) replace_hidden<P, R>(block, sight.ranges);
    for (const CodeAt& keys : block.keys_ahead) prefetch(scales_behind(keys, tile.dim));
    if (tile.page_sequential)
        score<P, R, 1>(tile.words, R, tile.dim, block, products);
    else
        score<P, R>(tile.words, R, tile.dim, block, products);
    if (sight.sinks) score<P, R>(tile.sink_words, R, tile.dim, block, of_sinks);
    alignas(64) Word<Code> words[R][block_steps<Code>];
    float scales[R];
    for (int r = 0; r < R; r++) {
        F16 s[block_pages];
        for (int p = 0; p < block_pages; p++) {
            const bool sink = p < sight.sinks;
            const F16 scale = set1(sink ? queries.sinks[r] : queries.window[r]);
            const F16 scales_of_keys = load(scales_behind(block.keys[p], tile.dim));
            s[p] = floats(sink ? of_sinks[r][p] : products[r][p]) * (scales_of_keys * scale);
        }
        cap_scores(tile, s);
        scales[r] = weigh(tile, r, block, sight.ranges ? sight.ranges + r : nullptr, s,
                          reinterpret_cast<int16_t*>(words[r]), page);
    }
    add_codes<P, R>(tile, block, words, scales);
}

}  // namespace triforce::TF_LEVEL
