#include "offload.hpp"

#include <algorithm>
#include <cstring>

namespace triforce {
namespace {

constexpr int64_t at_once = 64;  // pages that are fetched, read or put together

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
        Pages pages{shape.is_bf16, shape.heads, shape.dim, shape.pages, room.data, nullptr, {}, {}, 0};
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

void Offload::lost() { throw OffloadError("KV of this text is lost: its file was cut; ask again"); }

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

}  // namespace triforce
