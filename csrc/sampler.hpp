// Process, draw and verify: from the logits of a pass to the accepted draft tokens and one more token.
//
// The decisions are those of triforce.speculation.verification, column by column: except for blocks, no distribution is
// computed after a row's first rejection. A column's outcome depends on its row and position alone, and neither on the
// batch nor on threads.
//
// Rows B, text capacity S, draft tokens K, columns J = K + 1, vocabulary V.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sample.hpp"

namespace triforce {

/// The sampling parameters of a batch.
struct Sampler {
    int vocabulary;
    std::vector<RowParams> rows;
};

/// The arrays of one verification, checked.
struct VerificationBatch {
    int rows, columns, vocabulary;
    int64_t capacity;
    const float* logits_f32;  // (B, J, V); one of logits_f32 and logits_f64 is null
    const double* logits_f64;
    const int64_t *ids, *lengths;              // (B, S), (B)
    const bool* live;                          // (B)
    const int64_t *tokens, *origins, *counts;  // of the draft: (B, K), (B, K), (B)
    int64_t tier;
    int64_t *out_tokens, *out_origins, *out_counts;  // (B, J), (B, J), (B)
};

/// The noise of `verify_seeded`: keyed, or a table (B, J, V) of exponentials. One of the two is null.
struct Exponentials {
    const Noise* noise;
    const double* table;
};

/// Further arrays of `verify_by_rejection` and `verify_by_block`.
struct RejectionInputs {
    const double* uniforms;     // (B, J)
    const double* draft_probs;  // (B, K, V)
    double* out_probs;          // (B, J, V)
};

/// A column without a distribution: its largest logit is not finite.
struct InvalidColumn {
    int row, column;
    double peak;
};

using Invalid = std::optional<InvalidColumn>;

/// Verifies with shared noise (Gumbel coupling). Returns a column without a distribution, if any; then nothing is
/// written. The outputs of a row that is not live are padding.
Invalid verify_seeded(const Sampler& sampler, const VerificationBatch& batch, const Exponentials& noise);
/// Verifies by rejection sampling (Leviathan et al. 2023). Returns a column without a distribution, if any.
Invalid verify_by_rejection(const Sampler& sampler, const VerificationBatch& batch, const RejectionInputs& inputs);
/// Verifies by rejection of blocks (Sun et al. 2024, arXiv 2403.10444, Algorithm 2), as `verify_by_rejection` does. It
/// needs the distributions of all columns.
Invalid verify_by_block(const Sampler& sampler, const VerificationBatch& batch, const RejectionInputs& inputs);

}  // namespace triforce
