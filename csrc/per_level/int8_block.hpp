// One block of int8 copies of pages against the few queries of a tile, all of which see it whole.
//
// As key_block.hpp, in exact integers: each query is rounded to int8, as a row of its own, and so are the weights that
// a block's values get from it, the largest of which is 127. Only what they stand for is summed in float32.
#pragma once

#include "key_block.hpp"
#include "quantise.hpp"

namespace triforce::TF_LEVEL {

/// The queries of a tile as int8: [dim / 4][height] quads, and the scale of each.
struct Int8Queries {
    const uint32_t* quads;
    const float* scales;
};

template <int R>
TF_INLINE void score(const Int8Queries& queries, int dim, const KeyBlock<int8_t>& block, const PageScales* scales,
                     F16 (&scores)[R][block_pages]) {
    constexpr int pages = at_once(R);
    for (int page = 0; page < block_pages; page += pages) {
        I16 acc[R][pages] = {};
        for (int step = 0; step < dim / 4; step++) {
            Quads key[pages];
            for (int p = 0; p < pages; p++) {
                key[p] = load_quads(block.keys[page + p] + step * 64);
                fetch(block.keys_ahead[page + p] + step * 64);
            }
            for (int r = 0; r < R; r++) {
                const Signed query = with_signs(set1_quad(queries.quads[step * R + r]));
                for (int p = 0; p < pages; p++) acc[r][p] = dot4(acc[r][p], query, key[p]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < pages; p++)
                scores[r][page + p] = floats(acc[r][p]) * set1(queries.scales[r] * scales[page + p].keys);
    }
}

template <int R>
TF_INLINE void mix(const Tile& tile, const KeyBlock<int8_t>& block, const uint32_t (*quads)[block_tokens / 4],
                   const F16 (&shares)[R][block_pages]) {
    for (int column = 0; column < tile.dim; column += 16) {
        F16 mixed[R];
        for (int r = 0; r < R; r++) mixed[r] = load(tile.mixed + r * tile.dim + column);
        for (int page = 0; page < block_pages; page++) {
            const int8_t* values = block.values[page] + column * 4;
            I16 acc[R] = {};
            for (int step = 0; step < page_size / 4; step++, values += tile.dim * 4) {
                const Quads value = load_quads(values);
                fetch(values + (block.values_ahead[page] - block.values[page]));
                for (int r = 0; r < R; r++)
                    acc[r] = dot4_unsigned(acc[r], set1_quad(quads[r][page * page_size / 4 + step]), value);
            }
            for (int r = 0; r < R; r++) mixed[r] = fma(floats(acc[r]), shares[r][page], mixed[r]);
        }
        for (int r = 0; r < R; r++) store(tile.mixed + r * tile.dim + column, mixed[r]);
    }
}

/// `page`: where the block begins in the split.
template <int R>
void attend_int8(const Tile& tile, const Int8Queries& queries, const KeyBlock<int8_t>& block, const PageScales* scales,
                 int page) {
    F16 scores[R][block_pages];
    score<R>(queries, tile.dim, block, scales, scores);
    alignas(64) uint32_t quads[R][block_tokens / 4];
    F16 shares[R][block_pages];  // what the integers of a page are multiples of
    for (int r = 0; r < R; r++) {
        F16(&s)[block_pages] = scores[r];
        const F16 top = max(max(s[0], s[1]), max(s[2], s[3]));
        if (any_above(top, tile.most[r])) raise(tile, r, top);
        const F16 most = set1(reduce_max(top)), largest = weight(most, tile, r);
        for (int p = 0; p < block_pages; p++) {
            const F16 of_largest = exp2((s[p] - most) * set1(tile.scale));
            store_int8(reinterpret_cast<int8_t*>(quads[r]) + p * page_size, of_largest * set1(int8_largest));
            s[p] = of_largest * largest;
            shares[r][p] = largest * set1(scales[p].values / int8_largest);
        }
        count(tile, r, s, page);
    }
    mix<R>(tile, block, quads, shares);
}

}  // namespace triforce::TF_LEVEL
