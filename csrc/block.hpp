// The linear side of one decoder layer and of the head. Attention and rotation happen between `qkv` and `finish`.
//
// The residual stream x is float32 (rows, hidden). What a matrix reads is rounded to the type of the weights, once.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "matrix.hpp"

namespace triforce {

/// A vector of a checkpoint as floats, with zeros up to a multiple of 16.
using Floats = std::vector<float>;

struct Norm {
    Floats weight;
    int64_t size;
    float eps;

    /// Rows of x, normed and rounded, as the input of a matrix: (rows, size rounded up to 16).
    void operator()(const float* x, int64_t rows, Type type, void* y) const;
};

struct Parts {  // of a checkpoint's layer; those of no name are what the family does not have
    Tensor input_norm, q, k, v, o, post_norm, gate, up, down;
    std::optional<Tensor> q_bias, k_bias, v_bias, q_norm, k_norm;
};

/// From the residual stream to queries, keys and values, of some heads or of all.
class Projections {
  public:
    /// `int8`: see Matrix. Throws std::invalid_argument if shapes do not fit each other.
    Projections(const Parts& parts, int64_t head_dim, float eps, bool int8);

    int64_t hidden() const { return norm_.size; }
    int64_t q_size() const { return q_.outputs(); }
    int64_t kv_size() const { return k_.outputs(); }
    Type type() const { return q_.type(); }
    size_t bytes() const { return q_.bytes() + k_.bytes() + v_.bytes(); }

    /// Projections of the normed x, with biases and norms of heads, before rotation: float32.
    void qkv(const float* x, int64_t rows, float* q, float* k, float* v) const;

  private:
    Norm norm_;
    Matrix q_, k_, v_;
    Floats q_bias_, k_bias_, v_bias_;
    std::optional<Norm> q_norm_, k_norm_;
    int64_t head_dim_;
};

/// From the residual stream to what an MLP's last matrix reads: some of it, or all.
class Gate {
  public:
    Gate(const Tensor& norm, const Tensor& gate, const Tensor& up, float eps, bool int8);

    int64_t hidden() const { return norm_.size; }
    int64_t outputs() const { return matrix_.outputs(); }
    int64_t stride() const { return round_up(outputs(), block_size); }
    Type type() const { return matrix_.type(); }
    size_t bytes() const { return matrix_.bytes(); }

    /// silu(gate) * up of the normed x: (rows, stride) of the weights' type.
    void run(const float* x, int64_t rows, void* gated) const;

  private:
    Matrix matrix_;
    Norm norm_;
};

class Block {
  public:
    Block(const Parts& parts, int64_t head_dim, float eps, bool int8);

    int64_t hidden() const { return qkv_.hidden(); }
    int64_t q_size() const { return qkv_.q_size(); }
    int64_t kv_size() const { return qkv_.kv_size(); }
    Type type() const { return qkv_.type(); }
    size_t bytes() const { return qkv_.bytes() + o_.bytes() + gate_.bytes() + down_.bytes(); }

    void qkv(const float* x, int64_t rows, float* q, float* k, float* v) const { qkv_.qkv(x, rows, q, k, v); }
    /// x += o(mixed), then x += mlp(norm(x)); `mixed` (rows, q_size) is of the weights' type.
    void finish(float* x, int64_t rows, const void* mixed) const;

  private:
    Projections qkv_;
    Matrix o_;
    Gate gate_;
    Matrix down_;
};

class Head {
  public:
    Head(const Tensor& norm, std::shared_ptr<Matrix> matrix, float eps);

    int64_t hidden() const { return norm_.size; }
    int64_t vocabulary() const { return matrix_->outputs(); }
    const Matrix& matrix() const { return *matrix_; }
    void logits(const float* x, int64_t rows, float* logits) const;

  private:
    Norm norm_;
    std::shared_ptr<Matrix> matrix_;
};

}  // namespace triforce
