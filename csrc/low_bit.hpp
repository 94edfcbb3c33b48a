// Weights of 4 to 8 bits with a scale for each group of 32 inputs, as GGUF files have them.
//
// A weight is scale * code, or scale * code + minimum. Products use these numbers without rounding them again. The
// input of a product is rounded to int16, or to int8, with a scale for each group, from that row alone. The error of an
// input is at most about 1 / 65534, or 1 / 254, of the largest input of its group. Sums of a group are exact integers;
// one chain of floats goes over the groups, ascending.
#pragma once

#include <cstdint>

namespace triforce {

constexpr int64_t group_size = 32;    // inputs that share a scale
constexpr int64_t super_groups = 8;   // groups of a super-block; their small scales are multiples of one half
constexpr int64_t group_steps = 8;    // steps of a group; a step has four inputs
constexpr int64_t vector_bytes = 64;  // codes of a step for sixteen outputs, a byte each

/// Types of weights in GGUF files; `none`: weights without groups.
enum class Format : int { none, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k };

enum class Scales {
    half,        // a half for each group
    half_min,    // a half for the scale and a half for the minimum of each group
    super_min,   // halves d and m for a super-block, and for each of its groups bytes s and n: d * s, -m * n
    super_half,  // a half d for a super-block, and for each half of a group a signed byte s: d * s
};

/// The parts of a format. A code stands for code - offset; `offset` is a power of two or 0.
struct FormatParts {
    int bits;
    int offset;
    Scales scales;

    constexpr bool super() const { return scales == Scales::super_min || scales == Scales::super_half; }
    constexpr bool minimum() const { return scales == Scales::half_min || scales == Scales::super_min; }
    /// Inputs of a block in a file. Rows consist of whole blocks.
    constexpr int64_t file_inputs() const { return super() ? super_groups * group_size : group_size; }
};

constexpr FormatParts parts(Format format) {
    switch (format) {
        case Format::q4_0: return {4, 8, Scales::half};
        case Format::q4_1: return {4, 0, Scales::half_min};
        case Format::q5_0: return {5, 16, Scales::half};
        case Format::q5_1: return {5, 0, Scales::half_min};
        case Format::q4_k: return {4, 0, Scales::super_min};
        case Format::q5_k: return {5, 0, Scales::super_min};
        case Format::q6_k: return {6, 32, Scales::super_half};
        default: return {8, 0, Scales::half};  // q8_0: signed
    }
}

// Layout of a packed block of sixteen outputs: the codes of all groups, then the scales of all groups, up to a multiple
// of 64 bytes. A vector of codes has four bytes for each output, one per input of a step. The vectors of a group:
// - Codes of 4 to 6 bits: four vectors of nibbles. Vector v has step 2v in lower nibbles and step 2v + 1 in upper ones.
// - Codes of 5 bits: one more vector, with the fifth bits. Step i has bit i of each byte.
// - Codes of 6 bits: two more vectors, with the upper two bits. Step 4p + i has bits 2i and 2i + 1 of vector p's bytes.
// - Codes of 8 bits: one vector for each step.

constexpr int64_t code_bytes(FormatParts f) { return vector_bytes * (f.bits == 8 ? 8 : f.bits); }

/// Bytes of the scales of sixteen outputs for one block of a file: a group or a super-block.
constexpr int64_t scale_bytes(FormatParts f) {
    switch (f.scales) {
        case Scales::half: return 32;
        case Scales::half_min: return 64;
        case Scales::super_min: return 64 + super_groups * 32;
        default: return 32 + super_groups * 32;
    }
}

/// Bytes of a packed block of sixteen outputs.
constexpr int64_t block_bytes(FormatParts f, int64_t inputs) {
    const int64_t bytes = inputs / group_size * code_bytes(f) + inputs / f.file_inputs() * scale_bytes(f);
    return (bytes + 63) / 64 * 64;
}

/// Scale and sums of a group of a rounded input.
struct GroupInput {
    float scale;
    float sum;                 // sum of the codes, times `scale`
    int32_t negated_sum;       // negated sum of the codes
    int32_t negated_half_sum;  // negated sum of the first half of the codes
};

/// The numbers to which products with grouped weights round their inputs.
enum class InputCodes : int { int16, int8 };

/// Bytes of a rounded row: codes, then a GroupInput for each group.
constexpr int64_t grouped_stride(int64_t inputs, InputCodes codes) {
    const int64_t code_bytes = codes == InputCodes::int8 ? 1 : 2;
    return code_bytes * inputs + inputs / group_size * static_cast<int64_t>(sizeof(GroupInput));
}

/// The format of a GGUF type such as "Q4_K"; `none` if there is no kernel for it.
Format format_named(const char* name);

/// Bytes of a block in a file.
int64_t file_block_bytes(Format format);

/// Packs `rows` rows of a file, at most sixteen, into `block`, which is zeroed. Returns whether all scales are finite.
bool pack_block(Format format, const uint8_t* file, int64_t rows, int64_t inputs, uint8_t* block);

/// Rounds 32 weights to a block of a file of type Q4_1. Code 0 is the smallest weight, code 15 the largest.
void encode_q4_1(const float* weights, uint8_t* file);

/// Unpacks a row of a file to floats.
void unpack_file_row(Format format, const uint8_t* file, int64_t inputs, float* out);

/// Unpacks the weights of one output of a packed block to floats.
void unpack_output(Format format, const uint8_t* block, int lane, int64_t inputs, float* out);

}  // namespace triforce
