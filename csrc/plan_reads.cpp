#include "plan_reads.hpp"

#include <algorithm>

namespace triforce {
namespace {

/// Sets the pages and reads of a step for its splits.
void fill(const Offload& memory, const Attention& call, ReadStep& step) {
    const FrameTable& frames = memory.frames();
    const int64_t bytes = memory.page_bytes(), alignment = memory.store().alignment();
    const int64_t end = std::min(step.last_split * split_pages, call.visible_pages(step.b));
    step.pages.clear(), step.reads.clear();
    int64_t next = -1;
    for (int64_t i = step.first_split * split_pages; i < end; i++) {
        const int32_t page = call.list(step.b, step.g)[i];
        const int64_t id = frames.id(call.pages->layer, step.g, page);
        if (!frames.stored(id) && !frames.frame(id)) Offload::throw_lost();
        if (!frames.stored(id)) continue;
        if (id != next) {
            const int64_t to = step.reads.empty() ? 0 : step.reads.back().end();
            step.reads.push_back(memory.read_of(id, 1));
            step.reads.back().to = to;
        }
        StoreRead& read = step.reads.back();
        read.needed = memory.offset(id + 1) - read.at;
        read.bytes = (read.needed + alignment - 1) / alignment * alignment;
        step.pages.push_back({page, (read.to + memory.offset(id) - read.at) / bytes});
        next = id + 1;
    }
}

void plan_row(const Offload& memory, const Attention& call, int64_t b, int g, std::vector<ReadStep>& steps) {
    const Offload::Arena& arena = memory.arena();
    const int64_t bytes = arena.buffer_frames * memory.page_bytes(), splits = call.splits(b);
    for (int64_t first = 0; first < splits;) {
        ReadStep step{b, g, first, std::min(splits, first + arena.buffer_frames / split_pages), {}, {}};
        fill(memory, call, step);
        while (!step.reads.empty() && step.reads.back().end() > bytes) step.last_split--, fill(memory, call, step);
        first = step.last_split;
        steps.push_back(std::move(step));
    }
}

}  // namespace

bool all_resident(const Offload& memory, const Attention& call) {
    const FrameTable& frames = memory.frames();
    for (int64_t b = 0; b < call.rows; b++)
        for (int64_t i = 0, n = call.visible_pages(b); i < n; i++)
            for (int g = 0; g < call.pages->heads; g++)
                if (!frames.frame(frames.id(call.pages->layer, g, call.list(b, g)[i]))) return false;
    return true;
}

ReadPlan plan_reads(const Offload& memory, const AttentionCalls& calls) {
    ReadPlan plan{std::vector<bool>(memory.layers()), {}};
    const auto missing = [&](const Attention& call) { return !call.head_stride && !all_resident(memory, call); };
    if (std::none_of(calls.begin(), calls.end(), missing)) return plan;
    for (const Attention& call : calls) {
        // If one layer is read ahead, so are the others: pages that it keeps may evict theirs. Preferred layers keep
        // theirs.
        if (call.head_stride || (memory.frames().preferred(call.pages->layer) && !missing(call))) continue;
        plan.streamed[call.pages->layer] = true;
        for (int g = 0; g < call.pages->heads; g++)
            for (int64_t b = 0; b < call.rows; b++)
                if (call.counts[b]) plan_row(memory, call, b, g, plan.steps);
    }
    return plan;
}

}  // namespace triforce
