// Attention of any number of queries over lists of pages.
//
// The bitwise law: a query's keys are taken in blocks of 64 tokens from the first key of its list, by an online softmax
// (Milakov and Gimelshein 2018) inside splits of 1024 tokens. The splits are merged in ascending order. The merge
// begins with the sink logit, if any. These steps do not depend on the number of queries in a pass, on other rows, or
// on threads. A key that a query does not see takes no part in any sum, not even as a zero.
#pragma once

#include <cstdint>
#include <memory>

#include "simd_dispatch.hpp"
#include "pages.hpp"

namespace triforce {

constexpr int block_pages = 4, block_tokens = block_pages * page_size;
constexpr int split_pages = 64, split_tokens = split_pages * page_size;

/// Queries [first, first + count) of row b and KV head g. Query i is that of token i / group. Its query head is head
/// i % group of the KV head, and `group` is the number of query heads per KV head.
struct Queries {
    int64_t b;
    int g;
    int64_t first;
    int count;
};

/// Attention of T tokens in each of B rows. Token t of row b has index starts[b] + t in the row's list of keys. The
/// token sees the keys up to its own; with a window only the last `window` of these keys, and the first `sinks` keys.
struct Attention {
    const Pages* pages;
    int64_t rows, width;
    int heads;  // query heads; heads that share a KV head are neighbours
    const void* q;        // (B, T, H, D) of the pages' type
    const void* q_sinks;  // (B, T, H, D): queries for the keys below `sinks`, rotated for them; or null: `q`
    const int64_t *starts, *counts;  // (B): index of the first token's key; number of tokens
    const int32_t* lists;  // page numbers of row b and KV head g, from lists + b * row_stride + g * head_stride
    int64_t row_stride, head_stride, list_length;
    int64_t sinks, window;  // in tokens; sinks: a multiple of the page size; window 0: no window
    const int64_t* coarse;  // (B): keys below coarse[b], in whole blocks, are read from int8 copies or by upper
                            // nibbles; or null
    void* out;              // (B, T, H, D) of the pages' type; zeros at t >= counts[b]
    float* mass;            // (B, G, list_length): weight of each page, summed over the queries of a row and KV head;
                            // or null

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
    float* acc;    // (count, D): sums of the weighted values, not yet divided by `sum`
    float* shift;  // (count): weights are 2^(score - shift); below any score if no key was seen
    float* sum;    // (count): sum of the weights; 0 if no key was seen
};

constexpr float nothing_seen = -1e30f;
constexpr float bits_of_e = 1.44269504f;  // log2(e): scores are exponents of 2
constexpr int group_floats = 12288;  // of `acc`, for the queries of one job: `acc` stays in a core's caches
constexpr int group_queries = 96;
inline int queries_at_once(int dim) { return dim * group_queries > group_floats ? group_floats / dim : group_queries; }

struct AttentionKernels {
    /// Scans one split for at most queries_at_once queries. page_sums (count, split_pages), or null: sum of the weights
    /// of each page, relative to the shift in `to`.
    void (*scan)(const Attention& call, const Queries& queries, int64_t split, const Partial& to, float* page_sums);
    /// Merges the partials of the next split into the partials of the splits before it.
    void (*merge)(const Attention& call, int count, const Partial& into, const Partial& next);
    /// Divides `acc` by `sum` and rounds the quotients to `out`.
    void (*finish)(const Attention& call, const Queries& queries, const Partial& all);
    /// Adds the weights of `pages` pages of one split to `mass`. `split`: partials of the split, whose scan wrote
    /// page_sums; `all`: the merged partials.
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

/// `attend` for a caller that never has all pages in memory. Each call of `attend` takes some splits of a row and KV
/// head. Splits come in ascending order, one row and head after another.
class IncrementalAttention {
  public:
    /// `call` and its pages must outlive the IncrementalAttention.
    explicit IncrementalAttention(const Attention& call);
    ~IncrementalAttention();
    void attend(int64_t b, int g, int64_t first_split, int64_t last_split);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace triforce
