// Weights of y = x W^T, packed once into the order in which kernels read them.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.hpp"
#include "memory.hpp"
#include "tensor.hpp"

namespace triforce {

/// A weight of a checkpoint, (outputs, inputs): of bfloat16, float32 or half; or rows of bytes of a GGUF type. The input
/// of its products is of type `input`.
struct WeightSource {
    Tensor tensor;
    Format format = Format::none;
    Type input = tensor.type;

    int64_t outputs() const { return tensor[0]; }
    int64_t inputs() const;
    /// Whether the blocks of the two may be interleaved.
    bool alike(const WeightSource& other) const {
        return tensor.type == other.tensor.type && format == other.format && input == other.input;
    }
    /// Writes a row as floats.
    void row(int64_t id, float* out) const;
    /// Throws unless a product's input is of this type, and the shape is this one, where -1 is any size.
    void expect(Type input, int64_t outputs, int64_t inputs) const;
};

/// A weight from Python: a tensor, or an object with bytes of a GGUF type, `blocks`, their `kind`, and whether its
/// products' input is bfloat16, `narrow`. Throws nb::value_error or std::invalid_argument.
WeightSource weight(const char* name, WeightArg object);

/// Owner of packed `Weights`.
class Matrix {
  public:
    /// Packs a weight. The blocks of two of one shape are interleaved, so that an epilogue has both: SwiGLU's gate and
    /// up projections. `bits`: 0, or to what they are rounded that have more. To 8 an output's weights are rounded to
    /// multiples of a scale, the largest to 127 times it; to 4 they become Q4_1 (8 where groups are not whole). Throws
    /// std::invalid_argument for another type or shape, or where a weight or a scale is not finite.
    Matrix(const std::vector<WeightSource>& interleaved, int bits);

    const Weights& weights() const { return weights_; }
    Type type() const { return weights_.type; }  // of x
    int64_t outputs() const { return weights_.outputs; }
    int64_t inputs() const { return inputs_; }
    size_t bytes() const { return memory_.size(); }

    /// y = x W^T, x (rows, inputs) and y (rows, outputs).
    void linear(const void* x, int64_t rows, float* y) const;

    /// Unpacks rows `ids` as floats, (count, inputs): the embedding where it is tied to the head.
    void rows(const int64_t* ids, int64_t count, float* out) const;

  private:
    void pack_numbers(const std::vector<WeightSource>& interleaved, bool int8);
    void pack_groups(const std::vector<WeightSource>& interleaved);

    Weights weights_;
    int64_t inputs_;
    Memory memory_;
};

}  // namespace triforce
