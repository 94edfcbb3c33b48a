// A mixture of experts in the place of an MLP.
//
// The bitwise law: a router's logits are one float32 product of the token's own row; among equal ones the lowest ids are
// chosen; and a token's experts are summed in ascending order of their ids. So a token's result depends on that token
// alone, whoever shares the pass and its experts.
#pragma once

#include <vector>

#include "decoder_layer.hpp"

namespace triforce {

/// The tensors of a mixture: `router` (experts, hidden) float32, and each expert's projections.
struct ExpertWeights {
    WeightSource router;
    std::vector<WeightSource> gate, up, down;
};

class Experts {
  public:
    /// `norm` of what the router and the experts read. Throws std::invalid_argument if shapes do not fit each other.
    Experts(const std::optional<Tensor>& norm, const ExpertWeights& weights, Type type, const LayerSettings& settings);

    size_t bytes() const;

    /// Writes to `sum` (rows, hidden) what the chosen experts give, weighted. The weights of an expert are read once for
    /// all rows that have chosen it.
    void forward(const float* x, int64_t rows, float* sum) const;

  private:
    struct Choice {
        int64_t row;
        float weight;
    };

    std::vector<std::vector<Choice>> choose(const float* normed, int64_t rows, int64_t stride) const;

    Norm norm_;
    Matrix router_;
    std::vector<GatedMlp> gates_;
    std::vector<Matrix> downs_;
    int64_t chosen_;
    bool renormalised_;
};

}  // namespace triforce
