// The KV pages of one layer: memory of another owner, and the order of numbers in it.
//
// A page holds 16 tokens of one KV head. Kernels read it in steps of 64 bytes, each of which is multiplied with one
// 32-bit word of a query (keys) or of the attention weights (values):
//     keys    bf16 [dim / 2][16 tokens][2], float [dim][16 tokens]     a step is one pair of channels (one channel)
//     values  bf16 [8 pairs of tokens][dim][2], float [16][dim]        a step is one pair of tokens (one token)
// Its int8 copy likewise:
//     keys    [dim / 4][16 tokens][4]
//     values  [4][dim][4 tokens]
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.hpp"

namespace triforce {

constexpr int page_size = 16;  // tokens of a page
constexpr int largest_dim = 256;

/// The scales of an int8 copy of a page. Each key is the nearest multiple of one scale, the largest 127 times it;
/// likewise the values. Below zero: there is no copy, or the page has been written to since.
struct PageScales {
    float keys, values;
};

/// Int8 copies of pages, in the order of the pages, made when they are first read.
struct Copies {
    char *keys, *values;  // [heads][count][page]; or null: no copies
    PageScales* scales;   // [heads][count]
};

/// Sketches of keys, which a search reads instead: the signs of a key's channels after a random rotation, and one size
/// for them all (RaBitQ, Gao and Long 2024). Made when they are first read.
struct Sketches {
    const float* rotation;  // (dim, dim), orthogonal; or null: no sketches
    // [heads][count][dim + 16]: for each channel the tokens' signs, a bit each; then sizes, as bf16, which are above
    // zero. Zero: there is no sketch, or the page has been written to since.
    uint16_t* codes;
};

class Offload;

struct Pages {
    Type type;
    int heads;      // KV heads
    int dim;        // of a head, a multiple of 16
    int64_t count;  // of each head; page 0 is scratch: nothing is written to it or read from it
    char* keys;     // [heads][count][page], or where `frames` says
    char* values;
    Copies copies;
    Sketches sketches;
    int64_t pitch;                    // bytes from a page of keys to the next, and of values
    const int32_t* frames = nullptr;  // [heads][count]: the frame of each page in keys and values; or null: its index
    Offload* offload = nullptr;       // brings pages into their frames; or null: all pages are in memory
    int layer = 0;                    // of the offloaded memory

    size_t page_bytes() const { return page_numbers() * size_of(type); }
    int page_numbers() const { return page_size * dim; }
    int64_t index(int head, int64_t page) const { return head * count + page; }
    int64_t frame(int head, int64_t page) const { return frames ? frames[index(head, page)] : index(head, page); }

    template <class T>
    T* keys_of(int head, int64_t page) const {
        if constexpr (sizeof(T) == 1) return reinterpret_cast<T*>(copies.keys) + index(head, page) * page_numbers();
        return reinterpret_cast<T*>(keys + frame(head, page) * pitch);
    }
    template <class T>
    T* values_of(int head, int64_t page) const {
        if constexpr (sizeof(T) == 1) return reinterpret_cast<T*>(copies.values) + index(head, page) * page_numbers();
        return reinterpret_cast<T*>(values + frame(head, page) * pitch);
    }
    PageScales& scales_of(int head, int64_t page) const { return copies.scales[index(head, page)]; }
    uint16_t* signs_of(int head, int64_t page) const { return sketches.codes + index(head, page) * (dim + page_size); }
    bf16* sizes_of(int head, int64_t page) const { return reinterpret_cast<bf16*>(signs_of(head, page) + dim); }
};

/// The index of channel `d` of token `at` in a page of keys.
template <class T>
int key_index(int d, int at) {
    constexpr int pack = static_cast<int>(sizeof(uint32_t) / sizeof(T));
    return (d / pack * page_size + at) * pack + d % pack;
}

/// The index of channel `d` of token `at` in a page of values.
template <class T>
int value_index(int d, int at, int dim) {
    constexpr int pack = static_cast<int>(sizeof(uint32_t) / sizeof(T));
    return (at / pack * dim + d) * pack + at % pack;
}

}  // namespace triforce
