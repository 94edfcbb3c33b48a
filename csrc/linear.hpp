// y = x W^T for any number of rows, and the RMSNorm that makes x (Zhang and Sennrich 2019).
//
// The bitwise law: each output is one chain of sums over k, ascending, whatever the rows and blocks of a tile, and then
// the epilogue. So a row's result depends on that row alone.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "low_bit.hpp"
#include "simd_dispatch.hpp"
#include "types.hpp"

namespace triforce {

constexpr int block_size = 16;   // outputs of a block: one register of floats
constexpr int linear_rows = 96;  // at most, of one call of a kernel

enum class Rounding : int { none, widen, by_row, by_group };

/// Packed weights, owned by a Matrix. Blocks of 16 outputs, each with inputs ascending, in pairs for bf16:
/// [blocks][inputs / 2][16][2]; for float and half [blocks][inputs][16]. Missing outputs and inputs are zeros. Products
/// with float or half take x as float, to which rows of bf16 are widened.
///
/// With scales they are int8, in fours: [blocks][inputs / 4][16][4]. Such a product rounds each row of x to int8, too.
/// Its sums are exact and are multiplied once by the scales of row and output, so all levels agree in every bit.
///
/// With a format they are as low_bit.hpp says, one block of 16 outputs after another.
struct Weights {
    Type type;  // of x
    const void* data;
    const float* scales;  // (blocks * 16), of each output; or null
    int64_t inputs;       // even; a multiple of 16 for int8, of whole groups for a format
    int64_t outputs;      // of each of two interleaved matrices
    int64_t blocks;
    Format format = Format::none;
    Type numbers = type;  // of the weights, unless these are int8 or have a format

    /// How a product rounds its input, or widens it: two that do so alike share it.
    Rounding rounding() const {
        if (format != Format::none) return Rounding::by_group;
        if (scales) return Rounding::by_row;
        return type == Type::bf16 && numbers != Type::bf16 ? Rounding::widen : Rounding::none;
    }
};

constexpr int64_t most_int8_inputs = 1 << 17;  // so that sums stay below 2^31

enum class Epilogue {
    store,  // y = x W^T + bias
    add,    // y += x W^T + bias
    gate,   // y = activation(gate, up), rounded to weights.type; gate and up are interleaved, block by block, as biases
};

/// What becomes of an MLP's gate and up projection: silu(gate) * up; gelu(gate) * up, by its tanh (Hendrycks and Gimpel
/// 2016, arXiv 1606.08415); or the clamped SwiGLU of gpt-oss.
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
};

struct LinearKernels {
    /// Whether bf16 is multiplied as it is; otherwise its x, too, has been widened by `quantise`.
    bool pairs;
    /// Outputs of blocks [first, last) for rows [top, bottom), at most linear_rows of them. Where the weights want x
    /// rounded, it has been through `quantise`.
    void (*run)(const Linear& linear, int64_t top, int64_t bottom, int64_t first, int64_t last);
    /// Rows [top, bottom) of x as int8, each followed by its scale, a float; or of weights with a format as
    /// `GroupedRows` has them; or widened to floats.
    void (*quantise)(const Linear& linear, int64_t top, int64_t bottom, int8_t* rows);
};
TF_KERNEL_TABLE(LinearKernels, linear_kernels)

/// What goes over vectors between products.
struct PointwiseKernels {
    /// y = activation(gate, up), rounded to `type`: n numbers, a multiple of 16.
    void (*gate)(Activation activation, const float* gate, const float* up, int64_t n, Type type, void* y);
    /// y = x rounded to `type`: y has n numbers rounded up to 16, the rest of them zeros.
    void (*round)(const float* x, int64_t n, Type type, void* y);
    /// y = cap * tanh(y / cap), of n numbers.
    void (*cap)(float* y, int64_t n, float cap);
    /// y = x / sqrt(mean(x^2) + eps) * weight, in float32, rounded once: to `type`. y may be x. `weight` and y have n
    /// numbers rounded up to 16: where the rest of the weight is zero, so is that of y.
    void (*rms)(const float* x, int64_t n, const float* weight, float eps, Type type, void* y);
};
TF_KERNEL_TABLE(PointwiseKernels, pointwise_kernels)

/// Numbers of a widened row.
constexpr int64_t widened_stride(const Weights& weights) { return round_up(weights.inputs, block_size); }

/// Bytes of a rounded row, or of a widened one.
constexpr int64_t rounded_stride(const Weights& weights) {
    if (weights.format != Format::none) return grouped_stride(weights.inputs);
    return weights.scales ? weights.inputs + block_size : widened_stride(weights) * static_cast<int64_t>(sizeof(float));
}

/// Computes some products in one job of the thread pool. Those of the same rows of x have them rounded once.
void multiply(const Linear* products, int64_t count);
inline void multiply(std::initializer_list<Linear> products) {
    multiply(products.begin(), static_cast<int64_t>(products.size()));
}

}  // namespace triforce
