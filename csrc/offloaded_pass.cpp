#include "offloaded_pass.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace triforce {

OffloadedPass::OffloadedPass(Offload& memory, const Attention* first, const Attention* last, bool past_committed,
                             int64_t keep)
    : memory_(memory), past_committed_(past_committed), keep_(keep) {
    std::copy_if(first, last, std::back_inserter(calls_),
                 [&](const Attention& call) { return call.pages->offload == &memory; });
}

void OffloadedPass::start() {
    memory_.check_store();
    for (const Attention& call : calls_) {
        if (past_committed_) commit(call);
        make_writable(call);
    }
    plan_reads();
    if (steps_.empty()) return;
    std::vector<BufferReads> reads;
    for (ReadStep& step : steps_) reads.push_back(std::move(step.reads));
    const Offload::Arena& arena = memory_.arena_;
    const Buffers buffers{memory_.frame(arena.frames), arena.buffer_frames * memory_.page_bytes(), arena.buffers};
    reader_ = std::make_unique<Reader>(*memory_.store_, buffers, std::move(reads));
    reader_->start();
}

/// Sets the pages and reads of a step for its splits.
void OffloadedPass::fill(const Attention& call, ReadStep& step) const {
    const FrameTable& frames = memory_.frames_;
    const int64_t bytes = memory_.page_bytes();
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
            step.reads.push_back(memory_.read_of(id, 1));
            step.reads.back().to = to;
        }
        StoreRead& read = step.reads.back();
        read.needed = memory_.offset(id + 1) - read.at;
        read.bytes = round_up(read.needed, memory_.store_->alignment());
        step.pages.push_back({page, (read.to + memory_.offset(id) - read.at) / bytes});
        next = id + 1;
    }
}

void OffloadedPass::plan_row(const Attention& call, int64_t b, int g) {
    const int64_t room = memory_.arena_.buffer_frames, splits = call.splits(b);
    for (int64_t first = 0; first < splits;) {
        ReadStep step{b, g, first, std::min(splits, first + room / split_pages), {}, {}};
        fill(call, step);
        while (!step.reads.empty() && step.reads.back().end() > room * memory_.page_bytes())
            step.last_split--, fill(call, step);
        first = step.last_split;
        steps_.push_back(std::move(step));
    }
}

/// Whether all pages that the call's queries see have frames.
bool OffloadedPass::all_resident(const Attention& call) const {
    const FrameTable& frames = memory_.frames_;
    for (int64_t b = 0; b < call.rows; b++)
        for (int64_t i = 0, n = call.visible_pages(b); i < n; i++)
            for (int g = 0; g < call.pages->heads; g++)
                if (!frames.frame(frames.id(call.pages->layer, g, call.list(b, g)[i]))) return false;
    return true;
}

/// Plans the reads of layers whose pages are not all resident. Layers with a list for each KV head are left out: their
/// lists are short, and `attend` fetches the pages into frames. Throws OffloadError if a page is lost.
void OffloadedPass::plan_reads() {
    streamed_.resize(memory_.layers());
    const auto missing = [&](const Attention& call) { return !call.head_stride && !all_resident(call); };
    if (std::none_of(calls_.begin(), calls_.end(), missing)) return;
    for (const Attention& call : calls_) {
        // If one layer is read ahead, the others are read ahead, too: pages that it keeps may evict their pages.
        // Preferred layers whose pages are all resident keep them.
        if (call.head_stride || (memory_.frames_.preferred(call.pages->layer) && !missing(call))) continue;
        streamed_[call.pages->layer] = true;
        for (int g = 0; g < call.pages->heads; g++)
            for (int64_t b = 0; b < call.rows; b++)
                if (call.counts[b]) plan_row(call, b, g);
    }
}

void OffloadedPass::commit(const Attention& call) {
    const FrameTable& frames = memory_.frames_;
    for (int64_t b = 0; b < call.rows; b++) {
        std::vector<int64_t> pages;
        for (int64_t i = 0; call.counts[b] && i < call.starts[b] / page_size; i++)
            if (frames.dirty(frames.id(call.pages->layer, 0, call.list(b, 0)[i]))) pages.push_back(call.list(b, 0)[i]);
        memory_.commit(call.pages->layer, std::move(pages));
    }
}

void OffloadedPass::make_writable(const Attention& call) {
    for (int64_t b = 0; b < call.rows; b++) {
        const int64_t end = call.starts[b] + call.counts[b];
        for (int64_t key = call.starts[b]; key < end; key = (key / page_size + 1) * page_size)
            memory_.make_writable(call.pages->layer, call.list(b, 0)[key / page_size], key % page_size == 0);
    }
}

void OffloadedPass::attend(const Attention& call) {
    if (streamed_[call.pages->layer]) return stream(call);
    if (call.head_stride || !all_resident(call)) fetch_now(call);
    triforce::attend(call);
}

void OffloadedPass::fetch_now(const Attention& call) {
    std::vector<int64_t> ids;
    for (int64_t b = 0; b < call.rows; b++)
        for (int g = 0; g < call.pages->heads; g++)
            for (int64_t i = 0, n = call.visible_pages(b); i < n; i++)
                ids.push_back(memory_.frames_.id(call.pages->layer, g, call.list(b, g)[i]));
    memory_.fetch(ids);
}

void OffloadedPass::stream(Attention call) {
    std::vector<int32_t> frames(memory_.shape_.heads * memory_.shape_.pages);
    Pages pages = *call.pages;
    pages.frames = frames.data();
    call.pages = &pages;
    IncrementalAttention attention(call);
    for (int g = 0; g < pages.heads; g++)
        for (int64_t b = 0; b < call.rows; b++)
            if (call.counts[b]) stream_row(call, attention, frames, b, g);
}

/// Attends step by step, as buffers fill. frames (G, pages): where each page of the layer lies, in a frame or a buffer.
void OffloadedPass::stream_row(const Attention& call, IncrementalAttention& attention, std::vector<int32_t>& frames,
                               int64_t b, int g) {
    const Pages& pages = *call.pages;
    const Offload::Arena& arena = memory_.arena_;
    const FrameTable& resident = memory_.frames_;
    for (int64_t i = 0, n = call.visible_pages(b); i < n; i++)
        frames[pages.index(g, call.list(b, g)[i])] = resident.frame(resident.id(pages.layer, g, call.list(b, g)[i]));
    size_t oldest = next_step_;  // first step whose buffer is not released
    for (const int64_t splits = call.splits(b); next_step_ < steps_.size(); next_step_++) {
        const ReadStep& step = steps_[next_step_];
        if (next_step_ - oldest + 2 > static_cast<size_t>(arena.buffers)) {  // the reader needs a free buffer
            for (const auto& [page, offset] : steps_[oldest].pages) frames[pages.index(g, page)] = 0;
            reader_->release(++oldest);
        }
        const int64_t buffer = arena.frames + reader_->wait(next_step_) * arena.buffer_frames;
        for (const auto& [page, offset] : step.pages)
            frames[pages.index(g, page)] = static_cast<int32_t>(buffer + offset);
        memory_.page_counts_.read_ahead += static_cast<int64_t>(step.pages.size());
        attention.attend(b, g, step.first_split, step.last_split);
        if (resident.preferred(pages.layer)) keep_all(step, pages.layer, buffer);
        if (step.last_split == splits) break;
    }
    next_step_++;
    if (call.mass && keep_ && !resident.preferred(pages.layer)) keep_best(call, b, g, frames);
    reader_->release(next_step_);
}

/// Keeps a step's pages of a preferred layer in memory.
void OffloadedPass::keep_all(const ReadStep& step, int layer, int64_t buffer) {
    const FrameTable& frames = memory_.frames_;
    for (const auto& [page, offset] : step.pages) {
        const int64_t id = frames.id(layer, step.g, page);
        if (!frames.frame(id) && frames.available_to_preferred()) keep(id, buffer + offset);
    }
}

/// Keeps the pages of most attention mass in memory, if their buffers still have them.
void OffloadedPass::keep_best(const Attention& call, int64_t b, int g, const std::vector<int32_t>& frames) {
    FrameTable& resident = memory_.frames_;
    const int64_t full = call.starts[b] / page_size, count = std::min(full, keep_);
    const float* mass = call.mass + (b * call.pages->heads + g) * call.list_length;
    std::vector<int64_t> best(full);
    for (int64_t i = 0; i < full; i++) best[i] = i;
    std::nth_element(best.begin(), best.begin() + count, best.end(),
                     [&](int64_t a, int64_t b) { return mass[a] > mass[b]; });
    best.resize(count);
    best.push_back(0);  // the sinks
    for (const bool touching : {true, false})  // resident pages are touched first, so that none of them is evicted
        for (const int64_t i : best) {
            const int32_t page = call.list(b, g)[i], frame = frames[call.pages->index(g, page)];
            const int64_t id = resident.id(call.pages->layer, g, page);
            if (touching)
                resident.touch(id);
            else if (frame && !resident.frame(id) && resident.available())
                keep(id, frame);
        }
}

/// Copies a page from a buffer's frame to a frame of its own.
void OffloadedPass::keep(int64_t id, int64_t frame) {
    std::memcpy(memory_.frame(memory_.frames_.take(id)), memory_.frame(frame), memory_.page_bytes());
    memory_.page_counts_.kept++;
}

}  // namespace triforce
