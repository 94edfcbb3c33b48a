#include "low_bit.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include "half.hpp"

namespace triforce {
namespace {

/// A block of a file, unpacked: codes in the order of inputs, and scales as packed memory has them.
struct FileBlock {
    uint8_t codes[super_groups * group_size];
    uint16_t scale, minimum;               // halves
    int8_t small[2 * super_groups];        // scales of a super-block's groups, or of their halves
    uint8_t small_minima[super_groups];
};

bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

uint16_t half_at(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return bits;
}

/// Reads the codes of 32 inputs from 16 bytes: the lower nibbles come first.
void nibbles(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 16; i++) codes[i] = from[i] & 15, codes[i + 16] = from[i] >> 4;
}

/// Adds the fifth bits of 32 codes from 4 bytes.
void fifth_bits(const uint8_t* from, uint8_t* codes) {
    uint32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    for (int i = 0; i < 32; i++) codes[i] |= (bits >> i & 1) << 4;
}

/// Reads eight scales and eight minima of 6 bits from 12 bytes. The upper two bits of the last four scales and minima
/// are the upper two bits of the first eight bytes.
void six_bits(const uint8_t* from, FileBlock& block) {
    for (int i = 0; i < 4; i++) {
        block.small[i] = static_cast<int8_t>(from[i] & 63), block.small_minima[i] = from[i + 4] & 63;
        block.small[i + 4] = static_cast<int8_t>((from[i + 8] & 15) | from[i] >> 6 << 4);
        block.small_minima[i + 4] = static_cast<uint8_t>(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
    }
}

/// Reads the codes of four pairs of groups. A pair lies in the nibbles of 32 bytes. `upper`, if any, has 32 bytes: bit
/// g of byte i is the fifth bit of code i of group g.
void pairs_of_groups(const uint8_t* from, const uint8_t* upper, uint8_t* codes) {
    for (int g = 0; g < super_groups; g++)
        for (int i = 0; i < group_size; i++) {
            const int nibble = from[g / 2 * 32 + i] >> 4 * (g % 2) & 15;
            codes[32 * g + i] = static_cast<uint8_t>(nibble | (upper ? (upper[i] >> g & 1) << 4 : 0));
        }
}

/// Reads the 6-bit codes of two halves of 128 inputs. A half has four quarters: two in the lower nibbles of 64 bytes,
/// then two in the upper nibbles. Quarter q has bits 2q and 2q + 1 of 32 more bytes as upper bits.
void six_bit_codes(const uint8_t* lower, const uint8_t* upper, uint8_t* codes) {
    for (int half = 0; half < 2; half++, lower += 64, upper += 32, codes += 128)
        for (int q = 0; q < 4; q++)
            for (int i = 0; i < 32; i++)
                codes[32 * q + i] =
                    static_cast<uint8_t>((lower[q % 2 * 32 + i] >> q / 2 * 4 & 15) | (upper[i] >> 2 * q & 3) << 4);
}

/// Reads a block of a file.
FileBlock read(Format format, const uint8_t* from) {
    FileBlock b{};
    switch (format) {
        case Format::q4_0: b.scale = half_at(from), nibbles(from + 2, b.codes); break;
        case Format::q4_1: b.scale = half_at(from), b.minimum = half_at(from + 2), nibbles(from + 4, b.codes); break;
        case Format::q5_0: b.scale = half_at(from), nibbles(from + 6, b.codes), fifth_bits(from + 2, b.codes); break;
        case Format::q5_1:
            b.scale = half_at(from), b.minimum = half_at(from + 2);
            nibbles(from + 8, b.codes), fifth_bits(from + 4, b.codes);
            break;
        case Format::q8_0: b.scale = half_at(from), std::memcpy(b.codes, from + 2, group_size); break;
        case Format::q4_k:
        case Format::q5_k:
            b.scale = half_at(from), b.minimum = half_at(from + 2), six_bits(from + 4, b);
            if (format == Format::q4_k)
                pairs_of_groups(from + 16, nullptr, b.codes);
            else
                pairs_of_groups(from + 48, from + 16, b.codes);
            break;
        case Format::q6_k:
            six_bit_codes(from, from + 128, b.codes);
            std::memcpy(b.small, from + 192, sizeof b.small), b.scale = half_at(from + 208);
            break;
        case Format::none: break;
    }
    return b;
}

/// Writes one output's codes of a group into the group's vectors.
void put_codes(int bits, const uint8_t* codes, int lane, uint8_t* group) {
    for (int step = 0; step < group_steps; step++)
        for (int i = 0; i < 4; i++) {
            const int at = 4 * lane + i, code = codes[4 * step + i];
            if (bits == 8) {
                group[step * vector_bytes + at] = static_cast<uint8_t>(code);
                continue;
            }
            group[step / 2 * vector_bytes + at] |= static_cast<uint8_t>((code & 15) << 4 * (step % 2));
            uint8_t* above = group + 4 * vector_bytes + at;
            if (bits == 5) *above |= static_cast<uint8_t>(code >> 4 << step);
            if (bits == 6) above[step / 4 * vector_bytes] |= static_cast<uint8_t>(code >> 4 << 2 * (step % 4));
        }
}

/// The code of one output and input in a group's vectors.
int code_of(int bits, const uint8_t* group, int lane, int input) {
    const int step = input / 4, at = 4 * lane + input % 4;
    if (bits == 8) return static_cast<int8_t>(group[step * vector_bytes + at]);
    const uint8_t* above = group + 4 * vector_bytes + at;
    int code = group[step / 2 * vector_bytes + at] >> 4 * (step % 2) & 15;
    if (bits == 5) code |= (*above >> step & 1) << 4;
    if (bits == 6) code |= (above[step / 4 * vector_bytes] >> 2 * (step % 4) & 3) << 4;
    return code;
}

void put_half(uint16_t half, int lane, uint8_t* to) { std::memcpy(to + 2 * lane, &half, sizeof half); }
float get_half(const uint8_t* from, int lane) { return half_to_float(half_at(from + 2 * lane)); }

/// Writes one output's scales of a block beside the scales of the other outputs.
void put_scales(const FormatParts& f, const FileBlock& block, int lane, uint8_t* to) {
    put_half(block.scale, lane, to);
    if (f.minimum()) put_half(block.minimum, lane, to + 32);
    if (!f.super()) return;
    to += f.minimum() ? 64 : 32;
    for (int g = 0; g < super_groups; g++, to += 32) {
        to[lane] = static_cast<uint8_t>(f.minimum() ? block.small[g] : block.small[2 * g]);
        to[16 + lane] = f.minimum() ? block.small_minima[g] : static_cast<uint8_t>(block.small[2 * g + 1]);
    }
}

/// Factor and summand of the codes in half a group: a weight is scale * code + minimum.
struct Affine {
    float scale, minimum;
};

Affine affine(const FormatParts& f, const uint8_t* scales, int64_t group, int half, int lane) {
    const uint8_t* block = scales + group / (f.file_inputs() / group_size) * scale_bytes(f);
    const float d = get_half(block, lane);
    if (f.scales == Scales::half) return {d, 0};
    if (f.scales == Scales::half_min) return {d, get_half(block + 32, lane)};
    const uint8_t* small = block + (f.minimum() ? 64 : 32) + group % super_groups * 32 + lane;
    if (f.scales == Scales::super_half) return {d * static_cast<int8_t>(small[16 * half]), 0};
    return {d * small[0], -get_half(block + 32, lane) * small[16]};
}

}  // namespace

Format format_named(const char* name) {
    constexpr std::string_view names[] = {"", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"};
    for (int i = 1; i < 9; i++)
        if (names[i] == name) return static_cast<Format>(i);
    return Format::none;
}

int64_t file_block_bytes(Format format) {
    constexpr int64_t bytes[] = {0, 18, 20, 22, 24, 34, 144, 176, 210};
    return bytes[static_cast<int>(format)];
}

void encode_q4_1(const float* weights, uint8_t* file) {
    float least = weights[0], largest = weights[0];
    for (int i = 1; i < group_size; i++)
        least = std::min(least, weights[i]), largest = std::max(largest, weights[i]);
    const uint16_t scale = to_half((largest - least) / 15), minimum = to_half(least);
    const float d = half_to_float(scale), inverse = d > 0 ? 1 / d : 0;
    std::memcpy(file, &scale, sizeof scale), std::memcpy(file + 2, &minimum, sizeof minimum);
    const auto code = [&](int i) {
        const float multiple = std::nearbyint((weights[i] - half_to_float(minimum)) * inverse);
        return static_cast<int>(std::clamp(multiple, 0.0f, 15.0f));
    };
    for (int i = 0; i < 16; i++) file[4 + i] = static_cast<uint8_t>(code(i) | code(i + 16) << 4);
}

bool pack_block(Format format, const uint8_t* file, int64_t rows, int64_t inputs, uint8_t* block) {
    const FormatParts f = parts(format);
    const int64_t blocks = inputs / f.file_inputs(), groups = f.file_inputs() / group_size;
    uint8_t* scales = block + inputs / group_size * code_bytes(f);
    bool finite = true;
    for (int64_t b = 0; b < blocks; b++)
        for (int lane = 0; lane < rows; lane++) {
            const FileBlock from = read(format, file + (lane * blocks + b) * file_block_bytes(format));
            for (int64_t g = 0; g < groups; g++)
                put_codes(f.bits, from.codes + g * group_size, lane, block + (b * groups + g) * code_bytes(f));
            put_scales(f, from, lane, scales + b * scale_bytes(f));
            finite &= is_finite(from.scale) && is_finite(from.minimum);
        }
    return finite;
}

void unpack_file_row(Format format, const uint8_t* file, int64_t inputs, float* out) {
    const FormatParts f = parts(format);
    uint8_t scales[64 + super_groups * 32];
    for (int64_t i = 0; i < inputs; i += f.file_inputs(), file += file_block_bytes(format)) {
        const FileBlock from = read(format, file);
        put_scales(f, from, 0, scales);
        for (int64_t k = 0; k < f.file_inputs(); k++) {
            const Affine a = affine(f, scales, k / group_size, static_cast<int>(k % group_size / 16), 0);
            const int code = f.bits == 8 ? static_cast<int8_t>(from.codes[k]) : from.codes[k] - f.offset;
            out[i + k] = a.scale * static_cast<float>(code) + a.minimum;
        }
    }
}

void unpack_output(Format format, const uint8_t* block, int lane, int64_t inputs, float* out) {
    const FormatParts f = parts(format);
    const uint8_t* scales = block + inputs / group_size * code_bytes(f);
    for (int64_t i = 0; i < inputs; i++) {
        const int64_t group = i / group_size;
        const int input = static_cast<int>(i % group_size);
        const Affine a = affine(f, scales, group, input / 16, lane);
        const int code = code_of(f.bits, block + group * code_bytes(f), lane, input) - f.offset;
        out[i] = a.scale * static_cast<float>(code) + a.minimum;
    }
}

}  // namespace triforce
