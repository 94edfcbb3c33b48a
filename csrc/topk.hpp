// The ids of the highest scores.
#pragma once

#include <cstdint>

namespace triforce {

/// The `picks` highest of each KV head's `count` scores; 0 <= picks <= count.
struct TopK {
    const float* scores;
    int64_t heads, stride;  // scores of head h begin at h * stride + first
    int64_t first, count, picks;
    int64_t* ids;  // (heads, picks)
};

/// Writes ids, counted from h * stride, in ascending order. Among equal scores the lowest ids win; NaN ranks above all
/// numbers.
void topk(const TopK& call);

}  // namespace triforce
