// What an MLP's gate goes through.
#pragma once

#include "../linear.hpp"
#include "simd.hpp"

namespace triforce::TF_LEVEL {

/// x / (1 + e^-u), where the sigmoid's argument is bound so that e^88 is finite.
TF_INLINE F16 times_sigmoid(F16 x, F16 u) { return x / (set1(1.0f) + exp(zero() - max(set1(-88.0f), u))); }

/// The tanh of GELU is a sigmoid: (1 + tanh(u / 2)) / 2 = 1 / (1 + e^-u), with u = sqrt(8 / pi) (x + .044715 x^3).
TF_INLINE F16 gelu(F16 x) {
    const F16 cubic = fma(x * x, x * set1(0.044715f), x);
    return times_sigmoid(x, cubic * set1(1.5957691216f));
}

TF_INLINE F16 activated(Activation activation, F16 x) { return activation == Activation::gelu ? gelu(x) : silu(x); }

}  // namespace triforce::TF_LEVEL
