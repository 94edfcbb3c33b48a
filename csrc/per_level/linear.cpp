#include "../linear.hpp"

#include "activation.hpp"
#include "low_bit_sum.hpp"
#include "tile.hpp"

namespace triforce::TF_LEVEL {
namespace {

struct Sums {  // for int8 weights: integers, stored in the bits of floats
    alignas(64) float values[linear_rows * group * block_size];
};

/// Multiplies the integer sums of int8 weights with the scales of rows and outputs.
void apply_scales(const Linear& l, float* sums, int64_t top, int rows, int64_t first, int blocks) {
    for (int m = 0; m < rows; m++) {
        float row_scale;
        const int8_t* x = static_cast<const int8_t*>(l.x) + (top + m) * l.x_stride;
        __builtin_memcpy(&row_scale, x + l.weights.inputs, sizeof row_scale);
        for (int b = 0; b < blocks; b++, sums += block_size)
            store(sums,
                  floats(load_ints(sums)) * (load(l.weights.scales + (first + b) * block_size) * set1(row_scale)));
    }
}

/// Writes activation(gate, up) of interleaved sums, rounded to T.
template <class T>
void finish_gate(const Linear& l, const float* sums, int64_t top, int rows, int64_t first, int blocks) {
    for (int m = 0; m < rows; m++) {
        T* y = static_cast<T*>(l.y) + (top + m) * l.y_stride + first / 2 * block_size;
        for (int b = 0; b < blocks; b += 2) {
            const float* sum = sums + (m * blocks + b) * block_size;
            F16 gate = load(sum), up = load(sum + block_size);
            if (l.bias) {
                const float* bias = l.bias + (first + b) * block_size;
                gate = gate + load(bias), up = up + load(bias + block_size);
            }
            store(y + b / 2 * block_size, gated(l.activation, gate, up));
        }
    }
}

/// Stores sums, or adds them to y.
void finish(const Linear& l, const float* sums, int64_t top, int rows, int64_t first, int blocks) {
    for (int m = 0; m < rows; m++) {
        float* y = static_cast<float*>(l.y) + (top + m) * l.y_stride;
        for (int b = 0; b < blocks; b++) {
            const int64_t at = (first + b) * block_size;
            const int lanes = static_cast<int>(l.weights.outputs - at);
            F16 sum = load(sums + (m * blocks + b) * block_size);
            if (l.bias) sum = sum + load(l.bias + at);
            if (l.epilogue == Epilogue::add) sum = load_n(y + at, lanes) + sum;
            store_n(y + at, sum, lanes);
        }
    }
}

/// Writes the sums of some blocks for weights of type W, multiplied by the scales of int8 weights.
template <class W>
void sum_all(const Linear& l, int64_t top, int rows, int64_t first, int blocks, bool last, float* sums) {
    sum<W>(l, top, rows, first, blocks, last, sums);
    if constexpr (sizeof(W) == 1) apply_scales(l, sums, top, rows, first, blocks);
}

/// The number of blocks whose sums are made together. For few rows of low-bit weights, whose tiles differ, this is as
/// many as `Sums` has room for.
int blocks_at_once(const Linear& l, int rows) {
    if (l.weights.format != Format::none)
        return rows <= tallest_low_bit ? linear_rows * group / tallest_low_bit : group;
    return wide<float>(rows) == widest ? widest : group;
}

/// T: type of x and of rounded outputs.
template <class T, class Sum>
void run_as(const Linear& l, int64_t top, int rows, int64_t first, int64_t last, Sum sum) {
    Sums sums;
    const int step = blocks_at_once(l, rows);
    for (int64_t block = first; block < last; block += step) {
        const int blocks = static_cast<int>(last - block < step ? last - block : step);
        sum(l, top, rows, block, blocks, block + step >= last, sums.values);
        if (l.epilogue == Epilogue::gate)
            finish_gate<T>(l, sums.values, top, rows, block, blocks);
        else
            finish(l, sums.values, top, rows, block, blocks);
    }
}

void run(const Linear& l, int64_t top, int64_t bottom, int64_t first, int64_t last) {
    const bool narrow = l.weights.type == Type::bf16;
    const bool int8_inputs = l.rounding() == Rounding::by_group_int8;
    const auto sum = l.weights.format != Format::none    ? (int8_inputs ? sum_low_bit_int8 : sum_low_bit_int16)
                     : l.weights.scales                  ? sum_all<int8_t>
                     : l.weights.numbers == Type::bf16   ? sum_all<bf16>
                     : l.weights.numbers == Type::half   ? sum_half
                                                         : sum_all<float>;
    const auto run = narrow ? run_as<bf16, decltype(sum)> : run_as<float, decltype(sum)>;
    run(l, top, static_cast<int>(bottom - top), first, last, sum);
}

template <class T>
void quantise_as(const Linear& l, int64_t row, int8_t* to) {
    const T* x = static_cast<const T*>(l.x) + row * l.x_stride;
    const float scale = scale_of<int8_t>(x, l.weights.inputs);
    quantise(x, l.weights.inputs, scale, to);
    __builtin_memcpy(to + l.weights.inputs, &scale, sizeof scale);
}

/// Puts codes of half a group into the order of their layout. Returns their sum.
int32_t arranged_sum(int16_t* codes) { return reorder(codes); }
int32_t arranged_sum(const int8_t* codes) {
    int32_t sum = 0;
    for (int i = 0; i < group_size / 2; i++) sum += codes[i];
    return sum;
}

template <class T, class In>
void quantise_groups(const Linear& l, int64_t row, int8_t* to) {
    const T* x = static_cast<const T*>(l.x) + row * l.x_stride;
    const int64_t inputs = l.weights.inputs;
    In* codes = reinterpret_cast<In*>(to);
    auto* groups = reinterpret_cast<GroupInput*>(codes + inputs);
    for (int64_t i = 0; i < inputs; i += group_size, codes += group_size) {
        const float scale = scale_of<In>(x + i, group_size);
        quantise(x + i, group_size, scale, codes);
        const int32_t half = arranged_sum(codes), all = half + arranged_sum(codes + group_size / 2);
        groups[i / group_size] = {scale, scale * static_cast<float>(all), -all, -half};
    }
}

void widen(const Linear& l, int64_t row, int8_t* to) {
    const bf16* x = static_cast<const bf16*>(l.x) + row * l.x_stride;
    auto* wide = reinterpret_cast<float*>(to);
    const int64_t inputs = l.weights.inputs, whole = inputs / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16) store(wide + i, load(x + i));
    bf16 rest[16] = {};
    __builtin_memcpy(rest, x + whole, (inputs - whole) * sizeof(bf16));
    if (whole < inputs) store(wide + whole, load(rest));
}

template <class T>
auto quantise_row(Rounding rounding) {
    switch (rounding) {
        case Rounding::by_group: return quantise_groups<T, int16_t>;
        case Rounding::by_group_int8: return quantise_groups<T, int8_t>;
        default: return quantise_as<T>;
    }
}

void quantise_rows(const Linear& l, int64_t top, int64_t bottom, int8_t* rows) {
    const Rounding rounding = l.rounding();
    const bool narrow = l.weights.type == Type::bf16, widened = rounding <= Rounding::widen;
    const auto write = widened  ? widen
                       : narrow ? quantise_row<bf16>(rounding)
                                : quantise_row<float>(rounding);
    for (int64_t row = top; row < bottom; row++) write(l, row, rows + row * l.rounded_stride());
}

}  // namespace

const LinearKernels linear_kernels = {parts<bf16> == 1, run, quantise_rows};

}  // namespace triforce::TF_LEVEL
