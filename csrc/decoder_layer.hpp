// Products, norms and activations of a decoder layer, and the output head. Rotation and attention come between `qkv`
// and `finish`.
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

/// The numbers of a vector of `type` or float32; empty without a vector. Throws std::invalid_argument.
Floats floats(const std::optional<Tensor>& vector, int64_t size, Type type);
inline const float* or_null(const Floats& vector) { return vector.empty() ? nullptr : vector.data(); }

struct Norm {
    Floats weight;  // empty if the model has no such norm; rows are then only rounded
    int64_t size;
    float eps;

    explicit operator bool() const { return !weight.empty(); }
    /// Writes rows of x, normed and rounded to `type`, as the input of a matrix: y (rows, size rounded up to 16).
    void operator()(const float* x, int64_t rows, Type type, void* y) const;
};

/// The norm of a checkpoint's weight. Without a weight its rows are only rounded.
Norm make_norm(const std::optional<Tensor>& weight, int64_t size, Type type, float eps);

/// y *= factor, for `count` numbers.
void scale(float* y, int64_t count, float factor);

/// The tensors of a layer in a checkpoint. Optional tensors are absent if the model family has none. q_norm and k_norm
/// norm each head, or all heads together.
struct LayerWeights {
    std::optional<Tensor> input_norm, post_norm;
    WeightSource q, k, v, o, gate, up, down;
    std::optional<Tensor> q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;
    std::optional<Tensor> q_norm, k_norm, attn_out_norm, mlp_out_norm;
};

/// Throws std::invalid_argument for any name but silu, gelu and clamped.
Activation activation_named(const std::string& name);

/// Settings of a layer's arithmetic. query_scale: factor of queries. residual_scale: factor of the outputs that are
/// added to the residual stream.
struct LayerSettings {
    int64_t head_dim;
    float eps;
    int bits;  // see Matrix
    float query_scale = 1, residual_scale = 1;
    Activation activation = Activation::silu;
};

/// The projections from the residual stream to queries, keys and values, for all heads or for some.
class QkvProjections {
  public:
    /// Throws std::invalid_argument if shapes do not fit each other.
    QkvProjections(const LayerWeights& parts, const LayerSettings& settings);

    int64_t hidden() const { return norm_.size; }
    int64_t q_size() const { return q_.outputs(); }
    int64_t kv_size() const { return k_.outputs(); }
    Type type() const { return q_.type(); }
    size_t bytes() const { return q_.bytes() + k_.bytes() + v_.bytes(); }

    /// Writes q (rows, q_size), k and v (rows, kv_size) of the normed x, with biases and norms of q and k, before
    /// rotation. All are float32.
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

/// The first half of an MLP, for all of its outputs or for some: norm, gate and up projection, and activation.
class GatedMlp {
  public:
    GatedMlp(const GateWeights& weights, const LayerSettings& settings);

    int64_t hidden() const { return norm_.size; }
    int64_t outputs() const { return gate_.outputs(); }
    int64_t stride() const { return round_up(outputs(), block_size); }
    Type type() const { return gate_.type(); }
    size_t bytes() const { return gate_.bytes() + (up_ ? up_->bytes() : 0); }

    /// Writes `gated` (rows, stride) of `type()`, for x (rows, hidden).
    void forward(const float* x, int64_t rows, void* gated, InputCodes codes) const;

    /// `forward` for normed rows (rows, hidden rounded up to 16), in two steps, so that one job can also compute other
    /// products. `project` lists the `products()` products; `activate` applies the activation to their results.
    int64_t products() const { return up_ ? 2 : 1; }
    void project(const void* normed, int64_t rows, void* gated, InputCodes codes, Scratch& scratch,
                 Linear* products) const;
    void activate(const Linear* products, void* gated) const;

  private:
    Matrix gate_;               // interleaved with the up projection if both are of one type
    std::optional<Matrix> up_;  // the up projection if it is of another type
    Floats bias_, up_bias_;     // `bias_` is interleaved like `gate_`; `up_bias_` is used only with `up_`
    Norm norm_;
    Activation activation_;
};

/// A decoder layer without rotation and attention.
class DecoderLayer : public QkvProjections {
  public:
    /// `experts`, if any, take the place of `post_norm`, `gate`, `up`, `down` and their biases.
    DecoderLayer(const LayerWeights& parts, std::shared_ptr<Experts> experts, const LayerSettings& settings);
    ~DecoderLayer();

    size_t bytes() const;

    /// x += o(attn_out), then x += mlp(norm(x)). Both summands are first normed, if the model family does so, and
    /// multiplied by residual_scale. `attn_out` (rows, q_size) is of the weights' type. codes: of the inputs of o, gate
    /// and up projection; the others lose more by int8. Returns `ExpertChoices::touched`; 0 without experts.
    int64_t finish(float* x, int64_t rows, const void* attn_out, InputCodes codes) const;

  private:
    void add(const Matrix& matrix, const Floats& bias, const void* from, int64_t stride, int64_t rows, const Norm& norm,
             InputCodes codes, float* x) const;
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
    /// Writes logits (rows, vocabulary) of x (rows, hidden).
    void logits(const float* x, int64_t rows, float* logits) const;

  private:
    Norm norm_;
    std::shared_ptr<Matrix> matrix_;
    float logit_scale_, logit_cap_;
};

}  // namespace triforce
