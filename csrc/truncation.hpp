// Top-k, top-p and min-p: which tokens are kept. None of them sorts the vocabulary.
#pragma once

#include <cstdint>
#include <vector>

namespace triforce {

/// Tokens in ascending order with their values. Filters move the kept tokens to the front.
struct Candidates {
    int32_t* tokens;
    double* values;
    int count;
};

/// Memory that filters reuse.
struct Selection {
    std::vector<double> values, buckets;
};

/// Min-p: keeps tokens with at least this value.
void keep_at_least(Candidates& candidates, double least);

/// Top-k: keeps the tokens of the k largest values, among equals the lowest tokens; 0 < k.
void keep_largest(Candidates& candidates, int k, Selection& memory);

/// Top-p: keeps the smallest set of largest weights whose sum is at least mass * total. Among equal weights the lowest
/// tokens stay. `total`: the sum of all weights. Weights lie in [0, 1]; the kept weights are divided by `total`.
void keep_nucleus(Candidates& weights, double mass, double total, Selection& memory);

}  // namespace triforce
