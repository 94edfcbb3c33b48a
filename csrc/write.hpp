// New tokens: rotated queries for attention, rotated keys and plain values into their places in the pages.
#pragma once

#include <cstdint>

#include "isa.hpp"
#include "pages.hpp"

namespace triforce {

/// Tables of cos and sin (positions, dim / 2).
struct Rotation {
    const float *cos, *sin;
};

/// Tokens as they leave the projections: q (N, H * D), k and v (N, G * D). A slot is page * 16 + offset.
struct NewTokens {
    const Pages* pages;
    int64_t count;
    int heads;
    const float *q, *k, *v;
    Rotation rotation;
    const int64_t *positions, *positions_to_sinks;  // (N); the second for a copy of the queries: `q_sinks`
    const int64_t* slots;
    void *rotated, *q_sinks;  // (N, H, D) of the pages' type
};

struct WriteKernels {
    void (*write)(const NewTokens& tokens, int64_t first, int64_t last);
    /// Values (count, G, D) of the pages' type from their places, and back.
    void (*read)(const Pages& pages, const int64_t* slots, int64_t count, void* k, void* v);
    void (*put)(const Pages& pages, const int64_t* slots, int64_t count, const void* k, const void* v);
    /// An int8 copy of a page.
    void (*copy)(const Pages& pages, int head, int64_t page);
};
TF_KERNEL_TABLE(WriteKernels, write_bf16)
TF_KERNEL_TABLE(WriteKernels, write_f32)

/// Rounds once, after the rotation, which is computed as rope.py does: the same bits in float32.
void run(const NewTokens& tokens);
void read(const Pages& pages, const int64_t* slots, int64_t count, void* k, void* v);
void put(const Pages& pages, const int64_t* slots, int64_t count, const void* k, const void* v);
/// Int8 copies of those of a head's pages that have none.
void make_copies(const Pages& pages, int head, const int32_t* list, int64_t count);

}  // namespace triforce
