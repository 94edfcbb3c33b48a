// Attention of a row's new tokens to the pages that they search for, among too many pages to read all.
//
// The search reads sketches of the keys (pages.hpp), 1 bit a channel, and picks the pages whose keys are nearest by
// this estimate. The picks depend on all of the row's queries in the pass, so only tiers whose tokens are verified
// search.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.hpp"

namespace triforce {

/// Each KV head picks `picks[b]` of the pages [first[b], last[b]) of row b's list. Its queries do not see the other
/// pages of this range.
struct Search {
    std::vector<int64_t> first, last, picks;
};

struct SearchKernels {
    /// Writes the sketch of a page.
    void (*sketch)(const Pages& pages, int head, int64_t page);
    /// Writes a query (dim) of the pages' type, rotated as keys are, as dim codes, each repeated 16 times. Returns
    /// their scale.
    float (*encode)(const Pages& pages, const void* q, int16_t* codes);
    /// Writes scores (queries, stride) of the `count` pages of `list`: estimates of the largest product of a query with
    /// a key of the page.
    void (*score)(const Pages& pages, int head, const int32_t* list, int64_t count, const int16_t* codes,
                  const float* scales, int64_t queries, float* scores, int64_t stride);
};
TF_KERNEL_TABLE(SearchKernels, search_bf16)
TF_KERNEL_TABLE(SearchKernels, search_f32)
TF_KERNEL_TABLE(SearchKernels, search_codes_bf16)
TF_KERNEL_TABLE(SearchKernels, search_codes_f32)

/// Throws std::invalid_argument unless the search fits the call, which has been checked.
void check(const Search& search, const Attention& call);

/// Searches, then attends to the picked pages. The KV heads of a row share a list in `call` (head_stride 0), which has
/// neither mass nor sinks nor a window.
void search_and_attend(const Search& search, const Attention& call);

}  // namespace triforce
