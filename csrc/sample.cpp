#include "sample.hpp"

#include <algorithm>
#include <cmath>

#include "vocabulary.hpp"

namespace triforce {
namespace {

constexpr int tile = 512;  // tokens whose noise is made together; an even number

struct Winner {
    int64_t token = 0;
    double ratio = 0;

    void challenge(int64_t rival, double weight, double exponential) {
        if (weight / exponential > ratio) {
            ratio = weight / exponential;
            token = rival;
        }
    }
};

/// Races all tokens in order. The logarithm of a token's noise is computed only if its upper bits leave a chance to
/// win.
int64_t dense_race(const double* weights, int vocabulary, const NoiseKey& key) {
    const VocabularyKernels& loops = vocabulary_kernels();
    alignas(64) uint32_t bits[tile];
    Winner winner;
    for (int first = 0; first < vocabulary; first += tile) {
        const int n = std::min(tile, vocabulary - first);
        loops.upper_bits(key, first / 2, (n + 1) / 2, bits);
        if (!loops.any_rival(weights + first, bits, n, winner.ratio)) continue;
        for (int i = 0; i < n; i++)
            if (loops.any_rival(weights + first + i, bits + i, 1, winner.ratio))
                winner.challenge(first + i, weights[first + i], exponential(key, first + i));
    }
    return winner.token;
}

template <class Weight>
double sum(int count, const Weight& weight) {
    double total = 0;
    for (int i = 0; i < count; i++) total += weight(i);
    return total;
}

/// Draws an index by inversion, in proportion to weight(0), weight(1), ..., whose sum is `total`, above 0.
template <class Weight>
int invert(const Weight& weight, double total, double uniform) {
    const double at = std::min(uniform * total, std::nextafter(total, 0.0));  // the product may round up to the total
    double below = 0;
    int i = 0;
    while ((below += weight(i)) <= at) i++;
    return i;
}

}  // namespace

int64_t race(const Distribution& probs, int vocabulary, const NoiseKey& key, Workspace& w) {
    if (probs.count == 1) return probs.tokens[0];
    if (probs.count == vocabulary) return dense_race(probs.weights, vocabulary, key);
    if (probs.count > vocabulary / 4) {  // blocks of noise are cheaper than single numbers
        w.dense.assign(vocabulary, 0.0);
        for (int i = 0; i < probs.count; i++) w.dense[probs.tokens[i]] = probs.weights[i];
        return dense_race(w.dense.data(), vocabulary, key);
    }
    Winner winner;
    for (int i = 0; i < probs.count; i++)
        winner.challenge(probs.tokens[i], probs.weights[i], exponential(key, static_cast<uint32_t>(probs.tokens[i])));
    return winner.token;
}

int64_t race(const Distribution& probs, const double* exponentials) {
    Winner winner;
    for (int i = 0; i < probs.count; i++)
        winner.challenge(probs.tokens[i], probs.weights[i], exponentials[probs.tokens[i]]);
    return winner.token;
}

int64_t draw(const Distribution& probs, const double* p, const double* q, double uniform) {
    const auto residual = [=](int i) {
        const int32_t token = probs.tokens[i];
        return q ? std::max(p[token] - q[token], 0.0) : p[token];
    };
    const double total = sum(probs.count, residual);
    if (q && total == 0) return draw(probs, p, nullptr, uniform);  // p == q up to rounding
    return probs.tokens[invert(residual, total, uniform)];
}

double BlockResidual::total() const { return sum(vocabulary, *this); }

int64_t BlockResidual::draw(double uniform) const {
    const double residual_total = total();
    if (residual_total > 0) return invert(*this, residual_total, uniform);
    const BlockResidual whole{p, nullptr, 1, vocabulary};  // reach * p == q up to rounding
    return invert(whole, whole.total(), uniform);
}

}  // namespace triforce
