// Weights of y = x W^T, packed once into the order in which kernels read them.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.hpp"
#include "memory.hpp"
#include "tensor.hpp"

namespace triforce {

/// A weight of a checkpoint, (outputs, inputs): of bfloat16, float32 or half; or rows of bytes of a GGUF type. The
/// input of its products is of type `input`.
struct WeightSource {
    Tensor tensor;
    Format format = Format::none;
    Type input = tensor.type;

    int64_t outputs() const { return tensor[0]; }
    int64_t inputs() const;
    /// Whether blocks of this weight and of `other` may be interleaved.
    bool alike(const WeightSource& other) const {
        return tensor.type == other.tensor.type && format == other.format && input == other.input;
    }
    /// Writes row `id` as floats.
    void row(int64_t id, float* out) const;
    /// Throws unless the input of products is of type `input` and the shape is (outputs, inputs). -1: any size.
    void expect(Type input, int64_t outputs, int64_t inputs) const;
};

/// Owner of packed `Weights`.
class Matrix {
  public:
    /// Packs a weight. Blocks of two weights of one shape are interleaved, so that an epilogue has both: an MLP's gate
    /// and up projection. bits: 0: no rounding; 8 or 4: weights of more bits are rounded. With 8, an output's weights
    /// become multiples of one scale, at most 127 times the scale. With 4 they become Q4_1, or 8 bits if the inputs are
    /// not whole groups. Throws std::invalid_argument for another type or shape, or if a weight or a scale is not
    /// finite.
    Matrix(const std::vector<WeightSource>& interleaved, int bits);

    const Weights& weights() const { return weights_; }
    Type type() const { return weights_.type; }  // of x
    int64_t outputs() const { return weights_.outputs; }
    int64_t inputs() const { return inputs_; }
    size_t bytes() const { return memory_.size(); }

    /// y = x W^T, x (rows, inputs) and y (rows, outputs).
    void linear(const void* x, int64_t rows, float* y, InputCodes codes) const;

    /// Unpacks rows `ids` as floats, (count, inputs). A head serves as a tied embedding this way.
    void rows(const int64_t* ids, int64_t count, float* out) const;

  private:
    void pack_numbers(const std::vector<WeightSource>& interleaved, bool int8);
    void pack_groups(const std::vector<WeightSource>& interleaved);

    Weights weights_;
    int64_t inputs_;
    Memory memory_;
};

}  // namespace triforce
