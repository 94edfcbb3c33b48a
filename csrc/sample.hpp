// One token from a distribution.
#pragma once

#include "logits_processor.hpp"
#include "noise.hpp"

namespace triforce {

/// The winner of an exponential race: the largest weight / exponential, the lowest token among equals.
int64_t race(const Distribution& probs, int vocabulary, const NoiseKey& key, Workspace& workspace);
/// The same with a table of exponentials (V).
int64_t race(const Distribution& probs, const double* exponentials);

/// Draws from the residual max(p - q, 0) by inversion; from p where the residual is zero or q is null. Never a token of
/// probability zero. p, q: (V); p is `probs`.
int64_t draw(const Distribution& probs, const double* p, const double* q, double uniform);

}  // namespace triforce
