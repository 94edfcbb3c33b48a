// A draft of one layer that reads hidden states of its target (EAGLE-3, Li et al. 2025, arXiv 2503.01840).
//
// Of each slot of a pool of pages there is an entry, one more layer's keys and values, made of the slot's token and the
// state behind the slot before; and the state behind the slot itself: that of the target's latest pass over it, or of
// the guess there. Slot 0 of the scratch page has a state of zeros: the one before a text.
//
// Rows B, tokens T of each in a pass, N tokens, hidden size C, states S of a token, X = S * C, tokens M that can be
// proposed, vocabulary V.
#pragma once

#include <optional>
#include <vector>

#include "decoder.hpp"

namespace triforce {

struct FeatureWeights {
    WeightSource fc, q, k, v, o, gate, up, down, head;
    std::optional<WeightSource> embedding_proj;
    Tensor embedding_norm, hidden_norm, post_norm, norm;
    std::optional<Tensor> fc_norm;  // (S, C)
};

struct FeatureOptions {
    int64_t head_dim;
    float eps;
    bool norm_output;           // a guess hands on its normed output, not the residual stream
    bool norm_before_residual;  // the residual stream begins with the normed state
};

struct FeatureMemory {
    const Pages* entries;
    char* states;  // (slots, C), of the pages' type
    int64_t slots;
};

/// Tokens that the target has passed: their own slots, and those before them.
struct NotedTokens {
    int64_t count;
    const int64_t *ids, *positions, *slots, *before;  // (N)
    const float* states;                              // (S, of, C): the residual stream behind some layers
    const int64_t* columns;                           // (N): where in `of` each token stands
    int64_t of;
};

class FeatureDraft {
  public:
    static constexpr float never = -1e5f;  // the logit of a token that it cannot propose: finite, so there is a law

    /// `embedding` is the target's. `tokens` (M): those of the head's rows. `bits`: see Matrix. Throws
    /// std::invalid_argument if shapes do not fit each other.
    FeatureDraft(std::shared_ptr<Embedding> embedding, const FeatureWeights& weights, const FeatureOptions& options,
                 std::vector<int64_t> tokens, int bits);

    int64_t vocabulary() const { return embedding_->vocabulary(); }
    int64_t hidden() const { return fc_.outputs(); }
    int64_t states() const { return fc_.inputs() / hidden(); }
    Type type() const { return fc_.type(); }
    size_t bytes() const;

    /// Throws std::invalid_argument unless memory and batch fit each other and this draft.
    void check(const FeatureMemory& memory, const ForwardBatch& batch) const;
    /// One pass: logits (B, J, V) of the scored columns; the last output of each row that is fed is kept as a state.
    void forward(const FeatureMemory& memory, const ForwardBatch& batch) const;

    void check(const FeatureMemory& memory, const NotedTokens& tokens) const;
    /// Keeps the states behind tokens, and makes their entries.
    void note(const FeatureMemory& memory, const NotedTokens& tokens, const Rotation& rotation) const;

  private:
    struct Inputs;
    /// What some tokens' q, k and v are projected from, (N, 2 C) of the products' type, and the residual stream.
    Inputs inputs(Scratch& scratch, const FeatureMemory& memory, const int64_t* ids, const int64_t* before,
                  int64_t count) const;
    void fuse(const NotedTokens& tokens, float* fused) const;
    void finish(const Inputs& inputs, const void* attn_out, int64_t count) const;
    void score(const ForwardBatch& batch, const float* x) const;

    std::shared_ptr<Embedding> embedding_;
    FeatureOptions options_;
    std::vector<int64_t> tokens_;
    Matrix fc_, q_, k_, v_, o_, down_;
    std::optional<Matrix> embedding_proj_;
    GatedMlp mlp_;
    std::vector<Norm> fc_norms_;  // of each state; or none
    Norm embedding_norm_, hidden_norm_, norm_;
    LmHead head_;
};

}  // namespace triforce
