#include "best.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "memory.hpp"
#include "threads.hpp"

namespace triforce {
namespace {

constexpr int bucket_bits = 11, buckets = 1 << bucket_bits, shift = 32 - bucket_bits;

/// Unsigned numbers in the order of the scores; the two zeros are one.
uint32_t key_of(float score) {
    if (std::isnan(score)) return ~0u;
    uint32_t bits;
    score += 0.0f;
    std::memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

/// A key with at most `picks` above it, and how many equal to it are still wanted.
struct Threshold {
    uint32_t key;
    int64_t equals;
};

/// One look at the upper bits of all keys, then a closer one at those in the bucket where the threshold lies.
Threshold threshold(const uint32_t* keys, int64_t count, int64_t picks, uint32_t* close) {
    int32_t sizes[buckets] = {};
    for (int64_t i = 0; i < count; i++) sizes[keys[i] >> shift]++;
    int64_t wanted = picks;
    uint32_t bucket = buckets - 1;
    for (; wanted > sizes[bucket]; bucket--) wanted -= sizes[bucket];
    uint32_t* end = close;
    for (int64_t i = 0; i < count; i++) {
        *end = keys[i];
        end += keys[i] >> shift == bucket;
    }
    uint32_t* at = close + wanted - 1;
    std::nth_element(close, at, end, std::greater<>());
    return {*at, 1 + std::count(close, at, *at)};
}

void best_of_head(const float* scores, int64_t first, int64_t count, int64_t picks, uint32_t* memory, int64_t* ids) {
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

void run(const Best& best) {
    const int64_t size = 2 * best.count + 1;  // one more: what is not kept is written behind the last one that is
    Scratch scratch;
    uint32_t* memory = scratch.take<uint32_t>(best.heads * size);
    parallel(static_cast<int>(best.heads), [&](int64_t head) {
        best_of_head(best.scores + head * best.stride + best.first, best.first, best.count, best.picks,
                     memory + head * size, best.ids + head * best.picks);
    });
}

}  // namespace triforce
