// Attention in which a row's new tokens look for the pages that they need, among many that they have no time to read.
//
// They read sketches of the keys (pages.hpp), 1 bit a channel, and take the pages that seem to have the nearest ones. An
// estimate, which depends on all of the row's queries in the pass: so this is for tiers whose tokens are verified.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.hpp"

namespace triforce {

/// Of the pages [first[b], last[b]) of row b's list each KV head picks `picks[b]`, and its queries do not see the rest.
struct Search {
    std::vector<int64_t> first, last, picks;
};

struct SearchKernels {
    void (*sketch)(const Pages& pages, int head, int64_t page);
    /// A query (dim) of the pages' type, turned as keys are, as dim times 16 equal words; the unit that they count.
    float (*turn)(const Pages& pages, const void* q, int16_t* words);
    /// scores (queries, stride): estimates of the largest product of a query with one of a page's keys.
    void (*score)(const Pages& pages, int head, const int32_t* list, int64_t count, const int16_t* words,
                  const float* units, int64_t queries, float* scores, int64_t stride);
};
TF_KERNEL_TABLE(SearchKernels, search_bf16)
TF_KERNEL_TABLE(SearchKernels, search_f32)

/// Throws std::invalid_argument unless the search fits the call, which has been checked.
void check(const Search& search, const Attention& call);

/// `call`, whose lists are of whole rows (head_stride 0), without mass, sinks or window.
void run(const Search& search, const Attention& call);

}  // namespace triforce
