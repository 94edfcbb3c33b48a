// IEEE half precision in memory.
#pragma once

#include <cstdint>
#include <cstring>

namespace triforce {

/// float16 in memory.
struct half {
    uint16_t bits;
};

/// Exact, because each half is a float.
inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t bits = (magnitude << 13) + (112u << 23);  // the bias of exponents grows from 15 to 127
    if (magnitude >= 0x7c00) bits += 112u << 23;       // Inf and NaN
    float value = static_cast<float>(magnitude) * 0x1p-24f;
    if (magnitude < 0x400) std::memcpy(&bits, &value, sizeof bits);  // zero and subnormal
    bits |= sign;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float to_float(half x) { return half_to_float(x.bits); }

/// The nearest half, ties to even; infinity beyond the largest half.
inline uint16_t to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) {  // a multiple of 2^-24: a sum with 0.5 rounds it
        float rounded;
        std::memcpy(&rounded, &bits, sizeof rounded);
        rounded += 0.5f;
        std::memcpy(&bits, &rounded, sizeof bits);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000));
    }
    return static_cast<uint16_t>(sign | ((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13));
}

}  // namespace triforce
