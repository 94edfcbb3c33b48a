// The warper: from the logits of one column to its law, as triforce.sampling.logits defines it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "select.hpp"

namespace triforce {

/// How one row is sampled, and how many tokens of its text are the prompt. Neutral: 1, 0, 1, 0, 1, 0, 0 and no bias.
struct Row {
    double temperature;
    int64_t top_k;
    double top_p, min_p, repetition, presence, frequency;
    std::vector<std::pair<int64_t, double>> bias;  // token, added to its logit
    int64_t prompt;

    bool raw() const { return repetition == 1 && presence == 0 && frequency == 0 && bias.empty(); }
};

/// The text before a column.
struct Text {
    const int64_t* ids;
    int64_t length;
};

/// The logits of one column, and the largest of them.
struct Logits {
    const float* f32;   // one of the two
    const double* f64;
    int vocabulary;
    double peak;
};

/// Tokens that can be drawn, ascending, with weights proportional to their probabilities. `total` is the sum of these.
struct Law {
    const int32_t* tokens;
    const double* weights;
    int count;
    double total;
};

/// What one thread needs to find a law; a law lives in it until the next one.
struct Workspace {
    std::vector<double> scores, spread;
    std::vector<int32_t> tokens, counts;  // counts: zero between calls
    Selection selection;
};

/// The largest logit: NaN if one is. A law exists if it is finite.
double peak(const float* f32, const double* f64, int vocabulary);

Law law(const Row& row, Text text, const Logits& logits, Workspace& workspace);

}  // namespace triforce
