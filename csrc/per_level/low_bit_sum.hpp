// Sums of products of low-bit weights, in register tiles.
#pragma once

#include "../linear.hpp"
#include "low_bit_simd.hpp"

namespace triforce::TF_LEVEL {

#if TF_SIMD_AVX512
constexpr int tallest_low_bit = 8;  // rows of a tile: with the codes of a group they fill the registers
#else
constexpr int tallest_low_bit = 4;
#endif
constexpr int64_t low_bit_panel = 64;  // groups whose codes stay in L1 for all tiles

/// The rows of a product, rounded.
struct GroupedRows {
    const int8_t* codes;
    int64_t stride, inputs;
    const int8_t* row(int64_t m) const { return codes + m * stride; }
    const GroupInput* groups(int64_t m) const { return reinterpret_cast<const GroupInput*>(row(m) + inputs); }
};

/// Rounds a group of inputs, and returns what a product knows of it.
template <class T>
GroupInput quantise_group(const T* x, int8_t* to) {
    const float scale = scale_of(x, group_size);
    quantise(x, group_size, scale, to);
    int32_t sums[2] = {};
    for (int i = 0; i < group_size; i++) sums[i / 16] += to[i];
    const int32_t all = sums[0] + sums[1];
    return {scale, scale * static_cast<float>(all), all, sums[0]};
}

/// The codes of a group, one register a step.
template <int bits>
TF_INLINE void unpack(const uint8_t* from, Codes (&codes)[group_steps]) {
    if constexpr (bits == 8) {
        for (int s = 0; s < group_steps; s++) codes[s] = biased(load_codes(from + s * vector_bytes));
        return;
    }
    for (int v = 0; v < group_steps / 2; v++) {
        const Codes both = load_codes(from + v * vector_bytes);
        codes[2 * v] = lower_nibbles(both), codes[2 * v + 1] = upper_nibbles(both);
    }
    if constexpr (bits == 5) {
        const Codes plane = load_codes(from + 4 * vector_bytes);
        codes[0] = with_bits<4>(codes[0], plane, 16), codes[1] = with_bits<3>(codes[1], plane, 16);
        codes[2] = with_bits<2>(codes[2], plane, 16), codes[3] = with_bits<1>(codes[3], plane, 16);
        codes[4] = with_bits<0>(codes[4], plane, 16), codes[5] = with_bits<-1>(codes[5], plane, 16);
        codes[6] = with_bits<-2>(codes[6], plane, 16), codes[7] = with_bits<-3>(codes[7], plane, 16);
    }
    if constexpr (bits == 6)
        for (int p = 0; p < 2; p++) {
            const Codes plane = load_codes(from + (4 + p) * vector_bytes);
            codes[4 * p] = with_bits<4>(codes[4 * p], plane, 48);
            codes[4 * p + 1] = with_bits<2>(codes[4 * p + 1], plane, 48);
            codes[4 * p + 2] = with_bits<0>(codes[4 * p + 2], plane, 48);
            codes[4 * p + 3] = with_bits<-2>(codes[4 * p + 3], plane, 48);
        }
}

/// Scales of a group of some outputs, or of its halves, and its minima.
struct GroupScales {
    Row scale[2], minimum;
};

/// `part`: of the sixteen outputs. `large`: the scale and minimum of the super-block, read with its first group.
template <Format F>
TF_INLINE GroupScales group_scales(const uint8_t* scales, int64_t group, int part, Row (&large)[2]) {
    constexpr FormatParts f = parts(F);
    GroupScales s{};
    if constexpr (!f.super()) {
        const uint8_t* at = scales + group * scale_bytes(f) + part * lanes * 2;
        s.scale[0] = load_halves(at);
        if constexpr (f.minimum()) s.minimum = load_halves(at + 32);
    } else {
        const uint8_t* block = scales + group / super_groups * scale_bytes(f);
        if (group % super_groups == 0) {
            large[0] = load_halves(block + part * lanes * 2);
            if constexpr (f.minimum()) large[1] = -load_halves(block + 32 + part * lanes * 2);
        }
        const uint8_t* small = block + (f.minimum() ? 64 : 32) + group % super_groups * 32 + part * lanes;
        s.scale[0] = large[0] * load_bytes<f.scales == Scales::super_half>(small);
        if constexpr (f.minimum())
            s.minimum = large[1] * load_bytes<false>(small + 16);
        else
            s.scale[1] = large[0] * load_bytes<true>(small + 16);
    }
    return s;
}

/// Adds groups [first, last) to the sums of M rows, from row `m0` on, of some of a block's outputs.
template <Format F, int M>
void low_bit_tile(const uint8_t* block, const uint8_t* scales, int part, const GroupedRows& x, int64_t m0,
                  int64_t first, int64_t last, float* sums, int64_t stride) {
    constexpr FormatParts f = parts(F);
    constexpr int offset = f.bits == 8 ? bias : f.offset;
    constexpr int halves = f.scales == Scales::super_half ? 2 : 1, in_half = group_steps / halves;
    constexpr int64_t ahead = 2048;  // bytes
    Row acc[M], large[2]{};
    for (int m = 0; m < M; m++) acc[m] = first ? load_row(sums + m * stride + part * lanes) : set1_row(0);
    for (int64_t g = first; g < last; g++) {
        const uint8_t* from = block + g * code_bytes(f);
        Codes w[group_steps];
        unpack<f.bits>(from + part * lanes * 4, w);
        if (part == 0)
            for (int64_t i = 0; i < code_bytes(f); i += 64) __builtin_prefetch(from + ahead + i, 0, 3);
        const GroupScales s = group_scales<F>(scales, g, part, large);
        for (int h = 0; h < halves; h++) {
            Dot<f.bits> dots[M];
            for (int i = 0; i < in_half; i++)
                for (int m = 0; m < M; m++)
                    dots[m].add(w[h * in_half + i], broadcast(x.row(m0 + m) + g * group_size + (h * in_half + i) * 4), i);
            for (int m = 0; m < M; m++) {
                const GroupInput& of_row = x.groups(m0 + m)[g];
                Ints sum = dots[m].total();
                if constexpr (offset != 0) {
                    const int32_t codes = halves == 1 ? of_row.codes : h ? of_row.codes - of_row.first : of_row.first;
                    sum = less(sum, codes * offset);
                }
                acc[m] = fma(s.scale[h], floats(sum) * set1_row(of_row.scale), acc[m]);
                if constexpr (f.minimum()) acc[m] = fma(s.minimum, set1_row(of_row.sum), acc[m]);
            }
        }
    }
    for (int m = 0; m < M; m++) store_row(sums + m * stride + part * lanes, acc[m]);
}

template <Format F, int M = tallest_low_bit>
TF_INLINE void low_bit_rows(int rows, const uint8_t* block, const uint8_t* scales, const GroupedRows& x, int64_t m0,
                            int64_t first, int64_t last, float* sums, int64_t stride) {
    if constexpr (M > 1)
        if (rows < M) return low_bit_rows<F, M - 1>(rows, block, scales, x, m0, first, last, sums, stride);
    for (int part = 0; part < parts_of_a_block; part++)
        low_bit_tile<F, M>(block, scales, part, x, m0, first, last, sums, stride);
}

/// The sums of `rows` rows and some blocks, (rows, blocks * 16).
template <Format F>
void low_bit_sum(const Linear& l, int64_t top, int rows, int64_t first, int blocks, float* sums) {
    constexpr FormatParts f = parts(F);
    const Weights& w = l.weights;
    const GroupedRows x{static_cast<const int8_t*>(l.x) + top * l.x_stride, l.x_stride, w.inputs};
    const int64_t groups = w.inputs / group_size, stride = blocks * block_size;
    const int tiles = (rows + tallest_low_bit - 1) / tallest_low_bit;
    const int64_t panel = tiles > 1 ? low_bit_panel : groups;
    for (int b = 0; b < blocks; b++) {
        const uint8_t* block = static_cast<const uint8_t*>(w.data) + (first + b) * block_bytes(f, w.inputs);
        const uint8_t* scales = block + groups * code_bytes(f);
        for (int64_t g = 0; g < groups; g += panel)
            for (int t = 0; t < tiles; t++) {
                const int row = rows * t / tiles, next = rows * (t + 1) / tiles;
                low_bit_rows<F>(next - row, block, scales, x, row, g, g + panel < groups ? g + panel : groups,
                                sums + row * stride + b * block_size, stride);
            }
    }
}

/// The same for the format of the weights.
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
