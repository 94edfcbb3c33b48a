// Peak arithmetic rates of the processor, the reference for other kernels: the arithmetic of their products, in
// registers alone.
#pragma once

#include <cstdint>

#include "simd_dispatch.hpp"

namespace triforce {

enum class Arithmetic : int { float32, bfloat16, int16, int8 };

struct PeakKernels {
    /// Multiplies and adds `rounds` times in several independent chains. Returns the number of operations; a
    /// multiplication and its addition are two.
    int64_t (*run)(Arithmetic arithmetic, int64_t rounds);
};
TF_KERNEL_TABLE(PeakKernels, peak_kernels)

}  // namespace triforce
