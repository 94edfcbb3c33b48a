#include "topk.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "memory.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

constexpr int bucket_bits = 11, buckets = 1 << bucket_bits, shift = 32 - bucket_bits;

/// An unsigned key in the order of scores. Both zeros have the same key.
uint32_t key_of(float score) {
    if (std::isnan(score)) return ~0u;
    uint32_t bits;
    score += 0.0f;
    std::memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

/// The lowest key that is picked, and the number of picked keys that equal it.
struct Threshold {
    uint32_t key;
    int64_t equals;
};

/// Counts keys by their upper bits, in buckets, then partially sorts the keys of the threshold's bucket.
Threshold threshold(const uint32_t* keys, int64_t count, int64_t picks, uint32_t* candidates) {
    int32_t sizes[buckets] = {};
    for (int64_t i = 0; i < count; i++) sizes[keys[i] >> shift]++;
    int64_t wanted = picks;
    uint32_t bucket = buckets - 1;
    for (; wanted > sizes[bucket]; bucket--) wanted -= sizes[bucket];
    uint32_t* end = candidates;
    for (int64_t i = 0; i < count; i++) {
        *end = keys[i];
        end += keys[i] >> shift == bucket;
    }
    uint32_t* at = candidates + wanted - 1;
    std::nth_element(candidates, at, end, std::greater<>());
    return {*at, 1 + std::count(candidates, at, *at)};
}

void topk_of_head(const float* scores, int64_t first, int64_t count, int64_t picks, uint32_t* memory, int64_t* ids) {
    if (picks == 0) return;
    uint32_t* keys = memory;
    for (int64_t i = 0; i < count; i++) keys[i] = key_of(scores[i]);
    Threshold limit = threshold(keys, count, picks, memory + count);
    for (int64_t i = 0; i < count; i++) {
        const bool equal = keys[i] == limit.key && limit.equals > 0;
        limit.equals -= equal;
        if (equal || keys[i] > limit.key) *ids++ = first + i;
    }
}

}  // namespace

void topk(const TopK& call) {
    const int64_t size = 2 * call.count + 1;  // one more: a key of another bucket is written behind the last candidate
    Scratch scratch;
    uint32_t* memory = scratch.take<uint32_t>(call.heads * size);
    parallel(call.heads, [&](int64_t head) {
        topk_of_head(call.scores + head * call.stride + call.first, call.first, call.count, call.picks,
                     memory + head * size, call.ids + head * call.picks);
    });
}

}  // namespace triforce
