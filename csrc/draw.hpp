// One token from a law.
#pragma once

#include "law.hpp"
#include "noise.hpp"

namespace triforce {

/// The winner of an exponential race: the largest weight / exponential, the lowest token among equals.
int64_t race(const Law& law, int vocabulary, const Place& place, Workspace& workspace);
int64_t race(const Law& law, const double* exponentials);

/// One token of max(p - q, 0), or of p where that is empty or q is null, by inversion. Never one of probability zero.
/// p and q: a probability for each token of the vocabulary, those of p none but the law's.
int64_t draw(const Law& law, const double* p, const double* q, double uniform);

}  // namespace triforce
