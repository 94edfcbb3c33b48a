// One block of int8 copies of pages against the few queries of a tile. Each query sees the whole block.
//
// As key_block.hpp, in exact integers. Each query is rounded to int8 with a scale of its own. Its weights of a block
// are rounded to integers of at most 127, also with a scale. Products of integers and scales are summed in float32.
#pragma once

#include "key_block.hpp"

namespace triforce::TF_LEVEL {

/// The queries of a tile as int8: quads [dim / 4][height], and the scale of each query.
struct Int8Queries {
    const PackedWord* quads;
    const IntegerQuery* integers;
};

template <class T, int R>
TF_INLINE void add_values(const Tile<T>& tile, const KeyBlock<int8_t>& block, const uint32_t (*quads)[block_tokens / 4],
                   const F16 (&scales)[R][block_pages]) {
    for (int column = 0; column < tile.dim; column += 16) {
        F16 sum[R];
        for (int r = 0; r < R; r++) sum[r] = load(tile.acc + r * tile.dim + column);
        for (int page = 0; page < block_pages; page++) {
            const int8_t* values = block.values[page] + column * 4;
            I16 acc[R] = {};
            for (int step = 0; step < page_size / 4; step++, values += tile.dim * 4) {
                const Quads value = load_quads(values);
                prefetch(values + (block.values_ahead[page] - block.values[page]));
                for (int r = 0; r < R; r++)
                    acc[r] = dot4_unsigned(acc[r], set1_quad(quads[r][page * page_size / 4 + step]), value);
            }
            for (int r = 0; r < R; r++) sum[r] = add_product(sum[r], floats(acc[r]), scales[r][page]);
        }
        for (int r = 0; r < R; r++) store(tile.acc + r * tile.dim + column, sum[r]);
    }
}

/// Attends to a block of int8 copies. page: index of the block's first page in the split.
template <class T, int R>
void attend_int8(const Tile<T>& tile, const Int8Queries& queries, const KeyBlock<int8_t>& block,
                 const PageScales* scales, int page) {
    I16 products[R][block_pages];
    score<int8_t, R>(queries.quads, R, tile.dim, block, products);
    alignas(64) uint32_t quads[R][block_tokens / 4];
    F16 value_scales[R][block_pages];  // of the products of integer weights and values
    for (int r = 0; r < R; r++) {
        F16 s[block_pages];
        for (int p = 0; p < block_pages; p++) {
            const F16 scale = set1(queries.integers[r].scale * scales[p].keys * tile.scale);
            s[p] = floats(products[r][p]) * scale;
        }
        cap_scores(tile, s);
        const F16 top = max(max(s[0], s[1]), max(s[2], s[3]));
        raise_shift(tile, r, top);
        const F16 block_max = set1(reduce_max(top)), largest = weight(block_max, tile, r);
        for (int p = 0; p < block_pages; p++) {
            const F16 relative_weight = exp2(s[p] - block_max);
            store_int8(reinterpret_cast<int8_t*>(quads[r]) + p * page_size, relative_weight * set1(int8_largest));
            s[p] = relative_weight * largest;
            value_scales[r][p] = largest * set1(scales[p].values / int8_largest);
        }
        add_weights(tile, r, s, page);
    }
    add_values<T, R>(tile, block, quads, value_scales);
}

}  // namespace triforce::TF_LEVEL
