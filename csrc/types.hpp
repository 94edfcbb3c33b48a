// Types of numbers in tensors, and checks of arguments, for all kernels.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace triforce {

/// bfloat16 in memory: the upper half of a float.
struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

/// The bfloat16 nearest to a finite number, ties to even.
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return {static_cast<uint16_t>((bits + (bits >> 16 & 1) + 0x7fff) >> 16)};
}

enum class Type { f32, bf16, half, f64, i64, i32, i8, u8, boolean, other };

constexpr float int8_largest = 127;  // largest code of int8 numbers with a scale; -128 is not used
constexpr float int16_largest = 32767;

/// Bytes of a weight, or of a number in a page. `type` is f32, bf16 or half.
constexpr int64_t size_of(Type type) { return type == Type::bf16 || type == Type::half ? 2 : 4; }

constexpr Type type_of(float) { return Type::f32; }
constexpr Type type_of(bf16) { return Type::bf16; }
constexpr Type type_of(double) { return Type::f64; }
constexpr Type type_of(int64_t) { return Type::i64; }
constexpr Type type_of(int32_t) { return Type::i32; }
constexpr Type type_of(int8_t) { return Type::i8; }
constexpr Type type_of(uint8_t) { return Type::u8; }
constexpr Type type_of(bool) { return Type::boolean; }

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/// Throws std::invalid_argument, which Python sees as a ValueError.
inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

}  // namespace triforce
