// The cuts of the warper: which tokens stay. None of them sorts the vocabulary.
#pragma once

#include <cstdint>
#include <vector>

namespace triforce {

/// Tokens in ascending order, and a value of each. Cutting moves what stays to the front.
struct Candidates {
    int32_t* tokens;
    double* values;
    int count;

    /// Those with at least this value.
    void keep_at_least(double value);
};

/// Memory that is used again from one cut to the next.
struct Selection {
    std::vector<double> values, buckets;
};

/// Keep the k largest, the lowest tokens among equals; 0 < k.
void keep_largest(Candidates& candidates, int k, Selection& memory);

/// Keep the fewest, the largest first, that hold this share of `total`, the sum of all; the lowest tokens among equals.
/// Weights are from 0 to 1 and become shares of `total`.
void keep_nucleus(Candidates& weights, double mass, double total, Selection& memory);

}  // namespace triforce
