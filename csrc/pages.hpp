// The KV pages of one layer: memory of another owner, and the order of numbers in it.
//
// A page holds 16 tokens of one KV head. Kernels read it in steps of 64 bytes. Each is multiplied with one
// 32-bit word of a query (keys) or of the attention weights (values):
//     keys    bf16 [dim / 2][16 tokens][2], float [dim][16 tokens]     a step is one pair of channels (one channel)
//     values  bf16 [8 pairs of tokens][dim][2], float [16][dim]        a step is one pair of tokens (one token)
// Its int8 copy likewise:
//     keys    [dim / 4][16 tokens][4]
//     values  [4][dim][4 tokens]
// A page of codes, int8 in the order of a copy, has their upper nibbles, the scales of its tokens, and their lower nibbles:
//     nibbles  of keys, then of values: steps of 32 bytes; byte i has code i and above it code i + 32
//     scales   bf16, 16 of keys and 16 of values
// So what reads upper nibbles alone reads half of a page, which lies together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "types.hpp"

namespace triforce {

constexpr int page_size = 16;  // tokens of a page
constexpr int largest_dim = 256;

/// A channel of a token's keys or values, as a multiple of their scale, at most 127 times it.
struct Code {
    int8_t multiple;
};
/// The same where only its upper nibble is read: the middle of the codes that have it.
struct UpperCode {
    int8_t multiple;
};
/// The same, put together from its nibbles for many queries.
struct WholeCode {
    int8_t multiple;
};
template <class P>
constexpr bool in_nibbles = std::is_same_v<P, Code> || std::is_same_v<P, UpperCode>;
template <class P>
constexpr bool is_code = in_nibbles<P> || std::is_same_v<P, WholeCode>;

/// Where a step of codes lies: the upper nibbles, and behind them, at this distance in bytes, the lower ones.
struct CodeAt {
    uint8_t* upper;
    int64_t lower;

    __attribute__((always_inline)) CodeAt operator+(int64_t bytes) const { return {upper + bytes, lower}; }
    __attribute__((always_inline)) explicit operator bool() const { return upper; }
};
/// Where a kernel finds a step of numbers of a page.
template <class P>
using At = std::conditional_t<is_code<P>, CodeAt, const P*>;

/// Numbers of a page of type P that lie side by side in a step: channels of a key, tokens of a channel of values.
template <class P>
constexpr int packed_numbers = sizeof(uint32_t) / sizeof(P);

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
    const float* rotation;  // (dim, dim), orthogonal; or null: heads are rotated as they are written (`hadamard`)
    // Or null: no sketches. [heads][count][dim + 16]: for each channel the tokens' signs, a bit each; then sizes, as bf16, which are above
    // zero. Zero: there is no sketch, or the page has been written to since.
    uint16_t* codes;
};

class Offload;

struct Pages {
    Type type;      // of queries, of outputs, and unless there are codes of keys and values
    int heads;      // KV heads
    int dim;        // of a head, a multiple of 16
    int64_t count;  // of each head; page 0 is scratch: nothing is written to it, and nothing counts that is read from it
    char* keys;     // [heads][count][page], or where `frames` says; codes of both
    char* values;
    Copies copies;
    Sketches sketches;
    int64_t pitch;                    // bytes from a page of keys to the next, and of values
    const int32_t* frames = nullptr;  // [heads][count]: the frame of each page in keys and values; or null: its index
    Offload* offload = nullptr;       // brings pages into their frames; or null: all pages are in memory
    int layer = 0;                    // of the offloaded memory
    bool coded = false;               // pages hold codes and scales
    bool hadamard = false;            // of codes: of heads that were rotated so, queries too; outputs are rotated back
    // How queries attend to them.
    const float* attention_sink_logits = nullptr;  // of each query head: one beside those of keys, of no value; or null
    int query_heads = 0;                 // that have one
    float score_cap = 0;                 // scores s become cap * tanh(s / cap); 0: they stay

    int page_numbers() const { return page_size * dim; }
    int64_t part_bytes() const { return page_numbers() * size_of(type); }  // of keys, where there are no codes
    int64_t page_bytes() const {
        return 2 * (coded ? page_numbers() + page_size * size_of(Type::bf16) : part_bytes());
    }
    int64_t query_bytes() const { return dim * size_of(type); }
    /// Bytes of a token's keys of a head, or of its values, where they are copied out: codes have their scale behind them.
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
    /// The scales of a page's tokens: those of keys, behind which lie those of values.
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

/// The code of this index.
inline Code code_of(CodeAt codes, int index) {
    const uint8_t* upper = codes.upper + index / 64 * 32 + index % 32;
    const int shift = index & 32 ? 4 : 0;
    return {static_cast<int8_t>((*upper >> shift & 15) << 4 | (upper[codes.lower] >> shift & 15))};
}

/// Writes it. The other nibble of its bytes is another token's, where it is a key's: one thread at a time.
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
