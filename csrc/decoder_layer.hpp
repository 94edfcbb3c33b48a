// The linear side of one decoder layer and of the head. Rotation and attention come between `qkv` and `finish`.
//
// The residual stream x is float32 (rows, hidden). The input of a matrix is rounded to the type of the weights, once.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "matrix.hpp"

namespace triforce {

/// A vector of a checkpoint as floats, with zeros up to a multiple of 16.
using Floats = std::vector<float>;

struct Norm {
    Floats weight;  // empty where the model has no such norm
    int64_t size;
    float eps;

    explicit operator bool() const { return !weight.empty(); }
    /// Writes rows of x, normed and rounded, as the input of a matrix: (rows, size rounded up to 16).
    void operator()(const float* x, int64_t rows, Type type, void* y) const;
};

/// The tensors of a checkpoint's layer; optional ones are missing where the model family has none.
struct LayerWeights {
    Tensor input_norm, post_norm;
    WeightSource q, k, v, o, gate, up, down;
    std::optional<Tensor> q_bias, k_bias, v_bias, q_norm, k_norm;
};

/// The projections from the residual stream to queries, keys and values, of some heads or of all.
class QkvProjections {
  public:
    /// `bits`: see Matrix. Throws std::invalid_argument if shapes do not fit each other.
    QkvProjections(const LayerWeights& parts, int64_t head_dim, float eps, int bits);

    int64_t hidden() const { return norm_.size; }
    int64_t q_size() const { return q_.outputs(); }
    int64_t kv_size() const { return k_.outputs(); }
    Type type() const { return q_.type(); }
    size_t bytes() const { return q_.bytes() + k_.bytes() + v_.bytes(); }

    /// Projects the normed x, with biases and norms of heads, before rotation: float32.
    void qkv(const float* x, int64_t rows, float* q, float* k, float* v) const;

  private:
    Norm norm_;
    Matrix q_, k_, v_;
    Floats q_bias_, k_bias_, v_bias_;
    Norm q_norm_, k_norm_;
    int64_t head_dim_;
};

/// The first half of an MLP, all of its outputs or some: silu(gate) * up of the normed residual stream.
class GatedMlp {
  public:
    GatedMlp(const Tensor& norm, const WeightSource& gate, const WeightSource& up, float eps, int bits);

    int64_t hidden() const { return norm_.size; }
    int64_t outputs() const { return gate_.outputs(); }
    int64_t stride() const { return round_up(outputs(), block_size); }
    Type type() const { return gate_.type(); }
    size_t bytes() const { return gate_.bytes() + (up_ ? up_->bytes() : 0); }

    /// Writes `gated` (rows, stride) of the input's type.
    void forward(const float* x, int64_t rows, void* gated) const;

  private:
    Matrix gate_;  // interleaved with the up projection
    std::optional<Matrix> up_;  // unless the two are of different types
    Norm norm_;
};

/// A decoder layer but for rotation and attention.
class DecoderLayer : public QkvProjections {
  public:
    DecoderLayer(const LayerWeights& parts, int64_t head_dim, float eps, int bits);

    size_t bytes() const { return QkvProjections::bytes() + o_.bytes() + gate_.bytes() + down_.bytes(); }

    /// x += o(attn_out), then x += mlp(norm(x)); `attn_out` (rows, q_size) is of the weights' type.
    void finish(float* x, int64_t rows, const void* attn_out) const;

  private:
    Matrix o_;
    GatedMlp gate_;
    Matrix down_;
};

/// The final norm and the output matrix.
class LmHead {
  public:
    LmHead(const Tensor& norm, std::shared_ptr<Matrix> matrix, float eps);

    int64_t hidden() const { return norm_.size; }
    int64_t vocabulary() const { return matrix_->outputs(); }
    const Matrix& matrix() const { return *matrix_; }
    void logits(const float* x, int64_t rows, float* logits) const;

  private:
    Norm norm_;
    std::shared_ptr<Matrix> matrix_;
};

}  // namespace triforce
