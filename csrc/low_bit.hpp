// Weights of 4 to 8 bits with a scale for each group of 32 inputs, as GGUF files have them.
//
// Each is scale * code, or scale * code + minimum, and a product keeps just these numbers: nothing is rounded again. The
// input of a product is rounded to int16 with a scale for each group, from that row alone: finer than bfloat16 in all
// that counts. Sums of a group are exact integers; one chain of floats goes over the groups, ascending.
#pragma once

#include <cstdint>

namespace triforce {

constexpr int64_t group_size = 32;    // inputs with a scale of their own
constexpr int64_t super_groups = 8;   // groups of a super-block, whose small scales are multiples of one
constexpr int64_t group_steps = 8;    // of a group: four inputs each
constexpr int64_t vector_bytes = 64;  // codes of a step of sixteen outputs, a byte each

/// Types of GGUF files; `none` are weights without groups.
enum class Format : int { none, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k };

enum class Scales {
    half,        // a half for each group
    half_min,    // and another one, the minimum
    super_min,   // halves d and m for a super-block, and for each of its groups bytes s and n: d * s, -m * n
    super_half,  // a half d for a super-block, and for each half of a group a signed byte s: d * s
};

/// The parts of a format. A code stands for itself less `offset`, which is a power of two or 0.
struct FormatParts {
    int bits;
    int offset;
    Scales scales;

    constexpr bool super() const { return scales == Scales::super_min || scales == Scales::super_half; }
    constexpr bool minimum() const { return scales == Scales::half_min || scales == Scales::super_min; }
    /// Inputs of a block in a file, which a row has whole ones of.
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

// Packed, sixteen outputs side by side: the codes of all groups, then the scales of all groups, up to a multiple of 64
// bytes. The codes of a group are four vectors of nibbles, step 2v in the lower and step 2v + 1 in the upper ones, then
// the bits above: of 5-bit codes one vector, with the bit of step i at bit i, of 6-bit codes two, with the bits of steps
// 4p + i at bits 2i. Codes of 8 bits are a vector a step.

constexpr int64_t code_bytes(FormatParts f) { return vector_bytes * (f.bits == 8 ? 8 : f.bits); }

/// Bytes of the scales of sixteen outputs for a block: a group, or a super-block.
constexpr int64_t scale_bytes(FormatParts f) {
    switch (f.scales) {
        case Scales::half: return 32;
        case Scales::half_min: return 64;
        case Scales::super_min: return 64 + super_groups * 32;
        default: return 32 + super_groups * 32;
    }
}

/// Bytes of sixteen outputs.
constexpr int64_t block_bytes(FormatParts f, int64_t inputs) {
    const int64_t bytes = inputs / group_size * code_bytes(f) + inputs / f.file_inputs() * scale_bytes(f);
    return (bytes + 63) / 64 * 64;
}

/// What a product knows of a group of its input besides the codes.
struct GroupInput {
    float scale;
    float sum;      // of the codes, times the scale
    int32_t minus;  // the sum of the codes, negated
    int32_t first;  // the same of the first half of them
};

/// Bytes of a rounded row: codes of 16 bits, then a GroupInput for each group.
constexpr int64_t grouped_stride(int64_t inputs) {
    return 2 * inputs + inputs / group_size * static_cast<int64_t>(sizeof(GroupInput));
}

/// The format of a GGUF type such as "Q4_K"; `none` if there is no kernel for it.
Format format_named(const char* name);

/// Bytes of a block in a file.
int64_t file_block_bytes(Format format);

/// Packs rows [0, rows) of a file, at most sixteen, each of whole blocks; the block is zeroed. Returns whether all scales
/// are finite.
bool pack_block(Format format, const uint8_t* file, int64_t rows, int64_t inputs, uint8_t* block);

/// Rounds 32 weights to a block of a file of type Q4_1: the least and the largest are its first and its last code.
void encode_q4_1(const float* weights, uint8_t* file);

/// A row of a file as floats.
void unpack_file_row(Format format, const uint8_t* file, int64_t inputs, float* out);

/// The weights of one output of a block, as floats.
void unpack_output(Format format, const uint8_t* block, int lane, int64_t inputs, float* out);

}  // namespace triforce
