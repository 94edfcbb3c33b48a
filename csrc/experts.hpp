// A mixture of experts in the place of an MLP.
//
// The bitwise law: a router's logits are one float32 product of the token's own row, and what follows of them is of that
// row, too; among equal scores the lowest ids are chosen; and a token's experts are summed in ascending order of their
// ids. So a token's result depends on that token alone, whichever rows share the pass and its experts.
#pragma once

#include <vector>

#include "decoder_layer.hpp"

namespace triforce {

/// The tensors of a mixture: `router` (experts, hidden) float32, and each expert's projections. Experts that the router
/// has no outputs for are shared: all rows go through them, with the weight 1. `correction` (experts) is added to scores
/// where they are compared. Of biases there are as many as of projections, or none.
struct ExpertWeights {
    WeightSource router;
    std::optional<Tensor> router_bias, correction;
    std::vector<WeightSource> gate, up, down;
    std::vector<Tensor> gate_bias, up_bias, down_bias;
};

/// How a router chooses; see `Experts` in model/config.py.
struct Routing {
    int64_t chosen;
    bool sigmoid, renormalised;
    double scale = 1;
    int64_t groups = 1, chosen_groups = 1;
};

/// Of each expert the rows that go through it, ascending.
struct ExpertChoices {
    struct Choice {
        int64_t row;
        float weight;
    };
    static constexpr int64_t sampled = 8;
    std::vector<std::vector<Choice>> experts;

    /// Choices of all rows.
    int64_t count() const;
    /// Calls body(expert, rows, choices before them) for each expert that some row goes through, ascending.
    template <class Body>
    void each(Body body) const {
        for (size_t e = 0, before = 0; e < experts.size(); before += experts[e++].size())
            if (!experts[e].empty()) body(e, experts[e], static_cast<int64_t>(before));
    }
    /// How many experts the first rows, at most `sampled`, go through together.
    int64_t touched() const;
};

/// All outputs of the experts' matrices, or some.
class Experts {
  public:
    /// `norm` of what the router and the experts read. Throws std::invalid_argument if shapes do not fit each other.
    Experts(const std::optional<Tensor>& norm, const ExpertWeights& weights, Type type, const LayerSettings& settings,
            const Routing& routing);

    int64_t hidden() const { return norm_.size; }
    int64_t outputs() const { return downs_[0].outputs(); }
    /// Experts that each row goes through.
    int64_t per_row() const { return routing_.chosen + shared_; }
    /// Whether these are all outputs of all matrices.
    bool whole() const { return gates_[0].outputs() == downs_[0].inputs() && outputs() == hidden(); }
    Type type() const { return gates_[0].type(); }
    /// Numbers of a row that `gate` writes, and of one that `down` reads: zeros up to a multiple of 16.
    int64_t gated_stride() const { return gates_[0].stride(); }
    int64_t down_stride() const { return round_up(downs_[0].inputs(), block_size); }
    size_t bytes() const;

    /// Writes to `sum` (rows, outputs) what the chosen experts give, weighted. The weights of an expert are read once
    /// for all rows that have chosen it. Returns how many were touched, see `ExpertChoices`.
    int64_t forward(const float* x, int64_t rows, float* sum) const;

    /// The same in two halves. `gated` (rows * per_row, stride of each) is of the weights' type, expert after expert.
    ExpertChoices gate(const float* x, int64_t rows, void* gated) const;
    void down(const ExpertChoices& choices, const void* gated, int64_t rows, float* sum) const;

  private:
    ExpertChoices choose(const float* normed, int64_t rows) const;
    void require_choices() const;

    Norm norm_;
    Matrix router_;
    std::vector<GatedMlp> gates_;
    std::vector<Matrix> downs_;
    std::vector<Floats> down_biases_;  // of each; none are empty
    Floats router_bias_, correction_;
    Routing routing_;
    int64_t shared_ = 0;
};

}  // namespace triforce
