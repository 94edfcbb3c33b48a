// Weights of y = x W^T, packed once into the order in which kernels read them.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.hpp"
#include "memory.hpp"
#include "tensor.hpp"

namespace triforce {

/// Owner of packed `Weights`.
class Matrix {
  public:
    /// Packs (outputs, inputs), as checkpoints have it. The blocks of two of one shape are interleaved, so that an
    /// epilogue has both: SwiGLU's gate and up projections. With `int8` an output's weights are rounded to multiples of
    /// a scale, the largest to 127 times it. Throws std::invalid_argument unless bfloat16 or float32.
    Matrix(const std::vector<Tensor>& interleaved, bool int8);

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
    Weights weights_;
    int64_t inputs_;
    Memory memory_;
};

}  // namespace triforce
