#include "low_bit.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "half.hpp"

namespace triforce {
namespace {

/// A block of a file, unpacked: codes in the order of inputs, and scales as packed memory has them.
struct FileBlock {
    uint8_t codes[super_groups * group_size];
    uint16_t scale, minimum = 0;             // halves
    int8_t small[2 * super_groups];          // scales of a super-block's groups, or of their halves
    uint8_t small_minima[super_groups];
};

template <class Word>
Word load(const uint8_t* from) {
    Word word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

template <class Word>
void store(Word word, void* to) {
    std::memcpy(to, &word, sizeof word);
}

/// A word whose bytes all have the value `byte`.
template <class Word>
constexpr Word bytes_of(uint8_t byte) {
    return byte * (static_cast<Word>(-1) / 255);
}

/// The fields of `mask` in the bytes of a word, `shift` bits lower than they are.
template <class Word>
Word fields(Word word, int shift, uint8_t mask) {
    return word >> shift & bytes_of<Word>(mask);
}

bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

uint16_t half_at(const uint8_t* at) { return load<uint16_t>(at); }

/// Reads the codes of `count` pairs of inputs from the nibbles of `count` bytes: the lower nibbles come first.
void nibbles(const uint8_t* from, int count, uint8_t* codes) {
    for (int i = 0; i < count; i += 8) {
        const auto word = load<uint64_t>(from + i);
        store(fields(word, 0, 15), codes + i), store(fields(word, 4, 15), codes + count + i);
    }
}

/// Adds the fifth bits of 32 codes from 4 bytes.
void fifth_bits(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 4; i++) {
        const uint64_t bits = from[i] * bytes_of<uint64_t>(1) & 0x8040201008040201;  // byte k has bit k alone
        const uint64_t fifth = bits + bytes_of<uint64_t>(127);                       // its upper bit: whether it is set
        store(load<uint64_t>(codes + 8 * i) | fields(fifth, 7, 1) << 4, codes + 8 * i);
    }
}

/// Adds `count` upper bits of the codes of groups from 32 bytes: the lowest bits of a byte belong to the first group.
void upper_bits(const uint8_t* from, int count, uint8_t* codes) {
    for (int shift = 0; shift < 8; shift += count, codes += group_size)
        for (int i = 0; i < group_size; i += 8) {
            const uint64_t upper = fields(load<uint64_t>(from + i), shift, static_cast<uint8_t>((1 << count) - 1));
            store(load<uint64_t>(codes + i) | upper << 4, codes + i);
        }
}

/// Reads eight scales and eight minima of 6 bits from 12 bytes. The upper two bits of the last four scales and minima
/// are the upper two bits of the first eight bytes.
void six_bits(const uint8_t* from, FileBlock& block) {
    const auto scales = load<uint32_t>(from), minima = load<uint32_t>(from + 4), both = load<uint32_t>(from + 8);
    store(fields(scales, 0, 63), block.small), store(fields(minima, 0, 63), block.small_minima);
    store(fields(both, 0, 15) | fields(scales, 6, 3) << 4, block.small + 4);
    store(fields(both, 4, 15) | fields(minima, 6, 3) << 4, block.small_minima + 4);
}

/// Reads a block of a file.
template <Format format>
FileBlock read(const uint8_t* from) {
    constexpr FormatParts f = parts(format);
    FileBlock b;
    if constexpr (format == Format::q6_k) {
        for (int half = 0; half < 2; half++) {  // of 128 inputs; its upper bits are in 32 bytes behind all nibbles
            nibbles(from + 64 * half, 64, b.codes + 128 * half);
            upper_bits(from + 128 + 32 * half, 2, b.codes + 128 * half);
        }
        std::memcpy(b.small, from + 192, sizeof b.small), b.scale = half_at(from + 208);
        return b;
    }
    b.scale = half_at(from), from += 2;
    if constexpr (f.minimum()) b.minimum = half_at(from), from += 2;
    if constexpr (f.super()) {
        six_bits(from, b);
        const uint8_t* lower = from + (f.bits == 5 ? 44 : 12);
        for (int pair = 0; pair < 4; pair++) nibbles(lower + 32 * pair, 32, b.codes + 64 * pair);
        if constexpr (f.bits == 5) upper_bits(from + 12, 1, b.codes);
    } else if constexpr (f.bits == 8) {
        std::memcpy(b.codes, from, group_size);
    } else {
        nibbles(from + (f.bits == 5 ? 4 : 0), 16, b.codes);
        if constexpr (f.bits == 5) fifth_bits(from, b.codes);
    }
    return b;
}

/// Writes one output's codes of a group into the group's vectors, whose words have the four codes of a step.
template <int bits>
void put_codes(const uint8_t* codes, int lane, uint8_t* group) {
    uint32_t steps[group_steps];
    std::memcpy(steps, codes, sizeof steps);
    const auto put = [&](int vector, uint32_t word) { store(word, group + vector * vector_bytes + 4 * lane); };
    if constexpr (bits == 8) {
        for (int step = 0; step < group_steps; step++) put(step, steps[step]);
        return;
    }
    for (int v = 0; v < 4; v++) put(v, fields(steps[2 * v], 0, 15) | fields(steps[2 * v + 1], 0, 15) << 4);
    constexpr int above = bits - 4;  // upper bits of a code
    for (int v = 0; v < above; v++) {
        uint32_t word = 0;
        for (int i = 0; i < 8 / above; i++)
            word |= fields(steps[v * 8 / above + i], 4, (1 << above) - 1) << above * i;
        put(4 + v, word);
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

void put_half(uint16_t half, int lane, uint8_t* to) { store(half, to + 2 * lane); }
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

/// Calls `body` with a format that is a constant of the compiler.
template <class Body>
auto with_constant(Format format, Body body) {
    switch (format) {
        case Format::q4_0: return body(std::integral_constant<Format, Format::q4_0>());
        case Format::q4_1: return body(std::integral_constant<Format, Format::q4_1>());
        case Format::q5_0: return body(std::integral_constant<Format, Format::q5_0>());
        case Format::q5_1: return body(std::integral_constant<Format, Format::q5_1>());
        case Format::q4_k: return body(std::integral_constant<Format, Format::q4_k>());
        case Format::q5_k: return body(std::integral_constant<Format, Format::q5_k>());
        case Format::q6_k: return body(std::integral_constant<Format, Format::q6_k>());
        default: return body(std::integral_constant<Format, Format::q8_0>());
    }
}

template <Format format>
bool pack_rows(const uint8_t* file, int64_t rows, int64_t inputs, uint8_t* block) {
    constexpr FormatParts f = parts(format);
    constexpr int64_t groups = f.file_inputs() / group_size;
    const int64_t blocks = inputs / f.file_inputs(), bytes = file_block_bytes(format);
    uint8_t* scales = block + inputs / group_size * code_bytes(f);
    bool finite = true;
    for (int64_t b = 0; b < blocks; b++)
        for (int lane = 0; lane < rows; lane++) {
            const FileBlock from = read<format>(file + (lane * blocks + b) * bytes);
            for (int64_t g = 0; g < groups; g++)
                put_codes<f.bits>(from.codes + g * group_size, lane, block + (b * groups + g) * code_bytes(f));
            put_scales(f, from, lane, scales + b * scale_bytes(f));
            finite &= is_finite(from.scale) && is_finite(from.minimum);
        }
    return finite;
}

template <Format format>
void unpack_row(const uint8_t* file, int64_t inputs, float* out) {
    constexpr FormatParts f = parts(format);
    uint8_t scales[64 + super_groups * 32];
    for (int64_t i = 0; i < inputs; i += f.file_inputs(), file += file_block_bytes(format)) {
        const FileBlock from = read<format>(file);
        put_scales(f, from, 0, scales);
        for (int64_t k = 0; k < f.file_inputs(); k++) {
            const Affine a = affine(f, scales, k / group_size, static_cast<int>(k % group_size / 16), 0);
            const int code = f.bits == 8 ? static_cast<int8_t>(from.codes[k]) : from.codes[k] - f.offset;
            out[i + k] = a.scale * static_cast<float>(code) + a.minimum;
        }
    }
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
    return with_constant(format, [=](auto constant) { return pack_rows<constant()>(file, rows, inputs, block); });
}

void unpack_file_row(Format format, const uint8_t* file, int64_t inputs, float* out) {
    with_constant(format, [=](auto constant) { unpack_row<constant()>(file, inputs, out); });
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
