#include <algorithm>
#include <cstring>

#include "offload.hpp"

namespace triforce {
namespace {

/// Pages of a row that are seen.
int64_t seen_pages(const Attention& call, int64_t b) {
    return call.counts[b] ? (call.starts[b] + call.counts[b] - 1) / page_size + 1 : 0;
}

}  // namespace

OffloadedPass::OffloadedPass(Offload& memory, const Attention* first, const Attention* last, const How& how)
    : memory_(memory), how_(how), streams_(memory.shape_.layers) {
    std::vector<Piece> pieces;
    memory.check_store();
    for (const Attention* call = first; call < last; call++) {
        if (how.exact) commit(*call);
        own(*call);
    }
    // Lists of each head's own are short, and what they hold stays: they are never read ahead. Of the others none is left
    // out where one is read, as what it has in frames would go meanwhile; but for layers in favour, whose frames do not.
    const auto missing = [&](const Attention& call) { return !call.head_stride && !all_there(call); };
    const bool short_of_frames = std::any_of(first, last, missing);
    for (const Attention* call = first; short_of_frames && call < last; call++)
        if (!call->head_stride && (!memory.frames_.favoured(call->pages->layer) || missing(*call)))
            streams_[call->pages->layer] = true, plan(*call, pieces);
    const int64_t bytes = memory.room_.buffer_frames * memory.page_bytes();
    if (!pieces.empty())
        reader_ = std::make_unique<Reader>(
            *memory.store_, Buffers{memory.frame(memory.room_.frames), bytes, memory.room_.buffers}, std::move(pieces));
}

void OffloadedPass::commit(const Attention& call) {
    const Frames& frames = memory_.frames_;
    for (int64_t b = 0; b < call.rows; b++) {
        std::vector<int64_t> pages;
        for (int64_t i = 0; call.counts[b] && i < call.starts[b] / page_size; i++)
            if (frames.dirty(frames.id(call.pages->layer, 0, call.list(b, 0)[i]))) pages.push_back(call.list(b, 0)[i]);
        memory_.commit(call.pages->layer, std::move(pages));
    }
}

void OffloadedPass::own(const Attention& call) {
    for (int64_t b = 0; b < call.rows; b++)
        for (int64_t key = call.starts[b], end = key + call.counts[b]; key < end; key = (key / page_size + 1) * page_size)
            memory_.own(call.pages->layer, call.list(b, 0)[key / page_size], key % page_size == 0);
}

bool OffloadedPass::all_there(const Attention& call) const {
    for (int64_t b = 0; b < call.rows; b++)
        for (int64_t i = 0, n = seen_pages(call, b); i < n; i++)
            for (int g = 0; g < call.pages->heads; g++)
                if (!memory_.frames_.frame(memory_.frames_.id(call.pages->layer, g, call.list(b, g)[i]))) return false;
    return true;
}

void OffloadedPass::plan(const Attention& call, std::vector<Piece>& pieces) {
    for (int g = 0; g < call.pages->heads; g++)
        for (int64_t b = 0; b < call.rows; b++)
            if (call.counts[b]) plan(call, b, g, pieces);
}

void OffloadedPass::plan(const Attention& call, int64_t b, int g, std::vector<Piece>& pieces) {
    const int64_t bytes = memory_.room_.buffer_frames * memory_.page_bytes(), splits = call.splits(b);
    for (int64_t first = 0; first < splits;) {
        Part part{b, g, first, std::min(splits, first + memory_.room_.buffer_frames / split_pages), {}};
        Piece piece = pack(call, part);
        while (!piece.empty() && piece.back().offset + piece.back().bytes > bytes) part.last--, piece = pack(call, part);
        first = part.last;
        parts_.push_back(std::move(part));
        pieces.push_back(std::move(piece));
    }
}

/// What is to be read for the splits of a part, and where its pages will be.
Piece OffloadedPass::pack(const Attention& call, Part& part) const {
    const Frames& frames = memory_.frames_;
    const int64_t end = std::min(part.last * split_pages, seen_pages(call, part.b)), bytes = memory_.page_bytes();
    const int64_t alignment = memory_.store_->alignment();
    Piece piece;
    part.pages.clear();
    int64_t next = -1;
    for (int64_t i = part.first * split_pages; i < end; i++) {
        const int32_t page = call.list(part.b, part.g)[i];
        const int64_t id = frames.id(call.pages->layer, part.g, page);
        if (!frames.stored(id) && !frames.frame(id)) memory_.lost();
        if (!frames.stored(id)) continue;
        if (id != next) {
            const int64_t offset = piece.empty() ? 0 : piece.back().offset + piece.back().bytes;
            piece.push_back(memory_.run_of(id, 1));
            piece.back().offset = offset;
        }
        Run& run = piece.back();
        run.needed = memory_.place(id + 1) - run.at, run.bytes = (run.needed + alignment - 1) / alignment * alignment;
        part.pages.push_back({page, (run.offset + memory_.place(id) - run.at) / bytes});
        next = id + 1;
    }
    return piece;
}

void OffloadedPass::attend(const Attention& call) {
    if (streams_[call.pages->layer]) return stream(call);
    if (call.head_stride || !all_there(call)) hold(call);
    run(call);
}

void OffloadedPass::hold(const Attention& call) {
    std::vector<int64_t> ids;
    for (int64_t b = 0; b < call.rows; b++)
        for (int g = 0; g < call.pages->heads; g++)
            for (int64_t i = 0, n = seen_pages(call, b); i < n; i++)
                ids.push_back(memory_.frames_.id(call.pages->layer, g, call.list(b, g)[i]));
    memory_.fetch(ids);
}

void OffloadedPass::stream(Attention call) {
    std::vector<int32_t> table(memory_.shape_.heads * memory_.shape_.pages);
    Pages pages = *call.pages;
    pages.frames = table.data();
    call.pages = &pages;
    Stepwise steps(call);
    for (int g = 0; g < pages.heads; g++)
        for (int64_t b = 0; b < call.rows; b++)
            if (call.counts[b]) stream(call, steps, table, b, g);
}

void OffloadedPass::stream(const Attention& call, Stepwise& steps, std::vector<int32_t>& table, int64_t b, int g) {
    const Pages& pages = *call.pages;
    const Frames& frames = memory_.frames_;
    for (int64_t i = 0, n = seen_pages(call, b); i < n; i++)
        table[pages.index(g, call.list(b, g)[i])] = frames.frame(frames.id(pages.layer, g, call.list(b, g)[i]));
    size_t held = next_;
    for (const int64_t splits = call.splits(b); next_ < parts_.size(); next_++) {
        const Part& part = parts_[next_];
        if (next_ - held + 2 > static_cast<size_t>(memory_.room_.buffers)) {  // the reader needs room to go on
            for (const auto& [page, offset] : parts_[held].pages) table[pages.index(g, page)] = 0;
            reader_->release(++held);
        }
        const int64_t buffer = memory_.room_.frames + reader_->wait(next_) * memory_.room_.buffer_frames;
        for (const auto& [page, offset] : part.pages)
            table[pages.index(g, page)] = static_cast<int32_t>(buffer + offset);
        memory_.seen_.streamed += static_cast<int64_t>(part.pages.size());
        steps.run(b, g, part.first, part.last);
        if (frames.favoured(pages.layer)) keep_all(part, pages.layer, buffer);
        if (part.last == splits) break;
    }
    next_++;
    if (call.mass && how_.keep && !frames.favoured(pages.layer)) keep_best(call, b, g, table);
    reader_->release(next_);
}

/// A layer in favour becomes whole.
void OffloadedPass::keep_all(const Part& part, int layer, int64_t buffer) {
    Frames& frames = memory_.frames_;
    for (const auto& [page, offset] : part.pages) {
        const int64_t id = frames.id(layer, part.g, page);
        if (!frames.frame(id) && frames.to_be_had_by_favoured()) copy(id, buffer + offset);
    }
}

void OffloadedPass::copy(int64_t id, int64_t at) {
    std::memcpy(memory_.frame(memory_.frames_.take(id)), memory_.frame(at), memory_.page_bytes());
    memory_.seen_.kept++;
}

/// What the pass has looked at most stays, while it is in the buffers anyway.
void OffloadedPass::keep_best(const Attention& call, int64_t b, int g, const std::vector<int32_t>& table) {
    Frames& frames = memory_.frames_;
    const int64_t full = call.starts[b] / page_size, keep = std::min(full, how_.keep);
    const float* mass = call.mass + (b * call.pages->heads + g) * call.list_length;
    std::vector<int64_t> order(full);
    for (int64_t i = 0; i < full; i++) order[i] = i;
    std::nth_element(order.begin(), order.begin() + keep, order.end(),
                     [&](int64_t a, int64_t b) { return mass[a] > mass[b]; });
    order.resize(keep);
    order.push_back(0);  // the sinks
    for (const bool there : {true, false})  // those that are there first, so that none of them goes
        for (const int64_t i : order) {
            const int32_t page = call.list(b, g)[i], at = table[call.pages->index(g, page)];
            const int64_t id = frames.id(call.pages->layer, g, page);
            if (there)
                frames.touch(id);
            else if (at && !frames.frame(id) && frames.to_be_had())
                copy(id, at);
        }
}

}  // namespace triforce
