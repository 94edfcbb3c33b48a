#include "truncation.hpp"

#include <algorithm>
#include <cstring>
#include <functional>

#include "vocabulary.hpp"

namespace triforce {
namespace {

/// Keeps the tokens for which stays(value), without a branch.
template <class Stays>
void keep_if(Candidates& c, Stays stays) {
    int kept = 0;
    for (int i = 0; i < c.count; i++) {
        const double value = c.values[i];
        c.tokens[kept] = c.tokens[i];
        c.values[kept] = value;
        kept += stays(value);
    }
    c.count = kept;
}

/// Keeps values above `edge`, and the first `room` values equal to it.
void keep_to_edge(Candidates& c, double edge, int64_t room) {
    keep_if(c, [&](double value) {
        const bool level = value == edge, stays = (value > edge) | (level & (room > 0));
        room -= level;
        return stays;
    });
}

/// The k-th largest value. Moves the k - 1 values that are as large or larger to the front.
double largest(std::vector<double>& values, int k) {
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<>());
    return values[k - 1];
}

/// A bound that at least k values reach: the k-th largest of k or more maxima over separate sets of positions.
double below_largest(const Candidates& c, int k, std::vector<double>& maxima) {
    maxima.resize(std::min(c.count, std::max(512, 4 * k)));
    vocabulary_kernels().strided_maxima(c.values, c.count, maxima.data(), static_cast<int>(maxima.size()));
    return largest(maxima, k);
}

// Buckets of shares by descending value, 64 an octave. The index of a bucket is the distance of a share's bits from the
// bits of 1, shifted. The last bucket has all smaller shares.
constexpr int buckets = 4096, shift = 46;
constexpr int64_t one = 0x3FF0000000000000;

int bucket(double share) {
    int64_t bits;
    std::memcpy(&bits, &share, sizeof bits);
    return static_cast<int>(std::min<int64_t>((one - bits) >> shift, buckets - 1));
}

/// The largest share that falls into a bucket.
double top_of(int bucket) {
    const int64_t bits = one - (static_cast<int64_t>(bucket) << shift);
    double share;
    std::memcpy(&share, &bits, sizeof share);
    return share;
}

/// The bucket in which the shares, the largest first, add up to `mass`. held: the sum of the buckets before it.
int crossing(const Candidates& c, double mass, std::vector<double>& sums, double& held) {
    sums.assign(buckets, 0.0);
    for (int i = 0; i < c.count; i++) sums[bucket(c.values[i])] += c.values[i];
    int at = 0;
    for (held = 0; at < buckets && held + sums[at] < mass; at++) held += sums[at];
    return at;
}

/// Writes the values in one bucket, in descending order.
void members(const Candidates& c, int bucket, std::vector<double>& values) {
    const double most = top_of(bucket), below = bucket + 1 < buckets ? top_of(bucket + 1) : -1;
    values.resize(c.count);
    int found = 0;
    for (int i = 0; i < c.count; i++) {
        const double value = c.values[i];
        values[found] = value;
        found += (value > below) & (value <= most);
    }
    values.resize(found);
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    if (*low < *high) std::sort(values.begin(), values.end(), std::greater<>());
}

}  // namespace

void keep_at_least(Candidates& c, double least) {
    keep_if(c, [=](double value) { return value >= least; });
}

void keep_largest(Candidates& c, int k, Selection& memory) {
    if (k >= c.count) return;
    keep_at_least(c, below_largest(c, k, memory.values));
    memory.values.assign(c.values, c.values + c.count);
    const double edge = largest(memory.values, k);
    keep_to_edge(c, edge, std::count(memory.values.begin(), memory.values.begin() + k, edge));
}

void keep_nucleus(Candidates& c, double mass, double total, Selection& memory) {
    // Dropped tokens together weigh less than (1 - mass) * total, so the nucleus does not need them. The factor 1 -
    // 1e-3 is a margin for rounding.
    if (mass < 1 - 1e-9) keep_at_least(c, (1 - mass) * total / c.count * (1 - 1e-3));
    vocabulary_kernels().scores_f64(c.values, c.count, 0, total, c.values);
    double held = 0;
    const int at = crossing(c, mass, memory.buckets, held);
    if (at == buckets) return;  // all tokens stay: rounding alone keeps their sum below the mass
    std::vector<double>& values = memory.values;
    members(c, at, values);
    auto end = values.begin();
    while (end != values.end() && held < mass) held += *end++;
    keep_to_edge(c, end[-1], std::count(values.begin(), end, end[-1]));
}

}  // namespace triforce
