// The linear side of one decoder layer and of the head. Rotation and attention come between `qkv` and `finish`.
//
// The residual stream x is float32 (rows, hidden). The input of a matrix is rounded to the type of the weights, once.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "matrix.hpp"

namespace triforce {

class Experts;

/// A vector of a checkpoint as floats, with zeros up to a multiple of 16.
using Floats = std::vector<float>;

/// The numbers of a vector, of `type` or float32; none if there is none. Throws std::invalid_argument.
Floats floats(const std::optional<Tensor>& vector, int64_t size, Type type);
inline const float* or_null(const Floats& vector) { return vector.empty() ? nullptr : vector.data(); }

struct Norm {
    Floats weight;  // empty where the model has no such norm: rows are then rounded only
    int64_t size;
    float eps;

    explicit operator bool() const { return !weight.empty(); }
    /// Writes rows of x, normed and rounded, as the input of a matrix: (rows, size rounded up to 16).
    void operator()(const float* x, int64_t rows, Type type, void* y) const;
};

/// The norm of a checkpoint's weight, or none.
Norm make_norm(const std::optional<Tensor>& weight, int64_t size, Type type, float eps);

/// y *= factor, of `count` numbers.
void scale(float* y, int64_t count, float factor);

/// The tensors of a checkpoint's layer; optional ones are missing where the model family has none. Norms of q and k are
/// of each head or of all of them together.
struct LayerWeights {
    std::optional<Tensor> input_norm, post_norm;
    WeightSource q, k, v, o, gate, up, down;
    std::optional<Tensor> q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;
    std::optional<Tensor> q_norm, k_norm, attn_out_norm, mlp_out_norm;
};

/// Throws std::invalid_argument for another than silu, gelu or clamped.
Activation activation_named(const std::string& name);

/// How a layer computes: factors of the queries and of what it adds to the residual stream.
struct LayerSettings {
    int64_t head_dim;
    float eps;
    int bits;  // see Matrix
    float query_scale = 1, residual_scale = 1;
    Activation activation = Activation::silu;
};

/// The projections from the residual stream to queries, keys and values, of some heads or of all.
class QkvProjections {
  public:
    /// Throws std::invalid_argument if shapes do not fit each other.
    QkvProjections(const LayerWeights& parts, const LayerSettings& settings);

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
    float query_scale_;
};

/// The tensors of the first half of an MLP.
struct GateWeights {
    std::optional<Tensor> norm;
    WeightSource gate, up;
    std::optional<Tensor> gate_bias, up_bias;  // both or none
};

/// The first half of an MLP, all of its outputs or some: the activation of the normed residual stream's gate and up.
class GatedMlp {
  public:
    GatedMlp(const GateWeights& weights, const LayerSettings& settings);

    int64_t hidden() const { return norm_.size; }
    int64_t outputs() const { return gate_.outputs(); }
    int64_t stride() const { return round_up(outputs(), block_size); }
    Type type() const { return gate_.type(); }
    size_t bytes() const { return gate_.bytes() + (up_ ? up_->bytes() : 0); }

    /// Writes `gated` (rows, stride) of the input's type.
    void forward(const float* x, int64_t rows, void* gated) const;

    /// The same of rows that are normed, (rows, hidden rounded up to 16), in two steps, so that others can share a job:
    /// so many `products` to be multiplied; then what is left to do with them.
    int64_t products() const { return up_ ? 2 : 1; }
    void project(const void* normed, int64_t rows, void* gated, Scratch& scratch, Linear* products) const;
    void activate(const Linear* products, void* gated) const;

  private:
    Matrix gate_;  // interleaved with the up projection
    std::optional<Matrix> up_;  // unless the two are of different types
    Floats bias_, up_bias_;     // as the matrices
    Norm norm_;
    Activation activation_;
};

/// A decoder layer but for rotation and attention.
class DecoderLayer : public QkvProjections {
  public:
    /// With `experts` in the place of `post_norm`, `gate`, `up` and `down` and their biases, if there are any.
    DecoderLayer(const LayerWeights& parts, std::shared_ptr<Experts> experts, const LayerSettings& settings);
    ~DecoderLayer();

    size_t bytes() const;

    /// x += o(attn_out), then x += mlp(norm(x)), each normed and scaled first where the family does so; `attn_out`
    /// (rows, q_size) is of the weights' type. Returns how many experts were touched, see `ExpertChoices`.
    int64_t finish(float* x, int64_t rows, const void* attn_out) const;

  private:
    void add(const Matrix& matrix, const Floats& bias, const void* from, int64_t stride, int64_t rows, const Norm& norm,
             float* x) const;
    void add(const float* part, int64_t rows, const Norm& norm, float* x) const;

    Matrix o_;
    Floats o_bias_, down_bias_;
    std::optional<GatedMlp> gate_;
    std::optional<Matrix> down_;
    std::shared_ptr<Experts> experts_;
    Norm attn_out_norm_, mlp_out_norm_;
    float residual_scale_;
};

/// The final norm and the output matrix.
class LmHead {
  public:
    /// Logits are scaled, and then capped unless `logit_cap` is 0.
    LmHead(const Tensor& norm, std::shared_ptr<Matrix> matrix, float eps, float logit_scale, float logit_cap);

    int64_t hidden() const { return norm_.size; }
    int64_t vocabulary() const { return matrix_->outputs(); }
    const Matrix& matrix() const { return *matrix_; }
    void logits(const float* x, int64_t rows, float* logits) const;

  private:
    Norm norm_;
    std::shared_ptr<Matrix> matrix_;
    float logit_scale_, logit_cap_;
};

}  // namespace triforce
