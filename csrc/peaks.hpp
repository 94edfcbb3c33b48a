// What the processor can compute at most, which other kernels are measured against: the arithmetic of their products in
// registers alone.
#pragma once

#include <cstdint>

#include "simd_dispatch.hpp"

namespace triforce {

enum class Arithmetic : int { float32, bfloat16, int16, int8 };

struct PeakKernels {
    /// Multiplies and adds `rounds` times in many chains. Returns how many operations that were, two for each
    /// multiplication and its addition.
    int64_t (*run)(Arithmetic arithmetic, int64_t rounds);
};
TF_KERNEL_TABLE(PeakKernels, peak_kernels)

}  // namespace triforce
