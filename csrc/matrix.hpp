// Weights of y = x W^T, packed once into the order in which kernels read them.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.hpp"
#include "memory.hpp"
#include "tensor.hpp"

namespace triforce {

/// A weight of a checkpoint, (outputs, inputs): of bfloat16 or float32; or rows of bytes of a GGUF type, whose input is
/// then of `input`.
struct WeightSource {
    Tensor tensor;
    Format format = Format::none;
    Type input = tensor.type;

    int64_t outputs() const { return tensor[0]; }
    int64_t inputs() const;
    /// Throws unless a product's input is of this type, and the shape is this one, where -1 is any size.
    void expect(Type input, int64_t outputs, int64_t inputs) const;
};

/// Owner of packed `Weights`.
class Matrix {
  public:
    /// Packs a weight. With `int8` an output's weights are rounded to multiples of a scale, the largest to 127 times
    /// it; those of a GGUF type stay as they are. Throws std::invalid_argument for another type or shape.
    Matrix(const WeightSource& weight, bool int8) : Matrix(std::vector<WeightSource>{weight}, int8) {}
    /// Interleaves the blocks of two of one shape, so that an epilogue has both: SwiGLU's gate and up projections.
    Matrix(const WeightSource& even, const WeightSource& odd, bool int8)
        : Matrix(std::vector<WeightSource>{even, odd}, int8) {}

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
    Matrix(const std::vector<WeightSource>& interleaved, bool int8);
    void pack_numbers(const std::vector<WeightSource>& interleaved, bool int8);
    void pack_groups(const std::vector<WeightSource>& interleaved);

    Weights weights_;
    int64_t inputs_;
    Memory memory_;
};

}  // namespace triforce
