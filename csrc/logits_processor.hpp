// The logits processor: from the logits of one column to its distribution, as triforce.backends.torch.logits_processor
// defines it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "truncation.hpp"

namespace triforce {

/// Sampling parameters of one row. Neutral values: temperature 1, top_k 0, top_p 1, min_p 0, repetition 1, presence 0,
/// frequency 0, no bias.
struct RowParams {
    double temperature;
    int64_t top_k;
    double top_p, min_p, repetition, presence, frequency;
    std::vector<std::pair<int64_t, double>> bias;  // token, added to its logit
    int64_t prompt;  // length of the prompt in tokens

    /// Whether neither penalties nor biases change the logits.
    bool raw() const { return repetition == 1 && presence == 0 && frequency == 0 && bias.empty(); }
};

/// The text before a column.
struct Prefix {
    const int64_t* ids;
    int64_t length;
};

/// The logits of one column, and the largest of them.
struct Logits {
    const float* f32;  // (V); one of f32 and f64 is null
    const double* f64;
    int vocabulary;
    double peak;
};

/// Tokens that can be drawn, ascending, with weights proportional to their probabilities. `total`: sum of the weights.
struct Distribution {
    const int32_t* tokens;
    const double* weights;
    int count;
    double total;
};

/// Memory of one thread for a distribution. The distribution is valid until the next one is made in this memory.
struct Workspace {
    std::vector<double> scores, dense;
    std::vector<int32_t> tokens, counts;  // counts: zero between calls
    Selection selection;
};

/// The largest logit; NaN if any logit is NaN. A distribution exists only if the peak is finite.
double peak(const Logits& logits);

/// Applies penalties, biases, temperature, min-p, top-k and top-p, in this order.
Distribution process_logits(const RowParams& row, Prefix prefix, const Logits& logits, Workspace& workspace);

}  // namespace triforce
