// Draws of one token from a distribution, and the counter-based noise of triforce.backends.torch.noise, bit for bit:
// Philox4x32-10 (Salmon et al. 2011) keyed by the seed. The counter is (token / 2, position, choice, 0) for
// exponentials, (draw low, draw high, choice, 1 + tier) for uniforms.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "logits_processor.hpp"
#include "vocabulary.hpp"

namespace triforce {

struct Words {
    uint32_t word[4];
};

inline Words philox(Words c, uint64_t seed) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
        const uint64_t p0 = uint64_t{0xD2511F53} * c.word[0], p1 = uint64_t{0xCD9E8D57} * c.word[2];
        c = {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ k0, static_cast<uint32_t>(p1),
              static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ k1, static_cast<uint32_t>(p0)}};
    }
    return c;
}

inline uint64_t bits53(uint32_t high, uint32_t low) { return uint64_t{high} << 21 | low >> 11; }

/// A standard exponential in [2^-53, 36.8].
inline double exponential(const NoiseKey& key, uint32_t token) {
    const Words block = philox({{token / 2, key.position, key.choice, 0}}, key.seed);
    const uint32_t* pair = block.word + 2 * (token % 2);
    return -std::log(static_cast<double>(bits53(pair[0], pair[1]) | 1) * 0x1p-53);
}

/// The noise of a batch's rows, which is keyed by their seeds and choices.
struct Noise {
    std::vector<uint64_t> seeds;
    std::vector<uint32_t> choices;

    NoiseKey key(int row, int64_t position) const {
        return {seeds[row], choices[row], static_cast<uint32_t>(position)};
    }

    double uniform(int row, int tier, uint64_t draw) const {
        const auto low = static_cast<uint32_t>(draw), high = static_cast<uint32_t>(draw >> 32);
        const Words block = philox({{low, high, choices[row], 1 + static_cast<uint32_t>(tier)}}, seeds[row]);
        return static_cast<double>(bits53(block.word[0], block.word[1])) * 0x1p-53;
    }
};

/// The winner of an exponential race: the largest weight / exponential, the lowest token among equals.
int64_t race(const Distribution& probs, int vocabulary, const NoiseKey& key, Workspace& workspace);
/// `race` with a table of exponentials (V).
int64_t race(const Distribution& probs, const double* exponentials);

/// Draws from the residual max(p - q, 0) by inversion; from p if the residual is zero or q is null. Never returns a
/// token of probability zero. p and q are probabilities (V); p equals `probs`. uniform: in [0, 1).
int64_t draw(const Distribution& probs, const double* p, const double* q, double uniform);

/// What a row that ends at a place of a block draws from: max(reach * p - q, 0), for probabilities p and q (V). q is
/// null after the last draft token.
struct BlockResidual {
    const double *p, *q;
    double reach;
    int vocabulary;

    double operator()(int token) const { return std::max(reach * p[token] - (q ? q[token] : 0.0), 0.0); }
    double total() const;
    /// Draws a token by inversion; from p if the residual is zero. uniform: in [0, 1).
    int64_t draw(double uniform) const;
};

}  // namespace triforce
