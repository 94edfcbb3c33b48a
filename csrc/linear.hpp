// y = x W^T for any number of rows, and the RMSNorm that makes x (Zhang and Sennrich 2019).
//
// The bitwise law: each output is one chain of sums over the inputs, ascending, and then the epilogue. The chain does
// not depend on the rows and blocks of a tile. So a row's result depends on that row alone.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "low_bit.hpp"
#include "simd_dispatch.hpp"
#include "types.hpp"

namespace triforce {

constexpr int block_size = 16;   // outputs of a block: one register of floats
constexpr int linear_rows = 96;  // most rows of one kernel call

enum class Rounding : int { none, widen, by_row, by_group, by_group_int8 };

/// Packed weights, owned by a Matrix: blocks of 16 outputs. A block has inputs ascending, for bf16 in pairs:
/// [blocks][inputs / 2][16][2]; for float and half: [blocks][inputs][16]. Missing outputs and inputs are zeros.
/// Products with float or half weights take x as float; rows of bf16 are widened to float.
///
/// With `scales` the weights are int8, in fours: [blocks][inputs / 4][16][4]. Products then round each row of x to
/// int8, too. Their sums are exact and are multiplied once by the scales of row and output, so all levels agree in
/// every bit.
///
/// With a `format` a block of 16 outputs has the layout of low_bit.hpp.
struct Weights {
    Type type;  // of x
    const void* data;
    const float* scales;  // (blocks * 16): scale of each output; or null
    int64_t inputs;       // even; for int8 a multiple of 16; for a format whole groups
    int64_t outputs;      // of one matrix, if two are interleaved
    int64_t blocks;
    Format format = Format::none;
    Type numbers = type;  // type of the weights, unless they are int8 or have a format

    /// How a product rounds or widens its input. Products with the same rounding share the rounded input.
    Rounding rounding(InputCodes codes = InputCodes::int16) const {
        if (format != Format::none)
            return codes == InputCodes::int8 ? Rounding::by_group_int8 : Rounding::by_group;
        if (scales) return Rounding::by_row;
        return type == Type::bf16 && numbers != Type::bf16 ? Rounding::widen : Rounding::none;
    }
};

constexpr int64_t most_int8_inputs = 1 << 17;  // so that sums stay below 2^31

enum class Epilogue {
    store,  // y = x W^T + bias
    add,    // y += x W^T + bias
    gate,   // y = activation(gate, up), rounded to weights.type; gate and up, and their biases, alternate by blocks
};

/// How an MLP combines gate and up projection: silu(gate) * up; gelu(gate) * up, by the tanh form of GELU (Hendrycks
/// and Gimpel 2016, arXiv 1606.08415); or the clamped SwiGLU of gpt-oss (arXiv 2508.10925).
enum class Activation { silu, gelu, clamped };

struct Linear {
    Weights weights;
    const void* x;  // (rows, x_stride) of weights.type; the first weights.inputs of a row are read
    int64_t x_stride;
    int64_t rows;
    const float* bias;  // (blocks * 16), or null
    Epilogue epilogue;
    void* y;  // store, add: float (rows, y_stride); gate: of weights.type, written up to a multiple of 16
    int64_t y_stride;
    Activation activation = Activation::silu;
    InputCodes input_codes = InputCodes::int16;  // of weights with a format

    Rounding rounding() const { return weights.rounding(input_codes); }
    /// Bytes of a rounded or widened row.
    int64_t rounded_stride() const {
        if (weights.format != Format::none) return grouped_stride(weights.inputs, input_codes);
        if (weights.scales) return weights.inputs + block_size;
        return round_up(weights.inputs, block_size) * static_cast<int64_t>(sizeof(float));
    }
};

struct LinearKernels {
    /// Whether bf16 is multiplied without widening; otherwise `quantise` widens x as well.
    bool pairs;
    /// Computes the outputs of blocks [first, last) for rows [top, bottom), at most linear_rows rows. If products with
    /// the weights round or widen x, `linear.x` is the output of `quantise`.
    void (*run)(const Linear& linear, int64_t top, int64_t bottom, int64_t first, int64_t last);
    /// Writes rows [top, bottom) of x to `rows`: for int8 weights as int8, each row followed by its scale, a float. For
    /// weights with a format: in the layout of `GroupedRows`. For widened products: as floats.
    void (*quantise)(const Linear& linear, int64_t top, int64_t bottom, int8_t* rows);
};
TF_KERNEL_TABLE(LinearKernels, linear_kernels)

/// Pointwise kernels between products.
struct PointwiseKernels {
    /// y = activation(gate, up), rounded to `type`: n numbers, a multiple of 16.
    void (*gate)(Activation activation, const float* gate, const float* up, int64_t n, Type type, void* y);
    /// y = x rounded to `type`: n numbers, then zeros up to a multiple of 16.
    void (*round)(const float* x, int64_t n, Type type, void* y);
    /// y = cap * tanh(y / cap), for n numbers.
    void (*cap)(float* y, int64_t n, float cap);
    /// y = x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once, to `type`. y may be x. `weight`
    /// and y have n numbers, and padding up to a multiple of 16. If the padding of `weight` is zero, so is that of y.
    void (*rms)(const float* x, int64_t n, const float* weight, float eps, Type type, void* y);
};
TF_KERNEL_TABLE(PointwiseKernels, pointwise_kernels)

/// Computes products in one job of the thread pool, after a job that rounds their inputs if necessary. Products of the
/// same rows of x share one rounding.
void multiply(const Linear* products, int64_t count);
inline void multiply(std::initializer_list<Linear> products) {
    multiply(products.begin(), static_cast<int64_t>(products.size()));
}

}  // namespace triforce
