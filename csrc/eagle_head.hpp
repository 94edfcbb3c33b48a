// An EAGLE head: a draft of one layer that reads hidden states of its target (EAGLE-3, Li et al. 2025, arXiv
// 2503.01840).
//
// Each slot of a pool of pages has an entry and a state. The entry is the keys and values of the head's layer. It is
// computed from the slot's token and the previous slot's state. The state is `fc` of the target's hidden states, from
// its latest pass over the slot; or the head's output, if the slot has a draft token that the target has not passed.
// Slot 0 of the scratch page has a state of zeros, the state before a text.
//
// Rows B, tokens T of a row in a pass, tokens N of a target pass, hidden size C, hidden states S of a token, X = S * C,
// tokens M that the head can propose, vocabulary V.
#pragma once

#include <optional>
#include <vector>

#include "decoder.hpp"

namespace triforce {

/// The tensors of a head: fc (C, X); q, k and v have inputs 2 C; head (M, C).
struct EagleHeadWeights {
    WeightSource fc, q, k, v, o, gate, up, down, head;
    std::optional<WeightSource> embedding_proj;
    Tensor embedding_norm, hidden_norm, post_norm, norm;
    std::optional<Tensor> fc_norm;  // (S, C)
};

struct EagleHeadOptions {
    int64_t head_dim;
    float eps;
    bool norm_output;           // the state of a draft token is the normed output, not the residual stream
    bool norm_before_residual;  // the residual stream begins with the normed state
};

/// Entries and states of all slots.
struct EagleHeadMemory {
    const Pages* entries;
    char* states;  // (slots, C), of the pages' type
    int64_t slots;
};

/// Tokens of a pass of the target, their slots, and the slots of the tokens before them.
struct NotedTokens {
    int64_t count;
    const int64_t *ids, *positions, *slots, *previous_slots;  // (N)
    const float* states;     // (S, pass_tokens, C): the residual stream after each of S layers
    const int64_t* columns;  // (N): index of each token among the tokens of the pass
    int64_t pass_tokens;
};

class EagleHead {
  public:
    /// Logit of tokens that the head cannot propose; finite, so that a distribution exists.
    static constexpr float unproposed_logit = -1e5f;

    /// embedding: the target's. tokens (M): token ids of the rows of `weights.head`. bits: see Matrix. Throws
    /// std::invalid_argument if shapes do not fit each other.
    EagleHead(std::shared_ptr<Embedding> embedding, const EagleHeadWeights& weights, const EagleHeadOptions& options,
              std::vector<int64_t> tokens, int bits);

    int64_t vocabulary() const { return embedding_->vocabulary(); }
    int64_t hidden() const { return fc_.outputs(); }
    int64_t states() const { return fc_.inputs() / hidden(); }
    Type type() const { return fc_.type(); }
    size_t bytes() const;

    /// Throws std::invalid_argument unless memory and batch fit each other and this head.
    void check(const EagleHeadMemory& memory, const ForwardBatch& batch) const;
    /// One pass. Writes logits (B, J, V) of the scored columns. The output of a row's last token becomes the state of
    /// its slot.
    void forward(const EagleHeadMemory& memory, const ForwardBatch& batch) const;

    void check(const EagleHeadMemory& memory, const NotedTokens& tokens) const;
    /// Writes the states of tokens, then their entries.
    void note(const EagleHeadMemory& memory, const NotedTokens& tokens, const Rotation& rotation) const;

  private:
    struct Inputs;
    /// The input of tokens' q, k and v, (N, 2 C) of the products' type, and the start of their residual stream.
    Inputs inputs(Scratch& scratch, const EagleHeadMemory& memory, const int64_t* ids, const int64_t* previous_slots,
                  int64_t count) const;
    void fuse(const NotedTokens& tokens, float* fused) const;
    void finish(const Inputs& inputs, const void* attn_out, int64_t count) const;
    void score(const ForwardBatch& batch, const float* x) const;

    std::shared_ptr<Embedding> embedding_;
    EagleHeadOptions options_;
    std::vector<int64_t> tokens_;
    Matrix fc_, q_, k_, v_, o_, down_;
    std::optional<Matrix> embedding_proj_;
    GatedMlp mlp_;
    std::vector<Norm> fc_norms_;  // one per hidden state of a token, or none
    Norm embedding_norm_, hidden_norm_, norm_;
    LmHead head_;
};

}  // namespace triforce
