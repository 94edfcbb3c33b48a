// One block of codes against the few queries of a tile: the full tier's int8.
//
// As key_block.hpp, in exact integers. A query is rounded to int8 with a scale of its own. Its weights of a block are
// multiplied by the scales of the values and rounded to int16, at most 32767. So sums are the same at each level. Keys
// that a query does not see have weight 0, whatever their slots hold.
//
// The type P of codes is Code; UpperCode, if only upper nibbles are read; or WholeCode, if several tiles read codes
// that were joined once.
#pragma once

#include "code_weights.hpp"
#include "key_edge.hpp"

namespace triforce::TF_LEVEL {

/// The queries of a tile as integers, and the queries rotated for sinks. Their scales include the factor of scores.
struct CodedQueries {
    const IntegerQuery *window, *sinks;
};

/// The part of a block that a tile sees.
struct Sight {
    const VisibleRanges* ranges;  // of each query; or null: all queries see the whole block
    int sinks;                    // number of the block's first pages whose keys meet the queries for sinks
};

constexpr float least_weight = 1e-30f;  // a block whose weights times scales of values are all smaller adds nothing

TF_INLINE const bf16* scales_behind(CodeAt keys, int dim) {
    return reinterpret_cast<const bf16*>(keys.upper + page_size * dim);
}

/// The tokens of a block that a query sees. `select` returns x in lanes of a page's visible tokens, and `hidden` in the
/// other lanes.
struct WholeBlock {
    TF_INLINE F16 select(int, F16 x, F16) const { return x; }
};
struct PartOfBlock {
    const VisibleRanges& ranges;
    TF_INLINE F16 select(int page, F16 x, F16 hidden) const { return ranges.pages[page].select(x, hidden); }
};

/// Scales of a block's tokens. finite: whether all scales of values, including those of hidden tokens, are finite times
/// any weight.
struct BlockScales {
    F16 keys[block_pages], values[block_pages];
    bool finite;

    template <class P>
    BlockScales(const KeyBlock<P>& block, int dim) {
        F16 poison = zero();
        for (int p = 0; p < block_pages; p++) {
            const bf16* scales = scales_behind(block.keys[p], dim);
            keys[p] = load(scales), values[p] = load(scales + page_size);
            poison = add_product(poison, values[p] * set1(2 * largest_weight), zero());
        }
        finite = reduce_add(poison) == 0;
    }
};

/// Turns a row's scores into weights in place, adds the weights to its sums, and multiplies them with the scales of
/// values. Returns the largest product of each lane. A weight becomes NaN if its value's scale is not finite.
template <class Seen>
TF_INLINE F16 weigh(const Tile<Code>& tile, int row, const BlockScales& scales, Seen seen, F16 (&s)[block_pages],
                    int page) {
    F16 top = set1(nothing_seen), most = zero();
    for (int p = 0; p < block_pages; p++) top = max(seen.select(p, s[p], top), top);
    raise_shift(tile, row, top);
    F16 weighted[block_pages];
    for (int p = 0; p < block_pages; p++) {
        s[p] = seen.select(p, weight(s[p], tile, row), zero());
        weighted[p] = seen.select(p, s[p] * scales.values[p], zero());
        most = max(weighted[p], most);
    }
    if (!scales.finite)
        for (int p = 0; p < block_pages; p++) s[p] = s[p] + weighted[p] * zero();
    add_weights(tile, row, s, page);
    for (int p = 0; p < block_pages; p++) s[p] = weighted[p];
    return most;
}

/// Rounds a row's products of weights and scales to integers, the largest to 32767. Returns the scale of the integers;
/// 0 if the block adds nothing.
TF_INLINE float round_weights(F16 (&weights)[block_pages], F16 most, Weights& to) {
    const float largest = reduce_max(most);
    const bool adds = largest > least_weight;
    const F16 inverse = set1(adds ? int16_largest / largest : 0);
    for (F16& each : weights) each = each * inverse;
    store_weights(to, weights);
    return adds ? largest / int16_largest : 0;
}

// value_columns: columns of values that queries take at once. With VNNI each column of a query has two sums.
// value_queries: queries of a tile that take columns together. Whole codes cost little to read once more, so half of a
// tall tile takes two columns at once: a weight that is broadcast then serves both columns.
#if TF_SIMD_AVX512VNNI
constexpr int value_columns(int queries) { return queries > 4 ? 1 : queries > 2 ? 2 : 4; }
template <class P>
constexpr int value_queries(int queries) {
    return std::is_same_v<P, WholeCode> && queries > 4 ? (queries + 1) / 2 : queries;
}
#else
constexpr int value_columns(int queries) { return at_once(queries); }
template <class P>
constexpr int value_queries(int queries) { return queries; }
#endif

/// Bytes of a step's values. Those of whole codes are already in parts.
template <class P>
constexpr int value_step = in_nibbles<P> ? 32 : 64 * value_parts;

/// Adds the weighted values of a step to sums, one part of the values after another, because registers are few.
template <class P, int R, int C, int part = 0>
TF_INLINE void add_parts(WeightSums (&acc)[R][C], CodeAt values, const Weights* weights, int page, int step) {
    Quads codes[C];
    for (int c = 0; c < C; c++) {
        const CodeAt at = values + c * value_step<P>;
        if constexpr (in_nibbles<P>) codes[c] = value_part<part>(codes_at<P>(at));
        else codes[c] = codes_at<P>(at + part * 64);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = dot<part>(acc[r][c], codes[c], weights[r], page, step);
    if constexpr (part + 1 < value_parts) add_parts<P, R, C, part + 1>(acc, values, weights, page, step);
}

/// Adds the weighted values of a block to the sums of R queries of a tile, from query `first` on.
template <class P, int R>
TF_INLINE void add_codes(const Tile<Code>& tile, const KeyBlock<P>& block, int first, const Weights* weights,
                         const float* scales) {
    constexpr int steps = steps_of_page<Code>;
    const int64_t dim = tile.dim;
    by_columns<value_columns(R)>(tile.dim, [&](auto columns, int column) {
        constexpr int C = columns.value;
        if constexpr (!in_nibbles<P>)  // else all words are broadcast at once, for which registers are too few
            asm volatile("" : : : "memory");
        WeightSums acc[R][C] = {};
        for (int page = 0; page < block_pages; page++) {
            CodeAt values = block.values[page] + column * value_step<P> / 16;
            CodeAt ahead = (in_nibbles<P> ? block.values_ahead : block.values)[page] + column * step_size<P> / 16;
            for (int step = 0; step < steps; step++) {
                add_parts<P, R, C>(acc, values, weights + first, page, step);
                values = values + dim * value_step<P> / 16;
                if constexpr (!in_nibbles<P>) continue;
                for (int c = 0; c < C; c += 2) {
                    prefetch(ahead.upper + c * step_size<P>);
                    if constexpr (std::is_same_v<P, Code>) prefetch(ahead.upper + c * step_size<P> + ahead.lower);
                }
                ahead = ahead + dim * step_size<P> / 16;
            }
        }
        float* to = tile.acc + first * dim + column;
        for (int r = 0; r < R; r++, to += dim)
            for (int c = 0; c < C; c++)
                store(to + c * 16, fma(floats(total(acc[r][c])), set1(scales[first + r]), load(to + c * 16)));
    });
}

constexpr int whole_page_bytes(int dim) {
    return page_size * (dim * (1 + value_parts) + 2 * static_cast<int>(sizeof(bf16)));
}

/// Stores the parts of a step's values, as `add_parts` reads them.
template <int part = 0>
TF_INLINE void store_values(uint8_t* to, Quads codes) {
    store(reinterpret_cast<int8_t*>(to + part * 64), value_part<part>(codes));
    if constexpr (part + 1 < value_parts) store_values<part + 1>(to, codes);
}

/// Joins the codes of a block, for several tiles, in pages of `whole_page_bytes` from `to` on: keys, scales, parts of
/// values. Pages of the next block, if any, are prefetched meanwhile.
template <class P>
KeyBlock<WholeCode> whole_codes(const KeyBlock<P>& block, const KeyBlock<P>& next, int dim, uint8_t* to) {
    KeyBlock<WholeCode> whole{};
    for (int p = 0; p < block_pages && block.keys[p]; p++, to += whole_page_bytes(dim)) {
        const bf16* scales = scales_behind(block.keys[p], dim);
        whole.keys[p] = {to, 0}, whole.values[p] = {to + page_size * (dim + 2 * sizeof(bf16)), 0};
        __builtin_memcpy(to + page_size * dim, scales, 2 * page_size * sizeof(bf16));
        const CodeAt ahead = next.keys[p] ? next.keys[p] : block.keys[p];
        prefetch(scales_behind(ahead, dim));
        for (int step = 0; step < dim / 4; step++) {
            const int from = step * step_size<P>, into = step * step_size<WholeCode>;
            store(reinterpret_cast<int8_t*>(whole.keys[p].upper + into), codes_at<P>(block.keys[p] + from));
            store_values(whole.values[p].upper + step * value_step<WholeCode>, codes_at<P>(block.values[p] + from));
            prefetch(ahead.upper + into);  // keys and values of one plane are neighbours
            if constexpr (std::is_same_v<P, Code>) prefetch(ahead.upper + into + ahead.lower);
        }
    }
    return whole;
}

/// Attends to a block of codes. page: index of the block's first page in the split.
template <class P, int R>
void attend_codes(const Tile<Code>& tile, const CodedQueries& queries, KeyBlock<P> block, const Sight& sight,
                  int page) {
    I16 products[R][block_pages], sink_products[R][block_pages];
    if (sight.ranges) replace_hidden<P, R>(block, sight.ranges);
    if constexpr (in_nibbles<P>)
        for (const CodeAt& keys : block.keys_ahead) prefetch(scales_behind(keys, tile.dim));
    score<P, R>(tile.words, R, tile.dim, block, products);
    if (sight.sinks) score<P, R>(tile.sink_words, R, tile.dim, block, sink_products);
    const BlockScales scales(block, tile.dim);
    F16 weighted[R][block_pages], most[R];
    for (int r = 0; r < R; r++) {
        F16(&s)[block_pages] = weighted[r];
        for (int p = 0; p < block_pages; p++) {
            const bool sink = p < sight.sinks;
            const IntegerQuery& query = sink ? queries.sinks[r] : queries.window[r];
            const F16 bias = set1(static_cast<float>(query.bias));
            const F16 exact = floats(sink ? sink_products[r][p] : products[r][p]) - bias;
            s[p] = exact * (scales.keys[p] * set1(query.scale));
        }
        cap_scores(tile, s);
        most[r] = sight.ranges ? weigh(tile, r, scales, PartOfBlock{sight.ranges[r]}, s, page)
                               : weigh(tile, r, scales, WholeBlock{}, s, page);
    }
    Weights weights[R];
    float weight_scales[R];
    for (int r = 0; r < R; r++) weight_scales[r] = round_weights(weighted[r], most[r], weights[r]);
    constexpr int first_queries = value_queries<P>(R);
    add_codes<P, first_queries>(tile, block, 0, weights, weight_scales);
    if constexpr (first_queries < R)
        add_codes<P, R - first_queries>(tile, block, first_queries, weights, weight_scales);
}

}  // namespace triforce::TF_LEVEL
