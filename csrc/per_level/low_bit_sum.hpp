// Sums of products of low-bit weights, in register tiles.
#pragma once

#include <algorithm>
#include <utility>

#include "../linear.hpp"
#include "low_bit_simd.hpp"

namespace triforce::TF_LEVEL {

// Columns of a register tile, by its number of rows. A column has the outputs of one register. With few rows several
// blocks are read at once, because several streams use more of the memory's bandwidth.
#if TF_SIMD_AVX512
constexpr int tallest_low_bit = 8;  // float sums of eight rows spill, which costs less than a second tile does
constexpr int low_bit_columns[tallest_low_bit + 1] = {0, 4, 4, 4, 2, 2, 2, 2, 2};
#elif TF_SIMD_AVX2
constexpr int tallest_low_bit = 6;  // twelve sums leave four registers for two columns' codes, an input and a product
constexpr int low_bit_columns[tallest_low_bit + 1] = {0, 4, 4, 2, 2, 2, 2};
#else
constexpr int tallest_low_bit = 4;
constexpr int low_bit_columns[tallest_low_bit + 1] = {0, 1, 1, 1, 1};
#endif
constexpr int64_t low_bit_panel = 16;  // groups whose codes stay in L1 for all tiles
constexpr int pairs_of_a_vector = 4;   // pairs of inputs in a vector of codes

/// The rounded rows of a product's input. Every eight inputs are in the order 0, 2, 4, 6, 1, 3, 5, 7.
struct GroupedRows {
    const int8_t* data;
    int64_t stride, inputs;
    const int16_t* row(int64_t m) const { return reinterpret_cast<const int16_t*>(data + m * stride); }
    const GroupInput* groups(int64_t m) const { return reinterpret_cast<const GroupInput*>(row(m) + inputs); }
};

/// Rounds a group of inputs. Returns its scale and sums.
template <class T>
GroupInput quantise_group(const T* x, int16_t* to) {
    const float scale = scale_of<int16_t>(x, group_size);
    quantise(x, group_size, scale, to);
    const int32_t first = reorder(to), all = first + reorder(to + group_size / 2);
    return {scale, scale * static_cast<float>(all), -all, -first};
}

/// The codes, of 5 or 6 bits, of a step's four inputs, a byte each.
template <int bits, int step>
TF_INLINE Codes step_codes(const uint8_t* group) {
    const Codes nibbles = masked(shifted<step % 2 * -4>(load_codes(group + step / 2 * vector_bytes)), 0x0f0f);
    constexpr int plane = bits == 5 ? 4 : 4 + step / 4, moved = bits == 5 ? 4 - step : 4 - 2 * (step % 4);
    const Codes above = shifted<moved>(load_codes(group + plane * vector_bytes));
    return with_bits(nibbles, above, bits == 5 ? 0x1010 : 0x3030);
}

/// The codes of pair `i` of vector `v` of a group. Steps 2v and 2v + 1 have bytes for eight inputs: 0 to 3 and 4 to 7.
/// The lower bytes of a step's two words are its inputs 0 and 2, the upper bytes its inputs 1 and 3. So pairs 0 to 3
/// are inputs (0, 2), (4, 6), (1, 3) and (5, 7).
template <int bits, int v, int i>
TF_INLINE Codes pair_codes(const uint8_t* group) {
    constexpr int upper = i / 2, step = 2 * v + i % 2;
    if constexpr (bits == 8) {
        const Codes both = load_codes(group + step * vector_bytes);
        return signed_upper_bytes(upper ? both : shifted<8>(both));
    } else if constexpr (bits == 4) {
        const Codes codes = shifted<-4 * i>(load_codes(group + v * vector_bytes));
        return i < 3 ? masked(codes, 15) : codes;
    } else {
        const Codes codes = step_codes<bits, step>(group);
        return upper ? shifted<-8>(codes) : masked(codes, 255);
    }
}

/// Scales of a group for the outputs of a register, or scales of its halves; and minima of the group.
struct GroupScales {
    Row scale[2], minimum;
};

template <Format F>
TF_INLINE GroupScales group_scales(const uint8_t* scales, int64_t group, int part) {
    constexpr FormatParts f = parts(F);
    GroupScales s{};
    if constexpr (!f.super()) {
        const uint8_t* at = scales + group * scale_bytes(f) + part * lanes * 2;
        s.scale[0] = load_halves(at);
        if constexpr (f.minimum()) s.minimum = load_halves(at + 32);
    } else {
        const uint8_t* block = scales + group / super_groups * scale_bytes(f);
        const uint8_t* small = block + (f.minimum() ? 64 : 32) + group % super_groups * 32 + part * lanes;
        const Row scale = load_halves(block + part * lanes * 2);
        s.scale[0] = scale * load_bytes<f.scales == Scales::super_half>(small);
        if constexpr (f.minimum())
            s.minimum = -load_halves(block + 32 + part * lanes * 2) * load_bytes<false>(small + 16);
        else
            s.scale[1] = scale * load_bytes<true>(small + 16);
    }
    return s;
}

/// The term that the offset of codes, a power of two, adds to the sum of a group or of half a group.
template <int offset, int halves, int half>
TF_INLINE Ints offset_term(const GroupInput& group) {
    const Ints negated_sum = set1_int(halves == 2 && half == 0 ? group.negated_half_sum : group.negated_sum);
    return shifted_left(half ? negated_sum - set1_int(group.negated_half_sum) : negated_sum, __builtin_ctz(offset));
}

/// Blocks of a product, and the first column of a tile in them.
struct Columns {
    const uint8_t* blocks;
    int64_t block_bytes, scales;  // size of a block; offset of scales in a block, in bytes
    int first;

    const uint8_t* block(int c) const { return blocks + (first + c) / parts_of_a_block * block_bytes; }
    int part(int c) const { return (first + c) % parts_of_a_block; }
};

/// Prefetches the codes and scales of a group that comes soon after group `g` of a block. After the last group the
/// first groups of the column's next block follow, `to_next` bytes ahead. scales: offset of scales in a block.
/// Prefetches go into the second-level cache, because the first level takes fewer requests, which makes reads slower on
/// Zen 4.
template <Format F>
TF_INLINE void prefetch_group(const uint8_t* block, int64_t g, int64_t scales, int64_t to_next) {
    constexpr FormatParts f = parts(F);
    constexpr int64_t codes = code_bytes(f), ahead = (2048 + codes - 1) / codes;
    const int64_t groups = scales / codes;
    if ((g += ahead) >= groups) g -= groups, block += to_next;
    for (int64_t i = 0; i < codes; i += 64) __builtin_prefetch(block + g * codes + i, 0, 2);
    __builtin_prefetch(block + scales + g * scale_bytes(f) * group_size / f.file_inputs(), 0, 2);
}

/// Adds groups [first, last) to the sums of M rows, from row `m0` on, in C columns.
template <Format F, int M, int C>
void low_bit_tile(const Columns& w, const GroupedRows& x, int64_t m0, int64_t first, int64_t last, float* sums,
                  int64_t stride) {
    constexpr FormatParts f = parts(F);
    constexpr int halves = f.scales == Scales::super_half ? 2 : 1, pairs = group_size / 2 / halves;
    sums += w.first * lanes;
    Row acc[M][C];
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++) acc[m][c] = first ? load_row(sums + m * stride + c * lanes) : set1_row(0);
    for (int64_t g = first; g < last; g++) {
        const uint8_t* from[C];
        for (int c = 0; c < C; c++) {
            from[c] = w.block(c) + g * code_bytes(f);
            if (w.part(c) == 0) prefetch_group<F>(w.block(c), g, w.scales, C * w.block_bytes / parts_of_a_block);
            from[c] += w.part(c) * lanes * 4;
        }
        unrolled(std::make_integer_sequence<int, halves>{}, [&](auto half) TF_INLINED {
            Ints dots[M][C];
            for (int m = 0; m < M; m++) {
                Ints begin = zeros();
                if constexpr (halves == 2) begin = offset_term<f.offset, halves, half>(x.groups(m0 + m)[g]);
                for (int c = 0; c < C; c++) dots[m][c] = begin;
            }
            unrolled(std::make_integer_sequence<int, pairs>{}, [&](auto pair) TF_INLINED {
                constexpr int at = half * pairs + pair;
                Codes codes[C];
                for (int c = 0; c < C; c++)
                    codes[c] = pair_codes<f.bits, at / pairs_of_a_vector, at % pairs_of_a_vector>(from[c]);
                for (int m = 0; m < M; m++) {
                    const Codes input = broadcast(x.row(m0 + m) + g * group_size + at * 2);
                    for (int c = 0; c < C; c++) dots[m][c] = dot2(dots[m][c], codes[c], input);
                }
            });
            for (int c = 0; c < C; c++) {
                const GroupScales s = group_scales<F>(w.block(c) + w.scales, g, w.part(c));
                for (int m = 0; m < M; m++) {
                    const GroupInput& group_input = x.groups(m0 + m)[g];
                    Ints sum = dots[m][c];
                    if constexpr (halves == 1 && f.offset != 0)  // last, because the chain of a whole group is long
                        sum = sum + offset_term<f.offset, halves, half>(group_input);
                    acc[m][c] = fma(s.scale[half], floats(sum) * set1_row(group_input.scale), acc[m][c]);
                    if constexpr (f.minimum()) acc[m][c] = fma(s.minimum, set1_row(group_input.sum), acc[m][c]);
                }
            }
        });
    }
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++) store_row(sums + m * stride + c * lanes, acc[m][c]);
}

/// `low_bit_tile` for M rows and all columns.
template <Format F, int M>
void low_bit_rows(Columns w, int columns, const GroupedRows& x, int64_t m0, int64_t first, int64_t last, float* sums,
                  int64_t stride) {
    constexpr int C = low_bit_columns[M];
    for (; w.first + C <= columns; w.first += C) low_bit_tile<F, M, C>(w, x, m0, first, last, sums, stride);
    for (; w.first < columns; w.first++) low_bit_tile<F, M, 1>(w, x, m0, first, last, sums, stride);
}

template <Format F, int M = tallest_low_bit>
TF_INLINE void low_bit_rows(int rows, const Columns& w, int columns, const GroupedRows& x, int64_t m0, int64_t first,
                            int64_t last, float* sums, int64_t stride) {
    if constexpr (M > 1)
        if (rows < M) return low_bit_rows<F, M - 1>(rows, w, columns, x, m0, first, last, sums, stride);
    low_bit_rows<F, M>(w, columns, x, m0, first, last, sums, stride);
}

/// Writes the sums of `rows` rows and some blocks, (rows, blocks * 16).
template <Format F>
void low_bit_sum(const Linear& l, int64_t top, int rows, int64_t first, int blocks, float* sums) {
    constexpr FormatParts f = parts(F);
    const GroupedRows x{static_cast<const int8_t*>(l.x) + top * l.x_stride, l.x_stride, l.weights.inputs};
    const int64_t groups = l.weights.inputs / group_size, bytes = block_bytes(f, l.weights.inputs);
    const Columns w{static_cast<const uint8_t*>(l.weights.data) + first * bytes, bytes, groups * code_bytes(f), 0};
    const int tiles = (rows + tallest_low_bit - 1) / tallest_low_bit;
    const int64_t panel = tiles > 1 ? low_bit_panel : groups, stride = blocks * block_size;
    for (int64_t g = 0; g < groups; g += panel)
        for (int t = 0; t < tiles; t++) {
            const int row = rows * t / tiles, next = rows * (t + 1) / tiles;
            low_bit_rows<F>(next - row, w, blocks * parts_of_a_block, x, row, g, std::min(g + panel, groups),
                            sums + row * stride, stride);
        }
}

/// `low_bit_sum` for the format of the weights.
inline void sum_low_bit(const Linear& l, int64_t top, int rows, int64_t first, int blocks, bool, float* sums) {
    switch (l.weights.format) {
#define TF_SUM(format) \
    case Format::format: return low_bit_sum<Format::format>(l, top, rows, first, blocks, sums);
        TF_SUM(q4_0) TF_SUM(q4_1) TF_SUM(q5_0) TF_SUM(q5_1) TF_SUM(q8_0) TF_SUM(q4_k) TF_SUM(q5_k) TF_SUM(q6_k)
#undef TF_SUM
        case Format::none: break;
    }
}

}  // namespace triforce::TF_LEVEL
