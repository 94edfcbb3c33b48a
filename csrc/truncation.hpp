// Top-k, top-p and min-p: which tokens are kept. None of them sorts the vocabulary.
#pragma once

#include <cstdint>
#include <vector>

namespace triforce {

/// Tokens in ascending order, and a value of each. Filters move what is kept to the front.
struct Candidates {
    int32_t* tokens;
    double* values;
    int count;
};

/// Memory that is reused from one filter to the next.
struct Selection {
    std::vector<double> values, buckets;
};

/// Min-p: keeps tokens with at least this value.
void keep_at_least(Candidates& candidates, double least);

/// Top-k: keeps the k largest, the lowest tokens among equals; 0 < k.
void keep_largest(Candidates& candidates, int k, Selection& memory);

/// Top-p: keeps the fewest, the largest first, that add up to this share of `total`, the sum of all; the lowest tokens
/// among equals. Weights are from 0 to 1 and become shares of `total`.
void keep_nucleus(Candidates& weights, double mass, double total, Selection& memory);

}  // namespace triforce
