#include "offload.hpp"

#include <algorithm>
#include <cstring>

#include "attention.hpp"
#include "write.hpp"

namespace triforce {
namespace {

constexpr int64_t batch = 64;  // pages of one read on demand; tokens that are copied together

int64_t round_down(int64_t n, int64_t to) { return n / to * to; }

/// Calls body(first, count) for each run of consecutive numbers.
template <class Body>
void each_run(const std::vector<int64_t>& numbers, Body body) {
    for (size_t i = 0, end; i < numbers.size(); i = end) {
        for (end = i + 1; end < numbers.size() && numbers[end] == numbers[end - 1] + 1;) end++;
        body(numbers[i], static_cast<int64_t>(end - i));
    }
}

/// Calls body(page, fresh) for each page of `slots`, which are in order. fresh: whether the page's first slot is
/// among them.
template <class Body>
void each_page(const int64_t* slots, int64_t count, Body body) {
    for (int64_t i = 0; i < count; i++)
        if (i == 0 || slots[i] / page_size != slots[i - 1] / page_size)
            body(slots[i] / page_size, slots[i] % page_size == 0);
}

}  // namespace

Offload::Offload(const Shape& shape, const Arena& arena, std::shared_ptr<Store> store)
    : shape_(shape), arena_(arena), store_(std::move(store)),
      frames_(shape.layers, shape.heads, shape.pages, arena.frames) {
    for (int i = 0; i < shape.layers; i++) {
        Pages pages{shape.type, shape.heads, shape.dim, shape.pages, arena.data, nullptr, {}, {}, 0};
        pages.coded = shape.coded, pages.hadamard = shape.hadamard, pages.score_cap = shape.score_cap;
        if (shape.attention_sink_logits)
            pages.attention_sink_logits = shape.attention_sink_logits + i * shape.query_heads;
        pages.query_heads = shape.query_heads;
        pages.pitch = pages.page_bytes();
        pages.values = arena.data + pages.part_bytes();
        pages.frames = frames_.of_layer(i), pages.offload = this, pages.layer = i;
        layers_.push_back(pages);
    }
    const int64_t read_unit = std::max(page_bytes(), store_->alignment());
    require(read_unit % page_bytes() == 0 && read_unit % store_->alignment() == 0,
            "direct reads need pages that are whole sectors, or equal parts of one");
    require(arena.buffer_frames * page_bytes() >= split_pages * read_unit && arena.buffers > 1,
            "there must be two buffers or more, each for a split");
    landing_.resize((batch + 2) * read_unit + sector);
}

StoreRead Offload::read_of(int64_t id, int64_t pages) const {
    const int64_t first = round_down(offset(id), store_->alignment()), end = offset(id + pages);
    return {first, round_up(end, store_->alignment()) - first, end - first, 0};
}

void Offload::reserve(const std::vector<int64_t>& pages) {
    check_store();
    for (int i = 0; i < shape_.layers * shape_.heads; i++)
        each_run(pages, [&](int64_t first, int64_t count) {
            store_->reserve(offset(i * shape_.pages + first), count * page_bytes());
        });
}

void Offload::forget(const std::vector<int64_t>& pages) {
    for (int i = 0; i < shape_.layers * shape_.heads; i++)
        for (int64_t page : pages) frames_.forget(i * shape_.pages + page);
}

/// Restores a truncated file. Then only pages in frames have content.
void Offload::check_store() {
    if (!store_->restore_size()) return;
    for (int64_t id = 0; id < int64_t{shape_.layers} * shape_.heads * shape_.pages; id++) frames_.mark_unstored(id);
}

void Offload::throw_lost() { throw OffloadError("KV of this text is lost: its file was cut; ask again"); }

/// Gives frames to a page before it is written to. fresh: whether it is written from its first token on, so that its
/// content is not read from the store.
void Offload::make_writable(int layer, int64_t page, bool fresh) {
    for (int head = 0; head < shape_.heads; head++) {
        const int64_t id = frames_.id(layer, head, page);
        if (!fresh && frames_.stored(id) && !frames_.frame(id)) fetch_run(id, 1);
        frames_.mark_unstored(id);
        if (!frames_.frame(id)) frames_.take(id);
    }
}

void Offload::commit(int layer, std::vector<int64_t> pages) {
    const auto is_stored = [&](int64_t page) { return !frames_.dirty(frames_.id(layer, 0, page)); };
    pages.erase(std::remove_if(pages.begin(), pages.end(), is_stored), pages.end());
    std::vector<const char*> from;
    for (int head = shape_.heads - 1; head >= 0; head--)
        each_run(pages, [&](int64_t first, int64_t count) {
            const int64_t id = frames_.id(layer, head, first);
            from.clear();
            for (int64_t i = 0; i < count; i++) from.push_back(frame(frames_.frame(id + i)));
            store_->write(offset(id), from, page_bytes());
            for (int64_t i = 0; i < count; i++) frames_.mark_stored(id + i);
        });
}

/// Brings pages into frames. Pages that already have a frame count as used now.
void Offload::fetch(const std::vector<int64_t>& ids) {
    std::vector<int64_t> missing;
    int64_t clean = 0;
    for (int64_t id : ids) {  // pages with a frame are touched first, so that none of them is evicted
        frames_.frame(id) ? frames_.touch(id) : missing.push_back(id);
        clean += !frames_.dirty(id);
    }
    if (missing.empty()) return;
    if (clean > frames_.available())
        throw OffloadError("--kv-memory has no room for what the retrieval tier reads; give more of it, or a smaller "
                           "--retrieval-budget");
    each_run(missing, [&](int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; i += batch) fetch_run(first + i, std::min(batch, count - i));
    });
}

void Offload::fetch_run(int64_t id, int64_t pages) {
    const StoreRead read = read_of(id, pages);
    char* landing = reinterpret_cast<char*>(round_up(reinterpret_cast<intptr_t>(landing_.data()), sector));
    store_->read(read.at, read.bytes, read.needed, landing);
    for (int64_t i = 0; i < pages; i++)
        if (!frames_.frame(id + i)) {
            if (!frames_.stored(id + i)) throw_lost();
            std::memcpy(frame(frames_.take(id + i)), landing + offset(id + i) - read.at, page_bytes());
        }
    page_counts_.read_on_demand += pages;
}

void Offload::read(int layer, const int64_t* slots, int64_t count, void* k, void* v) {
    const int64_t token = shape_.heads * layers_[0].row_bytes();
    for (int64_t i = 0; i < count; i += batch) {
        const int64_t n = std::min(batch, count - i);
        std::vector<int64_t> ids;
        for (int head = 0; head < shape_.heads; head++)
            each_page(slots + i, n, [&](int64_t page, bool) { ids.push_back(frames_.id(layer, head, page)); });
        fetch(ids);
        triforce::read(layers_[layer], slots + i, n, static_cast<char*>(k) + i * token,
                       static_cast<char*>(v) + i * token);
    }
}

void Offload::write(int layer, const int64_t* slots, int64_t count, const void* k, const void* v) {
    const int64_t token = shape_.heads * layers_[0].row_bytes();
    for (int64_t i = 0; i < count; i += batch) {
        const int64_t n = std::min(batch, count - i);
        each_page(slots + i, n, [&](int64_t page, bool fresh) {
            if (page) make_writable(layer, page, fresh);
        });
        triforce::write(layers_[layer], slots + i, n, static_cast<const char*>(k) + i * token,
                        static_cast<const char*>(v) + i * token);
        std::vector<int64_t> full;
        for (int64_t s = i; s < i + n; s++)
            if (slots[s] % page_size == page_size - 1 && slots[s] >= page_size) full.push_back(slots[s] / page_size);
        commit(layer, full);
    }
}

}  // namespace triforce
