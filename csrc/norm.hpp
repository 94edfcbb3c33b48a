// RMSNorm (Zhang and Sennrich 2019) of float32 rows.
#pragma once

#include <cstdint>

#include "simd_dispatch.hpp"
#include "types.hpp"

namespace triforce {

struct NormKernels {
    /// y = x / sqrt(mean(x^2) + eps) * weight, in float32, rounded once: to `type`. y may be x. `weight` and y have n
    /// numbers rounded up to 16: where the rest of the weight is zero, so is that of y.
    void (*rms)(const float* x, int64_t n, const float* weight, float eps, Type type, void* y);
};
TF_KERNEL_TABLE(NormKernels, norm_kernels)

}  // namespace triforce
