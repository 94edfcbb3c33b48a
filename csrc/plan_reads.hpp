// The reads that a pass over an offloaded memory makes ahead of its attention. Planning changes nothing and reads
// nothing.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "offload.hpp"

namespace triforce {

/// The attention of a pass's layers, in their order.
struct AttentionCalls {
    const Attention *first, *last;

    const Attention* begin() const { return first; }
    const Attention* end() const { return last; }
};

/// Some splits of one row and KV head, whose stored pages are read into one buffer.
struct ReadStep {
    int64_t b;
    int g;
    int64_t first_split, last_split;
    std::vector<std::pair<int32_t, int64_t>> pages;  // page, and its frame in the buffer
    BufferReads reads;
};

struct ReadPlan {
    std::vector<bool> streamed;   // of each layer of the memory: its attention reads buffers
    std::vector<ReadStep> steps;  // layers, then KV heads, then rows, then splits: the order in which they are needed
};

/// Whether all pages that the call's queries see have frames.
bool all_resident(const Offload& memory, const Attention& call);

/// Plans the reads for layers whose pages are not all resident. Lists of each head's own are short, and their pages are
/// fetched into frames instead. Throws OffloadError where a page is lost.
ReadPlan plan_reads(const Offload& memory, const AttentionCalls& calls);

}  // namespace triforce
