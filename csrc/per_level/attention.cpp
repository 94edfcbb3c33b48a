#include "../attention.hpp"

#include "int8_block.hpp"
#include "key_edge.hpp"

namespace triforce::TF_LEVEL {
namespace {

// Lists of so many splits are taken to be in the caches since the pass before, longer ones to come from memory.
constexpr int64_t splits_in_cache = 4;

template <class T>
const T* query(const Attention& call, const void* q, const Queries& queries, int i) {
    const int64_t at = queries.first + i, t = at / call.group(), head = queries.g * call.group() + at % call.group();
    return static_cast<const T*>(q) + ((queries.b * call.width + t) * call.heads + head) * call.pages->dim;
}

/// The place of query i among the keys.
int64_t place(const Attention& call, const Queries& queries, int i) {
    return call.starts[queries.b] + (queries.first + i) / call.group();
}

int64_t earlier(int64_t a, int64_t b) { return a < b ? a : b; }
int within_page(int64_t token) { return static_cast<int>(token < 0 ? 0 : token > page_size ? page_size : token); }

/// Queries in the order in which a tile reads them.
template <class T>
void pack(const Attention& call, const void* q, const Queries& queries, int first, int height, uint32_t* words) {
    for (int r = 0; r < height; r++) {
        const char* from = reinterpret_cast<const char*>(query<T>(call, q, queries, first + r));
        for (int step = 0; step < call.pages->dim / tokens_of_step<T>; step++)
            __builtin_memcpy(words + step * height + r, from + step * sizeof(uint32_t), sizeof(uint32_t));
    }
}

/// Queries rounded to int8, and their scales.
template <class T>
void pack_int8(const Attention& call, const Queries& queries, int first, int height, uint32_t* quads, float* scales) {
    const int dim = call.pages->dim;
    for (int r = 0; r < height; r++) {
        const T* from = query<T>(call, call.q, queries, first + r);
        alignas(64) int8_t rounded[largest_dim];
        scales[r] = scale_of(from, dim);
        quantise(from, dim, scales[r], rounded);
        for (int step = 0; step < dim / 4; step++)
            __builtin_memcpy(quads + step * height + r, rounded + step * 4, sizeof(uint32_t));
    }
}

template <class T>
class Scan {
  public:
    Scan(const Attention& call, const Queries& queries, int64_t split, const Partial& to, float* sums);
    void run();
    float total(int i) const { return reduce_add(load(totals_ + i * 16)); }

  private:
    // Which keys a tile's first and last query may see, in tokens of the list.
    struct Span {
        int64_t first, last;
    };

    template <class P>
    void scan(int64_t page, int64_t last);
    template <class P>
    KeyBlock<P> block_at(int64_t page, int64_t last) const;
    template <class P>
    void look_ahead(int tile, const KeyBlock<P>& next, KeyBlock<P>& block) const;
    bool sees_nothing(const Span& places, int64_t token) const;
    bool sees_all(const Span& places, int64_t token) const;
    Sights sights(int64_t place, int64_t token) const;
    int sinks(int64_t token) const;
    void attend(int tile, const KeyBlock<T>& block, int64_t page);
    void attend(int tile, const KeyBlock<int8_t>& block, int64_t page);

    const Attention& call_;
    const Queries& queries_;
    const int32_t* list_;
    int64_t first_page_, coarse_page_, last_page_;  // int8 copies are read before coarse_page_
    int tiles_;
    Tile tile_[group_queries];
    int first_[group_queries + 1];
    alignas(64) float totals_[group_queries * 16] = {};
    alignas(64) uint32_t words_[group_floats];
    alignas(64) uint32_t words_of_sinks_[group_floats];
    alignas(64) uint32_t quads_[group_floats / 4];
    float scales_[group_queries];
};

template <class T>
Scan<T>::Scan(const Attention& call, const Queries& queries, int64_t split, const Partial& to, float* sums)
    : call_(call), queries_(queries), list_(call.list(queries.b, queries.g)) {
    const int n = queries.count, dim = call.pages->dim, words = dim / tokens_of_step<T>;
    const int64_t seen = place(call, queries, n - 1) / page_size + 1;
    first_page_ = split * split_pages;
    last_page_ = earlier(first_page_ + split_pages, seen);
    coarse_page_ = earlier(call.coarse_pages(queries.b), last_page_);
    const float scale = 1.44269504f / __builtin_sqrtf(static_cast<float>(dim));
    for (int i = 0; i < n * dim; i += 16) store(to.mixed + i, zero());
    for (int i = 0; sums && i < n * split_pages; i += 16) store(sums + i, zero());
    for (int i = 0; i < n; i++) to.most[i] = nothing_seen;
    tiles_ = (n + tallest_tile - 1) / tallest_tile;
    const bool in_order = tiles_ == 1 && call.splits(queries.b) > splits_in_cache;
    for (int i = 0; i < tiles_; i++) {
        const int first = n * i / tiles_, height = n * (i + 1) / tiles_ - first;
        tile_[i] = {words_ + first * words, words_of_sinks_ + first * words, to.mixed + first * dim, to.most + first,
                    totals_ + first * 16, sums ? sums + first * split_pages : nullptr, height, dim, scale, in_order};
        first_[i] = first;
        pack<T>(call, call.q, queries, first, height, words_ + first * words);
        if (call.q_sinks) pack<T>(call, call.q_sinks, queries, first, height, words_of_sinks_ + first * words);
        if (first_page_ < coarse_page_)
            pack_int8<T>(call, queries, first, height, quads_ + first * dim / 4, scales_ + first);
    }
}

template <class T>
template <class P>
KeyBlock<P> Scan<T>::block_at(int64_t page, int64_t last) const {
    KeyBlock<P> block{};
    for (int p = 0; p < earlier(block_pages, last - page); p++) {
        block.keys[p] = call_.pages->keys_of<P>(queries_.g, list_[page + p]);
        block.values[p] = call_.pages->values_of<P>(queries_.g, list_[page + p]);
    }
    return block;
}

/// Tile i is in charge of every tiles_-th page of the next block.
template <class T>
template <class P>
void Scan<T>::look_ahead(int tile, const KeyBlock<P>& next, KeyBlock<P>& block) const {
    for (int p = 0; p < block_pages; p++) {
        const bool fetches = p % tiles_ == tile && next.keys[p];
        block.keys_ahead[p] = (fetches ? next : block).keys[p];
        block.values_ahead[p] = (fetches ? next : block).values[p];
    }
}

template <class T>
bool Scan<T>::sees_nothing(const Span& places, int64_t token) const {
    if (token > places.last) return true;
    return call_.window && token >= call_.sinks && token + block_tokens <= places.first - call_.window + 1;
}

template <class T>
bool Scan<T>::sees_all(const Span& places, int64_t token) const {
    if (token + block_tokens > places.first + 1) return false;
    return token >= call_.sinks && (!call_.window || token > places.last - call_.window);
}

template <class T>
Sights Scan<T>::sights(int64_t place, int64_t token) const {
    Sights sights{};
    for (int p = 0; p < block_pages; p++, token += page_size) {
        const bool windowed = call_.window && token >= call_.sinks;
        sights.of[p] = {windowed ? within_page(place - call_.window + 1 - token) : 0, within_page(place + 1 - token)};
    }
    return sights;
}

/// Pages of a block that meet the queries turned for sinks.
template <class T>
int Scan<T>::sinks(int64_t token) const {
    if (!call_.q_sinks || token >= call_.sinks) return 0;
    return static_cast<int>(call_.sinks - token < block_tokens ? (call_.sinks - token) / page_size : block_pages);
}

template <class T>
void Scan<T>::attend(int i, const KeyBlock<T>& block, int64_t page) {
    const Tile& tile = tile_[i];
    const int64_t token = page * page_size;
    const int in_split = static_cast<int>(page - first_page_), last = first_[i] + tile.height - 1;
    const Span places{place(call_, queries_, first_[i]), place(call_, queries_, last)};
    if (sees_nothing(places, token)) return;
    const bool whole = sees_all(places, token);
    by_height(tile.height, [&](auto rows) {
        constexpr int R = rows.count;
        if (whole) return attend_block<T, R>(tile, block, in_split);
        Sights of[R];
        for (int r = 0; r < R; r++) of[r] = sights(place(call_, queries_, first_[i] + r), token);
        attend_edge<T, R>(tile, block, of, sinks(token), in_split);
    });
}

/// All queries see the block whole: it lies before the first of them.
template <class T>
void Scan<T>::attend(int i, const KeyBlock<int8_t>& block, int64_t page) {
    const Int8Queries queries{quads_ + first_[i] * call_.pages->dim / 4, scales_ + first_[i]};
    PageScales scales[block_pages];
    for (int p = 0; p < block_pages; p++) scales[p] = call_.pages->scales_of(queries_.g, list_[page + p]);
    by_height(tile_[i].height, [&](auto rows) {
        attend_int8<rows.count>(tile_[i], queries, block, scales, static_cast<int>(page - first_page_));
    });
}

template <class T>
template <class P>
void Scan<T>::scan(int64_t page, int64_t last) {
    KeyBlock<P> block = block_at<P>(page, last);
    for (; page < last; page += block_pages) {
        const KeyBlock<P> next = block_at<P>(page + block_pages, last);
        for (int i = 0; i < tiles_; i++) {
            look_ahead(i, next, block);
            attend(i, block, page);
        }
        block = next;
    }
}

template <class T>
void Scan<T>::run() {
    scan<int8_t>(first_page_, coarse_page_);
    scan<T>(coarse_page_ > first_page_ ? coarse_page_ : first_page_, last_page_);
}

template <class T>
void scan(const Attention& call, const Queries& queries, int64_t split, const Partial& to, float* sums) {
    Scan<T> scan(call, queries, split, to, sums);
    scan.run();
    for (int i = 0; i < queries.count; i++) to.total[i] = scan.total(i);
}

F16 shrink(const Attention& call, float from, float to) {
    return exp2(set1((from - to) * (1.44269504f / __builtin_sqrtf(static_cast<float>(call.pages->dim)))));
}

void fold(const Attention& call, int count, const Partial& into, const Partial& next) {
    const int dim = call.pages->dim;
    for (int i = 0; i < count; i++) {
        if (next.total[i] == 0) continue;
        const float most = into.most[i] > next.most[i] ? into.most[i] : next.most[i];
        const F16 a = shrink(call, into.most[i], most), b = shrink(call, next.most[i], most);
        float *mixed = into.mixed + i * dim, *added = next.mixed + i * dim;
        for (int d = 0; d < dim; d += 16) store(mixed + d, fma(load(added + d), b, load(mixed + d) * a));
        store_n(into.total + i, fma(set1(next.total[i]), b, set1(into.total[i]) * a), 1);
        into.most[i] = most;
    }
}

template <class T>
void finish(const Attention& call, const Queries& queries, const Partial& all) {
    const int dim = call.pages->dim;
    for (int i = 0; i < queries.count; i++) {
        T* to = const_cast<T*>(query<T>(call, call.mixed, queries, i));
        for (int d = 0; d < dim; d += 16) store(to + d, load(all.mixed + i * dim + d) / set1(all.total[i]));
    }
}

void weigh(const Attention& call, int count, const Partial& all, const Partial& split, const float* sums, float* mass,
           int pages) {
    for (int i = 0; i < count; i++) {
        const F16 share = shrink(call, split.most[i], all.most[i]) / set1(all.total[i]);
        for (int p = 0; p < pages; p += 16)
            store_n(mass + p, fma(load(sums + i * split_pages + p), share, load_n(mass + p, pages - p)), pages - p);
    }
}

}  // namespace

const AttentionKernels attention_bf16 = {scan<bf16>, fold, finish<bf16>, weigh};
const AttentionKernels attention_f32 = {scan<float>, fold, finish<float>, weigh};

}  // namespace triforce::TF_LEVEL
