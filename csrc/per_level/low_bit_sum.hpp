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
constexpr int tallest_low_bit = 8;
constexpr int low_bit_columns[tallest_low_bit + 1] = {0, 4, 4, 2, 2, 2, 2, 1, 1};
#else
constexpr int tallest_low_bit = 4;
constexpr int low_bit_columns[tallest_low_bit + 1] = {0, 1, 1, 1, 1};
#endif
// Tiles that read an unpacked panel: rows, and columns.
#if TF_SIMD_AVX512
constexpr int tallest_of_a_panel = 8, panel_columns = 2;
#elif TF_SIMD_AVX2
constexpr int tallest_of_a_panel = 6, panel_columns = 2;  // twelve sums; two columns' codes, an input and a product
#else
constexpr int tallest_of_a_panel = 4, panel_columns = 1;
#endif
constexpr int pairs_of_a_vector = 4;  // pairs of inputs in a vector of codes

/// The rounded rows of a product's input. Every eight inputs of int16 are in the order 0, 2, 4, 6, 1, 3, 5, 7.
template <class In>
struct GroupedRows {
    const int8_t* data;
    int64_t stride, inputs;
    const In* row(int64_t m) const { return reinterpret_cast<const In*>(data + m * stride); }
    const GroupInput* groups(int64_t m) const { return reinterpret_cast<const GroupInput*>(row(m) + inputs); }
};
/// Registers of a group's codes for one column, and broadcasts of a row's inputs that meet them.
template <class In>
constexpr int group_words = group_size * sizeof(In) / 4;

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

/// The codes of step `step` of a group, a byte each.
template <int bits, int step>
TF_INLINE Codes quad_codes(const uint8_t* group) {
    if constexpr (bits == 8) {
        const Codes codes = load_codes(group + step * vector_bytes);
        return signed_byte_offset ? flipped_signs(codes) : codes;
    } else if constexpr (bits == 4) {
        return masked(shifted<step % 2 * -4>(load_codes(group + step / 2 * vector_bytes)), 0x0f0f);
    } else {
        return step_codes<bits, step>(group);
    }
}

/// The codes that meet broadcast `at` of a group's inputs.
template <class In, int bits, int at>
TF_INLINE Codes group_codes(const uint8_t* group) {
    if constexpr (sizeof(In) == 1)
        return quad_codes<bits, at>(group);
    else
        return pair_codes<bits, at / pairs_of_a_vector, at % pairs_of_a_vector>(group);
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
    int64_t groups(Format format) const { return scales / code_bytes(parts(format)); }
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

/// Codes and scales of C columns, read from packed blocks.
template <Format F, class In, int C>
struct PackedColumns {
    const Columns& w;
    const uint8_t* from[C];

    TF_INLINE void begin(int64_t g) {
        for (int c = 0; c < C; c++) {
            const uint8_t* block = w.block(c);
            if (w.part(c) == 0) prefetch_group<F>(block, g, w.scales, C * w.block_bytes / parts_of_a_block);
            from[c] = block + g * code_bytes(parts(F)) + w.part(c) * lanes * 4;
        }
    }
    template <int at>
    TF_INLINE Codes codes(int64_t, int c) const {
        return group_codes<In, parts(F).bits, at>(from[c]);
    }
    TF_INLINE GroupScales scales(int64_t g, int c) const {
        return group_scales<F>(w.block(c) + w.scales, g, w.part(c));
    }
};

/// Codes and scales of some groups of C columns, unpacked once for all rows.
template <class In, int C>
struct UnpackedPanel {
    static constexpr int words = group_words<In>;
    static constexpr int64_t groups = (16 << 10) / (words * C * sizeof(Codes));  // half a first-level cache, or less
    Codes code[groups][words][C];
    GroupScales scale[groups][C];
    int64_t first;

    template <Format F>
    void unpack(const Columns& w, int64_t first_group, int64_t last) {
        PackedColumns<F, In, C> packed{w, {}};
        first = first_group;
        for (int64_t g = first; g < last; g++) {
            packed.begin(g);
            unrolled(std::make_integer_sequence<int, words>{}, [&](auto at) TF_INLINED {
                for (int c = 0; c < C; c++) code[g - first][at][c] = packed.template codes<at>(g, c);
            });
            for (int c = 0; c < C; c++) scale[g - first][c] = packed.scales(g, c);
        }
    }
    TF_INLINE void begin(int64_t) {}
    template <int at>
    TF_INLINE Codes codes(int64_t g, int c) const {
        return code[g - first][at][c];
    }
    TF_INLINE const GroupScales& scales(int64_t g, int c) const { return scale[g - first][c]; }
};

/// What the sums of a format depend on, besides its codes and scales.
template <class TileSums, int code_offset, int scaled_parts, bool has_minimum>
struct Terms {
    typedef TileSums Sums;
    static constexpr int offset = code_offset, halves = scaled_parts;
    static constexpr bool minimum = has_minimum;
};
template <Format F, class In>
using TermsOf = Terms<TileSums<In, parts(F).bits>,
                      parts(F).offset + (sizeof(In) == 1 && parts(F).bits == 8 ? signed_byte_offset : 0),
                      parts(F).scales == Scales::super_half ? 2 : 1, parts(F).minimum()>;

/// Adds groups [first, last) of C columns to the sums of M rows, from row `m0` on.
template <class T, class In, int M, int C, class Source>
void low_bit_tile(Source& source, const GroupedRows<In>& x, int64_t m0, int64_t first, int64_t last, float* sums,
                  int64_t stride) {
    typedef typename T::Sums Sums;
    constexpr int words = group_words<In> / T::halves, steps = std::min(words, Sums::most_steps);
    Row acc[M][C];
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++) acc[m][c] = first ? load_row(sums + m * stride + c * lanes) : set1_row(0);
    for (int64_t g = first; g < last; g++) {
        source.begin(g);
        unrolled(std::make_integer_sequence<int, T::halves>{}, [&](auto half) TF_INLINED {
            Ints dots[M][C];
            for (int m = 0; m < M; m++) {
                Ints begin = zeros();
                if constexpr (T::halves == 2) begin = offset_term<T::offset, 2, half>(x.groups(m0 + m)[g]);
                for (int c = 0; c < C; c++) dots[m][c] = begin;
            }
            unrolled(std::make_integer_sequence<int, words / steps>{}, [&](auto run) TF_INLINED {
                typename Sums::Sum partial[M][C];
                for (int m = 0; m < M; m++)
                    for (int c = 0; c < C; c++) partial[m][c] = Sums::start(dots[m][c]);
                unrolled(std::make_integer_sequence<int, steps>{}, [&](auto step) TF_INLINED {
                    constexpr int at = half * words + run * steps + step;
                    Codes codes[C];
                    for (int c = 0; c < C; c++) codes[c] = source.template codes<at>(g, c);
                    for (int m = 0; m < M; m++) {
                        const Codes input = broadcast(x.row(m0 + m) + g * group_size + at * (4 / sizeof(In)));
                        for (int c = 0; c < C; c++) partial[m][c] = Sums::dot(partial[m][c], codes[c], input);
                    }
                });
                for (int m = 0; m < M; m++)
                    for (int c = 0; c < C; c++) dots[m][c] = Sums::total(dots[m][c], partial[m][c]);
            });
            for (int c = 0; c < C; c++) {
                const GroupScales& s = source.scales(g, c);
                for (int m = 0; m < M; m++) {
                    const GroupInput& group_input = x.groups(m0 + m)[g];
                    Ints sum = dots[m][c];
                    if constexpr (T::halves == 1 && T::offset != 0)  // last, because the chain of a group is long
                        sum = sum + offset_term<T::offset, 1, half>(group_input);
                    acc[m][c] = fma(s.scale[half], floats(sum) * set1_row(group_input.scale), acc[m][c]);
                    if constexpr (T::minimum) acc[m][c] = fma(s.minimum, set1_row(group_input.sum), acc[m][c]);
                }
            }
        });
    }
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++) store_row(sums + m * stride + c * lanes, acc[m][c]);
}

/// Calls body with the compile-time number of rows: `rows`, from `least` to M.
template <int M, int least, class Body>
TF_INLINE void for_rows(int rows, Body body) {
    if constexpr (M > least)
        if (rows < M) return for_rows<M - 1, least>(rows, body);
    body(std::integral_constant<int, M>{});
}

/// The sums of M rows, from row `top` on, for C columns. The tile unpacks its codes.
template <Format F, int M, int C, class In>
TF_INLINE void sum_tile(const Columns& w, const GroupedRows<In>& x, int top, float* sums, int64_t stride) {
    PackedColumns<F, In, C> packed{w, {}};
    sums += top * stride + w.first * lanes;
    low_bit_tile<TermsOf<F, In>, In, M, C>(packed, x, top, 0, w.groups(F), sums, stride);
}

/// The sums of few rows, from row `top` on, for columns from w.first on.
template <Format F, class In>
void sum_rows(Columns w, int columns, const GroupedRows<In>& x, int top, int rows, float* sums, int64_t stride) {
    for_rows<tallest_low_bit, 1>(rows, [&](auto height) TF_INLINED {
        constexpr int C = low_bit_columns[height];
        for (; w.first + C <= columns; w.first += C) sum_tile<F, height, C>(w, x, top, sums, stride);
    });
    for (; w.first < columns; w.first++)  // only the last columns of a matrix are so few
        for (int row = top; row < top + rows; row++) sum_tile<F, 1, 1>(w, x, row, sums, stride);
}

/// Calls body(row, count) for tiles of nearly the same number of rows, at most `tallest`.
template <class Body>
TF_INLINE void each_tile(int rows, int tallest, Body body) {
    const int tiles = (rows + tallest - 1) / tallest;
    for (int t = 0; t < tiles; t++) body(rows * t / tiles, rows * (t + 1) / tiles - rows * t / tiles);
}

/// The sums of many rows for the columns of a panel, from w.first on. Tiles share the codes.
template <Format F, class In>
void sum_panels(const Columns& w, const GroupedRows<In>& x, int rows, float* sums, int64_t stride) {
    constexpr int tallest = tallest_of_a_panel, C = panel_columns;
    alignas(64) UnpackedPanel<In, C> panel;
    for (int64_t g = 0; g < w.groups(F); g += panel.groups) {
        const int64_t last = std::min(g + panel.groups, w.groups(F));
        panel.template unpack<F>(w, g, last);
        each_tile(rows, tallest, [&](int row, int count) {
            for_rows<tallest, tallest / 2>(count, [&](auto height) TF_INLINED {
                low_bit_tile<TermsOf<F, In>, In, height, C>(panel, x, row, g, last,
                                                            sums + row * stride + w.first * lanes, stride);
            });
        });
    }
}

template <Format F, class In>
void low_bit_sum(const Linear& l, int64_t top, int rows, int64_t first, int blocks, float* sums) {
    constexpr FormatParts f = parts(F);
    const GroupedRows<In> x{static_cast<const int8_t*>(l.x) + top * l.x_stride, l.x_stride, l.weights.inputs};
    const int64_t groups = l.weights.inputs / group_size, bytes = block_bytes(f, l.weights.inputs);
    Columns w{static_cast<const uint8_t*>(l.weights.data) + first * bytes, bytes, groups * code_bytes(f), 0};
    const int64_t stride = blocks * block_size;
    const int columns = blocks * parts_of_a_block;
    if (rows > 2 * tallest_low_bit)  // else a panel takes longer than unpacking again
        for (; w.first + panel_columns <= columns; w.first += panel_columns) sum_panels<F>(w, x, rows, sums, stride);
    each_tile(rows, rows > tallest_low_bit ? tallest_of_a_panel : tallest_low_bit,
              [&](int row, int count) { sum_rows<F>(w, columns, x, row, count, sums, stride); });
}

/// Writes the sums of `rows` rows and some blocks, (rows, blocks * 16), for inputs rounded to In.
template <class In>
void sum_low_bit(const Linear& l, int64_t top, int rows, int64_t first, int blocks, float* sums) {
    switch (l.weights.format) {
#define TF_SUM(format) \
    case Format::format: return low_bit_sum<Format::format, In>(l, top, rows, first, blocks, sums);
        TF_SUM(q4_0) TF_SUM(q4_1) TF_SUM(q5_0) TF_SUM(q5_1) TF_SUM(q8_0) TF_SUM(q4_k) TF_SUM(q5_k) TF_SUM(q6_k)
#undef TF_SUM
        case Format::none: break;
    }
}

void sum_low_bit_int16(const Linear& l, int64_t top, int rows, int64_t first, int blocks, bool, float* sums);
void sum_low_bit_int8(const Linear& l, int64_t top, int rows, int64_t first, int blocks, bool, float* sums);

}  // namespace triforce::TF_LEVEL
