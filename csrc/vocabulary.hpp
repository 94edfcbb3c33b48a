// Loops over a vocabulary, compiled once per level. All levels agree in every bit: products and sums round separately,
// and a sum has eight lanes at each level.
#pragma once

#include <cstdint>

#include "simd_dispatch.hpp"

namespace triforce {

/// The key of the exponentials at one position; see sample.hpp.
struct NoiseKey {
    uint64_t seed;
    uint32_t choice, position;
};

struct VocabularyKernels {
    /// The largest of n values; NaN if any value is NaN.
    double (*peak_f32)(const float* values, int n);
    double (*peak_f64)(const double* values, int n);

    /// scores = (logits - peak) / temperature.
    void (*scores_f32)(const float* logits, int n, double peak, double temperature, double* scores);
    void (*scores_f64)(const double* logits, int n, double peak, double temperature, double* scores);

    /// values = e^values in place, for values from -inf to 0, within 2 ulp (subnormal results too).
    void (*exponentiate)(double* values, int n);
    double (*sum)(const double* values, int n);

    /// maxima[i] = the largest of values[i], values[i + count], values[i + 2 count], ... for count <= n.
    void (*strided_maxima)(const double* values, int n, double* maxima, int count);

    /// The upper 32 bits of the noise of 2 * pairs tokens from 2 * first_pair on.
    void (*upper_bits)(const NoiseKey& key, int first_pair, int pairs, uint32_t* bits);

    /// Whether any of n tokens may reach weight / exponential >= best, judged by the upper bits of its noise.
    bool (*any_rival)(const double* weights, const uint32_t* bits, int n, double best);
};

TF_KERNEL_TABLE(VocabularyKernels, vocabulary_kernels)

}  // namespace triforce
