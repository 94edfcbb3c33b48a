#include "offload.hpp"

#include <algorithm>
#include <cstring>

namespace triforce {
namespace {

constexpr int64_t at_once = 64;  // pages that are fetched, read or put together

[[noreturn]] void lost() { throw OffloadError("KV of this text is lost: its file was cut; ask again"); }

int64_t down(int64_t n, int64_t to) { return n / to * to; }
int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/// Runs of numbers that follow one another: first(run) and how many.
template <class Body>
void each_run(const std::vector<int64_t>& numbers, Body body) {
    for (size_t i = 0, end; i < numbers.size(); i = end) {
        for (end = i + 1; end < numbers.size() && numbers[end] == numbers[end - 1] + 1;) end++;
        body(numbers[i], static_cast<int64_t>(end - i));
    }
}

/// The distinct pages of some slots that follow one another, and whether the first token of each is among them.
template <class Body>
void each_page(const int64_t* slots, int64_t count, Body body) {
    for (int64_t i = 0; i < count; i++)
        if (i == 0 || slots[i] / page_size != slots[i - 1] / page_size)
            body(slots[i] / page_size, slots[i] % page_size == 0);
}

}  // namespace

Offload::Offload(const Shape& shape, const Room& room, std::shared_ptr<Store> store)
    : shape_(shape), room_(room), store_(std::move(store)),
      frames_(shape.layers, shape.heads, shape.pages, room.frames) {
    for (int i = 0; i < shape.layers; i++) {
        Pages pages{shape.is_bf16, shape.heads, shape.dim, shape.pages, room.data, nullptr, {}, 0};
        pages.pitch = 2 * static_cast<int64_t>(pages.page_bytes());
        pages.values = room.data + pages.page_bytes();
        pages.frames = frames_.of_layer(i), pages.home = this, pages.layer = i;
        layers_.push_back(pages);
    }
    const int64_t wide = std::max(page_bytes(), store_->alignment());
    if (wide % page_bytes() || wide % store_->alignment())
        throw std::invalid_argument("direct reads need pages that are whole sectors, or equal parts of one");
    if (room.buffer_frames * page_bytes() < split_pages * wide || room.buffers < 2)
        throw std::invalid_argument("there must be two buffers or more, each for a split");
    landing_.resize((at_once + 2) * wide + sector);
}

Run Offload::run_of(int64_t id, int64_t pages) const {
    const int64_t first = down(place(id), store_->alignment()), end = place(id + pages);
    return {first, up(end, store_->alignment()) - first, end - first, 0};
}

void Offload::reserve(const std::vector<int64_t>& pages) {
    check_store();
    for (int i = 0; i < shape_.layers * shape_.heads; i++)
        each_run(pages, [&](int64_t first, int64_t count) {
            store_->reserve(place(i * shape_.pages + first), count * page_bytes());
        });
}

void Offload::forget(const std::vector<int64_t>& pages) {
    for (int i = 0; i < shape_.layers * shape_.heads; i++)
        for (int64_t page : pages) frames_.forget(i * shape_.pages + page);
}

/// What a cut file had is lost, but for what has a frame.
void Offload::check_store() {
    if (!store_->was_cut()) return;
    for (int64_t id = 0; id < int64_t{shape_.layers} * shape_.heads * shape_.pages; id++) frames_.spoil(id);
}

/// A page that is about to be written to. `fresh`: from its first token on, so that nothing in it counts.
void Offload::own(int layer, int64_t page, bool fresh) {
    for (int head = 0; head < shape_.heads; head++) {
        const int64_t id = frames_.id(layer, head, page);
        if (!fresh && frames_.stored(id) && !frames_.frame(id)) fetch_run(id, 1);
        frames_.spoil(id);
        if (!frames_.frame(id)) frames_.take(id);
    }
}

void Offload::commit(int layer, std::vector<int64_t> pages) {
    const auto is_clean = [&](int64_t page) { return !frames_.dirty(frames_.id(layer, 0, page)); };
    pages.erase(std::remove_if(pages.begin(), pages.end(), is_clean), pages.end());
    std::vector<const char*> from;
    for (int head = shape_.heads - 1; head >= 0; head--)
        each_run(pages, [&](int64_t first, int64_t count) {
            const int64_t id = frames_.id(layer, head, first);
            from.clear();
            for (int64_t i = 0; i < count; i++) from.push_back(frame(frames_.frame(id + i)));
            store_->write(place(id), from, page_bytes());
            for (int64_t i = 0; i < count; i++) frames_.clean(id + i);
        });
}

/// All of these get frames; those that have one count as used.
void Offload::fetch(const std::vector<int64_t>& ids) {
    std::vector<int64_t> missing;
    int64_t clean = 0;
    for (int64_t id : ids) {  // first those that are there are touched, so that none of them goes
        frames_.frame(id) ? frames_.touch(id) : missing.push_back(id);
        clean += !frames_.dirty(id);
    }
    if (missing.empty()) return;
    if (clean > frames_.to_be_had()) throw OffloadError("--kv-memory has no room for what the retrieval tier reads; give more of it, or a smaller --budget");
    each_run(missing, [&](int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; i += at_once) fetch_run(first + i, std::min(at_once, count - i));
    });
}

void Offload::fetch_run(int64_t id, int64_t pages) {
    const Run run = run_of(id, pages);
    char* landing = reinterpret_cast<char*>(up(reinterpret_cast<intptr_t>(landing_.data()), sector));
    store_->read(run.at, run.bytes, run.needed, landing);
    for (int64_t i = 0; i < pages; i++)
        if (!frames_.frame(id + i)) {
            if (!frames_.stored(id + i)) lost();
            std::memcpy(frame(frames_.take(id + i)), landing + place(id + i) - run.at, page_bytes());
        }
    seen_.fetched += pages;
}

void Offload::hold(int layer, const std::vector<int64_t>& pages) {
    std::vector<int64_t> ids;
    for (int head = 0; head < shape_.heads; head++)
        for (int64_t page : pages) ids.push_back(frames_.id(layer, head, page));
    fetch(ids);
}

void Offload::read(int layer, const int64_t* slots, int64_t count, void* k, void* v) {
    const int64_t token = shape_.heads * page_bytes() / page_size / 2;
    for (int64_t i = 0; i < count; i += at_once) {
        const int64_t n = std::min(at_once, count - i);
        std::vector<int64_t> pages;
        each_page(slots + i, n, [&](int64_t page, bool) { pages.push_back(page); });
        hold(layer, pages);
        triforce::read(layers_[layer], slots + i, n, static_cast<char*>(k) + i * token,
                       static_cast<char*>(v) + i * token);
    }
}

void Offload::put(int layer, const int64_t* slots, int64_t count, const void* k, const void* v) {
    const int64_t token = shape_.heads * page_bytes() / page_size / 2;
    for (int64_t i = 0; i < count; i += at_once) {
        const int64_t n = std::min(at_once, count - i);
        each_page(slots + i, n, [&](int64_t page, bool fresh) {
            if (page) own(layer, page, fresh);
        });
        triforce::put(layers_[layer], slots + i, n, static_cast<const char*>(k) + i * token,
                      static_cast<const char*>(v) + i * token);
        std::vector<int64_t> full;
        for (int64_t s = i; s < i + n; s++)
            if (slots[s] % page_size == page_size - 1 && slots[s] >= page_size) full.push_back(slots[s] / page_size);
        commit(layer, full);
    }
}

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
        for (int64_t key = call.starts[b], end = key + call.counts[b]; key < end; key = down(key, page_size) + page_size)
            memory_.own(call.pages->layer, call.list(b, 0)[key / page_size], key % page_size == 0);
}

/// Pages of a row that are seen.
static int64_t seen_pages(const Attention& call, int64_t b) {
    return call.counts[b] ? (call.starts[b] + call.counts[b] - 1) / page_size + 1 : 0;
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
        if (!frames.stored(id) && !frames.frame(id)) lost();
        if (!frames.stored(id)) continue;
        if (id != next) {
            const int64_t offset = piece.empty() ? 0 : piece.back().offset + piece.back().bytes;
            piece.push_back(memory_.run_of(id, 1));
            piece.back().offset = offset;
        }
        Run& run = piece.back();
        run.needed = memory_.place(id + 1) - run.at, run.bytes = up(run.needed, alignment);
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
