// The types of numbers in tensors.
#pragma once

#include <cstdint>
#include <cstring>

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

enum class Type { f32, bf16, f64, i64, i32, i8, u8, boolean, other };

constexpr float int8_largest = 127;  // of int8 with a scale; -128 is not used

/// Bytes of a weight or of a number in a page, whose type is one of the first two.
constexpr int64_t size_of(Type type) { return type == Type::bf16 ? 2 : 4; }

template <class T>
inline constexpr Type type_of = Type::other;
template <>
inline constexpr Type type_of<float> = Type::f32;
template <>
inline constexpr Type type_of<bf16> = Type::bf16;
template <>
inline constexpr Type type_of<double> = Type::f64;
template <>
inline constexpr Type type_of<int64_t> = Type::i64;
template <>
inline constexpr Type type_of<int32_t> = Type::i32;
template <>
inline constexpr Type type_of<int8_t> = Type::i8;
template <>
inline constexpr Type type_of<uint8_t> = Type::u8;
template <>
inline constexpr Type type_of<bool> = Type::boolean;

}  // namespace triforce
