// IEEE half precision in memory.
#pragma once

#include <cstdint>
#include <cstring>

namespace triforce {

/// Exact: each half is a float.
inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits = (rest << 13) + (112u << 23);            // the exponent's bias grows from 15 to 127
    if (rest >= 0x7c00) bits += 112u << 23;                 // Inf and NaN
    float value;
    if (rest < 0x400) {                                     // zero and subnormal: multiples of 2^-24
        value = static_cast<float>(rest) * 0x1p-24f;
        std::memcpy(&bits, &value, sizeof bits);
    }
    bits |= sign;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace triforce
