// Warp, draw and verify: from the logits of a pass to the guesses that are kept and one token more.
//
// The decisions are those of triforce.speculation.verification, made column by column: no law is found behind the first
// refusal of a row. A column's outcome depends on nothing but its row and its place: neither batch nor threads enter.
// Rows B, text capacity S, guesses K, columns J = K + 1, vocabulary V.
#pragma once

#include <cstdint>
#include <vector>

#include "law.hpp"
#include "noise.hpp"

namespace triforce {

/// How the rows of a batch are sampled.
struct Sampler {
    int vocabulary;
    std::vector<Row> rows;
};

/// The arrays of one pass, checked.
struct Pass {
    int rows, columns, vocabulary;
    int64_t capacity;
    const float* logits_f32;  // (B, J, V), one of the two
    const double* logits_f64;
    const int64_t *ids, *lengths;  // (B, S), (B)
    const bool* live;              // (B)
    const int64_t *tokens, *origins, *counts;  // the guesses: (B, K), (B, K), (B)
    int64_t tier;
    int64_t *out_tokens, *out_origins, *out_counts;  // (B, J), (B, J), (B)
};

/// The noise of `seeded`: keyed, or a table (B, J, V) of exponentials.
struct Exponentials {
    const Noise* noise;
    const double* table;
};

/// The noise of `rejection`, (B, J); the laws (B, K, V) of the guesses, and those (B, J, V) of what is kept.
struct Trial {
    const double* uniforms;
    const double* guessed_laws;
    double* laws;
};

/// A column without a law: its largest logit is not finite.
struct Refusal {
    int row, column;
    double peak;
};

/// Whether there is a law in every column; if not, nothing is written but `refusal`. What is written for a row that is
/// not live is padding.
bool verify_seeded(const std::vector<Row>& rows, const Pass& pass, const Exponentials& noise, Refusal& refusal);
bool verify_by_rejection(const std::vector<Row>& rows, const Pass& pass, const Trial& trial, Refusal& refusal);

}  // namespace triforce
