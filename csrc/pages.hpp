// The KV pages of one layer: memory that somebody else owns, and the order of values in it.
//
// A page holds 16 tokens of one KV head. Kernels read it in steps of 64 bytes, each of which meets one 32-bit word of
// a query (keys) or of the attention weights (values):
//     keys    bf16 [dim / 2][16 tokens][2], float [dim][16 tokens]     a step is one pair of channels (one channel)
//     values  bf16 [8 pairs of tokens][dim][2], float [16][dim]        a step is one pair of tokens (one token)
// and its int8 copy likewise:
//     keys    [dim / 4][16 tokens][4]
//     values  [4][dim][4 tokens]
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.hpp"

namespace triforce {

constexpr int page_size = 16;  // tokens of a page
constexpr int largest_dim = 256;

/// The scales of an int8 copy of a page, of whose keys each is the nearest multiple of one scale and the largest 127 of
/// it, and of whose values likewise. Below zero: there is no copy, or the page is another one since.
struct PageScales {
    float keys, values;
};

/// Int8 copies of pages, each in the place that its page has among the others, made when they are first read.
struct Copies {
    char *keys, *values;  // [heads][count][page]; or null: there are none
    PageScales* scales;   // [heads][count]
};

/// What a search reads instead of a page's keys: turned at random, of each the signs of its channels and one size for
/// them all (RaBitQ, Gao and Long 2024). Made when first read, too.
struct Sketches {
    const float* turn;  // (dim, dim), orthogonal; or null: there are none
    uint16_t* words;    // [heads][count][dim + 16]: for each channel the tokens' signs, a bit each; then sizes, as bf16,
                        // which are above zero. Zero: there is no sketch, or the page is another one since
};

class Offload;

struct Pages {
    bool is_bf16;
    int heads;      // KV heads
    int dim;        // of a head, a multiple of 16
    int64_t count;  // of each head; page 0 is scratch: nothing is written to it or read from it
    char* keys;     // [heads][count][page], or where `frames` says
    char* values;
    Copies copies;
    Sketches sketches;
    int64_t pitch;                    // bytes from a page of keys to the next, and of values
    const int32_t* frames = nullptr;  // [heads][count]: the place of each page in keys and values; or null: its own
    Offload* home = nullptr;          // what sees to it that pages are in their frames; or null: all are there
    int layer = 0;                    // of that

    size_t page_bytes() const { return page_numbers() * (is_bf16 ? sizeof(bf16) : sizeof(float)); }
    int page_numbers() const { return page_size * dim; }
    int64_t index(int head, int64_t page) const { return head * count + page; }
    int64_t place(int head, int64_t page) const { return frames ? frames[index(head, page)] : index(head, page); }

    template <class T>
    T* keys_of(int head, int64_t page) const {
        if constexpr (sizeof(T) == 1) return reinterpret_cast<T*>(copies.keys) + index(head, page) * page_numbers();
        return reinterpret_cast<T*>(keys + place(head, page) * pitch);
    }
    template <class T>
    T* values_of(int head, int64_t page) const {
        if constexpr (sizeof(T) == 1) return reinterpret_cast<T*>(copies.values) + index(head, page) * page_numbers();
        return reinterpret_cast<T*>(values + place(head, page) * pitch);
    }
    PageScales& scales_of(int head, int64_t page) const { return copies.scales[index(head, page)]; }
    uint16_t* signs_of(int head, int64_t page) const { return sketches.words + index(head, page) * (dim + page_size); }
    bf16* sizes_of(int head, int64_t page) const { return reinterpret_cast<bf16*>(signs_of(head, page) + dim); }
};

/// Where channel `d` of the token at `at` lies in a page of keys.
template <class T>
int key_index(int d, int at) {
    constexpr int pack = static_cast<int>(sizeof(uint32_t) / sizeof(T));
    return (d / pack * page_size + at) * pack + d % pack;
}

/// Where channel `d` of the token at `at` lies in a page of values.
template <class T>
int value_index(int d, int at, int dim) {
    constexpr int pack = static_cast<int>(sizeof(uint32_t) / sizeof(T));
    return (at / pack * dim + d) * pack + at % pack;
}

}  // namespace triforce
