// Attention of any number of queries over lists of pages.
//
// The bitwise law: a query's keys are taken in blocks of 64 tokens from the first key of its list, by an online softmax
// (Milakov and Gimelshein 2018) inside splits of 1024 tokens, and the splits are merged in ascending order. None of
// this depends on the call: on how many queries share a pass, on its other rows, on threads. A key that a query does
// not see takes no part in any sum, not even as a zero. A logit beside those of the keys is what the merge begins with.
#pragma once

#include <cstdint>
#include <memory>

#include "simd_dispatch.hpp"
#include "pages.hpp"

namespace triforce {

constexpr int block_pages = 4, block_tokens = block_pages * page_size;
constexpr int split_pages = 64, split_tokens = split_pages * page_size;

/// Queries [first, first + count) of row b and KV head g: query i is head i % group of token i / group.
struct Queries {
    int64_t b;
    int g;
    int64_t first;
    int count;
};

/// Queries q (B, T, H, D) of B rows. Query t of row b has index starts[b] + t in the row's list of keys and sees the
/// keys up to its own; with a window only the last `window` of these, and the first `sinks`.
struct Attention {
    const Pages* pages;
    int64_t rows, width;
    int heads;  // query heads; heads that share a KV head are neighbours
    const void* q;
    const void* q_sinks;  // queries for the keys below `sinks`, where they are rotated differently; or null
    const int64_t *starts, *counts;
    const int32_t* lists;  // pages of row b and KV head g, from lists + b * row_stride + g * head_stride
    int64_t row_stride, head_stride, list_length;
    int64_t sinks, window;  // sinks: whole pages; window: 0 is unbounded
    const int64_t* coarse;  // (B): keys below it, in whole blocks, are read from int8 copies, or by upper nibbles; or null
    void* out;    // (B, T, H, D); zeros at t >= counts[b]
    float* mass;  // (B, G, list_length): weight of each page, summed over the row's queries and heads; or null

    int group() const { return heads / pages->heads; }
    /// The query head of query i.
    int64_t head(const Queries& queries, int i) const { return queries.g * group() + (queries.first + i) % group(); }
    int64_t queries(int64_t b) const { return counts[b] * group(); }  // of one KV head
    int64_t splits(int64_t b) const { return (starts[b] + counts[b] + split_tokens - 1) / split_tokens; }
    int64_t visible_pages(int64_t b) const { return counts[b] ? (starts[b] + counts[b] - 1) / page_size + 1 : 0; }
    int64_t coarse_pages(int64_t b) const { return coarse && counts[b] ? coarse[b] / block_tokens * block_pages : 0; }
    const int32_t* list(int64_t b, int g) const { return lists + b * row_stride + g * head_stride; }
};

/// The state of an online softmax over some of the keys, per query.
struct Partial {
    float* acc;    // (count, D): the weighted values, not yet divided by `sum`
    float* shift;  // weights are 2^(score - shift); a number below any score where no key was seen
    float* sum;    // of the weights; 0 where no key was seen
};

constexpr float nothing_seen = -1e30f;
constexpr float bits_of_e = 1.44269504f;  // log2(e): scores are to base 2
constexpr int group_floats = 12288;  // of acc, for the queries of one job: they stay in a core's caches
constexpr int group_queries = 96;
inline int queries_at_once(int dim) { return dim * group_queries > group_floats ? group_floats / dim : group_queries; }

struct AttentionKernels {
    /// Scans one split for at most queries_at_once queries. page_sums (count, split_pages), or null: weights of each
    /// page, of the shift that `to` has.
    void (*scan)(const Attention& call, const Queries& queries, int64_t split, const Partial& to, float* page_sums);
    /// Merges the next split into those before it.
    void (*merge)(const Attention& call, int count, const Partial& into, const Partial& next);
    /// Divides by the sums and rounds to `out`.
    void (*finish)(const Attention& call, const Queries& queries, const Partial& all);
    /// Adds the weights of `pages` pages of one split to `mass`, from their page_sums and the queries' final partials.
    void (*add_mass)(const Attention& call, int count, const Partial& all, const Partial& split, const float* page_sums,
                     float* mass, int pages);
};
TF_KERNEL_TABLE(AttentionKernels, attention_bf16)
TF_KERNEL_TABLE(AttentionKernels, attention_f32)
TF_KERNEL_TABLE(AttentionKernels, attention_codes_bf16)
TF_KERNEL_TABLE(AttentionKernels, attention_codes_f32)

/// Throws std::invalid_argument unless rows and lists fit the call and its pages.
void check(const Attention& call);

/// Computes `out` and `mass` in one job of the thread pool.
void attend(const Attention& call);

/// The same for a caller that does not have all pages at a time: each call takes some splits of a row and KV head.
/// Splits come in ascending order, one row and head after another.
class IncrementalAttention {
  public:
    /// `call` and its pages must outlive this.
    explicit IncrementalAttention(const Attention& call);
    ~IncrementalAttention();
    void attend(int64_t b, int g, int64_t first_split, int64_t last_split);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace triforce
