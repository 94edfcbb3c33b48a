// A mixture of experts in the place of an MLP.
//
// The bitwise law: a router's logits are one float32 product of the token's own row. The choice of experts and their
// weights depend on these logits only. Among equal scores the lowest ids are chosen. A token's experts are summed in
// ascending order of ids. So a token's result depends on that token alone, whichever rows share the pass and its
// experts.
#pragma once

#include <vector>

#include "decoder_layer.hpp"

namespace triforce {

/// The tensors of a mixture: `router` (experts, hidden) float32, and each expert's projections. Experts beyond the
/// router's outputs are shared: all rows go through them, with weight 1. `correction` (experts) is added to scores when
/// experts are chosen, not to weights. There is one bias per projection, or no bias at all.
struct ExpertWeights {
    WeightSource router;
    std::optional<Tensor> router_bias, correction;
    std::vector<WeightSource> gate, up, down;
    std::vector<Tensor> gate_bias, up_bias, down_bias;
};

/// The rule of a router, see `Experts` in model/config.py.
struct Routing {
    int64_t chosen;
    bool sigmoid, renormalised;
    double scale = 1;
    int64_t groups = 1, chosen_groups = 1;
};

/// For each expert: the rows that go through it, ascending, and the weights of its outputs.
struct ExpertChoices {
    struct Choice {
        int64_t row;
        float weight;
    };
    static constexpr int64_t sampled = 8;  // first rows of a pass whose experts are counted
    std::vector<std::vector<Choice>> experts;

    /// Number of choices of all rows.
    int64_t count() const;
    /// Calls body(expert, choices, number of choices of lower experts) for each expert with rows, ascending.
    template <class Body>
    void each(Body body) const {
        for (size_t e = 0, before = 0; e < experts.size(); before += experts[e++].size())
            if (!experts[e].empty()) body(e, experts[e], static_cast<int64_t>(before));
    }
    /// Number of distinct experts that the first `sampled` rows go through.
    int64_t touched() const;
};

/// The experts of a layer, with all outputs of their matrices or with some.
class Experts {
  public:
    /// norm: norm of the input of router and experts, or none. Throws std::invalid_argument if shapes do not fit each
    /// other.
    Experts(const std::optional<Tensor>& norm, const ExpertWeights& weights, Type type, const LayerSettings& settings,
            const Routing& routing);

    int64_t hidden() const { return norm_.size; }
    int64_t outputs() const { return downs_[0].outputs(); }
    /// Experts that each row goes through.
    int64_t per_row() const { return routing_.chosen + shared_; }
    /// Whether the matrices have all of their outputs.
    bool whole() const { return gates_[0].outputs() == downs_[0].inputs() && outputs() == hidden(); }
    Type type() const { return gates_[0].type(); }
    /// Numbers per row that `gate` writes, and that `down` reads. Rows end in zeros up to a multiple of 16.
    int64_t gated_stride() const { return gates_[0].stride(); }
    int64_t down_stride() const { return round_up(downs_[0].inputs(), block_size); }
    size_t bytes() const;

    /// Writes the weighted sum of the chosen experts' outputs to `sum` (rows, outputs). The matrices of an expert are
    /// read once for all rows that have chosen it. codes: of the inputs of gate and up projections. Returns
    /// `ExpertChoices::touched`.
    int64_t forward(const float* x, int64_t rows, float* sum, InputCodes codes) const;

    /// `forward` in two halves. `gated` is of the weights' type, expert after expert: `gate` writes
    /// (rows * per_row, gated_stride), `down` reads (rows * per_row, down_stride).
    ExpertChoices gate(const float* x, int64_t rows, void* gated, InputCodes codes) const;
    void down(const ExpertChoices& choices, const void* gated, int64_t rows, float* sum) const;

  private:
    ExpertChoices choose(const float* normed, int64_t rows) const;
    void require_choices() const;

    Norm norm_;
    Matrix router_;
    std::vector<GatedMlp> gates_;
    std::vector<Matrix> downs_;
    std::vector<Floats> down_biases_;  // one per expert; empty without biases
    Floats router_bias_, correction_;
    Routing routing_;
    int64_t shared_ = 0;
};

}  // namespace triforce
