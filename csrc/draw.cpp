#include "draw.hpp"

#include <algorithm>
#include <cmath>

#include "vocabulary.hpp"

namespace triforce {
namespace {

constexpr int tile = 512;  // tokens whose noise is made together; even

struct Winner {
    int64_t token = 0;
    double ratio = 0;

    void meet(int64_t rival, double weight, double exponential) {
        if (weight / exponential > ratio) {
            ratio = weight / exponential;
            token = rival;
        }
    }
};

/// All tokens in order: whole blocks of noise, and a logarithm only where the upper bits leave a chance to win.
int64_t dense_race(const double* weights, int vocabulary, const Place& place) {
    const VocabularyKernels& loops = vocabulary_kernels();
    alignas(64) uint32_t bits[tile];
    Winner winner;
    for (int first = 0; first < vocabulary; first += tile) {
        const int n = std::min(tile, vocabulary - first);
        loops.upper_bits(place, first / 2, (n + 1) / 2, bits);
        if (!loops.any_rival(weights + first, bits, n, winner.ratio)) continue;
        for (int i = 0; i < n; i++)
            if (loops.any_rival(weights + first + i, bits + i, 1, winner.ratio))
                winner.meet(first + i, weights[first + i], exponential(place, first + i));
    }
    return winner.token;
}

}  // namespace

int64_t race(const Law& law, int vocabulary, const Place& place, Workspace& w) {
    if (law.count == 1) return law.tokens[0];
    if (law.count == vocabulary) return dense_race(law.weights, vocabulary, place);
    if (law.count > vocabulary / 4) {  // cheaper with the others than one by one
        w.spread.assign(vocabulary, 0.0);
        for (int i = 0; i < law.count; i++) w.spread[law.tokens[i]] = law.weights[i];
        return dense_race(w.spread.data(), vocabulary, place);
    }
    Winner winner;
    for (int i = 0; i < law.count; i++)
        winner.meet(law.tokens[i], law.weights[i], exponential(place, static_cast<uint32_t>(law.tokens[i])));
    return winner.token;
}

int64_t race(const Law& law, const double* exponentials) {
    Winner winner;
    for (int i = 0; i < law.count; i++) winner.meet(law.tokens[i], law.weights[i], exponentials[law.tokens[i]]);
    return winner.token;
}

int64_t draw(const Law& law, const double* p, const double* q, double uniform) {
    const auto owed = [=](int i) {
        const int32_t token = law.tokens[i];
        return q ? std::max(p[token] - q[token], 0.0) : p[token];
    };
    double total = 0;
    for (int i = 0; i < law.count; i++) total += owed(i);
    if (q && total == 0) return draw(law, p, nullptr, uniform);  // p == q up to rounding
    const double at = std::min(uniform * total, std::nextafter(total, 0.0));  // the product may round up to the total
    double below = 0;
    int i = 0;
    while ((below += owed(i)) <= at) i++;
    return law.tokens[i];
}

}  // namespace triforce
