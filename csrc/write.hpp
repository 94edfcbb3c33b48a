// New tokens: rotates queries for attention, and writes rotated keys and values into their slots.
#pragma once

#include <cstdint>

#include "simd_dispatch.hpp"
#include "pages.hpp"

namespace triforce {

/// Tables of cos and sin, `stride` numbers for each position. The first dim / 2 numbers of a position belong to this
/// rotation.
struct Rotation {
    const float *cos, *sin;
    int64_t stride;

    /// Rotation number `index` of tables that have several side by side.
    Rotation at(int64_t index, int64_t dim) const { return {cos + index * dim / 2, sin + index * dim / 2, stride}; }
    /// Number of rotations in the tables.
    int64_t count(int64_t dim) const { return stride / (dim / 2); }
};

/// Projections of N tokens, float32: q (N, H * D), k and v (N, G * D). A slot is page * 16 + offset.
struct NewTokens {
    const Pages* pages;
    int64_t count;
    int heads;
    const float *q, *k, *v;
    Rotation rotation;
    const int64_t *positions, *sink_positions;  // (N): positions of `rotated` and k; positions of q_sinks
    const int64_t* slots;
    void *rotated, *q_sinks;  // (N, H, D) of the pages' type: queries for attention
};

/// KV heads [first, last).
struct HeadRange {
    int first, last;
};

struct WriteKernels {
    /// Writes the queries of tokens [first, last).
    void (*rotate_queries)(const NewTokens& tokens, int64_t first, int64_t last);
    /// Writes keys and values of tokens [first, last) for KV head `head`.
    void (*write_new)(const NewTokens& tokens, int head, int64_t first, int64_t last);
    /// `read` copies tokens out of their slots, `write` copies tokens into their slots. k and v: (count, G) rows of
    /// Pages::row_bytes.
    void (*read)(const Pages& pages, const int64_t* slots, int64_t count, void* k, void* v);
    void (*write)(const Pages& pages, HeadRange heads, const int64_t* slots, int64_t count, const void* k,
                  const void* v);
    /// Makes the int8 copy of a page.
    void (*copy)(const Pages& pages, int head, int64_t page);
};
TF_KERNEL_TABLE(WriteKernels, write_bf16)
TF_KERNEL_TABLE(WriteKernels, write_f32)
TF_KERNEL_TABLE(WriteKernels, write_codes_bf16)
TF_KERNEL_TABLE(WriteKernels, write_codes_f32)

/// Rotates queries and keys, and writes keys and values to their slots. Numbers are rounded once, after the rotations.
/// Rotation by RoPE has the float32 bits of rope.py. Page 0 is skipped.
void rope_and_write(const NewTokens& tokens);
/// Copies tokens out of their slots to k and v: (count, G) rows of Pages::row_bytes.
void read(const Pages& pages, const int64_t* slots, int64_t count, void* k, void* v);
/// Copies tokens into their slots; keys are rotated.
void write(const Pages& pages, const int64_t* slots, int64_t count, const void* k, const void* v);
/// Makes the int8 copies of a head's pages that have none.
void make_copies(const Pages& pages, int head, const int32_t* list, int64_t count);

}  // namespace triforce
