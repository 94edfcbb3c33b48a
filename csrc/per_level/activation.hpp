// Activation of an MLP's gate, and its product with the up projection.
#pragma once

#include "../linear.hpp"
#include "simd.hpp"

namespace triforce::TF_LEVEL {

/// x / (1 + e^-u). u is clamped to at least -88, because e^88 is finite.
TF_INLINE F16 times_sigmoid(F16 x, F16 u) { return x / (set1(1.0f) + exp(zero() - max(set1(-88.0f), u))); }

/// The tanh of GELU is a sigmoid: (1 + tanh(u / 2)) / 2 = 1 / (1 + e^-u), with u = sqrt(8 / pi) (x + .044715 x^3).
TF_INLINE F16 gelu(F16 x) {
    const F16 cubic = fma(x * x, x * set1(0.044715f), x);
    return times_sigmoid(x, cubic * set1(1.5957691216f));
}

/// The clamped SwiGLU of gpt-oss (arXiv 2508.10925): bounds 7 and -7, gain 1.702 of the sigmoid.
TF_INLINE F16 clamped_swiglu(F16 gate, F16 up) {
    const F16 most = set1(7.0f);
    gate = min(most, gate), up = max(set1(-7.0f), min(most, up));
    return times_sigmoid(gate, gate * set1(1.702f)) * (up + set1(1.0f));
}

TF_INLINE F16 gated(Activation activation, F16 gate, F16 up) {
    if (activation == Activation::clamped) return clamped_swiglu(gate, up);
    return (activation == Activation::gelu ? gelu(gate) : silu(gate)) * up;
}

}  // namespace triforce::TF_LEVEL
