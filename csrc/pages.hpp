// The KV pages of one layer: borrowed memory, and the order of numbers in it.
//
// A page holds 16 tokens of one KV head. Kernels read it in steps of 64 bytes. Each step is multiplied with one 32-bit
// word of a query (keys) or of the attention weights (values):
//     keys    bf16 [dim / 2][16 tokens][2], float [dim][16 tokens]     a step: a pair of channels (float: a channel)
//     values  bf16 [8 pairs of tokens][dim][2], float [16][dim]        a step: a pair of tokens (float: a token)
// An int8 copy of a page has quads in the place of pairs:
//     keys    [dim / 4][16 tokens][4]
//     values  [4 quads of tokens][dim][4]
// A page of codes (int8 KV) has codes in the order of a copy, in three parts: upper nibbles, scales, lower nibbles:
//     nibbles  of keys, then of values, in steps of 32 bytes; byte i has code i and, in its upper half, code i + 32
//     scales   bf16: 16 of keys, then 16 of values
// A kernel that reads upper nibbles only thus reads one contiguous half of a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "types.hpp"

namespace triforce {

constexpr int page_size = 16;  // tokens of a page
constexpr int largest_dim = 256;

/// A channel of a token's key or value, as a multiple of the token's scale, at most 127 times the scale.
struct Code {
    int8_t multiple;
};
/// A code whose upper nibble alone is read. It stands for the middle of the codes with that nibble.
struct UpperCode {
    int8_t multiple;
};
/// A code that was joined from its two nibbles once, for many queries.
struct WholeCode {
    int8_t multiple;
};
template <class P>
constexpr bool in_nibbles = std::is_same_v<P, Code> || std::is_same_v<P, UpperCode>;
template <class P>
constexpr bool is_code = in_nibbles<P> || std::is_same_v<P, WholeCode>;

/// Place of a step of codes: its upper nibbles, and the distance in bytes from these to its lower nibbles.
struct CodeAt {
    uint8_t* upper;
    int64_t lower;

    __attribute__((always_inline)) CodeAt operator+(int64_t bytes) const { return {upper + bytes, lower}; }
    __attribute__((always_inline)) explicit operator bool() const { return upper; }
};
/// Place of a step of numbers of a page.
template <class P>
using At = std::conditional_t<is_code<P>, CodeAt, const P*>;

/// Count of neighbouring numbers of type P in a step: channels of a token's key, or tokens of a channel of the values.
template <class P>
constexpr int packed_numbers = sizeof(uint32_t) / sizeof(P);

/// The scales of an int8 copy of a page. A number of the keys is rounded to the nearest multiple of their scale; the
/// largest is 127 times the scale. Values have a scale of their own. A negative scale of keys: the page has no copy, or
/// was written to since the copy.
struct PageScales {
    float keys, values;
};

/// Int8 copies of pages, in the order of the pages. A copy is made when it is first read.
struct Copies {
    char *keys, *values;  // [heads][count][page]; or null: no copies
    PageScales* scales;   // [heads][count]
};

/// Sketches of keys, which a search reads in the place of keys: the signs of a key's channels after a random rotation,
/// and one size for all channels (RaBitQ, Gao and Long 2024). A page's sketch is made when it is first read.
struct Sketches {
    // (dim, dim), orthogonal; null if heads are already rotated when they are written (`hadamard`).
    const float* rotation;
    // [heads][count][dim + 16], or null without sketches. Per channel one bit per token, its sign; then a positive size
    // per token, bf16. A size of 0: the page has no sketch, or was written to since the sketch.
    uint16_t* codes;
};

class Offload;

struct Pages {
    Type type;      // of queries and outputs; also of keys and values unless `coded`
    int heads;      // KV heads
    int dim;        // head size, a multiple of 16
    int64_t count;  // pages of each head; page 0 is scratch: nothing is written to it, and reads of it have no effect
    char* keys;     // [heads][count][page], or in the order of `frames`; if `coded`, keys and values
    char* values;
    Copies copies;
    Sketches sketches;
    int64_t pitch;                    // bytes from a page to the next, in `keys` and in `values`
    const int32_t* frames = nullptr;  // [heads][count]: frame of each page in `keys` and `values`; or null: its index
    Offload* offload = nullptr;       // brings pages into their frames; or null: all pages are in memory
    int layer = 0;                    // of the offloaded memory
    bool coded = false;               // pages hold codes and scales
    // With `coded`: heads are rotated by Hadamard matrices before rounding, and so are queries; outputs are rotated
    // back.
    bool hadamard = false;
    // Settings of attention.
    // One per query head: a term of the softmax's denominator without key or value; or null.
    const float* attention_sink_logits = nullptr;
    int query_heads = 0;  // number of sink logits
    float score_cap = 0;  // scores s become cap * tanh(s / cap); 0: no cap

    int page_numbers() const { return page_size * dim; }
    int64_t part_bytes() const { return page_numbers() * size_of(type); }  // of keys or of values, unless `coded`
    int64_t page_bytes() const {
        return 2 * (coded ? page_numbers() + page_size * size_of(Type::bf16) : part_bytes());
    }
    int64_t query_bytes() const { return dim * size_of(type); }
    /// Bytes of a token's key or value of one head in copies out of pages. A scale follows codes.
    int64_t row_bytes() const { return coded ? dim + size_of(Type::bf16) : query_bytes(); }
    int64_t index(int head, int64_t page) const { return head * count + page; }
    int64_t frame(int head, int64_t page) const { return frames ? frames[index(head, page)] : index(head, page); }

    template <class T>
    T* keys_of(int head, int64_t page) const {
        if constexpr (std::is_same_v<T, int8_t>)
            return reinterpret_cast<T*>(copies.keys) + index(head, page) * page_numbers();
        return reinterpret_cast<T*>(keys + frame(head, page) * pitch);
    }
    template <class T>
    T* values_of(int head, int64_t page) const {
        if constexpr (std::is_same_v<T, int8_t>)
            return reinterpret_cast<T*>(copies.values) + index(head, page) * page_numbers();
        return reinterpret_cast<T*>(values + frame(head, page) * pitch);
    }
    PageScales& scales_of(int head, int64_t page) const { return copies.scales[index(head, page)]; }
    /// The codes of a page's keys, and of its values.
    CodeAt key_codes_of(int head, int64_t page) const {
        return {keys_of<uint8_t>(head, page), page_numbers() + 2 * page_size * size_of(Type::bf16)};
    }
    CodeAt value_codes_of(int head, int64_t page) const { return key_codes_of(head, page) + page_numbers() / 2; }
    /// The scales of a page's tokens: 16 of keys, then 16 of values.
    bf16* token_scales_of(int head, int64_t page) const {
        return reinterpret_cast<bf16*>(keys_of<uint8_t>(head, page) + page_numbers());
    }
    uint16_t* signs_of(int head, int64_t page) const { return sketches.codes + index(head, page) * (dim + page_size); }
    bf16* sizes_of(int head, int64_t page) const { return reinterpret_cast<bf16*>(signs_of(head, page) + dim); }
};

/// The index of channel `d` of token `at` in a page of keys.
template <class T>
int key_index(int d, int at) {
    constexpr int pack = packed_numbers<T>;
    return (d / pack * page_size + at) * pack + d % pack;
}

/// The code with index `index`.
inline Code code_of(CodeAt codes, int index) {
    const uint8_t* upper = codes.upper + index / 64 * 32 + index % 32;
    const int shift = index & 32 ? 4 : 0;
    return {static_cast<int8_t>((*upper >> shift & 15) << 4 | (upper[codes.lower] >> shift & 15))};
}

/// Writes the code with index `index`. Key bytes hold nibbles of two tokens, so only one thread may write a page of
/// keys at a time.
inline void set_code(CodeAt codes, int index, Code code) {
    uint8_t* upper = codes.upper + index / 64 * 32 + index % 32;
    const int shift = index & 32 ? 4 : 0, others = 15 << (4 - shift);
    *upper = static_cast<uint8_t>((*upper & others) | (code.multiple >> 4 & 15) << shift);
    upper[codes.lower] = static_cast<uint8_t>((upper[codes.lower] & others) | (code.multiple & 15) << shift);
}

/// The index of channel `d` of token `at` in a page of values.
template <class T>
int value_index(int d, int at, int dim) {
    constexpr int pack = packed_numbers<T>;
    return (at / pack * dim + d) * pack + at % pack;
}

}  // namespace triforce
