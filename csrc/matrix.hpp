// Weights of y = x W^T, packed once into the order in which the kernels read them.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.hpp"
#include "memory.hpp"
#include "tensor.hpp"

namespace triforce {

/// Owns what `Weights` describes.
class Matrix {
  public:
    /// From (outputs, inputs), as checkpoints have it. With `int8` an output's weights are rounded to multiples of a
    /// scale, of which the largest is 127. Throws std::invalid_argument unless bfloat16 or float32.
    Matrix(const Tensor& weight, bool int8) : Matrix(std::vector<Tensor>{weight}, int8) {}
    /// Two of one shape with their blocks in turns, so that an epilogue has both: SwiGLU's gate and up projections.
    Matrix(const Tensor& even, const Tensor& odd, bool int8) : Matrix(std::vector<Tensor>{even, odd}, int8) {}

    const Weights& weights() const { return weights_; }
    Type type() const { return weights_.type; }  // of x
    int64_t outputs() const { return weights_.outputs; }
    int64_t inputs() const { return inputs_; }
    size_t bytes() const { return memory_.size(); }

    /// y = x W^T, x (rows, inputs) and y (rows, outputs).
    void linear(const void* x, int64_t rows, float* y) const;

    /// Rows `ids` of the unpacked weight as floats, (count, inputs): the embedding out of a tied head.
    void rows(const int64_t* ids, int64_t count, float* out) const;

  private:
    Matrix(const std::vector<Tensor>& woven, bool int8);

    Weights weights_;
    int64_t inputs_;
    Memory memory_;
};

}  // namespace triforce
