// Attention of any number of queries over lists of pages.
//
// The bitwise law: a query's keys are taken in blocks of 64 tokens from the first key of its list, by an online softmax
// inside splits of 1024 tokens, and the splits are merged in ascending order. None of this depends on the call: on how
// many queries share a pass, on its other rows, on threads. A key that a query does not see takes no part in any sum,
// not even as a zero.
#pragma once

#include <cstdint>
#include <memory>

#include "isa.hpp"
#include "pages.hpp"

namespace triforce {

constexpr int block_pages = 4, block_tokens = block_pages * page_size;
constexpr int split_pages = 64, split_tokens = split_pages * page_size;

/// Queries q (B, T, H, D) of B rows. Query t of row b has the place starts[b] + t in the row's list of keys and sees
/// the keys up to its own; with a window only the last `window` of these, and the first `sinks`.
struct Attention {
    const Pages* pages;
    int64_t rows, width;
    int heads;  // query heads; those that share a KV head are neighbours
    const void* q;
    const void* q_sinks;  // what meets the keys below `sinks`, where it differs; or null
    const int64_t *starts, *counts;
    const int32_t* lists;  // pages of row b and KV head g, from lists + b * row_stride + g * head_stride
    int64_t row_stride, head_stride, list_length;
    int64_t sinks, window;  // sinks: whole pages; window: 0 is unbounded
    const int64_t* coarse;  // (B): keys below it, in whole blocks, are read from int8 copies of their pages; or null
    void* mixed;  // (B, T, H, D); zeros at t >= counts[b]
    float* mass;  // (B, G, list_length): what each page got of the row's queries, summed over these and heads; or null

    int group() const { return heads / pages->heads; }
    int64_t queries(int64_t b) const { return counts[b] * group(); }  // of one KV head
    int64_t splits(int64_t b) const { return (starts[b] + counts[b] + split_tokens - 1) / split_tokens; }
    int64_t coarse_pages(int64_t b) const { return coarse && counts[b] ? coarse[b] / block_tokens * block_pages : 0; }
    const int32_t* list(int64_t b, int g) const { return lists + b * row_stride + g * head_stride; }
};

/// Queries [first, first + count) of row b and KV head g: query i is head i % group of token i / group.
struct Queries {
    int64_t b;
    int g;
    int64_t first;
    int count;
};

/// What a softmax over some of the keys knows, per query.
struct Partial {
    float* mixed;  // (count, D), not yet divided by total
    float* most;   // the largest score; a number below any score where no key was seen
    float* total;  // 0 where no key was seen
};

constexpr float nothing_seen = -1e30f;
constexpr int group_floats = 12288;  // of mixed, for the queries worked on together: they stay in a core's caches
constexpr int group_queries = 96;
inline int queries_at_once(int dim) { return dim * group_queries > group_floats ? group_floats / dim : group_queries; }

struct AttentionKernels {
    /// One split of at most queries_at_once queries. `sums`: (count, split_pages), pages' weights relative to `most`; or null.
    void (*scan)(const Attention& call, const Queries& queries, int64_t split, const Partial& to, float* sums);
    /// Merges the next split into those before it.
    void (*fold)(const Attention& call, int count, const Partial& into, const Partial& next);
    void (*finish)(const Attention& call, const Queries& queries, const Partial& all);
    /// Adds what `pages` pages of one split got, by the queries' sums there and their final partials.
    void (*weigh)(const Attention& call, int count, const Partial& all, const Partial& split, const float* sums,
                  float* mass, int pages);
};
TF_KERNEL_TABLE(AttentionKernels, attention_bf16)
TF_KERNEL_TABLE(AttentionKernels, attention_f32)

/// Throws std::invalid_argument unless rows and lists fit the call and its pages.
void check(const Attention& call);

/// All of it in one job of the thread pool.
void run(const Attention& call);

/// The same, for whoever has not all pages at a time: the splits of a row and KV head in ascending order, some in each
/// call, one row and head after another.
class Stepwise {
  public:
    /// `call` and its pages must outlive this.
    explicit Stepwise(const Attention& call);
    ~Stepwise();
    void run(int64_t b, int g, int64_t first, int64_t last);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace triforce
